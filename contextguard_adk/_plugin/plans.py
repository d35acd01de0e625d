"""The sizes at which a strategy compacts, as they are known before any request."""

from __future__ import annotations

import math
from dataclasses import replace

from contextguard_adk._measuring.budgets import Budgets, plan_budgets
from contextguard_adk._providers.costs import Costs
from contextguard_adk.records import Usage
from contextguard_adk.strategies.base import Strategy

_LARGE_WINDOW_TOKENS = 200_000
"""In a larger window, a prompt of the size at which a strategy compacts may cost more
than people expect."""


def plan_strategy(strategy: Strategy, window_tokens: int) -> Budgets:
    """Returns the budgets of a strategy in a context window of this size.

    Unlike other budgets, these have as their threshold the size from which on the
    strategy compacts a request, even if that size is below the usual threshold.
    """
    trigger_tokens = strategy.trigger_tokens(window_tokens)
    budgets = plan_budgets(window_tokens, trigger_tokens=trigger_tokens)

    # Only a `Pipeline` has this setting. From this part of the window on, the pipeline
    # compacts a request that is below the usual threshold.
    early_ratio = getattr(strategy, "compression_threshold", None)
    if early_ratio is None:
        return budgets
    early_tokens = math.ceil(early_ratio * budgets.working_tokens)
    due_tokens = min(budgets.threshold_tokens, early_tokens)
    return replace(budgets, threshold_tokens=due_tokens)


def describe_start(window_tokens: int, due_tokens: int, costs: Costs | None) -> str:
    """Describes the smallest prompt that a strategy compacts: its tokens and its price.

    "compacts at 980,000 tokens, a prompt of that size costs $2.45"

    Returns "" for a window of at most 200,000 tokens.

    Args:
        window_tokens: The context window.
        due_tokens: The tokens of the smallest prompt that the strategy compacts.
        costs: The prices of the model; None if they are unknown.
    """
    if window_tokens <= _LARGE_WINDOW_TOKENS:
        return ""
    cost = f"${costs.price(Usage(due_tokens)):,.2f}" if costs else "an unknown amount"
    return f"compacts at {due_tokens:,} tokens, a prompt of that size costs {cost}"
