"""The reducers that a pipeline is made of, cheapest first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import Field, model_validator

from contextguard_adk._history.truncation import Truncation
from contextguard_adk._support.settings import (
    Count,
    PositiveCount,
    Ratio,
    Settings,
    resolve_size,
    size,
)
from contextguard_adk.strategies.reduction import Reduction, StrategyResult


class Reducer(Settings, ABC):
    """One step of a `Pipeline`. Subclass it for a step of your own.

    A reducer is a value like a strategy: frozen settings and one method.
    """

    @abstractmethod
    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Makes the request, as earlier reducers left it, smaller.

        `reduction.relaxed` says which settings not to insist on.
        """


class _Window(Reducer, ABC):
    preserve_system: bool = Field(
        default=True,
        description="Whether messages of the history that are instructions stay.",
    )
    preserve_initial_task: bool = Field(
        default=True, description="Whether the user's first message stays."
    )

    def _preserve(self, reduction: Reduction) -> list[int]:
        """What stays whatever its age, oldest first."""
        if reduction.relaxed.preferences:
            return []
        first = reduction.turn.history.user_messages[:1]
        return [
            index
            for index in reduction.kept
            if (self.preserve_system and reduction.is_instruction(index))
            or (self.preserve_initial_task and index in first)
        ]


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
        least = self.min_messages_before_windowing
        if reduction.relaxed.preferences:
            least = 0
        if len(kept) < max(least, self.window_size + 1):
            return StrategyResult.NO_CHANGE
        preserved = self._preserve(reduction)
        if self.strict_window_size:
            protected = reduction.protected.intersection(kept)
            count = max(0, self.window_size - len(protected))
            preserved = sorted(set(preserved) - protected, reverse=True)[:count]
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
        window = turn.budgets.working_tokens / turn.correction  # In heuristic tokens.
        room = resolve_size(self.budget_tokens, window)
        if sum(costs.values()) <= room:
            return StrategyResult.NO_CHANGE
        return _keep_newest(reduction, self._preserve(reduction), costs, room)


def _keep_newest(
    reduction: Reduction, preserved: Iterable[int], costs: Mapping[int, int], room: int
) -> StrategyResult:
    """Drops all but what is protected or preserved and the newest that fit the room."""
    stay = reduction.protected.intersection(costs).union(preserved)
    room -= sum(costs[index] for index in stay)
    dropped = [index for index in costs if index not in stay]
    while dropped and room >= costs[dropped[-1]]:
        room -= costs[dropped.pop()]
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
        truncation = self.truncation(reduction.relaxed.lengths)
        if reduction.truncation:
            # What is short already does not grow again.
            known, known_last = reduction.truncation
            last = max(last, known_last)
            if known.result_length and not truncation.result_length:
                truncation = known
        preview = reduction.turn.history.preview
        if preview is not None and preview.strings == truncation:
            return StrategyResult.NO_CHANGE
        return reduction.truncate(truncation, last)

    def truncation(self, is_tight: bool = False) -> Truncation:
        """As set, or to a quarter but at least 1,000 characters."""
        ratio = min(1.0, max(0.25, 1_000 / self.max_length)) if is_tight else 1.0
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
    """Leaves of older tool results a line with their size, and a handle; calls stay.

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
            last = last and reduction.last_tool_result(before=last)
        cleared = Truncation(0, result_length=1, exclude_tools=self.exclude_tools)
        known = reduction.truncation
        is_other = known is not None and known[0].max_length > 0
        if last is None or is_other or (known and last <= known[1]):
            return StrategyResult.NO_CHANGE
        return reduction.truncate(cleared, last)


class SummaryCompaction(Reducer):
    """Summarizes all but the newest messages when pressure is very high.

    It is paid for only when what stays beside the summary is expected to be at most the
    target; where nothing else makes the request fit, fewer of the newest messages stay.
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
        window = reduction.turn.budgets.working_tokens
        keep = self.preserve_recent_count
        target = reduction.target_tokens
        is_relaxed = reduction.relaxed.preferences
        is_triggered = reduction.tokens >= self.trigger_threshold * window
        has_enough = len(reduction.kept) >= self.min_messages_for_summary
        if not (is_relaxed or (is_triggered and has_enough)):
            return StrategyResult.NO_CHANGE
        if reduction.expect_beside_summary(keep) > target:
            if not is_relaxed:
                return StrategyResult.NO_CHANGE
            while keep and reduction.expect_beside_summary(keep) > 0.3 * target:
                keep //= 2
        return await reduction.summarize(keep)
