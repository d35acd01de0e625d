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
    """Decides when an agent's history is compacted, and what of it.

    A strategy is a value: frozen settings and one method. One instance may serve
    many agents and sessions at once, so it keeps no state of its own. Subclass it
    for a strategy of your own.
    """

    early_reason: ClassVar[Reason] = "tokens"
    """The reason of a compaction before the threshold is reached."""

    def fullness(self, turn: Turn) -> float:
        """Returns how near the next compaction is; 1 and more is due.

        The guard calls `compact` before a model call for which this is 1 or more. Where
        it is at least `ahead`, the guard calls `compact` in the background, with a turn
        that looks as if a compaction were due and whose `keep_count` is 0.

        Infinity, the default, says that only `compact` can tell: then the guard calls
        it before every model call, and never in the background. A subclass that
        overrides `compact` alone has this default too, because the `fullness` of its
        base class is about another `compact`.
        """
        return math.inf

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        super().__pydantic_init_subclass__()
        if "compact" in vars(cls) and "fullness" not in vars(cls):
            cls.fullness = Strategy.fullness  # type: ignore[method-assign]

    @abstractmethod
    async def compact(self, turn: Turn, ask: Ask) -> Draft | None:
        """Decides what stands in place of history in one model call.

        `fullness` says before which model calls. It goes on when the user's turn is
        cancelled, and later calls of the agent wait for it: let nothing take forever.

        Args:
            turn: The model call.
            ask: Has summaries written.

        Returns:
            The draft to put in place, or None to leave the request as it is.
        """


class Threshold(Strategy):
    """Replaces the history by a summary when tokens reach the threshold.

    The threshold is the context window minus a buffer: 20,000 tokens for windows of
    200,000 and more, else 20 % of the window. After a compaction the request is the
    summary and the newest messages and steps (see `keep`), plus everything that is not
    history. Older tool calls without an answer are listed beside the summary. Where the
    user's current request is not among the newest messages, a text after the summary
    quotes it. One summary per compaction is normal; further attempts ask for half the
    length.
    """

    def fullness(self, turn: Turn) -> float:
        """Returns tokens as a part of the threshold."""
        return turn.fullness

    async def compact(self, turn: Turn, ask: Ask) -> Draft | None:
        """Summarizes all but the newest steps, when the threshold is reached."""
        return await ask.summarize_all(turn) if turn.is_due else None
