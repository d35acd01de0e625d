"""Context windows of real model names, of odd tables, and the budgets of a window."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import types
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contextguard_adk.measuring.budgets import (
    buffer_tokens,
    summarizer_input_tokens,
    summary_budget_tokens,
    threshold_tokens,
)
from contextguard_adk.providers.windows import (
    DEFAULT_CONTEXT_WINDOW,
    LitellmRegistry,
    ModelRegistry,
    ResolvedWindow,
    resolve_context_window,
)

_ROOT = Path(__file__).resolve().parents[1]
_GEMINI, _CLAUDE, _GPT_4O = 1_048_576, 200_000, 128_000
_REAL = LitellmRegistry()


class FakeRegistry:
    """A registry that gives one answer, or raises it."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def context_window(self, model: str) -> int | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return cast("int | None", self.answer)


@pytest.fixture
def warnings_logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Captures the module's log."""
    caplog.set_level(logging.WARNING, logger="contextguard_adk.providers.windows")
    return caplog


def chat(max_input_tokens: object = None, **more: object) -> dict[str, object]:
    """Builds an entry of a chat model."""
    entry = {"mode": "chat", "max_input_tokens": max_input_tokens, **more}
    return {name: value for name, value in entry.items() if value is not None}


def registry_of(tmp_path: Path, table: object) -> LitellmRegistry:
    """Builds a registry that reads `table` from a file."""
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    return LitellmRegistry(path)


def use_fake_litellm(monkeypatch: pytest.MonkeyPatch, **attributes: object) -> None:
    """Puts a module named litellm, with only these attributes, into `sys.modules`."""
    module = types.ModuleType("litellm")
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, "litellm", module)


# --- names in litellm's own table ---

_FLASH = "gemini-2.5-flash"
_SONNET = "claude-sonnet-4-5"
_VERTEX = "projects/p/locations/l/publishers"
_ARN = "arn:aws:bedrock:us-east-1:123456789012"


@pytest.mark.parametrize(
    ("model", "window_tokens"),
    [
        (_FLASH, _GEMINI),
        (f"models/{_FLASH}", _GEMINI),
        (f"{_VERTEX}/google/models/{_FLASH}", _GEMINI),
        (f"{_VERTEX}/google/models/{_FLASH}-001", _GEMINI),
        (f"gemini/{_FLASH}", _GEMINI),
        (f"vertex_ai/{_FLASH}", _GEMINI),
        (f"{_FLASH}-preview-09-2025", _GEMINI),
        (f"{_FLASH}-001", _GEMINI),
        (f"{_FLASH}-latest", _GEMINI),
        ("Gemini-2.5-Flash", _GEMINI),
        (" gemini-2.5-flash ", _GEMINI),
        (f"apigee/v1/{_FLASH}", _GEMINI),
        (f"apigee/vertex_ai/v1beta/{_FLASH}", _GEMINI),
        ("apigee/openai/v1/gpt-4o", _GPT_4O),
        ("gemma-3-27b-it", 131_072),
        ("gpt-4o", _GPT_4O),
        ("openai/gpt-4o", _GPT_4O),
        ("gpt-4o-2024-08-06", _GPT_4O),
        ("openai/gpt-4o-2031-01-31", _GPT_4O),
        ("gpt-4", 8_192),
        ("azure/gpt-4o", _GPT_4O),
        ("openrouter/openai/gpt-4o", _GPT_4O),
        ("openrouter/google/gemini-2.5-pro:online", _GEMINI),
        ("openai/ft:gpt-4o-2024-08-06:acme::abc123", _GPT_4O),
        (_SONNET, _CLAUDE),
        (f"{_SONNET}-20250929", _CLAUDE),
        (f"{_SONNET}-20310131", _CLAUDE),
        ("anthropic/claude-3-haiku-latest", _CLAUDE),
        ("litellm_proxy/anthropic/claude-sonnet-4.5", _CLAUDE),
        (f"vertex_ai/{_SONNET}@20250929", _CLAUDE),
        (f"{_VERTEX}/anthropic/models/{_SONNET}@20250929", _CLAUDE),
        (f"bedrock/us.anthropic.{_SONNET}-20250929-v1:0", _CLAUDE),
        (f"bedrock/zz.anthropic.{_SONNET}-20250929-v1:0", _CLAUDE),
        (f"bedrock/us-gov.anthropic.{_SONNET}-20310131-v1:0:48k", _CLAUDE),
        (f"bedrock/converse/apac.anthropic.{_SONNET}-20250929-v1:0", _CLAUDE),
        (f"bedrock/us-east-1/anthropic.{_SONNET}-20250929-v1:0", _CLAUDE),
        (f"bedrock/{_ARN}:inference-profile/us.anthropic.{_SONNET}", _CLAUDE),
        ("bedrock/us.meta.llama3-1-70b-instruct-v1:0", 128_000),
        ("ollama_chat/llama3.1:8b", 8_192),
        ("openrouter/meta-llama/llama-3.3-70b-instruct:free", 128_000),
    ],
    ids=str,
)
def test_real_names_resolve(model: str, window_tokens: int) -> None:
    """Names as ADK users write them find their entry in litellm's table."""
    assert _REAL.context_window(model) == window_tokens


