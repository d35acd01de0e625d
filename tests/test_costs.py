"""What calls and summaries take and cost: prices, usage, what records say of them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from google.genai import types

from contextguard_adk import CallRecord, CompactionRecord, Costs, Threshold
from contextguard_adk._providers.clients import read_usage
from contextguard_adk._providers.costs import add_costs, price_calls
from contextguard_adk._providers.registry import LitellmRegistry, resolve_costs
from contextguard_adk.records import Usage, format_cost
from contextguard_adk.testing import Reply, SimulatedLlm
from tests.builders import user
from tests.chats import DEMAND, guarded_chat, seed, words

REAL = LitellmRegistry()
KNOWN = {
    "gpt-5.4-mini": (0.75, 4.5, 0.075),
    "command-r-08-2024": (0.15, 0.6, None),
    "claude-haiku-4-5-20251001": (1, 5, 0.1),
    "gemini/gemini-3.8-flash-001": (0.75, 3.75, 0.075),
    "vertex_ai/claude-sonnet-5-5": (2, 10, 0.1),
    "ollama_chat/llama3.1": (0, 0, None),
    # A provider that is not in the table has a window, but not the prices of others.
    **dict.fromkeys(("together_ai/mistral", "xai/grok-4")),
}


@pytest.mark.parametrize(("model", "prices"), KNOWN.items(), ids=KNOWN)
def test_the_table_has_the_list_prices(
    model: str, prices: tuple[float, float, float | None] | None
) -> None:
    """In dollars per million tokens; the figures are those of litellm 1.110."""
    found = REAL.costs(model)
    assert (found and (found.input, found.output, found.cached_input)) == prices
    assert REAL.context_window(model)


class OwnRegistry:
    """A registry of the user's own; `costs` answers with what it is made with."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def context_window(self, model: str) -> int | None:
        """Returns a window."""
        return 8_000

    def costs(self, model: str) -> Any:
        """Returns the answer, or raises it."""
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


CHEAP = Costs(input=1, output=8, cached_input=0.1)


@pytest.mark.parametrize(
    ("model", "answer", "expected"),
    [
        ("own-model", RuntimeError("not asked"), CHEAP),
        ("gpt-5.4-mini", CHEAP, CHEAP),
        ("priced-in-euros", 3.5, None),
        ("down-model", RuntimeError("down"), None),
    ],
    ids=["own prices", "own registry", "no prices", "fails"],
)
def test_order_of_sources(
    caplog: pytest.LogCaptureFixture, model: str, answer: object, expected: Costs | None
) -> None:
    """The user's prices, then the registry; one that fails is one warning."""
    for _ in range(2):
        found = resolve_costs(model, {"own-model": CHEAP}, OwnRegistry(answer))
        assert found == expected
    assert caplog.text.count(f"gave no prices for '{model}'") == (expected is None)
    assert resolve_costs("nobody-knows-it", {}, None) is None


def test_what_tokens_cost() -> None:
    """Cached ones cost what `input` says where nothing else is said."""
    usage = Usage(1_000_000, 400_000, 100_000)
    assert CHEAP.price(usage) == pytest.approx(0.6 + 0.04 + 0.8)
    assert Costs(input=1, output=8).price(usage) == pytest.approx(1.8)
    assert price_calls([usage, usage], CHEAP) == pytest.approx(2 * 1.44)
    assert price_calls([usage], None) is price_calls([usage, Usage()], CHEAP) is None
    assert price_calls([], None) == 0
    assert (add_costs([1.5, 0.25]), add_costs([1.5, None])) == (1.75, None)

    shown = [format_cost(dollars) for dollars in (None, 0.0, 0.00002, 1234.5)]
    assert shown == ["unknown", "$0.0000", "<$0.0001", "$1,234.5000"]


def test_long_prompts_cost_what_their_tier_says() -> None:
    """All tokens of a call cost the prices of the tier that its prompt reaches."""
    found = REAL.costs("gemini/gemini-pro-latest")
    assert found
    assert found.price(Usage(200_000)) == pytest.approx(0.4)
    assert found.price(Usage(1_028_576)) == pytest.approx(4.114304)
    usage = Usage(300_000, 100_000, 10_000)
    assert found.price(usage) == pytest.approx(0.8 + 0.04 + 0.18)
    # Two calls below the limit are not one above it.
    assert price_calls([Usage(150_000)] * 2, found) == pytest.approx(0.6)


TIERS = {
    "input_cost_per_token": 1e-6,
    "output_cost_per_token": 2e-6,
    "cache_read_input_token_cost": 1e-7,
    "input_cost_per_token_above_32k_tokens": 3e-6,
    "input_cost_per_token_above_256k_tokens": 5e-6,
    "output_cost_per_token_above_256k_tokens": 8e-6,
    "input_cost_per_token_above_256k_tokens_batches": 9e-6,
}


def test_a_model_may_have_several_tiers(tmp_path: Path) -> None:
    """A tier that names no price of its own has that of the one below."""
    row = {"mode": "chat", "max_input_tokens": 1_000_000, **TIERS}
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"tiered": row}))
    most = Costs(input=5, output=8, cached_input=0.1)
    middle = Costs(
        input=3, output=2, cached_input=0.1, above=most, above_tokens=256_000
    )

    assert LitellmRegistry(table).costs("tiered") == Costs(
        input=1, output=2, cached_input=0.1, above=middle, above_tokens=32_000
    )


