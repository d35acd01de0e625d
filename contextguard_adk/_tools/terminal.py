"""Prints for the commands: text that a terminal can show, tables, and a quiet log."""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress import track
from rich.table import Column, Table
from rich.text import Text

from contextguard_adk._support.log import one_line

T = TypeVar("T")

SILENCED_LOGGERS = (
    "google_adk",
    "google_genai",
    "LiteLLM",
    "opentelemetry",
    "contextguard_adk.telemetry",  # The guard's own line for each compaction.
)

# The columns of a table that is printed to a file.
FILE_WIDTH = 120

console = Console(highlight=False)


class CommandError(Exception):
    """Says in one line, for the user, why a command cannot do its work."""


@contextmanager
def explain_writing(path: Path) -> Iterator[None]:
    """Raises a `CommandError` with the reason if the `with` block cannot write a file.

    `path` is the path of the file.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CommandError(f"{path}: cannot be written: {reason}") from error


def print_line(text: str, style: str = "", output: Console = console) -> None:
    """Prints a text in one line. A terminal wraps the line at words.

    The blanks at the beginning of the text indent all lines that a terminal makes.
    """
    shown = Text(clean_text(text.strip(), output), style)
    indent = len(text) - len(text.lstrip())
    if output.is_terminal:
        padding = (0, 0, 0, indent)  # Top, right, bottom, left.
        output.print(Padding(shown, padding, expand=False))
    else:
        output.print(Text(" " * indent) + shown, soft_wrap=True)


def print_sparkline(label: str, sizes: Sequence[int], most: int) -> None:
    """Draws sizes as bars after a label, in one line of the terminal.

    Args:
        label: The text before the bars.
        sizes: The sizes, from 0 on. If there are more sizes than columns, each bar
            stands for the largest of several neighboring sizes.
        most: The size with the highest bar. A larger size is drawn as a cross.
    """
    bars = "▁▂▃▄▅▆▇█"
    cross = "✕"
    if console.options.ascii_only:
        bars = "_.:-=+*#"
        cross = "x"

    line = Text(label)
    columns = max(1, console.width - len(line))
    sizes_per_bar = max(1, math.ceil(len(sizes) / columns))
    for start in range(0, len(sizes), sizes_per_bar):
        neighbors = sizes[start : start + sizes_per_bar]
        size = max(neighbors)
        if size > most:
            line.append(cross, "red")
        else:
            # The sizes from 0 to `most` are divided evenly among the bars.
            bar_index = size * len(bars) // (most + 1)
            line.append(bars[bar_index], "cyan")
    console.print(line)


def show_progress(items: Sequence[T], label: str) -> Iterable[T]:
    """Yields items; if stderr is a terminal, shows there how many are done."""
    is_hidden = not sys.stderr.isatty()
    output = Console(stderr=True)
    return track(items, label, console=output, transient=True, disable=is_hidden)


def number_column(name: str) -> Column:
    return Column(name, justify="right", no_wrap=True)


def print_table(
    columns: Iterable[Column | str], rows: Iterable[tuple[Sequence[str], str]]
) -> None:
    """Prints a table, and a blank line after the table.

    The table is as wide as the terminal. If a column that cannot wrap needs more room,
    the table is wider. In a file the table has at least `FILE_WIDTH` columns.

    Args:
        columns: The columns, or their names; [] for a table without rows.
        rows: The cells of each row, and the style of the row; "" for no style.
    """
    no_padding = 0
    gap = 2  # Between two columns.
    padding = (no_padding, gap, no_padding, no_padding)
    table = Table(*columns, box=None, pad_edge=False, padding=padding)
    for cells, style in rows:
        table.add_row(*(Text(clean_text(cell)) for cell in cells), style=style)

    # If no column can wrap, the table needs the width of its longest cells. Otherwise
    # the least width is that at which each wrapped line has one word.
    unbounded = console.options.update(max_width=10_000)
    needed_width = Measurement.get(console, unbounded, table)
    can_wrap = not all(column.no_wrap for column in table.columns)
    least_width = needed_width.minimum if can_wrap else needed_width.maximum
    usual_width = console.width if console.is_terminal else FILE_WIDTH
    width = max(usual_width, least_width)
    Console(width=width).print(table, "", sep="\n")


def clean_text(text: str, output: Console = console) -> str:
    """Returns a text in which each character can be printed to an output.

    Control characters and characters that the output cannot show are replaced.
    """
    shown = text
    if output.options.ascii_only:
        shown = text.replace("→", ">").replace("✕", "x")
    data = one_line(shown).encode(output.encoding, "replace")
    return data.decode(output.encoding, "replace")


class _WarningHandler(logging.Handler):
    """Prints warnings and errors to an output."""

    def __init__(self, output: Console) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        text = f"    {record.levelname.lower()}: {record.getMessage()}"
        print_line(text, "yellow", self._output)


@contextmanager
def quiet_logs(output: Console, *more: logging.Logger) -> Iterator[None]:
    """Silences `SILENCED_LOGGERS` and Python's warnings in the `with` block.

    Warnings of this package's other loggers are printed among the lines of the command.
    After the block all loggers are as they were before.

    Args:
        output: Where the warnings are printed.
        more: Other loggers to silence.
    """
    # Otherwise the import of litellm would load its price table from the network.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    silenced_loggers = [logging.getLogger(name) for name in SILENCED_LOGGERS]
    silenced_loggers += more
    guard_logger = logging.getLogger("contextguard_adk")
    handler = _WarningHandler(output)

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        for logger in silenced_loggers:
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL + 1)

        guard_logger.addHandler(handler)
        stack.callback(guard_logger.removeHandler, handler)
        # Otherwise the handlers of the root logger would print the warnings again.
        stack.callback(setattr, guard_logger, "propagate", guard_logger.propagate)
        guard_logger.propagate = False
        yield
