"""The one value that all stages, strategies, sections and shapes read.

`Turn` explains the words index, covered, summarized and kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
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
    results_of,
)
from contextguard_adk._history.history import History
from contextguard_adk._history.moved_media import MediaMover
from contextguard_adk._history.stored import AgentRecord, Draft, Reason
from contextguard_adk._history.truncation import fit_results
from contextguard_adk._measuring.budgets import Budgets, resolve_size
from contextguard_adk._measuring.calibration import (
    DEFAULT_CORRECTION,
    LastCount,
    MeasuredRequest,
    count_quoted_chars,
    estimate_prompt_tokens,
    first_margin,
    token_counter,
)
from contextguard_adk._measuring.families import find_family
from contextguard_adk._runtime.memory import SessionFacts
from contextguard_adk._runtime.skills import find_skill_tools
from contextguard_adk._runtime.state import AgentState
from contextguard_adk._turn.facts import Counts, KeptSteps, ModelFacts, Size
from contextguard_adk._turn.settings import (
    KEEP_ANSWER_RATIO,
    KEEP_TOOLS_RATIO,
    NEWEST_KEPT_RATIO,
    StrategySettings,
)
from contextguard_adk.records import Origin

MAX_PENDING_RATIO = 0.30
"""Results that the model has not seen stay whole up to this part of the window."""

MAX_USER_TOKENS = 20_000
"""The most tokens of the user's messages beside a summary, whatever the window."""

LEAST_SUMMARY_TOKENS = 200
"""A summary may take this many tokens even if there is hardly any room."""

_SUMMARY_GUESS_RATIO = 1.25
"""A summary and the lines around it are guessed to take this part of its limit."""

_SECTIONS_GUESS_RATIO = 0.1
"""The sections beside a summary are guessed to take this part of the window."""

_BESIDE_KEPT_TOOLS_RATIO = 0.1
"""Beside results of `keep_tools`, this part of the window is for all else: the summary,
its sections and new messages."""

_NO_COUNTS = Counts()
_NO_SIZE = Size()


