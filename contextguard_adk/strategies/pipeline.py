"""Runs reducers in order, cheapest first, until the request is small enough."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from contextguard_adk.strategies.base import Strategy, import_subclass
from contextguard_adk.strategies.reducers import (
    MessageWindow,
    Reducer,
    Relaxed,
    StrategyResult,
    SummaryCompaction,
    TokenWindow,
    ToolOutputTruncation,
)
from contextguard_adk.strategies.reduction import Reduction
from contextguard_adk.summarizing.context import Compaction, CompactionContext

PASSES = (Relaxed(), Relaxed(lengths=True), Relaxed(lengths=True, preferences=True))


def _read_reducer(value: object) -> object:
    """Takes a table with the dotted path of a class for a reducer."""
    if isinstance(value, Reducer):
        return value
    if not (isinstance(value, dict) and "reducer" in value):
        raise ValueError("`reducer`, the dotted path of a Reducer, is expected")
    kind = import_subclass(value["reducer"], Reducer)  # type: ignore[type-abstract]
    settings = {name: item for name, item in value.items() if name != "reducer"}
    return kind.model_validate(settings)


class Pipeline(Strategy):
    """Drops, shortens and only then summarizes.

    Runs when tokens reach the threshold, or `compression_threshold` of the window if
    that is less. The reducers run in order: window, tool output, summary, then
    `reducers`. Each is measured before the next one runs, and the pipeline stops at the
    target, `target_token_ratio` of the window. What was decided stays in place on later
    calls. While the request would not fit, settings are relaxed: first lengths, then
    triggers, minima and what is preserved; at last the whole history is summarized.
    Lengths are also relaxed when the request would stay above the middle between target
    and threshold, because a run that gains little has to be repeated soon.

    Attributes:
        window: Drops old messages; None leaves them to the other reducers.
        tool_output: Shortens tool results; None leaves them whole.
        summary: Summarizes; None does so only when nothing else helps.
        reducers: Reducers of your own, run after those.
        compression_threshold: Of the context window, more than 0 and at most 1, and
            larger than the target; None runs at the threshold.
    """

    window: MessageWindow | TokenWindow | None = Field(default_factory=MessageWindow)
    tool_output: ToolOutputTruncation | None = Field(
        default_factory=ToolOutputTruncation
    )
    summary: SummaryCompaction | None = Field(default_factory=SummaryCompaction)
    reducers: tuple[Annotated[Reducer, BeforeValidator(_read_reducer)], ...] = ()
    compression_threshold: float | None = Field(default=None, gt=0, le=1, strict=True)

    @field_validator("window", "tool_output", "summary", mode="before")
    @classmethod
    def _read_step(cls, value: object, info: ValidationInfo) -> object:
        """Reads False as None, which TOML cannot write, and tells windows apart."""
        if value is False:
            return None
        if not (value is None or isinstance(value, dict | Reducer)):
            raise ValueError("a table of settings, or false, is expected")
        if info.field_name == "window" and isinstance(value, dict):
            kind = TokenWindow if "budget_tokens" in value else MessageWindow
            return kind.model_validate(value)
        return value

    @model_validator(mode="after")
    def _check_threshold(self) -> Pipeline:
        early = self.compression_threshold
        if early is not None and early <= self.target_token_ratio:
            raise ValueError(
                f"compression_threshold ({early}) must be larger than the "
                f"target_token_ratio of the summary ({self.target_token_ratio})"
            )
        return self

    @property
    def target_token_ratio(self) -> float:
        """Of the context window; where the pipeline may stop."""
        return self.summary.target_token_ratio if self.summary else 0.5

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Runs the reducers when the threshold is reached."""
        window_tokens = context.budgets.window_tokens
        early_tokens = (self.compression_threshold or math.inf) * window_tokens
        if not (context.is_due or context.tokens >= early_tokens):
            return None
        target = int(self.target_token_ratio * window_tokens)
        target = min(target, context.limit_tokens - 1)
        reduction = Reduction(context, target)
        enough = context.limit_tokens
        if context.is_due:
            enough = (target + enough) // 2
        for relaxed in PASSES:
            reduction.relaxed = relaxed
            await self._run(reduction)
            if reduction.tokens <= enough:
                break
            enough = context.limit_tokens
        compaction, attempts = reduction.compaction, reduction.attempts
        is_unanswered = compaction is None and context.reason == "requested"
        if reduction.tokens > context.limit_tokens or is_unanswered:
            return await self._summarize_everything(reduction)
        # Before the threshold, less than this is not worth a new prefix.
        is_free = not (context.is_due or attempts)
        least_gain = int(0.05 * window_tokens)
        if is_free and context.tokens - reduction.tokens < least_gain:
            return None
        return compaction.after(attempts) if compaction else None

    async def _run(self, reduction: Reduction) -> None:
        for reducer in (self.window, self.tool_output, self.summary, *self.reducers):
            result = await reducer.reduce(reduction) if reducer else None
            if result is StrategyResult.TARGET_REACHED:
                return

    async def _summarize_everything(self, reduction: Reduction) -> Compaction | None:
        """Makes the request fit when no reducer could: the full summary."""
        context = reduction.context
        compaction, attempts = reduction.compaction, reduction.attempts
        if compaction is not None and attempts:
            compaction = context.squeeze(compaction).after(attempts)
            if context.fits(compaction):
                return compaction
        rest = max(1, self.max_compaction_attempts - attempts)
        everything = await context.summarize_all(rest)
        if everything is not None:
            return everything.after(attempts + everything.attempts)
        return compaction.after(attempts) if compaction else None
