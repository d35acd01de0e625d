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
    ("threshold", {"trigger": 0.5}),
    ("threshold", {"trigger": 0.25}),
    ("threshold", {"trigger": 0.1}),
    ("threshold", {"trigger": "auto"}),
]
"""Each strategy with its defaults, and the default strategy with other triggers."""

# By the name of a column, the form of its cells: 0 stands for the `Totals` of a row, 1
# for their cost as text.
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
    """Settings to compare.

    Attributes:
        name: The name of the row.
        guard: The settings.
        toml: The lines of a settings file that has them. The user's own settings, which
            have a file already, have no lines.
    """

    name: str
    guard: PluginSettings
    toml: list[str] = field(default_factory=list)


def list_rows(guard: PluginSettings, window_tokens: int | None) -> Iterator[Row]:
    """Yields the settings to compare, each for all agents alike.

    They have the summarizer and the prices of `guard`. Their window is `window_tokens`;
    None takes the window of `guard`.
    """
    shared = dict[str, Any]()
    for name in ("context_window", "summarizer", "summarizer_context_window"):
        value = getattr(guard.default, name, None)
        if isinstance(value, int | str):  # A file cannot name a summarizer object.
            shared[name] = value
    if window_tokens is not None:
        shared["context_window"] = window_tokens

    for strategy, changes in COMPARED:
        values = {**changes, **shared}
        default = STRATEGIES[strategy].model_validate(values)
        named_changes = [f"{name} {value}" for name, value in changes.items()]
        settings = {"strategy": strategy, **values}
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        yield Row(
            name=", ".join([strategy, *named_changes]),
            guard=PluginSettings(default=default, prices=guard.prices),
            toml=["[default]", *lines],
        )


class Comparison:
    """One session, replayed with each row's settings."""

    def __init__(self, rows: list[Row], replays: list[Replayed]) -> None:
        """Compares `replays`, of which each belongs to the row at the same index."""
        self._rows = rows
        self._totals = [replay.with_guard for replay in replays]
        # All replays have the same recording, so they have the same calls without a
        # guard.
        self._replay = replays[0]
        self._without = self._replay.without_guard

        costs = [totals.cost for totals in self._totals if totals.cost is not None]
        has_all_costs = len(costs) == len(self._totals)
        self._is_priced = has_all_costs and self._without.cost is not None
        prices: list[float] = [totals.weighted_tokens for totals in self._totals]
        if self._is_priced and any(costs):  # A model may be free.
            prices = costs
        self._best_index = self._find_cheapest(prices)

    def _find_cheapest(self, prices: list[float]) -> int | None:
        """Returns the index of the cheapest row without a request over the window.

        The first of several cheapest rows is taken. Returns None if each row has a
        request over the window. `prices` has one price for each row.
        """
        indexes = range(len(self._rows))
        fitting = [index for index in indexes if not self._totals[index].over_window]
        return min(fitting, key=lambda index: prices[index], default=None)

    def to_json(self) -> dict[str, Any]:
        """Describes the comparison, safe as JSON."""
        rows = list[dict[str, Any]]()
        for index, row in enumerate(self._rows):
            is_best = index == self._best_index
            figures = self._totals[index].to_json()
            rows.append({"name": row.name, "is_best": is_best, **figures})

        best_toml = list[str]()
        if self._best_index is not None:
            best_toml = self._rows[self._best_index].toml
        return {
            "session": self._replay.session_id,
            "has_cache": self._replay.has_cache,
            "without_guard": self._without.to_json(),
            "rows": rows,
            "toml": best_toml,
        }

    def print(self) -> None:
        """Prints a line for each row, marks the best one, and says how to get it."""
        shown_columns = dict(COLUMNS)
        if self._is_priced:
            del shown_columns["weighted"]
        forms = list(shown_columns.values())

        table_rows = [(["  no guard", *_format_cells(forms, self._without)], "")]
        for index, row in enumerate(self._rows):
            is_best = index == self._best_index
            name = f"* {row.name}" if is_best else f"  {row.name}"
            cells = _format_cells(forms, self._totals[index])
            style = "green" if is_best else ""
            table_rows.append(([name, *cells], style))

        columns = [Column("", no_wrap=True)]
        columns += [number_column(name) for name in shown_columns]
        print_table(columns, table_rows)
        for line in (*self._list_notes(), "", *self._describe_best()):
            print_line(line)

    def _list_notes(self) -> Iterator[str]:
        """Says in sentences how to read the rows."""
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

    def _describe_best(self) -> Iterator[str]:
        """Says which row is the best, and yields the settings file that has it."""
        if self._best_index is None:
            yield "Each of them has requests over the window."
            return

        toml = self._rows[self._best_index].toml
        if not toml:
            yield "* Your settings: the cheapest without a request over the window."
            return
        yield "* The cheapest without a request over the window:"
        yield ""
        yield from toml


def _format_cells(forms: list[str], totals: Totals) -> list[str]:
    cost = format_cost(totals.cost)
    return [form.format(totals, cost) for form in forms]
