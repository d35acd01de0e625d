"""Runs reducers in order, cheapest first, until the request is small enough."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from contextguard_adk._history.pairs import (
    has_function_response,
    has_tool,
    keep_pairs_whole,
)
from contextguard_adk._history.rendering import shorten_results
from contextguard_adk._history.truncation import Preview, Truncation
from contextguard_adk._summarizing.compose import Draft
from contextguard_adk.strategies.base import Strategy, import_subclass
from contextguard_adk.strategies.reducers import (
    MessageWindow,
    Reducer,
    Relaxed,
    StrategyResult,
    SummaryCompaction,
    TokenWindow,
    ToolOutputTruncation,
)

if TYPE_CHECKING:
    from contextguard_adk._summarizing.compose import Compaction
    from contextguard_adk._summarizing.context import CompactionContext


_ENOUGH = StrategyResult.TARGET_REACHED
PASSES = (Relaxed(), Relaxed(lengths=True), Relaxed(lengths=True, preferences=True))


def _suggest_instance(value: object) -> str:
    if isinstance(value, type) and issubclass(value, Reducer):
        return f". Did you mean {value.__name__}(…)?"
    return ""


def _read_reducer(value: object) -> object:
    """Takes a table with the dotted path of a class for a reducer."""
    if isinstance(value, Reducer):
        return value
    if not (isinstance(value, dict) and "reducer" in value):
        said = "a Reducer, or a table with `reducer`, its dotted path, is expected"
        raise ValueError(said + _suggest_instance(value))
    kind = import_subclass(value["reducer"], Reducer)  # type: ignore[type-abstract]
    settings = {name: item for name, item in value.items() if name != "reducer"}
    return kind.model_validate(settings)


class Pipeline(Strategy):
    """Drops, shortens and only then summarizes.

    Runs when tokens reach the threshold, or `compression_threshold` of the window if
    that is less. The reducers run in order: window, tool output, summary, then
    `reducers`. Each is measured before the next one runs, and the pipeline stops at the
    target, `target_token_ratio` of the window. What was decided stays in place on later
    calls. While the request would not fit, settings are relaxed: first lengths, then
    triggers, minima and what is preserved; at last all is summarized but the newest
    steps of the running turn (see `keep`). Lengths are also relaxed when the request
    would stay above the middle between target and threshold, because a run that gains
    little has to be repeated soon.
    """

    window: MessageWindow | TokenWindow | None = Field(
        default=TokenWindow(budget_tokens=0.30),
        description="Drops old messages: a `MessageWindow` or a `TokenWindow`. The "
        "default keeps the newest that take 0.3 of the context window. None (false in "
        "a file): this step drops nothing.",
    )
    tool_output: ToolOutputTruncation | None = Field(
        default=ToolOutputTruncation(
            max_length=16_000,
            smart_truncate=True,
            head_length=12_000,
            tail_length=4_000,
            preserve_last_tool_result=False,
        ),
        description="Shortens tool results. The default shortens strings over 16,000 "
        "characters, from their first request on. None (false in a file): results stay "
        "whole.",
    )
    summary: SummaryCompaction | None = Field(
        default=SummaryCompaction(),
        description="Summarizes when window and tool_output are not enough. None "
        "(false in a file): a summary is written only when nothing else makes the "
        "request fit.",
    )
    reducers: tuple[Annotated[Reducer, BeforeValidator(_read_reducer)], ...] = Field(
        default=(),
        description="Reducers of your own, which run after the others; in a file each "
        "names its class as `reducer`, by dotted path.",
    )
    compression_threshold: float | None = Field(
        default=None,
        gt=0,
        le=1,
        strict=True,
        description="The part of the context window from which on the pipeline runs, "
        "more than the summary's target_token_ratio and at most 1. None: the "
        "threshold.",
    )

    @field_validator("window", "tool_output", "summary", mode="before")
    @classmethod
    def _read_step(cls, value: object, info: ValidationInfo) -> object:
        """Reads False as None, which TOML cannot write, and tells windows apart."""
        if value is False:
            return None
        if not (value is None or isinstance(value, dict | Reducer)):
            said = "a reducer, a table of settings or false is expected"
            raise ValueError(said + _suggest_instance(value))
        if info.field_name == "window" and isinstance(value, dict):
            kind = TokenWindow if "budget_tokens" in value else MessageWindow
            return kind.model_validate(value)
        return value

    @model_validator(mode="after")
    def _check_threshold(self) -> Pipeline:
        early = self.compression_threshold
        if early is not None and early <= self.target_token_ratio:
            raise ValueError(
                f"compression_threshold ({early}) must be larger than the "
                f"target_token_ratio of the summary ({self.target_token_ratio})"
            )
        return self

    @property
    def target_token_ratio(self) -> float:
        """Of the context window; where the pipeline may stop."""
        return self.summary.target_token_ratio if self.summary else 0.5

    def preview(self, window_tokens: int, has_recall: bool) -> Preview | None:
        """Also shortens long strings, unless the newest result is to stay whole."""
        preview = super().preview(window_tokens, has_recall)
        is_wanted = has_recall or "tool_output" in self.model_fields_set
        output = self.tool_output if is_wanted else None
        if output is None or output.preserve_last_tool_result:
            return preview
        preview = preview or Preview(with_handles=has_recall)
        return replace(preview, strings=output.truncation())

    def fullness(self, context: CompactionContext) -> float:
        """Tokens as a part of the threshold, or of where the reducers run before it."""
        early = self.compression_threshold or math.inf
        early_tokens = early * context.budgets.working_tokens
        return max(context.fullness, context.tokens / early_tokens)

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Runs the reducers when the threshold is reached."""
        if self.fullness(context) < 1:
            return None
        window_tokens = context.budgets.working_tokens
        limit = context.limit_tokens
        due_tokens = min(limit, context.budgets.threshold_tokens)
        target = min(int(self.target_token_ratio * window_tokens), due_tokens - 1)
        reduction = Reduction(context, target)
        enough = (target + due_tokens) // 2 if context.is_due else limit
        for relaxed in PASSES:
            reduction.relaxed = relaxed
            await self._run(reduction)
            if reduction.tokens <= enough:
                break
            enough = limit
        compaction, attempts = reduction.compaction, reduction.attempts
        hardly_less = 0.9 * context.measure(context.contents)
        is_requested = context.reason == "requested" and not attempts
        is_unanswered = is_requested and reduction.tokens > hardly_less
        if reduction.tokens > limit or is_unanswered:
            if compaction and attempts:
                compaction = context.squeeze(compaction)
                if context.fits(compaction):
                    return compaction.after(attempts)
            most = self.max_compaction_attempts
            if everything := await context.summarize_all(most, attempts):
                return everything
            return compaction.after(attempts) if compaction else None
        # Before the threshold, less than this is not worth a new prefix.
        gain = context.tokens - reduction.tokens
        if not (context.is_due or attempts) and gain < int(0.05 * window_tokens):
            return None
        return compaction.after(attempts) if compaction else None

    async def _run(self, reduction: Reduction) -> None:
        for reducer in (self.window, self.tool_output, self.summary, *self.reducers):
            result = await reducer.reduce(reduction) if reducer else None
            if result is _ENOUGH:
                return


