"""Gives a history another form after its provider has refused its first form.

Each form is a remedy. The remedies that have helped are kept in session state, so that
later requests begin with the same bytes. They have these names:

- `flat`: The history is one text. The value names its last content.
- `shape`: User and model speak in turn. The value is "in turn".
- `signed`: Calls have another signature. The value names the last content with refused
  ones.

A function `help_…` returns all remedies of the session, its own included. It returns
None if its form does not help against a refusal.
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
    """Puts the contents that were refused into one message of the user.

    The message is a transcript, followed by the images and files. Files that may not be
    moved are described in the transcript. Later contents stay.
    """
    remedies = turn.record.helped or {}
    end = _find_end(contents, remedies.get("flat", ""))
    if not end:
        return contents

    paragraphs = [f"{SYSTEM}The conversation so far, as text.]"]
    paragraphs += [entry.text for entry in render_entries(contents, range(end))]
    files: list[types.Part] = []
    for content in contents[:end]:
        moved_files, descriptions = _move_files(content, turn.media_mover)
        files += moved_files
        paragraphs += descriptions
    paragraphs.append(f"{SYSTEM}Continue with the newest request of the user above.]")

    transcript = types.Part(text="\n\n".join(paragraphs))
    message = types.Content(role="user", parts=[transcript, *files])
    return join_messages([message], contents[end:])


def help_as_text(
    turn: Turn, refusal: str, contents: Sequence[types.Content]
) -> dict[str, str]:
    """Helps against any refusal: all of these contents become one text."""
    remedies = turn.record.helped or {}
    return {**remedies, "flat": _name_end(contents)}


def take_turns(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Has user and model speak in turn, and answers each call.

    Some chat templates refuse any other order.
    """
    answered = answer_open_calls(contents)
    return _join_neighbors(put_in_order(answered, turn.media_mover), messages=())


def help_take_turns(
    turn: Turn, refusal: str, contents: Sequence[types.Content]
) -> dict[str, str] | None:
    """Helps once against refusals of the order of messages."""
    remedies = turn.record.helped or {}
    if refusal != "shape" or remedies.get("shape"):
        return None
    return {**remedies, "shape": "in turn"}


def join_own_messages(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Joins messages of the user that the guard has made neighbors."""
    ordered = put_in_order(contents, turn.media_mover)
    return _join_neighbors(ordered, turn.messages)


def sign_refused_calls(
    turn: Turn, contents: list[types.Content]
) -> list[types.Content]:
    """Replaces the signatures of calls that were refused."""
    remedies = turn.record.helped or {}
    end = _find_end(contents, remedies.get("signed", ""))
    return _sign_calls(contents, refused_end=end) if end else contents


def sign_calls(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Gives a signature to calls that have none."""
    return _sign_calls(contents, refused_end=0)


def help_sign_calls(
    turn: Turn, refusal: str, contents: Sequence[types.Content]
) -> dict[str, str] | None:
    """Helps against refusals of the signatures of calls."""
    if refusal != "signatures":
        return None
    remedies = turn.record.helped or {}
    return {**remedies, "signed": _name_end(contents)}


def _name_end(contents: Sequence[types.Content]) -> str:
    """Returns the name of the newest content with a result, else of the newest content.

    It is "" for no contents.
    """
    names = list(_name_contents(contents))
    if not names:
        return ""

    result_indexes = [
        index
        for index, content in enumerate(contents)
        if has_function_response(content)
    ]
    return names[result_indexes[-1]] if result_indexes else names[-1]


def _name_contents(contents: Sequence[types.Content]) -> Iterator[str]:
    """Yields a name for each content: its fingerprint, and its number among equal ones.

    A later shape may join the texts of a content. The name stays the same.
    """
    counts = Counter[str]()
    for content in join_new_texts(contents, ()):
        digest = fingerprint(content).hex()
        counts[digest] += 1
        yield f"{digest}.{counts[digest]}"


def _find_end(contents: Sequence[types.Content], last_name: str) -> int:
    """Returns how many contents there are up to the one with this name, inclusive.

    It is 0 if no content has this name.
    """
    if not last_name:
        return 0
    for end, name in enumerate(_name_contents(contents), start=1):
        if name == last_name:
            return end
    return 0


def _move_files(
    content: types.Content, mover: MediaMover
) -> tuple[list[types.Part], list[str]]:
    """Returns the files of a content that may be moved, and words about the others.

    Images count as files.
    """
    is_users = content.role == "user"
    moved_files, descriptions = mover.split(media_parts(content), is_users=is_users)
    for part in parts_of(content):
        if part.function_response:
            result_files = result_media(part.function_response)
            moved_result_files, result_descriptions = mover.split(result_files)
            moved_files += moved_result_files
            descriptions += result_descriptions
    return moved_files, descriptions


def _join_neighbors(
    contents: Sequence[types.Content], messages: Sequence[types.Content]
) -> list[types.Content]:
    """Joins neighboring messages of the user, and neighboring contents with results.

    Empty texts are left out.

    Args:
        contents: The contents to join.
        messages: The contents of the request as other code has made it. Contents that
            were neighbors there are not joined.
    """
    message_indexes = {id(message): index for index, message in enumerate(messages)}
    joined: list[types.Content] = []
    for content in contents:
        parts = [
            part
            for part in parts_of(content)
            if part.text != "" or part.thought_signature
        ]
        if not parts:
            continue

        if not joined:
            joined.append(with_parts(content, parts))
            continue

        previous = joined[-1]
        previous_index = message_indexes.get(id(previous))
        index = message_indexes.get(id(content))
        were_neighbors = previous_index is not None and index == previous_index + 1
        if _are_alike(previous, content) and not were_neighbors:
            joined[-1] = with_parts(content, [*parts_of(previous), *parts])
        else:
            joined.append(with_parts(content, parts))
    return joined


def _are_alike(first: types.Content, second: types.Content) -> bool:
    """Whether both are messages of the user, or both carry results."""
    # Results have the role "user" as well.
    have_role_user = first.role == "user" and second.role == "user"
    return have_role_user and is_message(first) == is_message(second)


def _sign_calls(
    contents: Sequence[types.Content], refused_end: int
) -> list[types.Content]:
    """Gives a signature to the first call of each content in the running turn.

    Of parallel calls, which stand in one content, Gemini wants only the first signed.

    Args:
        contents: The contents of the request.
        refused_end: Calls in contents before this index lose their own signature, which
            was refused. Later calls keep theirs.
    """
    signed = list(contents)
    for content_index in range(find_running_turn(contents), len(contents)):
        content = contents[content_index]
        parts = list(content.parts or ())
        call_indexes = [
            part_index
            for part_index, part in enumerate(parts)
            if part and part.function_call
        ]
        if not call_indexes:
            continue

        first_index = call_indexes[0]
        first_call = parts[first_index]
        if content_index < refused_end or not first_call.thought_signature:
            update = {"thought_signature": _DUMMY_SIGNATURE}
            parts[first_index] = first_call.model_copy(update=update)
            signed[content_index] = with_parts(content, parts)
    return signed
