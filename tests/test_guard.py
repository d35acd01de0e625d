"""One model call under the guard: what is sent, and what state holds afterwards."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.run_config import RunConfig
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions.base_session_service import GetSessionConfig
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from contextguard_adk import (
    ContextGuardPlugin,
    SlidingWindow,
    Strategy,
    Threshold,
    request_compaction,
)
from contextguard_adk.testing import RecordedRequest, Reply, SimulatedLlm
from contextguard_adk.testing import call as scripted_call
from tests.builders import (
    Chat,
    KeptSessions,
    answer_text,
    call,
    call_part,
    event,
    guarded_agent,
    model,
    queued_tool,
    response,
    user,
)

WINDOW = 4_000
"""Threshold 3,200 tokens, summaries of 400."""

NOW = {"context_guard:compact": True}
"""State that asks for a compaction."""

SUMMARY = "__context_guard_summary_agent"
SUMMARY_BEGINS = "[Previous conversation summary]\n"
IMAGE = types.Part(inline_data=types.Blob(mime_type="image/png", data=b"\x89PNG" * 9))


def words(token_count: int, name: str = "") -> str:
    """Prose of four bytes for each token, recognisable by its name."""
    return f"{name} {'notebooks ' * token_count}"[: 4 * token_count]


def guarded_chat(
    llm: SimulatedLlm,
    strategy: Strategy | None = None,
    plugin: ContextGuardPlugin | None = None,
    chat: dict[str, Any] | None = None,
    **settings: Any,
) -> Chat:
    """A chat with one agent, whose history fits one summary call."""
    strategy = strategy or Threshold(
        context_window=WINDOW, summarizer_context_window=100_000
    )
    plugin = plugin or ContextGuardPlugin(default=strategy)
    return Chat(guarded_agent(llm, **settings), [plugin], **(chat or {}))


async def seed(
    chat: Chat, *contents: types.Content, state: dict[str, Any] | None = None
) -> None:
    """Puts an earlier conversation and state into the session."""
    place: dict[str, Any] = {"app_name": "app", "user_id": "user"}
    place["session_id"] = chat.session_id
    session = await chat.sessions.get_session(**place)
    if session is None:
        session = await chat.sessions.create_session(**place)
    for content in contents:
        await chat.sessions.append_event(session, event(content))
    if state:
        last = event(user("Noted."))
        last.content = None
        last.actions.state_delta = dict(state)
        await chat.sessions.append_event(session, last)


def text_of(content: types.Content) -> str:
    """The texts of a content."""
    return "\n".join(part.text for part in content.parts or () if part.text)


def agent_requests(llm: SimulatedLlm) -> list[RecordedRequest]:
    """The requests for answers, without those for summaries."""
    return [request for request in llm.requests if not request.is_summary]


def summary_requests(llm: SimulatedLlm) -> list[RecordedRequest]:
    """The requests for summaries."""
    return [request for request in llm.requests if request.is_summary]


def first_texts(llm: SimulatedLlm) -> list[str]:
    """The first word of each content of the newest request."""
    contents = llm.requests[-1].contents
    return [(text_of(content).split() or ["-"])[0] for content in contents]


# --- Below the threshold ----------------------------------------------------------


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "streamed"])
async def test_small_requests_leave_as_they_came(is_streaming: bool) -> None:
    """Below the threshold the provider sees what it would see without a guard."""
    seen = []
    for plugins in ([], [ContextGuardPlugin(default=Threshold(context_window=WINDOW))]):
        llm = SimulatedLlm(script=[scripted_call("look"), "Found.", "Bye."])
        agent = guarded_agent(llm, [queued_tool("look", [{"n": [1, {"x": None}]}])])
        chat = Chat(agent, plugins, is_streaming=is_streaming)
        answers = [answer_text(await chat.say(text)) for text in ("Look!", "Thanks.")]
        assert answers == ["Found.", "Bye."]
        seen.append(
            [(r.contents, r.config, r.system_instruction) for r in llm.requests]
        )
    assert seen[0] == seen[1]


async def test_nothing_but_the_count_is_stored_without_a_summary() -> None:
    """A short conversation leaves two numbers in state."""
    chat = guarded_chat(SimulatedLlm())
    await chat.say("Hello.")
    assert sorted(await chat.state()) == [
        "__context_guard_last_heuristic_agent",
        "__context_guard_real_tokens_agent",
    ]


# --- The summary stays in place ---------------------------------------------------


async def long_chat(llm: SimulatedLlm, **settings: Any) -> Chat:
    """A chat whose history was summarised in its first turn."""
    llm.summary_replies = llm.summary_replies or ["A summary."]
    chat = guarded_chat(llm, **settings)
    await seed(chat, user("The task."), model(words(3_000, "ORIGINAL")))
    await chat.say("Go on.")
    assert llm.summaries == 1
    return chat


async def test_summary_stays_on_later_calls_and_turns() -> None:
    """Every later request begins with the same bytes; the rest is appended."""
    llm = SimulatedLlm(
        script=[scripted_call("look"), "Found.", scripted_call("look"), "Bye."]
    )
    chat = await long_chat(llm, tools=[queued_tool("look", ["a result"])])
    await chat.say("And now?")
    first, *later = agent_requests(llm)
    assert [text_of(content)[:32] for content in first.contents] == [
        SUMMARY_BEGINS,
        "[System: The conversation was co",
    ]
    for request in later:
        assert request.contents[:2] == first.contents
        assert "ORIGINAL" not in request.text
    assert [len(request.contents) for request in later] == [4, 6, 8]
    assert text_of(later[-1].contents[5]) == "And now?"
    assert llm.summaries == 1


async def test_summary_is_read_from_state_alone() -> None:
    """A new process carries on where the old one stopped."""
    llm = SimulatedLlm()
    chat = await long_chat(llm)
    before = llm.requests[-1].contents
    successor = guarded_chat(llm, chat={"session_service": chat.sessions})
    await successor.say("And now?")
    assert llm.summaries == 1
    assert llm.requests[-1].contents[:2] == before


async def test_ledger_keeps_the_users_words_out_of_the_models_reach() -> None:
    """Whatever the summariser writes, the user's own messages stand beside it."""
    llm = SimulatedLlm(summary_replies=["Nothing of interest."])
    chat = guarded_chat(llm)
    await seed(
        chat,
        user("Never touch the production database."),
        model(words(3_000)),
    )
    await chat.say("Go on.")
    summary = text_of(llm.requests[-1].contents[0])
    assert summary.startswith(f"{SUMMARY_BEGINS}Nothing of interest.\n\n")
    assert "- Never touch the production database.\n- Go on.\n" in summary
    state = await chat.state()
    assert state[SUMMARY] == "Nothing of interest."
    excerpts = json.loads(state["__context_guard_ledger_agent"])
    assert excerpts == ["Never touch the production database.", "Go on."]


