"""Tells whether the budget for summaries is spent, and warns when it is."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from google.adk.agents.callback_context import CallbackContext

from contextguard_adk._runtime.runs import Guard, name_user
from contextguard_adk._runtime.settings import SummaryBudget
from contextguard_adk._runtime.spending import SPENT_KEY, SessionSpending, Spent
from contextguard_adk._support.log import warn_once
from contextguard_adk.records import format_cost

logger = logging.getLogger("contextguard_adk.spending")

_SPENT = (
    "In the period until %s has spent its summary_budget: %s, of %s. Until the period "
    "ends, summaries are excerpts, and no model is asked for one."
)


def check_budget(guard: Guard, context: CallbackContext) -> bool:
    """Returns whether the session, or the process, may pay for no more summaries.

    `SessionSpending.is_over` notes the result. The first call in a period for which it
    is True logs a warning.
    """
    spending = guard.session_spending(context.get_invocation_context())
    spending.is_over = _is_over(guard, context, spending)
    return spending.is_over


def _is_over(guard: Guard, context: CallbackContext, spending: SessionSpending) -> bool:
    """Whether a limit of the budget is reached; then a warning says which one."""
    budget = guard.settings.summary_budget
    if budget is None:
        return False

    stored = context.state.get(SPENT_KEY)
    by_session = spending.total(stored, budget.period_hours)
    if _is_reached(by_session, budget.dollars_per_session, budget.tokens_per_session):
        invocation = context.get_invocation_context()
        session = invocation.session
        user = name_user(invocation, guard.settings)
        holder = f"session {session.id!r} of user {user!r}, app {session.app_name!r},"
        limit = _describe(budget.dollars_per_session, budget.tokens_per_session)
        _warn(holder, by_session, limit, budget)
        return True

    by_process = guard.spending.total(budget.period_hours)
    if _is_reached(by_process, budget.dollars_per_process, budget.tokens_per_process):
        limit = _describe(budget.dollars_per_process, budget.tokens_per_process)
        _warn("this process", by_process, limit, budget)
        return True
    return False


def describe_budget(budget: SummaryBudget) -> str:
    """Describes a budget: "$0.5000 for each session, in 24 hours"."""
    parts = list[str]()
    if budget.limits_session:
        limit = _describe(budget.dollars_per_session, budget.tokens_per_session)
        parts.append(f"{limit} for each session")
    if budget.limits_process:
        limit = _describe(budget.dollars_per_process, budget.tokens_per_process)
        parts.append(f"{limit} for the process")
    return f"{', '.join(parts)}, in {budget.period_hours:g} hours"


def _is_reached(spent: Spent, dollars: float | None, tokens: int | None) -> bool:
    """Whether an amount has reached one of two limits; None stands for no limit."""
    is_in_dollars = dollars is not None and spent.dollars >= dollars
    is_in_tokens = tokens is not None and spent.tokens >= tokens
    return is_in_dollars or is_in_tokens


def _describe(dollars: float | None, tokens: int | None) -> str:
    """Describes limits: "$0.5000", "100,000 tokens", "$0.5000 or 100,000 tokens"."""
    limits = list[str]()
    if dollars is not None:
        limits.append(format_cost(dollars))
    if tokens is not None:
        limits.append(f"{tokens:,} tokens")
    return " or ".join(limits)


def _warn(holder: str, spent: Spent, limit: str, budget: SummaryBudget) -> None:
    """Warns once in a period that a budget is spent.

    Args:
        holder: Who has spent it, such as "this process".
        spent: What was spent.
        limit: What may be spent, such as "$0.5000".
        budget: The budget.
    """
    end_seconds = spent.since + budget.period_hours * 3_600
    end = datetime.fromtimestamp(end_seconds, UTC)
    # The end tells the warnings of two periods apart.
    about = f"{end:%F %H:%M} UTC, {holder}"
    warn_once(logger, _SPENT, about, str(spent), limit)
