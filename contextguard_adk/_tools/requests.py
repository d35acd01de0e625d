"""Rebuilds the requests of a recorded session from its events and its state."""

from __future__ import annotations

from collections import Counter
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
        left_out: The whole messages of the history that the request did not have.
        removed: The messages in `left_out` that the agent's last request still had.
        shortened: The whole messages of which the request had only a part.
        summary: The summary in place of messages, perhaps ""; None where the request
            had the whole history.
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

    If the next request has an equal key, it has the same contents and new ones at the
    end.
    """

    key: object
    content_count: int
    rebuilt: Rebuilt


class Rebuilder:
    """Rebuilds the requests of a session, one after another.

    Of the settings only `keep_tools` and those of previews matter: they say how results
    were shown on arrival.
    """

    def __init__(
        self, session: Session, guard: PluginSettings, window_tokens: int | None
    ) -> None:
        self._session = session
        self._guard = guard
        self.memo = Memo(session.events)
        self._side = Side(session, None, self.memo)

        noted_windows = [read_facts(event).get("window") for event in session.events]
        largest = max((int(read_number(noted)) for noted in noted_windows), default=0)
        self._window_tokens = window_tokens or largest  # 0 means unknown.
        self._callers = {e.author for e in session.events if e.get_function_calls()}

        # The state after the events before `_next_event`, which is an index.
        self._state: dict[str, Any] = {}
        self._next_event = 0
        # By agent and scope.
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

        self._read_state(call)
        session_state = self._state if simulated is None else simulated
        state = AgentState(session_state, agent.name, scope=branch_scope(event))
        preview = self._make_preview(call)

        # While neither the invocation nor the stored state changes, a request has the
        # messages of the request before it, and new ones at the end.
        key = event.invocation_id, state.read("record"), state.read("summary")
        last = self._last.get(state.owner)
        if last and last.key == key and last.content_count <= len(contents):
            new_contents = contents[last.content_count :]
            rebuilt = _add_messages(last.rebuilt, new_contents, preview)
        else:
            whole = self._rebuild_whole(call, contents, agent, state, preview)
            left_out_before = last.rebuilt.left_out if last else []
            removed = self._find_new(whole.left_out, left_out_before)
            rebuilt = replace(whole, removed=removed)

        self._last[state.owner] = _Last(key, len(contents), rebuilt)
        return rebuilt

    def _rebuild_whole(
        self,
        call: RecordedCall,
        contents: list[types.Content],
        agent: LlmAgent,
        state: AgentState,
        preview: Preview | None,
    ) -> Rebuilt:
        """Rebuilds a request from the stored summary, with `removed` empty."""
        record_summary = state.record.summary
        stored = StoredSummary()
        if record_summary:
            stored = state.load_summary(record_summary.scope) or stored

        invocation = self._side.begin(call, agent, PluginManager())
        question = self._find_question(call)
        history = History(contents, invocation, question, stored, self.memo)
        history.preview = preview
        messages = list(history.shown)
        for index, shortened_result in history.shortened_results(stored).items():
            messages[index] = shortened_result

        # The indexes of the contents that the summary replaces, and of all others.
        covered = history.covered
        kept = [index for index in range(len(contents)) if index not in covered]
        has_replacements = bool(covered or stored.text)
        return Rebuilt(
            messages=[messages[i] for i in kept],
            left_out=[contents[i] for i in sorted(covered)],
            removed=[],
            shortened=[contents[i] for i in kept if messages[i] is not contents[i]],
            summary=stored.text if has_replacements else None,
            beside=_render_beside(history, stored) if has_replacements else {},
        )

    def _find_question(self, call: RecordedCall) -> types.Content | None:
        """Finds the user's message that began the invocation of a call."""
        for event in self._session.events[: call.index]:
            is_of_run = event.invocation_id == call.event.invocation_id
            if is_of_run and event.author == "user":
                return event.content
        return None

    def _find_new(
        self,
        left_out: list[types.Content],
        left_out_before: list[types.Content],
    ) -> list[types.Content]:
        """Returns the messages that are left out now and were not left out before.

        Equal messages are counted: if two equal ones are left out now and one of them
        was before, only the second is returned.
        """
        before_counts = Counter(self._identify(content) for content in left_out_before)
        new = []
        for content in left_out:
            identity = self._identify(content)
            if before_counts[identity]:
                before_counts[identity] -= 1
            else:
                new.append(content)
        return new

    def _identify(self, content: types.Content) -> bytes:
        """Returns a fingerprint; equal contents have equal ones."""
        parts = content.parts or ()
        return self.memo.remember(fingerprint, content, parts, content.role)

    def _read_state(self, call: RecordedCall) -> None:
        """Reads the state that events bring, up to the last event of a call's answer.

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
        """Makes the function that shows large tool results on arrival.

        Its previews are those of the recording only if the settings are still the same.
        Returns None if results were shown whole.
        """
        agent = call.event.author
        strategy = self._guard.agents.get(agent, self._guard.default)
        if not isinstance(strategy, Strategy):
            strategy = Threshold()

        window_tokens = self._window_tokens or strategy.context_window
        if not window_tokens:
            model = call.event.model_version or ""
            window_tokens = resolve_context_window(model).tokens
        has_recall = agent in self._callers
        return strategy.preview(window_tokens, has_recall, self.memo.form)


def _is_of_answer(event: Event, call: RecordedCall) -> bool:
    """Whether an event after that of a call belongs to the same answer."""
    return (
        event.author == call.event.author
        and event.invocation_id == call.event.invocation_id
        and not event.get_function_responses()
    )


def _add_messages(
    last: Rebuilt, new_contents: list[types.Content], preview: Preview | None
) -> Rebuilt:
    """Returns a request with more messages at its end.

    `preview` returns the shortened form of a content; None if the content stays whole.
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
    """Returns the texts beside the summary, each by a name for people.

    They are the sections, and the current request if it is quoted.
    """
    texts = dict[str, str]()
    for section in _sections.SECTIONS:
        stored_section = stored.beside.get(section.name)
        section_text = section.render(stored_section, history, history.covered)
        if section_text and section.label:
            texts[section.label] = section_text

    # The first part of the head is the summary with the sections.
    head = render_head(history, stored, history.covered)
    quoted_request = "\n".join(part.text or "" for part in parts_of(head)[1:])
    if quoted_request:
        texts["the quoted current request"] = quoted_request
    return texts