@pytest.mark.parametrize(
    "model",
    [
        "",
        "/",
        ":free",
        "sample_spec",
        "my-own-model",
        "openai/smollm2",
        "azure/my-deployment",
        "ft:unknown",
        "gemini-latest",
        "projects/p/locations/l/endpoints/1234567890",
        f"bedrock/{_ARN}:application-inference-profile/abc123",
        "text-embedding-3-small",
        "dall-e-3",
        "groq/llama-prompt-guard-2-22m",
    ],
    ids=repr,
)
def test_real_unknown_names_stay_unknown(model: str) -> None:
    """Deployments, endpoints, families and models that do not chat have no window."""
    assert _REAL.context_window(model) is None
    assert not _REAL.supports_reasoning(model)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gemini-2.5-flash", True),
        ("openrouter/anthropic/claude-sonnet-4.5", True),
        ("openai/gpt-5", True),
        ("gpt-4o", False),
        ("my-own-model", False),
    ],
)
def test_reasoning_flag(model: str, expected: bool) -> None:
    """The same lookup tells which models think."""
    assert _REAL.supports_reasoning(model) is expected


# --- odd tables ---


@pytest.mark.parametrize(
    ("entry", "window_tokens"),
    [
        pytest.param(chat(5_000), 5_000, id="number"),
        pytest.param(chat(1_000), 1_000, id="smallest"),
        pytest.param(chat(999), None, id="too-small"),
        pytest.param(chat(0), None, id="zero"),
        pytest.param(chat(-5_000), None, id="negative"),
        pytest.param(chat("5000", max_tokens=9_000), None, id="string"),
        pytest.param(chat(True), None, id="bool"),
        pytest.param(chat(5_000.0), None, id="float"),
        pytest.param(chat([5_000]), None, id="list"),
        pytest.param(chat(max_tokens=8_000), 8_000, id="max-tokens-large"),
        pytest.param(chat(max_tokens=7_999), None, id="max-tokens-output-cap"),
        pytest.param(chat(max_tokens=9_000, mode="responses"), None, id="no-chat"),
        pytest.param(chat(5_000, mode="responses"), 5_000, id="responses"),
        pytest.param(chat(5_000, mode="completion"), 5_000, id="completion"),
        pytest.param(chat(5_000, mode="embedding"), None, id="embedding"),
        pytest.param(chat(5_000, mode=["chat"]), None, id="mode-list"),
        pytest.param(chat(5_000, mode=None), None, id="mode-missing"),
        pytest.param("chat", None, id="entry-string"),
        pytest.param(None, None, id="entry-null"),
    ],
)
def test_odd_entries(tmp_path: Path, entry: object, window_tokens: int | None) -> None:
    """Only whole numbers of at least 1,000 tokens, of models that chat, count."""
    registry = registry_of(tmp_path, {"m-1": entry, "other": chat(9_000)})
    assert registry.context_window("m-1") == window_tokens


@pytest.mark.parametrize(
    ("stated", "window_tokens"),
    [
        pytest.param([32_000], 32_000, id="one"),
        pytest.param([131_072, 128_000, 131_072], 128_000, id="smallest"),
        pytest.param([4_096, 131_072, 262_144, 262_144], 131_072, id="outlier-dropped"),
        pytest.param([4_096, 1_000_000], 4_096, id="two-disagree"),
        pytest.param(
            [1_000, 2_000, 4_000], 1_000, id="half-of-the-median-is-plausible"
        ),
        pytest.param([1_000, 4_000, 4_000], 1_000, id="a-quarter-is-plausible"),
        pytest.param([1_000, 4_004, 4_004], 4_004, id="less-than-a-quarter-is-not"),
    ],
)
def test_several_providers(
    tmp_path: Path, stated: list[int], window_tokens: int
) -> None:
    """Of several providers of one name the smallest plausible window is taken."""
    table = {f"p{i}/vendor/M-1": chat(tokens) for i, tokens in enumerate(stated)}
    assert registry_of(tmp_path, table).context_window("x/m-1") == window_tokens


