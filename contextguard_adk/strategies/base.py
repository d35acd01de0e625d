"""What every strategy is, and the one that is the default."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeVar

from contextguard_adk._history.draft import Draft, Reason
from contextguard_adk._summaries.ask import Ask
from contextguard_adk._support.settings import suggest
from contextguard_adk._turn.settings import StrategySettings
from contextguard_adk._turn.turn import Turn

T = TypeVar("T")


def import_subclass(path: object, base: type[T]) -> type[T]:
    """Imports a class by its dotted path; a ValueError says what is wrong with it."""
    module, _, attribute = str(path).rpartition(".")
    if not module:
        package = __name__.rpartition(".")[0]
        own = [name for name in vars(sys.modules[package]) if name[0].isupper()]
        hint = suggest(f"{package}.{path}", [f"{package}.{name}" for name in own])
        raise ValueError(f"{path!r} is no dotted path.{hint}")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except (Exception, SystemExit) as error:  # A module may do anything on import.
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path!r} cannot be imported: {reason}") from error
    if found is None:
        hint = suggest(attribute, dir(sys.modules[module]))
        raise ValueError(f"{module!r} has no {attribute!r}.{hint}")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{path!r} is no subclass of {base.__name__}")
    if inspect.isabstract(found):
        raise ValueError(f"{path!r} is abstract")
    return found


class Strategy(StrategySettings, ABC):
    """Decides when an agent's history is compacted, and what of it.

    A strategy is a value: frozen settings and one method. One instance may serve
    many agents and sessions at once, so it keeps no state of its own. Subclass it
    for a strategy of your own.
    """

    early_reason: ClassVar[Reason] = "tokens"
    """Why a history is compacted that has not reached the threshold."""

    def fullness(self, turn: Turn) -> float:
        """Returns how near the next compaction is; from 1 on `compact` is called.

        From `ahead` on it is called in the background as if it were due, with
        `keep_count=0`. A class that overrides `compact` and not this is asked before
        every model call, and nothing is written in the background for it.
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

        Called before a model call of a guarded agent, see `fullness`. It goes on when
        the user's turn is cancelled, and later calls of the agent wait for it: let
        nothing take forever.

        Args:
            turn: The model call.
            ask: Has summaries written.

        Returns:
            What to put in place, or None to leave the request as it is.
        """


class Threshold(Strategy):
    """Replaces the history by a summary when tokens reach the threshold.

    The threshold is the context window minus a buffer: 20,000 tokens for windows of
    200,000 and more, else 20 % of the window. After a compaction the request is the
    summary and the newest messages and steps (see `keep`), plus what is not history.
    Tool calls without an answer that are older are listed beside the summary. A
    continuation quotes the user's current request where that is not among the newest
    messages. One summary per compaction is normal; further attempts ask for half the
    length.
    """

    def fullness(self, turn: Turn) -> float:
        """Returns tokens as a part of the threshold."""
        return turn.fullness

    async def compact(self, turn: Turn, ask: Ask) -> Draft | None:
        """Summarizes all but the newest steps, when the threshold is reached."""
        return await ask.summarize_all(turn) if turn.is_due else None