async def test_state_stays_small() -> None:
    """Beside the summary an agent takes at most 16 KiB, however long the session."""
    llm = SimulatedLlm(context_window=1_000_000, summary_replies=["Short."])
    strategy = Threshold(context_window=1_000_000)
    chat = guarded_chat(llm, strategy, chat={"session_service": KeptSessions()})
    contents = [
        (model if number % 2 else user)(words(60, f"message {number}"))
        for number in range(3_000)
    ]
    await seed(chat, *contents, state=NOW)
    await chat.say("Go on.")
    state = await chat.state()
    assert len(llm.requests[-1].contents) == 2
    sizes = [len(str(state[key]).encode()) for key in state if key != SUMMARY]
    assert sum(sizes) <= 16 * 1024
    await chat.say("And now?")
    assert len(llm.requests[-1].contents) == 4
    assert llm.summaries == 1


# --- A compaction on demand -------------------------------------------------------


def compacting_tool(agent: str | None = None) -> Callable[..., Any]:
    """A tool with which the agent asks for a compaction."""

    def tidy_up(tool_context: ToolContext) -> str:
        """Tidies up."""
        request_compaction(tool_context.state, agent)
        return "Asked for."

    return tidy_up


@pytest.mark.parametrize("agent", [None, "agent"])
async def test_a_tool_can_ask_for_a_compaction(agent: str | None) -> None:
    """It is served before the next model call, and once."""
    llm = SimulatedLlm(script=[scripted_call("tidy_up"), "Tidy.", "Bye."])
    chat = guarded_chat(llm, tools=[compacting_tool(agent)])
    await seed(chat, user("The task."), model(words(500)))
    await chat.say("Tidy up!")
    assert [request.is_summary for request in llm.requests] == [False, True, False]
    assert len(llm.requests[-1].contents) == 2
    await chat.say("Go on.")
    assert llm.summaries == 1
    flags = [v for key, v in (await chat.state()).items() if key.startswith("context_")]
    assert flags == [False]


async def test_a_callback_can_ask_for_a_compaction() -> None:
    """The state of a callback works as well as that of a tool."""

    def before_agent(callback_context: CallbackContext) -> None:
        if "Now" in text_of(callback_context.user_content or user()):
            request_compaction(callback_context.state)

    llm = SimulatedLlm()
    chat = guarded_chat(llm, before_agent_callback=before_agent)
    await seed(chat, user("The task."), model(words(500)))
    await chat.say("Hello.")
    assert llm.summaries == 0
    await chat.say("Now!")
    assert llm.summaries == 1
    await chat.say("Bye.")
    assert llm.summaries == 1


async def test_a_state_delta_can_ask_for_a_compaction() -> None:
    """An application asks when it sends a message."""
    llm = SimulatedLlm()
    chat = guarded_chat(llm)
    await seed(chat, user("The task."), model(words(500)))
    delta: dict[str, Any] = {"probe": 1}
    request_compaction(delta)
    await chat.say("Hello.", state_delta=delta)
    if "probe" not in await chat.state():
        pytest.skip("this ADK drops the state_delta of a run")
    assert llm.summaries == 1
    await chat.say("Bye.")
    assert llm.summaries == 1


async def test_a_demand_for_another_agent_is_left_to_it() -> None:
    """Naming an agent spares the others."""
    llm = SimulatedLlm()
    chat = guarded_chat(llm)
    await seed(
        chat,
        user("The task."),
        model(words(500)),
        state={"context_guard:compact:other": True},
    )
    await chat.say("Hello.")
    assert llm.summaries == 0
    assert (await chat.state())["context_guard:compact:other"] is True


