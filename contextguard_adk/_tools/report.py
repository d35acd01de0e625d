"""`contextguard report`: what a recorded session took, call by call, as a page."""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from google.adk.events.event import Event
from google.adk.sessions import Session
from rich.console import Console

from contextguard_adk._history.fingerprints import fingerprint
from contextguard_adk._providers.clients import read_usage
from contextguard_adk._providers.costs import add_costs, price_calls
from contextguard_adk._providers.registry import resolve_costs
from contextguard_adk._runtime.scopes import branch_scope
from contextguard_adk._runtime.state import AgentState
from contextguard_adk._tools.recordings import (
    RecordedCall,
    describe_session,
    list_calls,
    read_facts,
)
from contextguard_adk._tools.replay import (
    ReplaySettings,
    print_sessions,
    read_recording,
    replay_session,
)
from contextguard_adk._tools.replay_report import Replayed, ReplayedCall
from contextguard_adk._tools.terminal import explain_writing, print_line, quiet_logs
from contextguard_adk.records import Usage


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


def run_report(arguments: argparse.Namespace) -> None:
    """Writes the page about the session that the command line names."""
    from contextguard_adk._tools.report_page import build_page

    if arguments.list:
        print_sessions(arguments)
        return
    with quiet_logs(Console(stderr=True)):
        session, settings = read_recording(arguments)
        report = asyncio.run(make_report(session, settings))
        page = build_page(report)
    with explain_writing(arguments.output):
        arguments.output.write_text(page, "utf-8", "replace")
    console = Console(highlight=False)
    print_line(console, str(describe_session(session)), "dim")
    done = sum(call.compaction is not None for call in report.calls)
    kind = "compactions" if report.is_guarded else "simulated compactions"
    count = f"model calls: {len(report.calls):,}, {kind}: {done:,}"
    print_line(console, f"{arguments.output} is written ({count})", "bold")


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
        facts, state = read_facts(call.event).get("compaction"), self._state
        if not self._is_guarded:
            done, state = played.compaction, played.state
            facts = asdict(done) if done else None
        compaction = None
        if isinstance(facts, dict):
            compaction = self._describe(call, facts, state)
        usage, summary_usage = read_usage(call.event.usage_metadata), Usage()
        cost = self._price(call.event.model_version, usage)
        if compaction and self._is_guarded:
            summary_usage = compaction.usage
            cost = add_costs((cost, compaction.cost))
        said = [line for event in news for line in list_parts(event)]
        return Call(call.event, usage, summary_usage, cost, said, played, compaction)

    def _price(self, model: str | None, usage: Usage) -> float | None:
        prices = self._settings.guard.prices
        costs = resolve_costs(self._settings.model or model or "", prices, None)
        return price_calls([usage], costs)

    def _describe(
        self, call: RecordedCall, facts: dict[str, Any], state: dict[str, Any]
    ) -> Compaction:
        """Finds what a compaction has replaced, and its summary, in session state."""
        author, scope = call.event.author, branch_scope(call.event)
        stored = AgentState(state, author, scope=scope)
        covered, text = _read_covered(stored), stored.read("summary")
        owner = f"{author}@{scope}"
        if (before := self._covered.get(owner)) is None:
            before = _read_covered(AgentState(self._rewound, author, scope=scope))
        self._covered[owner] = covered
        named = zip(self._events[: call.index], self._names, strict=False)
        events = list(_find_new(named, before, covered))
        removed = [line for event in events for line in list_parts(event)]
        removed_count = (covered - before).total()
        if others := removed_count - len(events):
            removed.append(f"{others:,} messages that ADK had put into other words")
        used = facts.get("usage")
        names = used if isinstance(used, dict) else {}
        counts = {name: int(read_number(names.get(name))) for name in vars(Usage())}
        usage = Usage(**counts)
        cost: float | None = read_number(facts.get("cost"))
        if facts.get("cost") != cost:
            # The guard did not know the price; without a model there is none.
            model = str(facts.get("model") or "")
            cost = self._price(model, usage) if model else 0.0
        return Compaction(
            facts=facts,
            usage=usage,
            cost=cost,
            removed_count=removed_count,
            removed=removed,
            summary=text if isinstance(text, str) else "",
        )


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


def list_parts(event: Event) -> Iterator[str]:
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
