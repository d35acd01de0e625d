"""Which contents, not positions, a summary covers: ADK moves, merges and omits some."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from difflib import SequenceMatcher
from functools import partial

import pydantic_core
from google.genai import types

from contextguard_adk._measuring.tokens import json_text, safe_repr

# Of blake2b. With a checksum a tool result could be made to collide with a content
# and so be hidden from the model.
FINGERPRINT_BYTES = 6
RECENT_COUNT = 512
MAX_GAP_BITS = 16_384
_HEAD = struct.Struct("<BIH8s")
_VERSION = 3
_LARGE_FLOAT = re.compile(r"\de\+\d")
_NUMBER_AS_KEY = re.compile(r'"[-0-9][-0-9.e]*":')


@dataclass(frozen=True)
class Covered:
    """Fingerprints of what a summary replaces; of those before `recent` a digest.

    `gaps` has a bit for each place among the oldest contents, set where one is left
    out. A gap after place 16,384 is not stored: the older ones then match nothing.
    """

    older_count: int = 0
    older_digest: bytes = b""
    recent: tuple[bytes, ...] = ()
    gaps: int = 0

    @property
    def content_count(self) -> int:
        return self.older_count + len(self.recent)


def fingerprint(content: types.Content) -> bytes:
    """Returns a short digest of what a content says; call ids do not belong to it."""
    parts = filter(None, content.parts or ())
    said = b"".join([_spell(b"", content.role), *map(_spell_part, parts)])
    return hashlib.blake2b(said, digest_size=FINGERPRINT_BYTES).digest()


def handle_of(part: types.Part) -> str:
    """Returns a name for what a part says, the same over restarts and databases."""
    digest = hashlib.blake2b(_spell_part(part), digest_size=FINGERPRINT_BYTES)
    return digest.hexdigest()[:10]


def _spell_part(part: types.Part) -> bytes:
    """Writes what a part says, its kind first, so that kinds cannot be confused."""
    if part.text:
        return _spell(b"t", part.text)
    if call := part.function_call:
        return _spell(b"c", call.name, canonical_json(call.args))
    if answer := part.function_response:
        media = answer.parts or []
        said = _spell(b"r", answer.name, canonical_json(answer.response))
        return b"".join([said, _spell(b"%d" % len(media)), *map(_spell_media, media)])
    if part.inline_data or part.file_data:
        return _spell_media(part)
    fields = part.model_dump(
        exclude_none=True, exclude={"thought_signature"}, warnings=False
    )
    return _spell(b"o", canonical_json(fields))


def _spell_media(part: types.Part | types.FunctionResponsePart) -> bytes:
    if part.inline_data:
        return _spell(b"i", part.inline_data.mime_type, part.inline_data.data)
    return _spell(b"f", part.file_data.file_uri) if part.file_data else b""


def _spell(kind: bytes, *fields: str | bytes | None) -> bytes:
    """Writes fields behind their lengths, so that one cannot pass for several."""
    spelled = [kind]
    for field in fields:
        text = json_text(field) if isinstance(field, str) else field or b""
        spelled.append(b"%d:%b" % (len(text), text))
    return b"".join(spelled)


def canonical_json(value: object) -> bytes:
    """Serializes any value, the same before and after a database has stored it."""
    to_plain = partial(pydantic_core.to_jsonable_python, fallback=safe_repr)
    write = partial(json.dumps, sort_keys=True, ensure_ascii=False, default=to_plain)
    try:
        text = write(value)
        # What JSONB may alter; one pattern for all three takes ten times as long.
        has_large = "e+" in text and _LARGE_FLOAT.search(text)
        if has_large or "-0.0" in text or _NUMBER_AS_KEY.search(text):
            text = write(json.loads(text, parse_float=_read_float))
        return json_text(text)
    except (TypeError, ValueError, RecursionError):
        # Mixed key types, cycles, nesting beyond the recursion limit. The fallback
        # need not survive a round trip: what does not match is sent again.
        return hashlib.blake2b(json_text(value)).digest()


def _read_float(text: str) -> float | int:
    """Reads a number as JSONB does: 1e22 is an integer, -0.0 is 0.0."""
    number = float(text)
    is_large = abs(number) >= 1e16 and number.is_integer()
    return int(Decimal(text)) if is_large else number or 0.0


def cover(fingerprints: Sequence[bytes]) -> Covered:
    """Builds the covered set of a history, oldest first; b"" for what is left out."""
    covered = [(place, item) for place, item in enumerate(fingerprints) if item]
    older = covered[:-RECENT_COUNT]
    recent = tuple(item for _, item in covered[-RECENT_COUNT:])
    first_after = min(older[-1][0], MAX_GAP_BITS) if older else 0
    gaps = sum(1 << i for i in range(first_after) if not fingerprints[i])
    digest = _digest_older(item for _, item in older)
    return Covered(len(older), digest, recent, gaps)


def _digest_older(fingerprints: Iterable[bytes]) -> bytes:
    older = b"".join(fingerprints)
    return hashlib.blake2b(older, digest_size=8).digest() if older else b""


def encode_covered(covered: Covered) -> str:
    """Writes a covered set as one base64 string, about 7 KB at most."""
    gaps = covered.gaps.to_bytes(-(-covered.gaps.bit_length() // 8), "little")
    head = (_VERSION, covered.older_count, len(gaps), covered.older_digest)
    raw = _HEAD.pack(*head) + gaps + b"".join(covered.recent)
    return base64.b64encode(raw).decode()


def decode_covered(stored: str) -> Covered:
    """Reads what `encode_covered` wrote; raises ValueError where it is not that."""
    raw = base64.b64decode(stored, validate=True)  # Raises a ValueError itself.
    # What is too short for a head is refused below: it would be written otherwise.
    _, older_count, gap_bytes, digest = _HEAD.unpack_from(raw.ljust(_HEAD.size))
    start = _HEAD.size + gap_bytes
    gaps = int.from_bytes(raw[_HEAD.size : start], "little")
    ends = range(start + FINGERPRINT_BYTES, len(raw) + 1, FINGERPRINT_BYTES)
    recent = tuple(raw[end - FINGERPRINT_BYTES : end] for end in ends)
    covered = Covered(older_count, digest if older_count else b"", recent, gaps)
    is_large = len(recent) > RECENT_COUNT or gaps >> MAX_GAP_BITS
    if is_large or encode_covered(covered) != stored:
        raise ValueError("not a covered set: wrong version or length")
    return covered


def align_covered(
    covered: Covered, fingerprints: Sequence[bytes]
) -> list[tuple[int, int]]:
    """Pairs equal positions, ascending; the older ones match together or not at all."""
    end = covered.older_count + covered.gaps.bit_count()
    gaps = covered.gaps
    older = [i for i in range(len(fingerprints))[:end] if not gaps >> i & 1]
    digest = _digest_older(fingerprints[i] for i in older)
    start = end
    if digest != covered.older_digest or len(older) != covered.older_count:
        older = []
        start = 0
    matches = _align_recent(covered.recent, fingerprints[start:])
    return [
        *enumerate(older),
        *((covered.older_count + left, start + right) for left, right in matches),
    ]


def _align_recent(
    recent: Sequence[bytes], sent: Sequence[bytes]
) -> list[tuple[int, int]]:
    """Matches the longest equal runs, in a part of what is sent: that is quadratic."""
    first = {sent[index]: index for index in reversed(range(len(sent)))}
    shifts = Counter(first[item] - i for i, item in enumerate(recent) if item in first)
    shift = shifts.most_common(1)[0][0] if shifts else 0
    start = max(0, shift - RECENT_COUNT // 2)
    window = sent[start : start + 2 * RECENT_COUNT]
    counts = Counter(window)
    # What repeats all the time then only lengthens runs: else it may take seconds.
    has_many = sum(counts[item] for item in recent) > 4 * RECENT_COUNT
    matcher = SequenceMatcher(None, recent, window, autojunk=has_many)
    return [
        (block.a + step, start + block.b + step)
        for block in matcher.get_matching_blocks()
        for step in range(block.size)
    ]
