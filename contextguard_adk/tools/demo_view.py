"""What the demo shows: lines as it goes along, a gauge on a terminal, a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from contextguard_adk.tools.terminal import clean_text

GAUGE_CHARS = 32


@dataclass(frozen=True)
class PhaseResult:
    """What one run of the work came to.

    Attributes:
        name: "no guard" or "with guard".
        steps: Answered model calls, summaries not counted.
        planned_steps: How many the work has.
        rejections: Requests that the provider refused.
        compactions: How often history was replaced by a summary.
        billed_tokens: Prompt and output tokens of all model calls.
        largest_request_tokens: The largest prompt, accepted or refused.
        failure: Why the run ended early, other than by a refusal; "" where it did not.
    """

    name: str
    steps: int
    planned_steps: int
    rejections: int
    compactions: int
    billed_tokens: int
    largest_request_tokens: int
    failure: str = ""


class DemoView:
    """Prints the demo's progress and its outcome.

    Args:
        console: Where to; without a terminal plain lines are printed.
        window_tokens: The model's context window.
        threshold_tokens: From how many prompt tokens on the guard compacts.
        planned_steps: The model calls of the work.
    """

    def __init__(
        self,
        console: Console,
        window_tokens: int,
        threshold_tokens: int,
        planned_steps: int,
    ) -> None:
        self._console = console
        self._window_tokens = window_tokens
        self._threshold_tokens = threshold_tokens
        self._planned_steps = planned_steps
        self._live: Live | None = None

    @contextmanager
    def phase(self, title: str) -> Iterator[None]:
        """Shows the gauge below the lines of one run, on a terminal."""
        self.line(title, "bold")
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, transient=True) as self._live:
            yield
        self._live = None

    def line(self, text: str, style: str = "") -> None:
        """Prints one line."""
        self._console.print(
            Text(clean_text(self._console, text), style), soft_wrap=True
        )

    def step(self, step: int, action: str, prompt_tokens: int) -> None:
        """Moves the gauge."""
        if self._live is not None:
            room = max(10, self._console.width - 24)
            where = clean_text(self._console, f"  {self._count(step)}  {action[:room]}")
            self._live.update(Text(f"{where}\n  ").append(self._gauge(prompt_tokens)))

    def turn(self, number: int, question: str) -> None:
        """Tells what the user asks."""
        self.line(f"  turn {number}: {question}")

    def turn_done(self, step: int, prompt_tokens: int) -> None:
        """Tells how far the work is after a turn."""
        text = Text(f"    {self._count(step)}  ", "dim")
        self._console.print(text.append(self._gauge(prompt_tokens)), soft_wrap=True)

    def compaction(self, number: int, before_tokens: int, after_tokens: int) -> None:
        """Marks a compaction."""
        self.line(
            f"    compaction {number}: {before_tokens:,} → {after_tokens:,} tokens",
            "cyan",
        )

    def rejection(self, prompt_tokens: int | None) -> None:
        """Marks a request that the provider refused."""
        size = f"{prompt_tokens:,} tokens" if prompt_tokens else "too many tokens"
        self.line(f"    rejected by the provider: {size}", "bold red")

    def table(self, results: Sequence[PhaseResult]) -> None:
        """Prints the outcome of both runs side by side."""
        table = Table(show_edge=False, pad_edge=False)
        table.add_column("")
        for result in results:
            table.add_column(result.name, justify="right")
        rows: dict[str, list[str]] = {
            "steps done": [f"{r.steps:,} of {r.planned_steps:,}" for r in results],
            "requests rejected": [f"{r.rejections:,}" for r in results],
            "compactions": [f"{r.compactions:,}" for r in results],
            "tokens billed": [f"{r.billed_tokens:,}" for r in results],
            "largest request": [f"{r.largest_request_tokens:,}" for r in results],
        }
        for name, values in rows.items():
            table.add_row(name, *values)
        self._console.print()
        self._console.print(table)
        self._console.print()

    def _count(self, step: int) -> str:
        width = len(str(self._planned_steps))
        return f"step {step:>{width}}/{self._planned_steps}"

    def _gauge(self, prompt_tokens: int) -> Text:
        """Draws the prompt within the window, with a mark at the threshold."""
        per_char = self._window_tokens / GAUGE_CHARS
        filled = min(GAUGE_CHARS, round(prompt_tokens / per_char))
        mark = round(self._threshold_tokens / per_char)
        bar = "█" * filled + "░" * (GAUGE_CHARS - filled)
        bar = f"{bar[:mark]}│{bar[mark:]}"
        is_over = prompt_tokens >= self._threshold_tokens
        text = Text(clean_text(self._console, bar), "yellow" if is_over else "green")
        return text.append(f" {prompt_tokens:,}", "bold").append(
            f" of {self._window_tokens:,} tokens", "dim"
        )
