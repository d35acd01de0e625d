"""Puts together what a compaction would store, whole or shortened until it fits."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from google.genai import types

from contextguard_adk.history.coverage import fingerprint
from contextguard_adk.history.pairs import content_text
from contextguard_adk.history.stored_summary import MAX_RECORD_BYTES, StoredSummary
from contextguard_adk.measuring.calibration import DEFAULT_CORRECTION, token_counter
from contextguard_adk.measuring.shortening import TokenCounter, shorten_to_tokens
from contextguard_adk.summarizing.items import (
    INDEX_GAP,
    INDEX_HEADING,
    list_items,
    write_index,
)
from contextguard_adk.summarizing.ledger import extend_ledger

if TYPE_CHECKING:
    from contextguard_adk.history.truncation import Truncation
    from contextguard_adk.history.view import HistoryView
    from contextguard_adk.summarizing.todos import TodoList

LIVE_REQUEST_WINDOW_RATIO = 0.30
"""The live request is quoted whole while it takes at most this much of the window."""

MIN_QUOTED_CHARS = 240
"""Cutting the live request further would save nothing but what it says."""

INDEX_RATIO = 0.25
MAX_INDEX_TOKENS = 1_500
"""What the index of items may take, of a summary's budget and at most."""

MAX_TODOS_RATIO = 0.5
MAX_TODOS_TOKENS = 1_000
"""What the todo list may take, of a summary's budget and at most."""

SQUEEZE_STEPS = (
    (1.0, 1.0, True),
    (0.5, 1.0, False),
    (0.25, 0.3, False),
    (0.25, 0.02, False),
)
"""What is kept, step by step, where a compacted request is still too large: of the
summary, of the live request, and whether ledger and todo list stay. The index of items
goes at once: the recall tool lists them as well."""


@dataclass(frozen=True)
class Draft:
    """What a compaction has decided.

    Attributes:
        text: The summary.
        covered: Indexes of the contents that it stands for.
        model_covered: Those of them that a model has summarized.
        model_chars: Length of the leading part of the text that a model wrote.
        truncation: How tool results are shortened; None for not at all.
        truncated_upto: The index of the newest content that is shortened.
    """

    text: str
    covered: frozenset[int]
    model_covered: frozenset[int]
    model_chars: int
    truncation: Truncation | None = None
    truncated_upto: int = -1


