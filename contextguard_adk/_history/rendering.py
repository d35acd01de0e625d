"""What the agent is sent: a summary for what it covers, and what stands beside it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from google.genai import types

from contextguard_adk._history.coverage import handle_of
from contextguard_adk._history.pairs import (
    content_text,
    is_message,
    media_parts,
    parts_of,
    result_media,
    take_call,
)
from contextguard_adk._history.truncation import truncate_content
from contextguard_adk._measuring.budgets import shorten
from contextguard_adk._measuring.tokens import json_text

if TYPE_CHECKING:
    from contextguard_adk._history.stored import StoredSummary
    from contextguard_adk._history.view import HistoryView


SUMMARY_BEGIN = "[Previous conversation summary]"
SUMMARY_END = "[End of summary — conversation continues below]"
NO_SUMMARY = "Older messages were left out; they are not summarized."

_CONTINUATION = (
    "[System: The conversation was compacted because {why}. "
    "The summary above contains all prior context. {request}Continue {where} without "
    "asking the user to repeat anything. If a newer message of the user follows below, "
    "that message is the current request{instead}.]"
)

_WHY = {"requested": "somebody asked for it", "turns": "it had grown long"}

_BEGINNING = "[System: Earlier messages, if there are any, are not shown.]"
_LONE_RESULT = "[System: Result of the tool {name!r}, whose call is not shown]"

LEDGER_HEADING = "[The user's messages up to here, in order; long ones are excerpts]"


def render_request(
    view: HistoryView, stored: StoredSummary, covered: Collection[int]
) -> list[types.Content]:
    """Returns the contents to send; the same arguments always give the same bytes."""
    contents = list(view.shown)
    for i, content in shorten_results(view, stored).items():
        contents[i] = content
    if not covered and not stored.text:
        return mend_contents(contents)
    head = [render_head(view, stored, covered)]
    first = min(covered, default=min(view.history, default=0))
    before = [contents[i] for i in range(first) if i not in covered]
    behind = [contents[i] for i in range(first, len(contents)) if i not in covered]
    return mend_contents([*before, *join_messages(head, behind)])


def join_messages(
    own: Sequence[types.Content], behind: Sequence[types.Content]
) -> list[types.Content]:
    """Makes what the guard says, and messages of the user behind it, one message.

    Chat templates may want user and model in turn.
    """
    messages = [*itertools.takewhile(is_message, behind)]
    parts = [part for content in (*own, *messages) for part in parts_of(content)]
    return [types.Content(role="user", parts=parts), *behind[len(messages) :]]


def shorten_results(
    view: HistoryView, stored: StoredSummary
) -> dict[int, types.Content]:
    """The contents whose results a compaction has shortened, as the agent sees them."""
    if not stored.truncation:
        return {}
    upto = find_fingerprint(view, stored.truncated_upto)
    short = {}
    for i in (i for i in view.history if i <= upto):
        whole = view.contents[i] if stored.has_recall else None
        content = truncate_content(view.shown[i], stored.truncation, whole)
        if content is not view.shown[i]:
            short[i] = content
    return short


def mend_contents(contents: list[types.Content]) -> list[types.Content]:
    """Has a user's message stand first, and tells results without their calls as texts.

    Sessions that were loaded in part begin anywhere, which strict providers refuse.
    What is in order is returned as it is.
    """
    waiting: list[tuple[int, types.FunctionCall]] = []
    mended: list[types.Content] = []
    for index, content in enumerate(contents):
        lone: list[types.Part] = []
        for part in content.parts or ():
            if not part or part.text:
                continue
            if part.function_call:
                waiting.append((index, part.function_call))
            response = part.function_response
            if response and not take_call(waiting, response):
                lone.append(part)
        mended += _tell_results(content, lone) if lone else [content]
    if mended and mended[0].role == "model":
        first = types.Part(text=_BEGINNING)
        mended.insert(0, types.Content(role="user", parts=[first]))
    return contents if all(map(operator.is_, mended, contents)) else mended


def _tell_results(
    content: types.Content, lone: Sequence[types.Part]
) -> list[types.Content]:
    """Moves results from a content into texts behind it, with their files."""
    told: list[types.Part] = []
    for response in filter(None, (part.function_response for part in lone)):
        text = json_text(response.response or {}).decode("utf-8", "replace")
        head = _LONE_RESULT.format(name=response.name)
        told.append(types.Part(text=f"{head}\n{text}"))
        told += result_media(response)
    kept = [part for part in parts_of(content) if not any(part is p for p in lone)]
    rest = [content.model_copy(update={"parts": kept})] if kept else []
    return [*rest, types.Content(role="user", parts=told)]


def find_fingerprint(view: HistoryView, wanted: str) -> int:
    """Finds what `HistoryView.name_place` named; -1 if it is not there."""
    digest, _, number = wanted.partition(".")
    history = view.history if wanted else ()
    same = [i for i in history if view.fingerprints[i].hex() == digest]
    if number.isdecimal() and len(number) < 10:  # Python refuses huge numbers.
        same = same[: int(number)]
    return same[-1] if same else -1


def render_head(
    view: HistoryView, stored: StoredSummary, covered: Collection[int]
) -> types.Content:
    """Returns the message of the summary and, where there is one, the continuation."""
    # Behind what the model wrote stands what the guard keeps itself.
    ledger = render_ledger(stored.ledger)
    kept = (ledger, stored.done, stored.todos, stored.index)
    text = "\n\n".join(filter(None, (stored.text or NO_SUMMARY, *kept)))
    parts = [types.Part(text=summary_text(text))]
    if stored.has_continuation:
        parts += _continue(view, stored, covered)
    return types.Content(role="user", parts=parts)


def _continue(
    view: HistoryView, stored: StoredSummary, covered: Collection[int]
) -> list[types.Part]:
    """The request to carry on, with the live message's images and files."""
    request = _find_quoted_request(view, stored.request, covered)
    text = content_text(request)
    if stored.request_chars >= 0:
        # Under this handle stands the part that loses most.
        texts = [part for part in parts_of(request) if part.text]
        longest = max(texts, key=lambda part: len(part.text or ""), default=None)
        handle = handle_of(longest) if longest and stored.has_recall else ""
        text = shorten(text, stored.request_chars, handle)
    said = types.Part(text=continuation_text(text, stored.reason))
    return [said, *media_parts(request)]


