"""The sizes of a strategy's budgets, as they are known before any request."""

from __future__ import annotations

import math
from dataclasses import replace

from contextguard_adk._measuring.budgets import Budgets, plan_budgets
from contextguard_adk._providers.costs import Costs
from contextguard_adk.records import Usage
from contextguard_adk.strategies.base import Strategy

_LARGE_WINDOW_TOKENS = 200_000


def plan_strategy(strategy: Strategy, window_tokens: int) -> Budgets:
    """Returns the budgets of a strategy in a context window of this size.

    Their threshold is the size of a request from which on the strategy compacts.
    """
    trigger_tokens = strategy.trigger_tokens(window_tokens)
    budgets = plan_budgets(window_tokens, trigger_tokens=trigger_tokens)

    # A pipeline may compact below the threshold of its budgets.
    early_ratio = getattr(strategy, "compression_threshold", None) or math.inf
    early_tokens = early_ratio * budgets.working_tokens
    due_tokens = math.ceil(min(budgets.threshold_tokens, early_tokens))
    return replace(budgets, threshold_tokens=due_tokens)


def describe_start(window_tokens: int, due_tokens: int, costs: Costs | None) -> str:
    """Describes the prompt from which on a strategy compacts: its tokens and its price.

    Returns "" for a window of at most 200,000 tokens. In a larger one, such a prompt
    may cost more than people expect.
    """
    if window_tokens <= _LARGE_WINDOW_TOKENS:
        return ""
    cost = "an unknown amount"
    if costs:
        cost = f"${costs.price(Usage(due_tokens)):,.2f}"
    return f"compacts at {due_tokens:,} tokens, a prompt of that size costs {cost}"
