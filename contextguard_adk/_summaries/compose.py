"""The message with a summary: composed from a draft, stored, and rendered.

The message has a summary, the texts of sections beside it, and usually a continuation.
A continuation asks the model to go on, and quotes the user's current request. If the
message is too long, its parts are shortened in steps: at step 0 of `Draft.shrink` they
are whole, at step `MAX_SHRINK` they are shortest.

A message of the history is covered if a summary of any kind replaces it, and summarized
if a model wrote that summary. An index is a position among the contents of the request.

Everything here is pure: equal arguments give equal bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from google.genai import types

from contextguard_adk import _sections, _shapes
from contextguard_adk._history.contents import (
    content_text,
    has_tool,
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
    excerpt,
    shorten,
    shorten_to_tokens,
)
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._runtime.state import AgentState
from contextguard_adk._support import phrases
from contextguard_adk._turn.facts import Outcome
from contextguard_adk._turn.room import MAX_STATE_BYTES, Rooms
from contextguard_adk._turn.turn import LEAST_SUMMARY_TOKENS, Turn
from contextguard_adk._turn.units import Section

_CONTINUATION = (
    phrases.SYSTEM + "The conversation was compacted because {why}. "
    "The summary above contains all prior context. {request}Continue {where} without "
    "asking the user to repeat anything. If a newer message of the user follows below, "
    "that message is the current request{instead}.]"
)
"""The text of a continuation. `_write_continuation` fills in the braces."""

_WHY = {"requested": "it was requested", "turns": "it had grown long"}
"""The words for {why} by the reason of the compaction, if it is one of these two."""


class _ShrinkStep(NamedTuple):
    """How much of the summary and of the quoted request stays at one step."""

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
"""A row for each step of `Draft.shrink`; the first one is step 0."""

LEAST_REQUEST_CHARS = 240
"""At every step this much of the request is quoted.

A shorter quote would hardly save tokens, and would lose the point of the request.
"""

MAX_EXCERPT_BYTES = 1_000
"""The most of a quoted request that is stored, for sessions that are loaded in part."""

LEAST_SUMMARY_RATIO = 0.25
"""A summary of tool calls and results may take at least this part of its usual budget.
"""


class _Shrunk(NamedTuple):
    """A shortened summary, and the length of the quoted request.

    Attributes:
        text: The summary.
        request_chars: How many characters of the request are quoted; -1 for all.
    """

    text: str
    request_chars: int


def compose(turn: Turn, draft: Draft) -> Outcome:
    """Returns the request with a draft in place, and the record to store for it."""
    stored = _add_sections(turn, draft, describe_draft(turn, draft))
    return _place(turn, draft, stored)


def place_stored(turn: Turn, stored: StoredSummary) -> Outcome:
    """Returns the request with a summary in place that has been composed before.

    The texts of its sections stay as they are, but those that are made of session
    state, such as the pins: the state may have changed since then.
    """
    history = turn.history.with_summary(stored)
    draft = replace(turn, history=history).draft
    rooms = Rooms(turn, draft.covered, stored.text, stored.request_excerpt)
    beside = dict(stored.beside)
    for section in _sections.SECTIONS:
        if section.is_briefed:
            beside.pop(section.name, None)
            beside |= _write_section(section, turn, draft.covered, rooms)
    return _place(turn, draft, stored.model_copy(update={"beside": beside}))


def _place(turn: Turn, draft: Draft, stored: StoredSummary) -> Outcome:
    """Returns the request with a summary in place, and measures it.

    Args:
        turn: The model call.
        draft: The summary as a draft.
        stored: The summary as a record.
    """
    contents = shape(turn, render(turn, stored, draft.covered))
    tokens = turn.measure(contents)
    measured = stored.model_copy(update={"left_tokens": tokens})
    return Outcome(draft, measured, contents, tokens)


def squeeze(turn: Turn, draft: Draft) -> Outcome:
    """Composes a draft, and shortens it until the request fits.

    The draft is tried at its own step of `Draft.shrink`, and then at each later step.
    If the request fits at no step, the outcome of the last step is returned.
    """
    outcome = compose(turn, draft)
    while outcome.tokens > turn.limit_tokens and outcome.draft.shrink < MAX_SHRINK:
        outcome = compose(turn, replace(draft, shrink=outcome.draft.shrink + 1))
    return outcome


def summary_tokens(turn: Turn, covered: frozenset[int]) -> int:
    """Returns how many tokens a summary of the covered messages may take.

    The lists of values and lines beside a summary tell most of what tools have
    returned. So a summary gets its usual budget only if at least half of what no
    summary has replaced yet are the words of the user and of the model. With fewer
    words its budget is lower, down to `LEAST_SUMMARY_RATIO` of the usual one.
    """
    history = turn.history
    new_contents = [
        history.contents[index] for index in sorted(covered - history.model_covered)
    ]
    word_contents = [content for content in new_contents if not has_tool(content)]
    new_tokens = max(1, turn.measure_alone(new_contents))
    words_ratio = turn.measure_alone(word_contents) / new_tokens
    ratio = min(1.0, max(LEAST_SUMMARY_RATIO, 2 * words_ratio))

    usual_tokens = turn.summary_tokens
    least_tokens = min(usual_tokens, LEAST_SUMMARY_TOKENS)
    return max(least_tokens, int(usual_tokens * ratio))


def expect_tokens(turn: Turn, covered: frozenset[int]) -> int:
    """Estimates the request if a summary of the longest length covers these messages.

    The summary does not exist yet, so the request is measured without its text.
    """
    draft = Draft(text="", covered=covered, model_covered=covered, reason=turn.reason)
    return compose(turn, draft).tokens + summary_tokens(turn, covered)


def shape(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Returns contents in the form in which the provider wants them."""
    shaped = contents
    for row in _shapes.SHAPES:
        if row.when(turn, shaped):
            shaped = row.apply(turn, shaped)
    return shaped


