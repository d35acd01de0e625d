"""What the guard did, as records for listeners and the log; never message text."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

logger = logging.getLogger("contextguard_adk.telemetry")


@dataclass(frozen=True)
class CompactionRecord:
    """One compaction.

    Attributes:
        agent: The agent's name.
        session_id: The session.
        strategy: The class of the strategy.
        reason: `tokens`, `turns`, `requested` or `overflow`.
        tokens_before: The estimate before, in real tokens.
        tokens_after: The estimate after.
        contents_before: The contents of the request before.
        contents_after: The contents after.
        summary_tokens: What the summary takes, by bytes / 4.
        duration_seconds: How long it took.
        attempts: How many summaries were asked for.
        is_mechanical: Whether a part of the summary was written without a model.
    """

    agent: str
    session_id: str
    strategy: str
    reason: str
    tokens_before: int
    tokens_after: int
    contents_before: int
    contents_after: int
    summary_tokens: int
    duration_seconds: float
    attempts: int
    is_mechanical: bool


@dataclass(frozen=True)
class PressureRecord:
    """A request that fills much of the window although compaction had its turn.

    Attributes:
        agent: The agent's name.
        session_id: The session.
        tokens: The estimate of the request that is sent, in real tokens.
        window_tokens: The context window.
        pressure_before: Estimate / window before any compaction.
        pressure: Estimate / window of what is sent.
        warning_threshold: From where on it is reported.
    """

    agent: str
    session_id: str
    tokens: int
    window_tokens: int
    pressure_before: float
    pressure: float
    warning_threshold: float


R = TypeVar("R")
Listener = Callable[[R], Awaitable[None] | None]
"""A function of one record; sync or async. One that fails is logged."""


async def notify(listener: Listener[R] | None, record: R) -> None:
    """Calls a listener; whatever it raises is logged and goes no further."""
    if listener is None:
        return
    try:
        outcome: Any = listener(record)
        if inspect.isawaitable(outcome):
            await outcome
    except Exception as error:  # noqa: BLE001 - a user's own code may raise anything.
        logger.warning(
            "A listener for %s failed: %s.", type(record).__name__, type(error).__name__
        )


@dataclass(frozen=True)
class Observers:
    """Who is told what happened.

    Attributes:
        warning_threshold: Of the context window; from here on pressure is reported.
        on_pressure: Told once each time pressure crosses the threshold.
        on_compaction: Told of every compaction.
    """

    warning_threshold: float = 0.70
    on_pressure: Listener[PressureRecord] | None = None
    on_compaction: Listener[CompactionRecord] | None = None


def log_compaction(record: CompactionRecord, threshold_tokens: int) -> None:
    """Logs one compaction."""
    logger.info(
        "Compacted agent %r (%s): %d to %d tokens, %d to %d contents, threshold %d, "
        "%d summaries%s.",
        record.agent,
        record.reason,
        record.tokens_before,
        record.tokens_after,
        record.contents_before,
        record.contents_after,
        threshold_tokens,
        record.attempts,
        ", mechanical" if record.is_mechanical else "",
    )


def log_pressure(record: PressureRecord) -> None:
    """Logs that a request fills much of the window."""
    logger.warning(
        "Agent %r is under pressure: %d of %d tokens (%.0f %%) are sent.",
        record.agent,
        record.tokens,
        record.window_tokens,
        100 * record.pressure,
    )
