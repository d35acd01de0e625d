"""The plugin: its settings, which agents and requests it guards, and its boundary."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import BaseAgent, LlmAgent, SequentialAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.agents.live_request_queue import LiveRequestQueue
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.plugins.plugin_manager import PluginManager
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.base_tool import BaseTool
from google.adk.workflow import START, Workflow
from pydantic import BaseModel

from contextguard_adk import ContextGuardPlugin, SlidingWindow, Threshold
from contextguard_adk.config import CONFIG_VARIABLE
from contextguard_adk.testing import SimulatedLlm
from contextguard_adk.testing import call as scripted_call
from tests.builders import Chat, answer_text, guarded_agent, model, queued_tool, user
from tests.chats import SUMMARY, Changing, Registry, seed, words
from tests.guarded import NOW, SMALL, SUMMARY_BEGINS, is_compacted
from tests.talks import workflow_agents

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a dict": ({"agents": {"a": {"max_messages": 30}}}, r"\['a'\] must be a Strategy"),
    "a class": ({"default": SlidingWindow}, "default must be a Strategy"),
    "a misspelt setting": ({"agent": {}}, "agent"),
    "state keys": ({"state_keys": "flat"}, "flat.*'namespaced'"),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    """The error names the setting and what was given."""
    with pytest.raises((TypeError, ValueError), match=message):
        ContextGuardPlugin(**wrong)


# --- Which agents and requests are guarded ----------------------------------------


def big_llm() -> SimulatedLlm:
    """A model that refuses nothing."""
    return SimulatedLlm(context_window=1_000_000, token_ratio=1.0)


HISTORY = [user("The task."), model(words(5_000))]


async def open_chat(*plugins: BasePlugin, llm: SimulatedLlm) -> Chat:
    """A chat that already holds a long conversation."""
    chat = Chat(guarded_agent(llm), plugins)
    await seed(chat, *HISTORY)
    return chat


GUARDED: dict[str, tuple[dict[str, Any], bool]] = {
    "default": ({"registry": Registry(4_000)}, True),
    "unknown model": ({"registry": Registry(None)}, False),
    "named": ({"agents": {"agent": SMALL}, "default": None}, True),
    "other": ({"agents": {"other": SMALL}, "default": None}, False),
    "exempt": ({"agents": {"agent": None}, "default": SMALL}, False),
    "both": ({"agents": {"agent": Threshold()}, "default": SMALL}, False),
}


@pytest.mark.parametrize(("settings", "is_guarded"), GUARDED.values(), ids=GUARDED)
async def test_agents_and_default_decide_who_is_guarded(
    settings: dict[str, Any], is_guarded: bool
) -> None:
    """A named strategy wins over the default; None exempts."""
    llm = big_llm()
    chat = await open_chat(ContextGuardPlugin(**settings), llm=llm)
    assert answer_text(await chat.say("Go on.")).startswith("Acknowledged")
    assert is_compacted(llm.requests[-1]) is is_guarded
    assert bool(llm.summaries) is is_guarded


async def test_observing_changes_nothing_but_reports(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A guard that only observes sends what came, says what it would do."""
    caplog.set_level(logging.INFO, logger="contextguard_adk")
    llm = big_llm()
    guarded = await open_chat(ContextGuardPlugin(default=SMALL), llm=llm)
    await guarded.say("Go on.")
    paid = llm.summaries
    before = await guarded.state()

    guard = ContextGuardPlugin(default=SMALL, observe=True)
    chat = Chat(guarded_agent(llm), [guard], session_service=guarded.sessions)
    await chat.set_state(NOW)
    await chat.say("Thanks.")

    assert llm.summaries == paid
    assert llm.requests[-1].contents[:2] == HISTORY
    assert len(llm.requests[-1].contents) == 5
    state = await chat.state()
    assert state["context_guard:compact"] is True
    assert state[SUMMARY] == before[SUMMARY]

    messages = [r.getMessage() for r in caplog.records]
    [line] = [said for said in messages if "Observing agent" in said]
    assert "'agent'" in line
    assert "3200" in line


async def callback_context(
    agent: BaseAgent, plugin: BasePlugin, **settings: Any
) -> CallbackContext:
    """What ADK passes to a callback, for an invocation with these settings."""
    sessions = InMemorySessionService()
    invocation = InvocationContext(
        invocation_id="invocation",
        agent=agent,
        session=await sessions.create_session(app_name="app", user_id="user"),
        session_service=sessions,
        plugin_manager=PluginManager(plugins=[plugin]),
        **settings,
    )
    return CallbackContext(invocation)


async def test_histories_that_others_hold_are_left_alone() -> None:
    """Where the provider or a live connection holds the history, the request goes out
    as it came; nothing is stored."""

    def chain(request: LlmRequest) -> None:
        request.previous_interaction_id = "interaction-1"

    llm = big_llm()
    guard = ContextGuardPlugin(default=SMALL)
    chat = await open_chat(Changing(chain), guard, llm=llm)
    await chat.say("Go on.")
    assert llm.requests[0].contents == [*HISTORY, user("Go on.")]
    assert await chat.state() == {}
    live = {"live_request_queue": LiveRequestQueue()}
    context = await callback_context(guarded_agent(llm), guard, **live)
    request = LlmRequest(model="simulated", contents=list(HISTORY))
    await guard.before_model_callback(callback_context=context, llm_request=request)
    assert request.contents == HISTORY


