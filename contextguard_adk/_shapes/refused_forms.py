"""Gives a history another form after its provider has refused its first form.

A remedy is a form that the provider accepted. Session state keeps the remedies, in
`AgentRecord.helped`, so that later requests have the same form. They have these keys
and values:

- `flat`: The refused contents become one text. The value is the name of the last one.
- `shape`: User and model speak in turn. The value is "in turn".
- `signed`: The calls in the refused contents get another signature. The value is the
  name of the last one.

A function `help_…` is called with a refusal: a word such as "shape" or "signatures". It
returns all remedies of the session with its own added, or None if its form does not
help against this refusal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

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
    moved are described in the transcript. Contents after the refused ones stay.
    """
    remedies = turn.record.helped or {}
    refused_count = _count_up_to(contents, remedies.get("flat", ""))
    if refused_count == 0:
        return contents

    entries = render_entries(contents, range(refused_count))
    paragraphs = [f"{SYSTEM}The conversation so far, as text.]"]
    paragraphs += [entry.text for entry in entries]
    files: list[types.Part] = []
    for content in contents[:refused_count]:
        moved_files, descriptions = _move_files(content, turn.media_mover)
        files += moved_files
        paragraphs += descriptions
    paragraphs.append(f"{SYSTEM}Continue with the newest request of the user above.]")

    transcript = types.Part(text="\n\n".join(paragraphs))
    message = types.Content(role="user", parts=[transcript, *files])
    return join_messages([message], contents[refused_count:])


def help_as_text(
    turn: Turn, refusal: str, contents: Sequence[types.Content]
) -> dict[str, str]:
    """Adds the remedy `flat`, which helps against any refusal."""
    remedies = turn.record.helped or {}
    return {**remedies, "flat": _name_last(contents)}


