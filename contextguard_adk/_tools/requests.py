"""Rebuilds the requests of a recorded session from its events and its state.

A recording does not have the requests. ADK can build the whole history again from the
events. Session state has the summary that a guard had put in place of the older
messages. The summary may be that of a replay instead, in the state of the replay.

A message that the summary replaces is left out. A message is shortened if the request
has only a part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.events.event import Event
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
from contextguard_adk._runtime.adk_objects import make_plugin_manager
from contextguard_adk._runtime.runs import branch_scope
from contextguard_adk._runtime.state import AgentState
from contextguard_adk._summaries.compose import refresh, render_head, show_section
from contextguard_adk._tools.recordings import RecordedCall, read_facts, read_number
from contextguard_adk._tools.replaying.side import Side, make_agent
from contextguard_adk.config import PluginSettings
from contextguard_adk.strategies import Strategy, Threshold


@dataclass(frozen=True)
class Rebuilt:
    """The history in the request of a recorded call.

    Attributes:
        messages: The messages as the request had them, the summary aside.
        left_out: The whole messages that the summary replaces.
        removed: The messages in `left_out` that were not left out of the agent's
            request before this one.
        shortened: The whole messages of which the request had only a part.
        summary: The text of the summary; "" if the guard put no text in place of the
            messages that are left out; None if the request had no summary.
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
        """All texts in place of messages, by a name for people, the summary first.

        {} if the request had no summary: then it had no other texts either.
        """
        if self.summary is None:
            return {}
        return {"the summary": self.summary, **self.beside}


@dataclass(frozen=True)
class _Last:
    """The last request of an agent in a scope.

    Attributes:
        key: The invocation of the request, and the stored values that decide which
            messages are left out or shortened.
        content_count: The number of contents of the whole history at the request.
        rebuilt: The request.
    """

    key: object
    content_count: int
    rebuilt: Rebuilt

    def is_continued_by(self, key: object, contents: Sequence[types.Content]) -> bool:
        """Whether the next request has all messages of this one, and perhaps new ones.

        The whole history is shorter after a rewind: then the answer is no.

        Args:
            key: The key of the next request.
            contents: The whole history at the next request.
        """
        return self.key == key and self.content_count <= len(contents)


