"""One run of a pipeline: the decisions of its reducers so far."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum

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
        lengths: To how many characters a text is shortened.
        preferences: From when on a reducer acts, and what it preserves.
    """

    lengths: bool = False
    preferences: bool = False


class Reduction:
    """The state of one pipeline run: a draft that reducers change, and its size."""

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
        """The estimate of the request as it stands now."""
        return self._outcome.tokens if self._outcome else self.turn.tokens

    @property
    def kept(self) -> list[int]:
        """Indexes of the messages that are still sent, oldest first."""
        return [i for i in self.turn.history.indexes if i not in self._draft.covered]

    @property
    def protected(self) -> frozenset[int]:
        """Indexes that no reducer removes, such as those of the current request."""
        protected = self.turn.stays | self.turn.kept.pending
        request_index = self.turn.history.request_index
        if request_index is None:
            return protected
        return protected | {request_index}

    @property
    def truncation(self) -> tuple[Truncation, int] | None:
        """How tool results are shortened, and up to which index; None for not."""
        draft = self._draft
        if draft.truncation is None:
            return None
        return draft.truncation, draft.truncated_upto

    def measure_kept(self) -> dict[int, int]:
        """Returns the heuristic tokens of each message that is sent, by its index."""
        history = self.turn.history
        stored = self._outcome.stored if self._outcome else history.stored
        shown = dict(enumerate(history.shown))
        if stored:
            shown |= history.shortened_results(stored)
        return {
            index: history.memo.estimate_tokens([shown[index]]) for index in self.kept
        }

    def expect_beside_summary(self, keep_count: int) -> int:
        """Estimates the request with an empty summary and the newest messages."""
        covered = self.turn.older_than(keep_count)
        without_text = replace(
            self._draft, text="", model_chars=0, covered=covered, model_covered=covered
        )
        return self.ask.outcome(self.turn, without_text).tokens

    def drop(self, indexes: Collection[int]) -> StrategyResult:
        """Takes messages out of the request; a later summary still sees them.

        A call goes only together with its result.
        """
        draft = self._draft
        wanted = draft.covered | (frozenset(indexes) - self.protected)
        covered = keep_pairs_whole(wanted, self.turn.history.pairs)
        if covered <= draft.covered:
            return StrategyResult.NO_CHANGE
        model_text = draft.text[: draft.model_chars]
        return self._apply(replace(draft, covered=covered, text=model_text))

    def truncate(self, truncation: Truncation, upto: int) -> StrategyResult:
        """Shortens tool results up to and including `upto`, but for `keep_tools`."""
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
        """Has all but the newest `keep_count` messages summarized."""
        known = self._draft
        covered = self.turn.older_than(keep_count)
        if self.ask.failures or not covered - known.model_covered:
            return StrategyResult.NO_CHANGE

        made = await self.ask.summarize(self.turn, covered)
        draft = replace(
            known,
            text=made.text,
            model_chars=made.model_chars,
            covered=made.covered,
            model_covered=known.model_covered if made.is_mechanical else made.covered,
        )
        return self._apply(draft)

    def _apply(self, draft: Draft) -> StrategyResult:
        """Takes a draft over, and tells what it achieves."""
        tokens_before = self.tokens
        self._draft = draft
        self._outcome = self.ask.outcome(self.turn, draft)
        if self.tokens <= self.target_tokens:
            return StrategyResult.TARGET_REACHED
        if self.tokens < tokens_before:
            return StrategyResult.APPLIED
        return StrategyResult.NO_CHANGE

    def last_tool_result(self, before: int | None = None) -> int | None:
        """Returns the index of the newest tool result in the request.

        Only results before the index `before` count, where it is given; None for none.
        """
        contents = self.turn.history.contents
        for index in reversed(self.kept):
            is_older = before is None or index < before
            if is_older and has_function_response(contents[index]):
                return index
        return None

    def is_instruction(self, index: int) -> bool:
        """Returns whether a content of the history is an instruction, not a message."""
        content = self.turn.history.contents[index]
        return content.role not in ("user", "model") and not has_tool(content)
