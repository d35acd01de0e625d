"""Rebuilds the requests of a recorded session from its events and its state.

A recording does not have the requests. But ADK builds the whole history again from the
events, and session state has the summary that a guard had put in place of a part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.events.event import Event
from google.adk.plugins.plugin_manager import PluginManager
from google.adk.sessions import Session
from google.genai import types

from contextguard_adk import _sections
from contextguard_adk._history.contents import parts_of
from contextguard_adk._history.fingerprints import fingerprint
from contextguard_adk._history.history import History
from contextguard_adk._history.stored import StoredSummary
from contextguard_adk._history.truncation import Preview
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._providers.registry import resolve_context_window
from contextguard_adk._runtime.runs import branch_scope
from contextguard_adk._runtime.state import AgentState
from contextguard_adk._summaries.compose import render_head
from contextguard_adk._tools.recordings import RecordedCall, read_facts, read_number
from contextguard_adk._tools.replaying.side import Side, make_agent
from contextguard_adk.config import PluginSettings
from contextguard_adk.strategies import Strategy, Threshold


@dataclass(frozen=True)
class Rebuilt:
    """The history in the request of a recorded call.

    Attributes:
        messages: The messages as the request had them.
        left_out: The messages of the history that the request did not have, as they
            were before a guard changed them.
        removed: The messages in `left_out` that the agent's last request still had.
        shortened: The messages of which the request had only a part, as they were
            before.
        summary: The summary in place of messages, perhaps ""; None if the request had
            the whole history.
        beside: The other texts in place of messages, by a name for people.
    """

    messages: list[types.Content]
    left_out: list[types.Content]
    removed: list[types.Content]
    shortened: list[types.Content]
    summary: str | None
    beside: dict[str, str]

    @property
    def replacements(self) -> dict[str, str]:
        """All texts in place of messages, by a name for people, the summary first."""
        if self.summary is None:
            return {}
        return {"the summary": self.summary, **self.beside}


@dataclass(frozen=True)
class _Last:
    """The last request of an agent.

    Attributes:
        key: Its invocation, and the stored values that decide about its messages.
        content_count: The number of contents of the whole history.
        rebuilt: The request.
    """

    key: object
    content_count: int
    rebuilt: Rebuilt

    def is_continued_by(self, key: object, contents: Sequence[types.Content]) -> bool:
        """Whether a next request has the same messages, and perhaps new ones behind.

        `contents` are the whole history at the next request.
        """
        return self.key == key and self.content_count <= len(contents)


class Rebuilder:
    """Rebuilds the requests of a session, one after another.

    Of the settings only `keep_tools` and those of previews matter: they say how results
    were shown on arrival.
    """

    def __init__(
        self, session: Session, guard: PluginSettings, window_tokens: int | None
    ) -> None:
        """Prepares to rebuild the requests of a session.

        If `window_tokens` is None, the largest window counts that a guard has noted on
        the events of answers.
        """
        self._session = session
        self._guard = guard
        self.memo = Memo(session.events)
        self._side = Side(session, None, self.memo)

        self._window_tokens = window_tokens
        if not window_tokens:
            facts = [read_facts(event) for event in session.events]
            windows = [int(read_number(each.get("window"))) for each in facts]
            self._window_tokens = max(windows, default=0)  # 0 if none is noted.
        self._callers = {e.author for e in session.events if e.get_function_calls()}

        # The session state after the events before the index `_next_event`.
        self._state: dict[str, Any] = {}
        self._next_event = 0
        # By the name of the agent with its scope.
        self._last: dict[str, _Last] = {}

    async def rebuild(
        self, call: RecordedCall, simulated: dict[str, Any] | None = None
    ) -> Rebuilt:
        """Rebuilds the request of a call.

        Args:
            call: The call; calls come in their order.
            simulated: The session state of a replay; None for the recorded one.
        """
        event = call.event
        agent = make_agent(event.author)
        request = await self._side.build(call, agent)
        contents = request.contents

        self._advance_state(call)
        session_state = self._state if simulated is None else simulated
        state = AgentState(session_state, agent.name, scope=branch_scope(event))
        preview = self._make_preview(call)

        # While neither the invocation nor the stored values change, a request has the
        # messages of the request before it, and new ones at the end.
        key = event.invocation_id, state.read("record"), state.read("summary")
        last = self._last.get(state.owner)
        if last and last.is_continued_by(key, contents):
            new_contents = contents[last.content_count :]
            rebuilt = _add_messages(last.rebuilt, new_contents, preview)
        else:
            history = self._make_history(call, contents, agent, state)
            history.preview = preview
            left_out_before = last.rebuilt.left_out if last else []
            rebuilt = self._rebuild_from(history, left_out_before)

        self._last[state.owner] = _Last(key, len(contents), rebuilt)
        return rebuilt

    def _make_history(
        self,
        call: RecordedCall,
        contents: list[types.Content],
        agent: LlmAgent,
        state: AgentState,
    ) -> History:
        """Makes the history of a call with the summary that is stored in a state."""
        record_summary = state.record.summary
        stored = StoredSummary()
        if record_summary:
            stored = state.load_summary(record_summary.scope) or stored

        invocation = self._side.advance(call, agent, PluginManager())
        question = self._find_question(call)
        return History(contents, invocation, question, stored, self.memo)

    def _rebuild_from(
        self, history: History, left_out_before: list[types.Content]
    ) -> Rebuilt:
        """Rebuilds a request from a history with its stored summary.

        `left_out_before` are the messages that the request before did not have.
        """
        stored = history.stored or StoredSummary()
        contents = history.contents
        messages = list(history.shown)
        for index, shortened_result in history.shortened_results(stored).items():
            messages[index] = shortened_result

        # The indexes of the contents that the summary replaces, and of all others.
        covered = history.covered
        kept = [index for index in range(len(contents)) if index not in covered]
        left_out = [contents[index] for index in sorted(covered)]
        shortened = [contents[i] for i in kept if messages[i] is not contents[i]]

        summary = None
        beside = dict[str, str]()
        if covered or stored.text:
            summary = stored.text
            beside = _render_beside(history, stored)
        return Rebuilt(
            messages=[messages[index] for index in kept],
            left_out=left_out,
            removed=self._find_removed(left_out, left_out_before),
            shortened=shortened,
            summary=summary,
            beside=beside,
        )

    def _find_question(self, call: RecordedCall) -> types.Content | None:
        """Finds the user's message that began the invocation of a call."""
        for event in self._session.events[: call.index]:
            is_same_invocation = event.invocation_id == call.event.invocation_id
            if is_same_invocation and event.author == "user":
                return event.content
        return None

    def _find_removed(
        self,
        left_out: list[types.Content],
        left_out_before: list[types.Content],
    ) -> list[types.Content]:
        """Returns the messages that are left out now and were not left out before.

        Equal messages are counted: if two equal ones are left out now and one of them
        was before, only the second is returned.
        """
        before_counts = Counter(self._identify(content) for content in left_out_before)
        removed = list[types.Content]()
        for content in left_out:
            identity = self._identify(content)
            if before_counts[identity] > 0:
                before_counts[identity] -= 1
            else:
                removed.append(content)
        return removed

    def _identify(self, content: types.Content) -> bytes:
        """Returns a fingerprint; equal contents have equal ones."""
        parts = content.parts or ()
        return self.memo.remember(fingerprint, content, parts, content.role)

    def _advance_state(self, call: RecordedCall) -> None:
        """Adds the changes of session state up to the last event of a call's answer.

        An answer may be several events in a row.
        """
        events = self._session.events
        answer_end = max(self._next_event, call.index + 1)
        while answer_end < len(events) and _is_of_answer(events[answer_end], call):
            answer_end += 1

        for event in events[self._next_event : answer_end]:
            self._state.update(event.actions.state_delta)
        self._next_event = answer_end

    def _make_preview(self, call: RecordedCall) -> Preview | None:
        """Makes the function that showed a part of a large tool result from the start.

        The function shows the same part only if the settings are still the same.
        Returns None if results were shown whole.
        """
        agent = call.event.author
        strategy = self._guard.agents.get(agent, self._guard.default)
        if not isinstance(strategy, Strategy):  # None, or a function that chooses one.
            strategy = Threshold()

        window_tokens = self._window_tokens or strategy.context_window
        if not window_tokens:
            model = call.event.model_version or ""
            window_tokens = resolve_context_window(model).tokens
        # An agent that calls no tools is not offered the recall tool.
        has_recall = agent in self._callers
        return strategy.preview(window_tokens, has_recall, self.memo.form)


