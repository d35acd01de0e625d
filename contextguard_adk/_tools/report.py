"""`contextguard report`: a recorded session as one HTML page."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
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
    CallNeeds,
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
from contextguard_adk._tools.replaying.figures import Bill, Replayed, ReplayedCall
from contextguard_adk._tools.replaying.need import Needed, Needs, Share, list_missing
from contextguard_adk._tools.requests import Rebuilder, Rebuilt
from contextguard_adk._tools.terminal import print_line, quiet_logs
from contextguard_adk.config import PluginSettings
from contextguard_adk.records import REASONS, Usage, format_cost

# The command line accepts no smaller window, either.
LEAST_WINDOW_TOKENS = 1_000


def run_report(is_list: bool, as_json: bool, output: Path, **recording: Any) -> None:
    """Writes the page about a session, or prints a list of sessions if `is_list`.

    `recording` are the arguments of `replay.read_recording`.
    """
    if is_list:
        replay.print_sessions(as_json, **recording)
        return

    with quiet_logs(Console(stderr=True)):
        session, settings = replay.read_recording(**recording)
        report = asyncio.run(make_report(session, settings))
        calls = report.calls
        usages = [call.usage + call.summary_usage for call in calls]
        write_page(
            output,
            "report.html",
            report=report,
            session=describe_session(session),
            usage=sum(usages, Usage()),
            cost=_describe_cost([call.cost for call in calls]),
            reasons=REASONS,
            need=Share(len(report.needed), len(report.missing)),
            missing=list_missing(report.missing),
            charts=_describe_charts(calls, report.is_guarded),
        )

    print_line(str(describe_session(session)), "dim")
    compacted = [call for call in calls if call.compaction]
    kind = "compactions" if report.is_guarded else "simulated compactions"
    count = f"model calls: {len(calls):,}, {kind}: {len(compacted):,}"
    print_line(f"{output} is written ({count})", "bold")


@dataclass(frozen=True)
class Compaction:
    """A compaction, recorded or simulated.

    Attributes:
        facts: The figures, as a guard notes them in an event's `custom_metadata`.
        usage: The tokens of the summaries.
        cost: The price of the summaries in US dollars; None if unknown.
        lines: A line on each part of the removed messages.
        held: The values in the removed messages that later calls needed, and that the
            request of each such call held in another place.
        missing: The values in the removed messages that later calls needed, and that
            the request of at least one such call did not hold.
    """

    facts: dict[str, Any]
    usage: Usage
    cost: float | None
    lines: list[str]
    held: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """A recorded model call with its request and its replay."""

    event: Event
    usage: Usage
    summary_usage: Usage
    cost: float | None  # In US dollars, with that of summaries; None if unknown.
    news: list[str]  # One line on each part that was said since the last call.
    replayed: ReplayedCall
    compaction: Compaction | None
    rebuilt: Rebuilt
    missing: list[Needed]  # Values that the call needed and its request did not hold.
    kinds: Counter[str]  # The prompt tokens by the kind of content.


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
        """The values that requests did not hold, by the number of the call."""
        missing = list[tuple[int, Needed]]()
        for call in self.calls:
            missing += [(call.replayed.number, each) for each in call.missing]
        return missing


async def make_report(session: Session, settings: ReplaySettings) -> Report:
    """Reads a session and replays it.

    The replay adds the figures that no recording has. If no guard was at work in the
    session, the replay has the compactions as well.
    """
    recorded_calls = list(list_calls(session, settings.agent))
    noted_facts = [recordings.read_facts(call.event) for call in recorded_calls]
    is_guarded = any(noted_facts) or any(call.is_guarded for call in recorded_calls)
    report_settings = _with_noted_window(settings, noted_facts)

    # The compactions of a guard that was at work are recorded. None are simulated, so
    # the acting guard of the replay guards no agent.
    guard = PluginSettings(default=None) if is_guarded else report_settings.guard
    (replayed,) = await replay.replay_guards(session, report_settings, [guard])
    recorded_and_played = list(zip(recorded_calls, replayed.calls, strict=True))

    needs = Needs(session.events, recorded_calls)
    reader = _Reader(session, report_settings, is_guarded, needs)
    read_calls = list[Call]()
    for recorded, played in recorded_and_played:
        fixed_tokens = replayed.fixed_tokens[recorded.event.author]
        read_calls.append(await reader.read(recorded, played, fixed_tokens))

    indexes = range(len(read_calls))
    calls = [_with_later_needs(needs, read_calls, index) for index in indexes]
    needed_by_call = [(call, played.needed) for call, played in recorded_and_played]
    recalled = list(list_recalled(session, needs, needed_by_call))
    return Report(calls, replayed, is_guarded, recalled)


def _with_noted_window(
    settings: ReplaySettings, noted_facts: list[dict[str, Any]]
) -> ReplaySettings:
    """Returns settings with the window that a guard has noted on events.

    The settings stay as they are if the user has given a window, if none is noted, and
    if the noted windows differ.
    """
    noted_windows = [int(read_number(facts.get("window"))) for facts in noted_facts]
    windows = set(noted_windows) - {0}  # 0 means that none is noted.
    if settings.window_tokens is not None or len(windows) != 1:
        return settings

    (noted_tokens,) = windows
    window_tokens = max(LEAST_WINDOW_TOKENS, noted_tokens)
    return replace(settings, window_tokens=window_tokens)


def _with_later_needs(needs: Needs, calls: list[Call], index: int) -> Call:
    """Adds, to the compaction of a call, the removed values that were needed later.

    The compacted call itself counts as the first of the later ones. A call without a
    compaction is returned as it is.
    """
    call = calls[index]
    if call.compaction is None:
        return call

    agent = call.event.author
    later_calls = [
        CallNeeds(needed=each.replayed.needed, missing=each.missing)
        for each in calls[index:]
        if each.event.author == agent
    ]
    values = find_needed_later(needs, call.rebuilt.removed, later_calls)
    compaction = replace(call.compaction, held=values.held, missing=values.missing)
    return replace(call, compaction=compaction)


class _Reader:
    """Describes one recorded call after the other, with its compaction."""

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
        self._is_guarded = is_guarded
        self._simulated_state: dict[str, Any] = {}
        self._next_event = 0  # The index of the first event that is not described.

    async def read(
        self, call: RecordedCall, played: ReplayedCall, fixed_tokens: int
    ) -> Call:
        """Describes a call; calls come in their order.

        If a guard was at work in the session, the request and the compaction are those
        of the recording; otherwise they are those of the replay. `fixed_tokens` are
        the tokens of instruction and tools by bytes / 4.
        """
        event = call.event
        news = self._list_news(call)

        if self._is_guarded:
            rebuilt = await self._rebuilder.rebuild(call)
            facts = recordings.read_facts(event).get("compaction")
            missing = find_missing(self._needs, played.needed, rebuilt)
            prompt_tokens = call.prompt_tokens
        else:
            # A replayed call has state only after a compaction.
            self._simulated_state = played.state or self._simulated_state
            rebuilt = await self._rebuilder.rebuild(call, self._simulated_state)
            facts = asdict(played.compaction) if played.compaction else None
            missing = played.missing
            prompt_tokens = played.sent_tokens
        compaction = self._read_compaction(facts, event.author, rebuilt)

        usage = read_usage(event.usage_metadata)
        cost = self._price(event.model_version, usage)
        summary_usage = Usage()
        if self._is_guarded and compaction:
            summary_usage = compaction.usage
            cost = add_costs((cost, compaction.cost))

        memo = self._rebuilder.memo
        return Call(
            event=event,
            usage=usage,
            summary_usage=summary_usage,
            cost=cost,
            news=news,
            replayed=played,
            compaction=compaction,
            rebuilt=rebuilt,
            missing=missing,
            kinds=count_kinds(rebuilt, memo, fixed_tokens, prompt_tokens),
        )

    def _list_news(self, call: RecordedCall) -> list[str]:
        """Describes the messages since the last call, and notes the place of this one.

        The events of the call's own answer after the first count for the next call.
        """
        news = list[str]()
        for event in self._events[self._next_event : call.index]:
            if not event.partial:
                news += list_parts(event.content, event.author)
        self._next_event = call.index + 1
        return news

    def _read_compaction(
        self, facts: object, agent: str, rebuilt: Rebuilt
    ) -> Compaction | None:
        """Describes a compaction; returns None if `facts` are not those of one."""
        if not isinstance(facts, dict):
            return None

        lines = list[str]()
        for content in rebuilt.removed:
            lines += list_parts(content, agent)
        bill = self._read_bill(facts)
        return Compaction(facts, bill.usage, bill.cost, lines)

    def _price(self, model: str | None, usage: Usage) -> float | None:
        """Returns the price of a usage in US dollars; None if it is unknown."""
        prices = self._settings.guard.prices
        costs = resolve_costs(self._settings.model or model or "", prices, None)
        return price_calls([usage], costs)

    def _read_bill(self, facts: dict[str, Any]) -> Bill:
        """Reads the usage of a compaction's summaries, and their price in US dollars.

        - If no model was asked, the price is 0.0.
        - Else, if a valid price is noted with a usage, it is the noted price.
        - Else, if a model is noted, it is the price of the model, which may be None.
        - Else the price is None.
        """
        noted_usage = facts.get("usage")
        counts = noted_usage if isinstance(noted_usage, dict) else {}
        names = vars(Usage())
        usage = Usage(**{name: int(read_number(counts.get(name))) for name in names})

        model = facts.get("model")
        if model == "":
            return Bill(usage, 0.0)

        noted_cost = facts.get("cost")
        cost = read_number(noted_cost)  # 0 for an invalid one.
        is_valid_cost = noted_cost == cost
        if usage != Usage() and is_valid_cost:
            return Bill(usage, cost)
        if model:
            return Bill(usage, self._price(str(model), usage))
        return Bill(usage, None)


def _list_facts(call: Call) -> dict[str, str]:
    """Describes a call by name and text, for the table and for a chart's hover text."""
    tool_names = [each.name or "?" for each in call.event.get_function_calls()]
    tokens = call.usage.prompt_tokens
    kinds_total = max(1, call.kinds.total())
    largest_kinds = [
        f"{name} {count / kinds_total:.0%}" for name, count in call.kinds.most_common(4)
    ]

    return {
        "call": f"{call.replayed.number:,}",
        "agent": call.event.author,
        "time": f"{recordings.read_time(call.event.timestamp):%F %T}",
        "prompt tokens": f"{tokens:,}",
        "of the window": f"{tokens / call.replayed.window_tokens:.0%}",
        "cached": f"{call.usage.cached_tokens:,}",
        "output": f"{call.usage.output_tokens:,}",
        "cost": format_cost(call.cost),
        "made of": ", ".join(largest_kinds),
        "new in the request": _join_first(call.news, 4) or "-",
        "tools called": _join_first(tool_names, 8) or "-",
    }