NAMES = (
    "prompt",
    "cached_content",
    "candidates",
    "thoughts",
    "total",
    "tool_use_prompt",
)
USAGES: dict[str, tuple[tuple[int, ...], Usage]] = {
    "nothing": ((), Usage()),
    "no thoughts": ((900, 700, 20, 0, 920), Usage(900, 700, 20)),
    "thoughts beside: Gemini, Claude": ((900, 0, 20, 50, 970), Usage(900, 0, 70)),
    "thoughts within: LiteLLM": ((900, 0, 70, 50, 970), Usage(900, 0, 70)),
    "results of built-in tools": ((9, 0, 2, 0, 15, 4), Usage(13, 0, 2)),
    "what a cache held is left out": ((100, 700, 20, 0, 100), Usage(700, 700, 20)),
    "below zero": ((-900, -700, -20, -5, -920, -4), Usage()),
    "a cache below zero": ((900, -700, 20, 0, 920), Usage(900, 0, 20)),
    "output below zero": ((900, 0, -1, -1, 0), Usage(900, 0, 0)),
    "a prompt below zero": ((-1, 0, 20, 50, 970), Usage(0, 0, 70)),
    "a total alone": ((0, 0, 0, 0, 970), Usage()),
}


@pytest.mark.parametrize(("counts", "expected"), USAGES.values(), ids=USAGES)
def test_usage_of_clients(counts: tuple[int, ...], expected: Usage) -> None:
    """However a client counts thoughts, they are output once."""
    pairs = zip(NAMES, counts, strict=False)
    named: Any = {f"{name}_token_count": count or None for name, count in pairs}
    assert read_usage(types.GenerateContentResponseUsageMetadata(**named)) == expected
    assert read_usage(None) == Usage()


GOOD = "## Current State\nThe budget is 4,711 EUR; the old press stands in hall B.\n"


class Paid:
    """A chat whose history was compacted on demand, and what was heard of it."""

    def __init__(
        self,
        *replies: Reply,
        prices: dict[str, Costs] | None = None,
        timeout_seconds: float = 60,
        **settings: Any,
    ) -> None:
        said = list(replies)
        self.writer = SimulatedLlm(model="writer", summary_replies=said, **settings)
        self.llm = SimulatedLlm(model="talker", **settings)
        self.calls: list[CallRecord] = []
        self.compactions: list[CompactionRecord] = []

        guard = {
            "on_call": self.calls.append,
            "on_compaction": self.compactions.append,
            "prices": {"writer": CHEAP} if prices is None else prices,
        }
        strategy = Threshold(
            context_window=8_000,
            summarizer=self.writer,
            summary_timeout_seconds=timeout_seconds,
        )
        self.chat = guarded_chat(self.llm, strategy, guard=guard)

    async def talk(self) -> None:
        """Has two turns, the first with a compaction."""
        await seed(self.chat, user(words(3_000)), state=DEMAND)
        await self.chat.say("Go on.")
        await self.chat.say("And on.")

    @property
    def answered(self) -> list[Usage]:
        """What the provider reported for each answer of the summarizer."""
        answers = (each.response for each in self.writer.requests)
        return [read_usage(each.usage_metadata) for each in answers if each]


async def test_records_tell_what_calls_and_summaries_took() -> None:
    """Tokens and price of the agent's own requests, and of all summary calls."""
    prices = {"writer": CHEAP, "talker": Costs(input=2, output=4)}
    paid = Paid("I cannot help with that.", GOOD, prices=prices, prompt_cache=True)
    await paid.talk()
    (record,) = paid.compactions
    first, second = paid.answered
    assert (record.model, record.usage) == ("writer", first + second)
    assert record.cost == pytest.approx(CHEAP.price(first + second))
    assert first.output_tokens > 0

    told = [(call.summary_usage, call.summary_cost) for call in paid.calls]
    assert told == [(record.usage, record.cost), (Usage(), 0.0)]

    for call, request in zip(paid.calls, paid.llm.requests, strict=True):
        assert request.response
        assert call.usage == read_usage(request.response.usage_metadata)
        assert call.usage.prompt_tokens == call.real_tokens
        assert call.model == "talker"
        assert call.cost == pytest.approx(prices["talker"].price(call.usage))

    assert paid.calls[-1].usage.cached_tokens > 0


async def test_an_unknown_price_is_never_zero(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor is what a provider does not report; tokens are told as far as known."""
    caplog.set_level(logging.INFO, "contextguard_adk")
    unknown = Paid(GOOD, prices={})
    silent = Paid(GOOD, usage="never")
    down = Paid(RuntimeError("down"))
    late = Paid(GOOD, timeout_seconds=0.01)
    late.writer.latency_seconds = 60
    failed = (down, late)

    for paid in (unknown, silent, *failed):
        await paid.talk()
        assert [record.model for record in paid.compactions] == ["writer"]
        assert paid.compactions[0].is_mechanical is (paid in failed)

    taken = [
        (paid.compactions[0].usage, paid.compactions[0].cost)
        for paid in (unknown, silent, *failed)
    ]
    assert taken == [(unknown.answered[0], None)] + [(Usage(), None)] * 3

    costs = [(call.cost, call.summary_cost) for call in unknown.calls]
    assert costs == [(None, None), (None, 0.0)]
    assert "by writer, cost unknown;" in caplog.text
    assert "cost $0.0000" not in caplog.text

    assert down.calls[0].summary_cost is None
    assert (silent.calls[0].usage, silent.calls[0].cost) == (Usage(), None)