async def test_a_demand_without_anything_to_gain_is_served() -> None:
    """A history shorter than its summary stays; the demand does not linger."""
    llm = SimulatedLlm()
    chat = guarded_chat(llm)
    await seed(chat, state=NOW)
    await chat.say("Hello.")
    assert llm.requests[-1].contents == [user("Hello.")]
    state = await chat.state()
    assert state["context_guard:compact"] is False
    assert SUMMARY not in state


# --- No loops ---------------------------------------------------------------------


async def test_compaction_does_not_fire_on_two_calls_running() -> None:
    """Between threshold and 97 % of the window the call after a compaction waits."""
    llm = SimulatedLlm(
        context_window=20_000, token_ratio=1.0, summary_replies=["One.", "Two."]
    )
    chat = guarded_chat(llm)
    await chat.say("Hello.")
    await seed(chat, user("The task."), model(words(3_300)))
    await chat.say("Go on.")
    await seed(chat, user("More."), model(words(3_100)))
    await chat.say("Go on.")
    await chat.say("Go on.")
    kinds = [request.is_summary for request in llm.requests]
    assert kinds == [False, True, False, False, True, False]
    assert 3_200 <= llm.requests[3].prompt_tokens < 3_880


async def test_overfull_requests_do_not_wait() -> None:
    """Above 97 % of the window even the call after a compaction is compacted."""
    llm = SimulatedLlm(
        context_window=WINDOW, token_ratio=1.0, script=[scripted_call("look"), "Done."]
    )
    chat = guarded_chat(
        llm,
        Threshold(context_window=WINDOW),
        tools=[queued_tool("look", [words(3_700)])],
    )
    await seed(chat, user("The task."), model(words(2_500)))
    assert answer_text(await chat.say("Go on.")) == "Done."
    assert llm.rejections == 0
    assert all(request.prompt_tokens < 3_200 for request in agent_requests(llm))