def _join_first(lines: list[str], most: int) -> str:
    """Joins the first lines, and says how many more there are."""
    more = f"; and {len(lines) - most:,} more" if len(lines) > most else ""
    return "; ".join(line[:200] for line in lines[:most]) + more


def _describe_charts(calls: list[Call], is_guarded: bool) -> dict[str, Any]:
    """Returns the data of the charts, by the names that `report.js` reads.

    The charts compare the recorded requests with other ones. If a guard was at work,
    these are the requests with the whole history; else they are the requests as the
    guard would have sent them.
    """
    replayed = [call.replayed for call in calls]
    if is_guarded:
        other_tokens = [each.whole_tokens for each in replayed]
        other_bills = [each.whole_bill for each in replayed]
    else:
        other_tokens = [each.sent_tokens for each in replayed]
        other_bills = [each.sent_bill for each in replayed]

    return {
        "isGuarded": is_guarded,
        **_chart_context(calls, other_tokens),
        **_chart_usage(calls),
        "money": _add_up([call.cost for call in calls]),
        "otherMoney": _add_up([bill.cost for bill in other_bills]),
        "kinds": arrange_kinds([call.kinds for call in calls]),
        "facts": [_list_facts(call) for call in calls],
    }


def _chart_context(calls: list[Call], other_tokens: list[int]) -> dict[str, Any]:
    """Returns, for each call, the agent, the prompt tokens, and their limits.

    "other" is None if the other requests have the same tokens as the recorded ones.
    """
    recorded = [call.usage.prompt_tokens for call in calls]
    return {
        "agents": [call.event.author for call in calls],
        "prompt": recorded,
        "other": other_tokens if other_tokens != recorded else None,
        "window": [call.replayed.window_tokens for call in calls],
        "threshold": [call.replayed.threshold_tokens for call in calls],
        "compactions": [call.compaction is not None for call in calls],
    }


def _chart_usage(calls: list[Call]) -> dict[str, list[int]]:
    """Returns the billed tokens of each call."""
    usages = [call.usage for call in calls]
    summaries = [call.summary_usage for call in calls]
    return {
        "uncached": [each.prompt_tokens - each.cached_tokens for each in usages],
        "cached": [each.cached_tokens for each in usages],
        "output": [each.output_tokens for each in usages],
        "summaries": [each.prompt_tokens + each.output_tokens for each in summaries],
    }


def _add_up(costs: list[float | None]) -> list[float] | None:
    """Returns, for each call, the dollars of all calls up to it.

    Returns None if a price is unknown or if all prices are 0.
    """
    known = [cost for cost in costs if cost is not None]
    if len(known) < len(costs) or not any(known):
        return None
    return list(accumulate(known))


def _describe_cost(costs: list[float | None]) -> str:
    """Describes the cost of calls, or the least cost if some prices are unknown."""
    known = [cost for cost in costs if cost is not None]
    if not known or len(known) == len(costs):
        return format_cost(add_costs(costs))

    unknown = f"{len(costs) - len(known):,} of {len(costs):,} calls are unknown"
    return f"at least {format_cost(add_costs(known))}; {unknown}"
