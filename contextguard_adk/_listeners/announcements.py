"""Tells log, trace and web UI of a compaction."""

from __future__ import annotations

import logging
import time

from contextguard_adk._runtime.state import COMPACTED_KEY, USAGE_KEY
from contextguard_adk._support.log import one_line
from contextguard_adk._turn.units import Answered, Compacted, Listener
from contextguard_adk.records import CompactionRecord, Usage, describe_compaction

logger = logging.getLogger("contextguard_adk.telemetry")


class LogLine(Listener):
    """Logs one line at INFO, without message text."""

    async def compacted(self, event: Compacted) -> None:
        record, usage = event.record, event.record.usage
        logger.info(
            "Compacted agent %r (%s): %s; threshold %d, %d tokens read (%d cached), "
            "%d written; %s.",
            *(record.agent, record.reason),
            # A log may be ASCII.
            one_line(describe_compaction(record).replace("→", "to")),
            *(event.turn.budgets.threshold_tokens, usage.prompt_tokens),
            *(usage.cached_tokens, usage.output_tokens, record.place),
        )


class Spans(Listener):
    """Makes an OpenTelemetry span that lasts as long as the call was held up."""

    async def compacted(self, event: Compacted) -> None:
        from opentelemetry import trace  # ADK loads it with the first run.

        end_nanoseconds = time.time_ns()
        span = trace.get_tracer("contextguard_adk").start_span(
            "context_guard.compact",
            start_time=end_nanoseconds - int(event.record.waited_seconds * 1e9),
        )
        span.set_attributes(_span_attributes(event.record))
        if failure := event.record.failure:
            span.set_attribute("error.type", failure)
            span.set_status(trace.StatusCode.ERROR, failure)
        span.end(end_nanoseconds)


def _span_attributes(record: CompactionRecord) -> dict[str, str | bool | int | float]:
    """Names facts of the guard by names of its own, others as OpenTelemetry does."""
    apart = ("model", "usage", "cost", "failure")
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


class StateLines(Listener):
    """Writes lines for people to session state; the web UI shows one as a label."""

    async def compacted(self, event: Compacted) -> None:
        key = COMPACTED_KEY + event.record.agent
        event.state.set(key, describe_compaction(event.record))

    def answered(self, event: Answered) -> None:
        """Writes how full the window is, where the count is believed to be a size."""
        if event.guard.has_usage and event.count and event.count.is_size:
            tokens, most = event.count.real_tokens, event.call.window_tokens
            said = f"{tokens:,} of {most:,} tokens, {100 * tokens / most:.0f} %"
            event.state.set(USAGE_KEY + event.context.agent_name, said)