@dataclass(frozen=True)
class Composer:
    """Composes stored summaries of one history.

    Attributes:
        view: The history.
        window_tokens: The agent's context window.
        summary_tokens: The budget of a summary, which bounds what is kept beside it.
        correction: Real tokens per heuristic token; None while unknown.
        scope: Where the summary is valid.
        todos: The agent's todo list.
        has_recall: Whether the agent can read back what is left out.
    """

    view: HistoryView
    window_tokens: int
    summary_tokens: int
    correction: float | None
    scope: str
    todos: TodoList
    has_recall: bool

    def compose(self, draft: Draft) -> StoredSummary:
        """Puts a summary together with what the guard keeps beside it."""
        request, has_continuation = self._quoted_request(draft.covered)
        upto = draft.truncated_upto
        stored = StoredSummary(
            text=_storable(draft.text),
            covered=self.view.cover(draft.covered),
            ledger=self._ledger(draft.covered),
            todos=self._todos,
            scope=self.scope,
            invocation=self.view.invocation_id,
            request=fingerprint(request).hex() if request is not None else "",
            request_chars=self._quoted_chars,
            has_continuation=has_continuation,
            model_chars=draft.model_chars,
            model_covered_count=_leading_count(draft.covered, draft.model_covered),
            truncation=draft.truncation,
            truncated_upto=self.view.name_place(upto) if draft.truncation else "",
            has_recall=self.has_recall,
        )
        taken = len(stored.model_dump_json().encode()) + 200
        room_tokens = max(0, MAX_RECORD_BYTES - taken) // 4
        index = self._index(draft.covered, room_tokens)
        return stored.model_copy(update={"index": index})

    def shorten(self, whole: StoredSummary) -> Iterator[StoredSummary]:
        """Yields ever shorter versions; the user's request is touched last."""
        tokens = self._count(whole.text)
        whole_chars = whole.request_chars
        if whole_chars < 0:
            whole_chars = len(self.live_text)
        for summary_ratio, request_ratio, keeps_more in SQUEEZE_STEPS:
            text = shorten_to_tokens(whole.text, summary_ratio * tokens, self._count)
            update: dict[str, object] = {
                "text": text,
                "model_chars": min(whole.model_chars, len(text)),
                "index": "",
            }
            if not keeps_more:
                update |= {"ledger": (), "todos": ""}
            if request_ratio < 1:
                chars = max(MIN_QUOTED_CHARS, int(whole_chars * request_ratio))
                update["request_chars"] = chars
            yield whole.model_copy(update=update)

    @cached_property
    def live_text(self) -> str:
        """What the user wants now; "" where that is unknown."""
        live = self.view.live_index
        if live is not None:
            return content_text(self.view.contents[live])
        return "" if self._may_stand_changed else content_text(self.view.user_content)

    def _ledger(self, covered: Collection[int]) -> tuple[str, ...]:
        """The user's covered messages; those of the stored summary come first."""
        view = self.view
        known = view.stored.ledger if view.stored else ()
        new = [
            content_text(view.contents[index])
            for index in view.user_messages
            if index in covered and index not in view.covered
        ]
        factor = max(1.0, self.correction or DEFAULT_CORRECTION)
        return tuple(extend_ledger(known, new, int(self.summary_tokens * 4 / factor)))

    @cached_property
    def _todos(self) -> str:
        """The todo list as it stands now."""
        budget = min(MAX_TODOS_TOKENS, int(self.summary_tokens * MAX_TODOS_RATIO))
        return _storable(self.todos.render(budget, self._count))

    def _index(self, covered: Collection[int], room_tokens: int) -> str:
        """The index of covered items; that of the stored summary comes last."""
        if not self.has_recall:
            return ""
        view = self.view
        known = view.stored.index if view.stored else ""
        if view.covered and not known:  # It was cut off, or never written.
            known = f"{INDEX_HEADING}\n{INDEX_GAP}"
        whole = () if self._quoted_chars >= 0 else (view.live_index,)
        new = sorted(i for i in covered if i not in view.covered and i not in whole)
        budget = min(
            MAX_INDEX_TOKENS, int(self.summary_tokens * INDEX_RATIO), room_tokens
        )
        items = list_items(view.contents, new)
        return _storable(write_index(items, known, budget, self._count))

    @cached_property
    def _count(self) -> TokenCounter:
        return token_counter(self.correction or DEFAULT_CORRECTION)

    def _quoted_request(
        self, covered: Collection[int]
    ) -> tuple[types.Content | None, bool]:
        """The message that the continuation quotes, and whether there is one."""
        live = self.view.live_index
        if live is not None:
            return self.view.contents[live], live in covered
        user_content = self.view.user_content
        if content_text(user_content) and not self._may_stand_changed:
            return user_content, True
        return None, True

    @cached_property
    def _may_stand_changed(self) -> bool:
        """Whether the live request may stand in the request in other words.

        A plugin that masks secrets changes the user's text; the original must then
        not come back through the continuation.
        """
        view = self.view
        history = set(view.history)
        foreign = (c for i, c in enumerate(view.contents) if i not in history)
        return any(
            content.role == "user" and content_text(content) for content in foreign
        )

    @cached_property
    def _quoted_chars(self) -> int:
        """How many characters of the live request to quote; -1 for all."""
        most = int(self.window_tokens * LIVE_REQUEST_WINDOW_RATIO)
        if self._count(self.live_text) <= most:
            return -1
        return len(shorten_to_tokens(self.live_text, most, self._count))


def _storable(text: str) -> str:
    """Replaces what databases refuse or cut at; the length stays the same."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _leading_count(covered: Collection[int], model_covered: Collection[int]) -> int:
    """How many covered contents, from the oldest on, a model has summarized."""
    count = 0
    for index in sorted(covered):
        if index not in model_covered:
            break
        count += 1
    return count
