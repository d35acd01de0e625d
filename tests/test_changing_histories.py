"""Histories that change behind the guard: rewinds, partial loads, late results, other
plugins, and runs that stop and go on."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from google.adk.agents.run_config import RunConfig
from google.adk.apps.app import EventsCompactionConfig, ResumabilityConfig
from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.context_filter_plugin import ContextFilterPlugin
from google.adk.sessions.base_session_service import GetSessionConfig
from google.adk.tools.function_tool import FunctionTool
from google.adk.tools.long_running_tool import LongRunningFunctionTool
from google.genai import types

from contextguard_adk import Pipeline, SlidingWindow, Threshold
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import RecordedRequest, Reply, SimulatedLlm
from contextguard_adk.testing import call as scripted_call
from tests.builders import (
    SUMMARY_BEGIN,
    KeptSessions,
    answer_text,
    call,
    event,
    guarded_agent,
    model,
    response,
    response_part,
    responses,
    user,
)
from tests.chats import (
    DEMAND,
    Changing,
    agent_requests,
    begin_as_user,
    guarded_chat,
    seed,
    slow,
    some_slow,
    take_apart,
    text_of,
    without_head,
    words,
)
from tests.talks import (
    MARKER,
    WINDOW,
    Talk,
    acting,
    agent_requests_since,
    every_strategy,
    looking_tool,
    markers,
    message,
    spread,
    summarizing_llm,
)

RESUMABLE = ResumabilityConfig(is_resumable=True)
LONG = 130
"""Words of a message, or a tool's result: a few of them reach the threshold."""

ADK_PROMPT_BEGINS = "The following is a conversation history"


@spread("back_to", {str(turn): turn for turn in (1, 3, 4)})
async def test_rewound_messages_never_show_up_again(
    strategy: Strategy, back_to: int
) -> None:
    """Neither the history nor a summary speaks of what was taken back."""
    llm = summarizing_llm(acting())
    talk = Talk(guarded_agent(llm, [looking_tool(LONG)]), strategy, llm)
    turns = []
    said = []
    for number in range(6):
        turns.append(await talk.ask(message(number, words=LONG)))
        contents = "".join(str(event.content) for event in turns[-1])
        said.append({f"mark-ask-{number:03}!", *MARKER.findall(contents)})
    assert llm.summaries >= 2

    await talk.rewind(turns[back_to][0].invocation_id)
    count = len(llm.requests)
    for number in range(100, 103):
        await talk.ask(message(number))

    for request in llm.requests[count:]:
        assert not set().union(*said[back_to:]) & markers(request)
    first = agent_requests_since(llm, count)[0]
    assert set().union(*said[:back_to]) <= markers(first)
    talk.check()


@every_strategy
@pytest.mark.parametrize("is_lost", [False, True], ids=["stored", "lost"])
async def test_a_summary_of_a_rewound_message_is_not_restored(
    strategy: Strategy, is_lost: bool
) -> None:
    """A summary that was made for a message goes with it, in process memory too."""
    answers: list[Reply] = [message(number, "answer", 150) for number in range(3)]
    outcome: Reply = RuntimeError("boom") if is_lost else "Done."
    llm = summarizing_llm([*answers, outcome, "Done.", "Done."])
    talk = Talk(guarded_agent(llm), strategy, llm)

    for number in range(3):
        await talk.ask(message(number, words=120))
    before = llm.summaries
    with pytest.raises(Exception, match="boom") if is_lost else nullcontext():
        await talk.say(message(666, words=200))
    assert llm.summaries > before

    await talk.rewind((await talk.events())[-1].invocation_id)
    count = len(llm.requests)
    await talk.ask(message(4))
    await talk.ask(message(5))

    sent = "".join(request.text for request in llm.requests[count:])
    assert "mark-ask-666!" not in sent + json.dumps(await talk.state())
    talk.check()