@pytest.mark.parametrize(
    ("model", "window_tokens"),
    [
        pytest.param("a/m-1", 11_000, id="own-provider"),
        pytest.param("proxy/a/m-1", 11_000, id="provider-below-a-prefix"),
        pytest.param("m-1", 12_000, id="bare-is-google"),
        pytest.param("proxy/m-1", 10_000, id="any-provider"),
        pytest.param("m-2", 20_000, id="bare-entry-before-google"),
        pytest.param("proxy/m-2", 20_000, id="bare-entry-before-any-provider"),
        pytest.param("a/m-3-20250101", 31_000, id="dated-entry"),
        pytest.param("a/m-3-20260101", 30_000, id="other-date-smallest-of-all-dates"),
        pytest.param("a/m-3:8b", 30_000, id="tag"),
        pytest.param("m.3", 30_000, id="dot-for-dash"),
        pytest.param("m-4-preview-001", 40_000, id="two-suffixes"),
        pytest.param("m-4-8192", None, id="digits-that-are-no-date"),
        pytest.param("m-4-turbo", None, id="variant-is-another-model"),
        pytest.param("r1", None, id="short-stem-is-no-model"),
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


def test_reasoning_of_several_providers(tmp_path: Path) -> None:
    """A model thinks if any provider says so; only a true `true` counts."""
    table = {
        "a/m-1": chat(9_000, supports_reasoning=True),
        "b/m-1": chat(9_000),
        "b/m-2": chat(9_000, supports_reasoning="yes"),
    }
    registry = registry_of(tmp_path, table)
    assert registry.supports_reasoning("x/m-1")
    assert not registry.supports_reasoning("b/m-1")
    assert not registry.supports_reasoning("b/m-2")


# --- reading the table ---


@pytest.mark.parametrize(
    "content",
    [None, b"{", b"\xff\xfe\x00", b"[]", b"{}", b'{"m": {"mode": "embedding"}}'],
    ids=["missing", "broken", "not-utf8", "no-object", "empty", "no-chat-models"],
)
def test_unusable_file_falls_back_to_litellm(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warnings_logged: pytest.LogCaptureFixture,
    content: bytes | None,
) -> None:
    """Without a usable file litellm's own table answers, and one warning says so."""
    use_fake_litellm(monkeypatch, model_cost={"a/m-1": chat(9_000)})
    path = tmp_path / "table.json"
    if content is not None:
        path.write_bytes(content)
    registry = LitellmRegistry(path)
    assert registry.context_window("proxy/m-1") == 9_000
    assert registry.context_window("proxy/m-2") is None
    assert [record.levelname for record in warnings_logged.records] == ["WARNING"]


@pytest.mark.parametrize("attributes", [{}, {"model_cost": None}], ids=str)
def test_broken_litellm_means_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attributes: dict[str, object]
) -> None:
    """Where neither the file nor litellm can be used every model is unknown."""
    use_fake_litellm(monkeypatch, **attributes)
    assert LitellmRegistry(tmp_path / "none.json").context_window("gpt-4o") is None


_OFFLINE_SCRIPT = """
import socket, sys

def refuse(*args, **kwargs):
    raise AssertionError("network")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from contextguard_adk.providers import windows
found = windows.resolve_context_window("openrouter/openai/gpt-4o")
assert found == windows.ResolvedWindow(128_000, "registry"), found
assert windows.resolve_context_window("nobody-knows").source == "default"
loaded = [name for name in sys.modules if name.partition(".")[0] == "litellm"]
assert not loaded, loaded
"""


_MISSING_SCRIPT = """
import sys, importlib.util

importlib.util.find_spec = lambda name: None
sys.modules["litellm"] = None
from contextguard_adk.providers.windows import LitellmRegistry
assert LitellmRegistry().context_window("gpt-4o") is None
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(_OFFLINE_SCRIPT, id="no-network"),
        pytest.param(_MISSING_SCRIPT, id="no-litellm", marks=pytest.mark.slow),
    ],
)
def test_fresh_interpreter_resolves(script: str) -> None:
    """Resolving imports no litellm, uses no network, and survives without either."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- resolving ---


@pytest.mark.parametrize(
    ("configured", "answer", "expected"),
    [
        (5_000, RuntimeError("asked"), ResolvedWindow(5_000, "configured")),
        (None, 9_000, ResolvedWindow(9_000, "registry")),
        (None, None, ResolvedWindow(128_000, "default")),
    ],
    ids=["configured", "registry", "default"],
)
def test_order_of_sources(
    configured: int | None, answer: object, expected: ResolvedWindow
) -> None:
    """The setting wins over the registry, the registry over the default."""
    registry: ModelRegistry = FakeRegistry(answer)
    resolved = resolve_context_window("m", configured=configured, registry=registry)
    assert resolved == expected


def test_default_registry_is_litellms() -> None:
    """Without a registry litellm's table answers; a falsy one is asked all the same."""
    assert resolve_context_window("gpt-4o") == ResolvedWindow(_GPT_4O, "registry")
    falsy = type("Falsy", (FakeRegistry,), {"__len__": lambda _: 0})(9_000)
    assert resolve_context_window("gpt-4o", registry=falsy).tokens == 9_000


@pytest.mark.parametrize("agent", ["writer", ""])
def test_unknown_model_warns_once_and_names_the_setting(
    warnings_logged: pytest.LogCaptureFixture, agent: str
) -> None:
    """Each unknown model gets one warning, with the default and the setting to set."""
    first, second = f"unknown-1-{agent}", f"unknown-2-{agent}"
    for model in (first, first, second, first):
        resolved = resolve_context_window(
            model, registry=FakeRegistry(None), agent=agent
        )
        assert resolved.tokens == DEFAULT_CONTEXT_WINDOW
    assert len(warnings_logged.messages) == 2
    for model, text in zip((first, second), warnings_logged.messages, strict=True):
        assert repr(model) in text
        assert "128000" in text
        assert f'agents={{"{agent or "<agent>"}": Threshold(context_win' in text


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(0, id="zero"),
        pytest.param(-1, id="negative"),
        pytest.param(True, id="bool"),
        pytest.param("128000", id="string"),
        pytest.param(128_000.0, id="float"),
        pytest.param(RuntimeError("no such table"), id="raises"),
    ],
)
def test_broken_registry_counts_as_unknown(
    warnings_logged: pytest.LogCaptureFixture, answer: object
) -> None:
    """What a registry cannot say properly is logged once and means the default."""
    model = f"broken {answer!r}"
    for _ in range(3):
        resolved = resolve_context_window(model, registry=FakeRegistry(answer))
        assert resolved == ResolvedWindow(DEFAULT_CONTEXT_WINDOW, "default")
    broken, unknown = warnings_logged.messages
    assert repr(answer) in broken
    assert "unknown" in unknown


