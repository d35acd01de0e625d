"""The base classes of sections, shapes and listeners, and the events of listeners.

A section writes a text beside each summary. A shape is a form of contents. A listener
is told what happened. The stages of a call go through tables of all sections, shapes
and listeners, and know none of these by its name.

An index is the position of a message in the request. A message is covered if a summary
of any kind replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from google.adk.agents.callback_context import CallbackContext
from google.adk.models.llm_response import LlmResponse
from google.adk.tools.base_tool import BaseTool
from google.genai import types

from contextguard_adk._measuring.budgets import TokenCounter
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._providers.clients import read_usage
from contextguard_adk._providers.overflow import Overflow
from contextguard_adk._runtime.memory import AgentMemory
from contextguard_adk._runtime.runs import Guard, Run, SentCall, call_key
from contextguard_adk._runtime.state import AgentState
from contextguard_adk._turn.facts import Count, Outcome
from contextguard_adk._turn.room import Room
from contextguard_adk._turn.turn import Turn
from contextguard_adk.records import CompactionRecord, Origin, Usage


class Section:
    """A text beside every summary, which no model writes.

    The attributes say all that other code needs to know of a section: no module outside
    of `_sections` imports a section, or knows its name.

    Attributes:
        name: The key of the section's text in the stored summary.
        label: A noun for people, as `contextguard why` and `contextguard report` print
            it; "" for a text that repeats nothing of the conversation.
        heading: The first line of the section's text, which the guard wrote; "" for
            none.
        goes_at: How early the section is left out if the request does not fit: at this
            step of `Draft.shrink`, from 1 to 4, and at each later step. So a section
            with a lower number goes earlier. None for a section that always stays.
        stands_alone: Whether the text of `brief` is also sent if there is no summary.
        needs_recall: Whether the text names the recall tool. Such a text is left out of
            requests that do not declare the tool.
        listed_tools: Tools whose calls no other section needs to list, because the text
            of this section shows what the calls have done.
        held_ratio: The part of `Budgets.working_tokens` that is reserved for the text
            if excerpts stand in place of a model's summary.
        window_ratio: The part of `Budgets.working_tokens` that the text may take in a
            request, unless `most_tokens` says otherwise.
        state_ratio: The part of the bytes left in session state that the text may
            take; from 0 to 1.
        token_ratio: The part of the tokens that the texts before leave which the text
            may take, from 0 to 1; None for a text that is too important to share them.
        own_state_bytes: The most that the text may take in session state if it does not
            share the room of the other texts; 0 if it does.
        has_own_room: Whether the text takes no tokens from the texts after it.
        is_briefed: Whether the summarizer is given the text of `brief`.
        is_told_anew: Whether the text of `tell_left_out` takes the place of the stored
            text if messages are left out without a summary.
    """

    name: str
    label: str = ""
    heading: str = ""
    goes_at: int | None = 2
    stands_alone: bool = False
    needs_recall: bool = False
    listed_tools: tuple[str, ...] = ()
    held_ratio: float = 0.0
    window_ratio: float = 1.0
    state_ratio: float = 1.0
    token_ratio: float | None = None
    own_state_bytes: int = 0
    has_own_room: bool = False
    is_briefed: bool = False
    is_told_anew: bool = False

    def most_tokens(self, turn: Turn, covered: frozenset[int]) -> float:
        """Returns the most tokens that the text should take.

        Args:
            turn: The model call.
            covered: Indexes of the messages that the new summary replaces.
        """
        return turn.budgets.working_tokens * self.window_ratio

    def write(self, turn: Turn, covered: frozenset[int], known: str, room: Room) -> str:
        """Writes the text once, when a summary is made; "" for nothing.

        The text is stored with the summary, and shown as it is stored. Its parts that
        come from the conversation are redacted.

        Args:
            turn: The model call.
            covered: Indexes of the messages that the new summary replaces.
            known: The text beside the previous summary if the session is loaded in
                part: it tells of messages that are not loaded. "" for a whole session,
                and if there is no text. Session state is untrusted, so the text may be
                any text.
            room: The most that the text may take.
        """
        raise NotImplementedError

    def refresh(
        self,
        text: str,
        state: AgentState,
        run_id: str,
        kept: Sequence[types.Content],
    ) -> str:
        """Returns a stored text as a request shows it; the text itself by default.

        Args:
            text: The text, as `write` returned it. Session state is untrusted, so it
                may be any text.
            state: The agent's values in session state.
            run_id: ADK's id of the run; "" outside of runs.
            kept: The messages that stay in the request; empty if they are unknown.
        """
        return text

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
            contents: All messages of the request.
            indexes: Indexes in `contents` of the left-out messages of the running turn.
            max_tokens: The most tokens that the text may take.
            count: Counts the tokens of a text.
            memo: Remembers the measures of the messages.

        Returns:
            The text, which begins with the heading; "" for nothing.
        """
        return ""

    def describe(self, state: AgentState) -> str:
        """Returns a few words on the agent's state, for people; "" for none."""
        return ""


def declare(tool: BaseTool, **properties: object) -> types.FunctionDeclaration:
    """Declares a tool whose arguments are all optional.

    `properties` are the JSON schemas of the arguments, by the argument's name.
    """
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

    Contents get this form after the summary is in place, and before they are measured.

    Attributes:
        apply: Returns contents in this form. A content that has this form already stays
            the same object.
        when: Returns whether contents may need this form. It is called for each
            request, so it has to be fast.
        relieve: Called if a provider has found a request too large. Returns a value for
            `AgentMemory.remember_unit` with which `apply` makes such contents smaller;
            None if this form cannot help.
        help: Called if a provider has refused the form of contents, with the kind of
            the refusal, such as "shape". Returns the new value of `AgentRecord.helped`
            with which `apply` makes such contents acceptable; None if this form cannot
            help.
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
        real_tokens: The provider's count of the prompt; None if the provider counted
            nothing.
        count: The count with the guard's figures for the same request; None if there is
            no count, or if the same request was counted before.
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
        """The tokens that the provider reported; zeros if it reported nothing."""
        return read_usage(self.response.usage_metadata)

    def attach(self, name: str, value: object) -> None:
        """Adds a value to the `custom_metadata` of the answer's event.

        ADK makes the event later. Usually the run keeps the value until the guard sees
        the event. If the guard may never see the event, the value goes into the
        metadata of the response, which ADK copies to the event.
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
        is_compacted: Whether the history was compacted for this call.
    """

    memory: AgentMemory
    turn: Turn
    is_compacted: bool


@dataclass(frozen=True)
class Summarized:
    """The summary calls of one compaction, whether or not it gained anything.

    Attributes:
        origin: The agent, session and run that needed the summaries.
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
    """An object that is told what happened.

    An error that a listener raises is logged, and ends nothing.

    Attributes:
        setting: The name of the plugin's setting that switches this listener on; "" if
            it is always on.
    """

    setting: str = ""

    def is_on(self, guard: Guard) -> bool:
        """Whether the settings of a guard switch this listener on."""
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
