"""The message with a summary: composed from a draft, stored, and rendered.

Everything here is pure: equal arguments give equal bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from google.genai import types
from pydantic import JsonValue

from contextguard_adk import _sections, _shapes
from contextguard_adk._history.contents import (
    content_text,
    join_messages,
    media_parts,
    parts_of,
)
from contextguard_adk._history.fingerprints import cover, handle_of
from contextguard_adk._history.history import History
from contextguard_adk._history.moved_media import MediaMover
from contextguard_adk._history.stored import (
    MAX_SHRINK,
    MAX_SUMMARY_CHARS,
    Draft,
    StoredSummary,
)
from contextguard_adk._measuring.budgets import (
    TokenCounter,
    shorten,
    shorten_to_tokens,
)
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._support import phrases
from contextguard_adk._turn.facts import Outcome
from contextguard_adk._turn.turn import Turn

_CONTINUATION = (
    phrases.SYSTEM + "The conversation was compacted because {why}. "
    "The summary above contains all prior context. {request}Continue {where} without "
    "asking the user to repeat anything. If a newer message of the user follows below, "
    "that message is the current request{instead}.]"
)
_WHY = {"requested": "it was requested", "turns": "it had grown long"}
_SHRINK = ((1.0, 1.0), (1.0, 1.0), (0.5, 1.0), (0.25, 0.3), (0.25, 0.02))
"""For each step of `Draft.shrink`: the parts of summary and request that stay."""


def compose(turn: Turn, draft: Draft) -> Outcome:
    """Returns the request with a draft in place, and what would be stored."""
    stored = _build_stored(turn, draft)
    contents = shape(turn, render(turn, stored, draft.covered))
    tokens = turn.measure(contents)
    stored = stored.model_copy(update={"left_tokens": tokens})
    return Outcome(draft, stored, contents, tokens)


def squeeze(turn: Turn, draft: Draft) -> Outcome:
    """Composes a draft, ever shorter until it fits; the user's request goes last."""
    outcome = compose(turn, draft)
    while outcome.tokens > turn.limit_tokens and outcome.draft.shrink < MAX_SHRINK:
        outcome = compose(turn, replace(draft, shrink=outcome.draft.shrink + 1))
    return outcome


