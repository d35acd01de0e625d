"""Puts together what a compaction would store, whole or shortened until it fits."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from google.genai import types

from contextguard_adk._history.pairs import content_text
from contextguard_adk._history.rendering import find_fingerprint
from contextguard_adk._history.stored import MAX_RECORD_BYTES, StoredSummary
from contextguard_adk._measuring.budgets import shorten_to_tokens
from contextguard_adk._measuring.calibration import DEFAULT_CORRECTION, token_counter
from contextguard_adk._measuring.tokens import text_bytes
from contextguard_adk._summarizing.items import (
    INDEX_GAP,
    INDEX_HEADING,
    list_items,
    write_index,
)
from contextguard_adk._summarizing.ledger import extend_ledger
from contextguard_adk._summarizing.running_turn import DONE_RATIO, write_done_list
from contextguard_adk.telemetry import CompactionRecord

if TYPE_CHECKING:
    from contextguard_adk._history.truncation import Truncation
    from contextguard_adk._history.view import HistoryView
    from contextguard_adk._summarizing.context import CompactionContext

SQUEEZE_STEPS = ((1.0, 1.0), (0.5, 1.0), (0.25, 0.3), (0.25, 0.02))
"""What is kept, step by step, of the summary and of the live request. The index of
items goes at once, which the recall tool lists as well; then ledger and todo list. The
list of what is done stays."""


@dataclass(frozen=True)
class Draft:
    """What a compaction has decided; a model wrote `model_chars` of the text."""

    text: str
    covered: frozenset[int]
    model_covered: frozenset[int]
    model_chars: int
    truncation: Truncation | None = None
    truncated_upto: int = -1

    @classmethod
    def continue_from(cls, view: HistoryView) -> Draft:
        """What is decided already, as far as it still concerns the request."""
        stored = view.stored
        if stored is None:
            return cls("", view.covered, view.model_covered, 0)
        known = stored.text, view.covered, view.model_covered, stored.model_chars
        draft = cls(*known)
        upto = find_fingerprint(view, stored.truncated_upto)
        if stored.truncation and upto >= 0 and upto not in view.covered:
            return replace(draft, truncation=stored.truncation, truncated_upto=upto)
        return draft


@dataclass(frozen=True)
class Compaction:
    """A summary that could stand in the place of history.

    Attributes:
        stored: The summary, as it would be kept in session state.
        covered: Indexes of the contents that it stands for.
        contents: The request's contents with it.
        tokens: The estimate of that request.
        attempts: How many summaries it took, mechanical ones included.
    """

    stored: StoredSummary
    covered: frozenset[int]
    contents: list[types.Content]
    tokens: int
    attempts: int = 1

    @property
    def reason(self) -> str:
        """Why the history was compacted."""
        return self.stored.reason

    def after(self, attempts: int) -> Compaction:
        """The same compaction, with the number of summaries that it took."""
        return replace(self, attempts=attempts)

    def describe(
        self, context: CompactionContext, session_id: str, started_seconds: float
    ) -> CompactionRecord:
        """Describes what began at `started_seconds` and has just ended."""
        scale = context.tokens / max(1, context.measure(context.contents))
        return CompactionRecord(
            agent=context.agent,
            session_id=session_id,
            strategy=type(context.summarizer.settings).__name__,
            reason=self.stored.reason,
            tokens_before=context.tokens,
            tokens_after=int(self.tokens * scale),
            contents_before=len(context.contents),
            contents_after=len(self.contents),
            summary_tokens=text_bytes(self.stored.text) // 4,
            duration_seconds=time.monotonic() - started_seconds,
            attempts=self.attempts,
            is_mechanical=self.stored.is_mechanical,
            model=context.summarizer.model_name,
            usage=context.summarizer.usage,
            cost=context.summarizer.cost,
        )


class Composer:
    """Composes what compactions of one history would store."""

    def __init__(self, context: CompactionContext) -> None:
        self._view = context.view
        self._scope = context.scope
        self._reason = context.reason
        self._todo_list = context.todos
        self._has_recall = context.has_recall
        self._window_tokens = context.budgets.window_tokens
        self._working_tokens = context.budgets.working_tokens
        self._summary_tokens = context.budgets.summary_tokens
        self._factor = context.correction or DEFAULT_CORRECTION
        self._count = token_counter(self._factor)

    def compose(self, draft: Draft) -> StoredSummary:
        """Puts a summary together with what the guard keeps beside it."""
        live = self._view.live_index  # The continuation quotes it.
        request = b"" if live is None else self._view.fingerprint(live)
        covered = sorted(draft.covered)
        summarized = itertools.takewhile(draft.model_covered.__contains__, covered)
        stored = StoredSummary(
            text=_storable(draft.text),
            covered=self._view.cover(draft.covered),
            ledger=self._ledger(draft.covered),
            scope=self._scope,
            invocation=self._view.invocation_id,
            reason=self._reason,
            request=request.hex(),
            request_chars=self._quoted_chars,
            has_continuation=live is None or live in draft.covered,
            model_chars=draft.model_chars,
            model_covered_count=len(list(summarized)),
            truncation=draft.truncation,
            truncated_upto=self._view.name_place(draft.truncated_upto),
            has_recall=self._has_recall,
        )
        budget = min(2_500, self._summary_tokens // 2, _room_tokens(stored) // 2)
        todos = _storable(self._todo_list.render(budget, self._count))
        stored = stored.model_copy(update={"todos": todos})
        for field, write in (("done", self._done), ("index", self._index)):
            text = write(draft.covered, _room_tokens(stored))
            stored = stored.model_copy(update={field: text})
        # Escapes may take several times what was counted.
        for field in ("index", "todos", "ledger", "done"):
            if len(stored.model_dump_json().encode()) > MAX_RECORD_BYTES - 200:
                empty = () if field == "ledger" else ""
                stored = stored.model_copy(update={field: empty})
        return stored

    def shorten(self, whole: StoredSummary) -> Iterator[StoredSummary]:
        """Yields ever shorter versions; the user's request is touched last."""
        tokens = self._count(whole.text)
        quoted = whole.request_chars
        whole_chars = quoted if quoted >= 0 else len(self.live_text)
        for summary_ratio, request_ratio in SQUEEZE_STEPS:
            text = shorten_to_tokens(whole.text, summary_ratio * tokens, self._count)
            update: dict[str, object] = {
                "text": text,
                "model_chars": min(whole.model_chars, len(text)),
                "index": "",
            }
            if summary_ratio < 1:
                update |= {"ledger": (), "todos": ""}
            if request_ratio < 1:
                # Cutting further would save nothing but what the request says.
                update["request_chars"] = max(240, int(whole_chars * request_ratio))
            yield whole.model_copy(update=update)

    @cached_property
    def live_text(self) -> str:
        """What the user wants now; "" where that is unknown."""
        live = self._view.live_index
        return "" if live is None else content_text(self._view.contents[live])

    @property
    def is_request_whole(self) -> bool:
        """Whether a continuation quotes all of the user's request."""
        return self._quoted_chars < 0

    def _ledger(self, covered: Collection[int]) -> tuple[str, ...]:
        """The user's covered messages; those of the stored summary come first."""
        view = self._view
        known = view.stored.ledger if view.stored else ()
        new_indexes = set(covered).intersection(view.user_messages) - view.covered
        new = [content_text(view.contents[index]) for index in sorted(new_indexes)]
        factor = max(1.0, self._factor)
        return tuple(extend_ledger(known, new, int(self._summary_tokens * 4 / factor)))

    def _done(self, covered: Collection[int], room_tokens: int) -> str:
        """The list of the running turn's covered calls."""
        steps = sorted(set(covered).intersection(self._view.turn))
        budget = int(self._working_tokens * DONE_RATIO)

        def count(text: str) -> int:
            # Escapes take more room in session state than here.
            stored_bytes = len(json.dumps(_storable(text), ensure_ascii=False).encode())
            is_storable = stored_bytes <= 4 * room_tokens
            return self._count(text) if is_storable else sys.maxsize

        contents, has_recall = self._view.contents, self._has_recall
        done = write_done_list(contents, steps, budget, count, has_recall)
        return _storable(done)

    def _index(self, covered: Collection[int], room_tokens: int) -> str:
        """The index of covered items; that of the stored summary comes last."""
        if not self._has_recall:
            return ""
        view = self._view
        known = view.stored.index if view.stored else ""
        if view.covered and not known:  # It was cut off, or never written.
            known = f"{INDEX_HEADING}\n{INDEX_GAP}"
        whole = () if self._quoted_chars >= 0 else (view.live_index,)
        new = sorted(i for i in covered if i not in view.covered and i not in whole)
        budget = min(1_500, self._summary_tokens // 4, room_tokens)
        items = list_items(view.contents, new, view.outputs)
        return _storable(write_index(items, known, budget, self._count))

    @cached_property
    def _quoted_chars(self) -> int:
        """How many characters of the live request to quote; -1 for all."""
        most = int(self._window_tokens * 0.30)
        if self._count(self.live_text) <= most:
            return -1
        return len(shorten_to_tokens(self.live_text, most, self._count))


def _storable(text: str) -> str:
    """Replaces what databases refuse or cut at; the length stays the same."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _room_tokens(stored: StoredSummary) -> int:
    taken = len(stored.model_dump_json().encode()) + 200
    return max(0, MAX_RECORD_BYTES - taken) // 4