def describe_draft(turn: Turn, draft: Draft) -> StoredSummary:
    """Builds the record of a draft for session state, without the texts of sections.

    The field `left_tokens` stays empty: the request is not measured yet.
    """
    history = turn.history
    redact = history.redactor.redact_text
    shrunk = _shrink(turn, draft.text, draft.shrink)

    # The text is a model's summary, followed by excerpts. Redaction changes lengths. So
    # both are redacted alone, and the new `model_chars` is the length of the redacted
    # summary. If the text was shortened, a part of the excerpts may count as summary.
    model_text = redact(shrunk.text[: draft.model_chars])
    excerpts = redact(shrunk.text[draft.model_chars :])
    if len(model_text + excerpts) > MAX_SUMMARY_CHARS:
        # Redaction has made the text longer than what is read from session state.
        model_text = shorten(model_text + excerpts, MAX_SUMMARY_CHARS)
        excerpts = ""

    # The record has only the number of messages that a model summarized, counted from
    # the oldest covered one. The count ends at the first one that no model summarized.
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

    request = _describe_request(history, draft.covered)
    # If older messages are missing in this request, the previous summary has replaced
    # these messages, and so does the new summary.
    has_older = history.stored is not None and not history.is_whole
    return StoredSummary(
        text=_storable(model_text + excerpts),
        covered=cover(fingerprints),
        scope=turn.scope,
        invocation=history.invocation_id,
        last_event=history.last_event(draft.covered),
        reason=draft.reason,
        request=request.fingerprint,
        request_chars=shrunk.request_chars,
        request_excerpt=request.excerpt,
        has_continuation=request.has_continuation,
        model_chars=len(model_text),
        model_covered_count=model_covered_count,
        truncation=draft.truncation,
        truncated_upto=history.name_content(draft.truncated_upto),
        has_recall=turn.has_recall,
        has_older=has_older,
        has_tools=not turn.is_chat,
        edits=turn.record.edits,
    )


class _DescribedRequest(NamedTuple):
    """The user's current request, as the record of a summary has it.

    Attributes:
        fingerprint: The fingerprint in hex; "" if the agent does not see the request.
        excerpt: An excerpt if the continuation quotes the request; else "".
        has_continuation: Whether a continuation stands after the summary.
    """

    fingerprint: str = ""
    excerpt: str = ""
    has_continuation: bool = True


def _describe_request(history: History, covered: frozenset[int]) -> _DescribedRequest:
    """Describes the current request for the record of a summary.

    Args:
        history: The history of the request.
        covered: Indexes of the messages that the summary replaces.
    """
    index = history.request_index
    if index is None:
        # The agent does not see the user's request. The continuation asks the agent to
        # go on, and quotes nothing.
        return _DescribedRequest()

    fingerprint = history.fingerprint(index).hex()
    if index not in covered:
        # The model reads the request in full, so no continuation quotes it.
        return _DescribedRequest(fingerprint, has_continuation=False)
    told_text = content_text(history.told[index])
    shown = _storable(excerpt(told_text, MAX_EXCERPT_BYTES))
    return _DescribedRequest(fingerprint, shown)