def summary_tokens(turn: Turn, covered: frozenset[int]) -> int:
    """Returns what a summary of these messages may take.

    The user's messages stand beside it, and make it shorter.
    """
    most_tokens = turn.summary_tokens
    said = covered.intersection(turn.history.user_messages)
    said -= {turn.history.request_index}
    if not turn.history.repeats(said):
        return most_tokens  # Only short excerpts of them stand there.

    told_tokens = turn.measure_alone([turn.history.contents[index] for index in said])
    spared_tokens = min(turn.user_tokens, told_tokens) // 2
    least_tokens = min(most_tokens, max(200, most_tokens // 3))
    return max(least_tokens, most_tokens - spared_tokens)


def expect_tokens(turn: Turn, covered: frozenset[int]) -> int:
    """Estimates the request with a full-length summary of these messages."""
    beside = compose(turn, Draft("", covered, covered, 0, turn.reason))
    return beside.tokens + turn.summary_tokens


def shape(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Gives contents the form in which they are sent."""
    shaped = contents
    for row in _shapes.SHAPES:
        if row.when(turn, shaped):
            shaped = row.apply(turn, shaped)
    return shaped


def _build_stored(turn: Turn, draft: Draft) -> StoredSummary:
    """Returns a summary with the values of all sections beside it."""
    history = turn.history
    redact = history.redactor.text
    request = history.request_index
    text, request_chars = _shrink(turn, draft.text, draft.shrink)
    model_text = redact(text[: draft.model_chars])
    other_text = redact(text[draft.model_chars :])
    summarized = itertools.takewhile(
        draft.model_covered.__contains__, sorted(draft.covered)
    )

    prints = [
        history.fingerprint(index) if index in draft.covered else b""
        for index in history.indexes
    ]

    stored = StoredSummary(
        text=_storable(model_text + other_text),
        covered=cover(prints),
        scope=turn.scope,
        invocation=history.invocation_id,
        last_event=history.last_event(draft.covered),
        reason=draft.reason,
        request="" if request is None else history.fingerprint(request).hex(),
        request_chars=request_chars,
        has_continuation=request is None or request in draft.covered,
        model_chars=len(model_text),
        model_covered_count=len(list(summarized)),
        truncation=draft.truncation,
        truncated_upto=history.name_content(draft.truncated_upto),
        has_recall=turn.has_recall,
        has_older=history.stored is not None and history.is_partial,
        edits=turn.record.edits,
    )
    return _add_sections(turn, draft, stored)


def _add_sections(turn: Turn, draft: Draft, bare: StoredSummary) -> StoredSummary:
    """Has each section write its value, as long as the record has room."""
    history = turn.history
    known = history.stored.beside if history.stored else {}
    sections = _sections.SECTIONS
    uncounted = {section.name for section in sections if section.has_own_room}
    stored = bare
    room_bytes = stored.room_bytes(uncounted)

    for section in sections:
        if section.goes_at is not None and draft.shrink >= section.goes_at:
            continue
        name = section.name
        value = section.write(turn, draft.covered, known.get(name), room_bytes // 4)
        if not value:
            continue

        if isinstance(value, str):
            value = history.redactor.text(value)
        beside = {**stored.beside, name: _storable(value)}
        wider = stored.model_copy(update={"beside": beside})
        left_bytes = wider.room_bytes(uncounted)
        if left_bytes:  # Escapes may take more than was counted.
            stored = wider
            room_bytes = left_bytes
    return stored


def _shrink(turn: Turn, text: str, step: int) -> tuple[str, int]:
    """Returns a summary and how much of the request to quote, for a step."""
    summary_ratio, request_ratio = _SHRINK[step]
    summary_tokens = summary_ratio * turn.count(text)
    summary = shorten_to_tokens(text, summary_tokens, turn.count)
    summary = shorten(summary, MAX_SUMMARY_CHARS)
    if request_ratio == 1:
        return summary, turn.quoted_chars

    quoted_chars = turn.quoted_chars
    if quoted_chars < 0:
        quoted_chars = len(turn.request_text)
    # Cutting further would save nothing but the point of the request.
    return summary, max(240, int(quoted_chars * request_ratio))


def shorten_stored(turn: Turn, stored: StoredSummary | None) -> Iterator[StoredSummary]:
    """Yields a summary ever shorter; at last only sections that need no summary."""
    alone: dict[str, JsonValue] = {}
    for section in _sections.SECTIONS:
        text = section.brief(turn) if section.stands_alone else ""
        if text:
            alone[section.name] = _storable(text)

    for shrink in range(MAX_SHRINK + 1):
        if stored is not None:
            text, request_chars = _shrink(turn, stored.text, shrink)
            update = {
                "text": text,
                "request_chars": request_chars,
                "beside": _keep_sections(stored, shrink) | alone,
            }
            yield stored.model_copy(update=update)

    if alone:
        yield StoredSummary(beside=alone, has_continuation=False)


def _keep_sections(stored: StoredSummary, shrink: int) -> dict[str, JsonValue]:
    """Returns the stored values that still stand at a step of `Draft.shrink`."""
    sections = {section.name: section for section in _sections.SECTIONS}
    kept = {}
    for name, value in stored.beside.items():
        section = sections.get(name)
        if section is None or section.is_told_anew:
            continue
        if section.goes_at is None or shrink < section.goes_at:
            kept[name] = value
    return kept


def tell_left_out(
    contents: Sequence[types.Content],
    indexes: Iterable[int],
    max_tokens: int,
    count: TokenCounter,
    memo: Memo,
) -> str:
    """Returns what sections tell of messages that are left out without a summary.

    Arguments are as for `Section.tell_left_out`.
    """
    left_out = [*indexes]
    texts = []
    for section in _sections.SECTIONS:
        text = section.tell_left_out(contents, left_out, max_tokens, count, memo)
        if text:
            texts.append(text)
            max_tokens -= count(text)
    return "\n\n".join(texts)


def without_recall(stored: StoredSummary) -> StoredSummary:
    """Returns a summary that names no recall tool, for requests without one."""
    naming = {section.name for section in _sections.SECTIONS if section.needs_recall}
    beside = {name: kept for name, kept in stored.beside.items() if name not in naming}
    return stored.model_copy(update={"beside": beside, "has_recall": False})


def shows_tool_use(stored: StoredSummary) -> bool:
    """Returns whether a summary replaces tool calls, as far as sections tell."""
    return any(
        section.shows_tool_use and stored.beside.get(section.name)
        for section in _sections.SECTIONS
    )


def _storable(value: Any) -> Any:
    """Replaces characters that databases refuse; no text becomes longer or shorter."""
    if isinstance(value, list):
        return [_storable(item) for item in value]
    if isinstance(value, dict):
        return {_storable(name): _storable(item) for name, item in value.items()}
    if not isinstance(value, str):
        return value
    return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def render(
    turn: Turn, stored: StoredSummary, covered: Collection[int]
) -> list[types.Content]:
    """Returns a request's contents with a summary in place of what it covers."""
    history = turn.history
    contents = list(history.shown)
    for index, content in history.shortened_results(stored).items():
        contents[index] = content
    if not covered and not stored.text:
        return contents

    head = [render_head(history, stored, covered, turn.media_mover)]
    first = min(covered, default=min(history.indexes, default=0))
    before = [contents[i] for i in range(first) if i not in covered]
    after = [contents[i] for i in range(first, len(contents)) if i not in covered]
    return [*before, *join_messages(head, after)]


def render_head(
    history: History,
    stored: StoredSummary,
    covered: Collection[int],
    mover: MediaMover | None = None,
) -> types.Content:
    """Returns the message with the summary and, if it has one, the continuation.

    The continuation quotes the current request, and asks to go on. Without a mover the
    files of that request stay as they came.
    """
    texts = [phrases.quote_stored(stored.text) or phrases.NO_SUMMARY]
    for section in _sections.SECTIONS:
        text = section.render(stored.beside.get(section.name), history, covered)
        if text:
            texts.append(text)

    body = "\n\n".join(texts)
    summary = f"{phrases.SUMMARY_BEGIN}\n{body}\n{phrases.SUMMARY_END}"
    parts = [types.Part(text=summary)]
    if stored.has_continuation:
        parts += _continue(history, stored, covered, mover)
    return types.Content(role="user", parts=parts)


def find_quoted(
    history: History, stored: StoredSummary, covered: Collection[int]
) -> int | None:
    """Returns the index of the covered request that the continuation quotes."""
    same = (i for i in covered if history.fingerprint(i).hex() == stored.request)
    return max(same, default=None)


def _continue(
    history: History,
    stored: StoredSummary,
    covered: Collection[int],
    mover: MediaMover | None,
) -> Iterator[types.Part]:
    """Yields the request to carry on, and the images and files of the message."""
    index = find_quoted(history, stored, covered)
    request = None if index is None else history.contents[index]
    quoted = phrases.quote(content_text(request))
    if stored.request_chars >= 0:
        # The handle is that of the part that loses most.
        texts = [part for part in parts_of(request) if part.text]
        longest = max(texts, key=lambda part: len(part.text or ""), default=None)
        handle = handle_of(longest) if longest and stored.has_recall else ""
        quoted = shorten(quoted, stored.request_chars, handle)

    text = _CONTINUATION.format(
        why=_WHY.get(stored.reason, "it exceeded the context window"),
        request=f"The user's current request is: `{quoted}`. " if quoted else "",
        where="working on this request" if quoted else "where it leaves off",
        instead=" instead" if quoted else "",
    )
    files = media_parts(request)
    moved: list[str] = []
    if mover is not None:
        files, moved = mover.split(files, is_users=True)
    yield types.Part(text="\n".join([text, *moved]))
    yield from files
