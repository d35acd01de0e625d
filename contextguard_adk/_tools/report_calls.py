"""What a recorded session took, call by call, and what its compactions replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from google.adk.events.event import Event
from google.adk.sessions import Session

from contextguard_adk._history.coverage import fingerprint
from contextguard_adk._history.state import AgentState
from contextguard_adk._memory import branch_scope
from contextguard_adk._providers.clients import read_usage
from contextguard_adk._providers.costs import add_costs, price_calls
from contextguard_adk._providers.windows import resolve_costs
from contextguard_adk._tools.recordings import RecordedCall, list_calls, read_facts
from contextguard_adk._tools.replay import ReplaySettings, replay_session
from contextguard_adk._tools.replay_report import Replayed, ReplayedCall
from contextguard_adk.telemetry import Usage


@dataclass(frozen=True)
class Compaction:
    """A compaction, recorded or played; `facts` as in an event's `custom_metadata`."""

    facts: dict[str, Any]
    usage: Usage
    cost: float | None
    removed_count: int
    removed: list[str]
    summary: str


@dataclass(frozen=True)
class Call:
    """A recorded model call, what it cost with its summaries, and its replay."""

    event: Event
    usage: Usage
    summary_usage: Usage
    cost: float | None
    news: list[str]
    replayed: ReplayedCall
    compaction: Compaction | None


@dataclass(frozen=True)
class Report:
    """A recorded session; without a guard at work in it, compactions are simulated."""

    session: Session
    calls: list[Call]
    replayed: Replayed
    is_guarded: bool


async def make_report(session: Session, settings: ReplaySettings) -> Report:
    """Collects what was recorded, and replays the session for the other half."""
    recorded = list(list_calls(session, settings.agent))
    told = [read_facts(call.event) for call in recorded]
    windows = {int(read_number(facts.get("window"))) for facts in told} - {0}
    if settings.window_tokens is None and len(windows) == 1:
        settings = replace(settings, window_tokens=max(1_000, *windows))
    replayed = await replay_session(session, settings)
    is_guarded = any(told) or any(call.is_guarded for call in recorded)
    reader = _Reader(session, settings, is_guarded)
    calls = list(map(reader.read, recorded, replayed.calls))
    return Report(session, calls, replayed, is_guarded)


def read_number(value: object) -> float:
    """Reads a number, from 0 to 2^53; whatever else a session holds counts as 0."""
    return value if isinstance(value, int | float) and 0 <= value <= 2**53 else 0


class _Reader:
    """Reads one recorded call after the other, and what a guard had stored by then."""

    def __init__(
        self, session: Session, settings: ReplaySettings, is_guarded: bool
    ) -> None:
        self._events, self._settings = session.events, settings
        contents = [event.content for event in session.events]
        self._names = [fingerprint(each) if each else b"" for each in contents]
        self._is_guarded = is_guarded
        self._next = 0
        self._state: dict[str, Any] = {}
        self._rewound: dict[str, Any] = {}  # Session state behind the last rewind.
        self._covered: dict[str, Counter[bytes]] = {}  # Since then, by agent and scope.

    def read(self, call: RecordedCall, played: ReplayedCall) -> Call:
        """Describes a call; a compaction is the replay's where no guard was at work."""
        news = [e for e in self._events[self._next : call.index] if not e.partial]
        self._next = call.index + 1
        for event in (*news, call.event):
            self._state.update(event.actions.state_delta)
            if self._is_guarded and event.actions.rewind_before_invocation_id:
                self._rewound, self._covered = dict(self._state), {}
        compaction = self._find_compaction(call, played)
        usage, summary_usage = read_usage(call.event.usage_metadata), Usage()
        cost = self._price(call.event.model_version, usage)
        if compaction and self._is_guarded:
            summary_usage = compaction.usage
            cost = add_costs((cost, compaction.cost))
        said = [line for event in news for line in _list_parts(event)]
        return Call(call.event, usage, summary_usage, cost, said, played, compaction)

    def _price(self, model: str | None, usage: Usage) -> float | None:
        prices = self._settings.guard.prices
        costs = resolve_costs(self._settings.model or model or "", prices, None)
        return price_calls([usage], costs)

    def _find_compaction(
        self, call: RecordedCall, played: ReplayedCall
    ) -> Compaction | None:
        """Finds what a compaction has replaced, and its summary, in session state."""
        if self._is_guarded:
            facts, state = read_facts(call.event).get("compaction"), self._state
        else:
            facts = asdict(played.compaction) if played.compaction else None
            state = played.state
        if not isinstance(facts, dict):
            return None
        author, scope = call.event.author, branch_scope(call.event)
        stored = AgentState(state, author, scope=scope)
        owner, covered = f"{author}@{scope}", _read_covered(stored)
        before = self._covered.get(owner)
        if before is None:
            before = _read_covered(AgentState(self._rewound, author, scope=scope))
        self._covered[owner] = covered
        named = zip(self._events[: call.index], self._names, strict=False)
        events = list(_find_new(named, before, covered))
        removed = [line for event in events for line in _list_parts(event)]
        removed_count = (covered - before).total()
        if others := removed_count - len(events):
            removed.append(f"{others:,} messages that ADK had put into other words")
        text = stored.read("summary")
        summary = text if isinstance(text, str) else ""
        usage, cost = self._read_bill(facts)
        return Compaction(facts, usage, cost, removed_count, removed, summary)

    def _read_bill(self, facts: dict[str, Any]) -> tuple[Usage, float | None]:
        """Reads what summaries took; a price that is missing is looked up."""
        used = facts.get("usage")
        counts = used if isinstance(used, dict) else {}
        names = vars(Usage())
        usage = Usage(**{name: int(read_number(counts.get(name))) for name in names})
        cost = read_number(facts.get("cost"))
        if facts.get("cost") == cost:
            return usage, cost
        model = str(facts.get("model") or "")
        return usage, self._price(model, usage) if model else 0.0


def _read_covered(stored: AgentState) -> Counter[bytes]:
    """Counts the messages that a summary covers, by fingerprint."""
    summary = stored.record.summary
    return Counter(summary.covered.recent if summary else ())


def _find_new(
    named: Iterable[tuple[Event, bytes]], known: Counter[bytes], covered: Counter[bytes]
) -> Iterator[Event]:
    """Yields the events that are covered now; of equal ones the first were before."""
    old, new = known.copy(), covered - known
    for event, name in named:
        if old[name]:
            old[name] -= 1
        elif new[name]:
            new[name] -= 1
            yield event


def _list_parts(event: Event) -> Iterator[str]:
    """Says of each part of an event what it is, and how long."""
    author = "the user" if event.author == "user" else event.author
    for part in (event.content.parts if event.content else None) or ():
        if call := part.function_call:
            yield f"call of {call.name}{_size(call.args)}"
        elif answer := part.function_response:
            yield f"result of {answer.name}{_size(answer.response)}"
        elif part.text:
            kind = "thought" if part.thought else "message"
            yield f"{kind} of {author}{_size(part.text)}"
        else:
            yield f"file or image of {author}"


def _size(value: object) -> str:
    text = value if isinstance(value, str) else str(value or "")
    return f", {len(text):,} characters"
