"""Which contents a summary covers: fingerprints, their storage, their alignment.

A summary covers contents, not positions: ADK moves instructions, merges late tool
results, and may load only a part of a session. So the fingerprints of what was
summarised are stored, and aligned in order with the contents of each request.

The stored form is one base64 string. The newest `RECENT_COUNT` fingerprints stand
in it one by one; older ones as digests of blocks of `BLOCK_COUNT`, which are joined
pairwise, oldest first, when there are more than `MAX_BLOCKS`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from difflib import SequenceMatcher

import pydantic_core
from google.genai import types

FINGERPRINT_BYTES = 6
"""48 bits of blake2b. A checksum would not do: a tool result could be made to
collide with another content and so be hidden from the model."""

HANDLE_CHARS = 10
"""Hex digits of a handle."""

BLOCK_COUNT = 32
RECENT_COUNT = 512
MAX_BLOCKS = 192
_DIGEST_BYTES = 8
MAX_SHIFT = 64
"""How many contents added or removed are looked past when a block is lost."""

_MAX_MATCHER_CELLS = 600_000
_LARGE_FLOAT = re.compile(r"\de\+\d")
_NUMBER_AS_KEY = re.compile(r'"[-0-9][-0-9.e]*":')
_BLOCK = struct.Struct(f"<B{_DIGEST_BYTES}s")
_VERSION = 1


@dataclass(frozen=True)
class Covered:
    """Fingerprints of the contents that a summary stands for, in order.

    Attributes:
        blocks: `(level, digest)` of runs of `BLOCK_COUNT << level` contents.
        recent: Fingerprints of the contents after the blocks.
    """

    blocks: tuple[tuple[int, bytes], ...] = ()
    recent: tuple[bytes, ...] = ()

    @property
    def content_count(self) -> int:
        """The number of contents that are covered."""
        return sum(BLOCK_COUNT << level for level, _ in self.blocks) + len(self.recent)


def fingerprint(content: types.Content) -> bytes:
    """Returns a short digest of what a content says.

    Call ids and thought signatures are left out: ADK strips some ids, and neither
    is part of what was said. JSON is canonical, because a JSONB column reorders
    keys.
    """
    digest = hashlib.blake2b(
        _framed(_utf8(content.role)), digest_size=FINGERPRINT_BYTES
    )
    for part in content.parts or ():
        if part is not None:
            digest.update(_spell_part(part))
    return digest.digest()


def handle_of(part: types.Part) -> str:
    """Returns a name for what a part says: a short digest in hex.

    It stays the same over rewinds, restarts and databases, and needs no table.
    """
    digest = hashlib.blake2b(_spell_part(part), digest_size=FINGERPRINT_BYTES)
    return digest.hexdigest()[:HANDLE_CHARS]


def _spell_part(part: types.Part) -> bytes:
    """Writes what a part says, its kind first, so that kinds cannot be confused."""
    if part.text:
        return _spell(b"t", _utf8(part.text))
    if call := part.function_call:
        return _spell(b"c", _utf8(call.name), _canonical_json(call.args))
    if answer := part.function_response:
        media = answer.parts or []
        said = _spell(b"r", _utf8(answer.name), _canonical_json(answer.response))
        return b"".join([said, _spell(b"%d" % len(media)), *map(_spell_media, media)])
    if part.inline_data or part.file_data:
        return _spell_media(part)
    fields = part.model_dump(
        exclude_none=True, exclude={"thought_signature"}, warnings=False
    )
    return _spell(b"o", _canonical_json(fields))


def _spell_media(part: types.Part | types.FunctionResponsePart) -> bytes:
    if part.inline_data:
        blob = part.inline_data
        return _spell(b"i", _utf8(blob.mime_type), blob.data or b"")
    if part.file_data:
        return _spell(b"f", _utf8(part.file_data.file_uri))
    return b""


def _spell(kind: bytes, *fields: bytes) -> bytes:
    return kind + b"".join(map(_framed, fields))


def _framed(field: bytes) -> bytes:
    """A field behind its length, so that one cannot pass for several."""
    return b"%d:%b" % (len(field), field)


def _utf8(text: str | None) -> bytes:
    return (text or "").encode("utf-8", "surrogatepass")


def _canonical_json(value: object) -> bytes:
    """Serialises any value, the same before and after a database has stored it."""
    try:
        text = _sorted_json(value)
        return _utf8(_sorted_json(_as_stored(value)) if _may_alter(text) else text)
    except (TypeError, ValueError, RecursionError):
        # Mixed key types, cycles, nesting beyond the recursion limit. The fallback
        # need not survive a round trip: what does not match is sent again.
        return _flat_bytes(value)


def _sorted_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=_jsonable)


def _may_alter(text: str) -> bool:
    """Tells whether JSON may have something in it that `_as_stored` changes."""
    # One pattern for all three takes ten times as long as texts that are looked for.
    if "-0.0" in text or ("e+" in text and _LARGE_FLOAT.search(text)):
        return True
    return _NUMBER_AS_KEY.search(text) is not None


def _as_stored(value: object) -> object:
    """JSONB turns 1e22 into an integer and -0.0 into 0.0, any JSON keys into texts."""
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else json.dumps(key): _as_stored(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_as_stored(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        if not value:
            return 0.0
        return int(Decimal(repr(value))) if abs(value) >= 1e16 else value
    return value


def _jsonable(value: object) -> object:
    return pydantic_core.to_jsonable_python(value, fallback=lambda other: repr(other))


def _flat_bytes(value: object) -> bytes:
    """Walks a value without recursion, every container in it once."""
    digest = hashlib.blake2b()
    waiting: list[object] = [value]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict | list | tuple):
            is_new = id(node) not in seen
            seen.add(id(node))
            kind = b"{" if isinstance(node, dict) else b"["
            digest.update(kind + b"%d%d:" % (is_new, len(node)))
            if is_new and isinstance(node, dict):
                waiting.extend(node.keys())
                waiting.extend(node.values())
            elif is_new:
                waiting.extend(node)
        elif type(node) is int:
            digest.update(b"%x," % node)  # Python refuses to print long ones.
        else:
            digest.update(_utf8(repr(node)) + b",")
    return digest.digest()


def cover(fingerprints: Sequence[bytes]) -> Covered:
    """Builds the covered set of contents from their fingerprints, oldest first."""
    older = max(0, len(fingerprints) - RECENT_COUNT)
    older -= older % BLOCK_COUNT
    blocks = [
        (0, _digest(fingerprints[start : start + BLOCK_COUNT]))
        for start in range(0, older, BLOCK_COUNT)
    ]
    return Covered(tuple(_join(blocks)), tuple(fingerprints[older:]))


def _join(blocks: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Joins neighbours of the same level, oldest first, down to `MAX_BLOCKS`."""
    while len(blocks) > MAX_BLOCKS:
        counts = Counter(level for level, _ in blocks)
        level = min(level for level, count in counts.items() if count > 1)
        joined: list[tuple[int, bytes]] = []
        position = 0
        while position < len(blocks):
            pair = blocks[position : position + 2]
            too_many = len(blocks) - position + len(joined) > MAX_BLOCKS
            if too_many and len(pair) == 2 and pair[0][0] == pair[1][0] == level:
                joined.append((level + 1, _digest([pair[0][1], pair[1][1]])))
                position += 2
            else:
                joined.append(pair[0])
                position += 1
        blocks = joined
    return blocks


