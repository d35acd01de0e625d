"""Builders that make histories readable, and a real Runner around an offline model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.run_config import RunConfig
from google.adk.apps import App
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions import BaseSessionService, InMemorySessionService, Session
from google.adk.tools.base_tool import BaseTool
from google.genai import types

from contextguard_adk import CompactionRecord, ContextGuardPlugin
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import RecordedRequest, Reply, SimulatedLlm

SUMMARY_BEGIN = "[Previous conversation summary]"
SUMMARY_END = "[End of summary — conversation continues below]"


def user(*texts: str) -> types.Content:
    """A message of the user."""
    return types.Content(role="user", parts=[types.Part(text=t) for t in texts])


def model(*texts: str) -> types.Content:
    """An answer of the model."""
    return types.Content(role="model", parts=[types.Part(text=t) for t in texts])


def call_part(name: str, call_id: str | None = None, **args: Any) -> types.Part:
    """A part in which the model asks for a tool."""
    call = types.FunctionCall(name=name, args=args, id=call_id)
    return types.Part(function_call=call)


def response_part(
    name: str, result: Any = "ok", call_id: str | None = None
) -> types.Part:
    """A part with a tool's result."""
    payload = result if isinstance(result, dict) else {"result": result}
    answer = types.FunctionResponse(name=name, response=payload, id=call_id)
    return types.Part(function_response=answer)


def call(name: str, call_id: str | None = None, **args: Any) -> types.Content:
    """A content in which the model asks for one tool."""
    return types.Content(role="model", parts=[call_part(name, call_id, **args)])


DETACHED = type("Detached", (), {"__repr__": lambda _: 1 / 0})()
"""An object whose `repr` raises, as that of a database row may."""


def response(
    name: str, result: Any = "ok", call_id: str | None = None
) -> types.Content:
    """A content with one tool's result."""
    return types.Content(role="user", parts=[response_part(name, result, call_id)])


def calls(*parts: types.Part) -> types.Content:
    """A content with several parallel calls."""
    return types.Content(role="model", parts=list(parts))


def responses(*parts: types.Part) -> types.Content:
    """A content with several results."""
    return types.Content(role="user", parts=list(parts))


def event(content: types.Content, author: str = "") -> Event:
    """An event with this content; the author follows from its role."""
    author = author or ("user" if content.role == "user" else "agent")
    return Event(author=author, content=content)


class Chat:
    """One session, made when it is first needed, with a real Runner."""

    def __init__(
        self,
        agent: Any,
        plugins: Sequence[BasePlugin] = (),
        *,
        is_streaming: bool = False,
        session_service: BaseSessionService | None = None,
        session_id: str = "session",
        user_id: str = "user",
        run_config: RunConfig | None = None,
        **app_settings: Any,
    ) -> None:
        self.app = App(name="app", root_agent=agent, plugins=[*plugins], **app_settings)
        self.sessions = session_service or InMemorySessionService()
        self.runner = Runner(app=self.app, session_service=self.sessions)

        self.session_id = session_id
        self.user_id = user_id
        self._made_ids: set[str] = set()
        self.run_config = run_config or RunConfig.model_validate(
            {"streaming_mode": "sse" if is_streaming else None, "max_llm_calls": 0}
        )

    async def say(
        self, message: str | types.Content, state_delta: dict[str, Any] | None = None
    ) -> list[Event]:
        """Sends a message and returns the events of the turn."""
        if self.session_id not in self._made_ids:  # Each look at it is a copy.
            await self.session()
        run = self.runner.run_async(
            user_id=self.user_id,
            session_id=self.session_id,
            new_message=user(message) if isinstance(message, str) else message,
            run_config=self.run_config,
            state_delta=state_delta,
        )
        return [event async for event in run]

    async def session(self) -> Session:
        """The session, created where it is missing."""
        place: Any = {"user_id": self.user_id, "session_id": self.session_id}
        found = await self.sessions.get_session(app_name="app", **place)
        if found is None:
            found = await self.sessions.create_session(app_name="app", **place)
        self._made_ids.add(self.session_id)
        return found

    async def tell(self, contents: Iterable[types.Content]) -> None:
        """Adds messages to the session as if they had been said."""
        session = await self.session()
        for content in contents:
            await self.sessions.append_event(session, event(content))

    async def set_state(self, delta: dict[str, Any]) -> None:
        """Sets values between two turns; ADK 2.0 drops the `state_delta` of a run."""
        change = Event(author="app", actions=EventActions(state_delta=delta))
        await self.sessions.append_event(await self.session(), change)

    async def state(self) -> dict[str, Any]:
        """The session's state."""
        return {**(await self.session()).state}

    async def events(self) -> list[Event]:
        """The session's events."""
        return [*(await self.session()).events]


def answer_text(events: Sequence[Event]) -> str:
    """The text of the last event that has one."""
    for item in reversed(events):
        parts = item.content.parts if item.content else None
        text = "".join(part.text or "" for part in parts or ())
        if text and not item.partial:
            return text
    return ""


def queued_tool(name: str, results: Sequence[Any]) -> Callable[..., Any]:
    """A tool that returns one prepared result after the other, again and again."""
    queue = itertools.cycle(results)

    def tool(step: int = 0) -> Any:
        return next(queue)

    tool.__name__ = name
    tool.__doc__ = f"Returns what {name} finds."
    return tool


def guarded_agent(
    llm: SimulatedLlm,
    tools: Sequence[Callable[..., Any] | BaseTool] = (),
    **settings: Any,
) -> LlmAgent:
    """An agent of the name `agent`."""
    settings.setdefault("instruction", "You help.")
    return LlmAgent(name="agent", model=llm, tools=list(tools), **settings)


