"""`contextguard replay --compare`: what each strategy and trigger would have cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.table import Column

from contextguard_adk._measuring.budgets import threshold_tokens
from contextguard_adk._tools.replaying.figures import Replayed, list_assumptions
from contextguard_adk._tools.terminal import number_column, print_line, print_table
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
    "need": "{0.need}",
    "far": "{0.far}",
}

PREVIEWS = """\
Large tool results are shown as previews; calls of recall_history are not played."""

NEED = """\
Need: of the values that the recorded calls took from the conversation, the part that \
was in the request; far: of those last said more than half a window before."""

UNPRICED = """\
The price is unknown. Weighted: uncached prompt tokens, plus a tenth of the cached \
ones, plus eight times the output."""


@dataclass(frozen=True)
class Row:
    """Settings to compare, and the lines of a file that has them, where it is short."""

    name: str
    guard: PluginSettings
    toml: list[str] = field(default_factory=list)


def list_rows(guard: PluginSettings, window_tokens: int | None) -> Iterator[Row]:
    """Lists what to compare: for all agents alike, with a guard's prices and models."""
    names = "context_window", "summarizer", "summarizer_context_window"
    own = {name: getattr(guard.default, name, None) for name in names}
    # A file can give no summarizer that is an object.
    kept = {name: value for name, value in own.items() if isinstance(value, int | str)}
    if window_tokens is not None:
        kept["context_window"] = window_tokens
    for strategy, changes in COMPARED:
        name = strategy + "".join(f", {key} {value}" for key, value in changes.items())
        values = {**changes, **kept}
        settings = {"strategy": strategy, **values}.items()
        toml = ["[default]", *(f"{key} = {json.dumps(item)}" for key, item in settings)]
        default = STRATEGIES[strategy].model_validate(values)
        yield Row(name, PluginSettings(default=default, prices=guard.prices), toml)


class Comparison:
    """One session, replayed with each row's settings."""

    def __init__(self, rows: list[Row], replays: list[Replayed]) -> None:
        self._rows = rows
        self._replay = replays[0]
        self._totals = [replay.with_guard for replay in replays]
        self._without = replays[0].without_guard
        costs = [found.cost for found in (self._without, *self._totals)]
        self._is_priced = None not in costs
        has_cost = self._is_priced and any(found.cost for found in self._totals)
        prices = [f.cost if has_cost else f.weighted_tokens for f in self._totals]
        fitting = [n for n, found in enumerate(self._totals) if not found.over_window]
        # The first of the cheapest rows in which each request fits.
        self._best = min(fitting, key=lambda row: prices[row] or 0, default=None)

    def to_json(self) -> dict[str, Any]:
        rows = enumerate(zip(self._rows, self._totals, strict=True))
        return {
            "session": self._replay.session_id,
            "has_cache": self._replay.has_cache,
            "without_guard": self._without.to_json(),
            "rows": [
                {"name": row.name, "is_best": number == self._best, **found.to_json()}
                for number, (row, found) in rows
            ],
            "toml": [] if self._best is None else self._rows[self._best].toml,
        }

    def print(self) -> None:
        """Prints a row for each, marks the best one, and says how to get it."""
        columns = dict(COLUMNS)
        if self._is_priced:
            del columns["weighted"]
        names = ["no guard", *(row.name for row in self._rows)]
        rows = []
        for number, found in enumerate((self._without, *self._totals), -1):
            mark, style = ("*", "green") if number == self._best else (" ", "")
            cost = format_cost(found.cost)
            cells = (form.format(found, cost) for form in columns.values())
            rows.append(([f"{mark} {names[number + 1]}", *cells], style))
        print_table([Column("", no_wrap=True), *map(number_column, columns)], rows)
        for line in self._list_lines():
            print_line(line)

    def _list_lines(self) -> Iterator[str]:
        """Says in sentences what the rows do not show, and which to take."""
        if not self._is_priced:
            yield UNPRICED
        yield from list_assumptions(self._replay.has_cache)
        yield PREVIEWS
        yield NEED
        windows = [call.window_tokens for call in self._replay.calls]
        least = min(windows)
        most = max(windows)
        if threshold_tokens(most) <= LEAST_AUTO_TOKENS:
            yield 'In so small a window "auto" is the usual threshold.'
        if least < most:
            yield (
                f"The agents' windows differ, from {least:,} to {most:,} tokens: each "
                "request is held against that of its agent."
            )
        yield ""
        if self._best is None:
            yield "Each of them has requests over the window."
        elif toml := self._rows[self._best].toml:
            yield from ("* The cheapest without a request over the window:", "", *toml)
        else:
            yield "* Your settings: the cheapest without a request over the window."
