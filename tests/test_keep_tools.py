"""Results of tools that stay whole, and results that give way to a line."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.models.llm_request import LlmRequest
from google.adk.tools.base_tool import BaseTool
from google.adk.tools.base_toolset import BaseToolset
from google.adk.tools.function_tool import FunctionTool
from google.genai import types

from contextguard_adk import CompactionRecord, Pipeline, SlidingWindow, Threshold
from contextguard_adk._history.truncation import Truncation, truncate_content
from contextguard_adk.strategies import (
    Ask,
    ClearToolResults,
    Draft,
    Strategy,
    ToolOutputTruncation,
    Turn,
)
from contextguard_adk.testing import RecordedRequest, Reply, SimulatedLlm, call
from tests.builders import (
    Chat,
    answer_text,
    call_part,
    calls,
    model,
    response_part,
    responses,
    user,
)
from tests.chats import agent_requests, seed, slow, some_slow, words
from tests.guarded import guarded_chat
from tests.noted import note

WINDOW = 16_000
POLICY = "\n".join(f"§ {n}: Refunds of kind {n} need {n} stamps." for n in range(90))
"""About 950 tokens: less than a tenth of the window, more than a preview."""

LONG_MESSAGE = words(4_000)
"""About a third of what fits below the threshold."""


def get_policy() -> str:
    """Returns the policy."""
    return POLICY


def get_long_policy() -> str:
    """Returns more than half of the window."""
    return POLICY * 10


def look_up(step: int) -> str:
    """Returns what was looked up."""
    return words(750 if step < 700 else 60, f"row-{step}")


def get_rule(number: int, tokens: int) -> str:
    """Returns a rule of so many tokens."""
    return words(tokens, f"rule-{number}")


TOOLS: list[Any] = [get_policy, get_long_policy, look_up, get_rule]


def results_of(request: RecordedRequest, tool: str) -> list[dict[str, Any]]:
    """What a request shows of a tool's results."""
    parts = [part for each in request.contents for part in each.parts or ()]
    found = [part.function_response for part in parts if part.function_response]
    return [each.response or {} for each in found if each.name == tool]


def looking(*first: Reply) -> Callable[[LlmRequest], Reply]:
    """A model that begins with these replies, then looks something up in each turn."""
    begins = iter(first)
    steps = itertools.count()

    def script(request: LlmRequest) -> Reply:
        reply = next(begins, None)
        if reply is not None:
            return reply
        *_, part = request.contents[-1].parts or []
        is_answer = part.function_response is not None
        return "Done." if is_answer else call("look_up", step=next(steps))

    return script


def useless(*first: Reply, **settings: Any) -> SimulatedLlm:
    """A model whose summaries say nothing."""
    settings = {"context_window": WINDOW, "token_ratio": 1.0, **settings}
    replies = ["Nothing of note."] * 1_000
    return SimulatedLlm(script=looking(*first), summary_replies=replies, **settings)


def open_chat(
    llm: SimulatedLlm,
    strategy: Strategy,
    compactions: list[CompactionRecord] | None = None,
    **chat: Any,
) -> Chat:
    """A chat with an agent that has all tools."""
    noted = compactions if compactions is not None else []
    guard = {"on_compaction": noted.append}
    return guarded_chat(llm, strategy, guard=guard, chat=chat, tools=TOOLS)


class Greedy(Threshold):
    """A strategy of a user's own, which leaves out all but the newest message."""

    async def compact(self, turn: Turn, ask: Ask) -> Draft | None:
        """Covers everything; the guard takes out what has to stay."""
        covered = frozenset(range(len(turn.messages) - 1))
        return Draft("It was left out.", covered) if turn.is_due else None


KEEP: dict[str, Any] = {"context_window": WINDOW, "keep_tools": ("get_policy",)}
CUTTING = ToolOutputTruncation(max_length=500, preserve_last_tool_result=False)
CLEARING: dict[str, Any] = {
    "window": None,
    "tool_output": None,
    "reducers": (ClearToolResults(keep_count=1),),
}
STRATEGIES: dict[str, Strategy] = {
    "threshold": Threshold(**KEEP),
    "ahead": Threshold(ahead=0.6, **KEEP),
    "trigger": Threshold(trigger=6_000, **KEEP),
    "sliding window": SlidingWindow(max_messages=8, **KEEP),
    "pipeline": Pipeline(**KEEP),
    "truncation": Pipeline(tool_output=CUTTING, **KEEP),
    "late truncation": Pipeline(
        window=None, tool_output=ToolOutputTruncation(max_length=500), **KEEP
    ),
    "clearing": Pipeline(**CLEARING, **KEEP),
    "own": Greedy(**KEEP),
}
WITHOUT_SUMMARY = {"pipeline", "truncation", "late truncation", "clearing", "own"}
"""What drops, shortens or clears before it pays for a summary, or instead."""


