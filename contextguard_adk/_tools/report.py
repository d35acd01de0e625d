"""`contextguard report`: a recorded session as one HTML page."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from google.adk.events.event import Event
from google.adk.sessions import Session
from rich.console import Console

from contextguard_adk._providers.clients import read_usage
from contextguard_adk._providers.costs import add_costs, price_calls
from contextguard_adk._providers.registry import resolve_costs
from contextguard_adk._tools import recordings, replay
from contextguard_adk._tools.aftermath import (
    Recalled,
    arrange_kinds,
    count_kinds,
    find_missing,
    find_needed_later,
    list_parts,
    list_recalled,
)
from contextguard_adk._tools.html_page import write_page
from contextguard_adk._tools.recordings import (
    RecordedCall,
    describe_session,
    read_number,
)
from contextguard_adk._tools.replay import ReplaySettings
from contextguard_adk._tools.replaying.calls import list_calls
from contextguard_adk._tools.replaying.figures import Replayed, ReplayedCall
from contextguard_adk._tools.replaying.need import Needed, Needs, Share, list_missing
from contextguard_adk._tools.requests import Rebuilder, Rebuilt
from contextguard_adk._tools.terminal import print_line, quiet_logs
from contextguard_adk.config import PluginSettings
from contextguard_adk.records import REASONS, Usage, format_cost


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
            cost=_describe_cost([call.cost for call in calls]),
            reasons=REASONS,
            need=Share(len(report.needed), len(report.missing)),
            missing=list_missing(report.missing),
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
    lines: list[str]  # One on each part of what was taken out.
    needed: list[str] = field(default_factory=list)  # Later, and had in another place.
    missing: list[str] = field(default_factory=list)  # Needed later, and not had.


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
    rebuilt: Rebuilt
    missing: list[Needed]  # What the call needed and its request did not hold.
    kinds: Counter[str]  # Tokens.


@dataclass(frozen=True)
class Report:
    """A recorded session; without a guard at work in it, compactions are simulated."""

    calls: list[Call]
    replayed: Replayed
    is_guarded: bool
    recalled: list[Recalled]

    @property
    def needed(self) -> list[Needed]:
        return [each for call in self.calls for each in call.replayed.needed]

    @property
    def missing(self) -> list[tuple[int, Needed]]:
        """What requests did not hold, by the number of the call."""
        calls = ((call.replayed.number, call.missing) for call in self.calls)
        return [(number, each) for number, missing in calls for each in missing]


async def make_report(session: Session, settings: ReplaySettings) -> Report:
    """Collects what was recorded, and replays the session for the other half."""
    recorded = list(list_calls(session, settings.agent))
    told = [recordings.read_facts(call.event) for call in recorded]
    windows = {int(read_number(facts.get("window"))) for facts in told} - {0}
    if settings.window_tokens is None and len(windows) == 1:
        settings = replace(settings, window_tokens=max(1_000, *windows))
    is_guarded = any(told) or any(call.is_guarded for call in recorded)
    # Where a guard was at work, what it did is recorded: nothing is simulated.
    guard = PluginSettings(default=None) if is_guarded else settings.guard
    [replayed] = await replay.replay_guards(session, settings, [guard])
    needs = Needs(session.events, recorded)
    reader = _Reader(session, settings, is_guarded, needs)
    pairs = zip(recorded, replayed.calls, strict=True)
    calls = [await reader.read(*pair, replayed.fixed_tokens) for pair in pairs]
    for index, call in enumerate(calls):
        if compaction := call.compaction:
            later = [c for c in calls[index:] if c.event.author == call.event.author]
            wanted = [(c.replayed.needed, c.missing) for c in later]
            found = find_needed_later(needs, call.rebuilt.removed, wanted)
            compaction.needed[:], compaction.missing[:] = found
    wanted_by = [(c, p.needed) for c, p in zip(recorded, replayed.calls, strict=True)]
    recalled = [*list_recalled(session, needs, wanted_by)]
    return Report(calls, replayed, is_guarded, recalled)


class _Reader:
    """Reads one recorded call after the other, and what a guard had stored by then."""

    def __init__(
        self,
        session: Session,
        settings: ReplaySettings,
        is_guarded: bool,
        needs: Needs,
    ) -> None:
        self._events = session.events
        self._settings = settings
        self._needs = needs
        self._rebuilder = Rebuilder(session, settings.guard, settings.window_tokens)
        self._simulated: dict[str, Any] | None = None if is_guarded else {}
        self._next = 0

    async def read(
        self, call: RecordedCall, played: ReplayedCall, fixed_tokens: dict[str, int]
    ) -> Call:
        """Describes a call; a compaction is the replay's where no guard was at work."""
        event = call.event
        missing = played.missing
        tokens = call.prompt_tokens
        news = [e for e in self._events[self._next : call.index] if not e.partial]
        self._next = call.index + 1
        facts = recordings.read_facts(event).get("compaction")
        if self._simulated is not None:
            facts = asdict(played.compaction) if played.compaction else None
            self._simulated = played.state or self._simulated
            tokens = played.sent_tokens
        rebuilt = await self._rebuilder.rebuild(call, self._simulated)
        usage = read_usage(event.usage_metadata)
        summary_usage = Usage()
        cost = self._price(event.model_version, usage)
        compaction = None
        if isinstance(facts, dict):
            removed = (list_parts(each, event.author) for each in rebuilt.removed)
            compaction = Compaction(facts, *self._read_bill(facts), [*chain(*removed)])
        if self._simulated is None:
            missing = find_missing(self._needs, played.needed, rebuilt)
            summary_usage = compaction.usage if compaction else summary_usage
            cost = add_costs((cost, compaction.cost)) if compaction else cost
        said = chain(*(list_parts(e.content, e.author) for e in news))
        memo = self._rebuilder.memo
        fixed = fixed_tokens[event.author]
        kinds = count_kinds(rebuilt, memo, fixed, tokens)
        return Call(
            *(event, usage, summary_usage, cost, [*said], played, compaction),
            *(rebuilt, missing, kinds),
        )

    def _price(self, model: str | None, usage: Usage) -> float | None:
        prices = self._settings.guard.prices
        costs = resolve_costs(self._settings.model or model or "", prices, None)
        return price_calls([usage], costs)

    def _read_bill(self, facts: dict[str, Any]) -> tuple[Usage, float | None]:
        """Reads what summaries took; where nothing was counted, nobody knows."""
        used = facts.get("usage")
        counts = used if isinstance(used, dict) else {}
        names = vars(Usage())
        usage = Usage(**{name: int(read_number(counts.get(name))) for name in names})
        cost = facts.get("cost")
        model = facts.get("model")
        if model == "":
            return usage, 0.0  # No model was asked.
        if usage == Usage() or cost != (known := read_number(cost)):
            return usage, self._price(str(model), usage) if model else None
        return usage, known


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
        "made of": ", ".join(
            f"{name} {count / max(1, call.kinds.total()):.0%}"
            for name, count in call.kinds.most_common(4)
        ),
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
        "kinds": arrange_kinds([call.kinds for call in calls]),
        "facts": [_list_facts(call) for call in calls],
    }


def _add_up(costs: list[float | None]) -> list[float] | None:
    """Adds up dollars from call to call; None where a price is unknown."""
    known = [cost for cost in costs if cost is not None]
    return list(accumulate(known)) if len(known) == len(costs) and any(known) else None


def _describe_cost(costs: list[float | None]) -> str:
    """Says what calls cost; where some prices are unknown, what it is at least."""
    known = [cost for cost in costs if cost is not None]
    if not known or len(known) == len(costs):
        return format_cost(add_costs(costs))
    unknown = f"{len(costs) - len(known):,} of {len(costs):,} calls are unknown"
    return f"at least {format_cost(add_costs(known))}; {unknown}"
