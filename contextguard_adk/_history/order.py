"""Puts contents in an order that strict providers accept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from google.genai import types

from contextguard_adk._history.contents import (
    has_function_response,
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
    """Has a user's message stand first, and tells results without their calls as texts.

    Contents that are in order are returned as they are. The mover decides where the
    files of such results go.
    """
    waiting: list[tuple[int, types.FunctionCall]] = []
    ordered: list[types.Content] = []
    for index, content in enumerate(contents):
        lone = _take_lone_results(index, content, waiting)
        if lone:
            ordered += _tell_results(content, lone, mover)
        else:
            ordered.append(content)

    if ordered and ordered[0].role == "model":
        beginning = types.Part(text=_BEGINNING)
        ordered.insert(0, types.Content(role="user", parts=[beginning]))

    # A changed list is longer, or has another content somewhere.
    is_same = all(new is old for new, old in zip(ordered, contents, strict=False))
    return contents if is_same else ordered


def _take_lone_results(
    index: int,
    content: types.Content,
    waiting: list[tuple[int, types.FunctionCall]],
) -> list[types.Part]:
    """Returns a content's results without a call; updates the calls that wait."""
    lone: list[types.Part] = []
    for part in content.parts or ():
        if not part or part.text:
            continue

        if part.function_call:
            waiting.append((index, part.function_call))
        response = part.function_response
        if response and not take_call(waiting, response):
            lone.append(part)
    return lone


def _tell_results(
    content: types.Content, lone: Collection[types.Part], mover: MediaMover
) -> list[types.Content]:
    """Moves results from a content into texts after it, with their files."""
    kept = [part for part in parts_of(content) if not any(part is p for p in lone)]

    told: list[types.Part] = []
    for part in lone:
        if part.function_response:
            told += _tell_result(part.function_response, mover)

    texts = types.Content(role="user", parts=told)
    return [with_parts(content, kept), texts] if kept else [texts]


def _tell_result(
    response: types.FunctionResponse, mover: MediaMover
) -> list[types.Part]:
    """Returns a result as a text, and the files that may stand beside it."""
    payload = json_text(response.response or {}).decode("utf-8", "replace")
    files, words = mover.split(result_media(response))
    head = _LONE_RESULT.format(name=response.name)
    text = "\n".join([head, quote(payload), *words])
    return [types.Part(text=text), *files]


def answer_open_calls(contents: Sequence[types.Content]) -> list[types.Content]:
    """Gives each call that nobody has answered yet a result that says so."""
    missing = _write_missing_results(contents)

    answered: list[types.Content] = []
    for index, content in enumerate(contents):
        results = missing.get(index - 1, [])
        if results and has_function_response(content):
            # The results of other calls of the same message stand here.
            answered.append(with_parts(content, [*parts_of(content), *results]))
            continue

        if results:
            answered.append(types.Content(role="user", parts=results))
        answered.append(content)
    return answered


def _write_missing_results(
    contents: Iterable[types.Content],
) -> dict[int, list[types.Part]]:
    """Returns a result for each open call, by the index of the call's content."""
    waiting: list[tuple[int, types.FunctionCall]] = []
    for index, content in enumerate(contents):
        for part in parts_of(content):
            if part.function_call:
                waiting.append((index, part.function_call))
            elif part.function_response:
                take_call(waiting, part.function_response)

    missing: dict[int, list[types.Part]] = {}
    for index, call in waiting:
        result = types.FunctionResponse(
            id=call.id, name=call.name, response={"status": _NO_ANSWER}
        )
        missing.setdefault(index, []).append(types.Part(function_response=result))
    return missing
