"""Hypothesis profiles, and which tests and how many processes a run takes."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests import cpu_times

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
        InMemorySpanExporter,
    )

    from tests.fake_provider import FakeProvider

# `--hypothesis-profile=…` takes another one. `search` looks for new examples; `ci` and
# the default try the same ones in every run.
settings.register_profile("search", max_examples=2_000, deadline=None)
settings.register_profile("default", max_examples=15, deadline=None, derandomize=True)
settings.register_profile("ci", settings.get_profile("default"), max_examples=500)
settings.load_profile("default")

# ADK would copy every request into its spans, which takes longer than most tests.
os.environ.setdefault("ADK_TELEMETRY_SCHEMA_VERSION_OPT_IN", "1")
os.environ.setdefault("ADK_CAPTURE_MESSAGE_CONTENT_IN_SPANS", "false")

ON_REQUEST = ("browser", "real_model")
"""Tests with these marks run only if `-m` names the mark."""


def find_requested(config: pytest.Config) -> list[str]:
    """The marks of `ON_REQUEST` that `-m` asks for."""
    wanted = config.getoption("markexpr")
    return [mark for mark in ON_REQUEST if re.search(rf"(?<!not )\b{mark}\b", wanted)]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of this suite."""
    cpu_times.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Sets up what the options ask for."""
    cpu_times.register(config)


@pytest.fixture(autouse=True)
def warn_anew() -> None:
    """Each test sees what is said once in a process."""
    # Not at the top: the process that hands out the tests needs nothing of ADK.
    from contextguard_adk._runtime import spending
    from contextguard_adk._support import log as telemetry

    telemetry._warned.clear()
    spending.PROCESS.spent = spending.Spent()
    spending.PROCESS.warned_until = 0.0


@pytest.fixture
def young_heap() -> Iterator[None]:
    """`gc.collect` looks only at what the test makes: at all else it takes long."""
    gc.freeze()
    yield
    gc.unfreeze()


def is_left_to_slow_tests(item: pytest.Item) -> bool:
    """Whether the mark `quick` of a test names other variants than this one."""
    quick = item.get_closest_marker("quick")
    if quick is None or not isinstance(item, pytest.Function):
        return False
    is_slow = item.get_closest_marker("slow") is not None
    return not is_slow and item.callspec.id not in quick.args


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leaves out what runs only on request; marks what is slow in several respects.

    Tests that import litellm come first: xdist gives the beginning of the list to one
    process, and only that one imports it.
    """
    for item in items:
        if len(list(item.iter_markers("slow"))) > 1:
            item.add_marker("exhaustive")
        elif is_left_to_slow_tests(item):
            item.add_marker("slow")

    unwanted = {*ON_REQUEST}.difference(find_requested(config))
    left_out = [
        i for i in items if any(i.get_closest_marker(mark) for mark in unwanted)
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.get_closest_marker("litellm") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One process for tests that share a browser or a model; else xdist decides."""
    return 0 if find_requested(config) else None


@pytest.fixture(scope="session")
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with one certificate: each client would read all of `certifi` anew."""
    import certifi

    end = "-----END CERTIFICATE-----\n"
    path = tmp_path_factory.mktemp("certificates") / "one.pem"
    path.write_text(certifi.contents().partition(end)[0] + end)
    return str(path)


@pytest.fixture
def serve(
    monkeypatch: pytest.MonkeyPatch, one_authority: str
) -> Iterator[Callable[..., str]]:
    """Serves fake providers until the test ends, where the clients find them."""
    from tests.fake_provider import FakeServer

    servers: list[FakeServer] = []

    def start(*fakes: FakeProvider) -> str:
        servers.append(FakeServer(*fakes).__enter__())
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("SSL_CERT_FILE", one_authority)
        monkeypatch.setenv("GOOGLE_API_KEY", "key")
        monkeypatch.setenv("ANTHROPIC_API_KEY", "key")
        monkeypatch.setenv("ANTHROPIC_BASE_URL", servers[-1].address)
        return servers[-1].address

    yield start
    for server in servers:
        server.__exit__()


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Collects the spans of ADK and the guard, for one test."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
        InMemorySpanExporter,
    )

    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("test")
    # The provider of the process can be set only once; every tracer made before it
    # was set is such a proxy, ADK's own included.
    monkeypatch.setattr(trace.ProxyTracer, "_tracer", property(lambda _: tracer))
    return kept
