"""Runs reducers in order, cheapest first, until the request is small enough.

A reducer is one step of a pipeline: it drops, shortens or summarizes messages. Settings
that are a part of the window are a part of `Budgets.working_tokens`: the context
window, or a smaller one if the strategy has a low `trigger`.
"""

from __future__ import annotations

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
"""The settings that the second and the third run of the reducers do not insist on."""

_DEFAULT_TARGET_RATIO = 0.5
"""The target without a summary step, as a part of the window.

It is the default of `SummaryCompaction`.
"""

_WORTHWHILE_RATIO = 0.05
"""A gain of a smaller part of the window is not worth a new prompt for the cache."""

_HARDLY_COMPACTED_RATIO = 0.9
"""A request that keeps more than this part of its tokens was hardly compacted."""


def _suggest_instance(value: object) -> str:
    """Returns the question ". Did you mean Class(…)?" for the class of a reducer.

    Returns "" for any other value.
    """
    if isinstance(value, type) and issubclass(value, Reducer):
        return f". Did you mean {value.__name__}(…)?"
    return ""


def _read_reducer(value: object) -> object:
    """Returns a reducer as it is, or makes one of a table from a settings file.

    The table has the dotted path of the class as `reducer`, beside its settings.
    """
    if isinstance(value, Reducer):
        return value
    if not (isinstance(value, dict) and "reducer" in value):
        expected = "a Reducer, or a table with `reducer`, its dotted path, is expected"
        raise ValueError(f"{expected}{_suggest_instance(value)}")

    settings = dict(value)
    path = settings.pop("reducer")
    reducer_class = import_subclass(path, Reducer)  # type: ignore[type-abstract]
    return reducer_class.model_validate(settings)