def take_turns(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Has user and model speak in turn, and answers each call.

    Some chat templates refuse any other order.
    """
    answered = answer_open_calls(contents)
    ordered = put_in_order(answered, turn.media_mover)
    return _join_neighbors(ordered, originals=())


def help_take_turns(
    turn: Turn, refusal: str, contents: Sequence[types.Content]
) -> dict[str, str] | None:
    """Adds the remedy `shape` against a refusal of the order of messages.

    Returns None if the session has this remedy already: then it did not help.
    """
    remedies = turn.record.helped or {}
    is_in_use = bool(remedies.get("shape"))
    if refusal != "shape" or is_in_use:
        return None
    return {**remedies, "shape": "in turn"}


def join_own_messages(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Joins messages of the user that the guard has made neighbors."""
    ordered = put_in_order(contents, turn.media_mover)
    return _join_neighbors(ordered, originals=turn.messages)


def sign_refused_calls(
    turn: Turn, contents: list[types.Content]
) -> list[types.Content]:
    """Replaces the signatures of calls that were refused."""
    remedies = turn.record.helped or {}
    refused_count = _count_up_to(contents, remedies.get("signed", ""))
    if refused_count == 0:
        return contents
    return _sign_calls(contents, refused_count)


def sign_calls(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Gives a signature to calls that have none."""
    return _sign_calls(contents, refused_count=0)


def help_sign_calls(
    turn: Turn, refusal: str, contents: Sequence[types.Content]
) -> dict[str, str] | None:
    """Adds the remedy `signed` against a refusal of the signatures of calls."""
    if refusal != "signatures":
        return None
    remedies = turn.record.helped or {}
    return {**remedies, "signed": _name_last(contents)}


def _name_last(contents: Sequence[types.Content]) -> str:
    """Returns the name of the last refused content that later requests will have too.

    This is the newest content with a tool's result, else the newest content. A content
    after a result may belong to this request alone, such as an instruction that ADK
    moves along. Returns "" for no contents.
    """
    names = list(_name_contents(contents))
    result_names = [
        name
        for name, content in zip(names, contents, strict=True)
        if has_function_response(content)
    ]
    if result_names:
        return result_names[-1]
    return names[-1] if names else ""


def _name_contents(contents: Sequence[types.Content]) -> Iterator[str]:
    """Yields a name for each content: its fingerprint, and its number among equal ones.

    For example, the second content that says "yes" is named "0f3a5b7c9d1e.2".
    """
    counts = Counter[str]()
    # A later shape joins the texts in a content. All contents are named in the joined
    # form, so that a content has the same name before that shape and after it.
    for content in join_new_texts(contents, ()):
        digest = fingerprint(content).hex()
        counts[digest] += 1
        yield f"{digest}.{counts[digest]}"


def _count_up_to(contents: Sequence[types.Content], last_name: str) -> int:
    """Returns how many contents there are up to the one with this name, inclusive.

    The result is 0 for the name "", and if no content has the name.
    """
    if not last_name:
        return 0
    for count, name in enumerate(_name_contents(contents), start=1):
        if name == last_name:
            return count
    return 0


def _move_files(
    content: types.Content, mover: MediaMover
) -> tuple[list[types.Part], list[str]]:
    """Returns the files of a content that may be moved, and words about the others.

    Images count as files. More kinds of files may be moved if the user has sent them,
    because the provider has accepted them in a message before.
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
    contents: Sequence[types.Content], originals: Sequence[types.Content]
) -> list[types.Content]:
    """Joins neighboring messages of the user, and neighboring contents with results.

    Empty texts are left out.

    Args:
        contents: The contents to join.
        originals: The contents of the request before the guard has changed them.
            Contents that were neighbors there are not joined.
    """
    original_indexes = {id(content): index for index, content in enumerate(originals)}
    joined: list[types.Content] = []
    for content in contents:
        # A part with an empty text may be there only for its signature.
        parts = [
            part
            for part in parts_of(content)
            if part.text != "" or part.thought_signature
        ]
        if not parts:
            continue

        if joined and _should_join(joined[-1], content, original_indexes):
            joined[-1] = with_parts(content, [*parts_of(joined[-1]), *parts])
        else:
            joined.append(with_parts(content, parts))
    return joined


def _should_join(
    previous: types.Content, content: types.Content, original_indexes: Mapping[int, int]
) -> bool:
    """Whether two neighbors are alike, and were no neighbors in the original request.

    They are alike if both are messages of the user, or both carry results.

    Args:
        previous: The first of both contents.
        content: The second.
        original_indexes: The index of each original content, by `id()`.
    """
    # Results have the role "user" as well.
    have_role_user = previous.role == "user" and content.role == "user"
    are_alike = have_role_user and is_message(previous) == is_message(content)

    previous_index = original_indexes.get(id(previous))
    index = original_indexes.get(id(content))
    were_neighbors = previous_index is not None and index == previous_index + 1
    return are_alike and not were_neighbors


def _sign_calls(
    contents: Sequence[types.Content], refused_count: int
) -> list[types.Content]:
    """Gives a signature to the first call of each content in the running turn.

    Gemini wants only this call signed if a content has parallel calls. A call keeps its
    own signature, unless that was refused.

    Args:
        contents: The contents of the request.
        refused_count: The signatures in so many of the first contents were refused.
    """
    signed = list(contents)
    for content_index in range(find_running_turn(contents), len(contents)):
        parts = list(contents[content_index].parts or ())
        call_indexes = [
            part_index
            for part_index, part in enumerate(parts)
            if part and part.function_call
        ]
        if not call_indexes:
            continue

        first_call = parts[call_indexes[0]]
        is_refused = content_index < refused_count
        keeps_signature = first_call.thought_signature and not is_refused
        if keeps_signature:
            continue

        update = {"thought_signature": _DUMMY_SIGNATURE}
        parts[call_indexes[0]] = first_call.model_copy(update=update)
        signed[content_index] = with_parts(contents[content_index], parts)
    return signed
