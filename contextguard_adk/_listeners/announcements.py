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
        usage = event.record.usage
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

        record = event.record
        end_nanoseconds = time.time_ns()
        span = trace.get_tracer("contextguard_adk").start_span(
            "context_guard.compact",
            start_time=end_nanoseconds - int(record.waited_seconds * 1e9),
        )
        own = sorted(vars(record).keys() - {"model", "usage", "cost", "failure"})
        span.set_attributes({f"context_guard.{k}": vars(record)[k] for k in own})
        if record.cost is not None:
            span.set_attribute("context_guard.cost_usd", record.cost)
        if record.model:
            # Of "generate_content" ADK's page of traces asks for the span's event.
            span.set_attribute("gen_ai.operation.name", "summarize")
            span.set_attribute("gen_ai.request.model", record.model)
        if (usage := record.usage) != Usage():
            read = usage.prompt_tokens
            cached = usage.cached_tokens
            span.set_attribute("gen_ai.usage.input_tokens", read)
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", cached)
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
        if event.guard.settings.usage_in_state and event.count and event.count.is_size:
            tokens = event.count.real_tokens
            most = event.call.window_tokens
            said = f"{tokens:,} of {most:,} tokens, {100 * tokens / most:.0f} %"
            name = event.context.agent_name
            event.state.set(USAGE_KEY + name, said)
            if COMPACTED_KEY + name not in event.context.state:
                # The web UI shows keys as they came: it then stands above our own.
                event.state.set(COMPACTED_KEY + name, "none so far")