class Pipeline(Strategy):
    """Drops, shortens and only then summarizes.

    Runs when tokens reach the threshold, or `compression_threshold` of the window if
    that is less. The reducers run in order: window, tool output, summary, then
    `reducers`. The request is measured after each, and the pipeline stops at the
    target, `target_token_ratio` of the window. Its decisions stay in place on later
    calls.

    While the request would not fit, settings are relaxed: first lengths, then triggers,
    minima and preserved messages. At last all messages are summarized but the newest
    (see `keep`). Lengths are also relaxed when the request would stay above the middle
    between target and threshold, because a run that gains little has to be repeated
    soon.
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
        """Reads the value of a step, in code or in a file.

        - False becomes None, which TOML cannot write.
        - A table for `window` becomes a `TokenWindow` if it has `budget_tokens`, else a
          `MessageWindow`. Pydantic reads the tables of the other steps.
        """
        if value is False:
            return None
        if not (value is None or isinstance(value, dict | Reducer)):
            expected = "a reducer, a table of settings or false is expected"
            raise ValueError(f"{expected}{_suggest_instance(value)}")

        if info.field_name == "window" and isinstance(value, dict):
            window_class = TokenWindow if "budget_tokens" in value else MessageWindow
            return window_class.model_validate(value)
        return value

    @model_validator(mode="after")
    def _check_threshold(self) -> Pipeline:
        """Refuses a compression_threshold that does not lie above the target."""
        early_ratio = self.compression_threshold
        if early_ratio is not None and early_ratio <= self.target_token_ratio:
            raise ValueError(
                f"compression_threshold ({early_ratio}) must be larger than the "
                f"target_token_ratio of the summary ({self.target_token_ratio})"
            )
        return self

    @property
    def target_token_ratio(self) -> float:
        """The part of the context window at which the pipeline may stop."""
        if self.summary is None:
            return _DEFAULT_TARGET_RATIO
        return self.summary.target_token_ratio

    def _shorten_strings(self, has_recall: bool) -> Truncation | None:
        """Returns how strings in results are shortened from their first request on.

        None leaves them whole until a compaction, in these cases:

        - `tool_output` is None, or leaves the newest result whole.
        - The agent could not read the rest back, and the user has not set
          `tool_output`.

        Args:
            has_recall: Whether the agent can read results back.
        """
        step = self.tool_output
        if step is None or step.preserve_last_tool_result:
            return None
        was_set_by_user = "tool_output" in self.model_fields_set
        may_shorten = has_recall or was_set_by_user
        return step.truncation() if may_shorten else None

    def fullness(self, turn: Turn) -> float:
        """Returns tokens as a part of the size from which on the reducers run.

        That size is the smaller one of the threshold and `compression_threshold`.
        """
        if self.compression_threshold is None:
            return turn.fullness
        early_tokens = self.compression_threshold * turn.budgets.working_tokens
        return max(turn.fullness, turn.tokens / early_tokens)

    async def compact(self, turn: Turn, ask: Ask) -> Draft | None:
        """Runs the reducers when the threshold, or the earlier one, is reached.

        If the reducers leave the request too large, or do hardly anything although a
        user asked for a compaction, all messages but the newest are summarized.
        """
        if self.fullness(turn) < 1:
            return None

        window_tokens = turn.budgets.working_tokens
        due_tokens = min(turn.limit_tokens, turn.budgets.threshold_tokens)
        wanted_tokens = int(self.target_token_ratio * window_tokens)
        # With a low threshold, the wanted size could itself be due for a compaction.
        target_tokens = min(wanted_tokens, due_tokens - 1)
        reduction = Reduction(turn, ask, target_tokens)
        await self._run_until_small(reduction, due_tokens)

        draft = reduction.decided
        is_too_large = reduction.tokens > turn.limit_tokens
        if is_too_large or _is_request_ignored(reduction):
            return await _summarize_all(turn, ask, draft)

        # A small gain is given up, unless the threshold is reached or a summary was
        # paid for: each change of the request costs the provider's prompt cache.
        may_wait = not turn.is_due and ask.attempts == 0
        gained_tokens = turn.tokens - reduction.tokens
        gains_little = gained_tokens < int(_WORTHWHILE_RATIO * window_tokens)
        if may_wait and gains_little:
            return None
        return draft

    async def _run_until_small(self, reduction: Reduction, due_tokens: int) -> None:
        """Runs the reducers up to three times, each time with more relaxed settings.

        It stops after the first run that brings the request down to a goal:

        - If the threshold is reached, the first run has to end well below `due_tokens`:
          otherwise a compaction is due again soon. The other runs have to end there.
        - If only `compression_threshold` is reached, the request just has to fit.

        Args:
            reduction: The run of the pipeline.
            due_tokens: The size of a request from which on a compaction is due.
        """
        turn = reduction.turn
        if turn.is_due:
            first_goal_tokens = (reduction.target_tokens + due_tokens) // 2
            relaxed_goal_tokens = due_tokens
        else:
            first_goal_tokens = turn.limit_tokens
            relaxed_goal_tokens = turn.limit_tokens

        await self._run_reducers(reduction)
        if reduction.tokens <= first_goal_tokens:
            return
        for relaxed in RELAXED:
            reduction.relaxed = relaxed
            await self._run_reducers(reduction)
            if reduction.tokens <= relaxed_goal_tokens:
                return

    async def _run_reducers(self, reduction: Reduction) -> None:
        """Runs the reducers in order until one reaches the target."""
        for reducer in (self.window, self.tool_output, self.summary, *self.reducers):
            if reducer is None:
                continue
            result = await reducer.reduce(reduction)
            if result is StrategyResult.TARGET_REACHED:
                return


def _is_request_ignored(reduction: Reduction) -> bool:
    """Whether a compaction was asked for, and the reducers have hardly done anything.

    If they have had a summary written, they have done enough, however small the gain.
    """
    turn = reduction.turn
    has_written_summary = reduction.ask.attempts > 0
    if turn.reason != "requested" or has_written_summary:
        return False

    # `turn.tokens` may follow from a provider's count; an estimate compares better.
    tokens_before = turn.measure(turn.contents)
    return reduction.tokens > _HARDLY_COMPACTED_RATIO * tokens_before


async def _summarize_all(turn: Turn, ask: Ask, draft: Draft | None) -> Draft | None:
    """Returns the draft for a request that the reducers have left too large.

    It is the first of these that there is:

    1. the draft of the reducers with a shorter summary, if a summary was paid for and
       the request fits with a shorter one
    2. a new draft that summarizes all messages but the newest
    3. the draft of the reducers as it is; None if they have changed nothing

    Args:
        turn: The model call.
        ask: Has summaries written. Its `attempts` count those of the reducers.
        draft: The draft of the reducers; None if they have changed nothing.
    """
    was_paid_for = ask.attempts > 0
    if draft and was_paid_for:
        squeezed = squeeze(turn, draft)
        if squeezed.tokens <= turn.limit_tokens:
            return squeezed.draft
    return await ask.summarize_all(turn) or draft
