"""Signed thoughts in contents: their names, and digests of the contents before them.

A provider signs a thought of its model, and may check the signature when the thought is
sent back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from google.genai import types

from contextguard_adk._history.contents import parts_of, with_parts
from contextguard_adk._history.fingerprints import fingerprint
from contextguard_adk._measuring.tokens import Memo

_DIGEST_BYTES = 6
"""The size of a digest: session state has room for only a few bytes."""


def is_signed(part: types.Part) -> bool:
    """Whether a part is a thought with a signature."""
    return bool(part.thought and part.thought_signature)


def find_signed(content: types.Content | None) -> list[types.Part]:
    """Returns the signed thoughts of a content."""
    return [part for part in parts_of(content) if is_signed(part)]


def name_thoughts(content: types.Content) -> str:
    """Returns a digest of the signatures of a content's thoughts; "" for none."""
    signatures = [part.thought_signature or b"" for part in find_signed(content)]
    return digest(signatures) if signatures else ""


def newest_thoughts(contents: Sequence[types.Content]) -> str:
    """Returns `name_thoughts` of the newest content with signed thoughts; "" if none.

    Each request is searched, and most have no thoughts. So `is_signed` and `parts_of`
    are written out here: to call them would double the time.
    """
    for content in reversed(contents):
        for part in content.parts or ():
            if part and part.thought and part.thought_signature:
                return name_thoughts(content)
    return ""


def change_thoughts(
    content: types.Content, change: Callable[[types.Part], types.Part | None]
) -> types.Content | None:
    """Replaces each thought of a content by the result of `change`.

    Args:
        content: The content.
        change: Returns the new part for a thought; None to drop the thought.

    Returns:
        The changed content; the content itself if nothing changes, None if no part is
        left.
    """
    new_parts: list[types.Part] = []
    for part in parts_of(content):
        new_part = change(part) if part.thought else part
        if new_part is not None:
            new_parts.append(new_part)

    is_emptied = not new_parts and bool(parts_of(content))
    return None if is_emptied else with_parts(content, new_parts)


def digest_before(contents: Sequence[types.Content], memo: Memo) -> Iterator[str]:
    """Yields for each content a digest of all parts before its last signed thought.

    The parts of the earlier contents count as well. If the content has no signed
    thought, only the earlier contents count. Signed thoughts are left out.
    """
    digest_so_far = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for content in contents:
        parts = parts_of(content)
        thought_offset = 0
        for offset, part in enumerate(parts):
            if is_signed(part):
                thought_offset = offset
        parts_before = parts[:thought_offset]

        digest_before_thought = digest_so_far.copy()
        digest_before_thought.update(_spell_message(content.role, parts_before, memo))
        yield digest_before_thought.hexdigest()

        digest_so_far.update(_spell_message(content.role, parts, memo))


def _spell_message(role: str | None, parts: Sequence[types.Part], memo: Memo) -> bytes:
    """Returns the fingerprint of a message, followed by the ids of its tool calls.

    The ids are spelled because a fingerprint does not contain them. Signed thoughts are
    left out; a message that has nothing else is b"".
    """
    unsigned = [part for part in parts if not is_signed(part)]
    if not unsigned:
        return b""

    tool_ids: list[str] = []
    for part in unsigned:
        call_or_result = part.function_call or part.function_response
        if call_or_result:
            tool_ids.append(call_or_result.id or "")

    message = types.Content.model_construct(role=role, parts=unsigned)
    message_fingerprint = memo.remember(fingerprint, message, unsigned, role)
    return message_fingerprint + ",".join(tool_ids).encode()


def digest(texts: Iterable[bytes]) -> str:
    """Returns a short digest of several texts; ("ab", "c") and ("a", "bc") differ."""
    # With the length before each text, such as "2:ab1:c".
    spelled = b"".join(b"%d:%b" % (len(text), text) for text in texts)
    return hashlib.blake2b(spelled, digest_size=_DIGEST_BYTES).hexdigest()