def _add_sections(turn: Turn, draft: Draft, bare: StoredSummary) -> StoredSummary:
    """Returns the record of a summary with the texts of its sections.

    A section is left out if it has nothing to show, or if the step of the draft is the
    section's `goes_at` or a later one.

    Args:
        turn: The model call.
        draft: The draft.
        bare: The record of the draft without any section.
    """
    rooms = Rooms(turn, draft.covered, bare.text, bare.request_excerpt)
    beside: dict[str, str] = {}
    for section in _sections.SECTIONS:
        is_left_out = section.goes_at is not None and draft.shrink >= section.goes_at
        if not is_left_out:
            beside |= _write_section(section, turn, draft.covered, rooms)
    return bare.model_copy(update={"beside": beside})


def _write_section(
    section: Section, turn: Turn, covered: frozenset[int], rooms: Rooms
) -> dict[str, str]:
    """Returns the text of a section by its name; {} for no text.

    Args:
        section: The section.
        turn: The model call.
        covered: Indexes of the messages that the new summary replaces.
        rooms: The room of the texts, from which this one is taken.
    """
    most_tokens = section.most_tokens(turn, covered)
    room = rooms.give(most_tokens, section.state_ratio, section.token_ratio)
    if section.own_state_bytes:
        room = replace(room, state_bytes=section.own_state_bytes)
    stored = turn.history.stored
    known = ""
    if stored is not None and not turn.history.is_whole:
        # Only a session that is loaded in part needs the text before. The user may have
        # set `redact` since then.
        stored_text = stored.beside.get(section.name, "")[:MAX_STATE_BYTES]
        known = turn.history.redactor.redact_text(stored_text)
    text = _storable(section.write(turn, covered, known, room))
    if text:
        rooms.show(text, takes_tokens=not section.has_own_room)
    if text and not section.own_state_bytes:
        rooms.take(text)
    return {section.name: text} if text else {}