@dataclass(frozen=True)
class Turn:
    """One model call: the request, and all facts that decide how it is changed.

    These words mean the same in all properties:

    - An index is the position of a message among all contents of the request.
    - A message is covered if a summary of any kind replaces it, and summarized if a
      model wrote that summary.
    - Kept messages are the newest messages, which the next compaction leaves.
    - `History` explains the words for the forms of the contents, such as "shown".

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
        reason: Why a compaction is considered. "requested" and "overflow" demand a
            compaction.
        focus: The words of the user on what a summary should keep above all; "" for
            none.
        has_recall: Whether the agent can read back messages that are left out.
        keep_count: How many of the newest messages `kept` may have. With 0 nothing is
            kept, not even results that the model has not seen.
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
        """All contents of the request, the covered ones included."""
        return self.history.contents

    @property
    def summarized(self) -> frozenset[int]:
        """Indexes of the messages that a model has summarized already."""
        return self.history.model_covered

    @cached_property
    def media_mover(self) -> MediaMover:
        """Moves images and files of the request into messages of the user.

        A text file becomes a text of at most one page, as the recall tool pages it.
        """
        # A page never takes more than a tenth of the window.
        most_tokens = self.budgets.window_tokens // 10
        page_tokens = min(self.settings.recall_page_tokens, most_tokens)
        return MediaMover(self.model.llm, self.model.name, page_tokens)

    @property
    def is_demanded(self) -> bool:
        """Whether a compaction was requested, or the provider rejected the request."""
        return self.reason in ("requested", "overflow")

    @property
    def fullness(self) -> float:
        """The estimate as a part of the threshold; at least 1 if `is_demanded`."""
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
        """Whether a compaction for the reason "tokens" can wait.

        - If the reason is another one: False, whatever room there is.
        - If the request is below the threshold: True.
        - Otherwise: whether the window surely has room for an answer.
        """
        if self.reason != "tokens":
            return False

        # The estimate may be too low, so the largest possible size decides.
        most_tokens = self.tokens + self.size.error_tokens
        leaves_room = most_tokens < self.budgets.room_for_answer_tokens
        return leaves_room or not self.is_due

    def is_changed(self, contents: Sequence[types.Content]) -> bool:
        """Returns whether these contents differ from those of the request of ADK.

        Only the objects are compared, which is faster than to compare their values.
        Code of the guard that changes a content always makes a new object.
        """
        messages = self.history.contents
        if len(contents) != len(messages):
            return True
        return any(new is not old for new, old in zip(contents, messages, strict=True))

    @property
    def correction(self) -> float:
        """Tokens of the model per heuristic token; a default while unknown."""
        return self.size.correction or DEFAULT_CORRECTION

    def estimate(self, contents: Sequence[types.Content], heuristic_tokens: int) -> int:
        """Estimates a request with these contents and the config that would be sent.

        Unlike `measure`, the estimate follows the provider's last count. If there is
        neither a count nor a correction, it has a margin: a request below the threshold
        has to fit in the window all the same.

        Args:
            contents: The contents.
            heuristic_tokens: The heuristic of the request, its config included.
        """
        family = find_family(self.model.name)
        budgets = self.budgets
        threshold_ratio = budgets.threshold_tokens / budgets.window_tokens

        return estimate_prompt_tokens(
            MeasuredRequest(contents, heuristic_tokens, self.config, self.history.memo),
            LastCount(self.counts.real_tokens, self.counts.heuristic_tokens),
            correction=self.counts.correction,
            family=family,
            margin=first_margin(family, threshold_ratio),
        )

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
    def whole_tools(self) -> tuple[str, ...]:
        """The tools whose results are not shortened while they stay in the request.

        They are those of `keep_tools`, and those that return documents of skills.
        """
        return (*self.settings.keep_tools, *self.skill_tools)

    @cached_property
    def skill_tools(self) -> tuple[str, ...]:
        """The tools that return documents of skills; () if the agent has no skills."""
        return find_skill_tools(self.state, self.request.tools_dict)

    @cached_property
    def newest_results(self) -> dict[str, int]:
        """The index of the newest result of each tool in `keep_tools`, newest first."""
        tools = set(self.settings.keep_tools)
        newest: dict[str, int] = {}
        for index in reversed(self.history.indexes):
            if len(newest) == len(tools):
                break
            for part in results_of(self.history.contents[index]):
                name = part.function_response.name if part.function_response else None
                if name in tools and name not in newest:
                    newest[name] = index
        return newest

    @cached_property
    def kept_tools_room_tokens(self) -> int:
        """The most tokens that the newest results of `keep_tools` may take together.

        This is the window less its buffer, less all that has to stand beside them:
        instruction, tools, contents that belong to this request alone, the quote of the
        user's request, and a part for the summary and new messages. It is at most
        `NEWEST_KEPT_RATIO` of the window.
        """
        own_indexes = frozenset(self.history.indexes)
        transient = [
            content
            for index, content in enumerate(self.history.shown)
            if index not in own_indexes
        ]
        budgets = self.budgets
        reserve_tokens = int(budgets.working_tokens * _BESIDE_KEPT_TOOLS_RATIO)
        taken_tokens = self.measure(transient) + _quote_tokens(self) + reserve_tokens
        most_tokens = int(budgets.window_tokens * NEWEST_KEPT_RATIO)
        return max(0, min(most_tokens, budgets.full_tokens - taken_tokens))

    @cached_property
    def always_kept(self) -> frozenset[int]:
        """The indexes of results of `keep_tools` and their calls, which always stay.

        The newest result of each tool stays if there is room for it. Older results stay
        while all together take at most `KEEP_TOOLS_RATIO` of the context window. Newer
        results have priority. Results that a model has summarized, or that are shown
        only in part, do not stay.
        """
        tools = self.settings.keep_tools
        if not tools:
            return frozenset()

        newest = list(dict.fromkeys(self.newest_results.values()))
        staying = self._add_groups(frozenset(), newest, self.kept_tools_room_tokens)

        newest_first = [*reversed(self.history.indexes)]
        older_tokens = int(self.budgets.window_tokens * KEEP_TOOLS_RATIO)
        return self._add_groups(staying, newest_first, older_tokens)

    def _add_groups(
        self, staying: frozenset[int], indexes: Iterable[int], most_tokens: int
    ) -> frozenset[int]:
        """Adds results of `keep_tools` with their calls, as many as have room.

        Args:
            staying: The indexes of what stays already, which takes its room first.
            indexes: The indexes of messages that may have such a result.
            most_tokens: The most tokens of all that stays.
        """
        history = self.history
        tools = self.settings.keep_tools
        left_tokens = most_tokens - self.measure_alone(
            [history.shown[index] for index in sorted(staying)]
        )
        for index in indexes:
            if not has_result_of(history.contents[index], tools, history.shown[index]):
                continue

            # A call and its results form a group, which stays as a whole or not at all.
            group = history.pairs.group_of(index)
            is_summarized = bool(group & history.model_covered)
            if is_summarized or group & staying:
                continue

            group_tokens = self.measure_alone([history.shown[each] for each in group])
            if group_tokens <= left_tokens:
                staying |= group
                left_tokens -= group_tokens
        return staying

    @cached_property
    def compactable(self) -> list[int]:
        """Indexes of messages that may be summarized, and are not summarized yet.

        They are in the order of the request.
        """
        excluded = self.history.model_covered | self.always_kept
        return [i for i in self.history.indexes if i not in excluded]

    @property
    def uncovered(self) -> list[int]:
        """Indexes of messages that may be covered, and are not covered yet.

        They are in the order of the request.
        """
        excluded = self.history.covered | self.always_kept
        return [i for i in self.history.indexes if i not in excluded]

    @cached_property
    def fixed_contents(self) -> list[types.Content]:
        """The contents that no compaction can remove.

        These are the contents that belong to this request alone, and `always_kept`.
        """
        removable = set(self.history.indexes) - self.always_kept
        return [c for i, c in enumerate(self.history.shown) if i not in removable]

    @cached_property
    def fixed_tokens(self) -> int:
        """The estimate of the instruction, the tools and `fixed_contents` together."""
        return self.measure(self.fixed_contents)

    @property
    def room_tokens(self) -> int:
        """The threshold less `fixed_tokens`; at least 0."""
        return max(0, self.budgets.threshold_tokens - self.fixed_tokens)

    @property
    def summary_tokens(self) -> int:
        """The most tokens that a summary may take.

        This is the limit of the budgets. But if `room_tokens` is small, the limit is a
        seventh of `room_tokens`, because most of this room is for messages. The result
        is at least `LEAST_SUMMARY_TOKENS`, unless the limit of the budgets is lower.
        """
        share_tokens = max(LEAST_SUMMARY_TOKENS, self.room_tokens // 7)
        return min(self.budgets.summary_tokens, share_tokens)

    @property
    def user_tokens(self) -> int:
        """The most tokens that the user's messages may take beside a summary.

        The setting `user_messages` is limited by `MAX_USER_TOKENS`, and by a third of
        `room_tokens`.
        """
        working_tokens = self.budgets.working_tokens
        set_tokens = resolve_size(self.settings.user_messages, working_tokens)
        return min(set_tokens, MAX_USER_TOKENS, self.room_tokens // 3)

    @property
    def limit_tokens(self) -> int:
        """The most tokens that a compacted request may take.

        This is the window less its buffer. But if the fixed contents and a summary
        alone take more, no compaction can keep the buffer free. Then the limit is the
        size from which on a provider is not expected to accept the request.
        """
        budgets = self.budgets
        least_tokens = self.fixed_tokens + budgets.summary_tokens
        can_keep_buffer = least_tokens < budgets.full_tokens
        return budgets.full_tokens if can_keep_buffer else budgets.overfull_tokens

    @cached_property
    def request_text(self) -> str:
        """The text of the user's current request; "" if the request is unknown."""
        index = self.history.request_index
        return "" if index is None else content_text(self.history.contents[index])

    @cached_property
    def quoted_chars(self) -> int:
        """How many characters of the current request to quote; -1 for all."""
        return count_quoted_chars(self.request_text, self.budgets.window_tokens)

    @property
    def draft(self) -> Draft:
        """The stored summary as a draft; without a summary a draft that covers nothing.

        The draft also shortens results as the stored summary does. But if the summary
        covers even the last of these results, the draft leaves all results whole.
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
        # The last message with short results. The index is -1 if the request does not
        # have this message.
        last_index = history.find_named(stored.truncated_upto)
        has_short_results = last_index >= 0 and last_index not in covered
        if stored.truncation is None or not has_short_results:
            return draft
        return replace(draft, truncation=stored.truncation, truncated_upto=last_index)

    @cached_property
    def is_chat(self) -> bool:
        """Whether no tool was called in the agent's history.

        What is not loaded of the session was read when the stored summary was made.
        """
        history = self.history
        if history.stored is not None and history.stored.has_tools:
            return False
        return not any(has_tool(history.contents[index]) for index in history.indexes)

    @cached_property
    def kept(self) -> KeptSteps:
        """The newest steps, which stay word for word; `KeptSteps` explains a step.

        The setting `keep` decides how many steps they are. But a compaction that was
        requested keeps at most the last step, and only if the model has not seen the
        results of this step.
        """
        keep_tokens = _choose_keep_tokens(self)
        return _find_kept_steps(self, keep_tokens, _estimate_room_tokens(self))

    def older_than(self, keep_count: int) -> frozenset[int]:
        """Returns the indexes of the messages that a new summary should cover.

        These are the older messages, and all messages that are summarized already. Two
        kinds of messages stay:

        - the messages of `kept`
        - the newest `keep_count` messages of `compactable`, or a few more or fewer,
          because no call is parted from its result

        If at most `keep_count` messages are compactable, there are no older messages,
        and the result is empty.

        Args:
            keep_count: How many of the newest messages should stay; with 0 only those
                of `kept` stay.
        """
        older_count = len(self.compactable) - keep_count
        if older_count < 1:
            return frozenset()

        kept_indexes = self.kept.indexes
        candidates = [index for index in self.compactable if index not in kept_indexes]
        # If `kept` has all compactable messages, there is nothing new to cover.
        if not candidates:
            return self.whole([])

        # If `kept` has `keep_count` messages or more, all candidates are older. `kept`
        # begins with a step, so no call is parted from its result.
        if older_count >= len(candidates):
            return frozenset(candidates) | self.history.model_covered

        contents = [self.history.contents[index] for index in candidates]
        split_position = find_safe_split(contents, older_count)
        return self.whole(candidates[:split_position])

    def whole(self, indexes: Iterable[int]) -> frozenset[int]:
        """Adds the summarized messages to these indexes, and leaves out split pairs.

        A pair is a call and its result. If only one of both is among the indexes, that
        index is left out, so that both stay in the request.
        """
        covered = frozenset(indexes) | self.history.model_covered
        return keep_pairs_whole(covered, self.history.pairs)


def _estimate_room_tokens(turn: Turn) -> int:
    """Estimates how many tokens the kept steps may take.

    This is the limit of a compacted request, less all that stands beside the steps:

    - the instruction, the tools and the contents that always stay
    - the quote of the user's request
    - the summary and its sections; they are not written yet, so their size is a guess
    """
    budgets = turn.budgets
    guess_tokens = int(
        _SUMMARY_GUESS_RATIO * budgets.summary_tokens
        + _SECTIONS_GUESS_RATIO * budgets.working_tokens
    )
    taken_tokens = turn.fixed_tokens + _quote_tokens(turn) + guess_tokens
    left_tokens = turn.limit_tokens - taken_tokens
    # The steps get at least a twentieth of the window. If there is no room, the summary
    # is shortened later.
    return max(budgets.working_tokens // 20, left_tokens)


def _quote_tokens(turn: Turn) -> int:
    """Estimates the quote of the user's request beside a summary."""
    tokens = turn.count(turn.request_text)
    is_quoted_in_part = turn.quoted_chars >= 0
    if is_quoted_in_part:
        # Only a long request is quoted in part, so its length is not 0.
        return tokens * turn.quoted_chars // len(turn.request_text)
    return tokens


