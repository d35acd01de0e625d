"""Rebuilds the requests of a recorded session from its events and its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from google.adk.agents import LlmAgent
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
        left_out: The messages that it did not have, as they were said.
        removed: The messages left out that the agent's request before it still had.
        shortened: The messages that it had in part, as they were said.
        beside: The texts in place of messages, by a name for people.
    """

    messages: list[types.Content]
    left_out: list[types.Content]
    removed: list[types.Content]
    shortened: list[types.Content]
    beside: dict[str, str]


@dataclass(frozen=True)
class _Last:
    """The last request of an agent: with an equal key the next one only adds to it."""

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
        recorded = [read_facts(event).get("window") for event in session.events]
        largest = max((int(read_number(each)) for each in recorded), default=0)
        self._window_tokens = window_tokens or largest
        self._callers = {e.author for e in session.events if e.get_function_calls()}
        self._state: dict[str, Any] = {}
        self._next = 0
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
        contents = (await self._side.build(call, agent)).contents
        self._read_state(call)
        values = self._state if simulated is None else simulated
        state = AgentState(values, agent.name, scope=branch_scope(event))
        preview = self._preview(call)

        key = event.invocation_id, state.read("record"), state.read("summary")
        last = self._last.get(state.owner)
        if last and last.key == key and last.content_count <= len(contents):
            new = contents[last.content_count :]
            rebuilt = _add_messages(last.rebuilt, new, preview)
        else:
            whole = self._rebuild(call, contents, agent, state, preview)
            known = last.rebuilt.left_out if last else []
            rebuilt = replace(whole, removed=self._find_new(whole.left_out, known))
        self._last[state.owner] = _Last(key, len(contents), rebuilt)
        return rebuilt

    def _rebuild(
        self,
        call: RecordedCall,
        contents: list[types.Content],
        agent: LlmAgent,
        state: AgentState,
        preview: Preview | None,
    ) -> Rebuilt:
        run_id = call.event.invocation_id
        said = None
        for event in self._session.events[: call.index]:
            if event.author == "user" and event.invocation_id == run_id:
                said = event.content
                break

        found = state.record.summary
        stored = state.load_summary(found.scope) if found else None
        stored = stored or StoredSummary()
        invocation = self._side.begin(call, agent, PluginManager())
        history = History(contents, invocation, said, stored, self.memo)
        history.preview = preview
        shown = list(history.shown)
        for index, content in history.shortened_results(stored).items():
            shown[index] = content

        here = [i for i in range(len(shown)) if i not in history.covered]
        return Rebuilt(
            messages=[shown[i] for i in here],
            left_out=[contents[i] for i in sorted(history.covered)],
            removed=[],
            shortened=[contents[i] for i in here if shown[i] is not contents[i]],
            beside=dict(_list_beside(history, stored)),
        )

    def _spell(self, content: types.Content) -> bytes:
        parts = content.parts or ()
        return self.memo.remember(fingerprint, content, parts, content.role)

    def _find_new(
        self, left_out: list[types.Content], known: list[types.Content]
    ) -> list[types.Content]:
        """Returns the messages that are left out since; of equal ones the last."""
        known_counts = Counter(self._spell(content) for content in known)
        new = []
        for content in left_out:
            spelled = self._spell(content)
            if known_counts[spelled]:
                known_counts[spelled] -= 1
            else:
                new.append(content)
        return new

    def _read_state(self, call: RecordedCall) -> None:
        """Reads the state that events bring, up to those of a call's answer."""
        place = call.event.author, call.event.invocation_id
        for event in self._session.events[self._next :]:
            is_same_place = (event.author, event.invocation_id) == place
            is_answer = is_same_place and not event.get_function_responses()
            if self._next > call.index and not is_answer:
                break
            self._state.update(event.actions.state_delta)
            self._next += 1

    def _preview(self, call: RecordedCall) -> Preview | None:
        """Returns how results were shown on arrival, if the settings are the same."""
        name = call.event.author
        strategy = self._guard.agents.get(name, self._guard.default)
        if not isinstance(strategy, Strategy):
            strategy = Threshold()

        tokens = self._window_tokens or strategy.context_window
        if not tokens:
            tokens = resolve_context_window(call.event.model_version or "").tokens
        has_recall = name in self._callers
        return strategy.preview(tokens, has_recall, self.memo.form)


def _add_messages(
    last: Rebuilt, new: list[types.Content], preview: Preview | None
) -> Rebuilt:
    """Returns a request with more messages at its end."""
    messages = [*last.messages]
    shortened = [*last.shortened]
    for content in new:
        shown = preview(content) if preview else None
        messages.append(shown or content)
        if shown:
            shortened.append(content)
    return replace(last, removed=[], messages=messages, shortened=shortened)


def _list_beside(history: History, stored: StoredSummary) -> Iterator[tuple[str, str]]:
    """Yields the texts in place of messages, each with a name for people before it."""
    if not (history.covered or stored.text):
        return

    yield "the summary", stored.text
    for section in _sections.SECTIONS:
        known = stored.beside.get(section.name)
        text = section.render(known, history, history.covered)
        if text and section.label:
            yield section.label, text

    head = render_head(history, stored, history.covered)
    texts = [part.text or "" for part in parts_of(head)[1:]]
    request = "\n".join(texts)
    if request:
        yield "the quoted current request", request
