"""Who is guarded, and with what, is chosen: off for a session, or by a function."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.apps import App
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types

from contextguard_adk import (
    CompactionRecord,
    ContextGuardPlugin,
    SlidingWindow,
    Threshold,
)
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import SimulatedLlm, SimulatedProviderError, call
from tests.builders import Chat, answer_text, guarded_agent, model, user
from tests.chats import EXACT, REAL, SUMMARY, Registry, seed, words
from tests.guarded import NOW, SMALL, WINDOW, is_compacted, original

OFF = "context_guard:off"


def large() -> SimulatedLlm:
    """A model that takes whatever it is sent."""
    return SimulatedLlm(context_window=100_000, token_ratio=1.0)


async def chat_of(guard: ContextGuardPlugin, llm: SimulatedLlm, **agent: Any) -> Chat:
    """A chat whose next request reaches the threshold."""
    chat = Chat(guarded_agent(llm, **agent), [guard])
    await seed(chat, user("The task."), original(3_300), state=EXACT)
    return chat


@pytest.mark.parametrize("on", [False, None])
async def test_a_session_is_left_alone(on: Any) -> None:
    """As if its agents were exempt, until it is on again."""
    llm = large()
    chat = await chat_of(ContextGuardPlugin(default=SMALL), llm)
    await chat.set_state({OFF: True, **NOW})
    before = await chat.state()

    for _ in range(2):
        assert answer_text(await chat.say("Go on."))
    assert await chat.state() == before
    assert llm.summaries == 0
    assert "ORIGINAL" in llm.requests[-1].text
    assert not llm.requests[-1].config.tools

    await chat.set_state({OFF: on})
    await chat.say("Go on.")
    assert is_compacted(llm.requests[-1])

    await chat.set_state({OFF: True})
    await chat.say("Go on.")
    assert "ORIGINAL" in llm.requests[-1].text
    await chat.set_state({OFF: on})
    await chat.say("Go on.")
    assert is_compacted(llm.requests[-1])  # By the summary that was paid for.
    assert llm.summaries == 1


@pytest.mark.parametrize("value", [1, "true", {"a": True}, 0])
async def test_only_true_switches_it_off(value: Any) -> None:
    """Session state may hold anything."""
    llm = large()
    chat = await chat_of(ContextGuardPlugin(default=SMALL), llm)
    await chat.set_state({OFF: value})
    await chat.say("Go on.")
    assert is_compacted(llm.requests[-1])


async def test_nothing_is_sent_again_where_it_is_off() -> None:
    """A request that the provider rejects ends the turn, as without a guard."""
    llm = SimulatedLlm(context_window=2_500, token_ratio=1.0)
    chat = await chat_of(ContextGuardPlugin(default=SMALL), llm)
    await chat.set_state({OFF: True})
    with pytest.raises(SimulatedProviderError):
        await chat.say("Go on.")
    assert (llm.rejections, llm.summaries) == (1, 0)


SWITCH = call("switch_off")
DONE = types.Part(text="Done.")


async def test_a_tool_may_switch_it_off_within_a_turn() -> None:
    """From the next call on; what the provider counts for that is not stored."""

    def switch_off(tool_context: Any) -> str:
        """Switches the guard off."""
        tool_context.state[OFF] = True
        return words(500)

    usage = types.GenerateContentResponseUsageMetadata(prompt_token_count=30)
    llm = SimulatedLlm(context_window=100_000, usage="never")
    first, last = (types.Content(role="model", parts=[p]) for p in (SWITCH, DONE))
    llm.script = [
        LlmResponse(content=first),
        LlmResponse(content=last, usage_metadata=usage),
    ]
    root = guarded_agent(llm, [switch_off])
    chat = Chat(root, [ContextGuardPlugin(default=SMALL)])
    await chat.say("Go on.")
    assert len(llm.requests) == 2
    assert await chat.state() == {OFF: True}


def by_plan(context: CallbackContext) -> Strategy | None:
    """Chooses by what the session is worth."""
    return {"small": SMALL, "none": None}.get(context.state.get("plan", ""), SMALL)


@pytest.mark.parametrize("place", ["default", "agents"])
async def test_a_function_chooses(place: str) -> None:
    """For each call anew, by whatever it finds in the callback context."""
    choice: Any = {"default": by_plan, "agents": {"agent": by_plan}}[place]
    llm = large()
    chat = await chat_of(ContextGuardPlugin(**{place: choice}), llm)
    await chat.set_state({"plan": "none"})
    await chat.say("Go on.")
    state = await chat.state()
    assert "ORIGINAL" in llm.requests[-1].text
    assert SUMMARY not in state
    assert state[REAL] == EXACT[REAL]

    await chat.set_state({"plan": "small"})
    await chat.say("Go on.")
    assert is_compacted(llm.requests[-1])


async def test_what_a_function_leaves_alone_is_not_sent_again() -> None:
    """It is asked where a call fails as well."""
    for plan, is_recovered in (("none", False), ("small", True)):
        llm = SimulatedLlm(context_window=2_500, token_ratio=1.0)
        guard = ContextGuardPlugin(default=by_plan)
        chat = Chat(guarded_agent(llm), [guard])
        await seed(chat, user("The task."), original(2_700), state={"plan": plan})
        try:
            await chat.say("Go on.")
        except SimulatedProviderError:
            assert not is_recovered
        assert is_compacted(llm.requests[-1]) == is_recovered


class NoChoiceError(Exception):
    """An error whose text quotes a message."""


def fail(context: CallbackContext) -> Strategy | None:
    """Fails."""
    raise NoChoiceError("ORIGINAL")


WRONG: dict[str, Any] = {
    "NoChoiceError": fail,
    "str": lambda _: "threshold",
    "bool": lambda _: False,
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_function_that_fails_guards_with_the_defaults(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning says what it gave, without the text of an error."""
    llm = large()
    guard = ContextGuardPlugin(default=WRONG[name], registry=Registry(WINDOW))
    chat = await chat_of(guard, llm)
    for _ in range(2):
        await chat.say("Go on.")
    assert is_compacted(llm.requests[-1])

    said = [r for r in caplog.records if r.levelno >= logging.INFO]
    assert "ORIGINAL" not in "".join(r.getMessage() for r in said)

    [warning] = [r for r in said if "chooses" in r.getMessage()]
    assert warning.levelname == "WARNING"
    assert f"agent 'agent' gave {name} in place" in warning.getMessage()


