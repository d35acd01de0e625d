"""Counts what the guard does, by OpenTelemetry's API; no cost without an SDK."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from opentelemetry import metrics

from contextguard_adk._support.log import log_failures
from contextguard_adk._turn.units import Answered, Compacted, Listener
from contextguard_adk.records import Origin

MODEL = "gen_ai.request.model"
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
    """Counts compactions, and how full windows are."""

    async def compacted(self, event: Compacted) -> None:
        record = event.record
        before = record.tokens_before
        after = record.tokens_after
        by = {MODEL: record.model, "context_guard.reason": record.reason}
        count("context_guard.compactions", 1, record, by)
        count("context_guard.compaction.tokens_before", before, record, by)
        count("context_guard.compaction.tokens_after", after, record, by)
        count("context_guard.compaction.wait", record.waited_seconds, record, by)

    def answered(self, event: Answered) -> None:
        if not (call := event.call).is_reported:
            ratio = call.estimated_tokens / call.window_tokens
            count("context_guard.window.usage", ratio, call.origin, {MODEL: call.model})


def count_summaries(origin: Origin, facts: Mapping[str, Any]) -> None:
    """Counts what summaries took and why they failed, by fields of their record."""
    by = {MODEL: facts["model"]}
    usage = facts["usage"]
    if why := facts["failure"]:
        count("context_guard.summary.failures", 1, origin, {**by, "error.type": why})
    if facts["cost"]:
        count("context_guard.summary.cost", facts["cost"], origin, by)
    used = {"input": usage.prompt_tokens, "output": usage.output_tokens}
    for kind, tokens in used.items() if any(used.values()) else ():
        what = {"gen_ai.operation.name": "summarize", "gen_ai.token.type": kind}
        count("gen_ai.client.token.usage", tokens, origin, {**by, **what})


@log_failures(logging.getLogger("contextguard_adk.metrics"), "Nothing is counted")
def count(name: str, value: float, origin: Origin, by: Mapping[str, str]) -> None:
    """Adds to a metric; no attribute names what is unbounded, as sessions are."""
    own = {"context_guard.app": origin.app, "context_guard.strategy": origin.strategy}
    whose = {"gen_ai.agent.name": origin.agent, **own, **by}
    _instruments(metrics.get_meter_provider())[name](value, whose)


@lru_cache(maxsize=1)  # Anew where an SDK is set up after the first call.
def _instruments(provider: metrics.MeterProvider) -> dict[str, Callable[..., None]]:
    meter = provider.get_meter("contextguard_adk")
    made = dict[str, Any]()
    for name, (unit, said, buckets) in _METRICS.items():
        if buckets:
            advice: Any = {"explicit_bucket_boundaries_advisory": buckets}
            made[name] = meter.create_histogram(name, unit, said, **advice).record
        else:
            made[name] = meter.create_counter(name, unit, said).add
    return made
