"""Stores in session state what the summaries of the session have cost."""

from __future__ import annotations

from contextguard_adk._runtime.runs import find_outermost
from contextguard_adk._runtime.spending import SPENT_KEY, Spent
from contextguard_adk._turn.units import Answered, Listener


class StoredSpending(Listener):
    """Stores the cost of new summaries, if there is a budget for each session.

    So the budget holds across processes.
    """

    setting = "summary_budget"

    def answered(self, event: Answered) -> None:
        """Stores what was spent since the last answer, together with earlier costs."""
        budget = event.guard.settings.summary_budget
        if budget is None or not budget.limits_session:
            return

        # The session of an `AgentTool` ends with its call. The calling agent stores the
        # costs with its next answer.
        invocation = event.context.get_invocation_context()
        if find_outermost(invocation) is not invocation:
            return

        spending = event.call.memory.spending
        if spending.unstored != Spent():
            stored = event.context.state.get(SPENT_KEY)
            value = spending.pop_total(stored, budget.period_hours)
            event.state.set(SPENT_KEY, value)
