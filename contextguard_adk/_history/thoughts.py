"""Signed thoughts in contents: their names, and what stands before them.

A provider signs a thought of its model, and may check it when it is sent back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from google.genai import types

from contextguard_adk._history.contents import parts_of, with_parts
from contextguard_adk._history.fingerprints import fingerprint
from contextguard_adk._measuring.tokens import Memo


def is_signed(part: types.Part) -> bool:
    """Returns whether a part is a thought with a signature."""
    return bool(part.thought and part.thought_signature)


def find_signed(content: types.Content | None) -> list[types.Part]:
    """Returns the signed thoughts of a content."""
    return [part for part in parts_of(content) if is_signed(part)]


def name_thoughts(content: types.Content) -> str:
    """Returns a digest of the signatures of a content's thoughts; "" for none."""
    signatures = [part.thought_signature or b"" for part in find_signed(content)]
    return digest(signatures) if signatures else ""


def newest_thoughts(contents: Sequence[types.Content]) -> str:
    """Names the newest signed thoughts in contents; "" where there are none."""
    # Most requests hold none, and calling for each part would double the time.
    for content in reversed(contents):
        for part in content.parts or ():
            if part and part.thought and part.thought_signature:
                return name_thoughts(content)
    return ""


def change_thoughts(
    content: types.Content, change: Callable[[types.Part], types.Part | None]
) -> types.Content | None:
    """Changes or drops each thought of a content; None if nothing is left."""
    parts: list[types.Part] = []
    for part in parts_of(content):
        changed = change(part) if part.thought else part
        if changed is not None:
            parts.append(changed)

    is_emptied = not parts and bool(parts_of(content))
    return None if is_emptied else with_parts(content, parts)


def digest_before(contents: Sequence[types.Content], memo: Memo) -> Iterator[str]:
    """Yields for each content a digest of what stands before its last signed thought.

    Thoughts themselves do not count.
    """
    running = hashlib.blake2b(digest_size=6)
    for content in contents:
        parts = parts_of(content)
        signed = [place for place, part in enumerate(parts) if is_signed(part)]
        last = signed[-1] if signed else 0

        before = running.copy()
        before.update(_spell_message(content.role, parts[:last], memo))
        yield before.hexdigest()
        running.update(_spell_message(content.role, parts, memo))


def _spell_message(role: str | None, parts: Sequence[types.Part], memo: Memo) -> bytes:
    """Fingerprints a message without its thoughts; of thoughts alone it is empty."""
    said = [part for part in parts if not is_signed(part)]
    if not said:
        return b""

    ids: list[str] = []
    for part in said:
        tool = part.function_call or part.function_response
        if tool:
            ids.append(tool.id or "")
    content = types.Content.model_construct(role=role, parts=said)
    return memo.remember(fingerprint, content, said, role) + ",".join(ids).encode()


def digest(said: Iterable[bytes]) -> str:
    """Returns a short digest of several texts; it tells where each of them ends."""
    spelled = b"".join(b"%d:%b" % (len(each), each) for each in said)
    return hashlib.blake2b(spelled, digest_size=6).hexdigest()
