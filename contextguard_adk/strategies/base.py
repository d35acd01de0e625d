"""What every strategy shares, and the strategy that is the default."""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import AliasChoices, Field, field_validator, model_validator

from contextguard_adk.summarizing.summarizer import SummarySettings

if TYPE_CHECKING:
    from contextguard_adk.summarizing.context import Compaction, CompactionContext


T = TypeVar("T")

Recall = Literal["auto"] | bool
"""Whether to offer the tool; `"auto"` only where it cannot do harm."""


def import_subclass(path: object, base: type[T]) -> type[T]:
    """Imports a class by its dotted path; a ValueError says what is wrong with it."""
    module, _, attribute = str(path).rpartition(".")
    if not module:
        raise ValueError(f"{path!r} is no dotted path")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # A module may do anything on import.
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path!r} cannot be imported: {reason}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{path!r} is no subclass of {base.__name__}")
    if inspect.isabstract(found):
        raise ValueError(f"{path!r} is abstract")
    return found


class Strategy(SummarySettings, ABC):
    """Decides when an agent's history is compacted, and what of it.

    A strategy is a value: frozen settings and one method. One instance may serve
    many agents and sessions at once, so it keeps no state of its own. Subclass it
    for a strategy of your own.

    Attributes:
        context_window: The model's context window in tokens, at least 1,000; also
            accepted as `max_tokens`. None asks the model registry.
        summarizer: The model that writes summaries: a `BaseLlm`, or a name that
            ADK's `LLMRegistry` knows. None takes the agent's own model.
        summarizer_context_window: The summarizer's context window in tokens. None
            takes the agent's for the agent's own model, else asks the registry.
        keep: What the newest steps of the running turn (tool calls with their results)
            may take that every compaction leaves word for word: tokens as an int, at
            least 0, or a part of the context window as a float, at least 0 and less
            than 1. Results that the model has not seen yet always stay, shortened
            where they are too large. All other calls of the turn are listed beside the
            summary.
        max_compaction_attempts: How many summaries one compaction may pay for, 1 to
            10. More than one is used only while the result is still too large.
        summary_timeout_seconds: How long one summary call may take with all its
            tries, more than 0 and at most 3,600; 60 by default.
        summary_instruction: The system instruction of a summary call; in it
            `{max_words}` is replaced by how many words the summary may have. At the
            end of a conversation it stands in the question. None takes the guard's own.
        reuse_prompt_cache: Whether the agent's own model is asked for a summary at the
            end of the conversation itself, which a prompt cache serves, in place of a
            transcript in a prompt of its own. "auto" does so where the provider has
            reported that at least half of the agent's last prompt came from a cache.
            Only where a summary is of all the history but the newest steps, as by
            `Threshold`. Where the conversation does not fit with the question,
            something else than plain text is asked of the agent, or the answer is no
            summary, it is the transcript.
        recall: Whether the agent is offered the tool `recall_history` once something
            was compacted. "auto" offers it to agents that have function tools and no
            built-in tool, output schema or forced tool choice.
        recall_page_tokens: What one page of that tool may take, at least 100; it
            never takes more than a tenth of the window.
    """

    context_window: int | None = Field(
        default=None,
        ge=1_000,
        strict=True,
        validation_alias=AliasChoices("context_window", "max_tokens"),
    )
    keep: int | float = 0.2
    max_compaction_attempts: int = Field(default=3, ge=1, le=10, strict=True)
    recall: Recall = "auto"
    recall_page_tokens: int = Field(default=2_000, ge=100, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_both_names(cls, values: object) -> object:
        if isinstance(values, dict) and {"context_window", "max_tokens"} <= set(values):
            raise ValueError("context_window and max_tokens mean the same: give one")
        return values

    @field_validator("keep", mode="before")
    @classmethod
    def _check_keep(cls, value: object) -> object:
        is_tokens = type(value) is int and value >= 0
        if not (is_tokens or (isinstance(value, float) and 0 <= value < 1)):
            raise ValueError(
                "tokens as an int, at least 0, or a part of the window as a float, at "
                "least 0 and less than 1, are expected"
            )
        return value

    def keep_tokens(self, window_tokens: int) -> int:
        """What `keep` comes to in a context window."""
        return int(self.keep * window_tokens if self.keep < 1 else self.keep)

    @abstractmethod
    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Compacts the history of one model call where it has to.

        Called before every model call of a guarded agent. It goes on when the turn is
        cancelled, and later calls of the agent wait for it: let nothing take forever.

        Args:
            context: What is known about the call.

        Returns:
            The compaction to apply, or None to leave the request as it is.
        """


class Threshold(Strategy):
    """Replaces the history by a summary when tokens reach the threshold.

    The threshold is the context window minus a buffer: 20,000 tokens for windows of
    200,000 and more, else 20 % of the window. After a compaction the request is the
    summary and a continuation that quotes the user's current request, then the newest
    steps of the running turn (see `keep`), plus what is not history and tool calls that
    are still open. One summary per compaction is normal; further attempts ask for half
    the length.
    """

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Compacts all but the newest steps, when the threshold is reached."""
        if not context.is_due:
            return None
        return await context.summarize_all(self.max_compaction_attempts)
