"""The plugin: its settings, which agents and requests it guards, and its boundary."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from google.adk.agents import (
    BaseAgent,
    LlmAgent,
    LoopAgent,
    ParallelAgent,
    SequentialAgent,
)
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.agents.live_request_queue import LiveRequestQueue
from google.adk.events.event import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.plugins.plugin_manager import PluginManager
from google.adk.sessions import InMemorySessionService
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.tool_context import ToolContext
from google.adk.workflow import START, Workflow
from google.genai import types
from pydantic import BaseModel

from contextguard_adk import (
    Compaction,
    CompactionContext,
    ContextGuardPlugin,
    SlidingWindow,
    Strategy,
    Threshold,
)
from contextguard_adk.testing import RecordedRequest, Reply, SimulatedLlm
from contextguard_adk.testing import call as scripted_call
from tests.builders import (
    Chat,
    answer_text,
    event,
    guarded_agent,
    model,
    queued_tool,
    user,
)

WINDOW = 4_000
"""Threshold 3,200 tokens, summaries of 400."""

SMALL = Threshold(context_window=WINDOW, summarizer_context_window=100_000)
SUMMARY_BEGINS = "[Previous conversation summary]\n"

# ADK wants workflows in their place, but supports them, and AgentTool uses the other.
workflow_agents = pytest.mark.filterwarnings(
    r"ignore:\w+Agent is deprecated .*Workflow:DeprecationWarning"
)
agent_tools = pytest.mark.filterwarnings(
    "ignore:The `plugins` argument is deprecated:DeprecationWarning"
)


def words(token_count: int, name: str = "") -> str:
    """Prose of four bytes for each token, recognisable by its name."""
    return f"{name} {'notebooks ' * token_count}"[: 4 * token_count]


async def seed(
    chat: Chat,
    *contents: types.Content,
    author: str = "agent",
    state: dict[str, Any] | None = None,
) -> None:
    """Puts an earlier conversation and state into the session."""
    place: dict[str, Any] = {"app_name": "app", "user_id": "user"}
    place["session_id"] = chat.session_id
    session = await chat.sessions.get_session(**place)
    if session is None:
        session = await chat.sessions.create_session(**place)
    for content in contents:
        name = "user" if content.role == "user" else author
        await chat.sessions.append_event(session, event(content, name))
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


def is_compacted(request: RecordedRequest) -> bool:
    """Whether a summary stands at the beginning of a request."""
    return bool(request.contents) and text_of(request.contents[0]).startswith(
        SUMMARY_BEGINS
    )


async def summary_of(chat: Chat, agent: str) -> Any:
    """The stored summary of an agent, without its index, under whichever key."""
    state = await chat.state()
    plain = state.get(f"__context_guard_summary_{agent}")
    summary = plain or state.get(f"context_guard:summary:{agent}")
    return summary and summary.partition("\n\n[Items left out")[0]


# --- Settings ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"agents": {"a": Threshold}}, id="a class"),
        pytest.param({"agents": {"a": {"max_turns": 30}}}, id="a dict"),
        pytest.param({"agents": {"a": "threshold"}}, id="a name"),
        pytest.param({"default": 200_000}, id="a number"),
        pytest.param({"default": SlidingWindow}, id="a class as the default"),
    ],
)
def test_a_strategy_of_the_wrong_type_is_refused(wrong: dict[str, Any]) -> None:
    """The error names the agent and what was given."""
    with pytest.raises(TypeError, match=r"'(a|default)' must be a Strategy") as caught:
        ContextGuardPlugin(**wrong)
    assert "Strategy or None, not" in str(caught.value)


def test_unknown_settings_are_refused() -> None:
    """A misspelt setting does not leave the app unguarded."""
    with pytest.raises(TypeError, match="agent"):
        ContextGuardPlugin(agent={})  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        ContextGuardPlugin({})  # type: ignore[call-arg]


def test_unknown_state_keys_are_refused() -> None:
    """There are three ways to name the keys."""
    with pytest.raises(ValueError, match=r"'auto', 'plain' or 'namespaced'.*flat"):
        ContextGuardPlugin(state_keys="flat")  # type: ignore[arg-type]


def test_the_plugin_has_a_name() -> None:
    """ADK may pass one, otherwise there is a default."""
    assert ContextGuardPlugin().name == "context_guard"
    name = "contextguard_adk.ContextGuardPlugin"
    assert ContextGuardPlugin(name=name).name == name


# --- Which agents are guarded -----------------------------------------------------


class Registry:
    """Knows one model."""

    def __init__(self, window_tokens: int | None) -> None:
        self.window_tokens = window_tokens
        self.asked: list[str] = []

    def context_window(self, model: str) -> int | None:
        """Returns the window."""
        self.asked.append(model)
        return self.window_tokens


async def talk(plugin: ContextGuardPlugin, **settings: Any) -> SimulatedLlm:
    """Continues a long conversation under a guard; returns the provider."""
    llm = SimulatedLlm(context_window=1_000_000, token_ratio=1.0)
    chat = Chat(guarded_agent(llm, **settings), [plugin])
    await seed(chat, user("The task."), model(words(5_000)))
    assert answer_text(await chat.say("Go on.")).startswith("Acknowledged")
    return llm


@pytest.mark.parametrize(
    ("plugin", "is_guarded"),
    [
        pytest.param(ContextGuardPlugin(registry=Registry(4_000)), True, id="default"),
        pytest.param(ContextGuardPlugin(default=SMALL), True, id="given default"),
        pytest.param(
            ContextGuardPlugin(agents={"agent": SMALL}, default=None), True, id="named"
        ),
        pytest.param(
            ContextGuardPlugin(agents={"other": SMALL}, default=None), False, id="other"
        ),
        pytest.param(
            ContextGuardPlugin(agents={"agent": None}, default=SMALL),
            False,
            id="exempt",
        ),
        pytest.param(
            ContextGuardPlugin(agents={"agent": Threshold()}, default=SMALL),
            False,
            id="named with a wide window",
        ),
        pytest.param(ContextGuardPlugin(registry=Registry(None)), False, id="unknown"),
    ],
)
async def test_agents_and_default_decide_who_is_guarded(
    plugin: ContextGuardPlugin, is_guarded: bool
) -> None:
    """A named strategy wins over the default; None exempts."""
    llm = await talk(plugin)
    assert is_compacted(llm.requests[-1]) is is_guarded
    assert bool(llm.summaries) is is_guarded


async def test_the_registry_is_asked_for_the_agents_model() -> None:
    """Without a configured window the model's name decides."""
    registry = Registry(4_000)
    await talk(ContextGuardPlugin(registry=registry))
    assert set(registry.asked) == {"simulated"}


