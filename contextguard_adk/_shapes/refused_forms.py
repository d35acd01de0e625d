"""Gives a history the form that has helped where its provider refused another one.

What has helped is kept in session state, so that later requests begin with the same
bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from google.genai import types

from contextguard_adk._history.contents import (
    find_running_turn,
    has_function_response,
    is_message,
    join_messages,
    media_parts,
    parts_of,
    result_media,
    with_parts,
)
from contextguard_adk._history.fingerprints import fingerprint
from contextguard_adk._history.transcript import render_entries
from contextguard_adk._shapes.moved_media import MediaMover
from contextguard_adk._shapes.one_text import join_new_texts
from contextguard_adk._shapes.repair import answer_open_calls, repair
from contextguard_adk._shapes.sealed_thoughts import newest_thoughts, thinker_of
from contextguard_adk._support.phrases import SYSTEM
from contextguard_adk._turn.turn import Turn

_SIGNING = re.compile(r"gemini-([3-9]|\d\d)")  # Wants its calls signed.
_DUMMY_SIGNATURE = b"skip_thought_signature_validator"
"""Gemini's documented signature for calls that another model has made."""


@dataclass(frozen=True)
class SeenRefusals:
    """The kinds of refusals that a log line has told of."""

    kinds: frozenset[str] = frozenset()


def fit_refused_form(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Flattens, joins or signs contents where that is known to be needed."""
    helped = turn.record.helped or {}
    model = turn.model
    thinker = thinker_of(turn)
    if end := _find_end(contents, helped.get("flat", "")):
        contents = _flatten(contents, end, MediaMover.of(turn))
    if helped.get("shape"):
        contents = _take_turns(turn, answer_open_calls(contents))
    elif thinker.client == "LiteLlm" and turn.is_changed(contents):
        contents = _take_turns(turn, contents, turn.messages)
    end = _find_end(contents, helped.get("signed", ""))
    if end or (thinker.client == "Gemini" and _SIGNING.search(model.name)):
        contents = _sign_calls(contents, end)
    return contents


def find_help(
    turn: Turn, kind: str, contents: Sequence[types.Content]
) -> dict[str, str]:
    """Returns what to keep so that contents refused like these are accepted."""
    helped = turn.record.helped or {}
    model = turn.model.name
    if kind in ("binding", "thoughts"):
        gone = newest_thoughts(contents) or helped.get("gone", "")
        binds = {"binds": model, "free": ""} if kind == "binding" else {}
        return {**helped, "gone": gone, **binds}
    if kind == "turn" and thinker_of(turn).binds:
        return {**helped, "free": model, "binds": ""}
    if kind == "signatures":
        return {**helped, "signed": _name_end(contents)}
    if kind == "shape" and not helped.get("shape"):
        return {**helped, "shape": "in turn"}
    return {**helped, "flat": _name_end(contents)}


def _name_end(contents: Sequence[types.Content]) -> str:
    """Names the newest result, or message, by fingerprint and number among equals."""
    results = (i for i, each in enumerate(contents) if has_function_response(each))
    return [*_name_places(contents), ""][max(results, default=len(contents) - 1)]


def _name_places(contents: Sequence[types.Content]) -> Iterator[str]:
    seen = Counter[str]()
    for content in join_new_texts(contents, ()):  # As they are sent, or before that.
        digest = fingerprint(content).hex()
        seen[digest] += 1
        yield f"{digest}.{seen[digest]}"


def _find_end(contents: Sequence[types.Content], name: str) -> int:
    """How many contents end with what `_name_end` has named; 0 if it is not there."""
    places = enumerate(_name_places(contents), 1) if name else ()
    return next((end for end, place in places if place == name), 0)


def _flatten(
    contents: Sequence[types.Content], end: int, mover: MediaMover
) -> list[types.Content]:
    """Tells the first contents in one message, with their images and files."""
    told = [f"{SYSTEM}The conversation so far, as text.]"]
    told += [entry.text for entry in render_entries(contents, range(end))]
    files: list[types.Part] = []
    for content in contents[:end]:
        moved, words = _move_files(content, mover)
        files += moved
        told += words
    told.append(f"{SYSTEM}Continue with the newest request of the user above.]")
    text = types.Part(text="\n\n".join(told))
    message = types.Content(role="user", parts=[text, *files])
    return join_messages([message], contents[end:])


def _move_files(
    content: types.Content, mover: MediaMover
) -> tuple[list[types.Part], list[str]]:
    """The images and files of a content, and the words in place of some of them."""
    is_users = content.role == "user"
    moved, told = mover.split(media_parts(content), is_users=is_users)
    for part in parts_of(content):
        if response := part.function_response:
            of_result, words = mover.split(result_media(response))
            moved += of_result
            told += words
    return moved, told


def _take_turns(
    turn: Turn, contents: list[types.Content], others: Sequence[types.Content] = ()
) -> list[types.Content]:
    """Makes neighbors one: messages of the user, and results of parallel calls.

    Chat templates may want user and model in turn. `others` stay apart where they were
    neighbors before.
    """
    places = {id(content): place for place, content in enumerate(others)}
    turns: list[types.Content] = []
    for content in repair(turn, contents):
        parts = [p for p in parts_of(content) if p.text != "" or p.thought_signature]
        if not parts:
            continue
        before = turns[-1] if turns else types.Content()
        were_neighbors = places.get(id(before), -2) + 1 == places.get(id(content))
        are_alike = is_message(before) == is_message(content)
        if before.role == content.role == "user" and are_alike and not were_neighbors:
            parts = [*parts_of(turns.pop()), *parts]
        turns.append(with_parts(content, parts))
    return turns


def _sign_calls(contents: list[types.Content], end: int) -> list[types.Content]:
    """Gives the first call of each step of the running turn a signature.

    Those before `end` were refused, so that they lose their own.
    """
    signed = list(contents)
    for index in range(find_running_turn(contents), len(contents)):
        parts = list(contents[index].parts or ())
        calls = (i for i, part in enumerate(parts) if part and part.function_call)
        if (first := next(calls, None)) is None:
            continue
        if index < end or not parts[first].thought_signature:
            update = {"thought_signature": _DUMMY_SIGNATURE}
            parts[first] = parts[first].model_copy(update=update)
            signed[index] = with_parts(contents[index], parts)
    return signed
