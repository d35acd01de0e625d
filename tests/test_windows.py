"""Context windows of real model names, of odd tables, and the budgets of a window."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from contextguard_adk import Costs
from contextguard_adk._measuring.budgets import (
    buffer_tokens,
    plan_budgets,
    threshold_tokens,
)
from contextguard_adk._providers.registry import (
    LitellmRegistry,
    ResolvedWindow,
    resolve_context_window,
)

REAL = LitellmRegistry()
LITELLM = importlib.util.find_spec("litellm")
assert LITELLM
assert LITELLM.origin
TABLE = Path(LITELLM.origin).with_name("model_prices_and_context_window_backup.json")


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


FLASH = "gemini-3.8-flash"
HAIKU = "claude-haiku-4-5"
VERTEX = "projects/p/locations/l/publishers"
ARN = "arn:aws:bedrock:us-east-1:123456789012"
NAMES = {
    1_048_576: f"""{FLASH} models/{FLASH} gemini/{FLASH} vertex_ai/{FLASH}
        {FLASH}-latest {FLASH}-preview-09-2025 Gemini-3.8-Flash
        {VERTEX}/google/models/{FLASH}-001
        apigee/vertex_ai/v1beta/{FLASH} openrouter/google/gemini-pro-latest:online
        gemini-flash-latest models/gemini-flash-latest gemini-flash-lite-latest
        {VERTEX}/google/models/gemini-flash-latest""",
    200_000: f"""{HAIKU}-20251001 {HAIKU}-20310131 anthropic/claude-3-haiku-latest
        litellm_proxy/anthropic/claude-haiku-4.5 vertex_ai/{HAIKU}@20251001
        {VERTEX}/anthropic/models/{HAIKU}@20251001
        bedrock/us.anthropic.{HAIKU}-20251001-v1:0
        bedrock/us-gov.anthropic.{HAIKU}-20310131-v1:0:48k
        bedrock/converse/apac.anthropic.{HAIKU}-20251001-v1:0
        bedrock/us-east-1/anthropic.{HAIKU}-20251001-v1:0
        bedrock/{ARN}:inference-profile/us.anthropic.{HAIKU}""",
    272_000: """gpt-5.4-mini azure/gpt-5.4-mini apigee/openai/v1/gpt-5.4-mini
        openai/gpt-5.4-mini-2031-01-31 openrouter/openai/gpt-5.4-mini""",
    128_000: """command-r-08-2024 bedrock/us.meta.llama3-1-70b-instruct-v1:0
        openrouter/meta-llama/llama-3.3-70b-instruct:free""",
    131_072: "gemma-3-27b-it",
    8_192: "gemma-2-9b ollama_chat/llama3.1:8b",
    None: f"""/ :free sample_spec my-own-model azure/my-deployment ft:unknown
        gemini-latest projects/p/locations/l/endpoints/1234567890
        text-embedding-3-small groq/llama-prompt-guard-2-22m
        bedrock/{ARN}:application-inference-profile/abc123""",
}
NAMED = [(name, tokens) for tokens, names in NAMES.items() for name in names.split()]


@pytest.mark.parametrize(("model", "window_tokens"), [("", None), *NAMED])
def test_real_names_resolve(model: str, window_tokens: int | None) -> None:
    """Names as ADK users write them find their entry in litellm's table."""
    assert REAL.context_window(model) == window_tokens
    assert window_tokens or not REAL.supports_reasoning(model)


def test_order_of_lookup(tmp_path: Path) -> None:
    """Exact names come first, then shorter ones, then any provider, then no suffix."""
    table = {
        "a/m-1": chat(11_000, supports_reasoning=True),
        "b/m-1": chat(10_000),
        "gemini/m-1": chat(12_000),
        "m-2": chat(20_000, supports_reasoning="yes"),
        "gemini/m-2": chat(22_000),
        "a/m-3-20250101": chat(31_000),
        "b/m-3@20240101": chat(30_000),
        "m-4": chat(40_000),
        "ft:m-5-20250101": chat(50_000),
        "deepseek.r1-v1:0": chat(50_000),
    }

    registry = registry_of(tmp_path, table)
    expected = """10000 proxy/m-1, 11000 a/m-1 proxy/a/m-1, 12000 m-1,
        20000 m-2 proxy/m-2, 30000 a/m-3-20260101 a/m-3:8b m.3, 31000 a/m-3-20250101,
        40000 m-4-preview-001, 50000 openai/ft:m-5-20250101:acme::abc123,
        None m-4-8192 m-4-turbo r1"""
    for row in expected.split(","):
        tokens, *names = row.split()
        assert {str(registry.context_window(name)) for name in names} == {tokens}

    thinking = [registry.supports_reasoning(n) for n in ("x/m-1", "b/m-1", "x/m-2")]
    assert thinking == [True, False, False]
    thinking = [
        REAL.supports_reasoning(name)
        for name in ("openai/gpt-5.2", "command-r-08-2024")
    ]
    assert thinking == [True, False]


ALIASES = {
    "m-9": chat(
        90_000,
        max_output_tokens=9_000,
        input_cost_per_token=1e-6,
        output_cost_per_token=8e-6,
        supports_reasoning=True,
    ),
    "M.Fast-latest": {"alias_of": "m-9", "mode": "chat", "max_input_tokens": 5_000},
    "cloud/m-fast-latest": {"alias_of": "M.Fast-latest"},
    "m-lost-latest": {"alias_of": "m-10"},
    "m-own-latest": {"alias_of": "m-10", "mode": "chat", "max_input_tokens": 5_000},
    "m-round-latest": {"alias_of": "m-trip-latest"},
    "m-trip-latest": {"alias_of": "m-round-latest"},
    "m-self-latest": {"alias_of": "m-self-latest"},
    "m-odd-latest": {"alias_of": ["m-9"]},
}


