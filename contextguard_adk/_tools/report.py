"""`contextguard report`: a recorded session as one HTML page.

If a guard was at work in the session, the page shows the recorded requests and
compactions. Otherwise the session is replayed with a guard, and the page shows the
requests and compactions of the replay. These are called simulated.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from google.adk.events.event import Event
from google.adk.sessions import Session
from rich.console import Console

from contextguard_adk._providers.clients import read_usage
from contextguard_adk._providers.costs import add_costs, price_calls
from contextguard_adk._providers.registry import resolve_costs
from contextguard_adk._runtime.spending import SPENT_KEY, read_spent
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

# The facts of a call are what the page shows about the call. They name at most these
# numbers of new messages and of called tools, and show this much of each.
MAX_NEWS = 4
MAX_TOOL_NAMES = 8
MAX_TEXT_CHARS = 200

# How many kinds of content the facts of a call name.
MAX_NAMED_KINDS = 4


def run_report(is_list: bool, as_json: bool, output: Path, **recording: Any) -> None:
    """Writes the page about a session, or prints a list of sessions.

    Args:
        is_list: Whether to print a list of sessions; no page is written then.
        as_json: Whether the list is printed as JSON.
        output: The file to write.
        recording: The arguments of `replay.read_recording`.
    """
    if is_list:
        replay.print_sessions(as_json, **recording)
        return

    with quiet_logs(Console(stderr=True)):
        session, settings = replay.read_recording(**recording)
        report = asyncio.run(make_report(session, settings))
        _write_report(output, session, report)

    print_line(str(describe_session(session)), "dim")
    compacted_calls = [call for call in report.calls if call.compaction]
    kind = "compactions" if report.is_guarded else "simulated compactions"
    call_count = f"model calls: {len(report.calls):,}"
    count = f"{call_count}, {kind}: {len(compacted_calls):,}"
    print_line(f"{output} is written ({count})", "bold")


def _write_report(output: Path, session: Session, report: Report) -> None:
    """Writes the page.

    The named arguments of `write_page` are the names that the template uses.
    """
    calls = report.calls
    usages = [call.usage + call.summary_usage for call in calls]
    write_page(
        output,
        report=report,
        session=describe_session(session),
        usage=sum(usages, Usage()),
        cost=_describe_cost([call.cost for call in calls]),
        spent=read_spent(session.state.get(SPENT_KEY)),
        reasons=REASONS,
        need=Share(len(report.needed), len(report.missing)),
        missing=list_missing(report.missing),
        charts=_describe_charts(calls, report.is_guarded),
    )


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
    """A recorded model call with its request and its replay.

    Attributes:
        event: The event of the answer.
        usage: The tokens of the call.
        summary_usage: The tokens of the summaries of a recorded compaction.
        cost: The price of the call and of these summaries in US dollars; None if it is
            unknown.
        news: A line on each part that was said since the call before.
        replayed: The replay of the call.
        compaction: The compaction before the call, recorded or simulated; None if there
            was none.
        rebuilt: The messages of the request, recorded or simulated.
        missing: The values that the call needed and its request did not hold.
        kinds: The prompt tokens by the kind of content.
    """

    event: Event
    usage: Usage
    summary_usage: Usage
    cost: float | None
    news: list[str]
    replayed: ReplayedCall
    compaction: Compaction | None
    rebuilt: Rebuilt
    missing: list[Needed]
    kinds: Counter[str]


@dataclass(frozen=True)
class Report:
    """A recorded session.

    Attributes:
        calls: The model calls.
        replayed: The replay of the session.
        is_guarded: Whether a guard was at work in the session. If not, compactions are
            simulated.
        recalled: The calls of the recall tool.
    """

    calls: list[Call]
    replayed: Replayed
    is_guarded: bool
    recalled: list[Recalled]

    @property
    def needed(self) -> list[Needed]:
        return [each for call in self.calls for each in call.replayed.needed]

    @property
    def missing(self) -> list[tuple[int, Needed]]:
        """The needed values that requests did not hold, in the order of the calls.

        Each value stands after the number of its call.
        """
        missing = list[tuple[int, Needed]]()
        for call in self.calls:
            missing += [(call.replayed.number, each) for each in call.missing]
        return missing


async def make_report(session: Session, settings: ReplaySettings) -> Report:
    """Reads the calls of a session, with the figures of a replay.

    - If a guard was at work in the session: nothing is compacted in the replay. So the
      replay tells what the calls with the whole history would have taken.
    - Otherwise: the replay has a guard with the user's settings, and tells what this
      guard compacts.
    """
    recorded_calls = list(list_calls(session, settings.agent))
    noted_facts = [recordings.read_facts(call.event) for call in recorded_calls]
    is_guarded = any(noted_facts) or any(call.is_guarded for call in recorded_calls)
    report_settings = _with_noted_window(settings, noted_facts)

    guard_settings = report_settings.guard
    if is_guarded:
        # With these settings no agent has a strategy, so nothing is compacted.
        guard_settings = PluginSettings(default=None)
    (replayed,) = await replay.replay_guards(session, report_settings, [guard_settings])

    needs = Needs(session.events, recorded_calls)
    reader = _Reader(session, report_settings, is_guarded, needs)
    read_calls = list[Call]()
    needed_by_call = list[tuple[RecordedCall, list[Needed]]]()
    for recorded, played in zip(recorded_calls, replayed.calls, strict=True):
        fixed_tokens = replayed.fixed_tokens[recorded.event.author]
        read_calls.append(await reader.read_next(recorded, played, fixed_tokens))
        needed_by_call.append((recorded, played.needed))

    indexes = range(len(read_calls))
    calls = [_with_later_needs(needs, read_calls, index) for index in indexes]
    recalled = list(list_recalled(session, needs, needed_by_call))
    return Report(calls, replayed, is_guarded, recalled)


def _with_noted_window(
    settings: ReplaySettings, noted_facts: list[dict[str, Any]]
) -> ReplaySettings:
    """Returns settings with the window that a guard has noted on events.

    The settings are returned as they are in three cases:

    - The user has given a window.
    - No window is noted.
    - Different windows are noted.

    `noted_facts` has the notes on each call, {} for a call without notes.
    """
    windows = {int(read_number(facts.get("window"))) for facts in noted_facts}
    windows.discard(0)  # 0 stands for notes without a window.
    if settings.window_tokens is not None or len(windows) != 1:
        return settings

    (noted_tokens,) = windows
    window_tokens = max(LEAST_WINDOW_TOKENS, noted_tokens)
    return replace(settings, window_tokens=window_tokens)


def _with_later_needs(needs: Needs, calls: list[Call], index: int) -> Call:
    """Returns a call; its compaction tells the removed values that were needed later.

    A call without a compaction is returned as it is.

    Args:
        needs: The values that the recorded calls needed.
        calls: All calls, in order.
        index: The index of the call in `calls`.
    """
    call = calls[index]
    if call.compaction is None:
        return call

    # The request of this call is the first one without the removed messages.
    later_needs = list[CallNeeds]()
    for later in calls[index:]:
        if later.event.author == call.event.author:
            later_needs.append(CallNeeds(later.replayed.needed, later.missing))

    values = find_needed_later(needs, call.rebuilt.removed, later_needs)
    compaction = replace(call.compaction, held=values.held, missing=values.missing)
    return replace(call, compaction=compaction)


class _Request(NamedTuple):
    """The request of a call, recorded or simulated.

    Attributes:
        rebuilt: The messages of the request.
        facts: The figures of the compaction before the call. If they are no dict, there
            was no compaction.
        missing: The values that the call needed and the request did not hold.
        prompt_tokens: The real tokens of the request.
    """

    rebuilt: Rebuilt
    facts: object
    missing: list[Needed]
    prompt_tokens: int


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
        # The session state after the last simulated compaction.
        self._simulated_state: dict[str, Any] = {}
        # The index of the first event that is not described.
        self._next_event = 0

    async def read_next(
        self, call: RecordedCall, played: ReplayedCall, fixed_tokens: int
    ) -> Call:
        """Describes the next call; calls come in their order.

        Args:
            call: The recorded call.
            played: The replay of the call.
            fixed_tokens: The heuristic tokens (bytes / 4) of instruction and tools.
        """
        new_events = self._events[self._next_event : call.index]
        # An answer may be several events. Those after the first are new in the next
        # call.
        self._next_event = call.index + 1

        if self._is_guarded:
            request = await self._rebuild_recorded(call, played)
        else:
            request = await self._rebuild_simulated(call, played)
        rebuilt = request.rebuilt
        event = call.event
        compaction = self._read_compaction(request.facts, event.author, rebuilt)

        usage = read_usage(event.usage_metadata)
        cost = self._price(event.model_version, usage)
        summary_usage = Usage()
        if self._is_guarded and compaction:  # Nobody has paid a simulated compaction.
            summary_usage = compaction.usage
            cost = add_costs((cost, compaction.cost))

        kinds = count_kinds(
            rebuilt, self._rebuilder.memo, fixed_tokens, request.prompt_tokens
        )
        return Call(
            event=event,
            usage=usage,
            summary_usage=summary_usage,
            cost=cost,
            news=_list_news(new_events),
            replayed=played,
            compaction=compaction,
            rebuilt=rebuilt,
            missing=request.missing,
            kinds=kinds,
        )

    async def _rebuild_recorded(
        self, call: RecordedCall, played: ReplayedCall
    ) -> _Request:
        """Rebuilds the request as a guard sent it when the session was recorded."""
        rebuilt = await self._rebuilder.rebuild(call)
        return _Request(
            rebuilt=rebuilt,
            facts=recordings.read_facts(call.event).get("compaction"),
            missing=find_missing(self._needs, played.needed, rebuilt),
            prompt_tokens=call.prompt_tokens,
        )

    async def _rebuild_simulated(
        self, call: RecordedCall, played: ReplayedCall
    ) -> _Request:
        """Rebuilds the request as the guard of the replay has sent it."""
        # A replayed call has state only after a compaction. The summary in the state
        # stands in all requests up to the next compaction.
        if played.state:
            self._simulated_state = played.state
        return _Request(
            rebuilt=await self._rebuilder.rebuild(call, self._simulated_state),
            facts=asdict(played.compaction) if played.compaction else None,
            missing=played.missing,
            prompt_tokens=played.sent_tokens,
        )

    def _read_compaction(
        self, facts: object, agent: str, rebuilt: Rebuilt
    ) -> Compaction | None:
        """Describes the compaction before a call; returns None if there was none.

        Args:
            facts: The figures of the compaction. If they are no dict, there was no
                compaction.
            agent: The name of the agent.
            rebuilt: The request after the compaction. `rebuilt.removed` has the
                messages that this compaction took out of the request.
        """
        if not isinstance(facts, dict):
            return None

        lines = list[str]()
        for content in rebuilt.removed:
            lines += list_parts(content, agent)
        bill = self._read_bill(facts)
        return Compaction(facts, bill.usage, bill.cost, lines)

    def _price(self, model: str | None, usage: Usage) -> float | None:
        """Returns the price of a usage in US dollars; None if it is unknown.

        `model` is the recorded model, if any. The model of the settings goes first.
        """
        prices = self._settings.guard.prices
        costs = resolve_costs(
            self._settings.model or model or "", prices, registry=None
        )
        return price_calls([usage], costs)

    def _read_bill(self, facts: dict[str, Any]) -> Bill:
        """Reads the usage of a compaction's summaries, and their price in US dollars.

        The price is decided by the first of these cases that applies:

        1. No model was asked: 0.0.
        2. A valid price and a usage are noted: the noted price.
        3. A model is noted: the price of the noted usage for this model; None if the
           prices of the model are unknown.
        4. Otherwise: None.
        """
        noted_usage = facts.get("usage")
        counts = noted_usage if isinstance(noted_usage, dict) else {}
        names = vars(Usage())
        usage = Usage(**{name: int(read_number(counts.get(name))) for name in names})

        model = facts.get("model")
        if model == "":  # No model was asked.
            return Bill(usage, 0.0)

        noted_cost = facts.get("cost")
        cost = read_number(noted_cost)
        # An invalid price, or none, is read as 0.
        is_valid_cost = cost == noted_cost
        if is_valid_cost and usage != Usage():
            return Bill(usage, cost)
        if model:
            return Bill(usage, self._price(str(model), usage))
        return Bill(usage, None)


def _list_news(new_events: Sequence[Event]) -> list[str]:
    """Returns a line on each part of the messages in new events."""
    news = list[str]()
    for event in new_events:
        if not event.partial:  # A complete event repeats the content of a partial one.
            news += list_parts(event.content, event.author)
    return news


def _list_facts(call: Call) -> dict[str, str]:
    """Returns the facts of a call, each a text under its name.

    The page shows them in a table, and in a chart when the mouse is over a call.
    """
    tool_names = [each.name or "?" for each in call.event.get_function_calls()]
    prompt_tokens = call.usage.prompt_tokens
    return {
        "call": f"{call.replayed.number:,}",
        "agent": call.event.author,
        "time": f"{recordings.read_time(call.event.timestamp):%F %T}",
        "prompt tokens": f"{prompt_tokens:,}",
        "of the window": f"{prompt_tokens / call.replayed.window_tokens:.0%}",
        "cached": f"{call.usage.cached_tokens:,}",
        "output": f"{call.usage.output_tokens:,}",
        "cost": format_cost(call.cost),
        "made of": _describe_kinds(call.kinds),
        "new in the request": _join_first(call.news, MAX_NEWS) or "-",
        "tools called": _join_first(tool_names, MAX_TOOL_NAMES) or "-",
    }


def _describe_kinds(kinds: Counter[str]) -> str:
    """Describes the largest kinds of content: "thoughts 60%, tool calls 40%"."""
    total_tokens = max(1, kinds.total())  # An empty request has 0.
    shares = list[str]()
    for kind, tokens in kinds.most_common(MAX_NAMED_KINDS):
        shares.append(f"{kind} {tokens / total_tokens:.0%}")
    return ", ".join(shares)


def _join_first(texts: list[str], most: int) -> str:
    """Joins the first texts, at most `most`: "a; b; and 7 more".

    The result is "" if there are no texts.
    """
    joined = "; ".join(text[:MAX_TEXT_CHARS] for text in texts[:most])
    more_count = len(texts) - most
    return f"{joined}; and {more_count:,} more" if more_count > 0 else joined


def _describe_charts(calls: list[Call], is_guarded: bool) -> dict[str, Any]:
    """Returns the data of the charts, by the names that `report.js` reads.

    The charts compare the recorded request of each call with another one. If a guard
    was at work in the session, the other request is the one with the whole history.
    Otherwise the other request is the one that the guard would have sent.
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
    """Returns the data of the chart of sizes: lists with one value for each call.

    "prompt" has the prompt tokens of the recorded requests, and "other" has
    `other_tokens`, those of the requests to compare. If no request differs, "other" is
    None, so that the chart has one line. "window" and "threshold" are in tokens as
    well.
    """
    recorded_tokens = [call.usage.prompt_tokens for call in calls]
    return {
        "agents": [call.event.author for call in calls],
        "prompt": recorded_tokens,
        "other": other_tokens if other_tokens != recorded_tokens else None,
        "window": [call.replayed.window_tokens for call in calls],
        "threshold": [call.replayed.threshold_tokens for call in calls],
        "compactions": [call.compaction is not None for call in calls],
    }


