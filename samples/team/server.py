"""Serves both apps, with sessions in a database and metrics for Prometheus.

`uvicorn server:app`; SESSION_SERVICE_URI names the database, CONTEXTGUARD_CONFIG the
settings of the guard.
"""

import os
from pathlib import Path

from google.adk.cli.fast_api import get_fast_api_app
from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import make_asgi_app

metrics.set_meter_provider(MeterProvider([PrometheusMetricReader()]))

app = get_fast_api_app(
    agents_dir=str(Path(__file__).parent / "agents"),
    session_service_uri=os.environ["SESSION_SERVICE_URI"],
    extra_plugins=["contextguard_adk.ContextGuardPlugin"],  # One for each app.
    web=False,
)
app.mount("/metrics", make_asgi_app())


@app.get("/healthz")
async def healthz() -> dict[str, str]:
    """Says that the server answers."""
    return {"status": "ok"}