def _digest(pieces: Sequence[bytes]) -> bytes:
    return hashlib.blake2b(b"".join(pieces), digest_size=_DIGEST_BYTES).digest()


def encode_covered(covered: Covered) -> str:
    """Writes a covered set as one base64 string, about 9 KB at most."""
    head = struct.pack("<BHH", _VERSION, len(covered.blocks), len(covered.recent))
    body = b"".join(_BLOCK.pack(level, digest) for level, digest in covered.blocks)
    return base64.b64encode(head + body + b"".join(covered.recent)).decode()


def decode_covered(stored: str) -> Covered:
    """Reads what `encode_covered` wrote.

    Raises:
        ValueError: The string is not a covered set.
    """
    try:
        raw = base64.b64decode(stored, validate=True)
        version, block_count, recent_count = struct.unpack_from("<BHH", raw)
    except (binascii.Error, struct.error) as error:
        raise ValueError(f"not a covered set: {error}") from error
    blocks_end = 5 + block_count * _BLOCK.size
    if version != _VERSION or len(raw) != blocks_end + recent_count * FINGERPRINT_BYTES:
        raise ValueError("not a covered set: wrong version or length")
    recent = (
        raw[start : start + FINGERPRINT_BYTES]
        for start in range(blocks_end, len(raw), FINGERPRINT_BYTES)
    )
    blocks = tuple(_BLOCK.iter_unpack(raw[5:blocks_end]))
    return Covered(blocks, tuple(recent))


