"""The reducers of a pipeline, cheapest first: each is one step.

A reducer names a message by its index among the contents of the request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from contextguard_adk._history.truncation import Truncation
from contextguard_adk._measuring.budgets import resolve_size
from contextguard_adk._support.settings import (
    Count,
    Items,
    PositiveCount,
    Ratio,
    Settings,
    size,
)
from contextguard_adk._turn.turn import Turn
from contextguard_adk.strategies.reduction import Reduction, StrategyResult

_TIGHT_RATIO = 0.25
"""While lengths are relaxed, the lengths of the settings are reduced to this part."""

_MIN_TIGHT_CHARS = 1_000
"""While lengths are relaxed, a `max_length` is not reduced below this."""

_AUTO_RATIO = 0.05
"""`budget_tokens="auto"` stands for this part of the window if a tool has been called.
"""

_AUTO_CHAT_RATIO = 0.25
"""`budget_tokens="auto"` stands for this part of the window if no tool has been called.
"""

_MAX_BESIDE_RATIO = 0.3
"""Once fewer messages than usual are kept, everything beside the summary may take this
part of the target. The rest is for the summary and for later messages.
"""


class Reducer(Settings, ABC):
    """One step of a `Pipeline`. Subclass it for a step of your own.

    A reducer is a value like a strategy: frozen settings and one method.
    """

    @abstractmethod
    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Makes the request smaller, after earlier reducers may have done so.

        If `reduction.relaxed` names settings, the reducer may go beyond them.

        Args:
            reduction: The decisions so far, and the methods that change the request.

        Returns:
            The result of the last of these methods; `NO_CHANGE` if none was called.
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

    def _list_preserved(self, reduction: Reduction) -> list[int]:
        """Lists the indexes of messages that the settings preserve, oldest first.

        Returns [] while preferences are relaxed.
        """
        if reduction.relaxed.preferences:
            return []

        user_indexes = reduction.turn.history.user_messages
        task_index = user_indexes[0] if user_indexes else None
        preserved = list[int]()
        for index in reduction.kept:
            is_system = self.preserve_system and reduction.is_instruction(index)
            is_task = self.preserve_initial_task and index == task_index
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
        """Drops the messages that are older than the window."""
        kept = reduction.kept
        # With this number of messages or more, some are dropped.
        due_count = self.window_size + 1
        if not reduction.relaxed.preferences:
            due_count = max(due_count, self.min_messages_before_windowing)
        if len(kept) < due_count:
            return StrategyResult.NO_CHANGE

        preserved = self._list_preserved(reduction)
        if self.strict_window_size:
            protected = reduction.protected.intersection(kept)
            preserved = self._fit_in_window(preserved, protected)
        # The window counts messages, so each of them costs 1.
        costs = dict.fromkeys(kept, 1)
        return _drop_oldest(reduction, preserved, costs, self.window_size)

    def _fit_in_window(
        self, preserved: Sequence[int], protected: frozenset[int]
    ) -> list[int]:
        """Returns the newest preserved messages for which the window has room.

        Protected messages stay in any case, so they take their room first.

        Args:
            preserved: Indexes of the messages that the settings preserve, oldest first.
            protected: Indexes of the messages that no reducer removes.
        """
        room_count = max(0, self.window_size - len(protected))
        newest_first = [
            index for index in reversed(preserved) if index not in protected
        ]
        return newest_first[:room_count]


class TokenWindow(_Window):
    """Keeps as many of the newest messages as fit a budget of tokens."""

    budget_tokens: Annotated[int | float | Literal["auto"], size(100, "auto")] = Field(
        description="What the messages that stay may take: tokens as an int, at least "
        "100, at 4 bytes a token, or a part of the context window as a float, more "
        'than 0 and less than 1, as the model counts. "auto": a twentieth of the '
        "window, and a quarter while no tool has been called: no summary tells the "
        "rest of a chat.",
    )

    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Drops the oldest messages, until the others fit the budget."""
        turn = reduction.turn
        token_counts = reduction.measure_kept()
        # The messages are measured in heuristic tokens, and so is a budget that is set
        # as an int. A budget that is a part of the window needs the window's size in
        # heuristic tokens.
        heuristic_window_tokens = turn.budgets.working_tokens / turn.correction
        budget_tokens = resolve_size(self._choose_budget(turn), heuristic_window_tokens)
        if sum(token_counts.values()) <= budget_tokens:
            return StrategyResult.NO_CHANGE

        preserved = self._list_preserved(reduction)
        return _drop_oldest(reduction, preserved, token_counts, budget_tokens)

    def _choose_budget(self, turn: Turn) -> int | float:
        """Returns the setting `budget_tokens` as a size."""
        if self.budget_tokens != "auto":
            return self.budget_tokens
        return _AUTO_CHAT_RATIO if turn.is_chat else _AUTO_RATIO