async def play_strategy(
    name: str, llm: SimulatedLlm, compactions: list[CompactionRecord]
) -> None:
    """Plays turns until the strategy has compacted three times, in its own way."""
    strategy = STRATEGIES[name]
    chat = open_chat(llm, strategy, compactions)
    # Results can be cleared, and not what a user writes.
    message = words(1_000) if name == "clearing" else LONG_MESSAGE

    turns = 0
    while len(compactions) < 3:
        turns += 1
        assert turns < 20
        assert answer_text(await chat.say(f"Turn {turns}. {message}")) == "Done."

    assert len(compactions) <= turns + 1
    assert (llm.summaries < len(compactions)) is (name in WITHOUT_SUMMARY)
    assert any(each.was_ahead for each in compactions) is bool(strategy.ahead)
    assert llm.rejections == llm.violations == 0


@pytest.mark.quick("ahead", "pipeline", "truncation")
@pytest.mark.parametrize("name", some_slow(STRATEGIES, "trigger", "late truncation"))
async def test_a_policy_stays_word_for_word(name: str) -> None:
    """Over three compactions, with its call; never previewed, shortened, doubled."""
    compactions: list[CompactionRecord] = []
    llm = useless(call("get_policy"))
    await play_strategy(name, llm, compactions)
    for request in agent_requests(llm)[1:]:
        assert results_of(request, "get_policy") == [{"result": POLICY}]


async def test_without_the_setting_it_is_a_preview() -> None:
    """So the tests above would fail."""
    llm = useless(call("get_policy"))
    await open_chat(llm, Threshold(context_window=WINDOW)).say("Go.")
    (shown,) = results_of(llm.requests[-1], "get_policy")
    assert len(shown["result"]) < len(POLICY)


@pytest.mark.quick("sliding window", "pipeline")
@pytest.mark.parametrize(
    "name",
    [
        "threshold",
        "sliding window",
        "pipeline",
        "truncation",
        "clearing",
        *slow("ahead", "trigger", "late truncation", "own"),
    ],
)
async def test_what_was_called_beside_it_stays_with_it(name: str) -> None:
    """Results of one message answer calls that belong together; no pair is broken.

    The other result may be shortened: it is none of `keep_tools`.
    """
    compactions: list[CompactionRecord] = []
    beside = call("look_up", step=777)
    first: Reply = [call("get_policy"), beside]
    llm = useless(first)
    await play_strategy(name, llm, compactions)
    for request in agent_requests(llm)[1:]:
        assert results_of(request, "get_policy") == [{"result": POLICY}]
        parts = [part for each in request.contents for part in each.parts or ()]
        calls = [part.function_call for part in parts if part.function_call]
        assert len([each for each in calls if each.args == {"step": 777}]) == 1


@pytest.mark.quick("sliding window", "truncation")
@pytest.mark.parametrize(
    "name",
    [
        "threshold",
        "sliding window",
        "pipeline",
        "truncation",
        "clearing",
        "own",
        *slow("ahead", "trigger", "late truncation"),
    ],
)
async def test_between_compactions_nothing_that_was_sent_changes(name: str) -> None:
    """Each request begins with the former one, byte for byte, beyond the tenth too."""
    compactions: list[CompactionRecord] = []
    sent: list[tuple[int, list[str]]] = []
    ends = looking()

    def script(request: LlmRequest) -> Reply:
        contents = [each.model_dump_json() for each in request.contents]
        sent.append((len(compactions), contents))
        assert len(sent) < 40
        has_enough = len(compactions) > 1 and len(sent) > 8
        return ends(request) if has_enough else call("get_policy")

    llm = useless()
    llm.script = script
    await open_chat(llm, STRATEGIES[name], compactions).say(f"Go. {LONG_MESSAGE}")
    pairs = [(a[1], b[1]) for a, b in itertools.pairwise(sent) if a[0] == b[0]]
    assert all(now[: len(before)] == before for before, now in pairs)
    assert len(compactions) > 1
    assert len(pairs) > len(compactions)
    counts = [len(results_of(each, "get_policy")) for each in agent_requests(llm)]
    assert max(counts) > 2
    assert llm.rejections == llm.violations == 0


