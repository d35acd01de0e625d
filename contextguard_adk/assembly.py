"""Puts a summary in the place of the contents that it covers."""

from __future__ import annotations

from collections.abc import Collection

from google.genai import types

from contextguard_adk.coverage import fingerprint, handle_of
from contextguard_adk.history import content_text
from contextguard_adk.history_view import HistoryView, StoredSummary
from contextguard_adk.ledger import render_ledger
from contextguard_adk.prompts import NO_SUMMARY, continuation_text, summary_text
from contextguard_adk.transcript import shorten
from contextguard_adk.truncation import Truncation, truncate_content


def render_request(
    view: HistoryView, stored: StoredSummary, covered: Collection[int]
) -> list[types.Content]:
    """Returns the contents to send: the summary for what it covers, the rest as is.

    The summary and, where there is one, the continuation stand where the first
    covered content stood; nothing else moves. The same arguments give the same
    bytes, on this call and on every later one.
    """
    contents = _truncate(view, stored)
    if not covered and not stored.text:
        return contents
    head = render_head(view, stored, covered)
    first = min(covered, default=min(view.history, default=0))
    before = [contents[i] for i in range(first) if i not in covered]
    behind = [contents[i] for i in range(first, len(contents)) if i not in covered]
    return before + head + behind


def _truncate(view: HistoryView, stored: StoredSummary) -> list[types.Content]:
    """The contents, tool results shortened as far as it was once decided."""
    contents = list(view.contents)
    if not stored.mark.truncation:
        return contents
    try:
        truncation = Truncation.from_json(stored.mark.truncation)
    except (ValueError, RecursionError):
        return contents
    upto = find_fingerprint(view, stored.mark.truncated_upto)
    for index in view.history:
        if index > upto:
            break
        contents[index] = truncate_content(
            contents[index], truncation, stored.mark.has_recall
        )
    return contents


def find_fingerprint(view: HistoryView, wanted: str) -> int:
    """Finds a history content by its fingerprint in hex; -1 if there is none.

    Of several equal ones it is the newest, or after a dot the how-manyth.
    """
    digest, _, number = wanted.partition(".")
    same = [i for i in view.history if view.fingerprints[i].hex() == digest]
    if number.isdecimal() and len(number) < 10:  # Python refuses huge numbers.
        same = same[: int(number)]
    return same[-1] if same else -1


def render_head(
    view: HistoryView, stored: StoredSummary, covered: Collection[int]
) -> list[types.Content]:
    """Returns the summary content and, where there is one, the continuation."""
    head = [_user_content([types.Part(text=summary_text(_summary_body(stored)))])]
    if stored.mark.has_continuation:
        head.append(_continuation(view, stored, covered))
    return head


def _summary_body(stored: StoredSummary) -> str:
    """The summary and, out of the model's reach, what the guard keeps itself."""
    text = stored.text or NO_SUMMARY
    kept = (text, render_ledger(stored.ledger), stored.todos, stored.index)
    return "\n\n".join(filter(None, kept))


def _continuation(
    view: HistoryView, stored: StoredSummary, covered: Collection[int]
) -> types.Content:
    """The request to carry on, with the live message's images and files."""
    request = find_quoted_request(view, stored.mark.request, covered)
    if request is None:
        return _user_content([types.Part(text=continuation_text(""))])
    text = content_text(request)
    if stored.mark.request_chars >= 0:
        handle = _longest_text_handle(request) if stored.mark.has_recall else ""
        text = shorten(text, stored.mark.request_chars, handle)
    media = [
        part
        for part in request.parts or ()
        if part and (part.inline_data or part.file_data)
    ]
    return _user_content([types.Part(text=continuation_text(text)), *media])


def _longest_text_handle(content: types.Content) -> str:
    """The handle of the part that loses most where a message is shortened."""
    texts = [part for part in content.parts or () if part and part.text]
    longest = max(texts, key=lambda part: len(part.text or ""), default=None)
    return handle_of(longest) if longest else ""


def find_quoted_request(
    view: HistoryView, wanted: str, covered: Collection[int]
) -> types.Content | None:
    """Finds the message that a continuation quotes by its fingerprint in hex."""
    if not wanted:
        return None
    for index in sorted(covered, reverse=True):
        if view.fingerprint(index).hex() == wanted:
            return view.contents[index]
    user_content = view.user_content
    if user_content is not None and fingerprint(user_content).hex() == wanted:
        return user_content
    return None


def _user_content(parts: list[types.Part]) -> types.Content:
    return types.Content(role="user", parts=parts)
