"""Signed thoughts in contents: their names, and digests of the contents before them.

A provider signs a thought of its model. When the thought is sent back, the provider may
check the signature, and whether the contents before the thought are unchanged.
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
    """Returns a digest of the signatures of a content's thoughts; "" without any."""
    signatures = [part.thought_signature or b"" for part in find_signed(content)]
    return digest(signatures) if signatures else ""


def newest_thoughts(contents: Sequence[types.Content]) -> str:
    """Returns `name_thoughts` of the newest content with signed thoughts.

    Returns "" if no content has signed thoughts.

    All contents of each request may be searched. So the code of `is_signed` and
    `parts_of` is repeated here: calls of these functions would double the time.
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
        change: Returns the new part for a thought; None to drop the thought. The
            thought may have a signature or not.

    Returns:
        - A copy with the new parts.
        - The content itself, if no part changes.
        - None, if all its parts are dropped.
    """
    new_parts: list[types.Part] = []
    for part in parts_of(content):
        new_part = change(part) if part.thought else part
        if new_part is not None:
            new_parts.append(new_part)

    # A content that had no part before stays.
    is_emptied = not new_parts and bool(parts_of(content))
    return None if is_emptied else with_parts(content, new_parts)


def digest_before(contents: Sequence[types.Content], memo: Memo) -> Iterator[str]:
    """Yields for each content a digest of what stands before its last signed thought.

    These are the earlier contents, and the parts of the content before the thought. If
    the content has no signed thought, the digest is of the earlier contents alone. The
    digests do not depend on signed thoughts.
    """
    earlier_contents = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for content in contents:
        parts = parts_of(content)
        last_signed = 0  # Without a signed thought, no part of the content counts.
        for position, part in enumerate(parts):
            if is_signed(part):
                last_signed = position
        parts_before = parts[:last_signed]

        before_thought = earlier_contents.copy()
        before_thought.update(_spell_message(content.role, parts_before, memo))
        yield before_thought.hexdigest()

        earlier_contents.update(_spell_message(content.role, parts, memo))


def _spell_message(role: str | None, parts: Sequence[types.Part], memo: Memo) -> bytes:
    """Returns the bytes of a message for a digest, without its signed thoughts.

    The bytes are the fingerprint of the message and the ids of its calls and results: a
    fingerprint does not depend on ids. Returns b"" if no part but signed thoughts is
    left.
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
    # Each text stands after its length: "2:ab1:c" and "1:a2:bc".
    spelled = b"".join(b"%d:%b" % (len(text), text) for text in texts)
    return hashlib.blake2b(spelled, digest_size=_DIGEST_BYTES).hexdigest()
