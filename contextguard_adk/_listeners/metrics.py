"""Counts what the guard does, by OpenTelemetry's API; no cost without an SDK."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

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
_USED = tuple(4**power for power in range(14))  # As the GenAI conventions have it.

# Unit, description, and the buckets of a histogram, by name; a counter has none.
_METRICS: Mapping[str, tuple[str, str, Sequence[float]]] = {
    "context_guard.compactions": ("", "Compactions.", ()),
    "context_guard.compaction.tokens_before": ("{token}", "Requests before.", _TOKENS),
    "context_guard.compaction.tokens_after": ("{token}", "Requests after.", _TOKENS),
    "context_guard.compaction.wait": ("s", "How long calls waited.", _SECONDS),
    "context_guard.summary.failures": ("", "Summaries that no model wrote.", ()),
    "context_guard.summary.cost": ("USD", "Of summary calls; if known.", ()),
    "context_guard.recoveries": ("", "Rejected requests, by what helped.", ()),
    "context_guard.window.usage": ("1", "Estimate / window of calls.", _RATIOS),
    # ADK's own has another description: by that the Prometheus exporter joins series.
    "gen_ai.client.token.usage": ("{token}", "Tokens of summary calls.", _USED),
}


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
        if facts["cost"]:
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
        """Counts a compaction, the sizes before and after, and the wait for it."""
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
        """Counts once for each call how full the window was, by the estimate."""
        call = event.call
        if not call.is_reported:
            ratio = call.estimated_tokens / call.window_tokens
            by = {_MODEL: call.model}
            _count("context_guard.window.usage", ratio, call.origin, by)

    def recovered(self, event: Recovered) -> None:
        by = {_MODEL: event.model, "context_guard.kind": event.kind}
        _count("context_guard.recoveries", 1, event.origin, by)


@log_failures(logging.getLogger("contextguard_adk.metrics"), "Nothing is counted")
def _count(name: str, value: float, origin: Origin, by: Mapping[str, str]) -> None:
    """Adds to a metric. No attribute may be unbounded, as the names of sessions are."""
    attributes = {
        "gen_ai.agent.name": origin.agent,
        "context_guard.app": origin.app,
        "context_guard.strategy": origin.strategy,
        **by,
    }
    add = _instruments(metrics.get_meter_provider())[name]
    add(value, attributes)


@lru_cache(maxsize=1)  # An SDK may be set up after the first call.
def _instruments(provider: metrics.MeterProvider) -> dict[str, Callable[..., None]]:
    """Returns the method of each metric that takes a value, by the metric's name."""
    meter = provider.get_meter("contextguard_adk")
    methods = dict[str, Callable[..., None]]()
    for name, (unit, description, buckets) in _METRICS.items():
        if buckets:
            advice: Any = {"explicit_bucket_boundaries_advisory": buckets}
            histogram = meter.create_histogram(name, unit, description, **advice)
            methods[name] = histogram.record
        else:
            methods[name] = meter.create_counter(name, unit, description).add
    return methods
