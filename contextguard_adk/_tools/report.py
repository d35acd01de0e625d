"""`contextguard report`: a recorded session as one HTML page with all that it needs.

All that comes from a session is untrusted: it reaches the page as escaped text or as
JSON, and its Content-Security-Policy lets nothing run but the two scripts of ours.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from rich.console import Console

from contextguard_adk._providers.costs import add_costs
from contextguard_adk._tools.recordings import describe_session, read_time
from contextguard_adk._tools.replay import print_sessions, read_recording
from contextguard_adk._tools.report_calls import (
    Call,
    Report,
    make_report,
    read_number,
)
from contextguard_adk._tools.terminal import explain_writing, print_line, quiet_logs
from contextguard_adk.telemetry import REASONS, Usage, format_cost


def run_report(is_list: bool, as_json: bool, output: Path, **recording: Any) -> None:
    """Writes the page about a session."""
    if is_list:
        print_sessions(as_json, **recording)
        return
    with quiet_logs(Console(stderr=True)):
        session, settings = read_recording(**recording)
        report = asyncio.run(make_report(session, settings))
        page = _build_page(report)
    with explain_writing(output):
        output.write_text(page, "utf-8", "replace")
    print_line(str(describe_session(session)), "dim")
    done = sum(call.compaction is not None for call in report.calls)
    kind = "compactions" if report.is_guarded else "simulated compactions"
    count = f"model calls: {len(report.calls):,}, {kind}: {done:,}"
    print_line(f"{output} is written ({count})", "bold")


def _build_page(report: Report) -> str:
    """Builds the page, which loads nothing from anywhere."""
    folder = files("contextguard_adk") / "_tools"
    template, style, script, library = (
        (folder / path).read_text("utf-8")
        for path in (
            "page/report.html",
            "page/report.css",
            "page/report.js",
            "vendor/chart.umd.min.js",
        )
    )
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {}  # The facts keep their order.
    environment.filters.update(digest=_digest, cost=format_cost, number=read_number)
    calls = report.calls
    return environment.from_string(template).render(
        style=style,
        script=script,
        library=library,
        report=report,
        session=describe_session(report.session),
        usage=sum((call.usage + call.summary_usage for call in calls), Usage()),
        cost=add_costs(call.cost for call in calls),
        reasons=REASONS,
        charts=_describe_charts(calls, report.is_guarded),
    )


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
