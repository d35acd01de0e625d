"""Gives a history the form that has helped where its provider refused another one.

What has helped is kept in session state, under these names: `flat` for a history as one
text, `shape` for user and model in turn, `signed` for calls with a signature. So later
requests begin with the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from google.genai import types

from contextguard_adk._history.contents import (
    find_running_turn,
    has_function_response,
    is_message,
    join_messages,
    join_new_texts,
    media_parts,
    parts_of,
    result_media,
    with_parts,
)
from contextguard_adk._history.fingerprints import fingerprint
from contextguard_adk._history.moved_media import MediaMover
from contextguard_adk._history.order import answer_open_calls, put_in_order
from contextguard_adk._history.transcript import render_entries
from contextguard_adk._support.phrases import SYSTEM
from contextguard_adk._turn.turn import Turn

_DUMMY_SIGNATURE = b"skip_thought_signature_validator"
"""Gemini's documented signature for calls that another model has made."""


def tell_as_text(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Tells what was refused in one message, with its images and files."""
    end = _find_end(contents, (turn.record.helped or {}).get("flat", ""))
    if not end:
        return contents

    told = [f"{SYSTEM}The conversation so far, as text.]"]
    told += [entry.text for entry in render_entries(contents, range(end))]
    files: list[types.Part] = []
    for content in contents[:end]:
        moved, words = _move_files(content, turn.media_mover)
        files += moved
        told += words
    told.append(f"{SYSTEM}Continue with the newest request of the user above.]")

    text = types.Part(text="\n\n".join(told))
    message = types.Content(role="user", parts=[text, *files])
    return join_messages([message], contents[end:])


def help_as_text(
    turn: Turn, refusal: str, contents: Sequence[types.Content]
) -> dict[str, str]:
    """Helps against any refusal: all of these contents become one text."""
    return {**(turn.record.helped or {}), "flat": _name_end(contents)}


def take_turns(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Has user and model speak in turn, and answers each call.

    Chat templates may want that.
    """
    answered = answer_open_calls(contents)
    return _join_neighbors(put_in_order(answered, turn.media_mover), messages=())


def help_take_turns(
    turn: Turn, refusal: str, contents: Sequence[types.Content]
) -> dict[str, str] | None:
    """Helps once against refusals of the order of messages."""
    helped = turn.record.helped or {}
    if refusal != "shape" or helped.get("shape"):
        return None
    return {**helped, "shape": "in turn"}


def join_own_messages(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Joins messages of the user that the guard has made neighbors."""
    ordered = put_in_order(contents, turn.media_mover)
    return _join_neighbors(ordered, turn.messages)


def sign_refused_calls(
    turn: Turn, contents: list[types.Content]
) -> list[types.Content]:
    """Gives calls another signature where their own was refused."""
    end = _find_end(contents, (turn.record.helped or {}).get("signed", ""))
    return _sign_calls(contents, end) if end else contents


def sign_calls(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Gives calls without a signature one."""
    return _sign_calls(contents, refused_end=0)


def help_sign_calls(
    turn: Turn, refusal: str, contents: Sequence[types.Content]
) -> dict[str, str] | None:
    """Helps against refusals of the signatures of calls."""
    if refusal != "signatures":
        return None
    return {**(turn.record.helped or {}), "signed": _name_end(contents)}


def _name_end(contents: Sequence[types.Content]) -> str:
    """Names the newest result, else the newest message; "" where there is none.

    The name is a fingerprint, and a number among equal ones.
    """
    names = list(_name_contents(contents))
    if not names:
        return ""

    results = [i for i, each in enumerate(contents) if has_function_response(each)]
    return names[results[-1]] if results else names[-1]


def _name_contents(contents: Sequence[types.Content]) -> Iterator[str]:
    """Yields a name for each content: the same before and after texts are joined."""
    seen = Counter[str]()
    for content in join_new_texts(contents, ()):
        digest = fingerprint(content).hex()
        seen[digest] += 1
        yield f"{digest}.{seen[digest]}"


def _find_end(contents: Sequence[types.Content], name: str) -> int:
    """Returns how many contents end with the one of this name; 0 if it is not there."""
    if not name:
        return 0
    for end, found in enumerate(_name_contents(contents), start=1):
        if found == name:
            return end
    return 0


def _move_files(
    content: types.Content, mover: MediaMover
) -> tuple[list[types.Part], list[str]]:
    """Returns the images and files of a content, and words in place of some of them."""
    is_users = content.role == "user"
    moved, told = mover.split(media_parts(content), is_users=is_users)
    for part in parts_of(content):
        if part.function_response:
            files, words = mover.split(result_media(part.function_response))
            moved += files
            told += words
    return moved, told


def _join_neighbors(
    contents: Sequence[types.Content], messages: Sequence[types.Content]
) -> list[types.Content]:
    """Makes neighbors one: messages of the user, and results of parallel calls.

    Those that were neighbors among the messages stay apart. Empty texts go.
    """
    places = {id(content): place for place, content in enumerate(messages)}
    turns: list[types.Content] = []
    for content in contents:
        parts = [p for p in parts_of(content) if p.text != "" or p.thought_signature]
        if not parts:
            continue

        before = turns[-1] if turns else types.Content()
        were_neighbors = places.get(id(before), -2) + 1 == places.get(id(content))
        if _are_alike(before, content) and not were_neighbors:
            turns[-1] = with_parts(content, [*parts_of(before), *parts])
        else:
            turns.append(with_parts(content, parts))
    return turns


def _are_alike(before: types.Content, content: types.Content) -> bool:
    """Whether both are messages of the user, or both carry results."""
    is_users = before.role == content.role == "user"
    return is_users and is_message(before) == is_message(content)


def _sign_calls(
    contents: Sequence[types.Content], refused_end: int
) -> list[types.Content]:
    """Gives the first call of each step of the running turn a signature.

    Calls before `refused_end` were refused, so that they lose their own.
    """
    signed = list(contents)
    for index in range(find_running_turn(contents), len(contents)):
        parts = list(contents[index].parts or ())
        calls = [
            place for place, part in enumerate(parts) if part and part.function_call
        ]
        if not calls:
            continue

        first = parts[calls[0]]
        if index < refused_end or not first.thought_signature:
            update = {"thought_signature": _DUMMY_SIGNATURE}
            parts[calls[0]] = first.model_copy(update=update)
            signed[index] = with_parts(contents[index], parts)
    return signed
