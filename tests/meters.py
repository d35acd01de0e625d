"""What OpenTelemetry's SDK and its Prometheus exporter make of the guard's metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import metrics

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

Point = tuple[dict[str, Any], Any]


@dataclass
class Meters:
    """Keeps what is counted."""

    reader: InMemoryMetricReader
    provider: MeterProvider

    def points(self, name: str) -> list[Point]:
        """What a metric holds: attributes, with the sum of each, in alphabetical order;
        a histogram has a pair of number and sum."""
        found: list[Point] = []

        for metric in self._metrics():
            if metric.name != name:
                continue
            for point in metric.data.data_points:
                is_histogram = not hasattr(point, "value")
                value = (point.count, point.sum) if is_histogram else point.value
                found.append((dict(point.attributes or {}), value))

        return sorted(found, key=repr)

    def _metrics(self) -> Iterator[Any]:
        """All metrics, of whatever kind."""
        data = self.reader.get_metrics_data()
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                yield from scope.metrics

    def buckets(self) -> dict[str, list[float]]:
        """The bounds of each histogram's buckets."""
        found = {
            metric.name: next(iter(metric.data.data_points))
            for metric in self._metrics()
        }
        return {
            name: [*point.explicit_bounds]
            for name, point in found.items()
            if hasattr(point, "explicit_bounds")
        }

    def by(self, name: str, attribute: str) -> dict[str, Any]:
        """What a metric holds by one attribute."""
        return {said[attribute]: value for said, value in self.points(name)}

    @property
    def everything(self) -> str:
        """All that is exported, as JSON."""
        data = self.reader.get_metrics_data()
        return data.to_json() if data else ""

    @property
    def exposition(self) -> str:
        """What Prometheus reads."""
        from prometheus_client import REGISTRY, generate_latest

        return generate_latest(REGISTRY).decode()

    def series(self) -> set[str]:
        """The names of all series that Prometheus gets."""
        return {*re.findall(r"(?m)^([a-zA-Z_:][\w:]*)(?=[{ ])", self.exposition)}


def keep_metrics(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meters]:
    """Sets up an SDK for one test: the provider of a process can be set only once."""
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader, PrometheusMetricReader()])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    yield Meters(reader, provider)
    provider.shutdown()