def _find_kept_steps(turn: Turn, keep_tokens: int, room_tokens: int) -> KeptSteps:
    """Finds the newest steps that a compaction leaves word for word.

    Args:
        turn: The model call.
        keep_tokens: The size of the setting `keep`. The newest steps that fit in this
            size are kept. If none fits, the last step is kept, but only if the model
            has not seen its results.
        room_tokens: The most that the kept steps may take. Results are shortened to
            this size. If even this is not enough, no steps are kept.
    """
    history = turn.history
    steps = _split_into_steps(turn)
    if not steps or turn.keep_count == 0:
        return KeptSteps()

    # If the last step ends with a content of the model, the model has seen all results.
    # The same holds if the step ends with a message of the user, which comes after an
    # answer. Anything else at the end, usually a result, is new to the model.
    last_step = steps[-1]
    last_index = last_step[-1]
    is_from_model = history.shown[last_index].role == "model"
    is_seen = is_from_model or last_index in history.user_messages
    pending = [] if is_seen else last_step

    fitting = _find_fitting_indexes(turn, steps, min(keep_tokens, room_tokens))
    kept = fitting or pending

    # In two cases only the steps after the user's request are kept:
    # - If all messages would be kept: the compaction would cover nothing.
    # - If the request would be the first kept message: to keep the request saves
    #   nothing, because a covered request is quoted after the summary.
    keeps_all = len(kept) == len(turn.compactable)
    begins_with_request = bool(kept) and kept[0] == history.request_index
    if keeps_all or begins_with_request:
        running_turn = frozenset(history.running_turn)
        kept = [index for index in kept if index in running_turn]

    kept_steps = KeptSteps(frozenset(kept), frozenset(pending))
    contents = [history.shown[index] for index in kept]
    return _shorten_kept(turn, kept_steps, contents, keep_tokens, room_tokens)