async def test_two_guards_work_once(caplog: pytest.LogCaptureFixture) -> None:
    """A guard in the app and one on the command line do not compact twice."""
    llm = big_llm()
    guards = [ContextGuardPlugin(default=SMALL, name=name) for name in ("one", "two")]
    chat = await open_chat(*guards, llm=llm)
    for message in ("Go on.", "And now?"):
        await chat.say(message)
        state = await chat.state()
        sent = llm.requests[-1]
        assert state["__context_guard_real_tokens_agent"] == sent.prompt_tokens

    assert llm.summaries == 1
    assert sent.text.count(SUMMARY_BEGINS) == 1
    assert caplog.text.count("'one' does the work, 'two' is idle") == 1


class Strange(CallbackContext):
    """A callback context of an ADK that does not exist yet."""

    def get_invocation_context(self) -> InvocationContext:
        """Raises."""
        raise AttributeError("a new ADK")


async def test_callbacks_never_raise(caplog: pytest.LogCaptureFixture) -> None:
    """Where the guard cannot even see whose request it is, it leaves it alone."""
    plugin = ContextGuardPlugin(default=SMALL)
    known = await callback_context(guarded_agent(SimulatedLlm()), plugin)
    context = Strange(known.get_invocation_context())
    request = LlmRequest(model="simulated", contents=[user(words(5_000))])
    await plugin.before_model_callback(callback_context=context, llm_request=request)
    assert request.contents == [user(words(5_000))]

    await plugin.after_model_callback(
        callback_context=context, llm_response=LlmResponse(content=model("Fine."))
    )
    error = ValueError("prompt is too long: 9000 tokens > 4000 maximum")
    answer = await plugin.on_model_error_callback(
        callback_context=context, llm_request=request, error=error
    )
    assert answer is None
    assert "could not tell whether a request is its own" in caplog.text
    assert "could not store the provider's token count" in caplog.text
    assert "The recovery failed for agent 'agent'" in caplog.text
    assert "a new ADK" not in caplog.text


# --- The form of the keys in session state ----------------------------------------


class Declared(BaseModel):
    """The only keys that plain session state may hold."""

    city: str = ""


def looking_agent(llm: BaseLlm, *tools: BaseTool, **settings: Any) -> LlmAgent:
    """An agent whose tool returns more than fits; it has further tools."""
    look = queued_tool("look", [words(3_500)])
    return LlmAgent(name="agent", model=llm, tools=[look, *tools], **settings)


def other_agent() -> LlmAgent:
    """An agent beside the guarded one that declares the keys."""
    return LlmAgent(name="other", model=big_llm(), state_schema=Declared)


ROOTS: dict[str, tuple[Callable[[BaseLlm], Any], dict[str, Any], bool]] = {
    "agent": (lambda llm: looking_agent(llm, state_schema=Declared), {}, True),
    "workflow": (
        lambda llm: Workflow(
            name="root", edges=[(START, looking_agent(llm))], state_schema=Declared
        ),
        {},
        True,
    ),
    "sibling": (
        lambda llm: SequentialAgent(
            name="root", sub_agents=[looking_agent(llm), other_agent()]
        ),
        {},
        True,
    ),
    "tool": (lambda llm: looking_agent(llm, AgentTool(other_agent())), {}, True),
    "no schema": (looking_agent, {"state_keys": "auto"}, False),
    "forced": (looking_agent, {"state_keys": "namespaced"}, True),
}


@workflow_agents
@pytest.mark.parametrize(
    ("make_root", "settings", "is_namespaced"), ROOTS.values(), ids=ROOTS.keys()
)
async def test_a_state_schema_or_a_setting_has_keys_namespaced(
    make_root: Any, settings: dict[str, Any], is_namespaced: bool
) -> None:
    """Where anything declares its state, the keys pass, and the turn goes on."""
    look = scripted_call("look")
    llm = big_llm()
    llm.script = [look, look, "Found."]
    chat = Chat(make_root(llm), [ContextGuardPlugin(default=SMALL, **settings)])
    await chat.say("Look it up.")
    assert llm.summaries
    assert is_compacted(llm.requests[-1])

    forms = (SUMMARY, "context_guard:summary:agent")
    state = await chat.state()
    assert state[forms[is_namespaced]]
    assert forms[not is_namespaced] not in state
    assert not is_namespaced or not any("__context_guard" in key for key in state)
    assert answer_text(await chat.say("And now?"))
    assert llm.violations == 0


# --- Names ------------------------------------------------------------------------


async def test_a_name_that_no_agent_has_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the nearest name there is, wherever in the tree its agent stands."""
    named = dict.fromkeys(("agent", "clerk", "clerc"), SMALL)
    clerk = LlmAgent(name="clerk", model=big_llm())
    root = looking_agent(big_llm(), AgentTool(clerk))
    chat = Chat(root, [ContextGuardPlugin(agents=named, default=None)])
    for _ in range(2):
        assert await chat.say("Hello.")
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    [said] = [r.getMessage() for r in warnings if r.name.startswith("contextguard")]

    assert "'clerc'" in said
    assert "Did you mean 'clerk'?" in said


async def test_a_file_that_apps_share_may_name_agents_of_others(
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only what looks like a misspelled name of this app's agents is reported."""
    path = tmp_path / "guard.toml"
    monkeypatch.setenv(CONFIG_VARIABLE, str(path))
    others = ("writer", "router", "scanner", "agent_of_sales")
    for names, is_told in ((("agent", *others), False), ((*others, "agnet"), True)):
        caplog.clear()
        path.write_text("".join(f"[agents.{name}]\n" for name in names))
        chat = Chat(looking_agent(big_llm()), [ContextGuardPlugin()])
        assert await chat.say("Hello.")
        warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
        texts = [record.getMessage() for record in warnings]
        said = [text for text in texts if "`agents`" in text]
        assert len(said) == is_told
        assert ("'agnet'" in "".join(said)) is is_told
        assert ("Did you mean 'agent'?" in "".join(said)) is is_told
