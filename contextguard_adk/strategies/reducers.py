"""The reducers that a pipeline is made of, cheapest first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field, model_validator

from contextguard_adk.history.truncation import Truncation
from contextguard_adk.strategies.reduction import Reduction, StrategyResult

TIGHT_RATIO = 0.25
"""Of the length set: how short tool results become before a summary is paid for."""

TIGHT_LENGTH = 1_000
"""Characters; tightening leaves at least so many."""

YIELDING_RATIO = 0.3
"""Of the target: what the newest messages may take where their number gives way."""


class Reducer(BaseModel, ABC):
    """One step of a `Pipeline`. Subclass it for a step of your own.

    A reducer is a value like a strategy: frozen settings and one method.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @abstractmethod
    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Makes the request smaller where its settings ask for it.

        Args:
            reduction: The request as earlier reducers left it, and what may be done
                to it. Its `yielding` says which preferences have to give way.

        Returns:
            What it achieved; `TARGET_REACHED` stops the pipeline.
        """


class MessageWindow(Reducer):
    """Keeps the newest messages, and drops older ones without a summary.

    Messages are contents of the history: texts, tool calls, tool results. Calls stay
    with their results, so the number kept can be one or two off.

    Attributes:
        window_size: How many messages to keep, at least 1.
        min_messages_before_windowing: Below so many messages nothing is dropped.
        preserve_system: Whether history contents that are instructions stay.
        preserve_initial_task: Whether the first message of the user stays.
        strict_window_size: Whether what is preserved counts against the window so
            that no more than `window_size` messages stay: the newest of it.
    """

    window_size: int = Field(default=40, ge=1, strict=True)
    min_messages_before_windowing: int = Field(default=50, ge=0, strict=True)
    preserve_system: bool = True
    preserve_initial_task: bool = True
    strict_window_size: bool = False

    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Drops what is older than the window."""
        kept = reduction.kept
        minimum = 0 if reduction.yielding.minima else self.min_messages_before_windowing
        if len(kept) <= self.window_size or len(kept) < minimum:
            return StrategyResult.NO_CHANGE
        stay = {index for index in kept if index in reduction.protected}
        preserved = [
            index
            for index in _find_preserved(
                reduction, self.preserve_system, self.preserve_initial_task
            )
            if index not in stay
        ]
        if self.strict_window_size:
            preserved = _newest(preserved, self.window_size - len(stay))
        stay.update(preserved)
        others = [index for index in kept if index not in stay]
        stay.update(_newest(others, self.window_size - len(stay)))
        return reduction.drop([index for index in kept if index not in stay])


