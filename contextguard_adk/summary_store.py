"""Keeps one agent's summary in session state, and a paid one until it is there."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from contextguard_adk.history.coverage import decode_covered, encode_covered
from contextguard_adk.history.state import GuardState
from contextguard_adk.history.stored_summary import StoredSummary, SummaryMark
from contextguard_adk.history.view import HistoryView
from contextguard_adk.memory import Memory, SessionKey

logger = logging.getLogger("contextguard_adk.summary_store")


class SummaryStore:
    """Reads and writes the stored summary of one agent in one scope.

    Args:
        state: The agent's values in session state.
        memory: What the plugin remembers in process.
        key: Session, agent and scope.
    """

    def __init__(self, state: GuardState, memory: Memory, key: SessionKey) -> None:
        self._state = state
        self._memory = memory
        self._key = key

    def load(
        self, make_view: Callable[[StoredSummary], HistoryView]
    ) -> StoredSummary | None:
        """Reads the stored summary, where it was made for this very history.

        Args:
            make_view: Gives the current history, to see whether a summary whose
                state was lost still stands for it.
        """
        self._restore_unsaved(make_view)
        state = self._state
        mark = state.read_mark()
        text, covered = state.read_text("summary"), state.read_text("covered")
        _, agent, scope = self._key
        if mark is None or mark.scope != scope or not covered:
            return None
        if not isinstance(state.read("summary"), str):
            return None  # "" says that messages were dropped; this is lost or broken.
        try:
            fingerprints = decode_covered(covered)
        except ValueError as error:
            logger.warning("The summary of agent %r is ignored: %s.", agent, error)
            return None
        ledger = load_ledger(state.read_text("ledger"))
        text, todos, index = _split_text(text, mark)
        return StoredSummary(text, tuple(ledger), fingerprints, mark, todos, index)

    def save(self, stored: StoredSummary, tokens: int) -> None:
        """Stores a summary and starts the calibration anew.

        Args:
            stored: The summary.
            tokens: The estimate of the request before the compaction.
        """
        todos, index = _appended(stored.todos), _appended(stored.index)
        values: dict[str, str | int | None] = {
            "summary": stored.text + todos + index,
            "ledger": dump_ledger(stored.ledger),
            "covered": encode_covered(stored.covered),
            "mark": replace(
                stored.mark,
                todos_chars=len(todos),
                index_chars=len(index),
            ).to_json(),
            "summarized_at": tokens,
            "real_tokens": None,
            "last_heuristic": None,
        }
        self._write(values, self._state.read_text("mark"))

    def _write(self, values: dict[str, str | int | None], replaced_mark: str) -> None:
        for name, value in values.items():
            self._state.write(name, value)
        self._memory.unsaved.put(self._key, (replaced_mark, values))

    def _restore_unsaved(
        self, make_view: Callable[[StoredSummary], HistoryView]
    ) -> None:
        """Writes a paid summary again whose state was lost with a failed call."""
        unsaved = self._memory.unsaved.pop(self._key)
        if unsaved is None:
            return
        replaced_mark, values = unsaved
        if self._state.read_text("mark") != replaced_mark:
            return  # It was saved, or another process has saved a newer one since.
        covered = decode_covered(str(values["covered"]))
        mark = SummaryMark.from_json(str(values["mark"]))
        view = make_view(StoredSummary("", (), covered, mark))
        is_whole = len(view.covered) == covered.content_count
        if not is_whole or view.was_rewound_since(mark.invocation):
            return  # The summary knows too much: it was shown the request as well.
        self._write(values, replaced_mark)


_GAP = "\n\n"


def _appended(text: str) -> str:
    return f"{_GAP}{text}" if text else ""


def _split_text(stored: str, mark: SummaryMark) -> tuple[str, str, str]:
    """Splits what is stored as one text: the summary, the todo list, the index."""
    index_at = len(stored) - max(0, mark.index_chars)
    todos_at = index_at - max(0, mark.todos_chars)
    if todos_at < 0:
        return stored, "", ""  # The mark belongs to another text.
    todos, index = stored[todos_at:index_at], stored[index_at:]
    return stored[:todos_at], todos.removeprefix(_GAP), index.removeprefix(_GAP)


def dump_ledger(excerpts: Sequence[str]) -> str:
    """Writes a ledger as one string for session state."""
    return json.dumps(list(excerpts), ensure_ascii=False)


def load_ledger(stored: str) -> list[str]:
    """Reads what `dump_ledger` wrote; anything else is an empty ledger."""
    try:
        values = json.loads(stored) if stored else []
    except (ValueError, RecursionError):
        return []
    if not isinstance(values, list):
        return []
    return [value for value in values if isinstance(value, str)]
