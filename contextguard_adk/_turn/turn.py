"""The one value that all stages, strategies, sections and shapes read."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk._history.contents import (
    content_text,
    find_safe_split,
    has_result_of,
    has_tool,
    keep_pairs_whole,
    pair_boundaries,
)
from contextguard_adk._history.history import History
from contextguard_adk._history.moved_media import MediaMover
from contextguard_adk._history.stored import AgentRecord, Draft, Reason
from contextguard_adk._history.truncation import fit_results
from contextguard_adk._measuring.budgets import Budgets, resolve_size
from contextguard_adk._measuring.calibration import (
    DEFAULT_CORRECTION,
    MeasuredRequest,
    count_quoted_chars,
    estimate_prompt_tokens,
    token_counter,
)
from contextguard_adk._runtime.memory import SessionFacts
from contextguard_adk._runtime.state import AgentState
from contextguard_adk._turn.facts import Counts, KeptSteps, ModelFacts, Size
from contextguard_adk._turn.settings import KEEP_TOOLS_RATIO, StrategySettings
from contextguard_adk.records import Origin

MAX_PENDING_RATIO = 0.30
"""The most of the window that results may take whole before the model has seen them."""

MAX_USER_TOKENS = 20_000
"""The most tokens of the user's messages beside a summary, whatever the window."""

LEAST_SUMMARY_TOKENS = 200
"""A summary may take this many tokens even if there is hardly any room."""

_NO_COUNTS = Counts()
_NO_SIZE = Size()