@pytest.mark.parametrize(
    ("percent", "expected"), [(9, ["1", "2", "3"]), (11, ["2", "3"])], ids=["9", "11"]
)
async def test_the_share_is_a_tenth_of_the_window(
    percent: int, expected: list[str]
) -> None:
    """In tokens of the model: results of 9 % stay, of 11 % all but the oldest do."""
    window = 64_000
    compactions = list[CompactionRecord]()
    tokens = window * percent // 300
    first = [call("get_rule", number=n, tokens=tokens) for n in (1, 2, 3)]
    llm = useless(*first, context_window=window)
    strategy = Threshold(context_window=window, keep_tools=("get_rule",))
    chat = open_chat(llm, strategy, compactions)
    while len(compactions) < 3:
        assert len(llm.requests) < 30
        await chat.say(f"Turn. {words(15_000)}")
        shown = results_of(llm.requests[-1], "get_rule")
        names = [each["result"].split()[0].removeprefix("rule-") for each in shown]
        assert names == (expected if compactions else ["1", "2", "3"])

    assert [len(each["result"]) for each in shown] == [4 * tokens] * len(expected)


async def test_what_is_too_large_takes_no_place_of_others() -> None:
    """An older result that has room stays."""
    compactions: list[CompactionRecord] = []
    llm = useless(call("get_policy"), call("get_long_policy"))
    names = ("get_policy", "get_long_policy")
    strategy = Threshold(context_window=WINDOW, keep_tools=names)
    chat = open_chat(llm, strategy, compactions)
    await play(llm, chat, compactions, 3, f"Turn. {LONG_MESSAGE}")
    assert results_of(llm.requests[-1], "get_policy") == [{"result": POLICY}]
    assert results_of(llm.requests[-1], "get_long_policy") == []


async def test_a_large_result_beside_it_takes_the_room_of_its_preview() -> None:
    """Both were called together: the policy stays whole, the other as it is shown."""
    compactions: list[CompactionRecord] = []
    rule = call("get_rule", number=7, tokens=200)
    together: Reply = [rule, call("get_long_policy")]
    llm = useless(together)
    keep = ("get_rule",)
    strategy = Threshold(context_window=WINDOW, keep_tools=keep, preview_tokens=300)
    chat = open_chat(llm, strategy, compactions)
    await play(llm, chat, compactions, 3, f"Turn. {LONG_MESSAGE}")
    assert results_of(llm.requests[-1], "get_rule") == [{"result": get_rule(7, 200)}]

    (shown,) = results_of(llm.requests[-1], "get_long_policy")
    assert len(shown["result"]) < len(POLICY)


async def test_they_stay_whole_where_new_results_are_shortened() -> None:
    """A compaction cuts what the model has not seen yet, and leaves the policy."""
    compactions: list[CompactionRecord] = []
    many: Reply = [call("look_up", step=n) for n in range(12)]
    llm = useless(call("get_policy"), "Done.", many, "Done.")
    chat = open_chat(llm, STRATEGIES["threshold"], compactions)
    await chat.say("What is the policy?")
    await chat.say(f"Look it up. {words(6_000)}")
    request = llm.requests[-1]
    assert len(compactions) == 1
    assert results_of(request, "get_policy") == [{"result": POLICY}]

    shown = results_of(request, "look_up")
    assert len(shown) == 12
    assert all(len(each["result"]) < 2_000 for each in shown)
    assert llm.rejections == llm.violations == 0


async def test_a_new_result_that_could_not_be_sent_is_shortened() -> None:
    """Also one of `keep_tools`, where previews are off: the turn goes on."""
    llm = useless(call("get_long_policy"), "Done.", context_window=3_500)
    strategy = Threshold(
        context_window=3_500, keep_tools=("get_long_policy",), preview_tokens=None
    )
    chat = open_chat(llm, strategy)
    assert answer_text(await chat.say(f"Go. {words(500)}")) == "Done."

    (shown,) = results_of(llm.requests[-1], "get_long_policy")
    assert 100 < len(shown["result"]) < len(POLICY) * 10
    assert llm.rejections == llm.violations == 0


