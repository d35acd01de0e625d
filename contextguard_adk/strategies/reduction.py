"""One run of a pipeline: the decisions of its reducers so far."""

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
    """The settings that reducers do not insist on, because the request is too large.

    Attributes:
        lengths: Whether texts may become shorter than the settings say.
        preferences: Whether a reducer may act earlier, and drop messages that the
            settings preserve.
    """

    lengths: bool = False
    preferences: bool = False


class AppliedTruncation(NamedTuple):
    """How tool results are shortened in a draft.

    Attributes:
        truncation: The lengths and the exceptions.
        upto: The index of the last shortened message.
    """

    truncation: Truncation
    upto: int


class Reduction:
    """The state of one pipeline run: a draft that reducers change, and its size.

    The messages of the request are named by their indexes in `turn.history.contents`.
    """

    def __init__(self, turn: Turn, ask: Ask, target_tokens: int) -> None:
        self.turn = turn
        self.ask = ask
        self.target_tokens = target_tokens
        self.relaxed = Relaxed()
        self._draft = replace(turn.draft, reason=turn.reason)
        self._outcome: Outcome | None = None

    @property
    def decided(self) -> Draft | None:
        """The draft that the reducers have made; None where they changed nothing."""
        return self._outcome.draft if self._outcome else None

    @property
    def tokens(self) -> int:
        """The estimate of the request with all decisions so far, in real tokens."""
        return self._outcome.tokens if self._outcome else self.turn.tokens

    @property
    def kept(self) -> list[int]:
        """Indexes of the messages that are still sent, oldest first."""
        covered = self._draft.covered
        return [index for index in self.turn.history.indexes if index not in covered]

    @property
    def protected(self) -> frozenset[int]:
        """Indexes that no reducer removes, such as those of the current request."""
        protected = self.turn.always_kept | self.turn.kept.pending
        request_index = self.turn.history.request_index
        if request_index is None:
            return protected
        return protected | {request_index}

    @property
    def truncation(self) -> AppliedTruncation | None:
        """How tool results are shortened; None while they are not."""
        draft = self._draft
        if draft.truncation is None:
            return None
        return AppliedTruncation(draft.truncation, draft.truncated_upto)

    def measure_kept(self) -> dict[int, int]:
        """Returns the heuristic tokens of each message that is sent, by its index."""
        history = self.turn.history
        stored = self._outcome.stored if self._outcome else history.stored
        sent = dict(enumerate(history.shown))
        if stored:
            sent |= history.shortened_results(stored)
        return {
            index: history.memo.estimate_tokens([sent[index]]) for index in self.kept
        }

    def expect_beside_summary(self, keep_count: int) -> int:
        """Estimates the request, in real tokens, without the text of a summary.

        The summary would replace all but the newest `keep_count` messages.
        """
        covered = self.turn.older_than(keep_count)
        without_text = replace(
            self._draft, text="", model_chars=0, covered=covered, model_covered=covered
        )
        return self.ask.outcome(self.turn, without_text).tokens

    def drop(self, indexes: Collection[int]) -> StrategyResult:
        """Takes messages out of the request; a later summary still sees them.

        A call goes only together with its result. Protected messages stay.
        """
        draft = self._draft
        wanted = draft.covered | (frozenset(indexes) - self.protected)
        covered = keep_pairs_whole(wanted, self.turn.history.pairs)
        if covered <= draft.covered:
            return StrategyResult.NO_CHANGE

        # Excerpts behind the model's text do not describe the new covered messages.
        model_text = draft.text[: draft.model_chars]
        return self._apply(replace(draft, covered=covered, text=model_text))

    def truncate(self, truncation: Truncation, upto: int) -> StrategyResult:
        """Shortens the tool results up to the index `upto`, this one included.

        The results of the tools in `keep_tools` stay as they are.
        """
        excluded = {*truncation.exclude_tools, *self.turn.settings.keep_tools}
        draft = replace(
            self._draft,
            truncation=replace(truncation, exclude_tools=tuple(sorted(excluded))),
            truncated_upto=upto,
        )
        if draft == self._draft:
            return StrategyResult.NO_CHANGE
        return self._apply(draft)

    async def summarize(self, keep_count: int) -> StrategyResult:
        """Has all but the newest `keep_count` messages summarized.

        Changes nothing in two cases: an earlier summary has failed, or a model has
        already summarized all of these messages.
        """
        old_draft = self._draft
        covered = self.turn.older_than(keep_count)
        if self.ask.failures or not covered - old_draft.model_covered:
            return StrategyResult.NO_CHANGE

        summary = await self.ask.summarize(self.turn, covered)
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
        """Puts a draft in place; returns whether it makes the request small enough."""
        tokens_before = self.tokens
        self._draft = draft
        self._outcome = self.ask.outcome(self.turn, draft)
        if self.tokens <= self.target_tokens:
            return StrategyResult.TARGET_REACHED
        if self.tokens < tokens_before:
            return StrategyResult.APPLIED
        return StrategyResult.NO_CHANGE

    def last_tool_result(self, before: int | None = None) -> int | None:
        """Returns the index of the newest message with a tool result; None for none.

        With `before`, only messages of a lower index count.
        """
        contents = self.turn.history.contents
        for index in reversed(self.kept):
            is_older = before is None or index < before
            if is_older and has_function_response(contents[index]):
                return index
        return None

    def is_instruction(self, index: int) -> bool:
        """Whether a content is an instruction: from neither user, model nor a tool."""
        content = self.turn.history.contents[index]
        return content.role not in ("user", "model") and not has_tool(content)