async def test_a_configured_window_wins_over_the_registry() -> None:
    """What the user has set needs no look-up."""
    registry = Registry(4_000)
    strategy = Threshold(context_window=100_000)
    llm = await talk(ContextGuardPlugin(default=strategy, registry=registry))
    assert llm.summaries == 0
    assert registry.asked == []


async def test_a_failing_registry_is_no_obstacle() -> None:
    """A registry that raises leaves the assumed window of 128,000 tokens."""

    class Failing(Registry):
        def context_window(self, model: str) -> int | None:
            raise OSError("no network")

    llm = await talk(ContextGuardPlugin(registry=Failing(None)))
    assert llm.summaries == 0


# --- Observing --------------------------------------------------------------------


async def test_observing_changes_nothing_but_reports(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A guard that only observes sends what came, and says what it would do."""
    caplog.set_level(logging.INFO, logger="contextguard_adk")
    llm = SimulatedLlm(context_window=1_000_000, token_ratio=1.0)
    chat = Chat(guarded_agent(llm), [ContextGuardPlugin(default=SMALL, observe=True)])
    history = [user("The task."), model(words(5_000))]
    await seed(chat, *history, state={"context_guard:compact": True})
    await chat.say("Go on.")
    assert llm.summaries == 0
    assert llm.requests[0].contents == [*history, user("Go on.")]
    state = await chat.state()
    assert state["context_guard:compact"] is True
    assert not [key for key in state if "summar" in key or "covered" in key]
    (line,) = (r.getMessage() for r in caplog.records if "Observing" in r.getMessage())
    assert "'agent'" in line
    assert "3200" in line
    await seed(chat, state={"context_guard:compact": False})
    await chat.say("Thanks.")
    assert llm.requests[1].contents[:3] == llm.requests[0].contents


async def test_observing_sets_a_stored_summary_aside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Switching a guard to observing gives back, and measures, the whole history."""
    caplog.set_level(logging.INFO, logger="contextguard_adk")
    llm = SimulatedLlm(context_window=1_000_000, token_ratio=1.0)
    guarded = Chat(guarded_agent(llm), [ContextGuardPlugin(default=SMALL)])
    await seed(guarded, user("The task."), model(words(5_000)))
    await guarded.say("Go on.")
    observing = Chat(
        guarded_agent(llm),
        [ContextGuardPlugin(default=SMALL, observe=True)],
        session_service=guarded.sessions,
    )
    await observing.say("Thanks.")
    assert text_of(llm.requests[-1].contents[0]) == "The task."
    assert len(llm.requests[-1].contents) == 5
    assert await summary_of(guarded, "agent")
    assert "Observing agent 'agent'" in caplog.text


async def test_observing_does_not_recover() -> None:
    """A rejected request stays rejected while the guard only observes."""
    llm = SimulatedLlm(context_window=WINDOW, token_ratio=1.0)
    chat = Chat(guarded_agent(llm), [ContextGuardPlugin(default=SMALL, observe=True)])
    await seed(chat, user("The task."), model(words(5_000)))
    with pytest.raises(Exception, match="maximum context length"):
        await chat.say("Go on.")
    assert llm.calls == 1


async def test_observing_says_nothing_of_small_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Below the threshold there is nothing to report."""
    caplog.set_level(logging.INFO, logger="contextguard_adk")
    chat = Chat(
        guarded_agent(SimulatedLlm()), [ContextGuardPlugin(default=SMALL, observe=True)]
    )
    await chat.say("Hello.")
    assert "Observing" not in caplog.text


# --- Requests that are left alone -------------------------------------------------


class Chained(BasePlugin):
    """Makes requests continue a history that the provider holds."""

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Names the previous interaction."""
        llm_request.previous_interaction_id = "interaction-1"


async def test_histories_that_the_provider_holds_are_left_alone() -> None:
    """The request goes out as it came; nothing is stored."""
    llm = SimulatedLlm(context_window=1_000_000)
    plugins = [Chained(name="chained"), ContextGuardPlugin(default=SMALL)]
    chat = Chat(guarded_agent(llm), plugins)
    history = [user("The task."), model(words(5_000))]
    await seed(chat, *history)
    await chat.say("Go on.")
    assert llm.requests[0].contents == [*history, user("Go on.")]
    assert await chat.state() == {}


async def callback_context(
    agent: BaseAgent, plugin: BasePlugin, **settings: Any
) -> CallbackContext:
    """What ADK passes to a callback, for an invocation with these settings."""
    sessions = InMemorySessionService()
    session = await sessions.create_session(app_name="app", user_id="user")
    invocation = InvocationContext(
        invocation_id="invocation",
        agent=agent,
        session=session,
        session_service=sessions,
        plugin_manager=PluginManager(plugins=[plugin]),
        **settings,
    )
    return CallbackContext(invocation)


@pytest.mark.parametrize("is_live", [False, True], ids=["plain", "live"])
async def test_live_requests_are_left_alone(is_live: bool) -> None:
    """The live connection holds the history; a request is no more than a piece."""
    llm = SimulatedLlm(context_window=1_000_000)
    plugin = ContextGuardPlugin(default=SMALL)
    settings = {"live_request_queue": LiveRequestQueue()} if is_live else {}
    context = await callback_context(guarded_agent(llm), plugin, **settings)
    contents = [model(words(3_000)), user(words(1_000))]
    request = LlmRequest(model="simulated", contents=list(contents))
    await plugin.before_model_callback(callback_context=context, llm_request=request)
    assert (request.contents == contents) is is_live
    assert bool(llm.summaries) is not is_live


# --- Two guards -------------------------------------------------------------------


async def test_two_guards_work_once(caplog: pytest.LogCaptureFixture) -> None:
    """A guard in the app and one on the command line do not compact twice, and say
    once which of them works."""
    llm = SimulatedLlm(context_window=1_000_000, token_ratio=1.0)
    first = ContextGuardPlugin(default=SMALL)
    second = ContextGuardPlugin(
        default=SMALL, name="contextguard_adk.ContextGuardPlugin"
    )
    chat = Chat(guarded_agent(llm), [first, second])
    await seed(chat, user("The task."), model(words(5_000)))
    for message in ("Go on.", "And now?"):
        await chat.say(message)
        state = await chat.state()
        sent = llm.requests[-1]
        assert state["__context_guard_real_tokens_agent"] == sent.prompt_tokens
    assert llm.summaries == 1
    assert sent.text.count(SUMMARY_BEGINS) == 1
    told = (
        "'context_guard' does the work, 'contextguard_adk.ContextGuardPlugin' is idle"
    )
    assert caplog.text.count(told) == 1


async def test_two_guards_may_share_the_agents(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A guard does not keep another one from agents that it does not guard."""
    llm = SimulatedLlm(context_window=1_000_000, token_ratio=1.0)
    first = ContextGuardPlugin(agents={"other": SMALL}, default=None, name="first")
    second = ContextGuardPlugin(agents={"agent": SMALL}, default=None, name="second")
    chat = Chat(guarded_agent(llm), [first, second])
    await seed(chat, user("The task."), model(words(5_000)))
    await chat.say("Go on.")
    assert is_compacted(llm.requests[-1])
    assert "idle" not in caplog.text


# --- The boundary -----------------------------------------------------------------


class Broken(Strategy):
    """Fails on every call."""

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Raises."""
        raise LookupError("a mistake in the strategy")


async def test_a_failing_guard_cuts_instead(caplog: pytest.LogCaptureFixture) -> None:
    """Where the guard itself fails, the request is cut to what fits."""
    llm = SimulatedLlm(context_window=WINDOW)
    plugin = ContextGuardPlugin(default=Broken(context_window=WINDOW))
    chat = Chat(guarded_agent(llm), [plugin])
    await seed(
        chat, user("The task."), model(words(5_000)), user("And?"), model("Yes.")
    )
    assert answer_text(await chat.say("Go on.")) == "Acknowledged: Go on."
    assert llm.rejections == 0
    assert "The guard failed for agent 'agent'" in caplog.text
    assert "LookupError" in caplog.text
    assert "Earlier messages were left out" in llm.requests[-1].text


async def test_a_failing_guard_asks_its_registry_for_the_window() -> None:
    """The last resort knows the same window as the guard."""
    llm = SimulatedLlm(context_window=WINDOW)
    plugin = ContextGuardPlugin(default=Broken(), registry=Registry(WINDOW))
    chat = Chat(guarded_agent(llm), [plugin])
    await seed(
        chat, user("The task."), model(words(5_000)), user("And?"), model("Yes.")
    )
    assert answer_text(await chat.say("Go on.")) == "Acknowledged: Go on."
    assert llm.rejections == 0


async def test_nothing_of_the_guard_ends_a_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever fails in a callback is logged, and the turn goes on."""

    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("a mistake in the guard")

    for name in ("record_usage", "cut_request", "ModelCall"):
        monkeypatch.setattr(f"contextguard_adk.plugin.{name}", fail)
    llm = SimulatedLlm()
    chat = Chat(guarded_agent(llm), [ContextGuardPlugin(default=SMALL)])
    assert answer_text(await chat.say("Hello.")) == "Acknowledged: Hello."
    assert llm.requests[0].contents == [user("Hello.")]
    assert "could not store the provider's token count" in caplog.text
    assert "goes out as it came" in caplog.text


async def test_observing_cuts_nothing_where_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A guard that only observes changes no request, not even in distress."""

    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("a mistake in the guard")

    monkeypatch.setattr("contextguard_adk.plugin.ModelCall", fail)
    llm = SimulatedLlm(context_window=1_000_000)
    chat = Chat(guarded_agent(llm), [ContextGuardPlugin(default=SMALL, observe=True)])
    history = [user("The task."), model(words(5_000))]
    await seed(chat, *history)
    await chat.say("Go on.")
    assert llm.requests[0].contents == [*history, user("Go on.")]


async def test_an_unreadable_request_goes_out_as_it_came(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the guard cannot even tell whose request it is, it leaves it alone."""
    plugin = ContextGuardPlugin(default=SMALL)

    def fail(*args: object) -> None:
        raise AttributeError("a new ADK")

    monkeypatch.setattr(plugin, "_is_ours", fail)
    llm = SimulatedLlm()
    chat = Chat(guarded_agent(llm), [plugin])
    assert answer_text(await chat.say("Hello.")) == "Acknowledged: Hello."
    assert "could not tell whether a request is its own" in caplog.text


async def test_cancellation_passes_through() -> None:
    """A user who gives up while a summary is written does not have to wait."""
    started = asyncio.Event()

    async def hang(request: LlmRequest) -> Reply:
        started.set()
        await asyncio.sleep(60)
        return "Too late."

    llm = SimulatedLlm(context_window=1_000_000, summary_replies=hang)
    chat = Chat(guarded_agent(llm), [ContextGuardPlugin(default=SMALL)])
    await seed(chat, user("The task."), model(words(5_000)))
    turn = asyncio.create_task(chat.say("Go on."))
    await asyncio.wait_for(started.wait(), 10)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(turn, 10)
    assert agent_requests(llm) == []


class TooLong(BaseLlm):
    """Rejects every request, in the words of a provider."""

    calls: int = 0

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Raises."""
        self.calls += 1
        raise ValueError("prompt is too long: 9000 tokens > 4000 maximum")
        yield LlmResponse()


async def test_an_error_of_another_kind_is_not_ours() -> None:
    """A failure that has nothing to do with length reaches the user unchanged."""
    llm = SimulatedLlm(script=[ConnectionError("no network")])
    chat = Chat(guarded_agent(llm), [ContextGuardPlugin(default=SMALL)])
    with pytest.raises(Exception, match="no network"):
        await chat.say("Hello.")
    assert llm.calls == 1


@pytest.mark.parametrize("default", [None, SMALL], ids=["unguarded", "guarded"])
async def test_what_no_recovery_helps_reaches_the_user(
    default: Strategy | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A provider that rejects everything is reported, in its own words."""
    rejecting = TooLong(model="rejecting")
    agent = guarded_agent(SimulatedLlm())
    agent.model = rejecting
    chat = Chat(agent, [ContextGuardPlugin(default=default)])
    with pytest.raises(Exception, match="prompt is too long"):
        await chat.say("Hello.")
    if default is None:
        assert rejecting.calls == 1
    else:
        assert 1 <= rejecting.calls <= 4
        assert not await summary_of(chat, "agent")


async def test_a_failing_recovery_leaves_the_error_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistake in the recovery does not replace the provider's error."""

    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("a mistake in the recovery")

    monkeypatch.setattr("contextguard_adk.plugin.Recovery", fail)
    agent = guarded_agent(SimulatedLlm())
    agent.model = TooLong(model="rejecting")
    chat = Chat(agent, [ContextGuardPlugin(default=SMALL)])
    with pytest.raises(Exception, match="prompt is too long"):
        await chat.say("Hello.")
    assert "The recovery failed for agent 'agent'" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "streamed"])
async def test_a_rejected_request_is_answered_after_all(is_streaming: bool) -> None:
    """A window that was assumed too wide costs the user nothing."""
    llm = SimulatedLlm(context_window=WINDOW, summary_replies=["A summary."])
    plugin = ContextGuardPlugin(default=Threshold(context_window=100_000))
    chat = Chat(guarded_agent(llm), [plugin], is_streaming=is_streaming)
    history = [model(words(900, "B")), user(words(900, "A"))] * 8
    await seed(chat, *reversed(history))
    assert answer_text(await chat.say("Go on."))
    assert llm.rejections >= 1
    state = await chat.state()
    assert state["__context_guard_learned_window_agent"] == WINDOW
    sent = agent_requests(llm)[-1]
    assert state["__context_guard_real_tokens_agent"] == sent.prompt_tokens
    rejections = llm.rejections
    await chat.say("And now?")
    assert llm.rejections == rejections


# --- Several agents ---------------------------------------------------------------


def transfer(name: str) -> types.Part:
    """A call that hands the conversation over."""
    return scripted_call("transfer_to_agent", agent_name=name)


async def test_sub_agents_are_guarded_each_by_its_own_strategy() -> None:
    """Two agents that hand over to each other keep their state apart."""
    root_llm = SimulatedLlm(
        context_window=1_000_000, script=[transfer("researcher"), "Welcome back."]
    )
    researcher_llm = SimulatedLlm(
        context_window=1_000_000,
        token_ratio=1.0,
        script=[scripted_call("look"), "Found it.", transfer("writer")],
        summary_replies=["By the researcher."],
    )
    writer_llm = SimulatedLlm(
        context_window=1_000_000,
        token_ratio=1.0,
        script=["Written.", transfer("root")],
        summary_replies=["By the writer."],
    )
    researcher = LlmAgent(
        name="researcher",
        model=researcher_llm,
        description="Looks things up.",
        tools=[queued_tool("look", [words(3_300, "RESULT")])],
    )
    writer = LlmAgent(name="writer", model=writer_llm, description="Writes.")
    root = LlmAgent(name="root", model=root_llm, sub_agents=[researcher, writer])
    plugin = ContextGuardPlugin(
        agents={
            "researcher": SMALL,
            "writer": SlidingWindow(context_window=100_000, max_turns=8),
            "root": None,
        }
    )
    chat = Chat(root, [plugin])
    assert answer_text(await chat.say("Look it up.")) == "Found it."
    assert answer_text(await chat.say("Write it down.")) == "Written."
    assert answer_text(await chat.say("Back to the start.")) == "Welcome back."
    assert await summary_of(chat, "researcher") == "By the researcher."
    assert await summary_of(chat, "writer") == "By the writer."
    assert await summary_of(chat, "root") is None
    assert root_llm.summaries == 0
    assert is_compacted(agent_requests(researcher_llm)[1])
    assert is_compacted(agent_requests(writer_llm)[0])
    assert "RESULT" in root_llm.requests[-1].text
    for llm in (root_llm, researcher_llm, writer_llm):
        assert llm.violations == llm.rejections == 0


@agent_tools
async def test_an_agent_as_a_tool_is_guarded() -> None:
    """Its own session is compacted; the parent's state is not harmed."""
    child_llm = SimulatedLlm(
        context_window=1_000_000,
        token_ratio=1.0,
        script=[scripted_call("look"), "Found one.", scripted_call("look"), "Two."],
        summary_replies=["FIRST", "SECOND"],
    )
    child = LlmAgent(
        name="child",
        model=child_llm,
        description="Looks things up.",
        tools=[queued_tool("look", [words(3_500)])],
    )
    llm = SimulatedLlm(
        script=[
            scripted_call("child", request="Find one."),
            "One.",
            scripted_call("child", request="Find two."),
            "Two.",
        ]
    )
    agent = guarded_agent(llm)
    agent.tools = [AgentTool(child)]
    chat = Chat(agent, [ContextGuardPlugin(default=SMALL)])
    assert answer_text(await chat.say("One, please.")) == "One."
    assert answer_text(await chat.say("Two, please.")) == "Two."
    assert child_llm.summaries == 2
    one, compacted_one, two, compacted_two = agent_requests(child_llm)
    assert not is_compacted(one)
    assert "`Find one.`" in compacted_one.text
    # A new session: the summary of the first one is not used in it.
    assert not is_compacted(two)
    assert "`Find two.`" in compacted_two.text
    assert "FIRST" not in compacted_two.text
    assert llm.violations == child_llm.violations == 0
    assert not is_compacted(llm.requests[-1])


@workflow_agents
async def test_parallel_agents_are_guarded_apart() -> None:
    """Each branch compacts its own history at the same time."""
    llms = {
        name: SimulatedLlm(
            context_window=1_000_000,
            token_ratio=1.0,
            latency_seconds=0.01,
            script=[scripted_call("look"), f"Done by {name}."],
            summary_replies=[f"By {name}."],
        )
        for name in ("left", "right")
    }
    agents = [
        LlmAgent(
            name=name, model=llm, tools=[queued_tool("look", [words(3_500, name)])]
        )
        for name, llm in llms.items()
    ]
    chat = Chat(
        ParallelAgent(name="both", sub_agents=list(agents)),
        [ContextGuardPlugin(default=SMALL)],
    )
    events = await chat.say("Look everywhere.")
    answers = {text_of(item.content) for item in events if item.content}
    assert {"Done by left.", "Done by right."} <= answers
    for name, llm in llms.items():
        assert await summary_of(chat, name) == f"By {name}."
        assert llm.summaries == 1
        assert llm.violations == 0
        assert "`Look everywhere.`" in llm.requests[-1].text


@workflow_agents
async def test_a_loop_keeps_its_summary_from_round_to_round() -> None:
    """An agent that runs again and again carries its summary along."""
    llm = SimulatedLlm(
        context_window=WINDOW,
        token_ratio=1.0,
        script=[
            part for _ in range(4) for part in (scripted_call("look"), "Next round.")
        ],
    )
    tool = queued_tool("look", [words(900)])
    worker = LlmAgent(name="worker", model=llm, tools=[tool])
    loop = LoopAgent(name="loop", sub_agents=[worker], max_iterations=4)
    chat = Chat(loop, [ContextGuardPlugin(default=Threshold(context_window=WINDOW))])
    await chat.say("Work.")
    requests = agent_requests(llm)
    assert len(requests) == 8
    assert llm.rejections == llm.violations == 0
    first = next(i for i, request in enumerate(requests) if is_compacted(request))
    assert all(is_compacted(request) for request in requests[first:])
    assert all("`Work.`" in request.text for request in requests[first:])


@workflow_agents
async def test_a_sequence_is_guarded_step_by_step() -> None:
    """The second agent of a sequence summarises what the first one said."""
    first_llm = SimulatedLlm(script=[words(3_500, "DRAFT")])
    second_llm = SimulatedLlm(
        context_window=1_000_000, script=["Polished."], summary_replies=["A draft."]
    )
    sequence = SequentialAgent(
        name="sequence",
        sub_agents=[
            LlmAgent(name="first", model=first_llm),
            LlmAgent(name="second", model=second_llm),
        ],
    )
    chat = Chat(sequence, [ContextGuardPlugin(default=SMALL)])
    assert answer_text(await chat.say("Write.")) == "Polished."
    assert "DRAFT" in second_llm.requests[0].text
    assert "DRAFT" not in second_llm.requests[-1].text
    assert await summary_of(chat, "second") == "A draft."


# --- State schemas ----------------------------------------------------------------


class Declared(BaseModel):
    """The only keys that plain session state may hold."""

    city: str = ""


async def compact_with(
    root: Any, llm: SimulatedLlm, agent: str, **settings: Any
) -> Chat:
    """Has an agent compact its history twice in one turn, and returns the chat."""
    chat = Chat(root, [ContextGuardPlugin(default=SMALL, **settings)])
    await chat.say("Look it up.")
    assert llm.summaries >= 1
    assert is_compacted(llm.requests[-1])
    return chat


def looking_llm() -> SimulatedLlm:
    """A model that calls a tool twice and then answers."""
    return SimulatedLlm(
        context_window=1_000_000,
        token_ratio=1.0,
        script=[scripted_call("look"), scripted_call("look"), "Found."],
        summary_replies=["A summary.", "Another summary."],
    )


def looking_agent(llm: BaseLlm, **settings: Any) -> LlmAgent:
    """An agent whose tool returns more than fits."""
    tool = queued_tool("look", [words(3_500)])
    return LlmAgent(name="agent", model=llm, tools=[tool], **settings)


def schema_on_root(llm: BaseLlm) -> Any:
    """The agent itself declares the keys."""
    return looking_agent(llm, state_schema=Declared)


def schema_on_ancestor(llm: BaseLlm) -> Any:
    """The agent runs below one that declares the keys."""
    return SequentialAgent(
        name="root", sub_agents=[looking_agent(llm)], state_schema=Declared
    )


def schema_on_sibling(llm: BaseLlm) -> Any:
    """An agent beside it declares the keys."""
    other = LlmAgent(name="other", model=SimulatedLlm(), state_schema=Declared)
    return SequentialAgent(name="root", sub_agents=[looking_agent(llm), other])


def schema_on_workflow(llm: BaseLlm) -> Any:
    """The workflow around the agent declares the keys."""
    agent = looking_agent(llm)
    return Workflow(name="root", edges=[(START, agent)], state_schema=Declared)


def schema_in_workflow(llm: BaseLlm) -> Any:
    """The agent in a workflow declares the keys."""
    agent = looking_agent(llm, state_schema=Declared)
    return Workflow(name="root", edges=[(START, agent)])


def schema_behind_tool(llm: BaseLlm) -> Any:
    """An agent behind a tool declares the keys; its state is written back."""
    other = LlmAgent(name="other", model=SimulatedLlm(), state_schema=Declared)
    agent = looking_agent(llm)
    agent.tools = [*agent.tools, AgentTool(other)]
    return agent


def schema_over_tool(llm: BaseLlm) -> Any:
    """The guarded agent runs behind a tool of one that declares the keys."""
    ask = scripted_call("agent", request="Look it up.")
    tool = AgentTool(looking_agent(llm))
    return LlmAgent(
        name="root",
        model=SimulatedLlm(script=[ask, "Told.", "Told again."]),
        tools=[tool],
        state_schema=Declared,
    )


@workflow_agents
@agent_tools
@pytest.mark.parametrize(
    "make_root",
    [
        schema_on_root,
        schema_on_ancestor,
        schema_on_sibling,
        schema_on_workflow,
        schema_in_workflow,
        schema_behind_tool,
        schema_over_tool,
    ],
)
async def test_state_schemas_get_namespaced_keys(make_root: Any) -> None:
    """Where anything declares its state, the keys pass, and the turn goes on."""
    llm = looking_llm()
    chat = await compact_with(make_root(llm), llm, "agent")
    state = await chat.state()
    assert state["context_guard:summary:agent"]
    assert not [key for key in state if key.startswith("__context_guard")]
    assert answer_text(await chat.say("And now?"))
    assert llm.violations == 0


@pytest.mark.parametrize(
    ("state_keys", "key"),
    [
        ("auto", "__context_guard_summary_agent"),
        ("plain", "__context_guard_summary_agent"),
        ("namespaced", "context_guard:summary:agent"),
    ],
)
async def test_state_keys_can_be_forced(state_keys: str, key: str) -> None:
    """Without a schema the setting decides the form of the keys."""
    llm = looking_llm()
    chat = await compact_with(looking_agent(llm), llm, "agent", state_keys=state_keys)
    others = {"__context_guard_summary_agent", "context_guard:summary:agent"} - {key}
    state = await chat.state()
    assert state[key]
    assert not others & state.keys()


async def test_both_forms_of_keys_are_read() -> None:
    """An app that declares a schema later keeps its summaries."""
    llm = looking_llm()
    before = await compact_with(looking_agent(llm), llm, "agent")
    summaries = llm.summaries
    after = Chat(
        looking_agent(llm, state_schema=Declared),
        [ContextGuardPlugin(default=SMALL)],
        session_service=before.sessions,
    )
    await after.say("And now?")
    assert is_compacted(llm.requests[-1])
    assert llm.summaries == summaries


class OddAgent(BaseAgent):
    """An agent whose attributes are not what their names promise."""

    def tools(self) -> Sequence[str]:
        """No list of tools."""
        return ()

    async def _run_async_impl(
        self, ctx: InvocationContext
    ) -> AsyncGenerator[Event, None]:
        yield Event(author=self.name, content=model("Odd."))


class BrokenAgent(OddAgent):
    """An agent with an attribute that cannot be read."""

    @property
    def graph(self) -> None:
        """Raises."""
        raise LookupError("not yet built")


@pytest.mark.parametrize("kind", [OddAgent, BrokenAgent])
async def test_unusual_agents_are_no_obstacle(kind: type[OddAgent]) -> None:
    """Looking for schemas does not fail on an agent of the user's own making."""
    chat = Chat(kind(name="odd"), [ContextGuardPlugin()])
    assert answer_text(await chat.say("Hello.")) == "Odd."


# --- Beside other callbacks -------------------------------------------------------


async def test_callbacks_of_the_agent_see_the_compacted_request() -> None:
    """The guard works in place: later callbacks run, and run on its result."""
    seen: list[int] = []

    def before_model(
        callback_context: CallbackContext, llm_request: LlmRequest
    ) -> LlmResponse | None:
        seen.append(len(llm_request.contents))
        return None

    llm = await talk(
        ContextGuardPlugin(default=SMALL), before_model_callback=before_model
    )
    assert seen == [2]
    assert llm.summaries == 1


async def test_a_callback_that_answers_itself_leaves_the_count_alone() -> None:
    """A request that was never sent has no prompt tokens."""

    def before_model(
        callback_context: CallbackContext, llm_request: LlmRequest
    ) -> LlmResponse | None:
        return LlmResponse(content=model("From the cache."))

    llm = SimulatedLlm()
    agent = guarded_agent(llm, before_model_callback=before_model)
    chat = Chat(agent, [ContextGuardPlugin(default=SMALL)])
    assert answer_text(await chat.say("Hello.")) == "From the cache."
    assert llm.calls == 0
    assert await chat.state() == {}


async def test_tools_run_between_two_guarded_calls() -> None:
    """What a tool writes to state stands beside the guard's keys."""

    def remember(city: str, tool_context: ToolContext) -> str:
        """Remembers a city."""
        tool_context.state["city"] = city
        return words(3_500)

    llm = SimulatedLlm(
        context_window=1_000_000,
        token_ratio=1.0,
        script=[scripted_call("remember", city="Lyon"), "Noted."],
    )
    chat = Chat(guarded_agent(llm, [remember]), [ContextGuardPlugin(default=SMALL)])
    assert answer_text(await chat.say("I live in Lyon.")) == "Noted."
    state = await chat.state()
    assert state["city"] == "Lyon"
    assert state["__context_guard_summary_agent"]
