"""What calls and summaries take and cost: prices, usage, what records say of them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from google.genai import types

from contextguard_adk import (
    CallRecord,
    Compaction,
    CompactionContext,
    CompactionRecord,
    Costs,
    Strategy,
    Threshold,
    Usage,
)
from contextguard_adk._providers.clients import read_usage
from contextguard_adk._providers.costs import add_costs, price_calls
from contextguard_adk._providers.windows import LitellmRegistry, resolve_costs
from contextguard_adk.telemetry import format_cost
from contextguard_adk.testing import Reply, SimulatedLlm
from tests.builders import user
from tests.chats import DEMAND, guarded_chat, seed, text_of, words

KNOWN = {
    "gpt-4o": (2.5, 10, 1.25),
    "openrouter/openai/gpt-4o-mini": (0.15, 0.6, 0.075),
    "gpt-4-turbo": (10, 30, None),
    "o3": (2, 8, 0.5),
    "anthropic/claude-sonnet-4-5": (3, 15, 0.3),
    "claude-haiku-4-5-20251001": (1, 5, 0.1),
    "gemini-2.5-pro": (1.25, 10, 0.125),
    "gemini-2.5-flash": (0.3, 2.5, 0.03),
    "deepseek/deepseek-chat": (0.28, 0.42, 0.028),
    "gemini/gemini-2.5-flash-001": (0.3, 2.5, 0.03),
    "vertex_ai/claude-sonnet-4-5": (3, 15, 0.3),
    "ollama_chat/llama3.1": (0, 0, None),
}


@pytest.mark.parametrize(("model", "prices"), KNOWN.items(), ids=KNOWN)
def test_the_table_has_the_list_prices(
    model: str, prices: tuple[float, float, float | None]
) -> None:
    """In dollars per million tokens; the figures are those of litellm 1.106."""
    input_price, output_price, cached = prices
    expected = Costs(input=input_price, output=output_price, cached_input=cached)
    assert LitellmRegistry().costs(model) == expected


def priced(input_price: object, output_price: object = 2e-6) -> dict[str, object]:
    """An entry of the table with prices per token."""
    return {
        "mode": "chat",
        "max_input_tokens": 8_000,
        "input_cost_per_token": input_price,
        "output_cost_per_token": output_price,
    }


@pytest.mark.parametrize(
    ("entries", "input_price"),
    [
        pytest.param([priced(1e-6)], 1, id="one"),
        pytest.param([priced(0.0)], None, id="nobody entered it"),
        pytest.param([priced(1e-6, 0.0)], None, id="nor that of the output"),
        pytest.param([priced(1e-6), priced(1e-6)], 1, id="several agree"),
        pytest.param([priced(1e-6), priced(2e-6)], None, id="several differ"),
        pytest.param([priced(1e-6), priced(0.0)], None, id="one is not entered"),
        pytest.param([{"mode": "chat", "max_tokens": 8_000}], None, id="no prices"),
        pytest.param([priced("free")], None, id="no number"),
        pytest.param([priced(-1.0)], None, id="negative"),
    ],
)
def test_prices_are_known_or_not(
    tmp_path: Path, entries: list[object], input_price: float | None
) -> None:
    """Where providers ask different prices, none of them is guessed."""
    table = {f"provider-{n}/in-house": entry for n, entry in enumerate(entries)}
    (path := tmp_path / "table.json").write_text(json.dumps(table))
    costs = LitellmRegistry(path).costs("in-house")
    assert (costs and costs.input) == input_price
    assert (costs is None) == (input_price is None)


FOREIGN = ("together_ai/mistral", "groq/llama3.1", "azure/llama2", "xai/grok-4")


@pytest.mark.parametrize("model", FOREIGN)
def test_a_provider_that_is_not_in_the_table_has_no_prices(model: str) -> None:
    """Those of others are not its own; the window is."""
    registry = LitellmRegistry()
    assert registry.context_window(model)
    assert registry.costs(model) is None


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
        pytest.param("own-model", RuntimeError("not asked"), CHEAP, id="own prices"),
        pytest.param("gpt-4o", CHEAP, CHEAP, id="own registry"),
        pytest.param("gpt-4o", None, None, id="it does not know"),
        pytest.param("priced-in-euros", 3.5, None, id="no prices"),
        pytest.param("down-model", RuntimeError("down"), None, id="it fails"),
    ],
)
def test_order_of_sources(
    model: str,
    answer: object,
    expected: Costs | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The user's prices, then the registry; one that fails is one warning."""
    prices, registry = {"own-model": CHEAP}, OwnRegistry(answer)
    for _ in range(2):
        assert resolve_costs(model, prices, registry) == expected
    is_odd = expected is None and answer is not None
    assert caplog.text.count(f"gave no prices for '{model}'") == is_odd
    assert resolve_costs("nobody-knows-it", {}, None) is None


