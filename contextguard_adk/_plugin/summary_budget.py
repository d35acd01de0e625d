"""Tells whether the budget for summaries is spent, and warns when it is."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext

from contextguard_adk._runtime.runs import Guard, find_outermost, name_user
from contextguard_adk._runtime.settings import SummaryBudget
from contextguard_adk._runtime.spending import (
    PROCESS,
    SPENT_KEY,
    ProcessSpending,
    SessionSpending,
    Spent,
)
from contextguard_adk._support.log import log_failures
from contextguard_adk.records import format_cost

logger = logging.getLogger("contextguard_adk.spending")

_SPENT = (
    "In the period until %s UTC, %s has spent its summary_budget: %s, of %s. Until the "
    "period ends, summaries are excerpts, and no model is asked for one."
)


def is_budget_spent(guard: Guard, context: CallbackContext) -> bool:
    """Whether the session, or the process, may pay for no more summaries.

    The first call in a period for which that holds logs a warning. If a failure hides
    what was spent, the result is False.
    """
    budget = guard.settings.summary_budget
    if budget is None:
        return False

    with log_failures(logger, "The summary_budget could not be checked"):
        invocation = find_outermost(context.get_invocation_context())
        return _is_spent_by_session(guard, budget, invocation) or _is_spent_by_process(
            budget
        )
    return False


def _is_spent_by_session(
    guard: Guard, budget: SummaryBudget, invocation: InvocationContext
) -> bool:
    """Whether a session has reached a limit; warns once if so."""
    session = invocation.session
    spending = guard.session_spending(invocation)
    spent = spending.total(session.state.get(SPENT_KEY), budget.period_hours)
    dollars, tokens = budget.dollars_per_session, budget.tokens_per_session
    if not _is_reached(spent, dollars, tokens):
        return False

    user = name_user(invocation, guard.settings)
    holder = f"session {session.id!r} of user {user!r}, app {session.app_name!r},"
    _warn_once(spending, holder, spent, _describe(dollars, tokens), budget)
    return True


def _is_spent_by_process(budget: SummaryBudget) -> bool:
    """Whether the process has reached a limit; warns once if so."""
    spent = PROCESS.total(budget.period_hours)
    dollars, tokens = budget.dollars_per_process, budget.tokens_per_process
    if not _is_reached(spent, dollars, tokens):
        return False

    _warn_once(PROCESS, "this process", spent, _describe(dollars, tokens), budget)
    return True


def _warn_once(
    spending: SessionSpending | ProcessSpending,
    holder: str,
    spent: Spent,
    limit: str,
    budget: SummaryBudget,
) -> None:
    """Warns that a budget is spent, unless a warning has said so in this period.

    Args:
        spending: Whose spending it is.
        holder: The same for people, such as "this process".
        spent: What was spent.
        limit: What may be spent, such as "$0.5000".
        budget: The budget.
    """
    end_seconds = spent.since + budget.period_hours * 3_600
    if spending.warned_until != end_seconds:
        spending.warned_until = end_seconds
        end = f"{datetime.fromtimestamp(end_seconds, UTC):%F %H:%M}"
        logger.warning(_SPENT, end, holder, spent, limit)


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
