"""Repairs what strict providers refuse in a history that was loaded in part."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from google.genai import types

from contextguard_adk._history.contents import (
    has_function_response,
    parts_of,
    result_media,
    take_call,
    with_parts,
)
from contextguard_adk._measuring.tokens import json_text
from contextguard_adk._shapes.moved_media import MediaMover
from contextguard_adk._support.phrases import SYSTEM, quote
from contextguard_adk._turn.turn import Turn

_BEGINNING = f"{SYSTEM}Earlier messages, if there are any, are not shown.]"
_NO_ANSWER = f"{SYSTEM}There is no answer yet.]"
_LONE_RESULT = SYSTEM + "Result of the tool {name!r}, whose call is not shown]"


def repair(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Has a user's message stand first, and tells results without their calls as texts.

    Sessions that were loaded in part begin anywhere, which strict providers refuse.
    What is in order is returned as it is.
    """
    return put_in_order(contents, MediaMover.of(turn))


def put_in_order(
    contents: list[types.Content], mover: MediaMover
) -> list[types.Content]:
    """Repairs contents; files of results that are told go where the mover says."""
    waiting: list[tuple[int, types.FunctionCall]] = []
    repaired: list[types.Content] = []
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
        repaired += _tell_results(content, lone, mover) if lone else [content]
    if repaired and repaired[0].role == "model":
        first = types.Part(text=_BEGINNING)
        repaired.insert(0, types.Content(role="user", parts=[first]))
    return contents if all(map(operator.is_, repaired, contents)) else repaired


def answer_open_calls(contents: list[types.Content]) -> list[types.Content]:
    """Gives each call that nobody has answered yet a result that says so."""
    waiting: list[tuple[int, types.FunctionCall]] = []
    for index, content in enumerate(contents):
        for part in parts_of(content):
            if part.function_call:
                waiting.append((index, part.function_call))
            elif part.function_response:
                take_call(waiting, part.function_response)

    said: dict[int, list[types.Part]] = {}
    for index, call in waiting:
        result = types.FunctionResponse(
            id=call.id, name=call.name, response={"status": _NO_ANSWER}
        )
        said.setdefault(index, []).append(types.Part(function_response=result))

    answered: list[types.Content] = []
    for index, content in enumerate(contents):
        results = said.get(index - 1, [])
        if results and has_function_response(content):  # Of calls beside it.
            answered.append(with_parts(content, [*parts_of(content), *results]))
            continue
        if results:
            answered.append(types.Content(role="user", parts=results))
        answered.append(content)
    return answered


def _tell_results(
    content: types.Content, lone: Sequence[types.Part], mover: MediaMover
) -> list[types.Content]:
    """Moves results from a content into texts after it, with their files."""
    told: list[types.Part] = []
    for response in filter(None, (part.function_response for part in lone)):
        payload = json_text(response.response or {}).decode("utf-8", "replace")
        files, words = mover.split(result_media(response))
        head = _LONE_RESULT.format(name=response.name)
        text = "\n".join([head, quote(payload), *words])
        told += [types.Part(text=text), *files]
    kept = [part for part in parts_of(content) if not any(part is p for p in lone)]
    rest = [with_parts(content, kept)] if kept else []
    return [*rest, types.Content(role="user", parts=told)]
