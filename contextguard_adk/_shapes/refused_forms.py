"""Gives contents another form after their provider has refused the first form.

A remedy is a form that the provider accepts. Session state keeps the remedies, in
`AgentRecord.helped`, so that later requests have the same form. A remedy has one of
these keys:

- `flat`: The refused contents become one text. The value is the name of the last
  refused content.
- `shape`: User and model speak in turn. The value is "in turn".
- `signed`: The calls in the refused contents get another signature. The value is the
  name of the last refused content.

Each function `help_…` decides on one remedy after a refusal:

- The argument `refusal` is the kind of the refusal, such as "shape" or "signatures".
- The argument `contents` has the contents that were refused.
- The result is a dict of all remedies of the session, with this remedy added. It is
  None if this remedy does not help against the refusal.
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
"""Gemini accepts this signature for calls that another model has made.

Gemini's documentation names it.
"""


def tell_as_text(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Puts the contents that were refused into one message of the user.

    The message is a transcript of these contents, followed by their images and files.
    Files that may not be moved are described in the transcript. Contents after the
    refused ones stay. Messages of the user that follow directly are joined with the new
    message.

    Returns `contents` itself if the session has no such remedy, or if the last refused
    content is gone.
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
    """Adds the remedy `flat`, which helps against any refusal of a form.

    It is tried last, because it changes most.
    """
    remedies = turn.record.helped or {}
    return {**remedies, "flat": _name_last(contents)}


def take_turns(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Has user and model speak in turn, and adds a result to each open call.

    An open call is one without a result. Some chat templates refuse any other order.
    """
    answered = answer_open_calls(contents)
    ordered = put_in_order(answered, turn.media_mover)
    return _join_neighbors(ordered, originals=())


def help_take_turns(
    turn: Turn, refusal: str, contents: Sequence[types.Content]
) -> dict[str, str] | None:
    """Adds the remedy `shape` against a refusal of the order of messages.

    If the session has this remedy already, the refused contents had this form. So the
    remedy did not help, and the result is None.
    """
    remedies = turn.record.helped or {}
    is_in_use = bool(remedies.get("shape"))
    if refusal != "shape" or is_in_use:
        return None
    return {**remedies, "shape": "in turn"}


def join_own_messages(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Joins messages of the user, and results, that only the guard has made neighbors.

    A compaction makes neighbors if it removes the contents between them.
    """
    ordered = put_in_order(contents, turn.media_mover)
    return _join_neighbors(ordered, originals=turn.messages)


def sign_refused_calls(
    turn: Turn, contents: list[types.Content]
) -> list[types.Content]:
    """Replaces the refused signatures of calls in the running turn.

    Calls without a signature get one as well. Returns `contents` itself if no signature
    was refused, or if the last refused content is gone.
    """
    remedies = turn.record.helped or {}
    refused_count = _count_up_to(contents, remedies.get("signed", ""))
    if refused_count == 0:
        return contents
    return _sign_calls(contents, refused_count)


def sign_calls(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Gives a signature to calls in the running turn that have none."""
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

    - If there are results of tools: the newest content with a result. ADK may put an
      instruction behind a result, and the next request has this instruction at another
      place.
    - If there is no result: the newest content.
    - If there are no contents: the name is "".
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
    """Yields a name for each content.

    The name is the fingerprint of the content, with its number among equal contents.
    For example, the second content that says "yes" is named "0f3a5b7c9d1e.2".
    """
    counts = Counter[str]()
    # A content must have the same name in the refused request and in a later one. A
    # shape has joined the texts in each refused content, but not yet in the contents of
    # a later request. So all contents are named in the joined form.
    for content in join_new_texts(contents, messages=()):
        digest = fingerprint(content).hex()
        counts[digest] += 1
        yield f"{digest}.{counts[digest]}"


def _count_up_to(contents: Sequence[types.Content], last_name: str) -> int:
    """Counts the contents from the first one up to the content with this name.

    The content with the name is counted as well. The result is 0 if no content has the
    name, or if the name is "".
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
    """Finds the images and files of a content that may move into a message of the user.

    The user's own files may move unless the provider is known to refuse their kind: the
    user has sent them in a message before. Other files may move only if the provider is
    known to accept their kind.

    Returns:
        Two values:
        - The files that may move.
        - A description of each other file.
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
        originals: The contents of the request before the guard changed it. Neighbors
            that were neighbors there stay apart, because the guard did not bring them
            together. With () all neighbors are joined.
    """
    # Unchanged contents are the same objects as in the original request. A content that
    # the guard has made or changed, here or before, has no original neighbors.
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
    """Whether two neighbors are of the same kind, and were not neighbors originally.

    They are of the same kind if both are messages of the user, or both have results.

    Args:
        previous: The first content.
        content: The second content.
        original_indexes: The index of each content in the original request, by `id()`.
            A content that the guard has made or changed has no index.
    """
    # Results have the role "user" as well.
    have_role_user = previous.role == "user" and content.role == "user"
    are_same_kind = have_role_user and is_message(previous) == is_message(content)

    previous_index = original_indexes.get(id(previous))
    index = original_indexes.get(id(content))
    were_neighbors = previous_index is not None and index == previous_index + 1
    return are_same_kind and not were_neighbors


def _sign_calls(
    contents: Sequence[types.Content], refused_count: int
) -> list[types.Content]:
    """Gives a signature to the first call of each content in the running turn.

    Gemini checks only the running turn, and only the first of parallel calls. A call
    keeps its own signature, unless this signature was refused.

    Args:
        contents: The contents of the request.
        refused_count: How many contents, from the first on, have refused signatures.
    """
    signed = list(contents)
    for content_index in range(find_running_turn(contents), len(contents)):
        parts = list(contents[content_index].parts or ())
        call_positions = [
            part_position
            for part_position, part in enumerate(parts)
            if part and part.function_call
        ]
        if not call_positions:
            continue

        first_call = parts[call_positions[0]]
        is_refused = content_index < refused_count
        keeps_signature = first_call.thought_signature and not is_refused
        if keeps_signature:
            continue

        update = {"thought_signature": _DUMMY_SIGNATURE}
        parts[call_positions[0]] = first_call.model_copy(update=update)
        signed[content_index] = with_parts(contents[content_index], parts)
    return signed
