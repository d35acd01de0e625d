"""Replays of sessions in which a guard was at work: previews, summaries, recalls."""

from __future__ import annotations

import asyncio
import cProfile
import functools
import io
import pstats
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from google.adk.apps.app import EventsCompactionConfig
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import Session

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk._tools.cli import main
from contextguard_adk._tools.replay import ReplaySettings, replay_guards, replay_session
from contextguard_adk._tools.replaying.compare import list_rows
from contextguard_adk.config import CONFIG_VARIABLE, PluginSettings
from contextguard_adk.testing import Reply, SimulatedLlm
from contextguard_adk.testing import call as tool_call
from contextguard_adk.testing.provider import count_request_tokens
from tests.builders import Chat, KeptSessions, guarded_agent, queued_tool
from tests.chats import slow
from tests.recordings import INSTRUCTION, save

GUARD = Threshold(context_window=8_000)
SETTINGS = ReplaySettings(PluginSettings(default=GUARD))
CALLS = 30
"""So many that the guard compacts three times."""

TEXT = "The scanner found part 7f{}a of the old press in hall B, near the gate. "
RESULTS: list[Any] = [
    TEXT.format(n) * (160 if n % 3 == 2 else 40)
    if n % 2
    else {"rows": [{"id": n * 7919 + k, "hall": "B"} for k in range(60)]}
    for n in range(12)
]


class Counting(BasePlugin):
    """Counts what the whole history takes in each request, before the guard acts."""

    def __init__(self, token_ratio: float | None) -> None:
        super().__init__(name="counting")
        self.counts: list[int] = []
        self._ratio = token_ratio

    async def before_model_callback(self, *, llm_request: LlmRequest, **_: Any) -> None:
        """Counts one."""
        self.counts.append(count_request_tokens(llm_request, self._ratio, 258))


async def record(
    calls: int, token_ratio: float | None = None, *, has_guard: bool = True
) -> tuple[Session, SimulatedLlm, list[int]]:
    """Has a conversation of that many calls; returns it with the whole counts."""
    made = 0

    def script(request: LlmRequest) -> Reply:
        nonlocal made
        made += 1
        if made % 10 == 0 or made == calls:
            return f"Part {made} is in hall B, says the scanner."
        if made % 7 == 0 and "recall_history" in request.tools_dict:
            return tool_call("recall_history", query="part hall gate")
        return tool_call("search", step=made)

    llm = SimulatedLlm(context_window=10**6, script=script, token_ratio=token_ratio)
    counting = Counting(token_ratio)
    plugins = [counting, ContextGuardPlugin(default=GUARD)][: 1 + has_guard]
    agent = guarded_agent(
        llm, [queued_tool("search", RESULTS)], instruction=INSTRUCTION
    )
    chat = Chat(agent, plugins, session_service=KeptSessions())
    while made < calls:
        await chat.say(f"Where is part {made} of the old press?")
    return await chat.session(), llm, counting.counts


@functools.cache
def record_once() -> tuple[Session, SimulatedLlm, list[int]]:
    """A guarded conversation with several compactions."""
    return asyncio.run(record(CALLS, 1.0))


@pytest.mark.parametrize("token_ratio", [*slow(None), 1.0])
def test_what_a_guard_has_cut_is_known_whole(token_ratio: float | None) -> None:
    """By each replay, and as it is played without a guard; what was sent is known."""
    if token_ratio == 1.0:
        session, llm, counts = record_once()
    else:
        session, llm, counts = asyncio.run(record(CALLS, token_ratio))
    sent = [request for request in llm.requests if not request.is_summary]
    assert llm.summaries >= 3
    assert any("recall_item" in request.text for request in sent)
    called = [c.name for event in session.events for c in event.get_function_calls()]
    assert "recall_history" in called

    # Each strategy, and one trigger of those that are compared.
    rows = [row.guard for row in list_rows(SETTINGS.guard, 8_000)][:4]
    replays = [asyncio.run(replay_session(session, SETTINGS))]
    replays += asyncio.run(replay_guards(session, SETTINGS, rows))
    for replayed in replays:
        whole = [call.whole_tokens for call in replayed.calls]
        assert whole == pytest.approx(counts, rel=0.10)
    *_, others = asyncio.run(record(CALLS, token_ratio, has_guard=False))
    assert sum(whole) == pytest.approx(sum(others), rel=0.10)

    check_errors(replays[0].calls, [request.prompt_tokens for request in sent])


def check_errors(calls: list[Any], real: list[int]) -> None:
    """What was sent is known, and what is estimated is seldom far from it."""
    assert [call.real_tokens for call in calls] == real
    errors = [abs(call.error_ratio or 0) for call in calls]
    assert statistics.median(errors) < 0.05
    assert count_large(errors) <= 0.1 * len(errors)
    ratios = [call.sent_tokens / real[n] for n, call in enumerate(calls)]
    played = [abs(ratio - 1) for ratio in ratios]
    assert count_large(played) <= 0.1 * len(played)


def count_large(errors: list[float]) -> int:
    """How many errors are larger than 15 percent."""
    return sum(error > 0.15 for error in errors)


@pytest.fixture(scope="module")
def compacted() -> Session:
    """A session with one compaction of a guard."""
    return asyncio.run(record(14, 1.0))[0]


@pytest.mark.skipif(
    EventsCompactionConfig.model_fields["compaction_interval"].is_required(),
    reason="this google-adk copies each payload for each request",
)
@pytest.mark.parametrize("command", ["replay", *slow("report")])
def test_each_payload_is_written_a_few_times_and_a_bar_shows_how_far_it_is(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    compacted: Session,
) -> None:
    """However many calls repeat it; the bar is only for a terminal."""
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    options = ["--window", "8000"]
    options += ["-o", str(tmp_path / "page.html")] if command == "report" else []
    session, *_ = record_once()
    command_line = [command, str(save(session, tmp_path)), *options]

    profile = cProfile.Profile()
    assert profile.runcall(main, command_line) == 0
    stats: dict[Any, Any] = vars(pstats.Stats(profile))["stats"]
    named = ("to_json", "iterencode", "_to_any")
    written = [s[1] for key, s in stats.items() if key[2].rstrip(">").endswith(named)]
    assert sum(written) < 15 * CALLS
    assert capsys.readouterr().err == ""

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    save(compacted, tmp_path)
    assert main(command_line) == 0
    assert "Replaying" in terminal.getvalue()


@pytest.mark.parametrize(
    ("change", "is_known"),
    [
        ({}, True),
        ({"cost": None}, False),
        ({"cost": 0.0, "usage": {}}, False),
        *(
            pytest.param(change, is_known, marks=pytest.mark.slow)
            for change, is_known in (
                ({"cost": None, "model": None}, False),
                ({"cost": 0.0, "usage": {}, "model": ""}, True),
            )
        ),
    ],
)
def test_a_cost_that_nobody_knows_is_not_zero(
    change: dict[str, Any],
    is_known: bool,
    compacted: Session,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a call that failed, or of a model without a price."""
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    session = compacted.model_copy(deep=True)
    told = [(e.custom_metadata or {}).get("context_guard", {}) for e in session.events]
    done = [facts["compaction"] for facts in told if "compaction" in facts]
    assert done

    for facts in done:
        facts.update({"cost": 0.25} | change)

    source = save(session, tmp_path)
    page = tmp_path / "page.html"
    assert main(["report", str(source), "-o", str(page)]) == 0
    parts = page.read_text("utf-8").split("<article")[1:]
    cards = [part.partition("</article")[0] for part in parts]
    assert len(cards) == len(done)
    assert all(("unknown" not in card) is is_known for card in cards)
