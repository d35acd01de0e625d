"""`contextguard replay --compare`: what each strategy and trigger would have cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.table import Column

from contextguard_adk._measuring.budgets import threshold_tokens
from contextguard_adk._tools.replaying.figures import (
    Replayed,
    Totals,
    list_assumptions,
)
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
"""Each strategy with its defaults, and the default strategy with other triggers."""

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
    """Settings to compare, and the lines of a settings file that has them.

    There are no lines for the user's own settings, which have a file already.
    """

    name: str
    guard: PluginSettings
    toml: list[str] = field(default_factory=list)


def list_rows(guard: PluginSettings, window_tokens: int | None) -> Iterator[Row]:
    """Yields the settings to compare, each for all agents alike.

    They have the summarizer and the prices of `guard`. Their window is `window_tokens`;
    None takes the window of `guard`.
    """
    kept = dict[str, Any]()
    for name in ("context_window", "summarizer", "summarizer_context_window"):
        value = getattr(guard.default, name, None)
        if isinstance(value, int | str):  # A file cannot name a summarizer object.
            kept[name] = value
    if window_tokens is not None:
        kept["context_window"] = window_tokens

    for strategy, changes in COMPARED:
        values = {**changes, **kept}
        settings = {"strategy": strategy, **values}
        toml = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        changed = [f"{key} {value}" for key, value in changes.items()]
        default = STRATEGIES[strategy].model_validate(values)
        yield Row(
            name=", ".join([strategy, *changed]),
            guard=PluginSettings(default=default, prices=guard.prices),
            toml=["[default]", *toml],
        )


class Comparison:
    """One session, replayed with each row's settings."""

    def __init__(self, rows: list[Row], replays: list[Replayed]) -> None:
        self._rows = rows
        self._replay = replays[0]
        self._totals = [replay.with_guard for replay in replays]
        self._without = replays[0].without_guard

        costs = [totals.cost for totals in self._totals]
        self._is_priced = self._without.cost is not None and None not in costs
        self._best = self._find_best(by_cost=self._is_priced and any(costs))

    def _find_best(self, by_cost: bool) -> int | None:
        """Returns the index of the cheapest row in which each request fits.

        Of several cheapest rows it is the first. Returns None if no row fits.
        """
        fitting = [n for n, totals in enumerate(self._totals) if not totals.over_window]

        def price(index: int) -> float:
            totals = self._totals[index]
            return (totals.cost or 0) if by_cost else totals.weighted_tokens

        return min(fitting, key=price, default=None)

    def to_json(self) -> dict[str, Any]:
        """Describes the comparison, safe as JSON."""
        best_row = None if self._best is None else self._rows[self._best]
        return {
            "session": self._replay.session_id,
            "has_cache": self._replay.has_cache,
            "without_guard": self._without.to_json(),
            "rows": [
                {"name": row.name, "is_best": row is best_row, **totals.to_json()}
                for row, totals in zip(self._rows, self._totals, strict=True)
            ],
            "toml": best_row.toml if best_row else [],
        }

    def print(self) -> None:
        """Prints a line for each row, marks the best one, and says how to get it."""
        shown = dict(COLUMNS)
        if self._is_priced:
            del shown["weighted"]
        forms = list(shown.values())

        lines = [(["  no guard", *_format_cells(forms, self._without)], "")]
        for index, row in enumerate(self._rows):
            is_best = index == self._best
            name = f"* {row.name}" if is_best else f"  {row.name}"
            cells = _format_cells(forms, self._totals[index])
            lines.append(([name, *cells], "green" if is_best else ""))

        columns = [Column("", no_wrap=True)]
        columns += [number_column(name) for name in shown]
        print_table(columns, lines)
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
        elif self._rows[self._best].toml:
            yield "* The cheapest without a request over the window:"
            yield ""
            yield from self._rows[self._best].toml
        else:
            yield "* Your settings: the cheapest without a request over the window."


def _format_cells(forms: list[str], found: Totals) -> list[str]:
    cost = format_cost(found.cost)
    return [form.format(found, cost) for form in forms]
