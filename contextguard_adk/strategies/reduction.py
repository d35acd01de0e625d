"""One run of a pipeline: what its reducers have decided so far."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum

from contextguard_adk._history.contents import (
    has_function_response,
    has_tool,
    keep_pairs_whole,
)
from contextguard_adk._history.draft import Draft
from contextguard_adk._history.truncation import Truncation
from contextguard_adk._summaries.ask import Ask
from contextguard_adk._turn.facts import Outcome
from contextguard_adk._turn.turn import Turn


class StrategyResult(Enum):
    """What one reducer of a pipeline has achieved.

    With `TARGET_REACHED` the request is small enough; later reducers do not run.
    """

    NO_CHANGE = "no_change"
    APPLIED = "applied"
    TARGET_REACHED = "target_reached"


@dataclass(frozen=True)
class Relaxed:
    """Which settings are relaxed: lengths, or preferences of when and what to drop."""

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
        """What the reducers have decided; None where they changed nothing."""
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
        """What no reducer removes: the current request, pending results, what stays."""
        request = self.turn.history.request_index
        current = frozenset(() if request is None else (request,))
        return self.turn.stays | self.turn.kept.pending | current

    @property
    def truncation(self) -> tuple[Truncation, int] | None:
        """How tool results in the request are shortened, and up to which content."""
        draft = self._draft
        return (draft.truncation, draft.truncated_upto) if draft.truncation else None

    def measure_kept(self) -> dict[int, int]:
        """Heuristic tokens of what stands in the request, each content as it stands."""
        history = self.turn.history
        stored = self._outcome.stored if self._outcome else history.stored
        shown = dict(enumerate(history.shown))
        if stored:
            shown |= history.shortened_results(stored)
        return {i: history.memo.estimate_tokens([shown[i]]) for i in self.kept}

    def expect_beside_summary(self, keep_count: int) -> int:
        """Estimates what would stand beside a summary and the newest contents."""
        covered = self.turn.older_than(keep_count)
        beside = replace(self._draft, text="", covered=covered, model_covered=covered)
        return self.ask.outcome(self.turn, replace(beside, model_chars=0)).tokens

    def drop(self, indexes: Collection[int]) -> StrategyResult:
        """Takes contents, calls with results, out; a later summary still sees them."""
        draft = self._draft
        wanted = draft.covered | (frozenset(indexes) - self.protected)
        covered = keep_pairs_whole(wanted, self.turn.history.pairs)
        if covered <= draft.covered:
            return StrategyResult.NO_CHANGE
        text = draft.text[: draft.model_chars]
        return self._apply(replace(draft, covered=covered, text=text))

    def truncate(self, truncation: Truncation, upto: int) -> StrategyResult:
        """Shortens tool results up to and including `upto`, but for `keep_tools`."""
        names = {*truncation.exclude_tools, *self.turn.settings.keep_tools}
        truncation = replace(truncation, exclude_tools=tuple(sorted(names)))
        draft = replace(self._draft, truncation=truncation, truncated_upto=upto)
        if draft == self._draft:
            return StrategyResult.NO_CHANGE
        return self._apply(draft)

    async def summarize(self, keep_count: int) -> StrategyResult:
        """Has all but the newest `keep_count` messages summarized."""
        covered = self.turn.older_than(keep_count)
        if self.ask.failures or not covered - self._draft.model_covered:
            return StrategyResult.NO_CHANGE
        known = self._draft
        made = await self.ask.summarize(self.turn, covered)
        summarized = known.model_covered if made.is_mechanical else made.covered
        draft = replace(known, text=made.text, model_chars=made.model_chars)
        draft = replace(draft, covered=made.covered, model_covered=summarized)
        return self._apply(draft)

    def _apply(self, draft: Draft) -> StrategyResult:
        """Measures what was decided, and tells what it achieved."""
        before = self.tokens
        self._draft = draft
        self._outcome = self.ask.outcome(self.turn, draft)
        if self.tokens <= self.target_tokens:
            return StrategyResult.TARGET_REACHED
        is_less = self.tokens < before
        return StrategyResult.APPLIED if is_less else StrategyResult.NO_CHANGE

    def last_tool_result(self, before: int | None = None) -> int | None:
        """The index of the newest tool result in the request, older than `before`."""
        contents = self.turn.history.contents
        indexes = (i for i in reversed(self.kept) if before is None or i < before)
        return next((i for i in indexes if has_function_response(contents[i])), None)

    def is_instruction(self, index: int) -> bool:
        """Tells whether a history content is an instruction, not a message."""
        content = self.turn.history.contents[index]
        return content.role not in ("user", "model") and not has_tool(content)
