"""Counts what the guard does, by OpenTelemetry's API; no cost without an SDK."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from opentelemetry import metrics

from contextguard_adk._turn.units import Answered, Compacted, Listener
from contextguard_adk.records import Origin, Usage

_RATIOS = tuple(tenth / 10 for tenth in range(1, 11))
_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 180)
_TOKENS = tuple(2**power for power in range(10, 22))
_USED = tuple(4**power for power in range(14))  # As the GenAI conventions have it.

METRICS: Mapping[str, tuple[str, str, Sequence[float]]] = {
    "context_guard.compactions": ("", "Compactions.", ()),
    "context_guard.compaction.tokens_before": ("{token}", "Requests before.", _TOKENS),
    "context_guard.compaction.tokens_after": ("{token}", "Requests after.", _TOKENS),
    "context_guard.compaction.wait": ("s", "How long calls waited.", _SECONDS),
    "context_guard.summary.failures": ("", "Summaries that no model wrote.", ()),
    "context_guard.summary.cost": ("USD", "Of summary calls; if known.", ()),
    "context_guard.recoveries": ("", "Rejected requests, by what helped.", ()),
    "context_guard.window.usage": ("1", "Estimate / window of calls.", _RATIOS),
    # ADK counts its own calls by this name, with other attributes; the Prometheus
    # exporter keeps both apart by their descriptions.
    "gen_ai.client.token.usage": ("{token}", "Tokens of summary calls.", _USED),
}
"""Unit, description, and the buckets of a histogram; a counter has none."""


class Metrics(Listener):
    """Counts compactions, and how full windows are."""

    async def compacted(self, event: Compacted) -> None:
        record, name = event.record, "context_guard.compaction"
        counted = {
            f"{name}s": 1,
            f"{name}.tokens_before": record.tokens_before,
            f"{name}.tokens_after": record.tokens_after,
            f"{name}.wait": record.waited_seconds,
        }
        count(record, record.model, counted, {"context_guard.reason": record.reason})

    def answered(self, event: Answered) -> None:
        if not (call := event.call).is_reported:
            ratio = call.estimated_tokens / call.window_tokens
            count(call.origin, call.model, {"context_guard.window.usage": ratio})


def count_summaries(origin: Origin, facts: Mapping[str, Any]) -> None:
    """Counts what summaries took, of compactions that come to nothing as well."""
    model, usage, failure = facts["model"], facts["usage"], facts["failure"]
    if failure:
        failed = {"context_guard.summary.failures": 1}
        count(origin, model, failed, {"error.type": failure})
    if facts["cost"] is not None:
        count(origin, model, {"context_guard.summary.cost": facts["cost"]})
    used = {"input": usage.prompt_tokens, "output": usage.output_tokens}
    for kind, tokens in used.items() if usage != Usage() else ():
        what = {"gen_ai.operation.name": "summarize", "gen_ai.token.type": kind}
        count(origin, model, {"gen_ai.client.token.usage": tokens}, what)


def count(
    origin: Origin,
    model: str,
    counted: Mapping[str, float],
    more: Mapping[str, str] = {},
) -> None:
    """Adds to metrics, by attributes of bounded number: no session, user or run."""
    own = {"app": origin.app, "strategy": origin.strategy}
    attributes = {f"context_guard.{name}": value for name, value in own.items()}
    attributes |= {"gen_ai.agent.name": origin.agent, "gen_ai.request.model": model}
    instruments = _instruments(metrics.get_meter_provider())
    for name, value in counted.items():
        instruments[name](value, {**attributes, **more})


@lru_cache(maxsize=1)  # Anew where an SDK is set up after the first call.
def _instruments(provider: metrics.MeterProvider) -> dict[str, Callable[..., None]]:
    meter, made = provider.get_meter("contextguard_adk"), dict[str, Any]()
    for name, (unit, said, buckets) in METRICS.items():
        if buckets:
            advice: Any = {"explicit_bucket_boundaries_advisory": buckets}
            made[name] = meter.create_histogram(name, unit, said, **advice).record
        else:
            made[name] = meter.create_counter(name, unit, said).add
    return made