async def test_a_lost_summary_comes_back_to_its_own_user_alone() -> None:
    """A session id of two users names two sessions, in process memory too."""
    llm = summarizing_llm([RuntimeError("boom"), "Done.", "Done."])
    strategy = SlidingWindow(context_window=WINDOW, max_messages=4)
    ann = Talk(guarded_agent(llm), strategy, llm)
    bob = Talk(guarded_agent(llm), strategy, llm, user_id="bob")
    bob.sessions = ann.sessions
    bob.runner = ann.runner
    for talk in (ann, bob):
        await talk.tell([user(message(0)), model(message(0, "answer"))] * 4)
    with pytest.raises(Exception, match="boom"):
        await ann.say(message(1, "secret"))
    assert llm.summaries == 1

    await bob.ask("Hello.")
    assert "mark-secret" not in llm.requests[-1].text

    await ann.ask("Once more, please.")
    assert llm.summaries == 2, "a summary was paid for and lost"


@spread("newest", {str(newest): newest for newest in (0, 3, 7, 16)})
async def test_partly_loaded_sessions_go_on(strategy: Strategy, newest: int) -> None:
    """Wherever the history begins, requests stay whole and the summary in place."""
    llm = summarizing_llm(acting())
    talk = Talk(guarded_agent(llm, [looking_tool(LONG)]), strategy, llm)
    for number in range(6):
        await talk.ask(message(number, words=LONG))
    assert llm.summaries >= 2

    summarized = set().union(*(markers(r) for r in llm.requests if r.is_summary))
    newest_alone = GetSessionConfig(num_recent_events=newest)
    whole = talk.run_config
    talk.run_config = RunConfig(get_session_config=newest_alone)

    for number in range(10, 13):
        count = len(llm.requests)
        await talk.ask(message(number, words=LONG))
        sent = agent_requests_since(llm, count)[0].contents
        head = text_of(take_apart(sent)[0])
        assert head.startswith(SUMMARY_BEGIN)
        assert summarized <= set(MARKER.findall(head))

    talk.run_config = whole
    for number in range(20, 23):
        await talk.ask(message(number))
    talk.check()


def start_job(name: str) -> dict[str, Any]:
    """Starts a job that takes long."""
    return {"status": "pending", "ticket": f"mark-ticket-{len(name):03}!"}


def starting(*calls: types.Part) -> Callable[[LlmRequest], Reply]:
    """A model that makes these calls at first, and from then on only answers."""
    numbers = itertools.count(0)

    def reply(request: LlmRequest) -> Reply:
        number = next(numbers)
        return list(calls) if not number else message(number, "answer", 90)

    return reply


def find_call_id(events: Sequence[Event], name: str) -> str:
    """The id of the call of a tool."""
    calls = (call for event in events for call in event.get_function_calls())
    return next(call.id or "" for call in calls if call.name == name)


def result_of(name: str, call_id: str, result: Any) -> types.Content:
    """A message with a tool's final result."""
    return responses(response_part(name, result, call_id))


def find_results(record: RecordedRequest, name: str) -> list[Any]:
    """What a tool has returned, as a request shows it."""
    parts = (part for content in record.contents for part in content.parts or ())
    results = (part.function_response for part in parts if part.function_response)
    return [result.response for result in results if result.name == name]


