"""One run of a pipeline: the decisions of its reducers so far.

A message is named by its index among the contents of the request. A message is covered
if it is left out of the request, with or without a summary. A heuristic token is four
bytes; real tokens are those of the model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from contextguard_adk._history.contents import (
    has_function_response,
    has_tool,
    keep_pairs_whole,
)
from contextguard_adk._history.stored import Draft
from contextguard_adk._history.truncation import Truncation
from contextguard_adk._summaries.ask import Ask
from contextguard_adk._turn.facts import Outcome
from contextguard_adk._turn.turn import Turn


class StrategyResult(Enum):
    """The result of one reducer of a pipeline.

    With `TARGET_REACHED` the request is small enough; later reducers do not run.
    """

    NO_CHANGE = "no_change"
    APPLIED = "applied"
    TARGET_REACHED = "target_reached"


@dataclass(frozen=True)
class Relaxed:
    """The settings beyond which reducers may go while the request is too large.

    Attributes:
        lengths: Whether texts may become shorter than the settings say.
        preferences: Whether a reducer may act before its trigger, and drop messages
            that the settings preserve.
    """

    lengths: bool = False
    preferences: bool = False


class AppliedTruncation(NamedTuple):
    """How a draft shortens tool results.

    Attributes:
        truncation: The lengths, and the tools whose results stay whole.
        upto: The index of the last message whose results are shortened.
    """

    truncation: Truncation
    upto: int


class Reduction:
    """The decisions of the reducers so far: a draft, and the size of its request.

    Attributes:
        turn: The model call.
        ask: Writes summaries, and composes the request with a draft in place.
        target_tokens: The size of a request at which the pipeline may stop.
        relaxed: The settings beyond which reducers may go now.
    """

    def __init__(self, turn: Turn, ask: Ask, target_tokens: int) -> None:
        self.turn = turn
        self.ask = ask
        self.target_tokens = target_tokens
        self.relaxed = Relaxed()
        # At first, the draft has the summary and the truncation of the stored summary,
        # which are in the request already.
        self._draft = replace(turn.draft, reason=turn.reason)
        # The request with the draft in place; None until a reducer changes the draft.
        self._outcome: Outcome | None = None

    @property
    def decided(self) -> Draft | None:
        """The draft that the reducers have made; None if they have changed nothing."""
        return self._outcome.draft if self._outcome else None

    @property
    def tokens(self) -> int:
        """The size of the request with all decisions so far, in real tokens."""
        return self._outcome.tokens if self._outcome else self.turn.tokens

    @property
    def kept(self) -> list[int]:
        """Indexes of the messages that are still sent, oldest first."""
        covered = self._draft.covered
        return [index for index in self.turn.history.indexes if index not in covered]

    @property
    def protected(self) -> frozenset[int]:
        """Indexes of the messages that no reducer removes.

        These are the newest results of the tools in `keep_tools`, the results that the
        model has not seen yet, and the user's current request.
        """
        # `turn.kept` has only the newest steps. The property `kept` of this class has
        # all messages that are still sent.
        protected_results = self.turn.always_kept | self.turn.kept.pending
        request_index = self.turn.history.request_index
        if request_index is None:
            return protected_results
        return protected_results | {request_index}

    @property
    def truncation(self) -> AppliedTruncation | None:
        """How tool results are shortened; None while they are whole."""
        draft = self._draft
        if draft.truncation is None:
            return None
        return AppliedTruncation(draft.truncation, draft.truncated_upto)

    def measure_kept(self) -> dict[int, int]:
        """Returns the heuristic tokens of each message of `kept`, by its index."""
        history = self.turn.history
        contents_by_index = dict(enumerate(history.shown))

        # The record of a summary says which tool results are shortened. If a reducer
        # has changed the request, the new record counts. Otherwise the stored one does.
        record = self._outcome.stored if self._outcome else history.stored
        if record:
            contents_by_index |= history.shortened_results(record)
        return {
            index: history.memo.estimate_tokens([contents_by_index[index]])
            for index in self.kept
        }

    def expect_beside_summary(self, keep_count: int) -> int:
        """Estimates, in real tokens, everything that would stand beside a summary.

        This is everything in the request but the summary itself: instruction, tools,
        sections, and the messages that stay. About the newest `keep_count` messages
        stay, see `Turn.older_than`.
        """
        covered = self.turn.older_than(keep_count)
        # A model is expected to write the summary, so all covered messages are in
        # `model_covered`. The text "" stands for the summary, which is not measured.
        expected_draft = replace(
            self._draft, text="", model_chars=0, covered=covered, model_covered=covered
        )
        return self.ask.outcome(self.turn, expected_draft).tokens

    def drop(self, indexes: Collection[int]) -> StrategyResult:
        """Leaves messages out of the request; a later summary may still describe them.

        A call is dropped only together with its result. Protected messages stay.
        Returns `NO_CHANGE` if all messages stay.
        """
        old_draft = self._draft
        droppable = frozenset(indexes) - self.protected
        covered = keep_pairs_whole(
            old_draft.covered | droppable, self.turn.history.pairs
        )
        if covered <= old_draft.covered:
            return StrategyResult.NO_CHANGE

        # The text of the draft may be the text of a model and, after it, excerpts of
        # all other covered messages. There are no excerpts of the messages that are
        # dropped now. So all excerpts go, and only the text of the model stays.
        model_text = old_draft.text[: old_draft.model_chars]
        return self._apply(replace(old_draft, covered=covered, text=model_text))

    def truncate(self, truncation: Truncation, upto: int) -> StrategyResult:
        """Shortens the tool results of all messages up to the index `upto`, included.

        The results of `Turn.whole_tools` stay as they are. Returns `NO_CHANGE` if the
        draft shortens the same results in the same way already.
        """
        excluded_tools = {*truncation.exclude_tools, *self.turn.whole_tools}
        new_draft = replace(
            self._draft,
            truncation=replace(truncation, exclude_tools=tuple(sorted(excluded_tools))),
            truncated_upto=upto,
        )
        if new_draft == self._draft:
            return StrategyResult.NO_CHANGE
        return self._apply(new_draft)

    async def summarize(self, keep_count: int) -> StrategyResult:
        """Summarizes older messages.

        About the newest `keep_count` messages stay, see `Turn.older_than`. Nothing
        changes in two cases:

        - If a summary was asked for earlier in this run, and the model has failed.
        - If a model has summarized all older messages already.
        """
        old_draft = self._draft
        covered = self.turn.older_than(keep_count)
        is_summarized = covered <= old_draft.model_covered
        if self.ask.failures or is_summarized:
            return StrategyResult.NO_CHANGE

        summary = await self.ask.summarize(self.turn, covered)
        # If no model has written the summary, excerpts stand in place of the messages
        # that no model has summarized before. So `model_covered` stays as it was.
        if summary.is_mechanical:
            model_covered = old_draft.model_covered
        else:
            model_covered = summary.covered
        new_draft = replace(
            old_draft,
            text=summary.text,
            model_chars=summary.model_chars,
            covered=summary.covered,
            model_covered=model_covered,
        )
        return self._apply(new_draft)

    def _apply(self, draft: Draft) -> StrategyResult:
        """Puts a draft in place of the last one.

        Returns:
            - If the request is now small enough: `TARGET_REACHED`.
            - If the request is smaller than before: `APPLIED`.
            - Otherwise: `NO_CHANGE`, although the new draft is in place.
        """
        tokens_before = self.tokens
        self._draft = draft
        self._outcome = self.ask.outcome(self.turn, draft)
        if self.tokens <= self.target_tokens:
            return StrategyResult.TARGET_REACHED
        if self.tokens < tokens_before:
            return StrategyResult.APPLIED
        return StrategyResult.NO_CHANGE

    def last_tool_result(self, before: int | None = None) -> int | None:
        """Returns the index of the newest message of `kept` that has a tool result.

        `kept` has all messages that are still sent. Returns None if none of these has a
        tool result. If `before` is an index, only messages of a lower index count.
        """
        contents = self.turn.history.contents
        for index in reversed(self.kept):
            is_candidate = before is None or index < before
            if is_candidate and has_function_response(contents[index]):
                return index
        return None

    def is_instruction(self, index: int) -> bool:
        """Whether a message is an instruction: not of the user, a model or a tool."""
        content = self.turn.history.contents[index]
        return content.role not in ("user", "model") and not has_tool(content)
