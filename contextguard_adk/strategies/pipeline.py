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

from contextguard_adk._history.stored import Draft
from contextguard_adk._history.truncation import Truncation
from contextguard_adk._summaries.ask import Ask
from contextguard_adk._summaries.compose import squeeze
from contextguard_adk._support.settings import Ratio
from contextguard_adk._turn.turn import Turn
from contextguard_adk.strategies.base import Strategy
from contextguard_adk.strategies.loading import import_subclass
from contextguard_adk.strategies.reducers import (
    MessageWindow,
    Reducer,
    SummaryCompaction,
    TokenWindow,
    ToolOutputTruncation,
)
from contextguard_adk.strategies.reduction import Reduction, Relaxed, StrategyResult

RELAXED = (Relaxed(lengths=True), Relaxed(lengths=True, preferences=True))
"""The settings that further runs of the reducers do not insist on."""


def _suggest_instance(value: object) -> str:
    """Asks whether a class in place of its instance was meant as one."""
    if isinstance(value, type) and issubclass(value, Reducer):
        return f". Did you mean {value.__name__}(…)?"
    return ""


def _read_reducer(value: object) -> object:
    """Makes a reducer of a table that names its class; takes a reducer as it is."""
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
        """The part of the context window at which the pipeline may stop."""
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
        due_tokens = min(turn.limit_tokens, turn.budgets.threshold_tokens)
        wanted_tokens = int(self.target_token_ratio * window_tokens)
        target_tokens = min(wanted_tokens, due_tokens - 1)
        reduction = Reduction(turn, ask, target_tokens)
        await self._relax_until_small(reduction, due_tokens)

        draft = reduction.decided
        if reduction.tokens > turn.limit_tokens or _is_unanswered(reduction):
            return await _summarize_all(turn, ask, draft)

        # Before the threshold, less than this is not worth a new prefix.
        worthwhile_tokens = int(0.05 * window_tokens)
        is_early = not (turn.is_due or ask.attempts)
        if is_early and turn.tokens - reduction.tokens < worthwhile_tokens:
            return None
        return draft

    async def _relax_until_small(self, reduction: Reduction, due_tokens: int) -> None:
        """Runs the reducers with ever more relaxed settings, while it takes that."""
        turn = reduction.turn
        if turn.is_due:
            # A run that gains little has to be repeated soon.
            enough_at_first_tokens = (reduction.target_tokens + due_tokens) // 2
            enough_tokens = due_tokens
        else:
            enough_at_first_tokens = turn.limit_tokens
            enough_tokens = turn.limit_tokens

        await self._run(reduction)
        if reduction.tokens <= enough_at_first_tokens:
            return
        for relaxed in RELAXED:
            reduction.relaxed = relaxed
            await self._run(reduction)
            if reduction.tokens <= enough_tokens:
                return

    async def _run(self, reduction: Reduction) -> None:
        """Runs the reducers in order until one reaches the target."""
        for reducer in (self.window, self.tool_output, self.summary, *self.reducers):
            if reducer is None:
                continue
            result = await reducer.reduce(reduction)
            if result is StrategyResult.TARGET_REACHED:
                return


def _is_unanswered(reduction: Reduction) -> bool:
    """Returns whether a compaction was asked for, and the reducers did hardly any."""
    turn = reduction.turn
    if turn.reason != "requested" or reduction.ask.attempts:
        return False
    return reduction.tokens > 0.9 * turn.measure(turn.contents)


async def _summarize_all(turn: Turn, ask: Ask, draft: Draft | None) -> Draft | None:
    """Summarizes all messages, unless a draft that was paid for can be made to fit."""
    if draft and ask.attempts:
        squeezed = squeeze(turn, draft)
        if squeezed.tokens <= turn.limit_tokens:
            return squeezed.draft
    return await ask.summarize_all(turn) or draft