def _find_quoted_request(
    view: HistoryView, wanted: str, covered: Collection[int]
) -> types.Content | None:
    """Finds the message that a continuation quotes by its fingerprint in hex."""
    for index in sorted(covered, reverse=True):
        if view.fingerprint(index).hex() == wanted:
            return view.contents[index]
    return None


def summary_text(summary: str) -> str:
    """Wraps a summary in markers; those inside it lose their brackets."""
    for marker in (SUMMARY_BEGIN, SUMMARY_END):
        while marker in summary:  # "[[…]]" leaves one behind.
            summary = summary.replace(marker, marker[1:-1])
    return f"{SUMMARY_BEGIN}\n{summary}\n{SUMMARY_END}"


def continuation_text(request: str, reason: str) -> str:
    """Tells the agent to carry on with the user's request; "" names none."""
    quoted, where, instead = "", "where it leaves off", ""
    if request:
        quoted = f"The user's current request is: `{request}`. "
        where, instead = "working on this request", " instead"
    why = _WHY.get(reason, "it exceeded the context window")
    return _CONTINUATION.format(why=why, request=quoted, where=where, instead=instead)


def render_ledger(excerpts: Sequence[str]) -> str:
    """Renders a ledger for the summary content; "" when it is empty."""
    lines = [LEDGER_HEADING, *(f"- {text}" for text in excerpts)]
    return "\n".join(lines) if excerpts else ""