class Rebuilder:
    """Rebuilds the requests of a session, one after another.

    The settings of the guard say only how large tool results are shown from the start.
    Everything else is read from session state.

    Attributes:
        memo: Remembers facts about the recorded events.
    """

    def __init__(
        self, session: Session, guard: PluginSettings, window_tokens: int | None
    ) -> None:
        """Prepares to rebuild the requests of a session.

        Args:
            session: The recorded session.
            guard: The settings of the guard.
            window_tokens: The context window; None for the largest window that a guard
                has noted on an event.
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
        # The agents that call tools.
        self._tool_users = {e.author for e in session.events if e.get_function_calls()}

        # The session state after all events before the index `_next_event`.
        self._state: dict[str, Any] = {}
        self._next_event = 0
        # By the name of the agent with its scope.
        self._last: dict[str, _Last] = {}

    async def rebuild(
        self, call: RecordedCall, simulated: dict[str, Any] | None = None
    ) -> Rebuilt:
        """Rebuilds the request of a call.

        A request often continues the agent's last one: the invocation and the stored
        values are the same, and the whole history has only new contents at its end.
        Then the new contents are added to the last request, which takes little time.
        Otherwise the request is rebuilt from the whole history.

        Args:
            call: The call. Calls come in the order of the recording, and no call of the
                same agent is left out.
            simulated: The session state of a replay at the call; None for the recorded
                one.
        """
        event = call.event
        agent = make_agent(event.author)
        request = await self._side.build(call, agent)
        whole_contents = request.contents

        # A guard stores the summary of a request with the events of the answer, so the
        # changes of state by these events are needed.
        self._advance_state(call)
        session_state = self._state if simulated is None else simulated
        state = AgentState(session_state, agent.name, scope=branch_scope(event))
        preview = self._make_preview(call)

        key = event.invocation_id, state.read("record"), state.read("summary")
        last = self._last.get(state.owner)
        if last and last.is_continued_by(key, whole_contents):
            new_contents = whole_contents[last.content_count :]
            rebuilt = _add_messages(last.rebuilt, new_contents, preview)
        else:
            history = self._make_history(call, whole_contents, agent, state)
            history.preview = preview
            left_out_before = last.rebuilt.left_out if last else []
            rebuilt = self._rebuild_from(history, left_out_before)

        self._last[state.owner] = _Last(key, len(whole_contents), rebuilt)
        return rebuilt

    def _make_history(
        self,
        call: RecordedCall,
        contents: list[types.Content],
        agent: LlmAgent,
        state: AgentState,
    ) -> History:
        """Makes the history of a call, with the summary that is stored for the agent.

        Args:
            call: The call.
            contents: The whole history.
            agent: The agent that calls.
            state: The values that a guard has stored for the agent.
        """
        # The empty summary stands for none: it replaces nothing.
        stored = StoredSummary()
        recorded_summary = state.record.summary
        if recorded_summary:
            # `load_summary` refuses a summary of another scope than the given one. The
            # given scope is that of the summary itself, so no summary is refused.
            loaded = state.load_summary(recorded_summary.scope) or stored
            stored = refresh(loaded, state, call.event.invocation_id)

        invocation = self._side.advance(call, agent, make_plugin_manager())
        question = self._find_question(call)
        return History(contents, invocation, question, stored, self.memo)

    def _rebuild_from(
        self, history: History, left_out_before: list[types.Content]
    ) -> Rebuilt:
        """Rebuilds a request from the whole history and its stored summary.

        `left_out_before` are the messages that were left out of the agent's request
        before this one.
        """
        stored = history.stored or StoredSummary()
        contents = history.contents
        # The whole or the shortened form of each content. Below, the forms of the
        # contents that the summary replaces are left out.
        forms = list(history.shown)
        for index, shortened_result in history.shortened_results(stored).items():
            forms[index] = shortened_result

        # The indexes of the contents that the summary replaces, and of all others.
        covered = history.covered
        kept = [index for index in range(len(contents)) if index not in covered]
        left_out = [contents[index] for index in sorted(covered)]
        # The form of a content that is not shortened is the content itself.
        shortened = [contents[i] for i in kept if forms[i] is not contents[i]]

        summary = None
        beside = dict[str, str]()
        if covered or stored.text:
            summary = stored.text
            beside = _render_beside(history, stored)
        return Rebuilt(
            messages=[forms[index] for index in kept],
            left_out=left_out,
            removed=self._find_removed(left_out, left_out_before),
            shortened=shortened,
            summary=summary,
            beside=beside,
        )

    def _find_question(self, call: RecordedCall) -> types.Content | None:
        """Finds the user's message that began the invocation of a call.

        Returns None if the user's first event of the invocation has no content, or if
        there is no such event.
        """
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

        Equal messages are counted. If a message is left out twice now, and was left out
        once before, it is returned once.
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
        """Returns the fingerprint of a content; equal contents have equal ones."""
        parts = content.parts or ()
        return self.memo.remember(fingerprint, content, parts, content.role)

    def _advance_state(self, call: RecordedCall) -> None:
        """Adds the changes of session state up to the last event of a call's answer.

        An answer may be several events in a row. If the answers of two calls of an
        agent follow each other at once, the earlier call has added the events of both.
        """
        events = self._session.events
        answer_end = max(self._next_event, call.index + 1)
        while answer_end < len(events) and _continues_answer(events[answer_end], call):
            answer_end += 1

        for event in events[self._next_event : answer_end]:
            self._state.update(event.actions.state_delta)
        self._next_event = answer_end

    def _make_preview(self, call: RecordedCall) -> Preview | None:
        """Makes the preview of a call, which shows parts of large tool results.

        If the settings of the guard have changed since the recording, the recorded
        request may have shown other parts. Returns None if the settings want no
        previews.
        """
        agent = call.event.author
        strategy = self._guard.agents.get(agent, self._guard.default)
        if not isinstance(strategy, Strategy):
            # The settings leave the agent unguarded, or have a function that chooses a
            # strategy. The strategy of the recorded request is not known then, so the
            # default one is assumed.
            strategy = Threshold()

        window_tokens = self._window_tokens or strategy.context_window
        if not window_tokens:
            model = call.event.model_version or ""
            window_tokens = resolve_context_window(model).tokens
        # An agent that calls no tools is not offered the recall tool.
        has_recall = agent in self._tool_users
        preview = strategy.preview(window_tokens, has_recall)
        return replace(preview, form=self.memo.form) if preview else None


def _continues_answer(event: Event, call: RecordedCall) -> bool:
    """Whether an event belongs to the answer of a call, if the event before it does."""
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
        last: The agent's last request.
        new_contents: The whole new messages.
        preview: Returns the shortened form of a message, or None for a message that is
            shown whole. With None as `preview`, each message is shown whole.
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

    There are two kinds of such texts:

    - The sections, such as the pinned messages. No model wrote these texts.
    - The current request of the user, if it is quoted after the summary.
    """
    texts = dict[str, str]()
    for section in _sections.SECTIONS:
        section_text = show_section(section, stored)
        if section_text and section.label:
            texts[section.label] = section_text

    # The head is the message with the summary. Its first part has the summary and the
    # sections. The other parts, if any, ask to go on, and quote the current request.
    head = render_head(history, stored, history.covered)
    _summary_part, *continuation_parts = parts_of(head)
    continuation = "\n".join(part.text or "" for part in continuation_parts)
    if continuation:
        texts["the quoted current request"] = continuation
    return texts