async def test_the_newest_stay(caplog: pytest.LogCaptureFixture) -> None:
    """A policy that is fetched again and again: what has room stays, one warning."""
    compactions: list[CompactionRecord] = []
    first: list[Reply] = [call("get_policy"), "Done."]
    llm = useless(*first * 6)
    chat = open_chat(llm, STRATEGIES["threshold"], compactions)
    for _ in range(12):
        assert answer_text(await chat.say(f"Again. {words(2_000)}")) == "Done."
    shown = [results_of(each, "get_policy") for each in agent_requests(llm)[1:]]

    assert all({"result": POLICY} in each for each in shown)
    assert len(shown[-1]) == 1
    assert 1 < len(compactions) < 5
    assert caplog.text.count("`keep_tools` take more than a tenth") == 1
    assert llm.rejections == llm.violations == 0


async def test_what_is_too_large_is_compacted_as_others_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A preview first, then a part of the summary; one warning says so."""
    compactions: list[CompactionRecord] = []
    llm = useless(call("get_long_policy"))
    names = ("get_long_policy",)
    strategy = Threshold(context_window=WINDOW, keep_tools=names)
    chat = open_chat(llm, strategy, compactions)
    await play(llm, chat, compactions, 3, f"Turn. {LONG_MESSAGE}")
    _, first, *_, last = agent_requests(llm)
    (shown,) = results_of(first, "get_long_policy")

    assert len(shown["result"]) < len(POLICY)
    assert results_of(last, "get_long_policy") == []
    [warning] = [each for each in caplog.messages if "cannot keep a result" in each]
    assert "'get_long_policy' of agent 'agent' in session 'session'" in warning
    assert "Refunds" not in warning
    assert re.search(r"it takes (9|1\d),\d{3} tokens", warning)
    assert re.search(r"room for [4-8],\d{3} ", warning)
    assert "larger context window" in warning
    assert llm.rejections == llm.violations == 0


@pytest.mark.quick("12-Pipeline", "35-Pipeline")
@pytest.mark.parametrize("kind", [Threshold, SlidingWindow, Pipeline])
@pytest.mark.parametrize("percent", [12, 35])
async def test_the_newest_result_stays_while_it_has_room(
    kind: type[Strategy], percent: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond a tenth of the window, over three compactions and without a warning."""
    compactions: list[CompactionRecord] = []
    window = 8_000
    tokens = window * percent // 100
    llm = useless(call("get_rule", number=1, tokens=tokens), context_window=window)
    strategy = kind(context_window=window, keep_tools=("get_rule",))
    chat = open_chat(llm, strategy, compactions)
    await play(llm, chat, compactions, 3, f"Turn. {words(900)}")

    rule = {"result": get_rule(1, tokens)}
    for request in agent_requests(llm)[1:]:
        assert results_of(request, "get_rule") == [rule]
    assert "keep_tools" not in caplog.text
    assert llm.rejections == llm.violations == 0


async def test_of_each_tool_the_newest_result_stays() -> None:
    """An older result of one tool gives way to the newest of another."""
    compactions: list[CompactionRecord] = []
    first = [call("get_rule", number=n, tokens=1_000) for n in (1, 2)]
    llm = useless(call("get_policy"), *first, context_window=8_000)
    strategy = Threshold(context_window=8_000, keep_tools=("get_rule", "get_policy"))
    chat = open_chat(llm, strategy, compactions)
    await play(llm, chat, compactions, 3, f"Turn. {words(900)}")

    assert results_of(llm.requests[-1], "get_policy") == [{"result": POLICY}]
    shown = results_of(llm.requests[-1], "get_rule")
    assert shown == [{"result": get_rule(2, 1_000)}]


async def warnings_of_names(
    caplog: pytest.LogCaptureFixture, name: str, **agent: Any
) -> list[str]:
    """The warnings after two compactions, with a name in `keep_tools`."""
    compactions: list[CompactionRecord] = []
    llm = useless()
    strategy = Threshold(context_window=WINDOW, keep_tools=(name,))
    agent = {"tools": TOOLS, **agent}
    guard = {"on_compaction": compactions.append}
    chat = guarded_chat(llm, strategy, guard=guard, **agent)
    await play(llm, chat, compactions, 2, f"Turn. {LONG_MESSAGE}")
    return [each for each in caplog.messages if "`keep_tools` names" in each]