# --- budgets ---


@pytest.mark.parametrize(
    ("window", "buffer", "threshold", "summary", "summarizer_input"),
    [
        (1_000_000, 20_000, 980_000, 10_000, 800_000),
        (200_000, 20_000, 180_000, 10_000, 160_000),
        (199_999, 39_999, 160_000, 19_999, 159_999),
        (128_000, 25_600, 102_400, 12_800, 102_400),
        (32_000, 6_400, 25_600, 3_200, 25_600),
        (8_000, 1_600, 6_400, 800, 6_400),
        (4_000, 800, 3_200, 400, 3_200),
        (1, 0, 1, 0, 0),
    ],
    ids=lambda value: f"{value}",
)
def test_budgets_of_a_window(
    window: int, buffer: int, threshold: int, summary: int, summarizer_input: int
) -> None:
    """Each window has the documented buffer, threshold and summary budgets."""
    assert buffer_tokens(window) == buffer
    assert threshold_tokens(window) == threshold
    assert summary_budget_tokens(window) == summary
    assert summarizer_input_tokens(window) == summarizer_input


@pytest.mark.parametrize(
    ("window", "reserved", "buffer"),
    [
        pytest.param(200_000, 8_192, 20_000, id="below-the-buffer"),
        pytest.param(200_000, 64_000, 64_000, id="above-the-buffer"),
        pytest.param(200_000, 150_000, 100_000, id="at-most-half"),
        pytest.param(8_000, 8_000, 4_000, id="whole-window-reserved"),
        pytest.param(8_000, -1, 1_600, id="negative-is-none"),
    ],
)
def test_reserved_output_widens_the_buffer(
    window: int, reserved: int, buffer: int
) -> None:
    """What the request reserves for its output stays free, up to half the window."""
    assert buffer_tokens(window, reserved) == buffer
    assert threshold_tokens(window, reserved) == window - buffer


@given(st.integers(1, 10_000_000), st.integers(0, 10_000_000))
def test_budgets_always_fit_the_window(window: int, reserved: int) -> None:
    """The threshold lies in the window, at least at its half; a summary fits below."""
    threshold = threshold_tokens(window, reserved)
    assert window / 2 <= threshold <= window
    assert buffer_tokens(window, reserved) + threshold == window
    assert 2 * summary_budget_tokens(window) <= threshold
    assert summarizer_input_tokens(window) <= window
