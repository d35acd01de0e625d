"""`contextguard replay --compare`: what each strategy and trigger would have cost."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
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
"""The names of strategies, each with the settings that are not the default ones."""

# By the name of a column, the format of its cells. In a format, 0 stands for the
# `Totals` of a row, and 1 for the cost of the row as text.
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

# "need" and "far" are the columns with `Totals.need` and `Totals.far`.
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
        toml: The lines of a settings file with these settings; [] for the user's own
            settings, which have a file already.
    """

    name: str
    guard: PluginSettings
    toml: list[str] = field(default_factory=list)


def list_rows(guard: PluginSettings, window_tokens: int | None) -> Iterator[Row]:
    """Yields the rows of `COMPARED`; each has one strategy for all agents.

    All rows share these settings:

    - the prices of the user's settings
    - the summarizer of the user's default strategy, if it is the name of a model
    - the window of the summarizer, if the default strategy has one
    - the context window

    Args:
        guard: The settings of the user.
        window_tokens: The context window of all rows; None for the window of the user's
            default strategy, if it has one.
    """
    shared = dict[str, Any]()
    for name in ("context_window", "summarizer", "summarizer_context_window"):
        # The default strategy may be None, or a function without these fields.
        value = getattr(guard.default, name, None)
        # A summarizer may be a model object. Such an object cannot stand in the lines
        # of a settings file, so it is not shared.
        if isinstance(value, int | str):
            shared[name] = value
    if window_tokens is not None:
        shared["context_window"] = window_tokens

    for strategy, changes in COMPARED:
        values = {**changes, **shared}
        default = STRATEGIES[strategy].model_validate(values)
        named_changes = [f"{name} {value}" for name, value in changes.items()]
        settings = {"strategy": strategy, **values}
        # A text and a number are written in TOML as in JSON.
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        yield Row(
            name=", ".join([strategy, *named_changes]),
            guard=PluginSettings(default=default, prices=guard.prices),
            toml=["[default]", *lines],
        )


class Comparison:
    """One session, replayed with each row's settings."""

    def __init__(self, rows: list[Row], replays: list[Replayed]) -> None:
        """Finds the best row.

        Args:
            rows: The rows, at least one.
            replays: The replay of each row, in the order of the rows.
        """
        self._rows = rows
        self._totals = [replay.with_guard for replay in replays]
        # All replays are of one recording, so any of them tells the totals without a
        # guard.
        self._replay = replays[0]
        self._without = self._replay.without_guard

        dollars = [totals.cost for totals in self._totals if totals.cost is not None]
        has_all_costs = len(dollars) == len(self._totals)
        self._is_priced = has_all_costs and self._without.cost is not None

        # If the model is free, no row costs anything. Then the weighted tokens decide.
        is_decided_by_dollars = self._is_priced and any(dollars)
        weighted_tokens = [totals.weighted_tokens for totals in self._totals]
        self._best_row_index = self._find_cheapest(
            dollars if is_decided_by_dollars else weighted_tokens
        )

    def _find_cheapest(self, expenses: Sequence[float]) -> int | None:
        """Returns the row index of the cheapest row without a request over the window.

        The first of several cheapest rows is taken. Returns None if each row has a
        request over the window.

        Args:
            expenses: What each row costs, in dollars or in weighted tokens.
        """
        row_indexes = range(len(self._rows))
        fitting = [each for each in row_indexes if not self._totals[each].over_window]
        return min(fitting, key=lambda row_index: expenses[row_index], default=None)

    def to_json(self) -> dict[str, Any]:
        """Describes the comparison as a dict that can be written as JSON."""
        rows = list[dict[str, Any]]()
        for row_index, row in enumerate(self._rows):
            is_best = row_index == self._best_row_index
            figures = self._totals[row_index].to_json()
            rows.append({"name": row.name, "is_best": is_best, **figures})

        best_toml = list[str]()
        if self._best_row_index is not None:
            best_toml = self._rows[self._best_row_index].toml
        return {
            "session": self._replay.session_id,
            "has_cache": self._replay.has_cache,
            "without_guard": self._without.to_json(),
            "rows": rows,
            "toml": best_toml,
        }

    def print(self) -> None:
        """Prints a line for each row, marks the best row, and prints its settings."""
        shown_columns = dict(COLUMNS)
        if self._is_priced:
            del shown_columns["weighted"]
        formats = list(shown_columns.values())

        no_style = ""
        cells_without = ["  no guard", *_format_cells(formats, self._without)]
        table_rows = [(cells_without, no_style)]
        for row_index, row in enumerate(self._rows):
            is_best = row_index == self._best_row_index
            name = f"* {row.name}" if is_best else f"  {row.name}"
            cells = _format_cells(formats, self._totals[row_index])
            style = "green" if is_best else no_style
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
        # "auto" stands for a trigger of `LEAST_AUTO_TOKENS`. A trigger at or above the
        # usual threshold has no effect.
        if threshold_tokens(most) <= LEAST_AUTO_TOKENS:
            yield 'In so small a window "auto" is the usual threshold.'
        if least < most:
            yield (
                f"The agents' windows differ, from {least:,} to {most:,} tokens: each "
                "request is held against that of its agent."
            )

    def _describe_best(self) -> Iterator[str]:
        """Says which row is the best, and yields the lines of its settings file."""
        if self._best_row_index is None:
            yield "Each of them has requests over the window."
            return

        toml = self._rows[self._best_row_index].toml
        if not toml:  # The best row has the user's own settings.
            yield "* Your settings: the cheapest without a request over the window."
            return
        yield "* The cheapest without a request over the window:"
        yield ""
        yield from toml


def _format_cells(formats: list[str], totals: Totals) -> list[str]:
    """Returns the cells of a row; see `COLUMNS` for the formats."""
    cost = format_cost(totals.cost)
    return [each.format(totals, cost) for each in formats]
