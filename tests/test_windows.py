"""Context windows of real model names, of odd tables, and the budgets of a window."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contextguard_adk._measuring.budgets import (
    buffer_tokens,
    summary_budget_tokens,
    threshold_tokens,
)
from contextguard_adk._providers.windows import (
    DEFAULT_CONTEXT_WINDOW,
    LitellmRegistry,
    ResolvedWindow,
    resolve_context_window,
)

REAL = LitellmRegistry()


class FakeRegistry:
    """A registry that gives one answer, or raises it."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def context_window(self, model: str) -> int | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return cast("int | None", self.answer)


def chat(max_input_tokens: object = None, **more: object) -> dict[str, object]:
    """Builds an entry of a chat model."""
    entry = {"mode": "chat", "max_input_tokens": max_input_tokens, **more}
    return {name: value for name, value in entry.items() if value is not None}


def registry_of(tmp_path: Path, table: object) -> LitellmRegistry:
    """Builds a registry that reads `table` from a file."""
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    return LitellmRegistry(path)


FLASH = "gemini-2.5-flash"
SONNET = "claude-sonnet-4-5"
VERTEX = "projects/p/locations/l/publishers"
ARN = "arn:aws:bedrock:us-east-1:123456789012"
NAMES = {
    1_048_576: f"""{FLASH} models/{FLASH} gemini/{FLASH} vertex_ai/{FLASH}
        {FLASH}-latest
        {VERTEX}/google/models/{FLASH}-001 {FLASH}-preview-09-2025 Gemini-2.5-Flash
        apigee/vertex_ai/v1beta/{FLASH} openrouter/google/gemini-2.5-pro:online""",
    200_000: f"""{SONNET}-20250929 {SONNET}-20310131 anthropic/claude-3-haiku-latest
        litellm_proxy/anthropic/claude-sonnet-4.5 vertex_ai/{SONNET}@20250929
        {VERTEX}/anthropic/models/{SONNET}@20250929
        bedrock/us.anthropic.{SONNET}-20250929-v1:0
        bedrock/us-gov.anthropic.{SONNET}-20310131-v1:0:48k
        bedrock/converse/apac.anthropic.{SONNET}-20250929-v1:0
        bedrock/us-east-1/anthropic.{SONNET}-20250929-v1:0
        bedrock/{ARN}:inference-profile/us.anthropic.{SONNET}""",
    128_000: """gpt-4o azure/gpt-4o apigee/openai/v1/gpt-4o openai/gpt-4o-2031-01-31
        openrouter/openai/gpt-4o openai/ft:gpt-4o-2024-08-06:acme::abc123
        bedrock/us.meta.llama3-1-70b-instruct-v1:0
        openrouter/meta-llama/llama-3.3-70b-instruct:free""",
    131_072: "gemma-3-27b-it",
    8_192: "gpt-4 ollama_chat/llama3.1:8b",
}
UNKNOWN = f"""/ :free sample_spec my-own-model azure/my-deployment ft:unknown
    gemini-latest projects/p/locations/l/endpoints/1234567890 text-embedding-3-small
    groq/llama-prompt-guard-2-22m bedrock/{ARN}:application-inference-profile/abc123"""
NAMED = [(name, tokens) for tokens, names in NAMES.items() for name in names.split()]


@pytest.mark.parametrize(("model", "window_tokens"), NAMED)
def test_real_names_resolve(model: str, window_tokens: int) -> None:
    """Names as ADK users write them find their entry in litellm's table."""
    assert REAL.context_window(model) == window_tokens


@pytest.mark.parametrize("model", ["", *UNKNOWN.split()])
def test_real_unknown_names_stay_unknown(model: str) -> None:
    """Deployments, endpoints, families and models that do not chat have no window."""
    assert REAL.context_window(model) is None
    assert not REAL.supports_reasoning(model)


@pytest.mark.parametrize(
    ("entry", "window_tokens"),
    [
        *((chat(1_000), 1_000), (chat(999), None), (chat(True), None), ("chat", None)),
        *((chat(max_tokens=8_000), 8_000), (chat(max_tokens=7_999), None)),
        (chat("5000", max_tokens=9_000), None),
        (chat(5_000, mode="responses"), 5_000),
        *((chat(5_000, mode=mode), None) for mode in ("embedding", ["chat"], None)),
    ],
)
def test_odd_entries(tmp_path: Path, entry: object, window_tokens: int | None) -> None:
    """Only whole numbers of at least 1,000 tokens, of models that chat, count."""
    registry = registry_of(tmp_path, {"m-1": entry, "other": chat(9_000)})
    assert registry.context_window("m-1") == window_tokens