class Reduction:
    """The state of one pipeline run; `attempts` counts the summaries paid for."""

    def __init__(self, context: CompactionContext, target_tokens: int) -> None:
        self.context = context
        self.target_tokens = target_tokens
        self.relaxed = Relaxed()
        self.compaction: Compaction | None = None
        self.attempts = 0
        self._draft = Draft.continue_from(context.view)

    @property
    def tokens(self) -> int:
        """The estimate of the request as it stands now."""
        return self.compaction.tokens if self.compaction else self.context.tokens

    @property
    def kept(self) -> list[int]:
        """Indexes of the history that stands in the request, oldest first."""
        return [i for i in self.context.view.history if i not in self._draft.covered]

    @property
    def protected(self) -> frozenset[int]:
        """What no reducer removes: the live request, open calls, unseen results."""
        view = self.context.view
        live = () if view.live_index is None else (view.live_index,)
        return view.pinned_calls | self.context.kept.unseen | frozenset(live)

    @property
    def truncation(self) -> tuple[Truncation, int] | None:
        """How tool results in the request are shortened, and up to which content."""
        draft = self._draft
        return (draft.truncation, draft.truncated_upto) if draft.truncation else None

    def measure_kept(self) -> dict[int, int]:
        """Heuristic tokens of what stands in the request, each content as it stands."""
        view = self.context.view
        stored = self.compaction.stored if self.compaction else view.stored
        shown = dict(enumerate(view.shown))
        if stored:
            shown |= shorten_results(view, stored)
        return {i: view.memo.estimate_tokens([shown[i]]) for i in self.kept}

    def expect_beside_summary(self, keep_count: int) -> int:
        """Estimates what would stand beside a summary and the newest contents."""
        covered = self.context.older_than(keep_count)
        beside = replace(self._draft, text="", covered=covered, model_covered=covered)
        return self.context.render(replace(beside, model_chars=0)).tokens

    def drop(self, indexes: Collection[int]) -> StrategyResult:
        """Takes contents, calls with results, out; a later summary still sees them."""
        draft = self._draft
        wanted = draft.covered | (frozenset(indexes) - self.protected)
        covered = keep_pairs_whole(wanted, self.context.view.pairs)
        if covered <= draft.covered:
            return StrategyResult.NO_CHANGE
        text = draft.text[: draft.model_chars]
        return self._apply(replace(draft, covered=covered, text=text))

    def truncate(self, truncation: Truncation, upto: int) -> StrategyResult:
        """Shortens every tool result up to and including content `upto`."""
        draft = replace(self._draft, truncation=truncation, truncated_upto=upto)
        return self._apply(draft)

    async def summarize(self, keep_count: int) -> StrategyResult:
        """Has all but the newest `keep_count` contents summarized."""
        covered = self.context.older_than(keep_count)
        if self.context.failures or not covered - self._draft.model_covered:
            return StrategyResult.NO_CHANGE
        compaction = await self.context.summarize(covered)
        self.attempts += 1
        stored, known = compaction.stored, self._draft.model_covered
        draft = replace(
            self._draft,
            text=stored.text,
            covered=compaction.covered,
            model_covered=known if stored.is_mechanical else compaction.covered,
            model_chars=stored.model_chars,
        )
        return self._apply(draft)

    def _apply(self, draft: Draft) -> StrategyResult:
        """Renders what was decided, and tells what it achieved."""
        before = self.tokens
        self._draft = draft
        self.compaction = self.context.render(draft)
        if self.tokens <= self.target_tokens:
            return StrategyResult.TARGET_REACHED
        is_less = self.tokens < before
        return StrategyResult.APPLIED if is_less else StrategyResult.NO_CHANGE

    def last_tool_result(self, before: int | None = None) -> int | None:
        """The index of the newest tool result in the request, older than `before`."""
        contents = self.context.view.contents
        indexes = (i for i in reversed(self.kept) if before is None or i < before)
        return next((i for i in indexes if has_function_response(contents[i])), None)

    def is_instruction(self, index: int) -> bool:
        """Tells whether a history content is an instruction, not a message."""
        content = self.context.view.contents[index]
        return content.role not in ("user", "model") and not has_tool(content)
