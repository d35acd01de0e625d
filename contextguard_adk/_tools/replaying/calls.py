"""The model calls of a recorded session, found at the events of their answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from google.adk.events.event import Event
from google.adk.sessions import Session

from contextguard_adk._providers.clients import read_tokens
from contextguard_adk._runtime.runs import branch_scope
from contextguard_adk._runtime.state import AgentState
from contextguard_adk._tools.recordings import RecordedCall, read_facts
from contextguard_adk._tools.terminal import CommandError

# A replay makes up no larger request.
MAX_TOKENS = 20_000_000
# A guard's notes are looked for in this number of events, from the first of a response.
MAX_RESPONSE_EVENTS = 4


def list_calls(session: Session, agent: str | None = None) -> Iterator[RecordedCall]:
    """Yields the model calls with a recorded prompt count, of one agent or of all.

    `agent` is the name of the agent; None yields the calls of all.
    """
    state: dict[str, Any] = {}  # Session state after the event.
    last_origin: tuple[object, ...] = ()
    for index, event in enumerate(session.events):
        state.update(event.actions.state_delta)
        if event.partial:  # A complete event repeats its content.
            continue

        usage = event.usage_metadata
        prompt_tokens = read_tokens(usage.prompt_token_count) if usage else 0
        # A stream may give one response as two events, of text and of calls. Both have
        # the same origin, and only the first is yielded.
        origin = (prompt_tokens, event.author, event.invocation_id)
        is_repeated = origin == last_origin
        last_origin = origin

        has_count = event.author != "user" and prompt_tokens > 0
        is_wanted = agent in (None, event.author)
        if is_repeated or not (has_count and is_wanted):
            continue

        _check_usage(index, event)
        response_events = session.events[index : index + MAX_RESPONSE_EVENTS]
        yield RecordedCall(
            index=index,
            event=event,
            prompt_tokens=prompt_tokens,
            is_guarded=_is_guarded(event, state),
            heuristic_tokens=_find_heuristic(response_events, prompt_tokens),
        )


def _check_usage(index: int, event: Event) -> None:
    """Raises a `CommandError` for a count that would need an enormous request."""
    for name, count in event.usage_metadata or ():
        if isinstance(count, int) and count > MAX_TOKENS:
            found = f"event {index}: {name} is {count:,}"
            raise CommandError(f"{found}; at most {MAX_TOKENS:,} are accepted")


def _is_guarded(event: Event, state: dict[str, Any]) -> bool:
    """Whether a guard had cut the request, by an event's notes and session state."""
    stored = AgentState(state, event.author, scope=branch_scope(event))
    has_summary = stored.read("summary") is not None
    return has_summary or bool(read_facts(event).get("recovered"))


def _find_heuristic(events: Sequence[Event], prompt_tokens: int) -> int | None:
    """Finds the heuristic tokens of a request, bytes / 4, that a guard has stored.

    A guard stores them in session state with the last event of a response, beside the
    prompt count. Returns None if there are none, or if their number is not valid.
    `events` begin with the first event of the response.
    """
    author = events[0].author
    scope = branch_scope(events[0])
    for event in events:
        stored = AgentState(event.actions.state_delta, author, scope=scope)
        if stored.read("real_tokens") != prompt_tokens:
            continue

        tokens = int(stored.read("last_heuristic") or 0)
        if tokens:
            is_valid = 0 < tokens <= MAX_TOKENS
            return tokens if is_valid else None
    return None