def _drop_oldest(
    reduction: Reduction,
    preserved: Iterable[int],
    costs: Mapping[int, int],
    budget: int,
) -> StrategyResult:
    """Drops the oldest messages, so that the others fit a budget.

    Preserved and protected messages stay, and take their part of the budget first. The
    rest of the budget goes to the newest of the other messages. The newest of them that
    does not fit is dropped, and so are all older ones.

    Args:
        reduction: The decisions so far.
        preserved: Indexes of the messages that the settings preserve. Each of these
            messages has a cost.
        costs: The part of the budget that each message takes, by its index, oldest
            first: 1 if the budget is a number of messages, or the message's tokens if
            the budget is a number of tokens. All messages that are still sent have a
            cost, and no others.
        budget: The most that all messages that stay may cost together.
    """
    staying = {*preserved, *reduction.protected.intersection(costs)}
    budget_left = budget - sum(costs[index] for index in staying)

    others_oldest_first = [index for index in costs if index not in staying]
    for index in reversed(others_oldest_first):
        if costs[index] > budget_left:
            break
        budget_left -= costs[index]
        staying.add(index)
    return reduction.drop(costs.keys() - staying)


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
        """Refuses a head and a tail that together are longer than `max_length`."""
        total = self.head_length + self.tail_length
        if self.smart_truncate and total > self.max_length:
            raise ValueError(
                f"head_length + tail_length is {total}, which is more than max_length "
                f"({self.max_length})"
            )
        return self

    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Shortens tool results; the newest stays whole if the settings preserve it."""
        relaxed = reduction.relaxed
        newest_index = reduction.last_tool_result()
        last_index = newest_index
        preserves_newest = self.preserve_last_tool_result and not relaxed.preferences
        if preserves_newest and newest_index is not None:
            # The newest result stays whole, so the last one to shorten is older.
            last_index = reduction.last_tool_result(before=newest_index)
        if last_index is None:
            return StrategyResult.NO_CHANGE

        upto_index = last_index
        truncation = self.truncation(is_tight=relaxed.lengths)
        earlier = reduction.truncation
        if earlier is not None:
            # Results that an earlier run has shortened stay shortened.
            upto_index = max(last_index, earlier.upto)
            # A `result_length` limits whole results, not only the strings in them.
            # The limit comes from relaxed lengths, from `ClearToolResults`, or from
            # kept results that were too large. The settings do not undo the limit.
            earlier_has_length = earlier.truncation.result_length > 0
            new_has_length = truncation.result_length > 0
            if earlier_has_length and not new_has_length:
                truncation = earlier.truncation

        # If the agent has been shown its results in this form from the first request
        # on, there is nothing to gain.
        if reduction.turn.history.has_short_strings(truncation):
            return StrategyResult.NO_CHANGE
        return reduction.truncate(truncation, upto_index)

    def truncation(self, is_tight: bool = False) -> Truncation:
        """Returns how strings are shortened: to the lengths of the settings.

        With `is_tight`, all lengths are reduced in the same ratio: to a quarter, but no
        further than to a `max_length` of 1,000 characters. A `max_length` of 16,000
        becomes 4,000, one of 2,000 becomes 1,000, and one of 500 stays. A whole result
        of many short strings is then shortened, too.
        """
        if is_tight:
            least_ratio = min(1.0, _MIN_TIGHT_CHARS / self.max_length)
            ratio = max(_TIGHT_RATIO, least_ratio)
        else:
            ratio = 1.0

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

    If the agent is offered `recall_history`, it can read a result back by its handle.
    Once `ToolOutputTruncation` has shortened results, none is cleared.
    """

    keep_count: PositiveCount = Field(
        default=3,
        description="How many of the newest messages with tool results stay, at least "
        "1; the results of one message answer calls that were made together.",
    )
    exclude_tools: Items[str] = Field(
        default=(), description="Names of tools whose results stay."
    )

    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Clears the tool results of all messages but the newest `keep_count` ones."""
        upto_index = self._find_newest_to_clear(reduction)
        if upto_index is None:
            return StrategyResult.NO_CHANGE

        earlier = reduction.truncation
        if earlier is not None:
            # A `max_length` of 0 stands for results that were cleared, not shortened.
            was_shortened = earlier.truncation.max_length > 0
            are_all_cleared = upto_index <= earlier.upto
            if was_shortened or are_all_cleared:
                return StrategyResult.NO_CHANGE

        # `ToolOutputTruncation` without relaxed lengths does not undo a truncation that
        # has a `result_length`.
        clearing = Truncation(
            max_length=0, result_length=1, exclude_tools=tuple(self.exclude_tools)
        )
        return reduction.truncate(clearing, upto_index)

    def _find_newest_to_clear(self, reduction: Reduction) -> int | None:
        """Returns the index of the newest message whose tool results are cleared.

        The tool results of exactly `keep_count` newer messages stay. The result is None
        if no more than `keep_count` messages have tool results.
        """
        index = reduction.last_tool_result()
        for _ in range(self.keep_count):
            if index is None:
                return None
            index = reduction.last_tool_result(before=index)
        return index


class SummaryCompaction(Reducer):
    """Summarizes all but the newest messages when the window is nearly full.

    A summary is paid for only if everything beside the summary is expected to take at
    most the target. If nothing else makes the request fit, fewer of the newest messages
    stay.
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
        """Refuses a trigger that is not above the target."""
        if self.trigger_threshold <= self.target_token_ratio:
            raise ValueError(
                f"trigger_threshold ({self.trigger_threshold}) must be larger than "
                f"target_token_ratio ({self.target_token_ratio})"
            )
        return self

    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Summarizes all but the newest messages, under one of two conditions.

        - If preferences are relaxed: neither the trigger nor the least number of
          messages counts. If everything beside the summary would take more than the
          target, fewer of the newest messages stay.
        - Otherwise: the request has to reach the trigger and the least number of
          messages. Everything beside the summary has to be expected to take at most the
          target.
        """
        if reduction.relaxed.preferences:
            keep_count = self._reduce_keep_count(reduction)
            return await reduction.summarize(keep_count)

        if not self._is_triggered(reduction):
            return StrategyResult.NO_CHANGE
        beside_tokens = reduction.expect_beside_summary(self.preserve_recent_count)
        if beside_tokens > reduction.target_tokens:
            return StrategyResult.NO_CHANGE
        return await reduction.summarize(self.preserve_recent_count)

    def _is_triggered(self, reduction: Reduction) -> bool:
        """Whether the request reaches the trigger, and has enough messages."""
        window_tokens = reduction.turn.budgets.working_tokens
        is_full = reduction.tokens >= self.trigger_threshold * window_tokens
        return is_full and len(reduction.kept) >= self.min_messages_for_summary

    def _reduce_keep_count(self, reduction: Reduction) -> int:
        """Returns how many of the newest messages stay while preferences are relaxed.

        `preserve_recent_count` messages stay if everything beside the summary takes at
        most the target. Otherwise the number is halved, down to 0, until everything
        beside the summary takes at most 30 % of the target. So the next summary is not
        needed soon.
        """
        keep_count = self.preserve_recent_count
        beside_tokens = reduction.expect_beside_summary(keep_count)
        if beside_tokens <= reduction.target_tokens:
            return keep_count

        most_tokens = _MAX_BESIDE_RATIO * reduction.target_tokens
        while keep_count > 0 and beside_tokens > most_tokens:
            keep_count //= 2
            beside_tokens = reduction.expect_beside_summary(keep_count)
        return keep_count
