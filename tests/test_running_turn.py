"""What stands of a running turn: its newest steps, and a list of the others."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk import Compaction, CompactionContext, Pipeline, Threshold
from contextguard_adk._measuring.calibration import token_counter
from contextguard_adk._summarizing.running_turn import KeptSteps, write_done_list
from contextguard_adk.testing import Reply, SimulatedLlm, call
from contextguard_adk.testing.provider import list_content_texts
from tests import builders
from tests.acting import run_turn, say_nothing
from tests.chats import (
    DEMAND,
    Doing,
    agent_requests,
    guarded_chat,
    seed,
    summary_requests,
    words,
)


def made_calls(
    arguments: Sequence[dict[str, Any]], results: Sequence[Any] = ()
) -> list[types.Content]:
    """A turn of calls of one tool with their results."""
    contents = []
    for number, args in enumerate(arguments):
        made = types.FunctionCall(name="ship", args=args)
        contents.append(builders.calls(types.Part(function_call=made)))
        result = results[number] if results else "ok"
        contents.append(builders.response("ship", result))
    return contents


def write(contents: Sequence[types.Content], budget_tokens: int = sys.maxsize) -> str:
    """The list of all these calls, without its heading."""
    count = token_counter(1.0)
    text = write_done_list(contents, range(len(contents)), budget_tokens, count)
    assert count(text) <= budget_tokens
    return text.partition("\n")[2]


# --- the list of what is done ---

ORDERS = [f"ORD-{number:04}" for number in range(1, 31)]


def test_with_room_each_call_has_a_line() -> None:
    """With its arguments and what came of it; open calls have none."""
    contents = made_calls([{"order": "ORD-0001", "box": 2}], ["shipped"])
    contents.append(builders.call("ship", order="ORD-0002"))
    assert write(contents) == "- ship(order=ORD-0001, box=2) → shipped"
    assert write([]) == ""


@pytest.mark.parametrize(
    ("budget_tokens", "shown"),
    [
        (1_200, "- ship(order=ORD-0001, to=Berlin, note="),
        (900, "- ship(to=Berlin): order=ORD-0001, note="),
        (300, "- ship(order=…): ORD-0001; ORD-0002; "),
        (130, " calls before these"),
    ],
)
def test_less_room_gives_a_shorter_list(budget_tokens: int, shown: str) -> None:
    """First it is shorter lines, then one for each tool, then what tells its calls
    apart alone; at last the oldest are counted. The newest is always named."""
    arguments = [
        {"order": order, "to": "Berlin", "note": f"{words(30)} for {order}"}
        for order in ORDERS
    ]
    text = write(made_calls(arguments), budget_tokens)
    assert shown in text
    assert ORDERS[-1] in text


def test_calls_without_arguments_are_counted() -> None:
    """What a counter did shows as a number."""
    assert write(made_calls([{}] * 40), 60) == "- ship(): 40 times → each ok"


@pytest.mark.parametrize("budget_tokens", [6_000, 2_500])
def test_long_names_stay_whole(budget_tokens: int) -> None:
    """A path that is all that tells calls apart is not cut while there is room."""
    paths = [f"src/{'handlers/' * 10}{n:02}/config.yaml" for n in range(30)]
    arguments = [{"path": path, "text": words(200)} for path in paths]
    text = write(made_calls(arguments), budget_tokens)
    assert [path for path in paths if path not in text] == []


def test_names_that_are_cut_stay_different() -> None:
    """Without room they lose what all have in common, at both ends."""
    paths = [f"src/{'handlers/' * 10}{n:02}/config.yaml" for n in range(10, 40)]
    text = write(made_calls([{"path": path} for path in paths]), 250)
    assert [n for n in range(10, 40) if f"…{n}…" not in text] == []


def test_argument_within_an_argument_tells_calls_apart() -> None:
    """An identifier in the middle of a nested object is not cut out."""
    order = {"customer": {"name": "Jane Example", "notes": words(30)}}
    arguments = [
        {"order": {**order, "id": name, "note": words(30, name)}} for name in ORDERS
    ]
    text = write(made_calls(arguments), 500)
    assert [name for name in ORDERS if name not in text] == []


FAILURES = {
    "error": {"error": "no such carrier"},
    "text": "Error: no such carrier",
    "status": {"status": "error", "error_message": "no such carrier"},
    "flag": {"success": False, "message": "no such carrier"},
    "exit code": {"exit_code": 2, "stderr": "no such carrier"},
    "mcp": {"content": [{"type": "text", "text": "no carrier"}], "isError": True},
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_failed_calls_show_at_every_length(failure: Any) -> None:
    """A call that failed does not look like one that succeeded."""
    done = {"status": "ok", "success": True, "exit_code": 0, "error": None}
    done["log"] = words(40)
    contents = made_calls(
        [{"order": order} for order in ORDERS], [failure, *[done] * 29]
    )
    for budget_tokens in (5_000, 1_000, 400, 250):
        text = write(contents, budget_tokens)
        first, rest = text.split("ORD-0002", 1)
        assert re.search(r"ORD-0001\)? → .*(error|carrier)", first, re.IGNORECASE)
        assert not re.search(r"→ error", rest)


# --- with a real Runner ---


class Retrying:
    """An agent that ships every order, and at the end again what did not work."""

    def __init__(self, count: int) -> None:
        self.orders = [f"ORD-{number:04}" for number in range(1, count + 1)]
        self.tried: Counter[str] = Counter()
        self.shipped: Counter[str] = Counter()

    def ship(self, order: str) -> dict[str, Any]:
        """Ships an order; every fourth time the carrier is away at first."""
        self.tried[order] += 1
        if int(order[-4:]) % 4 == 0 and self.tried[order] == 1:
            return {"error": "the carrier is away, try again later"}
        self.shipped[order] += 1
        return {"status": "shipped", "log": words(400)}

    def reply(self, request: LlmRequest) -> Reply:
        """Ships the first order that is not named, else one whose last try failed."""
        parts = [part for item in request.contents for part in item.parts or ()]
        text = "\n".join(part.text or "" for part in parts)
        has_failed: dict[str, bool] = {}
        for said in re.findall(r"ORD-\d+\)?(?: → [^;\n]*)?", text):
            has_failed[said[:8]] = "error" in said
        order = ""
        for part in parts:
            if part.function_call:
                order = (part.function_call.args or {})["order"]
            if part.function_response:
                has_failed[order] = "error" in (part.function_response.response or {})
        waiting = [order for order in self.orders if order not in has_failed]
        waiting += [order for order, failed in has_failed.items() if failed]
        return call("ship", order=waiting[0]) if waiting else "All done."


@pytest.mark.parametrize("kind", [Threshold, Pipeline])
async def test_failed_calls_are_tried_again(kind: type[Threshold | Pipeline]) -> None:
    """An agent that comes back to what did not work at the end leaves nothing out."""
    agent = Retrying(60)
    outcome = await run_turn(
        kind(context_window=8_000),
        agent.reply,
        [agent.ship],
        "Ship all orders.",
        summarizer=say_nothing,
        max_calls=90,
    )
    assert outcome.answer == "All done."
    assert outcome.compactions
    assert agent.shipped == Counter(agent.orders)


async def test_list_of_backslashes_fits_session_state() -> None:
    """Where escapes take room in session state the list gets shorter, not lost."""
    steps = iter(range(301))
    seen: list[str] = []

    def reply(request: LlmRequest) -> Reply:
        seen.append("".join(list_content_texts(request.contents[:1])))
        now = 5 * next(steps)
        made = [
            call("click", item=f"ID{n:04}", at="\\" * 60 + str(n))
            for n in range(now, now + 5)
        ]
        return made if now < 300 else "Done."

    def click(item: str, at: str) -> str:
        """Clicks."""
        return words(500)

    await run_turn(
        Threshold(context_window=64_000),
        reply,
        [click],
        "Click.",
        summarizer=say_nothing,
        max_calls=70,
    )
    assert "Done so far" in seen[-1]
    assert "ID0000" in seen[-1]


# --- the newest steps ---


async def find_kept(
    results: Sequence[str],
    *,
    known: dict[str, Any] | None = None,
    args: dict[str, Any] | None = None,
    **settings: Any,
) -> list[KeptSteps]:
    """What a compaction would keep on each call of a turn with these results.

    `known` are further values of the context, `args` arguments of each call.
    """
    kept: list[KeptSteps] = []

    async def act(context: CompactionContext) -> Compaction | None:
        kept.append(replace(context, **known or {}).kept)
        return None

    steps = range(len(results))
    replies: list[Reply] = [call("read", **{"step": n, **(args or {})}) for n in steps]
    llm = SimulatedLlm(context_window=100_000, token_ratio=1.0, script=replies)
    settings = {"preview_tokens": None, "keep": 0.2, **settings}
    strategy = Doing(context_window=8_000, act=act, **settings)
    tools = [builders.queued_tool("read", results)]
    chat = guarded_chat(llm, strategy, agent={"tools": tools})
    await chat.say("Read.")
    return kept


async def test_newest_steps_within_keep_stay() -> None:
    """Calls and results, as many as fit; without `keep` those that were not seen."""
    results = [words(500)] * 6
    kept = (await find_kept(results, keep=1_300))[-1]
    assert sorted(kept.indexes) == [9, 10, 11, 12]
    assert sorted(kept.unseen) == [11, 12]
    assert 1_000 < kept.tokens <= 1_300
    kept = (await find_kept(results, keep=0))[-1]
    assert kept.indexes == kept.unseen == {11, 12}
    assert kept.truncation is None


async def test_nothing_is_kept_before_the_first_step() -> None:
    """A turn that has only begun has no steps."""
    first, *_ = await find_kept(["ok"])
    assert first == KeptSteps()


async def test_large_unseen_result_is_shortened() -> None:
    """Also one larger than the window; what is kept stays within 30 % of it."""
    kept = (await find_kept([words(500), words(10_000)]))[-1]
    assert sorted(kept.unseen) == [3, 4]
    assert kept.truncation is not None
    assert 0 < kept.tokens <= 2_400


FEWER = {"requested": {"reason": "requested"}, "few contents": {"keep_count": 2}}


@pytest.mark.parametrize("known", FEWER.values(), ids=FEWER)
async def test_no_more_than_unseen_results_stay(known: dict[str, Any]) -> None:
    """Where a compaction is asked for, to make room, or few contents may stay."""
    kept = (await find_kept([words(500)] * 6, known=known, keep=3_000))[-1]
    assert kept.indexes == kept.unseen == {11, 12}


async def test_a_call_that_is_too_large_itself_does_not_stay() -> None:
    """What the model wrote cannot be shortened; the list names such a call."""
    kept = await find_kept(["ok"], args={"text": words(7_000)})
    assert kept[-1] == KeptSteps()


async def test_list_stays_within_a_tenth_of_the_window() -> None:
    """However many calls there are; a compaction that is shortened keeps it whole."""
    listed: list[set[str]] = []

    async def act(context: CompactionContext) -> Compaction | None:
        if len(context.view.contents) <= 2 * len(steps):
            return None
        whole = await context.summarize(context.older_than(0))
        shorter = context.composer.shorten(whole.stored)
        listed.append({whole.stored.done, *(stored.done for stored in shorter)})
        return None

    steps = range(60)
    notes = [f"{step} {words(40, ORDERS[step % 30])}" for step in steps]
    replies: list[Reply] = [call("read", step=n, note=notes[n]) for n in steps]
    llm = SimulatedLlm(context_window=100_000, token_ratio=1.0, script=replies)
    strategy = Doing(context_window=8_000, act=act, keep=0.2)
    tools = [builders.queued_tool("read", ["ok"])]
    await guarded_chat(llm, strategy, agent={"tools": tools}).say("Read.")
    [[done]] = listed
    assert ORDERS[-1] in done
    assert 400 < token_counter(1.0)(done) <= 800


async def test_large_result_right_behind_a_compaction_is_shortened() -> None:
    """With nothing else to summarize the known summary stays; none is paid for."""
    script: list[Reply] = [call("read", step=1), "Done."]
    llm = SimulatedLlm(context_window=8_000, token_ratio=1.0, script=script)
    tools = [builders.queued_tool("read", [words(20_000)])]
    strategy = Threshold(context_window=8_000, preview_tokens=None)
    chat = guarded_chat(llm, strategy, agent={"tools": tools})
    earlier = [builders.user("Task."), builders.model(words(2_000))]
    await seed(chat, *earlier, state=DEMAND)
    await chat.say("Read.")
    assert (llm.summaries, llm.rejections) == (1, 0)
    last = agent_requests(llm)[-1].contents[-1]
    assert "truncated" in str(last.parts)


async def test_summarizer_reads_a_result_that_is_shortened_for_the_agent() -> None:
    """What the agent is not shown of an unseen result is in the transcript."""
    script: list[Reply] = [call("read", step=1), "Done."]
    llm = SimulatedLlm(context_window=100_000, token_ratio=1.0, script=script)
    tools = [builders.queued_tool("read", [words(20_000, "RESULT")])]
    strategy = Threshold(
        context_window=8_000, summarizer_context_window=100_000, preview_tokens=None
    )
    await guarded_chat(llm, strategy, agent={"tools": tools}).say("Read.")
    [summary] = summary_requests(llm)
    assert words(20_000, "RESULT") in summary.text
