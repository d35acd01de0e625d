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

MAX_PENDING_RATIO = 0.30  # Of the window, for results that the model has not seen.
MAX_USER_TOKENS = 20_000  # Of the user's messages, whatever the window.

_NO_COUNTS = Counts()
_NO_SIZE = Size()


@dataclass(frozen=True)
class Turn:
    """One model call: what would be sent, and all that decides what becomes of it.

    Attributes:
        agent: The name of the agent.
        origin: Whose request it is, for the log and for records.
        scope: Where a summary is valid.
        request: The request as ADK has built it.
        history: Its contents, and the stored summary.
        settings: Those of the agent's strategy.
        model: The model that the request goes to.
        record: What is stored of the agent in this scope.
        state: The agent's values in session state.
        facts: What the process remembers of the agent in this scope.
        budgets: Window, threshold and what follows from them.
        counts: What the provider counted last.
        reason: Why a compaction is considered: `requested` and `overflow` demand one.
        focus: What a compaction that was asked for should keep above all.
        has_recall: Whether the agent can read back what is left out.
        has_used_tools: Whether the stored summary replaces tool calls, as far as the
            sections beside it tell.
        keep_count: How many of the newest messages `keep` may leave word for word; 0
            keeps none, not even results that the model has not seen.
        is_observed: Whether the guard only watches.
        is_settled: Whether this call has already tried to compact.
        is_writing: Whether a summary of this agent is under way.
        config: Its instruction and tools, those that the guard adds included.
        contents: What would be sent.
        size: The size of that.
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
        """Moves images and files of the request; of a file of text it tells a page."""
        most_tokens = self.budgets.window_tokens // 10
        page_tokens = min(self.settings.recall_page_tokens, most_tokens)
        return MediaMover(self.model.llm, self.model.name, page_tokens)

    @property
    def is_demanded(self) -> bool:
        """Whether a compaction was requested, or the provider rejected the request."""
        return self.reason in ("requested", "overflow")

    @property
    def fullness(self) -> float:
        """Tokens as a part of the threshold; at least 1 where one is demanded."""
        fullness = self.tokens / self.budgets.threshold_tokens
        return max(1.0, fullness) if self.is_demanded else fullness

    @property
    def is_due(self) -> bool:
        """Whether the request has reached the threshold, or one is demanded."""
        return self.fullness >= 1

    @property
    def is_overfull(self) -> bool:
        """Whether the request is not expected to be accepted."""
        return self.tokens >= self.budgets.overfull_tokens

    @property
    def has_room(self) -> bool:
        """Whether the request may go out as it is, with room for its answer."""
        most_tokens = self.tokens + self.size.error_tokens
        has_room = most_tokens < self.budgets.room_for_answer_tokens
        return self.reason == "tokens" and (has_room or not self.is_due)

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

        stays = frozenset[int]()
        summarized = self.history.model_covered
        messages = self.history.contents
        shown = self.history.shown
        left_tokens = self.budgets.window_tokens * KEEP_TOOLS_RATIO
        for index in reversed(self.history.indexes):
            if not has_result_of(messages[index], tools, shown[index]):
                continue

            # Messages with a call or its results stay together.
            group = self.history.pairs.group_of(index)
            tokens = self.measure_alone([shown[i] for i in group])
            is_free = group.isdisjoint(stays | summarized)
            if is_free and tokens <= left_tokens:
                stays |= group
                left_tokens -= tokens
        return stays

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
        """What a summary may take: a seventh of the room or 200 tokens at most."""
        return min(self.budgets.summary_tokens, max(200, self.room_tokens // 7))

    @property
    def user_tokens(self) -> int:
        """What the user's messages may take beside a summary."""
        window_tokens = self.budgets.working_tokens
        tokens = resolve_size(self.settings.user_messages, window_tokens)
        return min(tokens, MAX_USER_TOKENS, self.room_tokens // 3)

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
        # Results are shortened up to one message; -1 if it is not in the request.
        truncated_upto = history.find_named(stored.truncated_upto)
        stands = truncated_upto >= 0 and truncated_upto not in covered
        if stored.truncation and stands:
            return replace(
                draft, truncation=stored.truncation, truncated_upto=truncated_upto
            )
        return draft

    @cached_property
    def kept(self) -> KeptSteps:
        """The newest messages and steps, which stay word for word."""
        # The quote of the request after the summary takes room.
        budgets = self.budgets
        quote_tokens = self.count(self.request_text)
        if self.quoted_chars >= 0:
            whole_chars = len(self.request_text)
            quote_tokens = quote_tokens * self.quoted_chars // whole_chars

        # So do the summary and the sections beside it, by a guess.
        beside_tokens = int(
            1.25 * budgets.summary_tokens + 0.1 * budgets.working_tokens
        )
        taken_tokens = self.fixed_tokens + quote_tokens + beside_tokens
        left_tokens = self.limit_tokens - taken_tokens
        # Without room a twentieth is still kept: the summary can be shortened.
        room_tokens = max(budgets.working_tokens // 20, left_tokens)

        contents = self.history.contents
        has_tools = any(has_tool(contents[index]) for index in self.compactable)
        is_chat = not (has_tools or self.has_used_tools)
        keep_tokens = self.settings.keep_tokens(budgets.working_tokens, is_chat)
        if self.reason == "requested":
            keep_tokens = 0
        return _find_kept_steps(self, keep_tokens, room_tokens)

    def older_than(self, keep_count: int) -> frozenset[int]:
        """Returns the indexes of all but about the newest `keep_count` messages.

        No call is parted from its result. Messages that stay for `keep` are never in
        the result. Where nothing is left to summarize, the result is empty, or has only
        summarized messages.
        """
        kept_indexes = self.kept.indexes
        compactable = self.compactable
        candidates = [index for index in compactable if index not in kept_indexes]
        wanted_count = len(compactable) - keep_count
        if candidates and wanted_count >= len(candidates):
            return frozenset(candidates) | self.history.model_covered
        if wanted_count < 1:
            return frozenset()

        contents = [self.history.contents[index] for index in candidates]
        split_place = find_safe_split(contents, wanted_count)
        return self.whole(candidates[:split_place])

    def whole(self, indexes: Iterable[int]) -> frozenset[int]:
        """Adds the messages that are summarized already; leaves out split pairs."""
        covered = frozenset(indexes) | self.history.model_covered
        return keep_pairs_whole(covered, self.history.pairs)


def _find_kept_steps(turn: Turn, keep_tokens: int, room_tokens: int) -> KeptSteps:
    """Finds the newest messages and steps that a compaction leaves word for word.

    Messages and steps stay while they take at most `keep_tokens`. Results that the
    model has not seen yet stay in any case. All of them take at most `room_tokens`.
    """
    history = turn.history
    user_indexes = frozenset(history.user_messages)
    indexes = turn.compactable
    contents = [history.shown[index] for index in indexes]
    starts = _find_starts(contents, indexes, user_indexes)
    if not starts or not turn.keep_count:
        return KeptSteps()

    most_tokens = min(keep_tokens, room_tokens)
    wanted_place = _find_first_within(turn, contents, starts, most_tokens)

    pending = frozenset[int]()
    is_answered = contents[-1].role == "model"
    if not is_answered and indexes[-1] not in user_indexes:
        pending = frozenset(indexes[starts[-1] :])
        wanted_place = min(wanted_place, starts[-1])

    # A compaction has to cover something. And a request with nothing before it need not
    # stay: it is quoted beside the summary.
    first_place = wanted_place
    keeps_all = wanted_place == 0
    wanted_index = indexes[wanted_place] if wanted_place < len(indexes) else None
    if keeps_all or (
        wanted_index is not None and wanted_index == history.request_index
    ):
        running_count = len({*indexes}.intersection(history.running_turn))
        first_place = max(wanted_place, len(indexes) - running_count)

    pending_tokens = int(turn.budgets.working_tokens * MAX_PENDING_RATIO)
    whole_tokens = max(0, min(max(pending_tokens, keep_tokens), room_tokens))
    kept = KeptSteps(frozenset(indexes[first_place:]), pending)
    return _shorten_kept(turn, kept, contents[first_place:], whole_tokens, room_tokens)


def _shorten_kept(
    turn: Turn,
    kept: KeptSteps,
    contents: Sequence[types.Content],
    whole_tokens: int,
    room_tokens: int,
) -> KeptSteps:
    """Measures kept steps, and decides how their results are shortened.

    Results of `keep_tools` are shortened only where the steps have no room otherwise.

    Args:
        turn: The model call.
        kept: The steps.
        contents: The contents of the steps.
        whole_tokens: The most that the steps may take with whole results; shortened
            results are to take no more.
        room_tokens: The most that the steps may take at all.

    Returns:
        The steps with their size; no steps where even shortened results do not fit.
    """
    tokens = turn.measure_alone(contents)
    if tokens <= whole_tokens:
        return replace(kept, tokens=tokens)

    for whole_tools in (turn.settings.keep_tools, ()):
        truncation, short_tokens = fit_results(
            contents, whole_tokens, turn.measure_alone, turn.has_recall, whole_tools
        )
        if short_tokens <= room_tokens:
            return replace(kept, tokens=short_tokens, truncation=truncation)
    return KeptSteps()  # The model's own words in a call cannot be shortened.


def _find_starts(
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
    boundaries = pair_boundaries(contents)
    starts = []
    for place, content in enumerate(contents):
        is_start = content.role == "model" or indexes[place] in user_indexes
        if is_start and boundaries[place]:
            starts.append(place)
    return starts


def _find_first_within(
    turn: Turn,
    contents: Sequence[types.Content],
    starts: Sequence[int],
    most_tokens: int,
) -> int:
    """Returns the place where the newest steps that fit begin.

    The result is the number of contents where not even the newest step fits.

    Args:
        turn: The model call, whose `keep_count` limits the number of messages.
        contents: Contents of the history.
        starts: The places where a step begins, in their order.
        most_tokens: The most that the steps may take.
    """
    tokens = 0
    first_place = len(contents)
    for start in reversed(starts):
        tokens += turn.measure_alone(contents[start:first_place])
        kept_count = len(contents) - start
        if tokens > most_tokens or kept_count > turn.keep_count:
            break

        first_place = start
    return first_place
