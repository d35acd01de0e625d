"""Runs reducers in order, cheapest first, until the request is small enough.

A reducer is one step of a pipeline: it drops, shortens or summarizes messages. A ratio
in the settings is a part of `Budgets.working_tokens`. These are the tokens of the
context window, or fewer if the strategy has a low `trigger`.
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
from contextguard_adk._support.settings import Items, Ratio
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
"""The settings that need not hold in the second and in the third run of the reducers.
"""

_DEFAULT_TARGET_RATIO = 0.5
"""A pipeline without a summary step may stop at this part of the window.

The default of `SummaryCompaction.target_token_ratio` is the same.
"""

_WORTHWHILE_RATIO = 0.05
"""Reducers have to gain at least this part of the window.

A smaller gain is not worth the loss: the prompt cache does not have the changed prompt.
"""

_HARDLY_COMPACTED_RATIO = 0.9
"""A request that keeps more than this part of its tokens was hardly compacted."""


def _suggest_instance(value: object) -> str:
    """Returns the question ". Did you mean Class(…)?" for a class of reducers.

    A user may have written a class in place of an instance. For any other value, ""
    is returned.
    """
    if isinstance(value, type) and issubclass(value, Reducer):
        return f". Did you mean {value.__name__}(…)?"
    return ""


def _read_reducer(value: object) -> object:
    """Returns a reducer as it is; makes a reducer of a table from a settings file.

    The table has the dotted path of a class as `reducer`. All other values in the table
    are the settings of this class. Any other value raises a ValueError.
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
    `reducers`. The request is measured after each reducer, and the pipeline stops at
    the target, `target_token_ratio` of the window. The decisions of the reducers stay
    in place on later calls.

    While the request would not fit, settings are relaxed: first lengths, then triggers,
    minima and preserved messages. The last resort is a summary of all messages but the
    newest (see `keep`). Lengths are also relaxed when the request would stay above the
    middle between target and threshold, because such a request is soon too large again.
    """

    window: MessageWindow | TokenWindow | None = Field(
        default=TokenWindow(budget_tokens="auto"),
        description="Drops old messages: a `MessageWindow` or a `TokenWindow`. The "
        "default keeps the newest that take a twentieth of the context window, or a "
        "quarter while no tool has been called. None (false in a file): this step "
        "drops nothing.",
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
    reducers: Items[Annotated[Reducer, BeforeValidator(_read_reducer)]] = Field(
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

        - If the value is False: it becomes None, because TOML has no null.
        - If the value is a table for `window`: it becomes a `TokenWindow` if the table
          has `budget_tokens`, otherwise a `MessageWindow`.
        - If the value is another table, a reducer or None: it stays. Pydantic makes the
          reducer of the table.

        Any other value raises a ValueError.
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
        """Refuses a compression_threshold that is not above the target.

        Otherwise the pipeline could run for a request that is small enough to stop.
        """
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
        """Returns how strings in tool results are shortened from the first request on.

        None leaves the strings whole until a compaction, in these cases:

        - If `tool_output` is None.
        - If `tool_output` leaves the newest result whole.
        - If the agent cannot read whole results back, and `tool_output` is the default:
          only a `tool_output` that the user has set shortens strings so early.

        Args:
            has_recall: Whether the agent can read whole results back.
        """
        step = self.tool_output
        if step is None or step.preserve_last_tool_result:
            return None
        was_set_by_user = "tool_output" in self.model_fields_set
        may_shorten = has_recall or was_set_by_user
        return step.truncation() if may_shorten else None

    def fullness(self, turn: Turn) -> float:
        """Returns the tokens as a part of the size from which on the reducers run.

        This size is the threshold or `compression_threshold`, whichever is smaller. The
        smaller size gives the larger ratio.
        """
        if self.compression_threshold is None:
            return turn.fullness
        early_tokens = self.compression_threshold * turn.budgets.working_tokens
        return max(turn.fullness, turn.tokens / early_tokens)

    async def compact(self, turn: Turn, ask: Ask) -> Draft | None:
        """Runs the reducers when the threshold or `compression_threshold` is reached.

        All messages but the newest are summarized in two cases:

        - If the reducers leave the request too large.
        - If a user has asked for a compaction, and the reducers do hardly anything.

        The result is None in three cases:

        - If neither size is reached.
        - If no reducer changes the request.
        - If the gain is too small.
        """
        if self.fullness(turn) < 1:
            return None

        window_tokens = turn.budgets.working_tokens
        # In a very large window, `limit_tokens` may be below the threshold.
        due_tokens = min(turn.limit_tokens, turn.budgets.threshold_tokens)
        wanted_tokens = int(self.target_token_ratio * window_tokens)
        # A request of the target size must not be due for another compaction.
        target_tokens = min(wanted_tokens, due_tokens - 1)
        reduction = Reduction(turn, ask, target_tokens)
        await self._run_until_small(reduction, due_tokens)

        draft = reduction.decided
        is_too_large = reduction.tokens > turn.limit_tokens
        if is_too_large or _is_request_ignored(reduction):
            return await _summarize_all(turn, ask, draft)

        # Each change of the request costs the provider's prompt cache. So a small gain
        # is given up, unless the threshold is reached or a summary was paid for.
        may_wait = not turn.is_due and ask.attempts == 0
        gained_tokens = turn.tokens - reduction.tokens
        gains_little = gained_tokens < int(_WORTHWHILE_RATIO * window_tokens)
        if may_wait and gains_little:
            return None
        return draft

    async def _run_until_small(self, reduction: Reduction, due_tokens: int) -> None:
        """Runs the reducers up to three times, each time with more relaxed settings.

        No further run follows once the request has at most a certain size:

        - If only `compression_threshold` is reached: the size is the largest one that
          fits.
        - If the threshold is reached: after the first run, the size is the middle
          between the target and `due_tokens`, because a larger request would soon be
          compacted again. After a run with relaxed settings, the size is `due_tokens`,
          because a smaller size is not worth the loss of more messages.

        Args:
            reduction: The decisions of the reducers so far.
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
        """Runs the reducers in order, until the request has reached the target."""
        for reducer in (self.window, self.tool_output, self.summary, *self.reducers):
            if reducer is None:
                continue
            result = await reducer.reduce(reduction)
            if result is StrategyResult.TARGET_REACHED:
                return


