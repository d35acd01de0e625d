"""What the requests of a recorded session held, rebuilt from its events and state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.plugins.plugin_manager import PluginManager
from google.adk.sessions import Session
from google.genai import types

from contextguard_adk import _sections
from contextguard_adk._history.history import History
from contextguard_adk._history.stored import StoredSummary
from contextguard_adk._history.truncation import Preview
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._providers.registry import resolve_context_window
from contextguard_adk._runtime.scopes import branch_scope
from contextguard_adk._runtime.state import AgentState
from contextguard_adk._summaries.compose import render_head
from contextguard_adk._tools.recordings import RecordedCall, read_facts
from contextguard_adk._tools.replaying.side import Side
from contextguard_adk._turn.turn import KEEP_TOOLS_RATIO
from contextguard_adk.config import PluginSettings
from contextguard_adk.strategies import Strategy, Threshold

NAMES = {
    "pins": "what is pinned",
    "user_messages": "the user's messages beside the summary",
    "todos": "the todo list",
    "values": "the list of values",
    "done": "the list of calls",
}
"""What stands beside a summary, for people, by the names of the sections."""


@dataclass(frozen=True)
class Rebuilt:
    """The history that the request of a recorded call held, and what it left out.

    `beside` has what stood in place of messages: the texts of the summary and of what
    stands beside it, by their names for people.
    """

    call: RecordedCall
    facts: dict[str, Any]  # What a guard has noted on the event.
    messages: list[types.Content]
    left_out: list[types.Content]  # As they were said.
    shortened: list[types.Content]  # Likewise; of these the request has a part.
    beside: dict[str, str]


class Rebuilder:
    """Rebuilds requests, one after another; what is simulated nowhere is the state."""

    def __init__(
        self, session: Session, guard: PluginSettings, window_tokens: int | None
    ) -> None:
        self._session, self._guard = session, guard
        self._memo = Memo(session.events)
        self._side = Side(session, None, self._memo)
        self._window_tokens = window_tokens
        self._callers = {e.author for e in session.events if e.get_function_calls()}
        self._state: dict[str, Any] = {}
        self._next = 0

    async def rebuild(self, call: RecordedCall) -> Rebuilt:
        """Rebuilds the request of a call; of calls in their order."""
        event, agent = call.event, LlmAgent(name=call.event.author)
        request = await self._side.build(call, agent)
        invocation = self._side.begin(call, agent, PluginManager())
        run_id, events = event.invocation_id, self._session.events[: call.index]
        own = (e for e in events if e.author == "user" and e.invocation_id == run_id)
        said = next((e.content for e in own), None)
        state = AgentState(
            self._read_state(call), agent.name, scope=branch_scope(event)
        )
        stored = state.record.summary
        stored = stored and state.load_summary(stored.scope)
        history = History(request.contents, invocation, said, stored, self._memo)
        history.preview = self._preview(call)
        shown = list(history.shown)
        for index, content in history.shortened_results(
            stored or StoredSummary()
        ).items():
            shown[index] = content
        covered = history.covered
        beside = dict(_list_beside(history, stored)) if stored else {}
        here = [i for i in range(len(shown)) if i not in covered]
        return Rebuilt(
            call,
            read_facts(event),
            [shown[i] for i in here],
            [history.contents[i] for i in sorted(covered)],
            [history.contents[i] for i in here if shown[i] != history.contents[i]],
            beside,
        )

    def _read_state(self, call: RecordedCall) -> dict[str, Any]:
        """Reads session state with all that the events of an answer bring."""
        events, event = self._session.events, call.event
        for new in events[self._next :]:
            is_own = (new.author, new.invocation_id) == (
                event.author,
                event.invocation_id,
            )
            if self._next > call.index and not (
                is_own and not new.get_function_responses()
            ):
                break
            self._state.update(new.actions.state_delta)
            self._next += 1
        return dict(self._state)

    def _preview(self, call: RecordedCall) -> Preview | None:
        """Returns how results were shown on arrival, if the settings are the same."""
        name, strategy = call.event.author, self._guard.default
        strategy = self._guard.agents.get(name, strategy)
        if not isinstance(strategy, Strategy):
            strategy = Threshold()
        window = self._window_tokens or read_facts(call.event).get("window")
        tokens = int(window or strategy.context_window or 0)
        tokens = tokens or resolve_context_window(call.event.model_version or "").tokens
        preview = strategy.preview(tokens, has_recall=name in self._callers)
        return preview and replace(
            preview,
            exclude_tools=strategy.keep_tools,
            excluded_tokens=int(tokens * KEEP_TOOLS_RATIO),
            form=self._memo.form,
        )


def _list_beside(history: History, stored: StoredSummary) -> Iterator[tuple[str, str]]:
    """Yields what stands in place of messages: its name for people, and its text."""
    if stored.text:
        yield "the summary", stored.text
    for section in _sections.SECTIONS:
        known, name = stored.beside.get(section.name), NAMES.get(section.name)
        if name and (text := section.render(known, history, history.covered)):
            yield name, text
    head = render_head(history, stored, history.covered)
    if request := "\n".join(part.text or "" for part in (head.parts or [])[1:]):
        yield "the quoted current request", request
