"""What the guard did, for listeners, log, traces and events; never message text."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
import time
import traceback
from asyncio import Task
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from contextguard_adk._pending import SummaryTasks

logger = logging.getLogger("contextguard_adk.telemetry")

METADATA_KEY = "context_guard"
"""Where an event's `custom_metadata` tells of a compaction or a recovery."""


@dataclass(frozen=True)
class Usage:
    """The tokens of some model calls, as their provider reports them; 0 if it does not.

    Attributes:
        prompt_tokens: All that was sent, what a prompt cache served included.
        cached_tokens: What of it a prompt cache served.
        output_tokens: All that was written, thoughts included.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        """The tokens of both."""
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
        )


REASONS = {
    "tokens": "the request reached the threshold",
    "turns": "there were too many messages",
    "requested": "a compaction was asked for",
    "overflow": "the provider rejected the request as too long",
}
"""What `CompactionRecord.reason` means."""


@dataclass(frozen=True)
class CompactionRecord:
    """One compaction.

    Attributes:
        reason: `tokens`, `turns` (contents), `requested` or `overflow`.
        tokens_before: The estimate before, in real tokens; `tokens_after` likewise.
        summary_tokens: What the summary takes, by bytes / 4.
        attempts: How many summaries it took, mechanical ones included.
        is_mechanical: Whether a part of the summary was written without a model.
        model: The model that was asked for summaries; "" where none was.
        usage: What all its answers took, those included that were of no use.
        cost: The price of these in US dollars; None where it is unknown.
        waited_seconds: How long the model call was held up by this compaction.
        was_ahead: Whether the summary was begun ahead of time, while the agent went on;
            `duration_seconds` is what that took.
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
    model: str
    usage: Usage
    cost: float | None
    waited_seconds: float = 0.0
    was_ahead: bool = False

    @property
    def is_recovery(self) -> bool:
        """Whether the provider had rejected the request as too long."""
        return self.reason == "overflow"