async def test_two_guards_ask_no_function_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first one does the work, even where its function leaves an agent alone."""
    asked = list[str]()

    def choose(context: CallbackContext) -> Strategy | None:
        asked.append(context.agent_name)
        return None

    guards = [
        ContextGuardPlugin(default=choose, name="first"),
        ContextGuardPlugin(default=choose, name="second"),
    ]
    llm = large()
    chat = Chat(guarded_agent(llm), guards)
    await chat.say("Go on.")
    assert asked == ["agent"]
    assert "'first' does the work, 'second' is idle" in caplog.text


async def test_the_log_says_that_a_function_chooses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is not called for that."""
    caplog.set_level(logging.INFO, "contextguard_adk")
    llm = large()
    named: Any = {"writer": SMALL, "raeder": SMALL}
    guard = ContextGuardPlugin(agents=named, default=by_plan)
    root = LlmAgent(
        name="reader", model=llm, sub_agents=[LlmAgent(name="writer", model=llm)]
    )
    await Chat(root, [guard]).say("Hello.")

    assert "reader: chosen by a function" in caplog.text
    assert "writer: Threshold, window 4,000" in caplog.text
    assert "Agents that `agents` does not name are guarded by by_plan." in caplog.text


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, copy.copy, lambda made: pickle.loads(pickle.dumps(made))],
    ids=["deepcopy", "copy", "pickle"],
)
async def test_a_copy_has_the_function(duplicate: Any) -> None:
    """As it has listeners."""
    llm = large()
    made = duplicate(ContextGuardPlugin(agents={"agent": by_plan}, default=None))
    chat = await chat_of(made, llm)
    await chat.say("Go on.")
    assert is_compacted(llm.requests[-1])


class CallableWindow(SlidingWindow):
    """A strategy that can be called as well."""

    def __call__(self, context: CallbackContext) -> None:
        """Must not be taken for a function."""
        raise AssertionError


async def test_a_strategy_that_can_be_called_is_a_strategy() -> None:
    """It guards, with its own settings."""
    llm = large()
    guard = ContextGuardPlugin(default=CallableWindow(context_window=WINDOW))
    chat = await chat_of(guard, llm)
    await chat.tell([user("More."), model("Yes.")] * 2)
    await chat.say("Go on.")
    assert is_compacted(llm.requests[-1])


async def test_one_guard_in_two_apps_keeps_them_apart() -> None:
    """Of the same user, session and agent; what is told carries the app."""
    records: list[CompactionRecord] = []
    strategy = Threshold(context_window=WINDOW)
    guard = ContextGuardPlugin(default=strategy, on_compaction=records.append)
    service = InMemorySessionService()
    llms = dict[str, SimulatedLlm]()

    for turn in range(4):
        for name in ("support", "coding"):
            llm = llms.setdefault(name, SimulatedLlm(context_window=WINDOW))
            agent = LlmAgent(name="assistant", model=llm)
            app = App(name=name, root_agent=agent, plugins=[guard])
            runner = Runner(app=app, session_service=service)
            if not turn:
                await service.create_session(app_name=name, user_id="u", session_id="s")
            said = types.UserContent(f"{name} {turn}. " + "And so on. " * 400)
            run = runner.run_async(user_id="u", session_id="s", new_message=said)
            assert [event async for event in run]

    assert {record.app for record in records} == {"support", "coding"}
    for name, other in ("support", "coding"), ("coding", "support"):
        assert not llms[name].rejections
        assert is_compacted(llms[name].requests[-1])
        assert other not in "".join(request.text for request in llms[name].requests)
        session = await service.get_session(app_name=name, user_id="u", session_id="s")
        assert session
        assert not any(key.startswith(("app:", "user:")) for key in session.state)
