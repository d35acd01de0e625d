"""The message with a summary: composed from a draft, stored, and rendered.

Everything here is pure: equal arguments give equal bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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


class _Stays(NamedTuple):
    """The parts of summary and quoted request that stay at one step of shortening."""

    summary_ratio: float
    request_ratio: float


_STAYS = (
    _Stays(summary_ratio=1.0, request_ratio=1.0),
    _Stays(summary_ratio=1.0, request_ratio=1.0),  # Only sections are left out.
    _Stays(summary_ratio=0.5, request_ratio=1.0),
    _Stays(summary_ratio=0.25, request_ratio=0.3),
    _Stays(summary_ratio=0.25, request_ratio=0.02),
)
"""A row for each step of `Draft.shrink`."""

LEAST_REQUEST_CHARS = 240
"""A shorter quote would hardly save tokens, and would lose the point of the request."""

LEAST_SUMMARY_TOKENS = 200
"""The user's messages beside a summary do not make its budget smaller than this."""


class _Shrunk(NamedTuple):
    """A shortened summary, and the length of the quoted request.

    Attributes:
        text: The summary.
        request_chars: How many characters of the request are quoted; -1 for all.
    """

    text: str
    request_chars: int


def compose(turn: Turn, draft: Draft) -> Outcome:
    """Returns the request with a draft in place, and what would be stored."""
    stored = _build_stored(turn, draft)
    contents = shape(turn, render(turn, stored, draft.covered))
    tokens = turn.measure(contents)
    stored = stored.model_copy(update={"left_tokens": tokens})
    return Outcome(draft, stored, contents, tokens)


def squeeze(turn: Turn, draft: Draft) -> Outcome:
    """Composes a draft, at ever later steps of `Draft.shrink` until the request fits.

    Where no step fits, the last one is returned. The quote of the user's request is
    shortened last.
    """
    outcome = compose(turn, draft)
    while outcome.tokens > turn.limit_tokens and outcome.draft.shrink < MAX_SHRINK:
        outcome = compose(turn, replace(draft, shrink=outcome.draft.shrink + 1))
    return outcome


