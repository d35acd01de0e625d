"""The reducers of a pipeline, cheapest first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import Field, model_validator

from contextguard_adk._history.truncation import Truncation
from contextguard_adk._measuring.budgets import resolve_size
from contextguard_adk._support.settings import (
    Count,
    PositiveCount,
    Ratio,
    Settings,
    size,
)
from contextguard_adk.strategies.reduction import Reduction, StrategyResult


class Reducer(Settings, ABC):
    """One step of a `Pipeline`. Subclass it for a step of your own.

    A reducer is a value like a strategy: frozen settings and one method.
    """

    @abstractmethod
    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Makes the request smaller that earlier reducers have left.

        `reduction.relaxed` says which settings not to insist on.
        """


class _Window(Reducer, ABC):
    """The settings of a reducer that drops old messages."""

    preserve_system: bool = Field(
        default=True,
        description="Whether messages of the history that are instructions stay.",
    )
    preserve_initial_task: bool = Field(
        default=True, description="Whether the user's first message stays."
    )

    def _preserve(self, reduction: Reduction) -> list[int]:
        """Returns indexes of messages that stay whatever their age, oldest first."""
        if reduction.relaxed.preferences:
            return []
        first_message = reduction.turn.history.user_messages[:1]
        preserved = list[int]()
        for index in reduction.kept:
            is_system = self.preserve_system and reduction.is_instruction(index)
            is_task = self.preserve_initial_task and index in first_message
            if is_system or is_task:
                preserved.append(index)
        return preserved


class MessageWindow(_Window):
    """Keeps the newest messages, and drops older ones without a summary.

    Messages are contents of the history: texts, tool calls, tool results. Calls stay
    with their results, so the number kept can be one or two off.
    """

    window_size: PositiveCount = Field(
        default=40,
        description="How many of the newest messages (texts, tool calls, tool results) "
        "stay, at least 1.",
    )
    min_messages_before_windowing: Count = Field(
        default=50,
        description="With fewer messages than this nothing is dropped; at least 0.",
    )
    strict_window_size: bool = Field(
        default=False,
        description="Whether messages that are preserved count against window_size: of "
        "them the newest stay, and no more than window_size messages in all.",
    )

    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Drops what is older than the window."""
        kept = reduction.kept
        least_count = self.window_size + 1
        if not reduction.relaxed.preferences:
            least_count = max(least_count, self.min_messages_before_windowing)
        if len(kept) < least_count:
            return StrategyResult.NO_CHANGE

        preserved = self._preserve(reduction)
        if self.strict_window_size:
            protected = reduction.protected.intersection(kept)
            room = max(0, self.window_size - len(protected))
            newest_first = sorted(set(preserved) - protected, reverse=True)
            preserved = newest_first[:room]
        costs = dict.fromkeys(kept, 1)
        return _keep_newest(reduction, preserved, costs, self.window_size)


class TokenWindow(_Window):
    """Keeps as many of the newest messages as fit a budget of tokens."""

    budget_tokens: Annotated[int | float, size(100)] = Field(
        description="What the messages that stay may take: tokens as an int, at least "
        "100, at 4 bytes a token, or a part of the context window as a float, more "
        "than 0 and less than 1, as the model counts."
    )

    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Drops what is older than the budget reaches."""
        costs = reduction.measure_kept()
        turn = reduction.turn
        # `measure_kept` counts heuristic tokens, the window is in real ones.
        heuristic_window = turn.budgets.working_tokens / turn.correction
        room = resolve_size(self.budget_tokens, heuristic_window)
        if sum(costs.values()) <= room:
            return StrategyResult.NO_CHANGE
        return _keep_newest(reduction, self._preserve(reduction), costs, room)


def _keep_newest(
    reduction: Reduction, preserved: Iterable[int], costs: Mapping[int, int], room: int
) -> StrategyResult:
    """Drops older messages, until those that stay fit the room.

    Args:
        reduction: The run of the pipeline.
        preserved: Indexes of messages that stay in any case, beside the protected ones.
        costs: The indexes of all messages, oldest first, with what each takes.
        room: What the messages that stay may take.
    """
    stay = reduction.protected.intersection(costs).union(preserved)
    room_left = room - sum(costs[index] for index in stay)
    dropped = [index for index in costs if index not in stay]
    while dropped and costs[dropped[-1]] <= room_left:
        newest = dropped.pop()
        room_left -= costs[newest]
    return reduction.drop(dropped)