def _choose_keep_tokens(turn: Turn) -> int:
    """Returns how many tokens of the newest steps a compaction leaves word for word."""
    if turn.reason == "requested":
        return 0
    set_tokens = turn.settings.keep_tokens(turn.budgets.working_tokens)
    if turn.settings.keep != "auto":
        return set_tokens
    return max(set_tokens, _measure_last_answer(turn))


def _measure_last_answer(turn: Turn) -> int:
    """Returns the tokens of the last answer and of the request after it.

    A request such as "change the second one" needs the answer word for word. The result
    is 0 in three cases:

    - The newest message is not the user's request: the model has read the answer.
    - The message before the request is no answer.
    - Both take more than `KEEP_ANSWER_RATIO` of the window.
    """
    history = turn.history
    steps = _split_into_steps(turn)
    if len(steps) < 2 or steps[-1] != [history.request_index]:
        return 0

    answer = [history.shown[index] for index in steps[-2]]
    if answer[0].role != "model" or any(has_tool(content) for content in answer):
        return 0

    request = [history.shown[index] for index in steps[-1]]
    tokens = turn.measure_alone(answer) + turn.measure_alone(request)
    most_tokens = KEEP_ANSWER_RATIO * turn.budgets.working_tokens
    return tokens if tokens <= most_tokens else 0


