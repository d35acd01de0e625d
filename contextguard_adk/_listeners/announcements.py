"""Tells log, trace and web UI of a compaction."""

from __future__ import annotations

import logging
import time

from contextguard_adk._runtime.state import COMPACTED_KEY, USAGE_KEY
from contextguard_adk._support.log import one_line
from contextguard_adk._turn.units import Answered, Compacted, Listener
from contextguard_adk.records import Usage, describe_compaction

logger = logging.getLogger("contextguard_adk.telemetry")


class LogLine(Listener):
    """Logs one line at INFO, without message text."""

    async def compacted(self, event: Compacted) -> None:
        record = event.record
        usage = record.usage
        sizes = describe_compaction(record).replace("→", "to")  # A log may be ASCII.
        logger.info(
            "Compacted agent %r (%s): %s; threshold %d, %d tokens read (%d cached), "
            "%d written; %s.",
            record.agent,
            record.reason,
            one_line(sizes),
            event.turn.budgets.threshold_tokens,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.output_tokens,
            record.place,
        )


class Spans(Listener):
    """Makes an OpenTelemetry span that lasts as long as the call was held up."""

    async def compacted(self, event: Compacted) -> None:
        """Makes a span with the fields of the record; its end is now."""
        from opentelemetry import trace  # ADK loads it with the first run.

        record = event.record
        end_nanoseconds = time.time_ns()
        span = trace.get_tracer("contextguard_adk").start_span(
            "context_guard.compact",
            start_time=end_nanoseconds - int(record.waited_seconds * 1e9),
        )
        fields = vars(record)
        names = sorted(fields.keys() - {"model", "usage", "cost", "failure"})
        span.set_attributes({f"context_guard.{name}": fields[name] for name in names})
        if record.cost is not None:
            span.set_attribute("context_guard.cost_usd", record.cost)

        if record.model:
            # For "generate_content" ADK's page of traces asks for the span's event.
            span.set_attribute("gen_ai.operation.name", "summarize")
            span.set_attribute("gen_ai.request.model", record.model)
        usage = record.usage
        if usage != Usage():
            cached_tokens = usage.cached_tokens
            span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", cached_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", usage.output_tokens)

        if record.failure:
            span.set_attribute("error.type", record.failure)
            span.set_status(trace.StatusCode.ERROR, record.failure)
        span.end(end_nanoseconds)


class StateLines(Listener):
    """Writes lines for people to session state; the web UI shows one as a label."""

    async def compacted(self, event: Compacted) -> None:
        key = COMPACTED_KEY + event.record.agent
        event.state.set(key, describe_compaction(event.record))

    def answered(self, event: Answered) -> None:
        """Writes how full the window is, where the count is believed to be a size."""
        count = event.count
        if (
            not event.guard.settings.usage_in_state
            or count is None
            or not count.is_size
        ):
            return

        tokens = count.real_tokens
        window_tokens = event.call.window_tokens
        percent = 100 * tokens / window_tokens
        line = f"{tokens:,} of {window_tokens:,} tokens, {percent:.0f} %"
        agent = event.context.agent_name
        event.state.set(USAGE_KEY + agent, line)

        if COMPACTED_KEY + agent not in event.context.state:
            # The web UI shows keys in the order they came. Written now, this line will
            # stand above the keys that are not for people.
            event.state.set(COMPACTED_KEY + agent, "none so far")