class ToolOutputTruncation(Reducer):
    """Shortens long strings in tool results, wherever they stand in nested JSON."""

    max_length: PositiveCount = Field(
        default=4_000,
        description="Strings longer than this are shortened to it: characters, at "
        "least 1. Where the request would otherwise stay near the threshold, to a "
        "quarter of it, but at least 1,000.",
    )
    show_truncation_notice: bool = Field(
        default=True,
        description="Whether a shortened string says how much of it is missing.",
    )
    smart_truncate: bool = Field(
        default=False, description="Whether head and tail stay; False: the head alone."
    )
    head_length: Count = Field(
        default=3_000,
        description="How much of the beginning smart_truncate keeps: characters, at "
        "least 0; head_length and tail_length together at most max_length.",
    )
    tail_length: Count = Field(
        default=1_000,
        description="How much of the end smart_truncate keeps: characters, at least 0.",
    )
    preserve_last_tool_result: bool = Field(
        default=True,
        description="Whether the newest tool result stays whole until the pipeline "
        "acts on a later call. False: each result is shortened from its first request "
        "on, where the agent can read it back with `recall_history` or these settings "
        "were given to the pipeline.",
    )

    @model_validator(mode="after")
    def _check_lengths(self) -> ToolOutputTruncation:
        total = self.head_length + self.tail_length
        if self.smart_truncate and total > self.max_length:
            raise ValueError(
                f"head_length + tail_length is {total}, which is more than max_length "
                f"({self.max_length})"
            )
        return self

    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Shortens the tool results that stand in the request."""
        last = reduction.last_tool_result()
        if self.preserve_last_tool_result and not reduction.relaxed.preferences:
            last = reduction.last_tool_result(before=last)
        if last is None:
            return StrategyResult.NO_CHANGE

        truncation = self.truncation(is_tight=reduction.relaxed.lengths)
        upto = last
        if reduction.truncation is not None:
            # Results that are short already do not grow again.
            known, known_upto = reduction.truncation
            upto = max(last, known_upto)
            if known.result_length and not truncation.result_length:
                truncation = known

        preview = reduction.turn.history.preview
        if preview is not None and preview.strings == truncation:
            return StrategyResult.NO_CHANGE
        return reduction.truncate(truncation, upto)

    def truncation(self, is_tight: bool = False) -> Truncation:
        """Returns how strings are shortened: as set, or to a quarter of that.

        A quarter is at least 1,000 characters, or as set where that is less.
        """
        ratio = 1.0
        if is_tight:
            ratio = min(1.0, max(0.25, 1_000 / self.max_length))
        max_length = int(self.max_length * ratio)
        return Truncation(
            max_length=max_length,
            show_truncation_notice=self.show_truncation_notice,
            smart_truncate=self.smart_truncate,
            head_length=int(self.head_length * ratio),
            tail_length=int(self.tail_length * ratio),
            result_length=max_length if is_tight else 0,
        )


class ClearToolResults(Reducer):
    """Replaces older tool results by a line with their size and a handle; calls stay.

    The agent reads a result back with `recall_history`, where it is offered that tool.
    It does not clear what `ToolOutputTruncation` has shortened.
    """

    keep_count: PositiveCount = Field(
        default=3,
        description="How many of the newest messages with tool results stay, at least "
        "1; the results of one message answer calls that were made together.",
    )
    exclude_tools: tuple[str, ...] = Field(
        default=(), description="Names of tools whose results stay."
    )

    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Clears all results but the newest."""
        last = reduction.last_tool_result()
        for _ in range(self.keep_count):
            if last is None:
                return StrategyResult.NO_CHANGE
            last = reduction.last_tool_result(before=last)
        if last is None:
            return StrategyResult.NO_CHANGE

        if reduction.truncation is not None:
            known, known_upto = reduction.truncation
            is_shortened = known.max_length > 0  # And not cleared.
            if is_shortened or last <= known_upto:
                return StrategyResult.NO_CHANGE
        cleared = Truncation(0, result_length=1, exclude_tools=self.exclude_tools)
        return reduction.truncate(cleared, last)


class SummaryCompaction(Reducer):
    """Summarizes all but the newest messages when pressure is very high.

    It is paid for only when the rest of the request is expected to be at most the
    target. Where nothing else makes the request fit, fewer of the newest messages stay.
    """

    trigger_threshold: Ratio = Field(
        default=0.90,
        description="The part of the context window below which nothing is summarized, "
        "more than target_token_ratio and at most 1.",
    )
    target_token_ratio: float = Field(
        default=0.50,
        gt=0,
        lt=1,
        strict=True,
        description="The part of the context window at which the pipeline may stop, "
        "more than 0 and less than 1.",
    )
    min_messages_for_summary: Count = Field(
        default=20,
        description="With fewer messages than this nothing is summarized; at least 0.",
    )
    preserve_recent_count: Count = Field(
        default=10,
        description="How many of the newest messages stay word for word, at least 0; "
        "fewer where the request would otherwise not fit.",
    )

    @model_validator(mode="after")
    def _check_ratios(self) -> SummaryCompaction:
        if self.trigger_threshold <= self.target_token_ratio:
            raise ValueError(
                f"trigger_threshold ({self.trigger_threshold}) must be larger than "
                f"target_token_ratio ({self.target_token_ratio})"
            )
        return self

    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Summarizes when the request is still above the trigger."""
        is_relaxed = reduction.relaxed.preferences
        if not (is_relaxed or self._is_triggered(reduction)):
            return StrategyResult.NO_CHANGE

        keep_count = self.preserve_recent_count
        target_tokens = reduction.target_tokens
        if reduction.expect_beside_summary(keep_count) > target_tokens:
            if not is_relaxed:
                return StrategyResult.NO_CHANGE
            most_tokens = 0.3 * target_tokens
            while keep_count and (
                reduction.expect_beside_summary(keep_count) > most_tokens
            ):
                keep_count //= 2
        return await reduction.summarize(keep_count)

    def _is_triggered(self, reduction: Reduction) -> bool:
        """Returns whether the request is large enough, and has enough messages."""
        window_tokens = reduction.turn.budgets.working_tokens
        is_full = reduction.tokens >= self.trigger_threshold * window_tokens
        return is_full and len(reduction.kept) >= self.min_messages_for_summary