def _split_into_steps(turn: Turn) -> list[list[int]]:
    """Splits the compactable messages into steps, each as a list of indexes.

    A step begins with a message of the user, or with a content of the model. All that
    follows belongs to the same step, until the next one begins: usually the results of
    the model's calls. For example, the steps of [message, call, result, answer] are
    [0], [1, 2] and [3]. Contents before the first step, such as a result without its
    call, belong to no step.
    """
    indexes = turn.compactable
    contents = [turn.history.shown[index] for index in indexes]
    user_indexes = frozenset(turn.history.user_messages)
    may_split_before = pair_boundaries(contents)

    steps: list[list[int]] = []
    for position, index in enumerate(indexes):
        # A content between a call and its result begins no step.
        is_start = contents[position].role == "model" or index in user_indexes
        if is_start and may_split_before[position]:
            steps.append([])
        if steps:
            steps[-1].append(index)
    return steps


def _find_fitting_indexes(
    turn: Turn, steps: Sequence[Sequence[int]], most_tokens: int
) -> list[int]:
    """Returns the indexes of the newest steps that fit, oldest first.

    All together take at most `most_tokens`, and have at most `turn.keep_count`
    messages. The result is [] if not even the last step fits.
    """
    shown = turn.history.shown
    newest_first: list[int] = []
    tokens = 0
    for step in reversed(steps):
        tokens += turn.measure_alone([shown[index] for index in step])
        message_count = len(newest_first) + len(step)
        if tokens > most_tokens or message_count > turn.keep_count:
            break
        newest_first += reversed(step)
    return newest_first[::-1]


def _shorten_kept(
    turn: Turn,
    kept: KeptSteps,
    contents: Sequence[types.Content],
    keep_tokens: int,
    room_tokens: int,
) -> KeptSteps:
    """Measures kept steps, and decides how their results are shortened.

    The steps have a target size: `keep_tokens` or `MAX_PENDING_RATIO` of the window,
    whichever is larger, but at most `room_tokens`.

    Args:
        turn: The model call.
        kept: The steps, not measured yet.
        contents: The contents of the steps.
        keep_tokens: The size of the setting `keep`.
        room_tokens: The most that the steps may take.

    Returns:
        One of three results:
        - If the steps fit in the target size: the steps with their size.
        - If their results can be shortened so that the steps take at most
          `room_tokens`: the steps with their size after that. Results are shortened to
          the target size, or as far as possible.
        - Otherwise: no steps. Only results can be shortened, so texts or the arguments
          of calls may still be too large.
    """
    pending_tokens = int(turn.budgets.working_tokens * MAX_PENDING_RATIO)
    wanted_tokens = max(pending_tokens, keep_tokens)
    target_tokens = min(wanted_tokens, room_tokens)
    unshortened_tokens = turn.measure_alone(contents)
    if unshortened_tokens <= target_tokens:
        return replace(kept, tokens=unshortened_tokens)

    # The first try leaves results of some tools whole, the second try shortens all.
    for whole_tools in (turn.whole_tools, ()):
        truncation, short_tokens = fit_results(
            contents, target_tokens, turn.measure_alone, turn.has_recall, whole_tools
        )
        if short_tokens <= room_tokens:
            return replace(kept, tokens=short_tokens, truncation=truncation)
    return KeptSteps()