def _shrink(turn: Turn, text: str, step: int) -> _Shrunk:
    """Shortens a summary and the quote of the request to a step of `Draft.shrink`.

    At the first steps the quote keeps its length. At later steps the quote is shorter,
    but not below `LEAST_REQUEST_CHARS`.

    Args:
        turn: The model call, with the length of the whole quote.
        text: The summary.
        step: The step, from 0 to `MAX_SHRINK`.
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
    """Yields records of a stored summary, the longest one first.

    1. The summary at each step of `Draft.shrink`, if there is a summary.
    2. A record without a summary, if a section with `stands_alone` has a text.

    Each record has the texts of all sections with `stands_alone`; the last one has
    nothing else.

    Args:
        turn: The model call.
        stored: The summary; None for no summary.
    """
    alone: dict[str, str] = {}
    for section in _sections.SECTIONS:
        if not section.stands_alone:
            continue
        brief = section.brief(turn)
        if brief:
            alone[section.name] = _storable(brief)

    if stored is not None:
        fresh = _refresh_for(turn, stored, turn.history.covered)
        for step in range(MAX_SHRINK + 1):
            shrunk = _shrink(turn, stored.text, step)
            update = {
                "text": shrunk.text,
                "request_chars": shrunk.request_chars,
                "beside": _keep_sections(fresh, step) | alone,
            }
            yield stored.model_copy(update=update)

    if alone:
        yield StoredSummary(beside=alone, has_continuation=False)


def _keep_sections(stored: StoredSummary, step: int) -> dict[str, str]:
    """Returns the stored texts of sections that stay at a step of `Draft.shrink`.

    A section with `is_told_anew` never stays: the caller gets its text from
    `tell_left_out` instead.
    """
    sections = {section.name: section for section in _sections.SECTIONS}
    kept = {}
    for name, text in stored.beside.items():
        # Session state may hold texts of another release's sections.
        section = sections.get(name)
        if section is None or section.is_told_anew:
            continue
        if section.goes_at is None or step < section.goes_at:
            kept[name] = text
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
    # Each section reads the indexes anew, which an iterator does not allow.
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
    """Returns a summary for requests without the recall tool: no text names it."""
    beside = dict(stored.beside)
    for section in _sections.SECTIONS:
        if section.needs_recall:
            beside.pop(section.name, None)
    return stored.model_copy(update={"beside": beside, "has_recall": False})


def _storable(text: str) -> str:
    """Replaces the characters in a text that databases refuse.

    These are "\\0" and halves of surrogate pairs. Each is replaced by one character, so
    that counts such as `model_chars` stay right.
    """
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def render(
    turn: Turn, stored: StoredSummary, covered: Collection[int]
) -> list[types.Content]:
    """Returns the contents of the request with a summary in place of the covered ones.

    The summary stands where the oldest covered content was. The results in the other
    contents are shortened as the record says.

    Args:
        turn: The model call.
        stored: The record of the summary. If the record has no text, and nothing is
            covered, results are shortened, but no summary is put in.
        covered: Indexes of the contents that the summary replaces.
    """
    history = turn.history
    contents = list(history.shown)
    for index, content in history.shortened_results(stored).items():
        contents[index] = content
    if not covered and not stored.text:
        return contents

    # A summary that covers nothing stands before the history. The app may have put
    # contents of its own before the history.
    first_index = min(history.indexes, default=0)
    summary_index = min(covered, default=first_index)
    before = contents[:summary_index]
    after = [
        contents[index]
        for index in range(summary_index, len(contents))
        if index not in covered
    ]
    fresh = _refresh_for(turn, stored, covered)
    head = render_head(history, fresh, covered, turn.media_mover)
    return [*before, *join_messages([head], after)]


def refresh(
    stored: StoredSummary,
    state: AgentState,
    run_id: str = "",
    kept: Sequence[types.Content] = (),
) -> StoredSummary:
    """Returns a summary whose sections' texts are as a request shows them now.

    Session state may have changed since a text was written.

    Args:
        stored: The summary.
        state: The agent's values in session state.
        run_id: ADK's id of the run; "" outside of runs.
        kept: The messages that stay in the request; empty if they are unknown.
    """
    fresh = dict(stored.beside)
    for section in _sections.SECTIONS:
        text = fresh.pop(section.name, "")
        fresh_text = section.refresh(text, state, run_id, kept) if text else ""
        if fresh_text:
            fresh[section.name] = fresh_text

    return stored.model_copy(update={"beside": fresh})


def _refresh_for(
    turn: Turn, stored: StoredSummary, covered: Collection[int]
) -> StoredSummary:
    """Returns a summary as the request of a turn shows it, in place of some contents.

    Args:
        turn: The model call.
        stored: The summary.
        covered: Indexes of the contents that the summary replaces.
    """
    contents = turn.history.contents
    kept = [content for index, content in enumerate(contents) if index not in covered]
    return refresh(stored, turn.state, turn.origin.invocation_id, kept)


def render_head(
    history: History,
    stored: StoredSummary,
    covered: Collection[int],
    mover: MediaMover | None = None,
) -> types.Content:
    """Returns the message with the summary, the sections and the continuation.

    The continuation is left out if `stored.has_continuation` is False.

    Args:
        history: The history of the request.
        stored: The record of the summary.
        covered: Indexes of the messages that the summary replaces.
        mover: Decides which files of the quoted request may be moved into this message;
            None moves all of them.
    """
    body = show_texts(stored)
    summary = f"{phrases.SUMMARY_BEGIN}\n{body}\n{phrases.SUMMARY_END}"
    parts = [types.Part(text=summary)]
    if stored.has_continuation:
        parts += _write_continuation(history, stored, covered, mover)
    return types.Content(role="user", parts=parts)


def show_texts(stored: StoredSummary) -> str:
    """Returns the summary and the texts beside it, as a request has them."""
    texts = [phrases.quote_stored(stored.text) or phrases.NO_SUMMARY]
    for section in _sections.SECTIONS:
        text = show_section(section, stored)
        if text:
            texts.append(text)
    return "\n\n".join(texts)


def show_section(section: Section, stored: StoredSummary) -> str:
    """Returns the text of a section beside a summary, as a request has it.

    The text comes from the conversation, so it is quoted. The heading comes from the
    guard, so it is not quoted.
    """
    text = stored.beside.get(section.name)
    if not text:
        return ""
    rest = phrases.quote_stored(text.removeprefix(section.heading))
    has_heading = text.startswith(section.heading)
    # Older releases stored some texts without their heading.
    return section.heading + rest if has_heading else f"{section.heading}\n{rest}"


def _write_continuation(
    history: History,
    stored: StoredSummary,
    covered: Collection[int],
    mover: MediaMover | None,
) -> list[types.Part]:
    """Writes the text that asks to go on, followed by the files of the request.

    The text quotes the current request if the summary replaces this request. Otherwise
    the text quotes nothing, and no files follow. The arguments are those of
    `render_head`.
    """
    index = history.find_quoted(stored, covered)
    request = None if index is None else history.contents[index]
    # If the request is not loaded, the excerpt takes its place.
    request_text = content_text(request) if request else stored.request_excerpt
    quoted = phrases.quote(request_text)
    is_shortened = stored.request_chars >= 0
    if is_shortened:
        # A request may have several texts, but the notice in a shortened quote has room
        # for one handle. The longest text gets the handle, because it loses most.
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

    # A file that may not be moved is described in words.
    files = media_parts(request)
    file_lines: list[str] = []
    if mover is not None:
        files, file_lines = mover.split(files, is_users=True)
    return [types.Part(text="\n".join([text, *file_lines])), *files]
