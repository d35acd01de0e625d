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

from contextguard_adk._history.draft import Draft
from contextguard_adk._history.truncation import Truncation
from contextguard_adk._summaries.ask import Ask
from contextguard_adk._summaries.compose import fits, squeeze
from contextguard_adk._support.settings import Ratio
from contextguard_adk._turn.turn import Turn
from contextguard_adk.strategies.base import Strategy, import_subclass
from contextguard_adk.strategies.reducers import (
    MessageWindow,
    Reducer,
    SummaryCompaction,
    TokenWindow,
    ToolOutputTruncation,
)
from contextguard_adk.strategies.reduction import Reduction, Relaxed, StrategyResult

PASSES = (Relaxed(), Relaxed(lengths=True), Relaxed(lengths=True, preferences=True))


def _suggest_instance(value: object) -> str:
    if isinstance(value, type) and issubclass(value, Reducer):
        return f". Did you mean {value.__name__}(…)?"
    return ""


def _read_reducer(value: object) -> object:
    """Takes a table with the dotted path of a class for a reducer."""
    if isinstance(value, Reducer):
        return value
    if not (isinstance(value, dict) and "reducer" in value):
        said = "a Reducer, or a table with `reducer`, its dotted path, is expected"
        raise ValueError(said + _suggest_instance(value))
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
    triggers, minima and what is preserved; at last all is summarized but the newest
    messages (see `keep`). Lengths are also relaxed when the request would stay above
    the middle between target and threshold, because a run that gains little has to be
    repeated soon.
    """

    window: MessageWindow | TokenWindow | None = Field(
        default=TokenWindow(budget_tokens=0.22),
        description="Drops old messages: a `MessageWindow` or a `TokenWindow`. The "
        "default keeps the newest that take 0.22 of the context window. None (false in "
        "a file): this step drops nothing.",
    )
    tool_output: ToolOutputTruncation | None = Field(
        default=ToolOutputTruncation(
            max_length=16_000,
            smart_truncate=True,
            head_length=12_000,
            tail_length=4_000,
            preserve_last_tool_result=False,
        ),
        description="Shortens tool results. The default shortens strings over 16,000 "
        "characters, from their first request on. None (false in a file): results stay "
        "whole.",
    )
    summary: SummaryCompaction | None = Field(
        default=SummaryCompaction(),
        description="Summarizes when window and tool_output are not enough. None "
        "(false in a file): a summary is written only when nothing else makes the "
        "request fit.",
    )
    reducers: tuple[Annotated[Reducer, BeforeValidator(_read_reducer)], ...] = Field(
        default=(),
        description="Reducers of your own, which run after the others; in a file each "
        "names its class as `reducer`, by dotted path.",
    )
    compression_threshold: Ratio | None = Field(
        default=None,
        description="The part of the context window from which on the pipeline runs, "
        "more than the summary's target_token_ratio and at most 1. None: the "
        "threshold.",
    )

    @field_validator("window", "tool_output", "summary", mode="before")
    @classmethod
    def _read_step(cls, value: object, info: ValidationInfo) -> object:
        """Reads False as None, which TOML cannot write, and tells windows apart."""
        if value is False:
            return None
        if not (value is None or isinstance(value, dict | Reducer)):
            said = "a reducer, a table of settings or false is expected"
            raise ValueError(said + _suggest_instance(value))
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

    def _shorten_strings(self, has_recall: bool) -> Truncation | None:
        """Shortens them as `tool_output` says, unless the newest is to stay whole."""
        output = self.tool_output
        is_wanted = has_recall or "tool_output" in self.model_fields_set
        if output is None or output.preserve_last_tool_result or not is_wanted:
            return None
        return output.truncation()

    def fullness(self, turn: Turn) -> float:
        """Returns tokens as a part of where the reducers run."""
        early = self.compression_threshold or math.inf
        return max(turn.fullness, turn.tokens / (early * turn.budgets.working_tokens))

    async def compact(self, turn: Turn, ask: Ask) -> Draft | None:
        """Runs the reducers when the threshold is reached."""
        if self.fullness(turn) < 1:
            return None
        window_tokens = turn.budgets.working_tokens
        limit = turn.limit_tokens
        due_tokens = min(limit, turn.budgets.threshold_tokens)
        target = min(int(self.target_token_ratio * window_tokens), due_tokens - 1)
        reduction = Reduction(turn, ask, target)
        enough = (target + due_tokens) // 2 if turn.is_due else limit
        for relaxed in PASSES:
            reduction.relaxed = relaxed
            await self._run(reduction)
            if reduction.tokens <= enough:
                break
            enough = due_tokens if turn.is_due else limit
        draft = reduction.decided
        hardly_less = 0.9 * turn.measure(turn.contents)
        is_requested = turn.reason == "requested" and not ask.attempts
        is_unanswered = is_requested and reduction.tokens > hardly_less
        if reduction.tokens > limit or is_unanswered:
            if draft and ask.attempts:
                squeezed = squeeze(turn, draft)
                if fits(turn, squeezed):
                    return squeezed.draft
            return await ask.summarize_all(turn) or draft
        # Before the threshold, less than this is not worth a new prefix.
        gain = turn.tokens - reduction.tokens
        is_early = not (turn.is_due or ask.attempts)
        return None if is_early and gain < int(0.05 * window_tokens) else draft

    async def _run(self, reduction: Reduction) -> None:
        for reducer in (self.window, self.tool_output, self.summary, *self.reducers):
            result = await reducer.reduce(reduction) if reducer else None
            if result is StrategyResult.TARGET_REACHED:
                return
