"""Puts contents in an order that strict providers accept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from google.genai import types

from contextguard_adk._history.contents import (
    PlacedCall,
    has_function_response,
    pair_contents,
    parts_of,
    result_media,
    take_call,
    with_parts,
)
from contextguard_adk._history.moved_media import MediaMover
from contextguard_adk._measuring.tokens import json_text
from contextguard_adk._support.phrases import SYSTEM, quote

_BEGINNING = f"{SYSTEM}Earlier messages, if there are any, are not shown.]"
_NO_ANSWER = f"{SYSTEM}There is no answer yet.]"
_LONE_RESULT = SYSTEM + "Result of the tool {name!r}, whose call is not shown]"


def put_in_order(
    contents: list[types.Content], mover: MediaMover
) -> list[types.Content]:
    """Puts a user's message first, and a text in place of each lone result.

    A lone result is a tool's result whose call is not in the contents. The mover
    decides which files of such results may stay as files beside the text. Returns
    `contents` itself if nothing changes.
    """
    lone_results = _find_lone_results(contents)
    ordered: list[types.Content] = []
    for index, content in enumerate(contents):
        if index in lone_results:
            ordered += _move_results(content, lone_results[index], mover)
        else:
            ordered.append(content)

    if ordered and ordered[0].role == "model":
        beginning = types.Part(text=_BEGINNING)
        ordered.insert(0, types.Content(role="user", parts=[beginning]))

    # Each change puts a new content in place of an old one, or before the first one. So
    # a changed list differs from `contents` at some index, even if it is longer.
    is_same = all(new is old for new, old in zip(ordered, contents, strict=False))
    return contents if is_same else ordered


def _find_lone_results(
    contents: Iterable[types.Content],
) -> dict[int, list[types.Part]]:
    """Finds the results without a call, by the index of the content."""
    waiting: list[PlacedCall] = []
    lone_results: dict[int, list[types.Part]] = {}
    for index, content in enumerate(contents):
        for part in content.parts or ():
            if not part or part.text:
                continue

            if part.function_call:
                waiting.append(PlacedCall(index, part.function_call))
            response = part.function_response
            has_no_call = response is not None and not take_call(waiting, response)
            if has_no_call:
                lone_results.setdefault(index, []).append(part)
    return lone_results


def _move_results(
    content: types.Content, results: Collection[types.Part], mover: MediaMover
) -> list[types.Content]:
    """Moves results from a content into a message after it, as texts with their files.

    Returns the content without these results, and the message. If the content has no
    other parts, returns the message alone.
    """
    result_ids = {id(part) for part in results}
    other_parts = [part for part in parts_of(content) if id(part) not in result_ids]

    message_parts: list[types.Part] = []
    for part in results:
        if part.function_response:
            message_parts += _write_result(part.function_response, mover)

    message = types.Content(role="user", parts=message_parts)
    return [with_parts(content, other_parts), message] if other_parts else [message]


def _write_result(
    response: types.FunctionResponse, mover: MediaMover
) -> list[types.Part]:
    """Returns a result as a text, and the files that may stand beside it."""
    payload = json_text(response.response or {}).decode("utf-8", "replace")
    files, file_texts = mover.split(result_media(response))
    head = _LONE_RESULT.format(name=response.name)
    text = "\n".join([head, quote(payload), *file_texts])
    return [types.Part(text=text), *files]


def answer_open_calls(contents: Sequence[types.Content]) -> list[types.Content]:
    """Adds a result to each call without one: "There is no answer yet."

    The result stands right after the content with the call. If other calls of this
    content have their results there, it is added to these. A call in the last content
    gets no result.
    """
    results_by_call = _write_missing_results(contents)

    answered: list[types.Content] = []
    for index, content in enumerate(contents):
        missing_results = results_by_call.get(index - 1, [])
        if not missing_results:
            answered.append(content)
        elif has_function_response(content):
            # This content has the results of other calls of the same message.
            all_parts = [*parts_of(content), *missing_results]
            answered.append(with_parts(content, all_parts))
        else:
            answered.append(types.Content(role="user", parts=missing_results))
            answered.append(content)
    return answered


def _write_missing_results(
    contents: Sequence[types.Content],
) -> dict[int, list[types.Part]]:
    """Returns the results that open calls lack, by the index of the call's content."""
    results_by_call: dict[int, list[types.Part]] = {}
    for call_index, call in pair_contents(contents).unanswered:
        response = types.FunctionResponse(
            id=call.id, name=call.name, response={"status": _NO_ANSWER}
        )
        result = types.Part(function_response=response)
        results_by_call.setdefault(call_index, []).append(result)
    return results_by_call
