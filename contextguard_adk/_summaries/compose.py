"""The message with a summary: composed from a draft, stored, and rendered.

The message has a summary, the texts of sections beside it, and usually a continuation:
the request to go on, which quotes the user's current request. If the message is too
long, it is shortened in the steps of `Draft.shrink`, from 0 to `MAX_SHRINK`.

Everything here is pure: equal arguments give equal bytes.
"""

from __future__ import annotations

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
"""The text of a continuation."""

_WHY = {"requested": "it was requested", "turns": "it had grown long"}
"""The words of a continuation for these values of `Reason`."""


class _ShrinkStep(NamedTuple):
    """The parts of the summary and of the quoted request that stay at one step."""

    summary_ratio: float
    request_ratio: float


_SHRINK_STEPS = (
    _ShrinkStep(summary_ratio=1.0, request_ratio=1.0),
    # This step leaves out only sections.
    _ShrinkStep(summary_ratio=1.0, request_ratio=1.0),
    _ShrinkStep(summary_ratio=0.5, request_ratio=1.0),
    _ShrinkStep(summary_ratio=0.25, request_ratio=0.3),
    _ShrinkStep(summary_ratio=0.25, request_ratio=0.02),
)
"""A row for each step of `Draft.shrink`."""

LEAST_REQUEST_CHARS = 240
"""A shorter quote would hardly save tokens, and would lose the point of the request."""

LEAST_REDUCED_TOKENS = 200
"""The user's messages beside a summary do not reduce its budget below this."""


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
    unmeasured = _build_stored(turn, draft)
    contents = shape(turn, render(turn, unmeasured, draft.covered))
    tokens = turn.measure(contents)
    stored = unmeasured.model_copy(update={"left_tokens": tokens})
    return Outcome(draft, stored, contents, tokens)


def squeeze(turn: Turn, draft: Draft) -> Outcome:
    """Composes a draft, at ever later steps of `Draft.shrink` until the request fits.

    If no step fits, the outcome of the last step is returned.
    """
    outcome = compose(turn, draft)
    while outcome.tokens > turn.limit_tokens and outcome.draft.shrink < MAX_SHRINK:
        outcome = compose(turn, replace(draft, shrink=outcome.draft.shrink + 1))
    return outcome