def _chart_usage(calls: list[Call]) -> dict[str, list[int]]:
    """Returns the billed tokens by kind; each list has one number for each call."""
    usages = [call.usage for call in calls]
    summaries = [call.summary_usage for call in calls]
    return {
        "uncached": [each.prompt_tokens - each.cached_tokens for each in usages],
        "cached": [each.cached_tokens for each in usages],
        "output": [each.output_tokens for each in usages],
        "summaries": [each.prompt_tokens + each.output_tokens for each in summaries],
    }


def _add_up(costs: list[float | None]) -> list[float] | None:
    """Returns, for each call, the dollars of all calls up to this call.

    Returns None if a price is unknown, or if all prices are 0: the chart has no line
    then.
    """
    known_costs = [cost for cost in costs if cost is not None]
    is_complete = len(known_costs) == len(costs)
    if not (is_complete and any(known_costs)):
        return None
    return list(accumulate(known_costs))


def _describe_cost(costs: list[float | None]) -> str:
    """Describes the cost of calls in one of three forms:

    - "$1.2346", if all prices are known
    - "at least $1.2346; 2 of 9 calls are unknown", if some are known
    - "unknown", if no price is known
    """
    known_costs = [cost for cost in costs if cost is not None]
    unknown_count = len(costs) - len(known_costs)
    are_all_alike = unknown_count in (0, len(costs))
    if are_all_alike:  # The sum with an unknown price is unknown.
        return format_cost(add_costs(costs))

    least_cost = format_cost(add_costs(known_costs))
    unknown = f"{unknown_count:,} of {len(costs):,} calls are unknown"
    return f"at least {least_cost}; {unknown}"
