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
    """Decides when an agent's history is compacted, and which part of it.

    A strategy is a value: frozen settings and one method. One instance may serve
    many agents and sessions at once, so it keeps no state of its own. Subclass it
    for a strategy of your own.
    """

    early_reason: ClassVar[Reason] = "tokens"
    """The reason of a compaction before the threshold is reached."""

    def fullness(self, turn: Turn) -> float:
        """Returns how near the next compaction is; from 1 on, a compaction is due.

        The guard calls `compact` at one of these values:

        - 1 or more: before the model call.
        - The setting `ahead` or more: in the background. The turn then looks as if a
          compaction were due, and its `keep_count` is 0.
        - Infinity, the default: before every model call, and never in the background,
          because only `compact` can tell whether it wants to do anything.
        """
        return math.inf

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Gives a subclass that overrides `compact` alone the default `fullness`.

        The `fullness` of its base class is about another `compact`.
        """
        super().__pydantic_init_subclass__()
        if "compact" in vars(cls) and "fullness" not in vars(cls):
            cls.fullness = Strategy.fullness  # type: ignore[method-assign]

    @abstractmethod
    async def compact(self, turn: Turn, ask: Ask) -> Draft | None:
        """Decides which text stands in place of history in one model call.

        The guard calls this method when `fullness` tells it to. The method goes on even
        if the user's turn is cancelled, and later calls of the agent wait for it: it
        must come to an end.

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
