"""What the requests of a recorded session held, rebuilt from its events and state."""

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
    """The history that the request of a recorded call held, and what it left out.

    `left_out` has the messages as they were said, `removed` those of them that the
    agent's request before it still had, and `shortened` those that are shown in part.
    `beside` has what stood in place of messages, by its name for people.
    """

    messages: list[types.Content]
    left_out: list[types.Content]
    removed: list[types.Content]
    shortened: list[types.Content]
    beside: dict[str, str]


class Rebuilder:
    """Rebuilds the requests of a session, one after another, each from what was stored.

    Of the settings only `keep_tools` and those of previews count: they say how a result
    was shown on arrival.
    """

    def __init__(
        self, session: Session, guard: PluginSettings, window_tokens: int | None
    ) -> None:
        self._session = session
        self._guard = guard
        self.memo = Memo(session.events)
        self._side = Side(session, None, self.memo)
        told = {int(read_number(read_facts(e).get("window"))) for e in session.events}
        self._window_tokens = window_tokens or max(told, default=0)
        self._callers = {e.author for e in session.events if e.get_function_calls()}
        self._state: dict[str, Any] = {}
        self._next = 0
        # By agent and scope: what a request depends on, its messages, what is rebuilt.
        self._last: dict[str, tuple[object, int, Rebuilt]] = {}

    async def rebuild(
        self, call: RecordedCall, simulated: dict[str, Any] | None = None
    ) -> Rebuilt:
        """Rebuilds the request of a call, of calls in their order, from session state.

        In place of the recorded one it may be that of a replay.
        """
        event = call.event
        agent = make_agent(call.event.author)
        contents = (await self._side.build(call, agent)).contents
        self._read_state(call)
        values = self._state if simulated is None else simulated
        state = AgentState(values, agent.name, scope=branch_scope(event))
        key = event.invocation_id, state.read("record"), state.read("summary")
        preview = self._preview(call)
        known, count, last = self._last.get(state.owner, (None, 0, None))
        if last and known == key and count <= len(contents):
            new = contents[count:]
            shown = [(preview and preview(each)) or each for each in new]
            short = [a for a, b in zip(new, shown, strict=True) if a is not b]
            rebuilt = replace(
                last,
                removed=[],
                messages=[*last.messages, *shown],
                shortened=[*last.shortened, *short],
            )
        else:
            rebuilt = self._rebuild(call, contents, agent, state, preview)
            before = Counter(map(self._spell, last.left_out if last else ()))
            rebuilt = replace(rebuilt, removed=list(self._find_new(rebuilt, before)))
        self._last[state.owner] = key, len(contents), rebuilt
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
        events = self._session.events[: call.index]
        own = (e for e in events if e.author == "user" and e.invocation_id == run_id)
        said = next((e.content for e in own), None)
        found = state.record.summary
        stored = (found and state.load_summary(found.scope)) or StoredSummary()
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
        self, rebuilt: Rebuilt, known: Counter[bytes]
    ) -> Iterator[types.Content]:
        """Yields what is left out since; of equal ones the first were before."""
        for content in rebuilt.left_out:
            name = self._spell(content)
            if not known[name]:
                yield content
            known[name] -= bool(known[name])

    def _read_state(self, call: RecordedCall) -> None:
        """Reads what events bring to session state, up to those of a call's answer."""
        place = call.event.author, call.event.invocation_id
        for event in self._session.events[self._next :]:
            is_answer = (event.author, event.invocation_id) == place
            is_answer &= not event.get_function_responses()
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
        tokens = tokens or resolve_context_window(call.event.model_version or "").tokens
        has_recall = name in self._callers
        return strategy.preview(tokens, has_recall, self.memo.form)


def _list_beside(history: History, stored: StoredSummary) -> Iterator[tuple[str, str]]:
    """Yields what stands in place of messages: its name for people, and its text."""
    if not (history.covered or stored.text):
        return
    yield "the summary", stored.text
    for section in _sections.SECTIONS:
        known = stored.beside.get(section.name)
        text = section.render(known, history, history.covered)
        if text:
            yield section.label or section.name, text
    head = render_head(history, stored, history.covered)
    if request := "\n".join(part.text or "" for part in (head.parts or [])[1:]):
        yield "the quoted current request", request
