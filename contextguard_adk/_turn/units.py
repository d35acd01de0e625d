"""The small kinds of capability that stand beside the stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from google.adk.agents.callback_context import CallbackContext
from google.adk.models.llm_response import LlmResponse
from google.adk.tools.base_tool import BaseTool
from google.genai import types
from pydantic import JsonValue

from contextguard_adk._history.history import History
from contextguard_adk._measuring.budgets import TokenCounter
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._providers.clients import read_usage
from contextguard_adk._providers.overflow import Overflow
from contextguard_adk._runtime.memory import AgentMemory
from contextguard_adk._runtime.runs import Guard, Run, SentCall, call_key
from contextguard_adk._runtime.state import AgentState
from contextguard_adk._support.phrases import quote_stored
from contextguard_adk._turn.facts import Count, Outcome
from contextguard_adk._turn.turn import Turn
from contextguard_adk.records import CompactionRecord, Origin, Usage


class Section:
    """Text beside every summary, which no model writes.

    A section says here all that others need to know of it: no module outside of
    `_sections` imports one, or knows its name.

    Attributes:
        name: The key of the section's value in the stored summary.
        label: A noun for people, as `contextguard why` and `contextguard report` print
            it; "" for a text that repeats nothing of the conversation.
        heading: The first line of the section's text, which the guard wrote; "" for
            none.
        goes_at: If a summary is too long, the section is left out from this step of
            `Draft.shrink` on, 1 to 4; None if it always stays.
        stands_alone: Whether the text of `brief` is also sent if there is no summary.
        has_own_room: Whether the size limit of a stored record does not count the
            value.
        needs_recall: Whether the text names the recall tool. Then it is left out of
            requests that do not declare that tool.
        shows_tool_use: Whether a stored value means that tools were called.
        listed_tools: Tools whose calls no other section needs to list, because this
            section's text shows their outcome.
        held_ratio: The part of the window that stays free for the text if excerpts
            stand in place of a model's summary.
        is_briefed: Whether the summarizer is given the text of `brief`.
        is_told_anew: Whether the text of `tell_left_out` takes the place of the stored
            value if messages are left out without a summary.
    """

    name: str
    label: str = ""
    heading: str = ""
    goes_at: int | None = 2
    stands_alone: bool = False
    has_own_room: bool = False
    needs_recall: bool = False
    shows_tool_use: bool = False
    listed_tools: tuple[str, ...] = ()
    held_ratio: float = 0.0
    is_briefed: bool = False
    is_told_anew: bool = False

    def write(
        self, turn: Turn, covered: frozenset[int], known: JsonValue, room_tokens: int
    ) -> JsonValue:
        """Returns the value to store; an empty value, such as None or "", for nothing.

        Args:
            turn: The model call.
            covered: Indexes of the messages that the summary replaces.
            known: The value stored beside the summary before; None for none. Session
                state is untrusted, so it may be any JSON.
            room_tokens: The most that the value may take. A token counts as four bytes
                of JSON.
        """
        raise NotImplementedError

    def render(
        self, value: JsonValue, history: History, covered: Collection[int]
    ) -> str:
        """Returns the text of a stored value; "" for none.

        The text comes from the conversation, so it is quoted. The heading comes from
        the guard, so it stays as it is.

        Args:
            value: What `write` returned. Session state is untrusted: a value that is no
                text counts as none.
            history: The history of the request.
            covered: Indexes of the messages that the summary replaces.
        """
        if not isinstance(value, str):
            return ""
        if not value.startswith(self.heading):
            return quote_stored(value)

        quoted = value.removeprefix(self.heading)
        return self.heading + quote_stored(quoted)

    def brief(self, turn: Turn) -> str:
        """Returns the text that the summarizer is given; "" for none."""
        raise NotImplementedError

    def tell_left_out(
        self,
        contents: Sequence[types.Content],
        indexes: Iterable[int],
        max_tokens: int,
        count: TokenCounter,
        memo: Memo,
    ) -> str:
        """Returns a text on messages that are left out without a summary.

        Args:
            contents: All messages.
            indexes: Indexes of the messages of the running turn that are left out.
            max_tokens: The most tokens that the text may take.
            count: Counts the tokens of a text.
            memo: Measures the messages.

        Returns:
            The text, which begins with the heading; "" for nothing.
        """
        return ""

    def describe(self, state: AgentState) -> str:
        """Returns a few words for a line on the session; "" for none."""
        return ""


def declare(tool: BaseTool, **properties: object) -> types.FunctionDeclaration:
    """Declares a tool whose arguments are all optional."""
    return types.FunctionDeclaration(
        name=tool.name,
        description=tool.description,
        parameters_json_schema={"type": "object", "properties": properties},
    )


Contents = Sequence[types.Content]


def _always(turn: Turn, contents: Contents) -> bool:
    return True


class Shape(NamedTuple):
    """A form of contents that providers want: a row of the table of shapes.

    Contents get it after the summary is in place, and before they are measured.

    Attributes:
        apply: Returns contents in this form. A content that has it stays the same
            object.
        when: Returns whether contents may need this form. Each request calls it, so it
            has to be fast.
        relieve: Called if a provider found a request with these contents too large.
            Returns a value for `AgentMemory.remember_unit` with which `apply` makes
            them smaller; None if it cannot.
        help: Called if a provider refused contents for their form, with the kind of the
            refusal, such as "shape". Returns the new value of `AgentRecord.helped`,
            with which `apply` makes them acceptable; None if it cannot.
    """

    apply: Callable[[Turn, list[types.Content]], list[types.Content]]
    when: Callable[[Turn, Contents], bool] = _always
    relieve: Callable[[Turn, Overflow, Contents], object | None] | None = None
    help: Callable[[Turn, str, Contents], dict[str, str] | None] | None = None


@dataclass(frozen=True)
class Compacted:
    """A compaction that has just reached the session."""

    guard: Guard
    context: CallbackContext
    state: AgentState
    turn: Turn
    outcome: Outcome
    record: CompactionRecord


@dataclass(frozen=True)
class Answered:
    """An answer that is whole.

    Attributes:
        real_tokens: The provider's count of the prompt; None where it counted nothing.
        count: The count with the estimate of the same request; None where there is no
            count, or where it is of a request that was counted before.
        may_lose_event: Whether a plugin may keep the answer's event from the guard.
    """

    guard: Guard
    context: CallbackContext
    run: Run
    call: SentCall
    response: LlmResponse
    real_tokens: int | None
    count: Count | None
    state: AgentState
    may_lose_event: bool

    @cached_property
    def usage(self) -> Usage:
        """What the provider reported; zeros where it reported nothing."""
        return read_usage(self.response.usage_metadata)

    def attach(self, name: str, value: object) -> None:
        """Adds a value to the `custom_metadata` of the answer's event.

        ADK makes the event later, and copies the metadata of the response to it. The
        response is changed only if the guard may not see the event.
        """
        if self.may_lose_event:
            metadata = self.response.custom_metadata or {}
            self.response.custom_metadata = {**metadata, name: value}
        else:
            self.run.describe(call_key(self.context), name, value)


@dataclass(frozen=True)
class Sent:
    """A request that is about to be sent.

    Attributes:
        memory: What the process remembers of the agent.
        turn: The model call, with the contents that are sent.
        is_compacted: Whether this call was compacted.
    """

    memory: AgentMemory
    turn: Turn
    is_compacted: bool


@dataclass(frozen=True)
class Summarized:
    """The summary calls of one compaction, whether or not it gained anything.

    Attributes:
        origin: The agent, session and run they were made for.
        facts: The fields of a `CompactionRecord` that tell what the calls took.
    """

    origin: Origin
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Recovered:
    """A rejected request that was sent again.

    Attributes:
        origin: The agent, session and run of the request.
        model: The model that rejected it.
        kind: What made it acceptable, for example "compaction"; "failed" if nothing.
    """

    origin: Origin
    model: str
    kind: str


class Listener:
    """Is told what happened; an error that it raises is logged and ends nothing.

    Attributes:
        setting: The setting of the plugin that switches it on; "" if it is always on.
    """

    setting: str = ""

    def is_on(self, guard: Guard) -> bool:
        """Returns whether the settings of a guard want it to be told anything."""
        return not self.setting or bool(getattr(guard.settings, self.setting))

    def sent(self, event: Sent) -> None:
        """Called with each request that the guard has changed, before it is sent."""

    def summarized(self, event: Summarized) -> None:
        """Called after the summary calls of each compaction."""

    async def compacted(self, event: Compacted) -> None:
        """Called after each compaction."""

    def answered(self, event: Answered) -> None:
        """Called with each answer that is whole."""

    def recovered(self, event: Recovered) -> None:
        """Called after each attempt to recover from a rejected request."""
