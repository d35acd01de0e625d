"""`contextguard report`: a recorded session as one HTML page with all that it needs.

All that comes from a session is untrusted: it reaches the page as escaped text or as
JSON, and its Content-Security-Policy lets nothing run but the two scripts of ours.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

from google.adk.events.event import Event
from google.adk.sessions import Session
from jinja2 import Environment, StrictUndefined
from rich.console import Console

from contextguard_adk._history.fingerprints import fingerprint
from contextguard_adk._providers.clients import read_usage
from contextguard_adk._providers.costs import add_costs, price_calls
from contextguard_adk._providers.registry import resolve_costs
from contextguard_adk._runtime.scopes import branch_scope
from contextguard_adk._runtime.state import AgentState
from contextguard_adk._tools import recordings, replay
from contextguard_adk._tools.recordings import (
    RecordedCall,
    describe_session,
    read_number,
)
from contextguard_adk._tools.replay import ReplaySettings
from contextguard_adk._tools.replaying.figures import Replayed, ReplayedCall
from contextguard_adk._tools.replaying.need import list_missing
from contextguard_adk._tools.replaying.side import list_calls
from contextguard_adk._tools.terminal import explain_writing, print_line, quiet_logs
from contextguard_adk.records import REASONS, Usage, format_cost

LIBRARY = "vendor/chart.umd.min.js"


def run_report(is_list: bool, as_json: bool, output: Path, **recording: Any) -> None:
    if is_list:
        replay.print_sessions(as_json, **recording)
        return
    with quiet_logs(Console(stderr=True)):
        session, settings = replay.read_recording(**recording)
        report = asyncio.run(make_report(session, settings))
        calls = report.calls
        write_page(
            output,
            "report.html",
            report=report,
            session=describe_session(session),
            usage=sum((call.usage + call.summary_usage for call in calls), Usage()),
            cost=add_costs(call.cost for call in calls),
            reasons=REASONS,
            missing=list_missing(report.replayed.missing),
            charts=_describe_charts(calls, report.is_guarded),
        )
    print_line(str(describe_session(session)), "dim")
    done = sum(call.compaction is not None for call in calls)
    kind = "compactions" if report.is_guarded else "simulated compactions"
    count = f"model calls: {len(calls):,}, {kind}: {done:,}"
    print_line(f"{output} is written ({count})", "bold")


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

    calls: list[Call]
    replayed: Replayed
    is_guarded: bool


async def make_report(session: Session, settings: ReplaySettings) -> Report:
    """Collects what was recorded, and replays the session for the other half."""
    recorded = list(list_calls(session, settings.agent))
    told = [recordings.read_facts(call.event) for call in recorded]
    windows = {int(read_number(facts.get("window"))) for facts in told} - {0}
    if settings.window_tokens is None and len(windows) == 1:
        settings = replace(settings, window_tokens=max(1_000, *windows))
    replayed = await replay.replay_session(session, settings)
    is_guarded = any(told) or any(call.is_guarded for call in recorded)
    reader = _Reader(session, settings, is_guarded)
    calls = list(map(reader.read, recorded, replayed.calls))
    return Report(calls, replayed, is_guarded)


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
            facts = recordings.read_facts(call.event).get("compaction")
            state = self._state
        else:
            facts = asdict(played.compaction) if played.compaction else None
            state = played.state
        if not isinstance(facts, dict):
            return None
        author, scope = call.event.author, branch_scope(call.event)
        stored = AgentState(state, author, scope=scope)
        covered = _read_covered(stored)
        before = self._covered.get(stored.owner)
        if before is None:
            before = _read_covered(AgentState(self._rewound, author, scope=scope))
        self._covered[stored.owner] = covered
        named = zip(self._events[: call.index], self._names, strict=False)
        events = list(_find_new(named, before, covered))
        removed = [line for event in events for line in _list_parts(event)]
        removed_count = (covered - before).total()
        if others := removed_count - len(events):
            removed.append(f"{others:,} messages that ADK had put into other words")
        summary = stored.read("summary") or ""
        usage, cost = self._read_bill(facts)
        return Compaction(facts, usage, cost, removed_count, removed, summary)

    def _read_bill(self, facts: dict[str, Any]) -> tuple[Usage, float | None]:
        """Reads what summaries took; where nothing was counted, nobody knows."""
        used = facts.get("usage")
        counts = used if isinstance(used, dict) else {}
        names = vars(Usage())
        usage = Usage(**{name: int(read_number(counts.get(name))) for name in names})
        cost, model = facts.get("cost"), facts.get("model")
        if model == "":
            return usage, 0.0  # No model was asked.
        if usage == Usage() or cost != (known := read_number(cost)):
            return usage, self._price(str(model), usage) if model else None
        return usage, known


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


def write_page(output: Path, name: str, **values: Any) -> None:
    """Writes a page, which loads nothing from anywhere."""
    folder = files("contextguard_adk") / "_tools"
    names = f"page/{name}", "page/report.css", "page/report.js", LIBRARY
    template, style, script, library = (
        (folder / path).read_text("utf-8") for path in names
    )
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {}  # The facts keep their order.
    environment.filters.update(digest=_digest, cost=format_cost, number=read_number)
    values |= {"style": style, "script": script, "library": library}
    page = environment.from_string(template).render(values)
    with explain_writing(output):
        output.write_text(page, "utf-8", "replace")


def _digest(text: str) -> str:
    """Names a script or style in the policy."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _list_facts(call: Call) -> dict[str, str]:
    """Describes a call, for the table and for what is shown on hover."""
    names = [each.name or "?" for each in call.event.get_function_calls()]
    tokens = call.usage.prompt_tokens
    return {
        "call": f"{call.replayed.number:,}",
        "agent": call.event.author,
        "time": f"{recordings.read_time(call.event.timestamp):%F %T}",
        "prompt tokens": f"{tokens:,}",
        "of the window": f"{tokens / call.replayed.window_tokens:.0%}",
        "cached": f"{call.usage.cached_tokens:,}",
        "output": f"{call.usage.output_tokens:,}",
        "cost": format_cost(call.cost),
        "new in the request": _shorten(call.news, 4) or "-",
        "tools called": _shorten(names, 8) or "-",
    }