def test_what_tokens_cost() -> None:
    """Cached ones cost what `input` says where nothing else is said."""
    usage = Usage(1_000_000, 400_000, 100_000)
    assert CHEAP.price(usage) == pytest.approx(0.6 + 0.04 + 0.8)
    assert Costs(input=1, output=8).price(usage) == pytest.approx(1.8)
    assert price_calls([usage, usage], CHEAP) == pytest.approx(2 * 1.44)
    assert price_calls([usage], None) is None
    assert price_calls([usage, Usage()], CHEAP) is None
    assert price_calls([], None) == 0
    assert add_costs([1.5, 0.25]) == 1.75
    assert add_costs([1.5, None]) is None
    amounts = [None, 0.0, 0.00002, 1234.5]
    shown = ["unknown", "$0.0000", "<$0.0001", "$1,234.5000"]
    assert [format_cost(dollars) for dollars in amounts] == shown


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        pytest.param({}, Usage(), id="nothing"),
        pytest.param(
            {"prompt": 900, "cached_content": 700, "candidates": 20, "total": 920},
            Usage(900, 700, 20),
            id="no thoughts",
        ),
        pytest.param(
            {"prompt": 900, "candidates": 20, "thoughts": 50, "total": 970},
            Usage(900, 0, 70),
            id="thoughts beside: Gemini, Claude",
        ),
        pytest.param(
            {"prompt": 900, "candidates": 70, "thoughts": 50, "total": 970},
            Usage(900, 0, 70),
            id="thoughts within: LiteLLM",
        ),
        pytest.param(
            {"prompt": 9, "tool_use_prompt": 4, "candidates": 2, "total": 15},
            Usage(13, 0, 2),
            id="results of built-in tools",
        ),
        pytest.param(
            {"prompt": 900, "candidates": 20, "thoughts": 50},
            Usage(900, 0, 70),
            id="no total",
        ),
        pytest.param(
            {"prompt": 100, "cached_content": 700, "candidates": 20, "total": 100},
            Usage(700, 700, 20),
            id="what a cache held is left out",
        ),
    ],
)
def test_usage_of_clients(counts: dict[str, int], expected: Usage) -> None:
    """However a client counts thoughts, they are output once."""
    named: Any = {f"{name}_token_count": count for name, count in counts.items()}
    reported = types.GenerateContentResponseUsageMetadata(**named)
    assert read_usage(reported) == expected
    assert read_usage(None) == Usage()


GOOD = "## Current State\nThe budget is 4,711 EUR; the old press stands in hall B.\n"


class Paid:
    """A chat whose history was compacted on demand, and what was heard of it."""

    def __init__(
        self,
        *replies: Reply,
        strategy: Strategy | None = None,
        prices: dict[str, Costs] | None = None,
        **settings: Any,
    ) -> None:
        self.writer = SimulatedLlm(
            model="writer", summary_replies=list(replies), **settings
        )
        self.llm = SimulatedLlm(model="talker", **settings)
        self.calls: list[CallRecord] = []
        self.compactions: list[CompactionRecord] = []
        strategy = strategy or Threshold(context_window=8_000)
        guard = {
            "on_call": self.calls.append,
            "on_compaction": self.compactions.append,
            "prices": {"writer": CHEAP} if prices is None else prices,
        }
        update = {"summarizer": self.writer}
        self.chat = guarded_chat(
            self.llm, strategy.model_copy(update=update), guard=guard
        )

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


