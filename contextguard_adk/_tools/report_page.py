"""The page of `contextguard report`: one HTML file with all that it needs.

All that comes from a session is untrusted: it reaches the page as escaped text or as
JSON, and its Content-Security-Policy lets nothing run but the two scripts of ours.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from itertools import accumulate
from string import Template
from typing import Any

from contextguard_adk._providers.costs import add_costs
from contextguard_adk._tools.recordings import describe_session, read_time
from contextguard_adk._tools.report import Call, Compaction, Report, read_number
from contextguard_adk.telemetry import REASONS, Usage, format_cost

NOTES = {
    True: "The dashed line is a simulation: what the requests would have taken without "
    "the guard.",
    False: "No guard was at work in this session. The dashed line and the compactions "
    "are a simulation: what the guard would have done, with summaries as long as they "
    "may be.",
}

MAX_REMOVED = 200
"""Lines about what one compaction has replaced; a page must open on a phone."""


def build_page(report: Report) -> str:
    """Builds the page, which loads nothing from anywhere."""
    folder = files("contextguard_adk") / "_tools"
    library = (folder / "vendor" / "chart.umd.min.js").read_text("utf-8")
    template, style, script = (
        (folder / "page" / f"report.{suffix}").read_text("utf-8")
        for suffix in ("html", "css", "js")
    )
    scripts = f"{_digest(library)} {_digest(script)}"
    policy = f"default-src 'none'; script-src {scripts}; style-src {_digest(style)}"
    return Template(template).substitute(
        policy=f"{policy}; base-uri 'none'; form-action 'none'",
        style=style,
        library=library,
        script=script,
        data=_write_json(_describe_charts(report)),
        session=escape(str(describe_session(report.session))),
        verdict=escape(_judge(report)),
        tiles="".join(_list_tiles(report)),
        note=NOTES[report.is_guarded],
        cards="".join(_list_cards(report)) or "<p>There was none.</p>",
        table=_write_table(report),
    )


def _digest(text: str) -> str:
    """Names a script or style in the policy."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _write_json(value: object) -> str:
    """Writes JSON that ends no script, whatever a text in it says."""
    return json.dumps(value).replace("<", "\\u003c")


def _judge(report: Report) -> str:
    """Says in one sentence how the session went."""
    without, guarded = report.replayed.without_guard, report.replayed.with_guard
    over, count = f"{without.over_window:,}", f"{len(report.calls):,}"
    if report.is_guarded:
        sizes = [c.usage.prompt_tokens / c.replayed.window_tokens for c in report.calls]
        return (
            f"With the guard, the largest of {count} requests filled {max(sizes):.0%} "
            f"of the window. Without it, {over} would have been larger than the window."
        )
    text = f"{over} of {count} requests are larger than the context window."
    if done := guarded.compactions:
        over = f"{guarded.over_window:,}"
        text += f" With the guard it would be {over}, after {done:,} compactions."
    return text


def _list_tiles(report: Report) -> Iterator[str]:
    """Yields the figures of the headline."""
    calls = report.calls
    count = sum(call.compaction is not None for call in calls)
    tokens = max(call.usage.prompt_tokens for call in calls)
    usage = sum((call.usage + call.summary_usage for call in calls), Usage())
    agents = ", ".join(dict.fromkeys(call.event.author for call in calls))
    is_simulated = " (simulated)" * (not report.is_guarded)
    for name, value in {
        "agents": agents,
        "model calls": f"{len(calls):,}",
        "largest request": f"{tokens:,} tokens",
        f"compactions{is_simulated}": f"{count:,}",
        "uncached input": f"{usage.prompt_tokens - usage.cached_tokens:,} tokens",
        "cached input": f"{usage.cached_tokens:,} tokens",
        "output": f"{usage.output_tokens:,} tokens",
        "cost": format_cost(add_costs(call.cost for call in calls)),
    }.items():
        yield _write_fact((name, value))


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
        "facts": [_list_facts(call) for call in calls],
    }


def _add_up(costs: list[float | None]) -> list[float] | None:
    """Adds up dollars from call to call; None where a price is unknown."""
    known = [cost for cost in costs if cost is not None]
    return list(accumulate(known)) if len(known) == len(costs) and any(known) else None


def _list_cards(report: Report) -> Iterator[str]:
    """Yields a card for each compaction."""
    pairs = [(call, call.compaction) for call in report.calls if call.compaction]
    for number, (call, done) in enumerate(pairs, 1):
        name = f"Compaction {number}" + " (simulated)" * (not report.is_guarded)
        facts, rows = _list_facts(call), _list_rows(done)
        if not report.is_guarded:  # A replay asks no model and waits for none.
            rows = {key: rows[key] for key in rows if key not in ("model", "waited")}
        where = f"{facts['agent']}, call {facts['call']}, {facts['time']}"
        listed = "".join(map(_write_fact, rows.items()))
        yield (
            f'<article id="compaction-{call.replayed.number}" tabindex="-1">'
            f"<h3>{name}</h3><p>{escape(where)}</p><dl>{listed}</dl>"
            f"{_write_removed(done)}"
        )
        if done.summary and report.is_guarded:
            size = f"{len(done.summary):,} characters"
            yield (
                f"<details><summary>What the summary says, {size}</summary>"
                f'<pre tabindex="0">{escape(done.summary)}</pre></details>'
            )
        yield "</article>"


def _write_fact(fact: tuple[str, str]) -> str:
    return f"<div><dt>{escape(fact[0])}</dt><dd>{escape(fact[1])}</dd></div>"


def _list_rows(done: Compaction) -> dict[str, str]:
    """Describes a compaction."""
    facts = done.facts
    reason, model = str(facts.get("reason")), str(facts.get("model") or "none asked")
    rows = {
        "tokens": _from_to(facts, "tokens"),
        "messages": _from_to(facts, "contents"),
        "strategy": str(facts.get("strategy")),
        "why": REASONS.get(reason, reason),
        "summaries": str(facts.get("summaries", facts.get("attempts", 0))),
        "cost": format_cost(done.cost),
        "model": model,
    }
    if (waited := read_number(facts.get("waited_seconds"))) >= 0.05:
        rows["waited"] = f"{waited:,.1f} s"
    if facts.get("was_ahead"):
        rows["written"] = "ahead of time, while the agent went on"
    if rows["summaries"] != "0" and facts.get("mechanical"):
        rows["written"] = "in part without a model, as excerpts"
    return rows


def _write_removed(done: Compaction) -> str:
    """Lists what a compaction has replaced."""
    if not done.removed_count:
        return "<p>It replaced no message; tool results were shortened.</p>"
    lines = [*done.removed[:MAX_REMOVED]]
    if more := len(done.removed) - len(lines):
        lines.append(f"and {more:,} more")
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    title = f"What it took out: {done.removed_count:,} messages"
    return f"<details><summary>{title}</summary><ul>{items}</ul></details>"


def _from_to(facts: dict[str, Any], name: str) -> str:
    before, after = (
        read_number(facts.get(f"{name}_{end}")) for end in ("before", "after")
    )
    return f"{before:,.0f} → {after:,.0f}"


def _write_table(report: Report) -> str:
    """Writes the facts of all calls as a table, for readers without the charts."""
    rows = [_list_facts(call) for call in report.calls]
    head = "".join(f'<th scope="col">{name}</th>' for name in rows[0])
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row.values())}</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