def _is_request_ignored(reduction: Reduction) -> bool:
    """Whether a compaction was asked for, and the reducers have hardly done anything.

    A summary is enough, however little the request has lost by it.
    """
    turn = reduction.turn
    has_written_summary = reduction.ask.attempts > 0
    if turn.reason != "requested" or has_written_summary:
        return False

    # `reduction.tokens` is an estimate, but `turn.tokens` may come from the provider's
    # count. Only two estimates can be compared.
    tokens_before = turn.measure(turn.contents)
    return reduction.tokens > _HARDLY_COMPACTED_RATIO * tokens_before


async def _summarize_all(turn: Turn, ask: Ask, draft: Draft | None) -> Draft | None:
    """Returns the draft for a request for which the reducers have done too little.

    The draft is the first of these that there is:

    1. the draft of the reducers with a shorter summary, if a summary was paid for and
       the request fits with the shorter one
    2. a new draft that summarizes all messages but the newest
    3. the draft of the reducers as it is; None if they have changed nothing

    Args:
        turn: The model call.
        ask: Writes summaries. Its `attempts` count those of the reducers.
        draft: The draft of the reducers; None if they have changed nothing.
    """
    was_paid_for = ask.attempts > 0
    if draft and was_paid_for:
        squeezed = squeeze(turn, draft)
        if squeezed.tokens <= turn.limit_tokens:
            return squeezed.draft
    return await ask.summarize_all(turn) or draft