@pytest.mark.parametrize(
    ("stated", "window_tokens"),
    [
        ([131_072, 128_000, 131_072], 128_000),
        ([4_096, 131_072, 262_144, 262_144], 131_072),
        *(([1_000, 4_000, 4_000], 1_000), ([1_000, 4_004, 4_004], 4_004)),
    ],
)
def test_several_providers(
    tmp_path: Path, stated: list[int], window_tokens: int
) -> None:
    """Of several providers of one name the smallest plausible window is taken."""
    table = {f"p{i}/vendor/M-1": chat(tokens) for i, tokens in enumerate(stated)}
    assert registry_of(tmp_path, table).context_window("x/m-1") == window_tokens


@pytest.mark.parametrize(
    ("stated", "limit_tokens"),
    [
        *(([4_096, 8_192, 8_192], 4_096), ([16, 8_192, 8_192], 8_192)),
        *(([None, 8_192], 8_192), ([None, 0, "4096"], None), ([99_000], 40_000)),
    ],
)
def test_output_limits_of_several_providers(
    tmp_path: Path, stated: list[object], limit_tokens: int | None
) -> None:
    """The smallest plausible one is taken, and none is larger than the window."""
    table = {
        f"p{i}/m-1": chat(40_000, max_output_tokens=tokens)
        for i, tokens in enumerate(stated)
    }
    assert registry_of(tmp_path, table).max_output_tokens("x/m-1") == limit_tokens


@pytest.mark.parametrize(
    ("model", "window_tokens"),
    [
        *(("a/m-1", 11_000), ("proxy/a/m-1", 11_000)),
        *(("m-1", 12_000), ("proxy/m-1", 10_000)),
        *(("m-2", 20_000), ("proxy/m-2", 20_000)),
        *(("a/m-3-20250101", 31_000), ("a/m-3-20260101", 30_000)),
        *(("a/m-3:8b", 30_000), ("m.3", 30_000), ("m-4-preview-001", 40_000)),
        *(("m-4-8192", None), ("m-4-turbo", None), ("r1", None)),
    ],
)
def test_order_of_lookup(tmp_path: Path, model: str, window_tokens: int | None) -> None:
    """Exact names come first, then shorter ones, then any provider, then no suffix."""
    table = {
        "a/m-1": chat(11_000),
        "b/m-1": chat(10_000),
        "gemini/m-1": chat(12_000),
        "m-2": chat(20_000),
        "gemini/m-2": chat(22_000),
        "a/m-3-20250101": chat(31_000),
        "b/m-3@20240101": chat(30_000),
        "m-4": chat(40_000),
        "deepseek.r1-v1:0": chat(50_000),
    }
    assert registry_of(tmp_path, table).context_window(model) == window_tokens


def test_a_model_thinks_if_any_provider_says_so(tmp_path: Path) -> None:
    """Only a true `true` counts."""
    table = {
        "a/m-1": chat(9_000, supports_reasoning=True),
        "b/m-1": chat(9_000),
        "b/m-2": chat(9_000, supports_reasoning="yes"),
    }
    registry = registry_of(tmp_path, table)
    found = [registry.supports_reasoning(name) for name in ("x/m-1", "b/m-1", "b/m-2")]
    assert found == [True, False, False]
    assert REAL.supports_reasoning("openai/gpt-5")
    assert not REAL.supports_reasoning("gpt-4o")


@pytest.mark.parametrize(
    "content", [None, b"{", b"\xff\xfe\x00", b"[]", b'{"m": {"mode": "embedding"}}']
)
def test_unusable_file_falls_back_to_litellm(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    content: bytes | None,
) -> None:
    """Without a usable file litellm's own table answers, and one warning says so."""
    module = types.SimpleNamespace(model_cost={"a/m-1": chat(9_000)})
    monkeypatch.setitem(sys.modules, "litellm", cast("types.ModuleType", module))
    path = tmp_path / "table.json"
    if content is not None:
        path.write_bytes(content)
    registry = LitellmRegistry(path)
    assert registry.context_window("proxy/m-1") == 9_000
    assert registry.context_window("proxy/m-2") is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]


