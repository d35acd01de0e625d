"""Counts what summaries have cost in a session and in this process, for a budget.

What a session has spent stands in session state, so that it holds for all processes.
What this process has spent is not stored.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from contextguard_adk._support.log import warn_once
from contextguard_adk.records import format_cost

logger = logging.getLogger("contextguard_adk.spending")

SPENT_KEY = "context_guard:summary_spent"
"""The value is what summaries of the session have cost: the fields of `Spent`."""

_CLOCK_ERROR_SECONDS = 300
"""The clock of another machine may be ahead by so much."""


read_clock = time.time
"""Returns the time in seconds since the epoch, which all processes share."""


@dataclass(frozen=True)
class Spent:
    """What summaries have cost in one period.

    Attributes:
        since: When the period began, in seconds since the epoch; 0 if nothing was paid.
        dollars: US dollars, as far as the price is known.
        tokens: The tokens that were read and written, as far as they are reported.
    """

    since: Annotated[float, Field(ge=0, le=1e11, strict=True)] = 0.0
    dollars: Annotated[float, Field(ge=0, le=1e9, strict=True)] = 0.0
    tokens: Annotated[int, Field(ge=0, le=10**15, strict=True)] = 0

    def __add__(self, other: Spent) -> Spent:
        """Adds two amounts of one period, which began when the first of them did."""
        beginnings = [each.since for each in (self, other) if each.since]
        return Spent(
            since=min(beginnings, default=0.0),
            dollars=self.dollars + other.dollars,
            tokens=self.tokens + other.tokens,
        )

    def at(self, now: float, period_hours: float) -> Spent:
        """Returns this amount; nothing if its period has ended by now.

        A period that begins much later than now is one of a wrong clock. It has ended,
        too.
        """
        has_begun = self.since - _CLOCK_ERROR_SECONDS <= now
        is_under_way = has_begun and now < self.since + period_hours * 3_600
        return self if is_under_way else Spent()

    def __str__(self) -> str:
        """Describes the amount: "$0.5200 and 23,410 tokens since 2026-11-29 13:02 UTC".

        The time is left out if nothing was paid.
        """
        amount = f"{format_cost(self.dollars)} and {self.tokens:,} tokens"
        if not self.since:
            return amount
        return f"{amount} since {datetime.fromtimestamp(self.since, UTC):%F %H:%M} UTC"


_STORED = TypeAdapter(Spent)


def read_spent(value: object) -> Spent:
    """Reads what a session has stored as spent; nothing for a wrong value.

    Session state is untrusted: the value may be anything.
    """
    if value is None:
        return Spent()
    try:
        spent = _STORED.validate_python(value)
        datetime.fromtimestamp(spent.since, UTC)
    except (ValidationError, ValueError, OverflowError, OSError):
        warn_once(logger, "Session state %r holds no amount: ignored.", SPENT_KEY)
        return Spent()
    return spent


@dataclass(eq=False)
class ProcessSpending:
    """What this process has spent on summaries, by all guards and in all sessions.

    Attributes:
        spent: The amount of the newest period.
        warned_until: The end of the period in which a warning said that the budget is
            spent, in seconds since the epoch; 0 if none did.
    """

    spent: Spent = Spent()
    warned_until: float = 0.0

    def total(self, period_hours: float) -> Spent:
        """Returns what was spent in this period."""
        return self.spent.at(read_clock(), period_hours)


PROCESS = ProcessSpending()
"""Shared, because a process may have a guard for each app."""


@dataclass(eq=False)
class SessionSpending:
    """What one session has spent, as far as this process knows.

    Attributes:
        unstored: What was spent and is not in session state yet.
        warned_until: As in `ProcessSpending`, for the budget of the session.
        is_over: Whether the budget was spent at the session's newest model call.
    """

    unstored: Spent = Spent()
    warned_until: float = 0.0
    is_over: bool = False

    def add(self, dollars: float, tokens: int, period_hours: float) -> None:
        """Adds the cost of summaries that this process has just paid for."""
        now = read_clock()
        paid = Spent(now, dollars, tokens)
        self.unstored = self.unstored.at(now, period_hours) + paid
        PROCESS.spent = PROCESS.spent.at(now, period_hours) + paid

    def total(self, stored: object, period_hours: float) -> Spent:
        """Returns what the session has spent in this period.

        `stored` is the value of session state under `SPENT_KEY`.
        """
        now = read_clock()
        earlier = read_spent(stored).at(now, period_hours)
        return earlier + self.unstored.at(now, period_hours)

    def pop_total(self, stored: object, period_hours: float) -> dict[str, Any]:
        """Returns the total as a value for session state, which is to have it now."""
        total = self.total(stored, period_hours)
        self.unstored = Spent()
        return asdict(total)