def summary_tokens(turn: Turn, covered: frozenset[int]) -> int:
    """Returns how many tokens a summary of the covered messages may take.

    The user's messages may stand beside the summary word for word, so that it need not
    repeat them. Then it is shorter by half of their size, down to a third of its usual
    length.
    """
    history = turn.history
    usual_tokens = turn.summary_tokens
    # The current request does not count: a continuation quotes it in any case.
    user_indexes = covered.intersection(history.user_messages)
    user_indexes -= {history.request_index}
    # Messages stand there only if later requests are sure to have them unchanged.
    if not history.repeats(user_indexes):
        return usual_tokens

    user_contents = [history.contents[index] for index in user_indexes]
    shown_tokens = min(turn.user_tokens, turn.measure_alone(user_contents))
    least_tokens = max(LEAST_REDUCED_TOKENS, usual_tokens // 3)
    reduced_tokens = max(least_tokens, usual_tokens - shown_tokens // 2)
    return min(usual_tokens, reduced_tokens)


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
    """Builds the record of a draft for session state, with the values of sections."""
    history = turn.history
    redact = history.redactor.redact_text
    shrunk = _shrink(turn, draft.text, draft.shrink)

    # A model wrote the beginning of the text, excerpts of later messages follow. Each
    # is redacted alone, so that the record can tell them apart by `model_chars`.
    model_text = redact(shrunk.text[: draft.model_chars])
    excerpts = redact(shrunk.text[draft.model_chars :])

    # The record tells only how many of the oldest contents a model has summarized.
    model_covered_count = 0
    for index in sorted(draft.covered):
        if index not in draft.model_covered:
            break
        model_covered_count += 1

    # Empty bytes stand for contents that the summary does not replace.
    fingerprints = [
        history.fingerprint(index) if index in draft.covered else b""
        for index in history.indexes
    ]

    request_index = history.request_index
    if request_index is None:
        # The agent does not see the user's request, and is only asked to go on.
        request_fingerprint = ""
        has_continuation = True
    else:
        # A request that is not covered stands after the summary anyway.
        request_fingerprint = history.fingerprint(request_index).hex()
        has_continuation = request_index in draft.covered
    stored = StoredSummary(
        text=_storable(model_text + excerpts),
        covered=cover(fingerprints),
        scope=turn.scope,
        invocation=history.invocation_id,
        last_event=history.last_event(draft.covered),
        reason=draft.reason,
        request=request_fingerprint,
        request_chars=shrunk.request_chars,
        has_continuation=has_continuation,
        model_chars=len(model_text),
        model_covered_count=model_covered_count,
        truncation=draft.truncation,
        truncated_upto=history.name_content(draft.truncated_upto),
        has_recall=turn.has_recall,
        has_older=history.stored is not None and history.is_partial,
        edits=turn.record.edits,
    )
    return _add_sections(turn, draft, stored)


def _add_sections(turn: Turn, draft: Draft, bare: StoredSummary) -> StoredSummary:
    """Returns the record of a summary with the values of its sections.

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
        is_left_out = section.goes_at is not None and draft.shrink >= section.goes_at
        if is_left_out:
            continue

        known = known_values.get(section.name)
        value = section.write(turn, draft.covered, known, room_bytes // 4)
        if not value:
            continue

        # Values of other types are made of contents that are redacted already.
        if isinstance(value, str):
            value = history.redactor.redact_text(value)
        beside = {**stored.beside, section.name: _storable(value)}
        longer = stored.model_copy(update={"beside": beside})
        # The text of a section has room, but as JSON it may be longer by its escapes.
        left_bytes = longer.room_bytes(uncounted)
        has_room = left_bytes > 0
        if has_room:
            stored = longer
            room_bytes = left_bytes
    return stored


def _shrink(turn: Turn, text: str, step: int) -> _Shrunk:
    """Shortens a summary and the quote of the request to a step of `Draft.shrink`.

    At the first steps the quote keeps its length. Later it is shortened, but not below
    `LEAST_REQUEST_CHARS`.
    """
    ratios = _SHRINK_STEPS[step]
    most_tokens = ratios.summary_ratio * turn.count(text)
    fitting = shorten_to_tokens(text, most_tokens, turn.count)
    summary = shorten(fitting, MAX_SUMMARY_CHARS)
    if ratios.request_ratio == 1:
        return _Shrunk(summary, turn.quoted_chars)

    # -1 stands for the whole request.
    is_quoted_whole = turn.quoted_chars < 0
    quoted_chars = len(turn.request_text) if is_quoted_whole else turn.quoted_chars
    request_chars = int(quoted_chars * ratios.request_ratio)
    return _Shrunk(summary, max(LEAST_REQUEST_CHARS, request_chars))


def shorten_stored(turn: Turn, stored: StoredSummary | None) -> Iterator[StoredSummary]:
    """Yields a summary at each step of `Draft.shrink`, and then one without a text.

    The last one has only the sections with `stands_alone`, if there are any. All others
    have these sections too.

    Args:
        turn: The model call.
        stored: The summary; None for no summary, so that only the last is yielded.
    """
    alone: dict[str, JsonValue] = {}
    for section in _sections.SECTIONS:
        if not section.stands_alone:
            continue
        brief = section.brief(turn)
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
        # Session state may hold values of another release's sections.
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

    The arguments are those of `Section.tell_left_out`. All texts together take at most
    `max_tokens`.
    """
    left_out_indexes = list(indexes)
    left_tokens = max_tokens
    texts: list[str] = []
    for section in _sections.SECTIONS:
        text = section.tell_left_out(
            contents, left_out_indexes, left_tokens, count, memo
        )
        if text:
            texts.append(text)
            left_tokens -= count(text)
    return "\n\n".join(texts)


def without_recall(stored: StoredSummary) -> StoredSummary:
    """Returns a summary that names no recall tool, for requests without one."""
    beside = dict(stored.beside)
    for section in _sections.SECTIONS:
        if section.needs_recall:
            beside.pop(section.name, None)
    return stored.model_copy(update={"beside": beside, "has_recall": False})


def shows_tool_use(stored: StoredSummary) -> bool:
    """Returns whether a summary replaces tool calls, as far as sections tell."""
    return any(
        section.shows_tool_use and stored.beside.get(section.name)
        for section in _sections.SECTIONS
    )


def _storable(value: Any) -> Any:
    """Replaces characters in a JSON value that databases refuse.

    These are "\\0" and halves of surrogate pairs. No text becomes longer or shorter.
    """
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

    # A summary that covers nothing stands before the history.
    first_index = min(history.indexes, default=0)
    summary_index = min(covered, default=first_index)
    before = contents[:summary_index]
    after = [
        contents[index]
        for index in range(summary_index, len(contents))
        if index not in covered
    ]
    head = render_head(history, stored, covered, turn.media_mover)
    return [*before, *join_messages([head], after)]


def render_head(
    history: History,
    stored: StoredSummary,
    covered: Collection[int],
    mover: MediaMover | None = None,
) -> types.Content:
    """Returns the message with the summary and, if the record has it, the continuation.

    Args:
        history: The history of the request.
        stored: The record of the summary.
        covered: Indexes of the messages that the summary replaces.
        mover: Decides which files of the quoted request may be moved into this message;
            None moves all of them.
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
        parts += _write_continuation(history, stored, covered, mover)
    return types.Content(role="user", parts=parts)


def find_quoted(
    history: History, stored: StoredSummary, covered: Collection[int]
) -> int | None:
    """Returns the index of the covered message that the continuation quotes.

    It is the newest covered message that equals the request of `stored`; None if no
    message does.
    """
    equal_indexes = [
        index for index in covered if history.fingerprint(index).hex() == stored.request
    ]
    return max(equal_indexes, default=None)


def _write_continuation(
    history: History,
    stored: StoredSummary,
    covered: Collection[int],
    mover: MediaMover | None,
) -> list[types.Part]:
    """Writes the text that asks to go on, followed by the files of the request.

    The text quotes the current request if the summary replaces it. The arguments are
    those of `render_head`.
    """
    index = find_quoted(history, stored, covered)
    request = None if index is None else history.contents[index]
    quoted = phrases.quote(content_text(request))
    is_shortened = stored.request_chars >= 0
    if is_shortened:
        # There is room for the handle of one text. The longest one loses most.
        text_parts = [part for part in parts_of(request) if part.text]
        longest = max(text_parts, key=lambda part: len(part.text or ""), default=None)
        handle = ""
        if longest is not None and stored.has_recall:
            handle = handle_of(longest)
        quoted = shorten(quoted, stored.request_chars, handle)

    why = _WHY.get(stored.reason, "it exceeded the context window")
    if quoted:
        text = _CONTINUATION.format(
            why=why,
            request=f"The user's current request is: `{quoted}`. ",
            where="working on this request",
            instead=" instead",
        )
    else:
        text = _CONTINUATION.format(
            why=why, request="", where="where it leaves off", instead=""
        )

    # A file that may not be moved is described by a line of text.
    files = media_parts(request)
    file_lines: list[str] = []
    if mover is not None:
        files, file_lines = mover.split(files, is_users=True)
    return [types.Part(text="\n".join([text, *file_lines])), *files]