def align_covered(
    covered: Covered, fingerprints: Sequence[bytes]
) -> list[tuple[int, int]]:
    """Finds which contents of a request a summary covers.

    Blocks are verified first, in order; one that does not verify (something in it
    was edited, or not loaded) counts as not covered. The single fingerprints are
    then matched as a common prefix and, after the first difference, by the longest
    matching runs.

    Args:
        covered: What the summary covers.
        fingerprints: Of the request's history, in order.

    Returns:
        Pairs of a position in the covered set and one in `fingerprints`, ascending.
    """
    matched, position = _align_blocks(covered.blocks, fingerprints)
    first_recent = covered.content_count - len(covered.recent)
    recent, rest = covered.recent, fingerprints[position:]
    prefix = 0
    while (
        prefix < len(recent) and prefix < len(rest) and recent[prefix] == rest[prefix]
    ):
        prefix += 1
    matched.extend((first_recent + step, position + step) for step in range(prefix))
    matched.extend(
        (first_recent + prefix + left, position + prefix + right)
        for left, right in _align_rest(recent[prefix:], rest[prefix:])
    )
    return matched


def _align_blocks(
    blocks: Sequence[tuple[int, bytes]], fingerprints: Sequence[bytes]
) -> tuple[list[tuple[int, int]], int]:
    """Verifies the blocks; returns matched positions and where the rest begins."""
    matched: list[tuple[int, int]] = []
    position = lost_count = block_start = 0
    leaves: dict[int, bytes] = {}
    for level, digest in blocks:
        count = BLOCK_COUNT << level
        for start in _candidate_starts(position, lost_count):
            if start + count > len(fingerprints):
                continue
            if _tree_digest(fingerprints, start, level, leaves) == digest:
                matched.extend(
                    (block_start + step, start + step) for step in range(count)
                )
                position, lost_count = start + count, 0
                break
        else:
            lost_count += count
        block_start += count
    return matched, position


def _candidate_starts(position: int, lost_count: int) -> list[int]:
    """Where the next block may begin, given how many contents were not verified.

    Right at `position`; after blocks that were lost also nearby (they are not
    there at all) and where they would end (they were edited in place).
    """
    if not lost_count:
        return [position]
    near = range(position, position + MAX_SHIFT + 1)
    behind = range(
        position + max(MAX_SHIFT + 1, lost_count - MAX_SHIFT),
        position + lost_count + MAX_SHIFT + 1,
    )
    return [*near, *behind]


def _tree_digest(
    fingerprints: Sequence[bytes], start: int, level: int, leaves: dict[int, bytes]
) -> bytes:
    """The digest of a block, built the way joined blocks are."""
    if level == 0:
        if start not in leaves:
            leaves[start] = _digest(fingerprints[start : start + BLOCK_COUNT])
        return leaves[start]
    middle = start + (BLOCK_COUNT << (level - 1))
    return _digest(
        [
            _tree_digest(fingerprints, start, level - 1, leaves),
            _tree_digest(fingerprints, middle, level - 1, leaves),
        ]
    )


def _align_rest(
    recent: Sequence[bytes], rest: Sequence[bytes]
) -> list[tuple[int, int]]:
    """Aligns what follows the first difference; bounded, since it is quadratic."""
    if not recent or not rest:
        return []
    allowed_count = max(1, _MAX_MATCHER_CELLS // len(recent))
    if len(rest) > allowed_count:
        wanted = set(recent)
        # The oldest that fit: among new contents an old one may well be repeated.
        offset = next((i for i, item in enumerate(rest) if item in wanted), len(rest))
        rest = rest[offset : offset + allowed_count]
    else:
        offset = 0
    matcher = SequenceMatcher(None, recent, rest, autojunk=False)
    return [
        (block.a + step, offset + block.b + step)
        for block in matcher.get_matching_blocks()
        for step in range(block.size)
    ]
