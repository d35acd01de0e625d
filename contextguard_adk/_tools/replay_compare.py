"""`contextguard replay --compare`: what each strategy and trigger would have cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from contextguard_adk._measuring.budgets import threshold_tokens
from contextguard_adk._tools.replay_report import (
    Replayed,
    list_assumptions,
    print_table,
)
from contextguard_adk._tools.terminal import print_line
from contextguard_adk._turn.settings import LEAST_AUTO_TOKENS
from contextguard_adk.config import STRATEGIES, PluginSettings
from contextguard_adk.records import format_cost

COMPARED: list[tuple[str, dict[str, Any]]] = [
    ("threshold", {}),
    ("sliding_window", {}),
    ("pipeline", {}),
    *(("threshold", {"trigger": trigger}) for trigger in (0.5, 0.25, 0.1, "auto")),
]
"""Each strategy as it is; the default one from parts of the window on, and by cost."""

COLUMNS = {
    "over window": "{0.over_window:,}",
    "compactions": "{0.compactions:,}",
    "uncached": "{0.uncached_tokens:,}",
    "cached": "{0.usage.cached_tokens:,}",
    "output": "{0.usage.output_tokens:,}",
    "cost": "{1}",
    "weighted": "{0.weighted_tokens:,}",
    "largest": "{0.largest_request_tokens:,}",
}

PREVIEWS = """\
Large tool results are shown as previews; calls of recall_history are not played."""

UNPRICED = """\
The price is unknown. Weighted: uncached prompt tokens, plus a tenth of the cached \
ones, plus eight times the output."""


@dataclass(frozen=True)
class Row:
    """Settings to compare, and the lines of a file that has them, where it is short."""

    name: str
    guard: PluginSettings
    toml: list[str] = field(default_factory=list)


def list_rows(guard: PluginSettings, window_tokens: int | None) -> list[Row]:
    """Lists what to compare: for all agents alike, with a guard's prices and models."""
    names = "context_window", "summarizer", "summarizer_context_window"
    own = {name: getattr(guard.default, name, None) for name in names}
    # A file can give no summarizer that is an object.
    kept = {name: value for name, value in own.items() if isinstance(value, int | str)}
    if window_tokens is not None:
        kept["context_window"] = window_tokens
    rows = []
    for strategy, values in COMPARED:
        name = strategy + "".join(f", {key} {value}" for key, value in values.items())
        values = {**values, **kept}
        default = STRATEGIES[strategy].model_validate(values)
        settings = {"strategy": strategy, **values}.items()
        toml = ["[default]", *(f"{key} = {json.dumps(item)}" for key, item in settings)]
        plugin = PluginSettings(default=default, prices=guard.prices)
        rows.append(Row(name, plugin, toml))
    return rows


class Comparison:
    """One session, replayed with each row's settings."""

    def __init__(self, rows: list[Row], replays: list[Replayed]) -> None:
        self._rows, self._replay = rows, replays[0]
        self._totals = [replay.with_guard for replay in replays]
        self._without = replays[0].without_guard
        costs = [found.cost for found in (self._without, *self._totals)]
        self._is_priced = None not in costs

    @property
    def best(self) -> int | None:
        """The first of the cheapest rows in which each request fits; None: nowhere."""
        has_cost = self._is_priced and any(found.cost for found in self._totals)
        prices = [f.cost if has_cost else f.weighted_tokens for f in self._totals]
        rows = range(len(prices))
        fitting = [row for row in rows if not self._totals[row].over_window]
        return min(fitting, key=lambda row: prices[row] or 0, default=None)

    def to_json(self) -> dict[str, Any]:
        """Describes all of it, safe as JSON."""
        best = self.best
        rows = enumerate(zip(self._rows, self._totals, strict=True))
        return {
            "session": self._replay.session_id,
            "has_cache": self._replay.has_cache,
            "without_guard": self._without.to_json(),
            "rows": [
                {"name": row.name, "is_best": number == best, **found.to_json()}
                for number, (row, found) in rows
            ],
            "toml": [] if best is None else self._rows[best].toml,
        }

    def print_table(self) -> None:
        """Prints a row for each, marks the best one, and says how to get it."""
        console = Console(highlight=False)
        hidden = "weighted" if self._is_priced else ""
        columns = {name: form for name, form in COLUMNS.items() if name != hidden}
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("", no_wrap=True)
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        best = self.best
        names = ["no guard", *(row.name for row in self._rows)]
        for number, found in enumerate((self._without, *self._totals), -1):
            is_best = number == best
            cost = format_cost(found.cost)
            table.add_row(
                f"{'*' if is_best else ' '} {names[number + 1]}",
                *(form.format(found, cost) for form in columns.values()),
                style="green" if is_best else "",
            )
        print_table(console, table)
        lines = [] if self._is_priced else [UNPRICED]
        lines += [*list_assumptions(self._replay.has_cache), *self._list_limits(), ""]
        for line in (*lines, *self._list_advice()):
            print_line(console, line)

    def _list_limits(self) -> Iterator[str]:
        """Says in sentences what the rows do not show."""
        yield PREVIEWS
        windows = [call.window_tokens for call in self._replay.calls]
        least, most = min(windows), max(windows)
        if threshold_tokens(most) <= LEAST_AUTO_TOKENS:
            yield 'In so small a window "auto" is the usual threshold.'
        if least < most:
            yield (
                f"The agents' windows differ, from {least:,} to {most:,} tokens: each "
                "request is held against that of its agent."
            )

    def _list_advice(self) -> list[str]:
        if (best := self.best) is None:
            return ["Each of them has requests over the window."]
        if not (toml := self._rows[best].toml):
            return ["* Your settings: the cheapest without a request over the window."]
        return ["* The cheapest without a request over the window:", "", *toml]