@pytest.mark.quick("threshold-alone-model-ids", "sliding-parallel-model-ids")
@pytest.mark.parametrize("has_ids", [False, True], ids=["adk-ids", "model-ids"])
@spread("is_parallel", {"alone": False, "parallel": True, "on its own": False})
async def test_a_final_result_comes_back_with_its_call(
    strategy: Strategy, has_ids: bool, is_parallel: bool
) -> None:
    """What replaces a summarized pending result is shown to the model."""
    calls = [scripted_call("start_job", name="build")]
    if is_parallel:
        calls.append(scripted_call("look", step=900))
    llm = summarizing_llm(starting(*calls), call_ids=has_ids)
    tools: list[Any] = [LongRunningFunctionTool(start_job), looking_tool()]
    talk = Talk(guarded_agent(llm, tools), strategy, llm)

    call_id = find_call_id(await talk.say(message(0)), "start_job")
    for number in range(1, 5):
        await talk.ask(message(number, words=150))
    assert llm.summaries >= 1
    assert not find_results(agent_requests(llm)[-1], "start_job")

    for progress in ("half", "done"):
        result = {"status": progress, "log": message(700, progress, 40)}
        count = len(llm.requests)
        await talk.ask(result_of("start_job", call_id, result))
        request = agent_requests_since(llm, count)[-1]
        assert find_results(request, "start_job") == [result]
        assert len(find_results(request, "look")) == is_parallel

    for number in range(7, 12):
        await talk.ask(message(number, words=200))
        # Shown as it is, or with a summary that was made of it.
        assert "mark-done-700!" in llm.requests[-1].text
    assert not find_results(llm.requests[-1], "start_job")
    talk.check()


def delete_file(path: str) -> dict[str, str]:
    """Deletes a file."""
    return {"deleted": path, "note": message(800, "deleted", 20)}


@spread("is_confirmed", {"yes": True, "no": False})
async def test_a_tool_that_waits_for_confirmation(
    strategy: Strategy, is_confirmed: bool
) -> None:
    """The user may talk on for long before allowing a call, or refusing it."""
    llm = summarizing_llm(starting(scripted_call("delete_file", path="/tmp/x")))
    tool = FunctionTool(delete_file, require_confirmation=True)
    talk = Talk(guarded_agent(llm, [tool]), strategy, llm)
    first = await talk.say(message(0))
    asked = find_call_id(first, "adk_request_confirmation")
    for number in range(1, 5):
        await talk.ask(message(number, words=150))
    assert llm.summaries >= 1

    confirmation = {"confirmed": is_confirmed}
    await talk.ask(result_of("adk_request_confirmation", asked, confirmation))
    [result] = find_results(agent_requests(llm)[-1], "delete_file")
    assert ("deleted" in result) == is_confirmed

    for number in range(7, 10):
        await talk.ask(message(number, words=200))
    talk.check()