@dataclass(frozen=True)
class PressureRecord:
    """A request that fills much of the window although compaction had its turn.

    Attributes:
        tokens: The estimate of the request that is sent, in real tokens.
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


@dataclass(frozen=True)
class CallRecord:
    """One model call that was answered.

    Attributes:
        estimated_tokens: The estimate of the request that was sent, in real tokens.
        real_tokens: What the provider counted; None where it did not say.
        threshold_tokens: From here on a compaction is due.
        pressure: Estimate / window of what was sent.
        is_recovered: Whether the provider had rejected a larger request before.
        compaction: The compaction that ran for this call; None where there was none.
        model: The model that was called.
        usage: What the call took; zeros where the provider did not say.
        cost: Its price in US dollars; None where it is unknown.
        summary_usage: What summary calls took since the last record of this agent, for
            compactions that came to nothing as well.
        summary_cost: The price of these in US dollars; None where it is unknown.
    """

    agent: str
    session_id: str
    estimated_tokens: int
    real_tokens: int | None
    window_tokens: int
    threshold_tokens: int
    pressure: float
    is_recovered: bool
    compaction: CompactionRecord | None
    model: str
    usage: Usage
    cost: float | None
    summary_usage: Usage
    summary_cost: float | None


_warned: set[tuple[str, str]] = set()


def warn_once(
    logger: logging.Logger,
    message: str,
    about: str,
    *args: object,
    level: int = logging.WARNING,
) -> None:
    """Warns once in a process about something; it remembers 1,024 warnings."""
    if (message, about) not in _warned:
        if len(_warned) >= 1_024:
            _warned.clear()
        _warned.add((message, about))
        logger.log(level, message, about, *args)


_MAX_FRAMES = 12


def log_failure(logger: logging.Logger, what: str, error: Exception) -> None:
    """Logs a failure and where it was, without its text: that may quote messages."""
    places = [
        f"{'/'.join(Path(code.co_filename).parts[-2:])}:{line} in {code.co_name}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        for code in [frame.f_code]
    ]
    if len(places) > _MAX_FRAMES:
        half = _MAX_FRAMES // 2
        places[half:-half] = ["…"]
    logger.error(
        "%s: %s at %s. Its text may quote messages: it is logged at DEBUG.",
        *(what, type(error).__name__, " > ".join(places) or "an unknown place"),
    )
    logger.debug("%s:", what, exc_info=error)


R = TypeVar("R")
Listener = Callable[[R], Awaitable[None] | None]
"""A function of one record; sync or async. One that fails or is late is logged."""


def _start_call(listener: Listener[R], record: R) -> Future[Any]:
    """Calls it in a thread, since it may block; most have returned when this does."""
    result, context = Future[Any](), contextvars.copy_context()
    result.set_running_or_notify_cancel()  # Nothing cancels a thread.

    def work() -> None:
        try:
            result.set_result(context.run(listener, record))
        except BaseException as error:  # noqa: BLE001 - it is raised in `_end_call`.
            result.set_exception(error)

    try:
        threading.Thread(target=work, daemon=True).start()
        wait([result], timeout=0.1)  # Most need no task; the event loop waits.
    except RuntimeError as error:  # There are too many threads.
        result.set_exception(error)
    return result


async def _end_call(result: Future[Any], kind: str) -> None:
    try:
        if not result.done():
            await asyncio.wrap_future(result)
        if inspect.isawaitable(outcome := result.result()):
            await outcome
    except Exception as error:  # noqa: BLE001 - a user's own code may raise anything.
        log_failure(logger, f"A listener for {kind} failed", error)


@dataclass
class Observers:
    """Who is told what happened; pressure is a share of the context window."""

    warning_threshold: float = 0.70
    timeout_seconds: float = 5.0
    on_pressure: Listener[PressureRecord] | None = None
    on_compaction: Listener[CompactionRecord] | None = None
    on_call: Listener[CallRecord] | None = None
    _tasks: SummaryTasks = field(default_factory=SummaryTasks)
    _late: dict[type, tuple[Task[None], Future[Any]]] = field(default_factory=dict)

    async def tell(self, listener: Listener[R] | None, record: R) -> None:
        """Calls a listener and waits for a time, unless a late call is under way."""
        task, result = self._late.get(kind := type(record), (None, None))
        if result and task:  # A thread outlives the event loop that has called it.
            is_over = task.done() or task.get_loop().is_closed()
            listener = listener if is_over and result.done() else None
        if listener is None:
            return
        result = _start_call(listener, record)
        ending = _end_call(result, kind.__name__)
        if result.done() and (result.exception() or result.result() is None):
            await ending
            return
        task = self._tasks.start(ending)
        await asyncio.wait([task], timeout=self.timeout_seconds)
        if not task.done():
            if kind not in self._late:
                message = "A listener for %s takes longer than %g seconds. It goes on, "
                message += "and is not called again before it has returned."
                logger.warning(message, kind.__name__, self.timeout_seconds)
            self._late[kind] = task, result


async def report_compaction(
    record: CompactionRecord, threshold_tokens: int, observers: Observers
) -> None:
    """Tells log, trace and listener of a compaction that has just ended."""
    from opentelemetry import trace  # ADK loads it with the first run.

    end_nanoseconds = time.time_ns()
    span = trace.get_tracer("contextguard_adk").start_span(
        "context_guard.compact",
        start_time=end_nanoseconds - int(record.waited_seconds * 1e9),
    )
    span.set_attributes(_span_attributes(record))
    span.end(end_nanoseconds)
    usage = record.usage
    logger.info(
        "Compacted agent %r (%s): %s; threshold %d, %d tokens read (%d cached), "
        "%d written.",
        *(record.agent, record.reason),
        describe_compaction(record).replace("→", "to"),  # A log may be ASCII.
        *(threshold_tokens, usage.prompt_tokens),
        *(usage.cached_tokens, usage.output_tokens),
    )
    await observers.tell(observers.on_compaction, record)


def _span_attributes(record: CompactionRecord) -> dict[str, str | bool | int | float]:
    """The record by names of our own; model and tokens by those of OpenTelemetry."""
    apart = ("model", "usage", "cost")
    own = {key: value for key, value in vars(record).items() if key not in apart}
    attributes = {f"context_guard.{key}": value for key, value in own.items()}
    if record.cost is not None:
        attributes["context_guard.cost_usd"] = record.cost
    if record.model:
        # Not "generate_content": ADK's page of traces asks such a span for its event.
        attributes["gen_ai.operation.name"] = "summarize"
        attributes["gen_ai.request.model"] = record.model
    if (usage := record.usage) != Usage():
        attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
        attributes["gen_ai.usage.output_tokens"] = usage.output_tokens
    return attributes


def format_cost(dollars: float | None) -> str:
    """Writes an amount of money for people; what is not free is never shown as 0."""
    if dollars is None:
        return "unknown"
    return "<$0.0001" if 0 < dollars < 0.0001 else f"${dollars:,.4f}"


def describe_compaction(record: CompactionRecord) -> str:
    """Describes a compaction for people, in one line and without message text."""
    summary = "1 summary" if record.attempts == 1 else f"{record.attempts} summaries"
    if record.is_mechanical:
        summary += ", in part without a model"
    if record.model:
        summary += f" by {record.model}"
    if not (record.attempts and record.summary_tokens):
        summary = "no new summary"
    parts = [
        f"{record.tokens_before:,} → {record.tokens_after:,} tokens",
        f"{record.contents_before:,} → {record.contents_after:,} messages",
        summary,
    ]
    if record.model:
        parts.append(f"cost {format_cost(record.cost)}")
    return ", ".join(parts)


async def report_pressure(record: PressureRecord, observers: Observers) -> None:
    """Tells log and listener of a request that fills much of the window."""
    logger.warning(
        "Agent %r is under pressure: %d of %d tokens (%.0f %%) are sent.",
        *(record.agent, record.tokens, record.window_tokens, 100 * record.pressure),
    )
    await observers.tell(observers.on_pressure, record)


async def report_call(record: CallRecord, observers: Observers) -> None:
    """Tells log and listener of an answered model call."""
    logger.debug(
        "Agent %(agent)r: about %(estimated_tokens)d tokens were sent, %(real_tokens)s "
        "counted, window %(window_tokens)d.",
        vars(record),
    )
    await observers.tell(observers.on_call, record)


def describe_call(record: CallRecord) -> dict[str, Any]:
    """Describes a call in short, for `custom_metadata`: small, and safe as JSON.

    Of a call without a compaction or a recovery there is nothing to say.
    """
    if not record.is_recovered and record.compaction is None:
        return {}
    described: dict[str, Any] = {
        "estimate": record.estimated_tokens,
        "real": record.real_tokens,
        "window": record.window_tokens,
        "pressure": round(record.pressure, 3),
    }
    if record.is_recovered:
        described["recovered"] = True
    if (compaction := record.compaction) is not None:
        left_out = ("agent", "session_id", "summary_tokens", "duration_seconds")
        renamed = {"attempts": "summaries", "is_mechanical": "mechanical"}
        described["compaction"] = {
            renamed.get(name, name): value
            for name, value in asdict(compaction).items()
            if name not in left_out
        }
    return described
