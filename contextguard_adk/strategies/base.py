"""The base class of all strategies, and the strategy that is the default."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from contextguard_adk._history.stored import Draft, Reason
from contextguard_adk._summaries.ask import Ask
from contextguard_adk._turn.settings import StrategySettings
from contextguard_adk._turn.turn import Turn


class Strategy(StrategySettings, ABC):
    """Decides when an agent's history is compacted, and which messages are.

    A strategy is a value: frozen settings and one method. One instance may serve
    many agents and sessions at once, so it keeps no state of its own. Subclass it
    for a strategy of your own.
    """

    early_reason: ClassVar[Reason] = "tokens"
    """The reason of a compaction before the threshold is reached."""

    def fullness(self, turn: Turn) -> float:
        """Returns how near the next compaction is; from 1 on, a compaction is due.

        The guard calls `compact` in these cases:

        - If the value is 1 or more: before the model call.
        - If the value is at least the setting `ahead`, but below 1: in the background.
          `compact` then gets a changed copy of the turn, so that the same code serves
          both cases. In this copy the threshold is so low that `is_due` is True, and
          `kept` is empty: newer messages will follow before the summary is used.

        The default is infinity: the guard asks `compact` before every model call, and
        never in the background.
        """
        return math.inf

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Gives the default `fullness` to a subclass that overrides only `compact`.

        The inherited `fullness` tells when the `compact` of the base class wants to
        act, which the new `compact` may not do at the same size.
        """
        super().__pydantic_init_subclass__()
        if "compact" in vars(cls) and "fullness" not in vars(cls):
            cls.fullness = Strategy.fullness  # type: ignore[method-assign]

    @abstractmethod
    async def compact(self, turn: Turn, ask: Ask) -> Draft | None:
        """Decides which text stands in place of history in one model call.

        `fullness` decides when the guard calls this method. The method goes on even if
        the user's turn is cancelled. Later calls of the agent wait for the method, so
        the method must come to an end.

        Args:
            turn: The model call.
            ask: Writes summaries, and measures the request with a draft in place.

        Returns:
            The draft to put in place, or None to leave the request as it is.
        """


class Threshold(Strategy):
    """Replaces the history by a summary when tokens reach the threshold.

    The threshold is the context window minus a buffer: 20,000 tokens for windows of
    200,000 and more, else 20 % of the window. After a compaction the request is the
    summary and the newest messages and steps (see `keep`), plus everything that is not
    history. Older tool calls without an answer are listed beside the summary. If the
    user's current request is not among the newest messages, a text after the summary
    quotes the request. Most compactions write one summary. If the request does not fit
    with a summary, further attempts ask for half the length each time.
    """

    def fullness(self, turn: Turn) -> float:
        """Returns the tokens of the request as a part of the threshold."""
        return turn.fullness

    async def compact(self, turn: Turn, ask: Ask) -> Draft | None:
        """Summarizes all but the newest steps; None below the threshold."""
        return await ask.summarize_all(turn) if turn.is_due else None
