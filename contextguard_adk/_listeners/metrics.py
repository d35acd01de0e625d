"""Counts what the guard does, by OpenTelemetry's API.

Without an SDK of OpenTelemetry, the API does nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from opentelemetry import metrics

from contextguard_adk._support.log import log_failures
from contextguard_adk._turn.units import (
    Answered,
    Compacted,
    Listener,
    Recovered,
    Summarized,
)
from contextguard_adk.records import Origin

_MODEL = "gen_ai.request.model"
_RATIOS = tuple(tenth / 10 for tenth in range(1, 11))
_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 180)
_TOKENS = tuple(2**power for power in range(10, 22))
_GENAI_TOKENS = tuple(4**power for power in range(14))
"""The bounds of the buckets of histograms.

OpenTelemetry's conventions for generative AI give those of `_GENAI_TOKENS`.
"""


class _Metric(NamedTuple):
    """A metric of OpenTelemetry.

    Attributes:
        unit: The unit of its values; "" for a number of things.
        description: The description that OpenTelemetry gets.
        buckets: The bounds of the buckets of a histogram; () for a counter.
    """

    unit: str
    description: str
    buckets: Sequence[float] = ()


_METRICS: Mapping[str, _Metric] = {
    "context_guard.compactions": _Metric("", "Compactions."),
    "context_guard.compaction.tokens_before": _Metric(
        "{token}", "Requests before.", _TOKENS
    ),
    "context_guard.compaction.tokens_after": _Metric(
        "{token}", "Requests after.", _TOKENS
    ),
    "context_guard.compaction.wait": _Metric("s", "How long calls waited.", _SECONDS),
    "context_guard.summary.failures": _Metric("", "Summaries that no model wrote."),
    "context_guard.summary.cost": _Metric("USD", "Of summary calls; if known."),
    "context_guard.recoveries": _Metric("", "Rejected requests, by what helped."),
    "context_guard.window.usage": _Metric("1", "Estimate / window of calls.", _RATIOS),
    # ADK has a metric of this name for its own calls, with other attributes. The
    # Prometheus exporter keeps the two metrics apart, because the descriptions differ.
    "gen_ai.client.token.usage": _Metric(
        "{token}", "Tokens of summary calls.", _GENAI_TOKENS
    ),
}
"""The metrics, by their names."""


class Metrics(Listener):
    """Counts compactions, summary calls and recoveries, and how full windows are."""

    def summarized(self, event: Summarized) -> None:
        """Counts the failures, the cost and the tokens of summary calls."""
        facts = event.facts
        origin = event.origin
        usage = facts["usage"]
        by_model = {_MODEL: facts["model"]}

        if facts["failure"]:
            by_error = {**by_model, "error.type": facts["failure"]}
            _count("context_guard.summary.failures", 1, origin, by_error)
        if facts["cost"]:  # None is an unknown cost, and 0 adds nothing.
            _count("context_guard.summary.cost", facts["cost"], origin, by_model)

        tokens_by_type = {"input": usage.prompt_tokens, "output": usage.output_tokens}
        if not any(tokens_by_type.values()):
            return  # The client has reported no usage.
        for token_type, tokens in tokens_by_type.items():
            by_type = {
                **by_model,
                "gen_ai.operation.name": "summarize",
                "gen_ai.token.type": token_type,
            }
            _count("gen_ai.client.token.usage", tokens, origin, by_type)

    async def compacted(self, event: Compacted) -> None:
        """Counts a compaction, the request before and after, and the wait for it."""
        record = event.record
        by = {_MODEL: record.model, "context_guard.reason": record.reason}
        values = {
            "context_guard.compactions": 1,
            "context_guard.compaction.tokens_before": record.tokens_before,
            "context_guard.compaction.tokens_after": record.tokens_after,
            "context_guard.compaction.wait": record.waited_seconds,
        }
        for name, value in values.items():
            _count(name, value, record, by)

    def answered(self, event: Answered) -> None:
        """Counts how full the window was, by the estimate: once for each model call."""
        call = event.call
        # A call has several answers if ADK sends its request again.
        is_first_answer = not call.is_reported
        if is_first_answer:
            ratio = call.estimated_tokens / call.window_tokens
            by = {_MODEL: call.model}
            _count("context_guard.window.usage", ratio, call.origin, by)

    def recovered(self, event: Recovered) -> None:
        by = {_MODEL: event.model, "context_guard.kind": event.kind}
        _count("context_guard.recoveries", 1, event.origin, by)


@log_failures(logging.getLogger("contextguard_adk.metrics"), "Nothing is counted")
def _count(name: str, value: float, origin: Origin, by: Mapping[str, str]) -> None:
    """Adds a value to a metric.

    Args:
        name: The name of the metric.
        value: The value.
        origin: The agent, session and user of the request.
        by: Further attributes, but no session ids or the like: each new value of an
            attribute makes another series, which takes memory.
    """
    attributes = {
        "gen_ai.agent.name": origin.agent,
        "context_guard.app": origin.app,
        "context_guard.strategy": origin.strategy,
        **by,
    }
    add_value = _make_metrics(metrics.get_meter_provider())[name]
    add_value(value, attributes)


# The provider is an argument, because an app may set up another one, an SDK, after the
# first call. The metrics of the last provider are remembered.
@lru_cache(maxsize=1)
def _make_metrics(provider: metrics.MeterProvider) -> dict[str, Callable[..., None]]:
    """Makes all metrics; returns the method of each that takes a value.

    The methods are returned by the names of the metrics.
    """
    meter = provider.get_meter("contextguard_adk")
    methods = dict[str, Callable[..., None]]()
    for name, metric in _METRICS.items():
        if metric.buckets:
            histogram = meter.create_histogram(
                name,
                metric.unit,
                metric.description,
                explicit_bucket_boundaries_advisory=metric.buckets,
            )
            methods[name] = histogram.record
        else:
            counter = meter.create_counter(name, metric.unit, metric.description)
            methods[name] = counter.add
    return methods