@pytest.mark.quick("threshold-low")
@spread(
    "settings",
    {
        "low": {"token_threshold": 1_200, "event_retention_size": 5},
        "high": {"token_threshold": 2_300, "event_retention_size": 3},
        "interval": {"compaction_interval": 2},
    },
)
async def test_adks_own_compaction_does_no_harm(
    strategy: Strategy, settings: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Both may be on, with tools and short messages or long ones; it is said once."""
    settings = {"compaction_interval": 100, "overlap_size": 1, **settings}
    llm = summarizing_llm(acting())
    talk = Talk(
        guarded_agent(llm, [looking_tool()]),
        strategy,
        llm,
        before=[Changing(begin_as_user)],
        events_compaction_config=EventsCompactionConfig.model_validate(settings),
    )

    for number in range(14):
        await talk.ask(message(number, words=30 + 60 * (number % 3)))

    assert llm.summaries
    for request in llm.requests:
        # ADK does not look at the size of its own requests for summaries.
        assert not request.rejected or request.text.startswith(ADK_PROMPT_BEGINS)
    assert llm.violations == 0
    assert not talk.live.lost
    assert caplog.text.count("App 'app' also has an events_compaction_config") == 1


@spread("is_first", {"before": True, "behind": False})
async def test_a_context_filter_does_no_harm(
    strategy: Strategy, is_first: bool
) -> None:
    """A plugin that drops old turns may stand on either side of the guard."""
    llm = summarizing_llm(acting())
    filters = [ContextFilterPlugin(num_invocations_to_keep=2)]
    talk = Talk(
        guarded_agent(llm, [looking_tool()]),
        strategy,
        llm,
        before=filters if is_first else [],
        after=[] if is_first else filters,
    )
    for number in range(12):
        await talk.ask(message(number))
        newest = agent_requests(llm)[-1]
        assert f"mark-ask-{number:03}!" in newest.text

    talk.check()


@spread("failing_call", {str(call): call for call in (2, 5, 7)})
async def test_resumable_apps_go_on_after_a_failure(
    strategy: Strategy, failing_call: int
) -> None:
    """A run whose model call failed, compacted or not, is resumed by its id."""
    numbers = itertools.count(1)

    def reply(request: LlmRequest) -> Reply:
        """Looks up a lot and answers; one call fails."""
        number = next(numbers)
        if number == failing_call:
            return RuntimeError("boom")
        return scripted_call("look", step=number) if number < 12 else "Done."

    llm = summarizing_llm(reply)
    agent = guarded_agent(llm, [looking_tool(130)])
    talk = Talk(agent, strategy, llm, resumability_config=RESUMABLE)
    with pytest.raises(Exception, match="boom"):
        await talk.say(message(0))
    before = llm.summaries
    run = talk.runner.run_async(
        user_id="user",
        session_id=talk.session_id,
        invocation_id=(await talk.events())[-1].invocation_id,
    )
    assert answer_text([event async for event in run]) == "Done."
    assert llm.summaries > before
    assert "mark-ask-000!" in llm.requests[-1].text
    talk.check()


# --- what is known again ---


def saying(value: Any, call_id: str | None = None, **args: Any) -> list[types.Content]:
    """A call of a tool with its result."""
    return [call("x", call_id, **args), response("x", {"a": value}, call_id)]


def shot(data: bytes) -> list[types.Content]:
    """A tool result with an image of its own."""
    pixels = types.FunctionResponsePart.from_bytes(data=data, mime_type="image/png")
    answer = types.FunctionResponse(name="x", response={}, parts=[pixels])
    return [call("x"), responses(types.Part(function_response=answer))]


SIGNED = types.Content(
    role="model", parts=[types.Part(text="a", thought_signature=b"1")]
)
Said = list[types.Content]
SAME: dict[str, tuple[Said, Said]] = {
    "call id": (saying(1, "1", q="a"), saying(1, q="a")),
    "signature": ([SIGNED], [model("a")]),
    "integer for a float": (saying([1e22, -2.5e30]), saying([10**22, -25 * 10**29])),
}
DIFFERENT: dict[str, tuple[Said, Said]] = {
    "role": ([user("a")], [model("a")]),
    "joined parts": ([model("a", "b")], [model("ab")]),
    "argument": (saying(1, q="a"), saying(1, q="b")),
    "true or one": (saying(True), saying(1)),
    "image of a result": (shot(b"a"), shot(b"b")),
}


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        *(pytest.param(*pair, True, id=name) for name, pair in SAME.items()),
        *(pytest.param(*pair, False, id=name) for name, pair in DIFFERENT.items()),
    ],
)
async def test_a_summary_covers_what_says_the_same(
    before: Said, after: Said, is_same: bool
) -> None:
    """Ids, signatures, and what a JSONB column alters are no part of what was said."""
    llm = SimulatedLlm(context_window=8_000, summary_replies=["A summary."])
    sessions = KeptSessions()
    strategy = Threshold(context_window=8_000)
    chat = guarded_chat(llm, strategy, session_service=sessions)
    await seed(chat, user(words(2_000)), *before, state=DEMAND)
    await chat.say("Go on.")
    events = sessions.kept["session"].events
    assert not [each for each in before if each in llm.requests[-1].contents]

    for stored, content in zip(events[1:], after, strict=False):
        stored.content = content
    await chat.say("And now?")
    stays = without_head(llm.requests[-1].contents)
    assert stays[: -2 or None] == ([] if is_same else after)
    assert llm.summaries == 1


COUNT = 1_200
"""The newest 512 of them are known one by one, those before them only together."""


def fact(number: int) -> types.Content:
    """A message that can be recognized, of the user and of the model in turn."""
    return (user, model)[number % 2](f"fact {number}")


Change = Callable[[list[Event]], None]


def edit(number: int) -> Change:
    """Has a message say something else."""
    return lambda events: setattr(events[number], "content", user(f"fact {number}."))


def load_newest(count: int) -> Change:
    """Has a session be loaded in part."""
    return lambda events: events.__delitem__(slice(COUNT - count))


CHANGES: dict[str, tuple[Change, set[int]]] = {
    "nothing": (lambda events: None, set()),
    "an old one": (edit(300), set()),
    "a recent one": (edit(1_190), {1_190}),
    "the newest 900 are loaded": (load_newest(900), set()),
    "the newest 600 are loaded": (load_newest(600), set()),
    "the newest 300 are loaded": (load_newest(300), set()),
}


def find_facts(request: RecordedRequest) -> set[int]:
    """The facts that stand beside the summary."""
    stays = without_head(request.contents)
    text = "\n".join(text_of(content) for content in stays)
    return {int(number) for number in re.findall(r"fact (\d+)", text)}


LARGE: dict[str, Strategy] = {
    "threshold": Threshold(context_window=100_000, keep=0),
    "sliding": SlidingWindow(context_window=100_000, max_messages=1_000, keep=0),
    "pipeline": Pipeline(context_window=100_000, keep=0),
}


@pytest.mark.quick("threshold-an old one", "threshold-the newest 300 are loaded")
@pytest.mark.parametrize("name", some_slow(CHANGES, "the newest 600 are loaded"))
@pytest.mark.parametrize("strategy", ["threshold", *slow("sliding", "pipeline")])
async def test_a_change_of_a_long_history_uncovers_what_it_must(
    name: str, strategy: str
) -> None:
    """What stands before the oldest that is known again stays covered."""
    change, expected = CHANGES[name]
    llm = SimulatedLlm(context_window=100_000, summary_replies=["A summary."] * 3)
    sessions = KeptSessions()
    chat = guarded_chat(llm, LARGE[strategy], session_service=sessions)
    await seed(chat, state=DEMAND)
    events = sessions.kept["session"].events
    events[:0] = [event(fact(number)) for number in range(COUNT)]

    await chat.say("Go on.")
    state = json.dumps(await chat.state())
    assert len(state) < 16 * 1024
    before = find_facts(llm.requests[-1])
    assert len(before) < COUNT / 2

    change(events)
    known = [
        each for each in events if each.content and "fact" in text_of(each.content)
    ]
    loaded = {*range(COUNT - len(known), COUNT)}

    await chat.say("And now?")
    assert find_facts(llm.requests[-1]) == before & loaded | expected


@pytest.mark.parametrize("name", ["threshold", *slow("sliding", "pipeline")])
async def test_a_late_result_of_a_long_history_comes_back_alone(name: str) -> None:
    """With its call; all else that is summarized stays so."""
    job = starting(scripted_call("start_job", name="build"))
    llm = SimulatedLlm(
        context_window=100_000, script=job, summary_replies=["A summary."] * 3
    )
    sessions = KeptSessions()

    agent = {"tools": [LongRunningFunctionTool(start_job)]}
    chat = guarded_chat(llm, LARGE[name], session_service=sessions, agent=agent)
    call_id = find_call_id(await chat.say("Begin."), "start_job")
    events = sessions.kept["session"].events
    events[1:1] = [event(fact(number)) for number in range(600)]
    events += [event(fact(number)) for number in range(600, COUNT)]
    await chat.set_state(DEMAND)
    await chat.say("Go on.")
    before = find_facts(llm.requests[-1])
    assert len(before) < COUNT / 2
    for _ in range(2):
        await chat.say(result_of("start_job", call_id, {"status": "done"}))
        request = agent_requests(llm)[-1]
        assert find_results(request, "start_job") == [{"status": "done"}]
        assert find_facts(request) <= before
    await chat.say("And now?")
    assert find_facts(llm.requests[-1]) == before
    assert llm.summaries <= 1
