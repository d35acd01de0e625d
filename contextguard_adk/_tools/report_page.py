"""The page of `contextguard report`: one HTML file with all that it needs.

All that comes from a session is untrusted: it reaches the page as escaped text or as
JSON, and its Content-Security-Policy lets nothing run but the two scripts of ours.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from itertools import accumulate
from typing import Any

from jinja2 import Environment, StrictUndefined

from contextguard_adk._providers.costs import add_costs
from contextguard_adk._tools.recordings import describe_session, read_time
from contextguard_adk._tools.report import Call, Compaction, Report, read_number
from contextguard_adk.records import REASONS, Usage, format_cost


def build_page(report: Report) -> str:
    """Builds the page, which loads nothing from anywhere."""
    folder = files("contextguard_adk") / "_tools"
    library = (folder / "vendor" / "chart.umd.min.js").read_text("utf-8")
    template, style, script = (
        (folder / "page" / f"report.{suffix}").read_text("utf-8")
        for suffix in ("html", "css", "js")
    )
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {}  # The facts keep their order.
    environment.filters["digest"] = _digest
    calls, facts = report.calls, [_list_facts(call) for call in report.calls]
    return environment.from_string(template).render(
        style=style,
        library=library,
        script=script,
        session=describe_session(report.session),
        is_guarded=report.is_guarded,
        without=report.replayed.without_guard,
        guarded=report.replayed.with_guard,
        fullest_ratio=max(
            c.usage.prompt_tokens / c.replayed.window_tokens for c in calls
        ),
        tiles=_list_tiles(report),
        charts={**_describe_charts(report), "facts": facts},
        cards=[
            (call.replayed.number, known, done, _list_rows(done, report.is_guarded))
            for call, known in zip(calls, facts, strict=True)
            if (done := call.compaction)
        ],
    )


def _digest(text: str) -> str:
    """Names a script or style in the policy."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _list_tiles(report: Report) -> dict[str, str]:
    """Lists the figures of the headline."""
    calls = report.calls
    count = sum(call.compaction is not None for call in calls)
    tokens = max(call.usage.prompt_tokens for call in calls)
    usage = sum((call.usage + call.summary_usage for call in calls), Usage())
    is_simulated = " (simulated)" * (not report.is_guarded)
    return {
        "agents": ", ".join(dict.fromkeys(call.event.author for call in calls)),
        "model calls": f"{len(calls):,}",
        "largest request": f"{tokens:,} tokens",
        f"compactions{is_simulated}": f"{count:,}",
        "uncached input": f"{usage.prompt_tokens - usage.cached_tokens:,} tokens",
        "cached input": f"{usage.cached_tokens:,} tokens",
        "output": f"{usage.output_tokens:,} tokens",
        "cost": format_cost(add_costs(call.cost for call in calls)),
    }


def _list_facts(call: Call) -> dict[str, str]:
    """Describes a call, for the table and for what is shown on hover."""
    names = [each.name or "?" for each in call.event.get_function_calls()]
    tokens = call.usage.prompt_tokens
    return {
        "call": f"{call.replayed.number:,}",
        "agent": call.event.author,
        "time": f"{read_time(call.event.timestamp):%F %T}",
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


def _describe_charts(report: Report) -> dict[str, Any]:
    """Describes what the charts show, safe as JSON."""
    calls, is_guarded = report.calls, report.is_guarded
    played = [call.replayed for call in calls]
    others = [p.whole_tokens if is_guarded else p.sent_tokens for p in played]
    bills = [p.whole_bill.cost if is_guarded else p.sent_bill.cost for p in played]
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
        "otherMoney": _add_up(bills),
    }


def _add_up(costs: list[float | None]) -> list[float] | None:
    """Adds up dollars from call to call; None where a price is unknown."""
    known = [cost for cost in costs if cost is not None]
    return list(accumulate(known)) if len(known) == len(costs) and any(known) else None


def _list_rows(done: Compaction, is_guarded: bool) -> dict[str, str]:
    """Describes a compaction."""
    facts = done.facts
    reason = str(facts.get("reason"))
    rows = {
        "tokens": _from_to(facts, "tokens"),
        "messages": _from_to(facts, "contents"),
        "strategy": str(facts.get("strategy")),
        "why": REASONS.get(reason, reason),
        "summaries": str(facts.get("summaries", facts.get("attempts", 0))),
        "cost": format_cost(done.cost),
    }
    if is_guarded:  # A replay asks no model and waits for none.
        rows["model"] = str(facts.get("model") or "none asked")
        if (waited := read_number(facts.get("waited_seconds"))) >= 0.05:
            rows["waited"] = f"{waited:,.1f} s"
    if facts.get("was_ahead"):
        rows["written"] = "ahead of time, while the agent went on"
    if rows["summaries"] != "0" and facts.get("mechanical"):
        rows["written"] = "in part without a model, as excerpts"
    return rows


def _from_to(facts: dict[str, Any], name: str) -> str:
    ends = [read_number(facts.get(f"{name}_{end}")) for end in ("before", "after")]
    return "{:,.0f} → {:,.0f}".format(*ends)
