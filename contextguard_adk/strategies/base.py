"""What every strategy shares, and the strategy that is the default."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AliasChoices, Field, field_validator

from contextguard_adk._history.truncation import Preview
from contextguard_adk._measuring.budgets import scale_trigger
from contextguard_adk._settings import resolve_size, size, suggest
from contextguard_adk._summarizing.summarizer import SummarySettings

if TYPE_CHECKING:
    from contextguard_adk._summarizing.compose import Compaction
    from contextguard_adk._summarizing.context import CompactionContext, Reason


T = TypeVar("T")

LEAST_AUTO_TOKENS = 32_000
"""What `trigger="auto"` comes to; as any, it is at least twice what was left."""

AUTO_PREVIEW_TOKENS = 4_000
"""From which size on results are shortened under `"auto"`, unless something is set.

Of results of 40 KB each is most of what a session costs: shown whole, 600 calls in a
window of a million tokens cost 0.63 of what they do with the usual trigger, else 0.19.
"""

Recall = Literal["auto"] | bool
"""Whether to offer the tool; `"auto"` only where it cannot do harm."""


def import_subclass(path: object, base: type[T]) -> type[T]:
    """Imports a class by its dotted path; a ValueError says what is wrong with it."""
    module, _, attribute = str(path).rpartition(".")
    if not module:
        hint = suggest(f"contextguard_adk.{path}", _list_own_paths())
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


def _list_own_paths() -> list[str]:
    from contextguard_adk import strategies  # It imports this module.

    names = (name for name in vars(strategies) if name[0].isupper())
    return [f"contextguard_adk.{name}" for name in names]


class Strategy(SummarySettings, ABC):
    """Decides when an agent's history is compacted, and what of it.

    A strategy is a value: frozen settings and one method. One instance may serve
    many agents and sessions at once, so it keeps no state of its own. Subclass it
    for a strategy of your own.
    """

    context_window: int | None = Field(
        default=None,
        ge=1_000,
        strict=True,
        validation_alias=AliasChoices("context_window", "max_tokens"),
        description="The model's context window in tokens, at least 1,000; also "
        "accepted as `max_tokens`. None: what the model registry says for the model's "
        "name.",
    )
    trigger: Annotated[
        int | float | Literal["auto"] | None, size(1_000, None, "auto", may_be_all=True)
    ] = Field(
        default=None,
        description="The size of a request from which on the history is compacted: "
        "tokens as an int, at least 1,000, or a part of the context window as a float, "
        "more than 0 and at most 1. None: the threshold, which is the window minus its "
        "buffer (20,000 tokens for windows of 200,000 and more, else 20 % of the "
        'window). "auto": 32,000 tokens, which makes long sessions in large windows '
        "cheap. A trigger is never above the threshold, and never below 1,000 tokens, "
        "twice what the last compaction left, or twice what cannot be compacted. With "
        "a trigger below the threshold a summary takes at most an eighth of the "
        "trigger, and other settings that are a part of the window are a part of 5/4 "
        "of the trigger.",
    )
    preview_tokens: Annotated[int | float | None, size(100, None, False)] = Field(
        default=0.2,
        description="A tool result that takes more than this is shown with head and "
        "tail only, and with a handle, from its first request on: tokens as an int, at "
        "least 100, or a part of the context window as a float, more than 0 and less "
        "than 1. The agent reads the rest with `recall_history`, so the default "
        'applies only to agents that are offered that tool; with trigger="auto" it is '
        "at most 4,000 tokens. A value that you set applies to all agents. None (false "
        "in a file): results are shown whole.",
    )
    ahead: float | None = Field(
        default=None,
        description="The part of the trigger from which on a summary is written in the "
        "background, while the agent goes on: a float, more than 0 and less than 1; "
        "True is 0.75. The summary is put in at the trigger. Until it is written, "
        "requests beyond the trigger are sent as they are while half of the window's "
        "buffer stays free; after that a call waits. None (false in a file): the call "
        "that reaches the trigger waits for its summary.",
    )
    keep: Annotated[int | float, size(0)] = Field(
        default=0.1,
        description="How much of the running turn every compaction leaves word for "
        "word: the newest steps (tool calls with their results) that fit in so many "
        "tokens as an int, at least 0, or in that part of the context window as a "
        "float, at least 0 and less than 1. Results that the model has not seen yet "
        "always stay, shortened where they are too large. All other calls of the turn "
        "are listed beside the summary.",
    )
    max_compaction_attempts: int = Field(
        default=3,
        ge=1,
        le=10,
        strict=True,
        description="How many summaries one compaction may pay for, 1 to 10. More than "
        "one is used only while the result is still too large.",
    )
    recall: Recall = Field(
        default="auto",
        description="Whether the agent is offered the tool `recall_history` once "
        'something was compacted or shortened. "auto": agents that have function tools '
        "and no built-in tool, output schema or forced tool choice.",
    )
    binds_thoughts: bool | None = Field(
        default=None,
        strict=True,
        description="Whether the provider checks a thought that the agent's model has "
        "written against everything before it, as that of newer Claude models does. "
        "Then thoughts go out only while nothing before them has changed, and the tool "
        "`recall_history` is declared from the agent's first request on. None: what "
        "the model's name and the provider's refusals tell.",
    )
    recall_page_tokens: int = Field(
        default=2_000,
        ge=100,
        strict=True,
        description="What one page of `recall_history` may take in tokens, at least "
        "100; it never takes more than a tenth of the context window.",
    )

    if TYPE_CHECKING:  # What pydantic takes as another name, checkers learn here.
        max_tokens: int | None = None
    else:

        @property
        def max_tokens(self) -> int | None:
            """Another name of `context_window`."""
            return self.context_window

    @field_validator("ahead", mode="before")
    @classmethod
    def _read_ahead(cls, value: object) -> object:
        if isinstance(value, bool):
            return 0.75 if value else None
        if not (value is None or (isinstance(value, float) and 0 < value < 1)):
            raise ValueError(
                "a part of the trigger as a float, more than 0 and less than 1, or a "
                "boolean is expected"
            )
        return value

    def keep_tokens(self, window_tokens: int) -> int:
        """What `keep` comes to in a context window."""
        return resolve_size(self.keep, window_tokens)

    def trigger_tokens(self, window_tokens: int) -> int | None:
        """What `trigger` comes to in a context window."""
        trigger = LEAST_AUTO_TOKENS if self.trigger == "auto" else self.trigger
        return (
            None
            if trigger is None
            else max(1_000, resolve_size(trigger, window_tokens))
        )

    def preview(self, window_tokens: int, has_recall: bool) -> Preview | None:
        """How large tool results are shown in a context window; None for whole."""
        if trigger_tokens := self.trigger_tokens(window_tokens):
            window_tokens = min(window_tokens, scale_trigger(trigger_tokens))
        is_set = "preview_tokens" in self.model_fields_set
        if self.preview_tokens is None or not (has_recall or is_set):
            return None
        most = resolve_size(self.preview_tokens, window_tokens)
        if self.trigger == "auto" and not is_set:
            most = min(most, AUTO_PREVIEW_TOKENS)
        return Preview(most, with_handles=has_recall)

    early_reason: ClassVar[Reason] = "tokens"
    """Why a history is compacted that has not reached the threshold."""

    def fullness(self, context: CompactionContext) -> float:
        """How near the next compaction is; from 1 on `compact` is called.

        From `ahead` on it is called in the background as if it were due, with
        `keep_count=0`. A class that overrides `compact` and not this has an infinite
        one: it is called before every model call, and nothing is written ahead of time.
        """
        return math.inf

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        super().__pydantic_init_subclass__()
        if "compact" in vars(cls) and "fullness" not in vars(cls):
            cls.fullness = Strategy.fullness  # type: ignore[method-assign]

    def is_due(self, context: CompactionContext) -> bool:
        """Whether `compact` is to be called."""
        return context.reason != "tokens" or self.fullness(context) >= 1

    @abstractmethod
    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Compacts the history of one model call where it has to.

        Called before a model call of a guarded agent, see `fullness`. It goes on when
        the turn is cancelled, and later calls of the agent wait for it: let nothing
        take forever.

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

    def fullness(self, context: CompactionContext) -> float:
        """Tokens as a part of the threshold."""
        return context.fullness

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Compacts all but the newest steps, when the threshold is reached."""
        if not context.is_due:
            return None
        return await context.summarize_all(self.max_compaction_attempts)