def _is_of_answer(event: Event, call: RecordedCall) -> bool:
    """Whether an event, after the first ones of an answer, belongs to the answer."""
    return (
        event.author == call.event.author
        and event.invocation_id == call.event.invocation_id
        and not event.get_function_responses()
    )


def _add_messages(
    last: Rebuilt, new_contents: list[types.Content], preview: Preview | None
) -> Rebuilt:
    """Returns a request with more messages at its end.

    Args:
        last: The request without these messages.
        new_contents: The messages, whole.
        preview: Returns the shortened form of a message; None if it stays whole.
    """
    messages = [*last.messages]
    shortened = [*last.shortened]
    for content in new_contents:
        previewed = preview(content) if preview else None
        messages.append(previewed or content)
        if previewed:
            shortened.append(content)
    return replace(last, removed=[], messages=messages, shortened=shortened)


def _render_beside(history: History, stored: StoredSummary) -> dict[str, str]:
    """Returns the texts beside the summary, by a name for people.

    They are the sections, which are texts that no model wrote, such as the pinned
    messages, and the current request of the user if it is quoted after the summary.
    """
    texts = dict[str, str]()
    for section in _sections.SECTIONS:
        stored_section = stored.beside.get(section.name)
        section_text = section.render(stored_section, history, history.covered)
        if section_text and section.label:
            texts[section.label] = section_text

    # The head is the message with the summary. Its first part has the summary and the
    # sections.
    head = render_head(history, stored, history.covered)
    _summary_part, *quoted_parts = parts_of(head)
    quoted_request = "\n".join(part.text or "" for part in quoted_parts)
    if quoted_request:
        texts["the quoted current request"] = quoted_request
    return texts