def _shorten(lines: list[str], most: int) -> str:
    more = f"; and {len(lines) - most:,} more" if len(lines) > most else ""
    return "; ".join(line[:200] for line in lines[:most]) + more


def _describe_charts(calls: list[Call], is_guarded: bool) -> dict[str, Any]:
    """Describes what the charts show, safe as JSON."""
    played = [call.replayed for call in calls]
    others = [p.whole_tokens if is_guarded else p.sent_tokens for p in played]
    bills = [p.whole_bill if is_guarded else p.sent_bill for p in played]
    recorded = [call.usage.prompt_tokens for call in calls]
    summaries = [call.summary_usage for call in calls]
    return {
        "isGuarded": is_guarded,
        "agents": [call.event.author for call in calls],
        "prompt": recorded,
        "other": others if others != recorded else None,
        "window": [p.window_tokens for p in played],
        "threshold": [p.threshold_tokens for p in played],
        "compactions": [call.compaction is not None for call in calls],
        "uncached": [c.usage.prompt_tokens - c.usage.cached_tokens for c in calls],
        "cached": [call.usage.cached_tokens for call in calls],
        "output": [call.usage.output_tokens for call in calls],
        "summaries": [u.prompt_tokens + u.output_tokens for u in summaries],
        "money": _add_up([call.cost for call in calls]),
        "otherMoney": _add_up([bill.cost for bill in bills]),
        "facts": [_list_facts(call) for call in calls],
    }


def _add_up(costs: list[float | None]) -> list[float] | None:
    """Adds up dollars from call to call; None where a price is unknown."""
    known = [cost for cost in costs if cost is not None]
    return list(accumulate(known)) if len(known) == len(costs) and any(known) else None
