"""Prices of the tokens of a model, in US dollars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field

from contextguard_adk._support.settings import PositiveCount, Settings
from contextguard_adk.records import Usage

Price = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]


class Costs(Settings):
    """The prices of a model, in US dollars per million tokens.

    These are the list prices of plain calls. What a provider charges for writing to its
    prompt cache is left out.
    """

    input: Price = Field(
        description="US dollars per million prompt tokens, at least 0."
    )
    output: Price = Field(
        description="US dollars per million tokens that the model writes, its thoughts "
        "included, at least 0.",
    )
    cached_input: Price | None = Field(
        default=None,
        description="US dollars per million prompt tokens that the provider's prompt "
        "cache served, at least 0. None: they cost what `input` says.",
    )
    above: Costs | None = Field(
        default=None,
        description="What all tokens of a call cost whose prompt has more than "
        "`above_tokens`; may have an `above` of its own. None: the same.",
    )
    above_tokens: PositiveCount = Field(
        default=200_000,
        description="The prompt tokens above which `above` applies, at least 1.",
    )

    def price(self, usage: Usage) -> float:
        """Returns the price of the tokens of one call, in dollars.

        If the prompt has more than `above_tokens`, all tokens of the call have the
        prices of `above`.

        Args:
            usage: The tokens of the call. The prompt tokens include the cached ones.
        """
        if self.above and usage.prompt_tokens > self.above_tokens:
            return self.above.price(usage)

        cached_price = self.input if self.cached_input is None else self.cached_input
        uncached_tokens = usage.prompt_tokens - usage.cached_tokens

        # A dollar per million tokens is a millionth of a dollar per token.
        microdollars = uncached_tokens * self.input
        microdollars += usage.cached_tokens * cached_price
        microdollars += usage.output_tokens * self.output
        return microdollars / 1_000_000


TYPICAL_COSTS = Costs(input=1.0, cached_input=0.1, output=8.0)
"""Prices for a model whose prices are unknown, as multiples of its price for a prompt
token.

GPT-5 and Gemini 2.5 Pro have these ratios. For output the ratio is 5 with Claude, and
8.3 with Gemini 2.5 Flash."""


def price_calls(usages: Sequence[Usage], costs: Costs | None) -> float | None:
    """Returns the price of some calls of one model, in dollars.

    Args:
        usages: The tokens of each call.
        costs: The prices of the model; None if they are unknown.

    Returns:
        The price: 0 without calls; None if the prices are unknown, or if the provider
        reported no tokens for one of the calls.
    """
    if not usages:
        return 0.0

    unreported = Usage()  # Zeros stand for a call whose tokens are not reported.
    if costs is None or unreported in usages:
        return None
    return sum(costs.price(usage) for usage in usages)


def add_costs(dollars: Iterable[float | None]) -> float | None:
    """Returns the sum of amounts in dollars; None if one amount is None (unknown)."""
    known_dollars = list[float]()
    for amount in dollars:
        if amount is None:
            return None
        known_dollars.append(amount)
    return math.fsum(known_dollars)
