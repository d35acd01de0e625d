"""What a replay came to: each call, how good the estimates were, what was saved."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from contextguard_adk.telemetry import CompactionRecord

MISS_RATIO = 0.10
"""An estimate this far below the real count is a miss."""


@dataclass(frozen=True)
class ReplayedCall:
    """One model call, as it was recorded and as it would have been.

    Attributes:
        number: Counts the calls from 1.
        agent: The agent's name.
        contents: The contents of the whole request.
        estimated_tokens: The guard's estimate of it; None where the agent is exempt.
        real_tokens: What the provider counted; None where it counted a request that a
            guard had changed.
        whole_tokens: The count of the whole request: the real one, or scaled from
            the calls before.
        window_tokens: The context window; None where the agent is exempt.
        threshold_tokens: From where on the guard compacts; None likewise.
        sent_contents: The contents that the guard would have sent.
        sent_tokens: Their count, scaled from that of the whole request.
        compaction: What the guard would have compacted before this call.
    """

    number: int
    agent: str
    contents: int
    estimated_tokens: int | None
    real_tokens: int | None
    whole_tokens: int
    window_tokens: int | None
    threshold_tokens: int | None
    sent_contents: int
    sent_tokens: int
    compaction: CompactionRecord | None

    @property
    def error_ratio(self) -> float | None:
        """How far the estimate is from the real count; None where one is unknown."""
        if self.estimated_tokens is None or self.real_tokens is None:
            return None
        return self.estimated_tokens / self.real_tokens - 1

    @property
    def pressure(self) -> float | None:
        """The estimate of the whole request / window."""
        if self.estimated_tokens is None or self.window_tokens is None:
            return None
        return self.estimated_tokens / self.window_tokens


@dataclass(frozen=True)
class Replayed:
    """A replayed session.

    Attributes:
        session_id: Its id.
        fixed_tokens: What instruction and tools are taken to have, by agent, in
            bytes / 4.
        calls: The model calls.
        summary_tokens: What the summaries would have cost, prompts and outputs.
    """

    session_id: str
    fixed_tokens: dict[str, int]
    calls: list[ReplayedCall]
    summary_tokens: int

    @property
    def compactions(self) -> int:
        """How many calls the guard would have compacted."""
        return sum(call.compaction is not None for call in self.calls)

    @property
    def uncompared(self) -> int:
        """How many calls were recorded while a guard had changed the request."""
        return sum(call.real_tokens is None for call in self.calls)

    @property
    def whole_tokens(self) -> int:
        """The prompt tokens of all calls without the guard."""
        return sum(call.whole_tokens for call in self.calls)

    @property
    def sent_tokens(self) -> int:
        """The prompt tokens of all calls with the guard, without the summaries."""
        return sum(call.sent_tokens for call in self.calls)

    @property
    def saved_tokens(self) -> int:
        """What the guard would have saved, the cost of its summaries taken off."""
        return self.whole_tokens - self.sent_tokens - self.summary_tokens

    def count_overflows(self) -> tuple[int, int]:
        """Counts the requests over the window, without and with the guard."""
        windows = [(c, c.window_tokens) for c in self.calls if c.window_tokens]
        return (
            sum(call.whole_tokens > window for call, window in windows),
            sum(call.sent_tokens > window for call, window in windows),
        )

    def to_json(self) -> dict[str, Any]:
        """Describes all of it, safe as JSON."""
        overflows, guarded_overflows = self.count_overflows()
        accuracy = measure_accuracy(self.calls)
        return {
            "session": self.session_id,
            "fixed_tokens": self.fixed_tokens,
            "calls": [_describe(call) for call in self.calls],
            "accuracy": asdict(accuracy) if accuracy else None,
            "compactions": self.compactions,
            "uncompared_calls": self.uncompared,
            "tokens_without_guard": self.whole_tokens,
            "tokens_with_guard": self.sent_tokens,
            "summary_tokens": self.summary_tokens,
            "saved_tokens": self.saved_tokens,
            "over_window_without_guard": overflows,
            "over_window_with_guard": guarded_overflows,
        }


@dataclass(frozen=True)
class Accuracy:
    """How near the estimates were, from the second call of each agent on.

    Attributes:
        calls: How many were compared.
        median_error_ratio: The median of the errors, whatever their sign.
        p95_error_ratio: 95 of 100 errors are at most this.
        misses: Estimates more than `MISS_RATIO` below the real count.
    """

    calls: int
    median_error_ratio: float
    p95_error_ratio: float
    misses: int


def measure_accuracy(calls: Sequence[ReplayedCall]) -> Accuracy | None:
    """Compares estimates with real counts; None where there is nothing to compare.

    An agent's first call is left out: nothing has calibrated its estimate yet.
    """
    errors: list[float] = []
    known: set[str] = set()
    for call in calls:
        error = call.error_ratio
        if error is not None and call.agent in known:
            errors.append(error)
        if error is not None:
            known.add(call.agent)
    if not errors:
        return None
    sizes = sorted(map(abs, errors))
    return Accuracy(
        calls=len(errors),
        median_error_ratio=statistics.median(sizes),
        p95_error_ratio=sizes[math.ceil(0.95 * len(sizes)) - 1],
        misses=sum(error < -MISS_RATIO for error in errors),
    )


def _describe(call: ReplayedCall) -> dict[str, Any]:
    compaction = asdict(call.compaction) if call.compaction else None
    return {
        **asdict(call),
        "error_ratio": call.error_ratio,
        "pressure": call.pressure,
        "compaction": compaction,
    }