OFFLINE = """
import socket, sys

def refuse(*args, **kwargs):
    raise AssertionError("network")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from contextguard_adk._providers.windows import resolve_context_window
assert resolve_context_window("openrouter/openai/gpt-4o").tokens == 128_000
assert resolve_context_window("nobody-knows").source == "default"
assert not [name for name in sys.modules if name.partition(".")[0] == "litellm"]
"""


def test_fresh_interpreter_resolves() -> None:
    """Resolving imports no litellm and uses no network."""
    root = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", OFFLINE], cwd=root, check=True)


@pytest.mark.parametrize(
    ("configured", "answer", "expected"),
    [
        (5_000, RuntimeError("asked"), ResolvedWindow(5_000, "configured")),
        (None, 9_000, ResolvedWindow(9_000, "registry")),
        (None, None, ResolvedWindow(128_000, "default")),
    ],
)
def test_order_of_sources(
    configured: int | None, answer: object, expected: ResolvedWindow
) -> None:
    """The setting wins over the registry, the registry over the default."""
    registry = FakeRegistry(answer)
    resolved = resolve_context_window("m", configured=configured, registry=registry)
    assert resolved == expected


@pytest.mark.parametrize("agent", ["writer", ""])
def test_unknown_model_warns_once_and_names_the_setting(
    caplog: pytest.LogCaptureFixture, agent: str
) -> None:
    """Each unknown model gets one warning, with the default and the setting to set."""
    first, second = f"unknown-1-{agent}", f"unknown-2-{agent}"
    for model in (first, first, second, first):
        resolve_context_window(model, registry=FakeRegistry(None), agent=agent)
    for model, text in zip((first, second), caplog.messages, strict=True):
        assert repr(model) in text
        assert "128000" in text
        assert f'agents={{"{agent or "<agent>"}": Threshold(context_win' in text


@pytest.mark.parametrize(
    "answer", [0, -1, True, "128000", 128_000.0, RuntimeError("no such table")]
)
def test_broken_registry_counts_as_unknown(
    caplog: pytest.LogCaptureFixture, answer: object
) -> None:
    """What a registry cannot say properly is logged once and means the default."""
    model = f"broken {answer!r}"
    for _ in range(3):
        resolved = resolve_context_window(model, registry=FakeRegistry(answer))
        assert resolved == ResolvedWindow(DEFAULT_CONTEXT_WINDOW, "default")
    broken, unknown = caplog.messages
    assert repr(answer) in broken
    assert "unknown" in unknown


@pytest.mark.parametrize(
    ("window", "buffer", "summary"),
    [
        *((1_000_000, 20_000, 10_000), (200_000, 20_000, 10_000)),
        *((199_999, 39_999, 19_999), (128_000, 25_600, 12_800)),
        *((8_000, 1_600, 800), (1, 0, 0)),
    ],
)
def test_budgets_of_a_window(window: int, buffer: int, summary: int) -> None:
    """Each window has the documented buffer, threshold and summary budget."""
    assert buffer_tokens(window) == buffer
    assert threshold_tokens(window) == window - buffer
    assert summary_budget_tokens(window) == summary


@pytest.mark.parametrize(
    ("window", "reserved", "buffer"),
    [(200_000, 8_192, 20_000), (200_000, 64_000, 64_000), (200_000, 160_000, 150_000)],
)
def test_reserved_output_widens_the_buffer(
    window: int, reserved: int, buffer: int
) -> None:
    """What the request reserves for its output stays free, up to 3/4 of the window."""
    assert buffer_tokens(window, reserved) == buffer
    assert threshold_tokens(window, reserved) == window - buffer


@given(st.integers(1, 10_000_000), st.integers(0, 10_000_000))
def test_budgets_always_fit_the_window(window: int, reserved: int) -> None:
    """The threshold lies in the window, at least at a quarter; a summary fits below."""
    threshold = threshold_tokens(window, reserved)
    assert window / 4 <= threshold <= window
    assert 2 * summary_budget_tokens(window) <= threshold