class Later(BaseToolset):
    """A toolset that has one tool."""

    async def get_tools(self, readonly_context: Any = None) -> list[BaseTool]:
        """Returns the tool."""

        def get_notes() -> str:
            """Returns the notes."""
            return "none"

        return [FunctionTool(get_notes)]


async def test_a_name_that_no_tool_has_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, at the first compaction, with the name that was meant."""
    [warning] = await warnings_of_names(caplog, "get_polcy")
    assert "'get_polcy'" in warning
    assert warning.endswith("Did you mean 'get_policy'?")


async def test_a_slip_is_warned_of_beside_a_toolset(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A toolset may have any name, but hardly one that is so similar."""
    tools = [*TOOLS, Later()]
    [warning] = await warnings_of_names(caplog, "get_polcy", tools=tools)
    assert warning.endswith("Did you mean 'get_policy'?")


@pytest.mark.parametrize("name", ["get_notes", "fetch_from_server", "helper_tool"])
async def test_a_name_that_may_be_right_is_not_warned_of(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is that of a toolset's tool, of a tool to come, or of another agent's tool."""

    def helper_tool() -> str:
        """Helps."""
        return "helped"

    helper = LlmAgent(name="helper", model=useless(), tools=[helper_tool])
    tools: list[Any] = TOOLS if name == "helper_tool" else [*TOOLS, Later()]
    agent = {"tools": tools, "sub_agents": [helper]}
    assert await warnings_of_names(caplog, name, **agent) == []


async def test_they_stay_after_a_rejection() -> None:
    """Where the provider's window is smaller than was configured."""
    llm = useless(call("get_policy"), context_window=200_000)
    strategy = Threshold(context_window=200_000, keep_tools=("get_policy",))
    chat = open_chat(llm, strategy)
    for _ in range(4):
        await chat.say(f"Turn. {LONG_MESSAGE}")
    llm.context_window = WINDOW

    assert answer_text(await chat.say("Go on.")) == "Done."
    assert llm.rejections
    assert results_of(llm.requests[-1], "get_policy") == [{"result": POLICY}]


async def test_they_stay_in_another_process(tmp_path: Path) -> None:
    """What stands in a request follows from the session alone."""
    from google.adk.sessions.database_session_service import DatabaseSessionService

    shown = []
    compactions = list[CompactionRecord]()
    counts = []
    for turn in range(4):
        url = f"sqlite+aiosqlite:///{tmp_path / 'sessions.db'}"
        sessions = DatabaseSessionService(url)
        first: list[Reply] = [call("get_policy")]
        llm = useless(*first[turn:])
        chat = open_chat(
            llm, STRATEGIES["threshold"], compactions, session_service=sessions
        )
        await chat.say(f"Turn {turn}. {LONG_MESSAGE}")
        shown.append(results_of(llm.requests[-1], "get_policy"))
        counts.append(len(compactions))
        await sessions.db_engine.dispose()
    assert counts[1] == 0
    assert counts[3] == 1
    assert shown == [[{"result": POLICY}]] * 4


async def test_a_failed_summary_leaves_them() -> None:
    """Excerpts replace the rest."""
    llm = useless(call("get_policy"))
    llm.summary_replies = [RuntimeError("Busy.")] * 1_000
    compactions: list[CompactionRecord] = []
    chat = open_chat(llm, STRATEGIES["threshold"], compactions)
    while len(compactions) < 3:
        assert len(llm.requests) < 60
        await chat.say(f"Turn. {LONG_MESSAGE}")

    assert results_of(llm.requests[-1], "get_policy") == [{"result": POLICY}]
    assert llm.rejections == llm.violations == 0


async def test_a_setting_that_comes_later_brings_back_what_no_model_summarized() -> (
    None
):
    """What was dropped returns with the next compaction; what was summarized stays."""
    llm = useless(call("get_policy"))
    compactions: list[CompactionRecord] = []
    strategy: Strategy = Threshold(context_window=WINDOW)
    chat = open_chat(llm, strategy, compactions)
    while not compactions:
        await chat.say(f"Turn. {LONG_MESSAGE}")
    assert results_of(llm.requests[-1], "get_policy") == []

    later = open_chat(
        llm, STRATEGIES["threshold"], compactions, session_service=chat.sessions
    )
    while len(compactions) < 3:
        assert answer_text(await later.say(f"Turn. {LONG_MESSAGE}")) == "Done."
    assert results_of(llm.requests[-1], "get_policy") == []
    assert llm.rejections == llm.violations == 0


# --- clearing results ---

EARLIER_TURNS = 14
LATER_TURNS = 10
"""How many turns nearly reach the threshold: at first, and beside what was cleared."""


def clearing(window: int = WINDOW, **settings: Any) -> Pipeline:
    """A pipeline that does nothing else before it summarizes."""
    reducers = (ClearToolResults(**settings),)
    return Pipeline(
        context_window=window, window=None, tool_output=None, reducers=reducers
    )


def is_cleared(result: dict[str, Any]) -> bool:
    """Whether a line stands in place of a result."""
    return "truncated" in str(result) and len(str(result)) < 200


async def play(
    llm: SimulatedLlm,
    chat: Chat,
    compactions: list[CompactionRecord],
    count: int,
    message: str = "Go on.",
) -> None:
    """Plays turns until there are so many compactions."""
    while len(compactions) < count:
        assert len(llm.requests) < 60
        assert answer_text(await chat.say(message)) == "Done."


def looked_up(name: str, result: Any, **args: Any) -> list[types.Content]:
    """An earlier turn, in which something was looked up."""
    return [
        user("Go on."),
        calls(call_part("look_up", name, **args)),
        responses(response_part("look_up", result, name)),
        model("Done."),
    ]


async def fill(
    llm: SimulatedLlm, chat: Chat, compactions: list[CompactionRecord], count: int
) -> None:
    """Adds turns, then plays some until there are so many compactions."""
    for step in range(LATER_TURNS if compactions else EARLIER_TURNS):
        name = f"{count}-{step}"
        await seed(chat, *looked_up(name, look_up(step), step=step))
    await play(llm, chat, compactions, count)


def cleared_at_first(llm: SimulatedLlm) -> list[dict[str, Any]]:
    """The results in the first request in which some are cleared."""
    shown = (results_of(request, "look_up") for request in llm.requests)
    return next(
        results for results in shown if any(is_cleared(result) for result in results)
    )


async def test_older_results_give_way_to_a_line() -> None:
    """With their size and a handle; calls stay, and so do the newest three."""
    compactions: list[CompactionRecord] = []
    llm = useless()
    chat = open_chat(llm, clearing(), compactions)
    await fill(llm, chat, compactions, 1)

    results = cleared_at_first(llm)
    assert llm.summaries == 0
    cleared = [is_cleared(result) for result in results]
    assert cleared == [True] * (len(results) - 3) + [False] * 3
    assert all(note(each, "recall_item") for each in results[:-3])
    assert "3000 characters" in str(results[0]).replace(",", "")
    assert "row-0 " not in str(results[0])

    calls = [
        part.function_call.args
        for content in llm.requests[-1].contents
        for part in content.parts or ()
        if part.function_call
    ]
    assert len(calls) == len(results_of(llm.requests[-1], "look_up"))

    await fill(llm, chat, compactions, 2)
    later = results_of(llm.requests[-1], "look_up")
    assert llm.summaries == 0
    assert sum(is_cleared(result) for result in later) > len(results) - 3
    assert later[: len(results) - 3] == results[:-3]
    assert llm.rejections == llm.violations == 0


async def test_a_cleared_result_is_read_back() -> None:
    """By its handle."""
    compactions: list[CompactionRecord] = []
    llm = useless()
    chat = open_chat(llm, clearing(), compactions)
    await fill(llm, chat, compactions, 1)
    item = note(results_of(llm.requests[-1], "look_up")[0], "recall_item")
    replies: list[Reply] = [call("recall_history", item=item), "Read."]
    llm.script = lambda _: replies.pop(0)
    await chat.say("What stood there?")
    (read,) = results_of(llm.requests[-1], "recall_history")

    assert "row-0 notebooks" in str(read)


def test_what_was_read_back_is_cleared_without_a_handle() -> None:
    """It is no item itself, so nothing could be read back under one."""
    read = Truncation(0, result_length=1)
    response = types.FunctionResponse(name="recall_history", response={"r": "x" * 999})
    part = types.Part(function_response=response)
    content = types.Content(role="user", parts=[part])
    cleared = truncate_content(content, read, content)
    (shown,) = cleared.parts or []
    assert shown.function_response
    assert not note(shown.function_response.response or {}, "recall_item")


async def test_results_of_excluded_tools_stay() -> None:
    """Whole, whatever their age; `keep_tools` has results stay as well."""
    compactions: list[CompactionRecord] = []
    llm = useless(call("get_policy"), call("look_up", step=7))
    names = ("get_policy",)
    strategy = clearing(exclude_tools=names, keep_count=1)
    strategy = strategy.model_copy(update={"preview_tokens": None})
    chat = open_chat(llm, strategy, compactions)
    await chat.say("What is the policy?")
    await fill(llm, chat, compactions, 1)
    assert results_of(llm.requests[-1], "get_policy") == [{"result": POLICY}]

    *older, newest = (is_cleared(result) for result in cleared_at_first(llm))
    assert all(older)
    assert not newest


@pytest.mark.parametrize(
    "result",
    [
        {"rows": [*range(1_000)]},
        {"rows": [{"id": n, "name": "x" * 9} for n in range(200)]},
        {f"key {n}": n for n in range(500)},
        {"text": "[… truncated: 0 of 9 characters kept …]\n" * 99, "recall_item": "x"},
        {"text": "要確認。" * 600},
        {"a": {"b": {"c": ["x" * 5_000]}}},
    ],
    ids=["numbers", "rows", "keys", "notices", "wide", "nested"],
)
async def test_a_result_of_any_form_is_cleared(result: dict[str, Any]) -> None:
    """Not only one text: its line names the size of the whole."""
    compactions: list[CompactionRecord] = []
    llm = useless()
    chat = open_chat(llm, clearing(keep_count=1), compactions)
    await seed(chat, *looked_up("first", result, step=-1))
    await fill(llm, chat, compactions, 1)
    first, *_ = results_of(llm.requests[-1], "look_up")
    assert is_cleared(first)
    assert note(first, "recall_item") not in ("", "x")

    size = len(json.dumps(result, ensure_ascii=False, separators=(",", ":")))
    sizes = [int(w) for w in str(first).replace(",", "").split() if w.isdecimal()]
    assert any(0.5 * size <= each <= 1.5 * size for each in sizes)


@pytest.mark.parametrize("settings", [{}, *slow({"exclude_tools": ("a", "b")})])
async def test_it_goes_on_in_another_process(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """What is stored of it is read as it was written."""
    from google.adk.sessions.database_session_service import DatabaseSessionService

    compactions: list[CompactionRecord] = []
    counts = []
    for turn in range(9):
        url = f"sqlite+aiosqlite:///{tmp_path / 'sessions.db'}"
        sessions = DatabaseSessionService(url)
        llm = useless(context_window=8_000)
        strategy = clearing(8_000, **settings)
        chat = open_chat(llm, strategy, compactions, session_service=sessions)
        said = await chat.say(f"Turn {turn}. {words(300)}")
        assert answer_text(said) == "Done."
        results = results_of(llm.requests[-1], "look_up")
        counts.append(sum(is_cleared(result) for result in results))
        await sessions.db_engine.dispose()
        assert llm.summaries == 0
    assert counts == sorted(counts)
    assert len(compactions) == 2
    assert counts[5] > 0
    assert counts[6] == counts[5]
    assert counts[7] > counts[6]
    assert counts[8] == counts[7]


@pytest.mark.parametrize(
    "truncation",
    [
        None,
        *slow(7, [], {}),
        {"max_length": -1},
        *slow({"max_length": 10**300}),
        {"result_length": 1, "exclude_tools": [None, 7, {}]},
        *slow({"result_length": 1, "exclude_tools": "look_up"}),
        *slow({"result_length": 1, "exclude_tools": ["x"] * 2_000}),
        *slow({"exclude_tools": {"a": 1}}),
        {"max_length": 0, "exclude_tools": ["look_up"], "unknown": 1},
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_crafted_state_is_harmless(truncation: Any) -> None:
    """Turns go on, and results are cleared again."""
    compactions: list[CompactionRecord] = []
    llm = useless()
    chat = open_chat(llm, clearing(), compactions)
    await fill(llm, chat, compactions, 1)
    state = await chat.state()
    key = next(k for k, v in state.items() if '"truncated_upto"' in str(v))
    record = json.loads(state[key])
    record["summary"]["truncation"] = truncation
    await chat.set_state({key: json.dumps(record)})
    await play(llm, chat, compactions, 2)
    await fill(llm, chat, compactions, 3)

    assert any(is_cleared(result) for result in results_of(llm.requests[-1], "look_up"))
    assert llm.rejections == llm.violations == 0
