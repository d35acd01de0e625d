"""Where the compactions of a strategy begin, before there is any request."""

from __future__ import annotations

import math
from dataclasses import replace

from contextguard_adk._measuring.budgets import Budgets, plan_budgets
from contextguard_adk._providers.costs import Costs
from contextguard_adk.records import Usage
from contextguard_adk.strategies.base import Strategy

_LARGE_WINDOW_TOKENS = 200_000


def plan_strategy(strategy: Strategy, window_tokens: int) -> Budgets:
    """Returns the sizes that a strategy keeps to in a context window."""
    trigger_tokens = strategy.trigger_tokens(window_tokens)
    planned = plan_budgets(window_tokens, trigger_tokens=trigger_tokens)

    # A pipeline may begin earlier.
    early_ratio = getattr(strategy, "compression_threshold", None) or math.inf
    early_tokens = early_ratio * planned.working_tokens
    due_tokens = math.ceil(min(planned.threshold_tokens, early_tokens))
    return replace(planned, threshold_tokens=due_tokens)


def describe_start(window_tokens: int, due_tokens: int, costs: Costs | None) -> str:
    """Says where compactions begin in a large window; "" in any other.

    A prompt of that size may cost more than people expect.
    """
    if window_tokens <= _LARGE_WINDOW_TOKENS:
        return ""
    cost = "an unknown amount"
    if costs:
        cost = f"${costs.price(Usage(due_tokens)):,.2f}"
    return f", compacts at {due_tokens:,} tokens, a prompt of that size costs {cost}"
