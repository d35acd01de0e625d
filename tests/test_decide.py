"""The table of decisions, a row a test, on turns made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk import Threshold
from contextguard_adk._core.decide import TABLE, Step, decide
from contextguard_adk._history.fingerprints import cover
from contextguard_adk._history.history import History
from contextguard_adk._history.stored import AgentRecord, StoredSummary
from contextguard_adk._measuring.budgets import plan_budgets
from contextguard_adk._runtime.memory import ReadySummary, SessionFacts
from contextguard_adk._runtime.state import AgentState
from contextguard_adk._turn.facts import ModelFacts, Size
from contextguard_adk.records import Origin
from contextguard_adk.strategies import Turn
from tests.builders import model, user

WINDOW = 10_000  # The threshold is 8,000, a summary takes 1,000, overfull is 9,700.
LONG = [user("The task."), model("word " * 6_000), user("Go on.")]  # 7,500 tokens.


def turn_of(
    tokens: int = 8_500,
    contents: list[types.Content] = LONG,
    facts: dict[str, Any] | None = None,
    config_tokens: int = 0,
    **known: Any,
) -> Turn:
    """A turn whose request takes so many tokens."""
    settings = known.pop("settings", Threshold())
    made = Turn(
        agent="agent",
        origin=Origin("agent", "session"),
        scope="",
        request=LlmRequest(contents=contents),
        history=History(contents),
        settings=settings,
        model=ModelFacts("model", None, WINDOW, WINDOW, 0),
        record=AgentRecord(),
        state=AgentState({}, "agent"),
        facts=SessionFacts(**(facts or {})),
        budgets=plan_budgets(WINDOW, trigger_tokens=known.pop("trigger", None)),
        contents=contents,
        size=Size(tokens, tokens, config_tokens, 1.0),
    )

    made = replace(made, **known)
    return replace(made, nearness=known.get("nearness", settings.fullness(made)))


LOST = ReadySummary(StoredSummary(covered=cover([b"0"])))
LATER = replace(LOST, is_ahead=True)
AHEAD = Threshold(ahead=0.5)
STORED = Threshold(summaries="stored")
OF_RUN = History(LONG)
OF_RUN.invocation_id = "run"

ROWS: list[tuple[str, Turn, Step, str]] = [
    (
        "of a later release",
        turn_of(facts={"ready": LOST}, record=AgentRecord(version=3)),
        Step.SEND,
        "a later release stores it",
    ),
    ("only watched", turn_of(is_observed=True), Step.SEND, "observes"),
    ("under way, no room", turn_of(9_800, is_writing=True), Step.WAIT, "under way"),
    (
        "under way, asked for",
        turn_of(300, is_writing=True, reason="requested"),
        Step.WAIT,
        "under way",
    ),
    ("state was lost", turn_of(300, facts={"ready": LOST}), Step.PUT_IN, "ready"),
    (
        "background, wanted",
        turn_of(facts={"ready": LATER}, is_settled=True),
        Step.PUT_IN,
        "ready",
    ),
    (
        "background, not wanted",
        turn_of(3_000, facts={"ready": LATER}),
        Step.SEND,
        "no compaction is wanted",
    ),
    (
        "background, but somebody has a focus",
        turn_of(facts={"ready": LATER}, reason="requested", focus="the plot"),
        Step.COMPACT,
        "demanded",
    ),
    (
        "settled, still asked for",
        turn_of(is_settled=True, reason="requested"),
        Step.REFUSE,
        "nothing could be compacted",
    ),
    ("settled", turn_of(is_settled=True), Step.SEND, "already tried"),
    ("under way, room", turn_of(8_100, is_writing=True), Step.SEND, "under way"),
    (
        "asked for again in the run",
        turn_of(facts={"compacted_run": "run"}, reason="requested", history=OF_RUN),
        Step.REFUSE,
        "the call before was compacted as well",
    ),
    (
        "asked for, nothing to gain",
        turn_of(30, [user("Hi.")], reason="requested"),
        Step.REFUSE,
        "nothing would be gained",
    ),
    ("small", turn_of(3_000), Step.SEND, "no compaction is wanted"),
    (
        "arrived",
        turn_of(
            3_000, facts={"ready": LOST}, history=History(LONG, stored=LOST.stored)
        ),
        Step.SEND,
        "no compaction",
    ),
    (
        "begins in the background",
        turn_of(8_100, settings=AHEAD),
        Step.SEND,
        "in the background",
    ),
    (
        "tried in the background",
        turn_of(8_100, settings=AHEAD, facts={"is_background_tried": True}),
        Step.COMPACT,
        "threshold",
    ),
    (
        "rejected, the fixed part fills the window",
        turn_of(reason="overflow", config_tokens=WINDOW),
        Step.SEND,
        "fixed part",
    ),
    ("rejected", turn_of(300, reason="overflow"), Step.COMPACT, "demanded"),
    ("asked for", turn_of(300, reason="requested"), Step.COMPACT, "demanded"),
    (
        "after a compaction",
        turn_of(facts={"compacted_run": "run", "was_full": True}),
        Step.SEND,
        "the call before",
    ),
    (
        "after a compaction, overfull",
        turn_of(9_800, facts={"compacted_run": "run", "was_full": True}),
        Step.COMPACT,
        "threshold",
    ),
    (
        "after a compaction that was asked for",
        turn_of(facts={"compacted_run": "run"}),
        Step.COMPACT,
        "threshold",
    ),
    (
        "hardly grown",
        turn_of(facts={"fruitless_tokens": 8_400}),
        Step.SEND,
        "hardly grown",
    ),
    (
        "grown",
        turn_of(facts={"fruitless_tokens": 7_000}),
        Step.COMPACT,
        "threshold",
    ),
    (
        "the strategy's own wish",
        turn_of(3_000, nearness=1.0),
        Step.COMPACT,
        "the strategy wants it",
    ),
    (
        "the strategy's own wish, but nothing is to be paid",
        turn_of(3_000, nearness=1.0, settings=STORED),
        Step.SEND,
        "only stored summaries",
    ),
    (
        "the threshold is reached, nothing is to be paid",
        turn_of(settings=STORED),
        Step.COMPACT,
        "threshold",
    ),
    (
        "nothing is to be paid in the background",
        turn_of(8_100, settings=Threshold(ahead=0.5, summaries="stored")),
        Step.COMPACT,
        "threshold",
    ),
    (
        "a trigger below twice the fixed part",
        turn_of(2_500, trigger=2_000, config_tokens=1_500),
        Step.SEND,
        "half of it",
    ),
    (
        "the fixed part is too large",
        turn_of(9_000, config_tokens=8_500),
        Step.SEND,
        "instruction and tools",
    ),
    (
        "little is new",
        turn_of(8_500, [user("word " * 300), model("Yes.")], config_tokens=4_000),
        Step.SEND,
        "little to summarize",
    ),
    ("the threshold is reached", turn_of(), Step.COMPACT, "threshold"),
]


@pytest.mark.parametrize(
    ("turn", "step", "why"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_the_first_row_that_holds_is_taken(turn: Turn, step: Step, why: str) -> None:
    """The outcome follows from the turn alone, and so does the reason."""
    row = decide(turn)
    assert (row.step, why in row.why) == (step, True), row.why


def test_every_row_of_the_table_is_tried() -> None:
    """A row that no turn reaches is either superfluous or not tested."""
    reached = {decide(turn).why for _, turn, *_ in ROWS}
    assert {row.why for row in TABLE} == reached