def summary_tokens(turn: Turn, covered: frozenset[int]) -> int:
    """Returns how many tokens a summary of the covered messages may take.

    - If only short excerpts of the user's messages stand beside the summary, it may
      have its usual length.
    - If the messages stand there word for word, the summary need not repeat them. It is
      shorter by half of their size, down to a third of its usual length.
    """
    history = turn.history
    usual_tokens = turn.summary_tokens
    user_indexes = covered.intersection(history.user_messages)
    user_indexes -= {history.request_index}
    if not history.repeats(user_indexes):
        return usual_tokens

    user_contents = [history.contents[index] for index in user_indexes]
    shown_tokens = min(turn.user_tokens, turn.measure_alone(user_contents))
    wanted_tokens = usual_tokens - shown_tokens // 2
    least_tokens = max(LEAST_SUMMARY_TOKENS, usual_tokens // 3)
    # The usual length itself may be less than the least one.
    return min(usual_tokens, max(least_tokens, wanted_tokens))


def expect_tokens(turn: Turn, covered: frozenset[int]) -> int:
    """Estimates the request with a full-length summary of these messages."""
    draft = Draft(text="", covered=covered, model_covered=covered, reason=turn.reason)
    return compose(turn, draft).tokens + turn.summary_tokens


def shape(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Returns contents in the form in which the provider wants them."""
    shaped = contents
    for row in _shapes.SHAPES:
        if row.when(turn, shaped):
            shaped = row.apply(turn, shaped)
    return shaped


def _build_stored(turn: Turn, draft: Draft) -> StoredSummary:
    """Returns a summary with the values of all sections beside it."""
    history = turn.history
    redact = history.redactor.redact_text
    shrunk = _shrink(turn, draft.text, draft.shrink)

    # The text of a model comes first, and excerpts of later messages after it.
    model_text = redact(shrunk.text[: draft.model_chars])
    excerpts = redact(shrunk.text[draft.model_chars :])
    model_covered = list(
        itertools.takewhile(draft.model_covered.__contains__, sorted(draft.covered))
    )

    # Empty bytes stand for messages that the summary does not replace.
    fingerprints = [
        history.fingerprint(index) if index in draft.covered else b""
        for index in history.indexes
    ]

    request_index = history.request_index
    request_fingerprint = ""
    if request_index is not None:
        request_fingerprint = history.fingerprint(request_index).hex()
    stored = StoredSummary(
        text=_storable(model_text + excerpts),
        covered=cover(fingerprints),
        scope=turn.scope,
        invocation=history.invocation_id,
        last_event=history.last_event(draft.covered),
        reason=draft.reason,
        request=request_fingerprint,
        request_chars=shrunk.request_chars,
        has_continuation=request_index is None or request_index in draft.covered,
        model_chars=len(model_text),
        model_covered_count=len(model_covered),
        truncation=draft.truncation,
        truncated_upto=history.name_content(draft.truncated_upto),
        has_recall=turn.has_recall,
        has_older=history.stored is not None and history.is_partial,
        edits=turn.record.edits,
    )
    return _add_sections(turn, draft, stored)


def _add_sections(turn: Turn, draft: Draft, bare: StoredSummary) -> StoredSummary:
    """Returns a summary with the values of its sections.

    A section is left out if it has nothing to show, if the record has no room for it,
    or if the draft is shortened to the section's step `goes_at` or a later one.
    """
    history = turn.history
    known_values = history.stored.beside if history.stored else {}
    sections = _sections.SECTIONS
    uncounted = {section.name for section in sections if section.has_own_room}
    stored = bare
    room_bytes = stored.room_bytes(uncounted)

    for section in sections:
        if section.goes_at is not None and draft.shrink >= section.goes_at:
            continue
        name = section.name
        room_tokens = room_bytes // 4
        known = known_values.get(name)
        value = section.write(turn, draft.covered, known, room_tokens)
        if not value:
            continue

        redacted = (
            history.redactor.redact_text(value) if isinstance(value, str) else value
        )
        beside = {**stored.beside, name: _storable(redacted)}
        wider = stored.model_copy(update={"beside": beside})
        # A section keeps to its room as text. As JSON, escapes may take more: a wider
        # record without room left is not kept.
        left_bytes = wider.room_bytes(uncounted)
        if left_bytes:
            stored = wider
            room_bytes = left_bytes
    return stored


def _shrink(turn: Turn, text: str, step: int) -> _Shrunk:
    """Shortens a summary and the quote of the request to a step of `Draft.shrink`.

    A shortened quote has at least `LEAST_REQUEST_CHARS`.
    """
    stays = _STAYS[step]
    most_tokens = stays.summary_ratio * turn.count(text)
    fitting = shorten_to_tokens(text, most_tokens, turn.count)
    summary = shorten(fitting, MAX_SUMMARY_CHARS)
    if stays.request_ratio == 1:
        return _Shrunk(summary, turn.quoted_chars)

    # A negative number means that the whole request is quoted so far.
    is_quoted_whole = turn.quoted_chars < 0
    quoted_chars = len(turn.request_text) if is_quoted_whole else turn.quoted_chars
    request_chars = int(quoted_chars * stays.request_ratio)
    return _Shrunk(summary, max(LEAST_REQUEST_CHARS, request_chars))


def shorten_stored(turn: Turn, stored: StoredSummary | None) -> Iterator[StoredSummary]:
    """Yields a summary ever shorter, at last only the sections that need no summary.

    Args:
        turn: The model call.
        stored: The summary. None for no summary: only these sections are yielded.
    """
    alone: dict[str, JsonValue] = {}
    for section in _sections.SECTIONS:
        brief = section.brief(turn) if section.stands_alone else ""
        if brief:
            alone[section.name] = _storable(brief)

    if stored is not None:
        for step in range(MAX_SHRINK + 1):
            shrunk = _shrink(turn, stored.text, step)
            update = {
                "text": shrunk.text,
                "request_chars": shrunk.request_chars,
                "beside": _keep_sections(stored, step) | alone,
            }
            yield stored.model_copy(update=update)

    if alone:
        yield StoredSummary(beside=alone, has_continuation=False)


def _keep_sections(stored: StoredSummary, step: int) -> dict[str, JsonValue]:
    """Returns the stored values of sections that stay at a step of `Draft.shrink`.

    A section with `is_told_anew` never stays: `tell_left_out` writes its text again.
    """
    sections = {section.name: section for section in _sections.SECTIONS}
    kept = {}
    for name, value in stored.beside.items():
        section = sections.get(name)
        if section is None or section.is_told_anew:
            continue
        if section.goes_at is None or step < section.goes_at:
            kept[name] = value
    return kept


def tell_left_out(
    contents: Sequence[types.Content],
    indexes: Iterable[int],
    max_tokens: int,
    count: TokenCounter,
    memo: Memo,
) -> str:
    """Returns the sections' texts on messages that are left out without a summary.

    Arguments are as for `Section.tell_left_out`; `max_tokens` is for all texts.
    """
    left_out = [*indexes]
    left_tokens = max_tokens
    texts = []
    for section in _sections.SECTIONS:
        text = section.tell_left_out(contents, left_out, left_tokens, count, memo)
        if text:
            texts.append(text)
            left_tokens -= count(text)
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
    """Returns a request's contents with a summary in place of the covered ones.

    Tool results are shortened as the summary's record says. If nothing is covered, and
    the summary has no text, this is the only change.
    """
    history = turn.history
    contents = list(history.shown)
    for index, content in history.shortened_results(stored).items():
        contents[index] = content
    if not covered and not stored.text:
        return contents

    # The summary takes the place of the first covered content. If nothing is covered,
    # it stands before the history.
    head = [render_head(history, stored, covered, turn.media_mover)]
    first_index = min(covered, default=min(history.indexes, default=0))
    before = contents[:first_index]
    after = [
        content
        for index, content in enumerate(contents)
        if index >= first_index and index not in covered
    ]
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
    """Returns the index of the covered request that the continuation quotes.

    If several covered messages equal the request, it is the newest of them. None if
    none does.
    """
    equal_indexes = [
        index for index in covered if history.fingerprint(index).hex() == stored.request
    ]
    return max(equal_indexes, default=None)


def _continue(
    history: History,
    stored: StoredSummary,
    covered: Collection[int],
    mover: MediaMover | None,
) -> Iterator[types.Part]:
    """Yields the text that asks to carry on, then the images and files of the request.

    The text quotes the current request if the summary replaces it.
    """
    index = find_quoted(history, stored, covered)
    request = None if index is None else history.contents[index]
    quoted = phrases.quote(content_text(request))
    if stored.request_chars >= 0:
        # Only one handle has room. It leads to the longest part, which loses most.
        text_parts = [part for part in parts_of(request) if part.text]
        longest = max(text_parts, key=lambda part: len(part.text or ""), default=None)
        handle = handle_of(longest) if longest and stored.has_recall else ""
        quoted = shorten(quoted, stored.request_chars, handle)

    text = _CONTINUATION.format(
        why=_WHY.get(stored.reason, "it exceeded the context window"),
        request=f"The user's current request is: `{quoted}`. " if quoted else "",
        where="working on this request" if quoted else "where it leaves off",
        instead=" instead" if quoted else "",
    )
    # A file that may not be moved is replaced by a line of text.
    files = media_parts(request)
    file_lines: list[str] = []
    if mover is not None:
        files, file_lines = mover.split(files, is_users=True)
    yield types.Part(text="\n".join([text, *file_lines]))
    yield from files