async def test_no_summary_is_paid_for_little_news(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is new must be worth half a summary, else the request waits."""
    caplog.set_level(logging.INFO, logger="contextguard_adk")
    # Without usage every estimate is 1.5 times the heuristic.
    llm = SimulatedLlm(
        context_window=20_000,
        token_ratio=1.0,
        usage="never",
        summary_replies=[words(110, "SUMMARY")],
    )
    chat = guarded_chat(llm, instruction=words(1_840))
    await seed(chat, user("The task."), model(words(1_000)))
    await chat.say("Go on.")
    for number in range(7):
        await chat.say(f"turn {number}")
    assert llm.summaries == 1
    assert 3_200 / 1.5 <= llm.requests[-1].prompt_tokens < 3_880 / 1.5
    assert not [r for r in caplog.records if "dropped" in r.getMessage()]


KNOWN = {
    "__context_guard_real_tokens_agent": 100,
    "__context_guard_last_heuristic_agent": 100,
}
"""State of a provider whose count was what the heuristic said."""


async def test_a_fixed_part_that_is_too_large_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """History is not summarised in vain where the instruction fills the window."""
    llm = SimulatedLlm(context_window=20_000, token_ratio=1.0)
    chat = guarded_chat(llm, instruction=words(3_300))
    await seed(chat, state=KNOWN)
    for number in range(5):
        events = await chat.say(f"turn {number}")
        assert answer_text(events) == f"Acknowledged: turn {number}"
    assert llm.summaries == 0
    warnings = [r for r in caplog.records if "alone, the threshold" in r.getMessage()]
    assert len(warnings) == 1
    assert "3200" in warnings[0].getMessage()


async def test_a_fixed_part_is_judged_once_the_provider_has_counted() -> None:
    """What only seems too large, while nothing is known, does not disarm the guard."""
    llm = SimulatedLlm(
        context_window=WINDOW, token_ratio=1.0, summary_replies=["A summary."] * 9
    )
    strategy = Threshold(context_window=WINDOW)
    chat = guarded_chat(llm, strategy, instruction=words(2_600))
    for number in range(6):
        await chat.say(words(250, f"turn {number}"))
    assert llm.rejections == 0
    assert first_texts(llm)[0] == "[Previous"


@pytest.mark.parametrize(
    ("usage", "instruction_tokens"),
    [("last", 4_200), ("never", 4_200), ("never", 2_700)],
    ids=["counted", "silent provider", "silent provider, seems too large"],
)
async def test_a_fixed_part_beyond_the_window_costs_no_summaries(
    usage: Any, instruction_tokens: int
) -> None:
    """Feasibility is checked before a summary is paid for."""
    llm = SimulatedLlm(context_window=20_000, token_ratio=1.0, usage=usage)
    chat = guarded_chat(llm, instruction=words(instruction_tokens))
    for number in range(6):
        await chat.say(words(200, f"turn {number}"))
    assert llm.summaries == 0
    assert len(llm.requests[-1].contents) == 11


async def test_a_compaction_that_gains_nothing_is_dropped() -> None:
    """A summary as long as what it stands for does not replace it."""
    llm = SimulatedLlm(summary_replies=lambda request: "fact 4711. " * 200)
    chat = guarded_chat(llm)
    await seed(chat, user("The task."), model(words(100, "SHORT")), state=NOW)
    await chat.say("Go on.")
    assert llm.summaries == 1
    assert len(llm.requests[-1].contents) == 3
    assert SUMMARY not in await chat.state()


async def test_short_messages_do_not_buy_summaries_in_vain() -> None:
    """A window of short messages is not summarised again and again for nothing."""
    llm = SimulatedLlm(
        context_window=100_000, summary_replies=lambda request: words(350, "SUMMARY")
    )
    chat = guarded_chat(llm, SlidingWindow(context_window=100_000, max_turns=6))
    for number in range(20):
        await chat.say(f"And number {number}?")
    assert llm.summaries <= 3


# --- A failing summariser ---------------------------------------------------------


async def hang(request: LlmRequest) -> Reply:
    """Never answers."""
    await asyncio.sleep(60)
    return "Too late."


def blocked() -> LlmResponse:
    """What a provider returns that refuses to answer."""
    return LlmResponse(error_code="SAFETY", error_message="Refused.")


FAILURES: dict[str, Any] = {
    "raises": lambda request: RuntimeError("down"),
    "hangs": hang,
    "is empty": lambda request: "",
    "is blank": lambda request: " \n ",
    "calls a tool": lambda request: scripted_call("look"),
    "only thinks": lambda request: types.Part(text="Hm.", thought=True),
    "is refused": lambda request: blocked(),
}


@pytest.mark.parametrize("reply", FAILURES.values(), ids=FAILURES)
async def test_a_failed_summary_is_replaced_by_a_mechanical_one(reply: Any) -> None:
    """The turn goes on; the next compaction summarises the originals again."""
    replies: list[Any] = [reply]

    def summarise(request: LlmRequest) -> Any:
        return replies.pop(0)(request) if replies else "A good summary."

    llm = SimulatedLlm(
        context_window=20_000, token_ratio=1.0, summary_replies=summarise
    )
    strategy = Threshold(
        context_window=WINDOW,
        summarizer_context_window=100_000,
        summary_timeout_seconds=0.5,
    )
    chat = guarded_chat(llm, strategy)
    await seed(
        chat,
        user("The task."),
        model(f"{words(1_500, 'BEGIN')} MIDDLE {words(1_500)} END"),
    )
    assert answer_text(await chat.say("Go on.")).startswith("Acknowledged")
    summary = str((await chat.state())[SUMMARY])
    assert summary.startswith("user: The task.\nmodel: BEGIN")
    assert "END" in summary
    assert "MIDDLE" not in summary
    assert llm.requests[-1].prompt_tokens < 3_200
    await seed(chat, state=NOW)
    await chat.say("And now?")
    assert "MIDDLE" in summary_requests(llm)[-1].text
    assert (await chat.state())[SUMMARY] == "A good summary."
    assert "BEGIN" not in llm.requests[-1].text


async def test_an_over_long_summary_is_cut_to_its_budget() -> None:
    """A model that ignores its limits cannot fill the window with a summary."""
    llm = SimulatedLlm(
        context_window=20_000,
        summary_replies=lambda request: f"HEAD {words(9_000)} TAIL",
    )
    chat = await long_chat(llm)
    summary = str((await chat.state())[SUMMARY])
    assert summary.startswith("HEAD")
    assert summary.endswith("TAIL")
    assert llm.requests[-1].prompt_tokens < 400 + 200


async def test_repeated_failures_spare_the_summariser_for_a_while() -> None:
    """After three failures five compactions are mechanical, then it is asked again."""
    llm = SimulatedLlm(
        context_window=100_000, summary_replies=lambda request: RuntimeError("down")
    )
    strategy = Threshold(context_window=100_000)
    chat = guarded_chat(llm, strategy)
    asked = []
    for number in range(10):
        await seed(chat, user("Hi."), model(words(2_000)), state=NOW)
        before = llm.summaries
        await chat.say(words(2_000, f"turn {number}"))
        asked.append(llm.summaries - before)
    assert asked == [1, 1, 1, 0, 0, 0, 0, 0, 1, 1]


async def test_a_success_ends_the_count_of_failures() -> None:
    """Only failures in a row spare the summariser."""
    replies: list[Reply] = [RuntimeError("down"), RuntimeError("down"), "Good."]
    llm = SimulatedLlm(context_window=100_000, summary_replies=replies * 3)
    chat = guarded_chat(llm, Threshold(context_window=100_000))
    for number in range(9):
        await seed(chat, user("Hi."), model(words(2_000)), state=NOW)
        await chat.say(words(2_000, f"turn {number}"))
    assert llm.summaries == 9


async def test_an_unknown_summariser_leaves_it_to_the_agents_own_model() -> None:
    """A name that ADK cannot resolve does not leave the agent unguarded."""
    llm = SimulatedLlm()
    strategy = Threshold(
        context_window=WINDOW,
        summarizer="no-such-model",
        summarizer_context_window=100_000,
    )
    await long_chat(llm, strategy=strategy)
    assert len(llm.requests[-1].contents) == 2


async def test_a_summariser_of_its_own_is_asked() -> None:
    """The strategy's summariser writes the summaries, the agent's model answers."""
    summariser = SimulatedLlm(model="small", summary_replies=["By another model."])
    llm = SimulatedLlm()
    strategy = Threshold(context_window=WINDOW, summarizer=summariser)
    chat = guarded_chat(llm, strategy)
    await seed(chat, user("The task."), model(words(3_000)))
    await chat.say("Go on.")
    assert (summariser.calls, llm.calls) == (1, 1)
    assert summariser.requests[0].config.max_output_tokens == 400
    assert (await chat.state())[SUMMARY] == "By another model."


# --- Failed model calls, rewinds, other processes ---------------------------------


async def test_a_paid_summary_is_not_lost_with_a_failed_model_call() -> None:
    """The state of a failed step is lost; the summary is written again."""
    llm = SimulatedLlm(
        script=[RuntimeError("boom"), "Done."], summary_replies=["A summary."]
    )
    chat = guarded_chat(llm)
    await seed(chat, user("The task."), model(words(3_000, "ORIGINAL")))
    with pytest.raises(Exception, match="boom"):
        await chat.say("Go on.")
    assert SUMMARY not in await chat.state()
    assert answer_text(await chat.say("Try again.")) == "Done."
    assert llm.summaries == 1
    assert "ORIGINAL" not in llm.requests[-1].text
    assert (await chat.state())[SUMMARY]


async def test_a_newer_summary_is_not_overwritten_by_a_remembered_one() -> None:
    """Another process may have summarised since; what state holds is newer."""
    llm = SimulatedLlm(summary_replies=["FIRST", "SECOND"])
    one = guarded_chat(llm)
    other = guarded_chat(llm, chat={"session_service": one.sessions})
    await seed(one, user("The task."), model(words(3_000)))
    await one.say("Go on.")
    await other.say(words(1_500))
    await other.say(words(1_600))
    assert (await one.state())[SUMMARY] == "SECOND"
    await one.say("And now?")
    assert text_of(llm.requests[-1].contents[0]).startswith(f"{SUMMARY_BEGINS}SECOND")
    assert (await one.state())[SUMMARY] == "SECOND"


async def rewind(chat: Chat, invocation_id: str) -> None:
    """Takes the session back to before an invocation."""
    await chat.runner.rewind_async(
        user_id="user",
        session_id=chat.session_id,
        rewind_before_invocation_id=invocation_id,
    )


async def test_a_rewind_takes_the_summary_back() -> None:
    """What was summarised in a turn that is undone stands in full again."""
    llm = SimulatedLlm(context_window=20_000, token_ratio=0.5)
    chat = guarded_chat(llm)
    await chat.say("The task.")
    await chat.say(words(1_000, "second"))
    undone = await chat.say(words(2_200, "third"))
    assert llm.summaries == 1
    await rewind(chat, undone[0].invocation_id)
    await chat.say("Something else.")
    assert first_texts(llm)[::2] == ["The", "second", "Something"]
    assert llm.summaries == 1
    assert not (await chat.state()).get(SUMMARY)


async def test_a_rewind_after_a_summary_leaves_it_in_place() -> None:
    """Undoing a later turn does not touch the summary."""
    llm = SimulatedLlm()
    chat = await long_chat(llm)
    undone = await chat.say("A mistake.")
    await rewind(chat, undone[0].invocation_id)
    await chat.say("Something else.")
    assert first_texts(llm) == ["[Previous", "[System:", "Acknowledged:", "Something"]
    assert "A mistake." not in llm.requests[-1].text
    assert llm.summaries == 1


# --- What state says --------------------------------------------------------------


async def test_a_learned_window_counts() -> None:
    """The guard keeps to a window that a provider once named."""
    llm = SimulatedLlm(token_ratio=1.0)
    chat = guarded_chat(llm)
    learned = {"__context_guard_learned_window_agent": 2_000}
    await seed(chat, user("The task."), model(words(1_700)), state=learned)
    await chat.say("Go on.")
    assert llm.summaries == 1
    assert summary_requests(llm)[0].config.max_output_tokens == 200


@pytest.mark.parametrize("usage", ["never", "last"])
async def test_a_learned_correction_stands_in_for_usage(usage: Any) -> None:
    """What a rejection has taught counts as long as the provider says nothing."""
    llm = SimulatedLlm(token_ratio=1.0, usage=usage)
    chat = guarded_chat(llm)
    learned = {"__context_guard_learned_correction_agent": 300}
    await seed(chat, state=learned)
    await chat.say(words(300))
    await seed(chat, model("And?"), user(words(700)))
    await chat.say(words(100))
    assert llm.summaries == (usage == "never")


async def test_a_learned_window_never_widens_the_configured_one() -> None:
    """What the user has set is the most that is used."""
    llm = SimulatedLlm(token_ratio=1.0)
    chat = guarded_chat(llm)
    learned = {"__context_guard_learned_window_agent": 100_000}
    await seed(chat, user("The task."), model(words(3_000)), state=learned)
    await chat.say("Go on.")
    assert llm.summaries == 1


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({SUMMARY: 7}, id="summary is a number"),
        pytest.param({"__context_guard_mark_agent": "{"}, id="mark is broken"),
        pytest.param({"__context_guard_covered_agent": "%%%"}, id="covered is broken"),
        pytest.param({"__context_guard_covered_agent": 1.5}, id="covered is a number"),
        pytest.param({"__context_guard_real_tokens_agent": "many"}, id="count is text"),
        pytest.param(
            {"__context_guard_learned_window_agent": [1]}, id="window is list"
        ),
    ],
)
async def test_broken_state_is_ignored(state: dict[str, Any]) -> None:
    """Whatever stands under the guard's keys, the turn goes on."""
    llm = SimulatedLlm(context_window=20_000)
    chat = await long_chat(llm)
    await seed(chat, state=state)
    # A new process: nothing is remembered but what state holds.
    successor = guarded_chat(llm, chat={"session_service": chat.sessions})
    assert answer_text(await successor.say("And now?")) == "Acknowledged: And now?"
    is_lost = not any("tokens" in key or "window" in key for key in state)
    assert first_texts(llm)[0] == ("The" if is_lost else "[Previous")
    assert llm.summaries == 1


async def test_summaries_of_another_session_are_not_used() -> None:
    """A copied state does not bring a foreign summary into a conversation."""
    llm = SimulatedLlm()
    chat = await long_chat(llm)
    state = {k: v for k, v in (await chat.state()).items() if "guard" in k}
    other = guarded_chat(
        llm, chat={"session_service": chat.sessions, "session_id": "other"}
    )
    await seed(other, state=state)
    await other.say("Hello.")
    assert llm.requests[-1].contents == [user("Hello.")]


# --- Output that is reserved, models that think -----------------------------------


async def test_reserved_output_lowers_the_threshold() -> None:
    """Where the request reserves more than the buffer, that much stays free."""
    llm = SimulatedLlm(token_ratio=1.0)
    config = types.GenerateContentConfig(max_output_tokens=1_500)
    chat = guarded_chat(llm, generate_content_config=config)
    state = {
        "__context_guard_real_tokens_agent": 100,
        "__context_guard_last_heuristic_agent": 100,
    }
    await seed(chat, user("The task."), model(words(2_490)), state=state)
    await chat.say("Go on.")
    assert llm.summaries == 1


async def test_summaries_carry_the_agents_call_settings() -> None:
    """Transport, labels and safety settings are those of the agent's own calls."""
    llm = SimulatedLlm()
    config = types.GenerateContentConfig(
        http_options=types.HttpOptions(timeout=1_234, headers={"x-team": "blue"}),
        labels={"team": "blue"},
        safety_settings=[
            types.SafetySetting(
                category=types.HarmCategory.HARM_CATEGORY_HARASSMENT,
                threshold=types.HarmBlockThreshold.BLOCK_NONE,
            )
        ],
        temperature=0.9,
        stop_sequences=["###"],
    )
    await long_chat(llm, generate_content_config=config)
    sent = summary_requests(llm)[0].config
    assert sent.http_options is not None
    assert (sent.http_options.headers or {})["x-team"] == "blue"
    assert sent.labels == {"team": "blue"}
    assert sent.safety_settings == config.safety_settings
    assert sent.stop_sequences is None
    assert not sent.tools


# --- What the request holds beside history ----------------------------------------


async def test_instructions_are_neither_summarised_nor_dropped() -> None:
    """With a static instruction the dynamic one is a content that moves."""
    llm = SimulatedLlm(script=[scripted_call("look"), "Found."])
    chat = guarded_chat(
        llm,
        static_instruction="You help.",
        instruction="Today is Monday.",
        tools=[queued_tool("look", ["a result"])],
    )
    await seed(chat, user("The task."), model(words(3_000)))
    await chat.say("Go on.")
    assert llm.summaries == 1
    assert "Monday" not in summary_requests(llm)[0].contents[0].model_dump_json()
    for request in agent_requests(llm):
        assert request.text.count("Today is Monday.") == 1
    assert llm.violations == 0


async def test_transient_context_is_neither_summarised_nor_dropped() -> None:
    """What the run configuration adds to each request stays in each request."""
    if "model_input_context" not in RunConfig.model_fields:
        pytest.skip("this ADK has no model_input_context")
    run_config = RunConfig.model_validate(
        {"model_input_context": [user("The weather is fine.")]}
    )
    llm = SimulatedLlm(script=["One.", "Two."])
    chat = guarded_chat(llm, chat={"run_config": run_config})
    await seed(chat, user("The task."), model(words(3_000)))
    await chat.say("Go on.")
    await chat.say("And now?")
    assert llm.summaries == 1
    assert "weather" not in summary_requests(llm)[0].text
    for request in agent_requests(llm):
        assert request.text.count("The weather is fine.") == 1


async def test_partly_loaded_sessions_keep_their_summary() -> None:
    """A session of which only the newest events are loaded is still summarised."""
    run_config = RunConfig(get_session_config=GetSessionConfig(num_recent_events=3))
    llm = SimulatedLlm(script=["One.", "Two.", "Three.", "Four."])
    chat = await long_chat(llm)
    await chat.say("Second.")
    chat.run_config = run_config
    await chat.say("Third.")
    request = llm.requests[-1]
    assert llm.violations == 0
    assert text_of(request.contents[0]).startswith(SUMMARY_BEGINS)
    assert text_of(request.contents[-1]) == "Third."
    assert "ORIGINAL" not in request.text


@pytest.mark.parametrize("thought", [False, True], ids=["call", "thought"])
async def test_thought_signatures_come_back_verbatim(thought: bool) -> None:
    """Contents that are kept are kept whole, with their signatures."""
    part = call_part("look")
    part.thought_signature = b"\x01signature"
    parts = [types.Part(text="Hm.", thought=True), part] if thought else [part]
    llm = SimulatedLlm(script=[parts, "Found.", "Bye."])
    chat = guarded_chat(
        llm,
        SlidingWindow(context_window=100_000, max_turns=4),
        tools=[queued_tool("look", ["a result"])],
    )
    await seed(chat, user("The task."), model(words(900)), user("And?"), model("So."))
    await chat.say("Look!")
    assert llm.summaries >= 1
    kept = llm.requests[-1].contents
    signed = [p for c in kept for p in c.parts or () if p.thought_signature]
    assert [p.thought_signature for p in signed] == [b"\x01signature"]
    assert signed[0].function_call


async def test_images_of_the_live_message_ride_on_the_continuation() -> None:
    """What the user shows is shown again after a compaction, and later."""
    llm = SimulatedLlm()
    chat = guarded_chat(llm)
    await seed(chat, user("The task."), model(words(3_000)))
    message = user("What is on this picture?")
    message.parts = [*(message.parts or ()), IMAGE]
    await chat.say(message)
    await chat.say("And now?")
    for request in agent_requests(llm):
        continuation = request.contents[1]
        assert "`What is on this picture?`" in text_of(continuation)
        assert (continuation.parts or [])[1:] == [IMAGE]
    assert "[attached image/png, 36 bytes]" in summary_requests(llm)[0].text


async def test_a_message_of_images_alone_is_shown_again() -> None:
    """Without a text there is nothing to quote, but the image is there."""
    llm = SimulatedLlm()
    chat = guarded_chat(llm)
    await seed(chat, user("The task."), model(words(3_000)))
    await chat.say(types.Content(role="user", parts=[IMAGE]))
    (request,) = agent_requests(llm)
    assert len(request.contents) == 2
    text, image = request.contents[1].parts or []
    assert "Continue where it leaves off" in str(text.text)
    assert image == IMAGE


# --- The live request -------------------------------------------------------------


async def test_live_request_stays_word_for_word() -> None:
    """Up to 30 % of the window the user's message is quoted whole, on every call."""
    llm = SimulatedLlm(
        context_window=20_000,
        token_ratio=1.0,
        script=[scripted_call("look"), scripted_call("look"), "Done."],
        summary_replies=["A summary."],
    )
    chat = guarded_chat(llm, tools=[queued_tool("look", [words(100)])])
    message = f"BEGIN {words(390)} MIDDLE {words(390)} END"
    await seed(chat, user("The task."), model(words(2_500)))
    await chat.say(message)
    requests = agent_requests(llm)
    assert len(requests) == 3
    assert llm.summaries == 1
    for request in requests:
        assert f"`{message}`" in text_of(request.contents[1])


async def test_giant_live_request_is_clipped_in_the_middle() -> None:
    """Beyond 30 % of the window head and tail are quoted; the summariser sees all."""
    llm = SimulatedLlm(
        context_window=20_000, token_ratio=1.0, summary_replies=["A summary."]
    )
    chat = guarded_chat(llm)
    await chat.say("Hello.")
    message = f"BEGIN {words(1_000)} MIDDLE {words(3_000)} END"
    await chat.say(message)
    await chat.say("And now?")
    assert llm.summaries == 1
    first, second = agent_requests(llm)[1:]
    continuation = text_of(first.contents[1])
    assert "`BEGIN " in continuation
    assert " END`" in continuation
    assert "MIDDLE" not in first.text
    assert "middle left out" in continuation
    assert len(continuation) <= 0.3 * WINDOW * 4 + 600
    assert second.contents[:2] == first.contents
    assert "MIDDLE" in summary_requests(llm)[0].text


@pytest.mark.parametrize("repeated", ["yes", "Go on."])
async def test_repeated_messages_are_not_mistaken_for_covered_ones(
    repeated: str,
) -> None:
    """A user who says the same again is heard again."""
    llm = SimulatedLlm(script=["One.", "Two.", "Three.", "Four.", "Five."])
    chat = guarded_chat(llm)
    await chat.say(repeated)
    await chat.say(repeated)
    await seed(chat, user("The task."), model(words(3_000)))
    await chat.say(repeated)
    assert llm.summaries == 1
    for answer in ("Four.", "Five."):
        assert answer_text(await chat.say(repeated)) == answer
        assert text_of(llm.requests[-1].contents[-1]) == repeated
    texts = [text_of(content) for content in llm.requests[-1].contents[2:]]
    assert texts == ["Three.", repeated, "Four.", repeated]


async def test_continuation_yields_to_a_newer_message() -> None:
    """The continuation stays, byte for byte; the new message follows below it."""
    llm = SimulatedLlm()
    chat = await long_chat(llm)
    before = llm.requests[-1].contents
    await chat.say("Forget that. Sing a song.")
    after = llm.requests[-1].contents
    assert after[:2] == before
    assert "If a newer message of the user follows below" in text_of(after[1])
    assert after[-1] == user("Forget that. Sing a song.")


async def test_history_of_a_single_turn_is_tagged_by_it() -> None:
    """An agent that sees only the current turn gets no summary of an older one."""
    steps: list[Reply] = [scripted_call("look") for _ in range(5)]
    llm = SimulatedLlm(token_ratio=1.0, script=[*steps, "Done.", "Second."])
    chat = guarded_chat(
        llm, include_contents="none", tools=[queued_tool("look", [words(1_000)])]
    )
    await chat.say("First turn.")
    assert llm.summaries == 1
    assert first_texts(llm)[0] == "[Previous"
    await chat.say("Second turn.")
    assert llm.requests[-1].contents == [user("Second turn.")]


# --- Beside others ----------------------------------------------------------------


class ContentWatch(BasePlugin):
    """Tells whether the contents of requests are still held by anyone."""

    def __init__(self) -> None:
        super().__init__(name="watch")
        self.seen: list[weakref.ref[types.Content]] = []

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Notes the contents."""
        self.seen += [weakref.ref(content) for content in llm_request.contents]


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "streamed"])
async def test_contents_are_forgotten_once_they_are_answered(
    is_streaming: bool,
) -> None:
    """A finished call leaves nothing of its contents in memory."""
    watch = ContentWatch()
    guard = ContextGuardPlugin(default=Threshold(context_window=WINDOW))
    llm = SimulatedLlm(keep_requests=0)
    chat = Chat(guarded_agent(llm), [watch, guard], is_streaming=is_streaming)
    for _ in range(3):
        await chat.say("Hello.")
    gc.collect()
    assert len(watch.seen) == 9
    assert [seen for seen in watch.seen if seen() is not None] == []


async def test_no_text_of_the_conversation_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At INFO and above the guard speaks of numbers, not of contents."""
    caplog.set_level(logging.INFO, logger="contextguard_adk")
    replies: list[Reply] = [RuntimeError("SECRET"), "The SECRET summary."]
    llm = SimulatedLlm(context_window=20_000, summary_replies=replies)
    chat = guarded_chat(llm)
    await seed(chat, user("My SECRET."), model(words(3_000, "SECRET")))
    for _ in range(2):
        await chat.say("A SECRET request.")
        await seed(chat, state=NOW)
    lines = [r.getMessage() for r in caplog.records if "contextguard" in r.name]
    assert len(lines) >= 3
    assert "SECRET" not in "\n".join(lines)


async def test_concurrent_sessions_do_not_mix() -> None:
    """One plugin serves many sessions at once; each gets its own summary."""

    def summarise(request: LlmRequest) -> str:
        text = text_of(request.contents[-1])
        return next(f"About {n}." for n in range(5) if f"session-{n} " in text)

    llm = SimulatedLlm(summary_replies=summarise, latency_seconds=0.01)
    plugin = ContextGuardPlugin(
        default=Threshold(context_window=WINDOW, summarizer_context_window=100_000)
    )
    chats = [
        guarded_chat(llm, plugin=plugin, chat={"session_id": str(number)})
        for number in range(5)
    ]

    async def talk(number: int, chat: Chat) -> None:
        await seed(chat, user("Hi."), model(words(3_000, f"session-{number}")))
        await chat.say("Go on.")
        await chat.say("And now?")

    await asyncio.gather(*(talk(number, chat) for number, chat in enumerate(chats)))
    for number, chat in enumerate(chats):
        assert (await chat.state())[SUMMARY] == f"About {number}."


def pair_texts(contents: Sequence[types.Content]) -> list[str]:
    """Which contents call a tool or answer one."""
    kinds = []
    for content in contents:
        part = (content.parts or [types.Part()])[0]
        kinds.append(
            "call"
            if part.function_call
            else "result"
            if part.function_response
            else "-"
        )
    return kinds


async def test_a_late_result_comes_back_with_its_call() -> None:
    """A result that replaces a pending one in the covered part is seen again."""
    llm = SimulatedLlm(script=["I wait.", "Compacted.", "Granted, thanks."])
    chat = guarded_chat(llm)
    await seed(
        chat,
        user("Buy it."),
        call("approve", "id-1"),
        response("approve", "pending", "id-1"),
    )
    await seed(chat, model(words(500)))
    await chat.say("And?")
    await seed(chat, state=NOW)
    await chat.say("And now?")
    assert pair_texts(llm.requests[-1].contents) == ["-", "-"]
    await chat.say(response("approve", "granted", "id-1"))
    contents = llm.requests[-1].contents
    assert llm.violations == 0
    assert [kind for kind in pair_texts(contents) if kind != "-"] == ["call", "result"]
    assert "granted" in llm.requests[-1].text
