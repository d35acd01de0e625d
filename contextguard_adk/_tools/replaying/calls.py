"""The model calls of a recorded session, found at the events of their answers.

A guard may have been at work when the session was recorded. Then session state and the
events have its notes. Heuristic tokens are UTF-8 bytes / 4.
"""

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

# The largest token count that is accepted in a recording. A replay writes a text of as
# many tokens, and a longer text would take too much memory.
MAX_TOKENS = 20_000_000
# The count of a guard is searched in this number of events, from the first event of an
# answer.
MAX_ANSWER_EVENTS = 4


def list_calls(session: Session, agent: str | None = None) -> Iterator[RecordedCall]:
    """Yields the model calls whose answer has a prompt count.

    `agent` is the name of the agent whose calls are yielded; None for all agents.
    """
    state: dict[str, Any] = {}  # Session state after the event.
    last_origin: tuple[object, ...] = ()
    for index, event in enumerate(session.events):
        state.update(event.actions.state_delta)
        if event.partial:  # A complete event repeats the content of a partial one.
            continue

        usage = event.usage_metadata
        prompt_tokens = read_tokens(usage.prompt_token_count) if usage else 0
        # A stream may give one answer as two events in a row: the text, and the calls
        # of tools. Both have the same origin, and only the first is a call here.
        origin = (prompt_tokens, event.author, event.invocation_id)
        is_repeated = origin == last_origin
        last_origin = origin

        has_count = event.author != "user" and prompt_tokens > 0
        is_wanted = agent in (None, event.author)
        if is_repeated or not (has_count and is_wanted):
            continue

        _check_usage(index, event)
        answer_events = session.events[index : index + MAX_ANSWER_EVENTS]
        yield RecordedCall(
            index=index,
            event=event,
            prompt_tokens=prompt_tokens,
            is_guarded=_was_cut(event, state),
            heuristic_tokens=_find_heuristic(answer_events, prompt_tokens),
        )


def _check_usage(index: int, event: Event) -> None:
    """Raises a `CommandError` if a token count of an event is above `MAX_TOKENS`.

    `index` is the index of the event in the session.
    """
    for name, count in event.usage_metadata or ():
        if isinstance(count, int) and count > MAX_TOKENS:
            found = f"event {index}: {name} is {count:,}"
            raise CommandError(f"{found}; at most {MAX_TOKENS:,} are accepted")


def _was_cut(event: Event, state: dict[str, Any]) -> bool:
    """Whether a guard had cut the request that an event answers.

    A guard cuts each request while it has a summary, and a request that the provider
    has refused as too large. `state` is the session state after the event.
    """
    stored = AgentState(state, event.author, scope=branch_scope(event))
    has_summary = stored.read("summary") is not None
    was_refused = bool(read_facts(event).get("recovered"))
    return has_summary or was_refused


def _find_heuristic(events: Sequence[Event], prompt_tokens: int) -> int | None:
    """Finds the heuristic tokens of a request, as a guard has counted them.

    The guard stores two counts in session state with the last event of an answer: the
    heuristic tokens of the request, and the prompt tokens of the answer. The heuristic
    tokens are those of this request if the prompt tokens are the same.

    Args:
        events: Some events, from the first event of the answer.
        prompt_tokens: The prompt tokens of the answer.

    Returns:
        The heuristic tokens; None if the events do not have them, or if the number is
        not valid.
    """
    author = events[0].author
    scope = branch_scope(events[0])
    for event in events:
        stored = AgentState(event.actions.state_delta, author, scope=scope)
        if stored.read("real_tokens") != prompt_tokens:
            continue

        # If the event has no heuristic tokens, the next event is searched. A number
        # that is not valid ends the search.
        tokens = int(stored.read("last_heuristic") or 0)
        if tokens:
            is_valid = 0 < tokens <= MAX_TOKENS
            return tokens if is_valid else None
    return None
