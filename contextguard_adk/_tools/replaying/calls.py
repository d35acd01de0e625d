"""The model calls of a recorded session, found at the events of their answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.adk.sessions import Session

from contextguard_adk._providers.clients import read_tokens
from contextguard_adk._runtime.runs import branch_scope
from contextguard_adk._runtime.state import AgentState
from contextguard_adk._tools.recordings import RecordedCall, read_facts
from contextguard_adk._tools.terminal import CommandError

MAX_TOKENS = 20_000_000


def list_calls(session: Session, agent: str | None = None) -> Iterator[RecordedCall]:
    """Lists the model calls with a recorded prompt count, of one agent or of all."""
    state: dict[str, Any] = {}
    previous: tuple[object, ...] = ()
    for index, event in enumerate(session.events):
        state.update(event.actions.state_delta)
        if event.partial:
            continue
        usage = event.usage_metadata
        prompt_tokens = read_tokens(usage.prompt_token_count) if usage else 0
        # Text and calls of a stream may be two events of one response.
        origin = (prompt_tokens, event.author, event.invocation_id)
        is_new = origin != previous
        previous = origin
        is_wanted = event.author != "user" and agent in (None, event.author)
        if not (is_wanted and prompt_tokens and is_new):
            continue
        for name, count in usage or ():
            # A request of that size will be made up.
            if isinstance(count, int) and count > MAX_TOKENS:
                found = f"event {index}: {name} is {count:,}"
                raise CommandError(f"{found}; at most {MAX_TOKENS:,} are accepted")
        name = event.author
        scope = branch_scope(event)
        is_guarded = bool(read_facts(event).get("recovered"))
        is_guarded |= AgentState(state, name, scope=scope).read("summary") is not None
        heuristic = 0
        # What a guard has stored beside this count, at the end of a response.
        for later in session.events[index : index + 4]:
            stored = AgentState(later.actions.state_delta, name, scope=scope)
            if stored.read("real_tokens") == prompt_tokens:
                heuristic = heuristic or int(stored.read("last_heuristic") or 0)
        sent = heuristic if 0 < heuristic <= MAX_TOKENS else None
        yield RecordedCall(index, event, prompt_tokens, is_guarded, sent)