@dataclass(frozen=True)
class Turn:
    """One model call: the request, and all facts that decide how it is changed.

    Attributes:
        agent: The name of the agent.
        origin: Whose request it is, for the log and for records.
        scope: Where a summary is valid.
        request: The request as ADK has built it.
        history: The contents of the request, and the stored summary.
        settings: The settings of the agent's strategy.
        model: The model that the request goes to.
        record: The stored record of the agent in this scope.
        state: The agent's values in session state.
        facts: The process's memory of the agent in this scope.
        budgets: The window, the threshold, and the sizes that follow from them.
        counts: The provider's last count.
        reason: Why a compaction is considered: `requested` and `overflow` demand one.
        focus: The words of the user on what a summary should keep above all.
        has_recall: Whether the agent can read back messages that are left out.
        has_used_tools: Whether the stored summary replaces tool calls, as far as the
            sections beside it tell.
        keep_count: How many of the newest messages `keep` may leave word for word; 0
            keeps none, not even results that the model has not seen.
        is_observed: Whether the guard only watches.
        is_settled: Whether this call has already tried to compact.
        is_writing: Whether a summary of this agent is under way.
        config: The instruction and the tools that would be sent, with the guard's own.
        contents: The contents that would be sent.
        size: The size of config and contents together.
        nearness: How near a compaction is for the strategy; from 1 on it wants one.
    """

    agent: str
    origin: Origin
    scope: str
    request: LlmRequest
    history: History
    settings: StrategySettings
    model: ModelFacts
    record: AgentRecord
    state: AgentState
    facts: SessionFacts
    budgets: Budgets
    counts: Counts = _NO_COUNTS
    reason: Reason = "tokens"
    focus: str = ""
    has_recall: bool = False
    has_used_tools: bool = False
    keep_count: int = sys.maxsize
    is_observed: bool = False
    is_settled: bool = False
    is_writing: bool = False
    config: types.GenerateContentConfig = field(
        default_factory=types.GenerateContentConfig
    )
    contents: Sequence[types.Content] = ()
    size: Size = _NO_SIZE
    nearness: float = 0.0

    @property
    def tokens(self) -> int:
        """The estimate of the request as it stands, in tokens of the model."""
        return self.size.tokens

    @property
    def messages(self) -> Sequence[types.Content]:
        """All contents of the request, the summarized ones included."""
        return self.history.contents

    @property
    def summarized(self) -> frozenset[int]:
        """Indexes of the messages that a model has summarized already."""
        return self.history.model_covered

    @cached_property
    def media_mover(self) -> MediaMover:
        """Moves images and files of the request into messages of the user.

        A text file is written as words instead, at most one page of them.
        """
        most_tokens = self.budgets.window_tokens // 10
        page_tokens = min(self.settings.recall_page_tokens, most_tokens)
        return MediaMover(self.model.llm, self.model.name, page_tokens)

    @property
    def is_demanded(self) -> bool:
        """Whether a compaction was requested, or the provider rejected the request."""
        return self.reason in ("requested", "overflow")

    @property
    def fullness(self) -> float:
        """Tokens as a part of the threshold; at least 1 for a demanded compaction."""
        part_of_threshold = self.tokens / self.budgets.threshold_tokens
        return max(1.0, part_of_threshold) if self.is_demanded else part_of_threshold

    @property
    def is_due(self) -> bool:
        """Whether the threshold is reached, or a compaction is demanded."""
        return self.fullness >= 1

    @property
    def is_overfull(self) -> bool:
        """Whether the request is not expected to be accepted."""
        return self.tokens >= self.budgets.overfull_tokens

    @property
    def has_room(self) -> bool:
        """Whether the request may go out as it is, with room for its answer."""
        if self.reason != "tokens":
            return False

        most_tokens = self.tokens + self.size.error_tokens
        leaves_room = most_tokens < self.budgets.room_for_answer_tokens
        return leaves_room or not self.is_due

    def is_changed(self, contents: Sequence[types.Content]) -> bool:
        """Returns whether the guard has changed these contents."""
        messages = self.history.contents
        if len(contents) != len(messages):
            return True
        return any(new is not old for new, old in zip(contents, messages, strict=True))

    @property
    def correction(self) -> float:
        """Real tokens per heuristic token."""
        return self.size.correction or DEFAULT_CORRECTION

    def measure(self, contents: Sequence[types.Content]) -> int:
        """Estimates a request with these contents, instruction and tools included."""
        memo = self.history.memo
        heuristic_tokens = memo.estimate_tokens(contents) + self.size.config_tokens
        request = MeasuredRequest(contents, heuristic_tokens, memo=memo)
        return estimate_prompt_tokens(request, correction=self.correction)

    def measure_alone(self, contents: Sequence[types.Content]) -> int:
        """Estimates these contents alone."""
        return self.measure(contents) - self.measure([])

    def count(self, text: str) -> int:
        """Estimates a text, in tokens of the model."""
        return token_counter(self.correction)(text)

    @cached_property
    def stays(self) -> frozenset[int]:
        """The indexes that no compaction removes: the newest results of `keep_tools`.

        With their calls they take at most a tenth of the context window.
        """
        tools = self.settings.keep_tools
        if not tools:
            return frozenset()

        staying = frozenset[int]()
        summarized = self.history.model_covered
        messages = self.history.contents
        shown = self.history.shown
        left_tokens = self.budgets.window_tokens * KEEP_TOOLS_RATIO
        for index in reversed(self.history.indexes):
            if not has_result_of(messages[index], tools, shown[index]):
                continue

            # Messages with a call or its results stay together.
            group = self.history.pairs.group_of(index)
            group_tokens = self.measure_alone([shown[i] for i in group])
            is_new = group.isdisjoint(staying | summarized)
            if is_new and group_tokens <= left_tokens:
                staying |= group
                left_tokens -= group_tokens
        return staying

    @cached_property
    def compactable(self) -> list[int]:
        """History that may be summarized, and that no model has summarized yet."""
        others = self.history.model_covered | self.stays
        return [i for i in self.history.indexes if i not in others]

    @property
    def uncovered(self) -> list[int]:
        """History beside the summary, but for what `keep_tools` holds."""
        others = self.history.covered | self.stays
        return [i for i in self.history.indexes if i not in others]

    @cached_property
    def fixed_contents(self) -> list[types.Content]:
        """The contents that no compaction can remove."""
        removable = set(self.history.indexes) - self.stays
        return [c for i, c in enumerate(self.history.shown) if i not in removable]

    @cached_property
    def fixed_tokens(self) -> int:
        """The size of instruction, tools and what no compaction removes."""
        return self.measure(self.fixed_contents)

    @property
    def room_tokens(self) -> int:
        """The room below the threshold, beside what no compaction removes."""
        return max(0, self.budgets.threshold_tokens - self.fixed_tokens)

    @property
    def summary_tokens(self) -> int:
        """The most tokens that a summary may take.

        It is a seventh of the room, or `LEAST_SUMMARY_TOKENS` if that is more, but
        never more than the budgets allow.
        """
        wanted_tokens = max(LEAST_SUMMARY_TOKENS, self.room_tokens // 7)
        return min(self.budgets.summary_tokens, wanted_tokens)

    @property
    def user_tokens(self) -> int:
        """The most tokens that the user's messages may take beside a summary."""
        working_tokens = self.budgets.working_tokens
        set_tokens = resolve_size(self.settings.user_messages, working_tokens)
        return min(set_tokens, MAX_USER_TOKENS, self.room_tokens // 3)

    @property
    def limit_tokens(self) -> int:
        """The most that a compacted request may take.

        It is above the threshold only where instruction, tools and a summary alone
        reach the threshold.
        """
        budgets = self.budgets
        if self.fixed_tokens + budgets.summary_tokens < budgets.full_tokens:
            return budgets.full_tokens
        return budgets.overfull_tokens

    @cached_property
    def request_text(self) -> str:
        """The current request of the user; "" where it is unknown."""
        index = self.history.request_index
        return "" if index is None else content_text(self.history.contents[index])

    @cached_property
    def quoted_chars(self) -> int:
        """How many characters of the current request to quote; -1 for all."""
        return count_quoted_chars(self.request_text, self.budgets.window_tokens)

    @property
    def draft(self) -> Draft:
        """The summary that stands in the request now, as a draft.

        Without a summary its text is "".
        """
        history = self.history
        stored = history.stored
        covered = history.covered
        summarized = history.model_covered
        if stored is None:
            return Draft("", covered, summarized, reason=self.reason)

        draft = Draft(
            stored.text,
            covered,
            summarized,
            model_chars=stored.model_chars,
            reason=self.reason,
        )
        # Results up to the message with this index are shortened.
        upto_index = history.find_named(stored.truncated_upto)
        is_in_request = upto_index >= 0  # It is -1 for no message of the request.
        is_beside_summary = is_in_request and upto_index not in covered
        if not stored.truncation or not is_beside_summary:
            return draft
        return replace(draft, truncation=stored.truncation, truncated_upto=upto_index)

    @cached_property
    def kept(self) -> KeptSteps:
        """The newest messages and steps, which stay word for word."""
        # The user's request is quoted after the summary, whole or in part.
        budgets = self.budgets
        request_tokens = self.count(self.request_text)
        if self.quoted_chars < 0:
            quote_tokens = request_tokens
        else:
            request_chars = len(self.request_text)
            quote_tokens = request_tokens * self.quoted_chars // request_chars

        # A guess at the size of the summary and of the sections beside it.
        beside_tokens = int(
            1.25 * budgets.summary_tokens + 0.1 * budgets.working_tokens
        )
        taken_tokens = self.fixed_tokens + quote_tokens + beside_tokens
        left_tokens = self.limit_tokens - taken_tokens
        # Without room a twentieth is still kept: the summary can be shortened.
        room_tokens = max(budgets.working_tokens // 20, left_tokens)

        if self.reason == "requested":  # Nothing stays for `keep`.
            return _find_kept_steps(self, 0, room_tokens)

        contents = self.history.contents
        has_tools = any(has_tool(contents[index]) for index in self.compactable)
        is_chat = not has_tools and not self.has_used_tools
        keep_tokens = self.settings.keep_tokens(budgets.working_tokens, is_chat)
        return _find_kept_steps(self, keep_tokens, room_tokens)

    def older_than(self, keep_count: int) -> frozenset[int]:
        """Returns the indexes of all but about the newest `keep_count` messages.

        No call is parted from its result. Messages that stay for `keep` are never in
        the result. Messages that are summarized already always are, unless the result
        is empty.

        - If there are at most `keep_count` messages to compact, the result is empty.
        - If `keep` leaves at least `keep_count` messages, all others are in the result.
        - Else the messages are split between two steps, near `keep_count`.
        """
        kept_indexes = self.kept.indexes
        compactable = self.compactable
        candidates = [index for index in compactable if index not in kept_indexes]
        older_count = len(compactable) - keep_count
        if older_count < 1:
            return frozenset()
        if candidates and older_count >= len(candidates):
            return frozenset(candidates) | self.history.model_covered

        contents = [self.history.contents[index] for index in candidates]
        older_end = find_safe_split(contents, older_count)
        return self.whole(candidates[:older_end])

    def whole(self, indexes: Iterable[int]) -> frozenset[int]:
        """Adds the messages that are summarized already; leaves out split pairs."""
        covered = frozenset(indexes) | self.history.model_covered
        return keep_pairs_whole(covered, self.history.pairs)


def _find_kept_steps(turn: Turn, keep_tokens: int, room_tokens: int) -> KeptSteps:
    """Finds the newest messages and steps that a compaction leaves word for word.

    Messages and steps stay while they take at most `keep_tokens`. Results that the
    model has not seen yet stay in any case. All of them take at most `room_tokens`.

    An index counts all messages of the request. A place counts only the compactable
    ones, among which the kept ones are the last.
    """
    history = turn.history
    user_indexes = frozenset(history.user_messages)
    indexes = turn.compactable
    contents = [history.shown[index] for index in indexes]
    start_places = _find_start_places(contents, indexes, user_indexes)
    if not start_places or not turn.keep_count:
        return KeptSteps()

    most_tokens = min(keep_tokens, room_tokens)
    fitting_place = _find_first_within(turn, contents, start_places, most_tokens)

    # The model has not seen the last step, unless an answer or a message follows it.
    last_step_place = start_places[-1]
    is_answered = contents[-1].role == "model"
    is_pending = not is_answered and indexes[-1] not in user_indexes
    if is_pending:
        pending = frozenset(indexes[last_step_place:])
        wanted_place = min(fitting_place, last_step_place)
    else:
        pending = frozenset[int]()
        wanted_place = fitting_place

    # Only the running turn is kept in two cases: if all messages would be kept, because
    # a compaction has to cover something; and if the user's request would be the first
    # that is kept, because it is quoted beside the summary anyway.
    keeps_nothing = wanted_place == len(indexes)
    begins_with_request = (
        not keeps_nothing and indexes[wanted_place] == history.request_index
    )
    if wanted_place == 0 or begins_with_request:
        first_place = max(wanted_place, _find_running_place(turn))
    else:
        first_place = wanted_place

    # The most that the steps may take with whole results.
    pending_tokens = int(turn.budgets.working_tokens * MAX_PENDING_RATIO)
    whole_tokens = min(max(pending_tokens, keep_tokens), room_tokens)
    kept = KeptSteps(frozenset(indexes[first_place:]), pending)
    return _shorten_kept(turn, kept, contents[first_place:], whole_tokens, room_tokens)


def _find_running_place(turn: Turn) -> int:
    """Returns the place where the running turn begins: the steps after the request.

    It is the number of compactable messages if none is of the running turn.
    """
    running_indexes = set(turn.history.running_turn)
    running_count = sum(1 for index in turn.compactable if index in running_indexes)
    return len(turn.compactable) - running_count


def _shorten_kept(
    turn: Turn,
    kept: KeptSteps,
    contents: Sequence[types.Content],
    whole_tokens: int,
    room_tokens: int,
) -> KeptSteps:
    """Measures kept steps, and decides how their results are shortened.

    Results of the tools in `keep_tools` stay whole, unless the steps have no room then.

    Args:
        turn: The model call.
        kept: The steps.
        contents: The contents of the steps.
        whole_tokens: The most that the steps may take with whole results. If they take
            more, results are shortened to this size, as far as they can be.
        room_tokens: The most that the steps may take at all.

    Returns:
        The steps with their size; no steps if they do not fit even with shortened
        results, because the model's own words in a call cannot be shortened.
    """
    unshortened_tokens = turn.measure_alone(contents)
    if unshortened_tokens <= whole_tokens:
        return replace(kept, tokens=unshortened_tokens)

    for whole_tools in (turn.settings.keep_tools, ()):
        truncation, short_tokens = fit_results(
            contents, whole_tokens, turn.measure_alone, turn.has_recall, whole_tools
        )
        if short_tokens <= room_tokens:
            return replace(kept, tokens=short_tokens, truncation=truncation)
    return KeptSteps()


def _find_start_places(
    contents: Sequence[types.Content],
    indexes: Sequence[int],
    user_indexes: Collection[int],
) -> list[int]:
    """Returns the places in `contents` where a step or a message of the user begins.

    Args:
        contents: Contents of the history.
        indexes: The index of each of them in the request.
        user_indexes: Indexes of the user's messages.
    """
    # Without the places between a call and its result.
    is_boundary = pair_boundaries(contents)
    start_places: list[int] = []

    for place, content in enumerate(contents):
        is_users = indexes[place] in user_indexes
        is_start = content.role == "model" or is_users
        if is_start and is_boundary[place]:
            start_places.append(place)
    return start_places


def _find_first_within(
    turn: Turn,
    contents: Sequence[types.Content],
    start_places: Sequence[int],
    most_tokens: int,
) -> int:
    """Returns the place where the newest steps that fit begin.

    It is the number of contents if not even the newest step fits.

    Args:
        turn: The model call, whose `keep_count` limits the number of messages.
        contents: Contents of the history.
        start_places: The places where a step begins, in their order.
        most_tokens: The most that the steps may take.
    """
    tokens = 0
    first_place = len(contents)
    for start_place in reversed(start_places):
        tokens += turn.measure_alone(contents[start_place:first_place])
        kept_count = len(contents) - start_place
        if tokens > most_tokens or kept_count > turn.keep_count:
            break

        first_place = start_place
    return first_place