class TokenWindow(Reducer):
    """Keeps as many of the newest messages as fit a budget of tokens.

    Attributes:
        budget_tokens: What the messages kept may take, by bytes / 4; at least 100.
        preserve_system: Whether history contents that are instructions stay.
        preserve_initial_task: Whether the first message of the user stays.
    """

    budget_tokens: int = Field(ge=100, strict=True)
    preserve_system: bool = True
    preserve_initial_task: bool = True

    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Drops what is older than the budget reaches."""
        kept = reduction.kept
        if reduction.measure(kept) <= self.budget_tokens:
            return StrategyResult.NO_CHANGE
        stay = {index for index in kept if index in reduction.protected}
        stay.update(
            _find_preserved(reduction, self.preserve_system, self.preserve_initial_task)
        )
        room = self.budget_tokens - reduction.measure(stay)
        for index in reversed(kept):
            if index in stay:
                continue
            room -= reduction.measure([index])
            if room < 0:
                break
            stay.add(index)
        return reduction.drop([index for index in kept if index not in stay])


class ToolOutputTruncation(Reducer):
    """Shortens long strings in tool results, wherever they stand in nested JSON.

    Attributes:
        max_length: Strings longer than this are shortened to it; characters.
        show_truncation_notice: Whether to say how much is missing.
        smart_truncate: Whether to keep head and tail in place of the head alone.
        head_length: What `smart_truncate` keeps of the beginning; characters.
        tail_length: What `smart_truncate` keeps of the end; characters.
        preserve_last_tool_result: Whether the newest tool result stays whole.
    """

    max_length: int = Field(default=4_000, ge=1, strict=True)
    show_truncation_notice: bool = True
    smart_truncate: bool = False
    head_length: int = Field(default=3_000, ge=0, strict=True)
    tail_length: int = Field(default=1_000, ge=0, strict=True)
    preserve_last_tool_result: bool = True

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
        if last is None:
            return StrategyResult.NO_CHANGE
        upto = last
        if self.preserve_last_tool_result and not reduction.yielding.preserved:
            earlier = reduction.last_tool_result(before=last)
            if earlier is None:
                return StrategyResult.NO_CHANGE
            upto = earlier
        truncation = self._truncation(reduction.yielding.lengths)
        if reduction.truncation is not None:
            # What is short already does not grow again.
            known, known_upto = reduction.truncation
            upto = max(upto, known_upto)
            if known.result_length and not truncation.result_length:
                truncation = known
            if (truncation, upto) == reduction.truncation:
                return StrategyResult.NO_CHANGE
        return reduction.truncate(truncation, upto)

    def _truncation(self, is_tight: bool) -> Truncation:
        """How to shorten: as set, or where that does not help to a quarter of it."""
        truncation = Truncation(
            max_length=self.max_length,
            show_truncation_notice=self.show_truncation_notice,
            smart_truncate=self.smart_truncate,
            head_length=self.head_length,
            tail_length=self.tail_length,
        )
        if not is_tight:
            return truncation
        ratio = min(1.0, max(TIGHT_RATIO, TIGHT_LENGTH / self.max_length))
        tight_length = int(self.max_length * ratio)
        return replace(
            truncation,
            max_length=tight_length,
            head_length=int(self.head_length * ratio),
            tail_length=int(self.tail_length * ratio),
            result_length=tight_length,
        )


class SummaryCompaction(Reducer):
    """Summarises all but the newest messages when pressure is very high.

    It is paid for only where the result is expected to leave room for more, half-way
    between target and threshold; else fewer of the newest messages stay.

    Attributes:
        trigger_threshold: Of the context window; below it nothing is summarised.
        target_token_ratio: Of the context window; where the pipeline may stop.
        min_messages_for_summary: Below so many messages nothing is summarised.
        preserve_recent_count: How many of the newest messages stay word for word.
    """

    trigger_threshold: float = Field(default=0.90, gt=0, le=1, strict=True)
    target_token_ratio: float = Field(default=0.50, gt=0, lt=1, strict=True)
    min_messages_for_summary: int = Field(default=20, ge=0, strict=True)
    preserve_recent_count: int = Field(default=10, ge=0, strict=True)

    @model_validator(mode="after")
    def _check_ratios(self) -> SummaryCompaction:
        if self.trigger_threshold <= self.target_token_ratio:
            raise ValueError(
                f"trigger_threshold ({self.trigger_threshold}) must be larger than "
                f"target_token_ratio ({self.target_token_ratio})"
            )
        return self

    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Summarises, where the request is still above the trigger."""
        window = reduction.context.budgets.window_tokens
        yielding = reduction.yielding
        is_triggered = reduction.tokens >= self.trigger_threshold * window
        has_enough = len(reduction.kept) >= self.min_messages_for_summary
        if not (is_triggered or yielding.triggers):
            return StrategyResult.NO_CHANGE
        if not (has_enough or yielding.minima):
            return StrategyResult.NO_CHANGE
        keep = self.preserve_recent_count
        if not yielding.preserved:
            if reduction.expect_beside_summary(keep) > reduction.target_tokens:
                return StrategyResult.NO_CHANGE
            return await reduction.summarize(keep)
        few_tokens = int(reduction.target_tokens * YIELDING_RATIO)
        while keep and reduction.expect_beside_summary(keep) > few_tokens:
            keep //= 2
        return await reduction.summarize(keep)


def _newest(indexes: list[int], count: int) -> list[int]:
    return indexes[max(0, len(indexes) - count) :] if count > 0 else []


def _find_preserved(
    reduction: Reduction, preserve_system: bool, preserve_task: bool
) -> list[int]:
    """What a window keeps whatever its age, oldest first."""
    if reduction.yielding.preserved:
        return []
    first = reduction.context.view.first_task_index
    return [
        index
        for index in reduction.kept
        if (preserve_system and reduction.is_instruction(index))
        or (preserve_task and index == first)
    ]