@dataclass(frozen=True)
class ToolUse:
    """One call that the model makes, and what the tool returns."""

    tool: str
    result: Any
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """A message of the user, the model's steps of parallel calls, and its answer."""

    request: str | types.Content
    steps: Sequence[Sequence[ToolUse]] = ()
    answer: str = "Done."

    @property
    def text(self) -> str:
        """What the user wrote."""
        if isinstance(self.request, str):
            return self.request
        return "\n".join(part.text for part in self.request.parts or () if part.text)


@dataclass(frozen=True)
class Conversation:
    """A whole scripted conversation, and how the provider counts and reports it."""

    turns: Sequence[Turn]
    instruction: str = "You help."
    tools: Sequence[BaseTool] = ()
    token_ratio: float | None = None
    usage: Literal["last", "never", "late"] = "last"
    media_tokens: int = 258


class ScriptedTool(BaseTool):
    """A tool that returns what was prepared for the `ref` of its call."""

    def __init__(
        self,
        name: str,
        description: str = "Returns what it finds.",
        parameters: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name=name, description=description)
        self.results: dict[str, Any] = {}
        self._properties = {
            key: types.Schema(type=types.Type.STRING, description=meaning)
            for key, meaning in {
                "ref": "What to look up.",
                **(parameters or {}),
            }.items()
        }

    def _get_declaration(self) -> types.FunctionDeclaration:
        schema = types.Schema(type=types.Type.OBJECT, properties=self._properties)
        return types.FunctionDeclaration(
            name=self.name, description=self.description, parameters=schema
        )

    async def run_async(self, *, args: dict[str, Any], tool_context: Any) -> Any:
        """Returns the prepared result."""
        return self.results[args["ref"]]


def script_conversation(talk: Conversation) -> tuple[list[Reply], list[ScriptedTool]]:
    """The model's replies, in order, and the tools with their results."""
    replies: list[Reply] = []
    tools: dict[str, ScriptedTool] = {}
    for number, turn in enumerate(talk.turns):
        for step, uses in enumerate(turn.steps):
            parts = []
            for position, use in enumerate(uses):
                ref = f"{number}.{step}.{position}"
                tool = tools.setdefault(use.tool, ScriptedTool(use.tool))
                tool.results[ref] = use.result
                parts.append(call_part(use.tool, ref=ref, **use.args))
            replies.append(parts)
        replies.append(turn.answer)

    return replies, list(tools.values())


class RequestTap(BasePlugin):
    """Keeps every request's contents as they pass, the list itself and its items."""

    def __init__(self, name: str = "tap") -> None:
        super().__init__(name=name)
        self.lists: list[list[types.Content]] = []
        self.contents: list[tuple[types.Content, ...]] = []

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Notes the contents; changes nothing."""
        self.lists.append(llm_request.contents)
        self.contents.append(tuple(llm_request.contents))


@dataclass(frozen=True)
class AgentCall:
    """One model call: what the guard got and did, and what the provider saw."""

    number: int
    turn: Turn
    original: tuple[types.Content, ...]
    compaction: CompactionRecord | None
    summary_count: int
    record: RecordedRequest

    @property
    def is_compacted(self) -> bool:
        """Whether a compaction was stored for it."""
        return self.compaction is not None

    @property
    def contents(self) -> list[types.Content]:
        """The contents that were sent."""
        return self.record.contents


@dataclass(frozen=True)
class Played:
    """A conversation that was played to its end."""

    llm: SimulatedLlm
    answers: list[str]
    calls: list[AgentCall]


async def play(
    conversation: Conversation, strategy: Strategy, llm: SimulatedLlm, **settings: Any
) -> Played:
    """Plays a conversation through a guarded `Chat`."""
    replies, tools = script_conversation(conversation)
    llm.script = replies
    of_agent = {"instruction": conversation.instruction, **settings.pop("agent", {})}
    agent = guarded_agent(llm, [*tools, *conversation.tools], **of_agent)
    tap = RequestTap()
    compactions = dict[int, CompactionRecord]()

    def note(done: CompactionRecord) -> None:
        compactions[len(tap.contents)] = done

    guard = ContextGuardPlugin(default=strategy, on_compaction=note)
    chat = Chat(agent, [tap, guard], **settings)
    played = Played(llm, [], [])
    turns: list[Turn] = []
    for turn in conversation.turns:
        played.answers.append(answer_text(await chat.say(turn.request)))
        turns += [turn] * (len(tap.contents) - len(turns))
    summary_count = 0
    number = 0
    was_refused = False
    for record in llm.requests:
        if record.is_summary:
            summary_count += 1
            continue
        # What follows a refused request is the same call, tried again.
        number += not was_refused
        known = turns[number - 1], tap.contents[number - 1], compactions.get(number)
        played.calls.append(AgentCall(number, *known, summary_count, record))
        summary_count = 0
        was_refused = record.rejected is not None
    return played


class KeptSessions(InMemorySessionService):
    """Keeps sessions as they are: long conversations without a copy every turn."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Session] = {}

    async def create_session(self, **place: Any) -> Session:
        """Creates a session."""
        session = await super().create_session(**place)
        return self.kept.setdefault(session.id, session)

    async def get_session(self, *, session_id: str, **_: Any) -> Session | None:
        """Returns the session itself, not a copy."""
        return self.kept.get(session_id)

    async def append_event(self, session: Session, event: Event) -> Event:
        """Adds an event to the session alone."""
        return await BaseSessionService.append_event(self, session, event)
