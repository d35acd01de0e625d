"""Describes each compaction in the log, in traces and in ADK's web UI."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from google.genai import types

from contextguard_adk._history.history import History
from contextguard_adk._runtime.state import COMPACTED_KEY, USAGE_KEY
from contextguard_adk._support.log import one_line
from contextguard_adk._turn.units import Answered, Compacted, Listener
from contextguard_adk.records import Usage, describe_compaction

logger = logging.getLogger("contextguard_adk.telemetry")

_ADK_TRIGGERS = {"tokens": "token_threshold", "turns": "sliding_window"}
"""ADK's words for two reasons. ADK compacts for no other reason."""


class LogLine(Listener):
    """Logs one line at INFO, without message text."""

    async def compacted(self, event: Compacted) -> None:
        """Logs the sizes, the tokens of the summary calls, and whose request it was."""
        record = event.record
        usage = record.usage
        # Not every log can hold an arrow.
        sizes = describe_compaction(record).replace("→", "to")
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
    """Makes an OpenTelemetry span for each compaction."""

    async def compacted(self, event: Compacted) -> None:
        """Makes a span with the fields of the record.

        The span ends now. It has begun when the compaction began to hold up the model
        call.
        """
        # This import is slow, unless ADK has imported the module before.
        from opentelemetry import trace

        record = event.record
        end_nanoseconds = time.time_ns()
        span = trace.get_tracer("contextguard_adk").start_span(
            "context_guard.compact",
            start_time=end_nanoseconds - int(record.waited_seconds * 1e9),
        )
        fields = vars(record)
        # These four fields have other names in a span, or are no single value.
        names = sorted(fields.keys() - {"model", "usage", "cost", "failure"})
        span.set_attributes({f"context_guard.{name}": fields[name] for name in names})
        if record.cost is not None:
            span.set_attribute("context_guard.cost_usd", record.cost)

        if record.model:
            # OpenTelemetry's word for a model call is "generate_content". But ADK's
            # page of traces looks for an event in each span with this word, and this
            # span has no such event. The model is the one that was asked: if it wrote
            # no summary, the status of the span and `error.type` say so.
            span.set_attribute("gen_ai.operation.name", "summarize")
            span.set_attribute("gen_ai.request.model", record.model)
        usage = record.usage
        if usage != Usage():
            cached_tokens = usage.cached_tokens
            span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", cached_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", usage.output_tokens)

        if span.is_recording():
            span.set_attributes(_list_adk_attributes(event))

        if record.failure:
            span.set_attribute("error.type", record.failure)
            span.set_status(trace.StatusCode.ERROR, record.failure)
        span.end(end_nanoseconds)


def _list_adk_attributes(event: Compacted) -> dict[str, str | int | float]:
    """Returns the attributes that ADK gives to the span of its own compaction.

    The names and their meaning are those of google-adk 2.13, `telemetry/tracing.py`.
    ADK's settings without a counterpart here, such as `overlap_size`, are left out. So
    is the id of the resulting event: ADK makes the event after this compaction.
    """
    record = event.record
    covered = event.outcome.draft.covered
    chars_before = _count_json_chars(event.turn.contents)
    chars_after = _count_json_chars(event.outcome.contents)
    attributes: dict[str, str | int | float] = {
        "gen_ai.conversation.id": record.session_id,
        "gen_ai.compaction.trigger": _ADK_TRIGGERS.get(record.reason, record.reason),
        "gen_ai.compaction.summarizer_type": record.strategy,
        "gen_ai.compaction.event_count": len(covered),
        "gen_ai.compaction.token_threshold": event.turn.budgets.threshold_tokens,
        "gen_ai.compaction.prompt_chars_saved": chars_before - chars_after,
    }

    history = event.turn.history
    ends = {"start": min(covered, default=-1), "end": max(covered, default=-1)}
    for name, index in ends.items():
        timestamp = _find_timestamp(history, index)
        # Another plugin may have taken the event out of the session.
        if timestamp is not None:
            attributes[f"gen_ai.compaction.{name}_timestamp"] = timestamp
    return attributes


def _count_json_chars(contents: Iterable[types.Content]) -> int:
    """Returns the length of contents as JSON, which is how ADK sizes a request."""
    texts = (
        content.model_dump_json(exclude_none=True, fallback=str) for content in contents
    )
    return sum(len(text) for text in texts)


def _find_timestamp(history: History, index: int) -> float | None:
    """Returns the time of the event that a content comes from, in seconds since 1970.

    Returns None if there is no such event.
    """
    event_id = history.last_event(frozenset({index}))
    times = (each.timestamp for each in history.events if each.id == event_id)
    return next(times, None)


class StateLines(Listener):
    """Writes lines for people to session state, where ADK's web UI shows them."""

    async def compacted(self, event: Compacted) -> None:
        key = COMPACTED_KEY + event.record.agent
        event.state.set(key, describe_compaction(event.record))

    def answered(self, event: Answered) -> None:
        """Writes how full the window is: "41,210 of 128,000 tokens, 32 %".

        Nothing is written in two cases:

        - If there is no new count that is credible as the size of the request.
        - If the setting `usage_in_state` is off.
        """
        count = event.count
        if count is None or not count.is_size:
            return
        if not event.guard.settings.usage_in_state:
            return

        window_tokens = event.call.window_tokens
        percent = 100 * count.real_tokens / window_tokens
        line = f"{count.real_tokens:,} of {window_tokens:,} tokens, {percent:.0f} %"
        agent = event.context.agent_name
        event.state.set(USAGE_KEY + agent, line)
