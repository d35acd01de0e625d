"""Puts contents in an order that strict providers accept.

They want a user's message first, and each call followed by its result. A lone result is
a tool's result whose call is not among the contents before the result.
"""

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
    """Makes sure that a message is first, and writes lone results as texts.

    If the first content is of the model, a message of the guard is put before it. A
    lone result becomes a text in a message of the user. Returns `contents` itself if
    nothing changes.

    Args:
        contents: The contents of a request.
        mover: Decides which files of lone results may stay as files beside the text.
    """
    lone_results = _find_lone_results(contents)
    ordered: list[types.Content] = []
    for index, content in enumerate(contents):
        if index in lone_results:
            ordered += _move_results(content, lone_results[index], mover)
        else:
            ordered.append(content)

    begins_with_model = bool(ordered) and ordered[0].role == "model"
    if begins_with_model:
        beginning = types.Part(text=_BEGINNING)
        ordered.insert(0, types.Content(role="user", parts=[beginning]))

    has_changed = bool(lone_results) or begins_with_model
    return ordered if has_changed else contents


def _find_lone_results(
    contents: Iterable[types.Content],
) -> dict[int, list[types.Part]]:
    """Finds the parts with lone results, by the index of their content."""
    waiting_calls: list[PlacedCall] = []
    lone_results: dict[int, list[types.Part]] = {}
    for index, content in enumerate(contents):
        for part in content.parts or ():
            # A part with a text has neither a call nor a result. A plugin may have put
            # None in place of a part.
            if not part or part.text:
                continue
            if part.function_call:
                waiting_calls.append(PlacedCall(index, part.function_call))

            result = part.function_response
            is_lone = result is not None and take_call(waiting_calls, result) is None
            if is_lone:
                lone_results.setdefault(index, []).append(part)
    return lone_results


def _move_results(
    content: types.Content, results: Collection[types.Part], mover: MediaMover
) -> list[types.Content]:
    """Moves results from a content into a message, as texts with their files.

    Returns the content without these results, and after it the message. If the content
    has no other parts, returns the message alone.

    Args:
        content: The content.
        results: Some of the part objects in the content, all of them tools' results.
        mover: Decides which files may stay files.
    """
    result_ids = {id(part) for part in results}
    other_parts = [part for part in parts_of(content) if id(part) not in result_ids]

    message_parts: list[types.Part] = []
    for part in results:
        if part.function_response:
            message_parts += _write_result(part.function_response, mover)
    message = types.Content(role="user", parts=message_parts)

    if not other_parts:
        return [message]
    return [with_parts(content, other_parts), message]


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
    """Adds a result to each call that has none: "There is no answer yet."

    The added results stand right after the content with the calls. If the next content
    has tools' results, the added results are put at the end of the next content. The
    calls in the last content get no result.
    """
    results_by_index = _write_missing_results(contents)

    answered: list[types.Content] = []
    for index, content in enumerate(contents):
        missing_results = results_by_index.get(index, [])
        if not missing_results:
            answered.append(content)
        elif has_function_response(content):
            all_parts = [*parts_of(content), *missing_results]
            answered.append(with_parts(content, all_parts))
        else:
            answered.append(types.Content(role="user", parts=missing_results))
            answered.append(content)
    return answered


def _write_missing_results(
    contents: Sequence[types.Content],
) -> dict[int, list[types.Part]]:
    """Writes a result for each open call, by the index after the content of the call.

    Calls of the last content have an index that is one too high for the contents.
    """
    results_by_index: dict[int, list[types.Part]] = {}
    for call_index, call in pair_contents(contents).unanswered:
        response = types.FunctionResponse(
            id=call.id, name=call.name, response={"status": _NO_ANSWER}
        )
        result = types.Part(function_response=response)
        results_by_index.setdefault(call_index + 1, []).append(result)
    return results_by_index