async def test_a_record_sums_all_summary_calls() -> None:
    """What was no summary was paid for, too; calls that were refused were not."""
    paid = Paid("I cannot help with that.", GOOD)
    await paid.talk()
    (record,) = paid.compactions
    first, second = paid.answered
    assert (record.model, record.usage) == ("writer", first + second)
    assert record.cost == pytest.approx(CHEAP.price(first + second))
    assert min(vars(first).values()) == 0 < first.output_tokens
    compacted, later = paid.calls
    told = compacted.summary_usage, compacted.summary_cost
    assert told == (record.usage, record.cost)
    assert (later.summary_usage, later.summary_cost) == (Usage(), 0.0)


async def test_a_call_tells_what_it_took() -> None:
    """Tokens and price of the agent's own request."""
    prices = {"writer": CHEAP, "talker": Costs(input=2, output=4)}
    paid = Paid(GOOD, prices=prices, prompt_cache=True)
    await paid.talk()
    for record, request in zip(paid.calls, paid.llm.requests, strict=True):
        assert request.response
        assert record.usage == read_usage(request.response.usage_metadata)
        assert record.usage.prompt_tokens == record.real_tokens
        assert record.model == "talker"
        assert record.cost == pytest.approx(prices["talker"].price(record.usage))
    assert paid.calls[-1].usage.cached_tokens > 0


async def test_an_unknown_price_is_never_zero(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor is what a provider does not report; tokens are told as far as known."""
    caplog.set_level(logging.INFO, "contextguard_adk")
    paid = Paid(GOOD, prices={})
    await paid.talk()
    (record,) = paid.compactions
    assert (record.usage, record.cost) == (paid.answered[0], None)
    assert [call.cost for call in paid.calls] == [None, None]
    assert [call.summary_cost for call in paid.calls] == [None, 0.0]
    assert "by writer, cost unknown;" in caplog.text
    silent = Paid(GOOD, usage="never")
    await silent.talk()
    (record,) = silent.compactions
    assert (record.model, record.usage, record.cost) == ("writer", Usage(), None)
    assert (silent.calls[0].usage, silent.calls[0].cost) == (Usage(), None)


async def test_a_mechanical_summary_costs_nothing() -> None:
    """A model was asked, but it answered nothing that could have been billed."""
    paid = Paid(RuntimeError("down"))
    await paid.talk()
    (record,) = paid.compactions
    assert record.is_mechanical
    assert (record.model, record.usage, record.cost) == ("writer", Usage(), 0.0)


class Wasteful(Strategy):
    """Pays for summaries that come to nothing, as the newest message tells it to."""

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Has a summary written, and drops it or fails."""
        told = text_of(context.view.contents[-1])
        if "Pay" in told:
            await context.summarize(context.older_than(1))
        if "fail" in told:
            raise RuntimeError
        return None


async def test_what_came_to_nothing_is_told_with_a_call() -> None:
    """There is no compaction to tell of it, and yet no dollar is lost from the sum."""
    paid = Paid(GOOD, GOOD, strategy=Wasteful(context_window=8_000))
    await seed(paid.chat, user(words(3_000)))
    for message in ("Pay.", "Pay and fail.", "Go on."):
        await paid.chat.say(message)
    assert not paid.compactions
    # The call for which the guard had failed is none of its own; the next one tells.
    assert [call.summary_usage for call in paid.calls] == paid.answered
    costs = [CHEAP.price(usage) for usage in paid.answered]
    assert [call.summary_cost for call in paid.calls] == pytest.approx(costs)
    assert min(costs) > 0
