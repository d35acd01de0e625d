"""What the commands share: their error, text that a terminal can show, a quiet log."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from contextguard_adk._listeners import announcements


class CommandError(Exception):
    """Why a command cannot do its work; its text is one line for the user."""


@contextmanager
def explain_writing(path: Path) -> Iterator[None]:
    """Says in one line why a file cannot be written."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CommandError(f"{path}: cannot be written: {reason}") from error


def print_line(console: Console, text: str, style: str = "") -> None:
    """Prints a line; a terminal's width breaks it at words, a file has it whole."""
    shown = Text(clean_text(console, text.strip()), style)
    indent = len(text) - len(text.lstrip())
    if console.is_terminal:
        console.print(Padding(shown, (0, 0, 0, indent), expand=False))
    else:
        console.print(Text(" " * indent) + shown, soft_wrap=True)


def print_sparkline(
    console: Console, label: str, sizes: Sequence[int], most: int
) -> None:
    """Draws sizes as bars, the highest of which is `most`; what is over it is crossed.

    Where there are more than columns, a bar is the largest of several.
    """
    bars, cross = ("_.:-=+*#", "x") if console.options.ascii_only else ("▁▂▃▄▅▆▇█", "✕")
    line = Text(label)
    step = max(1, -(-len(sizes) // max(1, console.width - len(line))))
    for start in range(0, len(sizes), step):
        size = max(sizes[start : start + step])
        bar = bars[min(size * len(bars) // (most + 1), len(bars) - 1)]
        line.append(*((cross, "red") if size > most else (bar, "cyan")))
    console.print(line)


def clean_text(console: Console, text: str) -> str:
    """Replaces what an output cannot show, control characters first."""
    if console.options.ascii_only:
        text = text.replace("→", ">").replace("✕", "x")
    return (
        show_text(text)
        .encode(console.encoding, "replace")
        .decode(console.encoding, "replace")
    )


def show_text(text: str) -> str:
    """Replaces control characters, which would act on a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


class _WarningHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        text = f"    {record.levelname.lower()}: {record.getMessage()}"
        print_line(self._console, text, "yellow")


@contextmanager
def quiet_logs(console: Console, *more: logging.Logger) -> Iterator[None]:
    """Silences libraries and what a command shows itself; other warnings join it."""
    # Otherwise importing litellm asks the network for its price table.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    guard_logger = logging.getLogger("contextguard_adk")
    handler = _WarningHandler(console)
    noisy = ("google_adk", "google_genai", "LiteLLM", "opentelemetry")
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        for logger in (*map(logging.getLogger, noisy), announcements.logger, *more):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL + 1)
        guard_logger.addHandler(handler)
        stack.callback(guard_logger.removeHandler, handler)
        stack.callback(setattr, guard_logger, "propagate", guard_logger.propagate)
        guard_logger.propagate = False
        yield