SPELLINGS = """m-fast-latest M-Fast-Latest m.fast-latest models/m-fast-latest
    cloud/m-fast-latest proxy/cloud/m-fast-latest"""


@pytest.mark.parametrize("model", SPELLINGS.split())
def test_an_alias_has_the_facts_of_its_model(tmp_path: Path, model: str) -> None:
    """Over other aliases, too; as in litellm, its own facts have no effect."""
    registry = registry_of(tmp_path, ALIASES)
    assert registry.context_window(model) == 90_000
    assert registry.max_output_tokens(model) == 9_000
    assert registry.costs(model) == registry.costs("m-9") == Costs(input=1, output=8)
    assert registry.supports_reasoning(model)


def test_aliases_that_lead_nowhere_are_unknown(tmp_path: Path) -> None:
    """Unless they have a window of their own; no other name of the family is known."""
    registry = registry_of(tmp_path, ALIASES)
    for name in ("lost", "round", "trip", "self", "odd"):
        assert registry.context_window(f"m-{name}-latest") is None
    assert registry.context_window("m-own-latest") == 5_000
    for model in ("m-fast", "cloud/m-fast-20250101"):
        assert registry.context_window(model) is None


def test_each_alias_of_litellm_has_the_window_of_its_model() -> None:
    """With its prices; peers' ways to write such names find them as well."""
    table = json.loads(TABLE.read_bytes())
    targets = {
        name: fields["alias_of"]
        for name, fields in table.items()
        if isinstance(fields, dict) and "alias_of" in fields
    }
    if not targets:
        pytest.skip("this litellm has no aliases")
    for name, target in targets.items():
        assert REAL.context_window(name) == table[target]["max_input_tokens"], name
        assert REAL.costs(name) == REAL.costs(target), name

    window_tokens = table[targets["claude-opus-latest"]]["max_input_tokens"]
    for model in (
        "anthropic/claude-opus-latest",
        "openrouter/anthropic/claude-opus-latest",
        "openrouter/~anthropic/claude-opus-latest",
        "bedrock/us.anthropic.claude-opus-latest",
        f"{VERTEX}/anthropic/models/claude-opus-latest",
    ):
        assert REAL.context_window(model) == window_tokens, model


OFFLINE = """
import socket, sys

def refuse(*args, **kwargs):
    raise AssertionError("network")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from contextguard_adk._providers.registry import resolve_context_window
assert resolve_context_window("openrouter/openai/gpt-5.4-mini").tokens == 272_000
assert resolve_context_window("nobody-knows").source == "default"
assert not [name for name in sys.modules if name.partition(".")[0] == "litellm"]
"""


@pytest.mark.slow
def test_fresh_interpreter_resolves() -> None:
    """Resolving imports no litellm and uses no network."""
    root = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", OFFLINE], cwd=root, check=True)


UNKNOWN = ResolvedWindow(128_000, "default")
ODD_ANSWERS = (0, True, "128000", RuntimeError("no such table"))


@pytest.mark.parametrize(
    ("configured", "answer", "expected", "warnings"),
    [
        (5_000, RuntimeError("asked"), ResolvedWindow(5_000, "configured"), 0),
        (None, 9_000, ResolvedWindow(9_000, "registry"), 0),
        (None, None, UNKNOWN, 1),
        *((None, odd, UNKNOWN, 2) for odd in ODD_ANSWERS),
    ],
)
def test_order_of_sources(
    caplog: pytest.LogCaptureFixture,
    configured: int | None,
    answer: object,
    expected: ResolvedWindow,
    warnings: int,
) -> None:
    """The setting wins over the registry, the registry over the default."""
    registry = FakeRegistry(answer)
    for model in ("m-1", "m-1", "m-2", "m-1"):
        assert expected == resolve_context_window(
            model, configured=configured, registry=registry, agent="writer"
        )

    told = caplog.messages
    assert len(told) == 2 * warnings

    if warnings == 2:
        assert repr(answer) in told[0]
    for model, text in zip(("m-1", "m-2"), told[warnings - 1 :: 2], strict=False):
        assert all(each in text for each in ("unknown", repr(model), "128000"))
        assert 'agents={"writer": Threshold(context_win' in text


@pytest.mark.parametrize(
    ("window", "reserved", "buffer", "summary"),
    [
        (1_000_000, 0, 20_000, 10_000),
        (200_000, 0, 20_000, 10_000),
        (199_999, 0, 39_999, 19_999),
        (8_000, 0, 1_600, 800),
        (1, 0, 0, 0),
        (200_000, 8_192, 20_000, 10_000),
        (200_000, 64_000, 64_000, 10_000),
        (200_000, 160_000, 150_000, 10_000),
    ],
)
def test_budgets_of_a_window(
    window: int, reserved: int, buffer: int, summary: int
) -> None:
    """Each window has the documented buffer, threshold and summary budget."""
    assert buffer_tokens(window, reserved) == buffer
    assert threshold_tokens(window, reserved) == window - buffer
    assert plan_budgets(window).summary_tokens == summary
