"""Names what contents say, and records which contents a summary covers.

A summary covers contents by what they say, not by their positions: ADK moves, merges
and omits some of them from one request to the next.
"""

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

from contextguard_adk._history.contents import parts_of
from contextguard_adk._measuring.tokens import json_text, safe_repr

# Of blake2b. With a checksum a tool result could be made to collide with a content
# and so be hidden from the model.
FINGERPRINT_BYTES = 6
RECENT_COUNT = 512
"""How many fingerprints of covered contents are stored one by one."""

MAX_GAP_BITS = 16_384
_HEAD = struct.Struct("<BIH8s")
_VERSION = 3
_LARGE_FLOAT = re.compile(r"\de\+\d")
_NUMBER_AS_KEY = re.compile(r'"[-0-9][-0-9.e]*":')


@dataclass(frozen=True)
class Covered:
    """The contents that a summary replaces, oldest first.

    Attributes:
        older_count: How many covered contents stand before the `recent` ones.
        older_digest: One digest of their fingerprints.
        recent: The fingerprints of the newest covered contents.
        gaps: A bit for each place among the oldest contents, set where one is not
            covered. A gap after place 16,384 is not stored: then the older contents
            match nothing.
    """

    older_count: int = 0
    older_digest: bytes = b""
    recent: tuple[bytes, ...] = ()
    gaps: int = 0

    @property
    def content_count(self) -> int:
        return self.older_count + len(self.recent)


def fingerprint(content: types.Content) -> bytes:
    """Returns a short digest of what a content says, without the ids of calls."""
    spelled = [_spell(b"", content.role)]
    spelled += [_spell_part(part) for part in parts_of(content)]
    said = b"".join(spelled)
    return hashlib.blake2b(said, digest_size=FINGERPRINT_BYTES).digest()


def handle_of(part: types.Part) -> str:
    """Returns a name for what a part says, the same over restarts and databases."""
    digest = hashlib.blake2b(_spell_part(part), digest_size=FINGERPRINT_BYTES)
    return digest.hexdigest()[:10]


def _spell_part(part: types.Part) -> bytes:
    """Writes what a part says, its kind first, so that kinds cannot be confused."""
    if part.text:
        return _spell(b"t", part.text)

    call = part.function_call
    if call:
        return _spell(b"c", call.name, canonical_json(call.args))

    result = part.function_response
    if result:
        media = result.parts or []
        spelled = [_spell(b"r", result.name, canonical_json(result.response))]
        spelled.append(_spell(b"%d" % len(media)))
        spelled += [_spell_media(each) for each in media]
        return b"".join(spelled)

    if part.inline_data or part.file_data:
        return _spell_media(part)

    fields = part.model_dump(
        exclude_none=True, exclude={"thought_signature"}, warnings=False
    )
    return _spell(b"o", canonical_json(fields))


def _spell_media(part: types.Part | types.FunctionResponsePart) -> bytes:
    if part.inline_data:
        return _spell(b"i", part.inline_data.mime_type, part.inline_data.data)
    if part.file_data:
        return _spell(b"f", part.file_data.file_uri)
    return b""


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
        if _may_change(text):
            text = write(json.loads(text, parse_float=_read_float))
        return json_text(text)
    except (TypeError, ValueError, RecursionError):
        # Mixed key types, cycles, nesting beyond the recursion limit. The fallback
        # need not survive a round trip: a content that does not match is sent again.
        return hashlib.blake2b(json_text(value)).digest()


def _may_change(text: str) -> bool:
    """Whether JSONB may write a JSON text in another way."""
    # One pattern for all three takes ten times as long.
    if "-0.0" in text or _NUMBER_AS_KEY.search(text):
        return True
    return "e+" in text and _LARGE_FLOAT.search(text) is not None


def _read_float(text: str) -> float | int:
    """Reads a number as JSONB does: 1e22 is an integer, -0.0 is 0.0."""
    number = float(text)
    if abs(number) >= 1e16 and number.is_integer():
        return int(Decimal(text))
    return number or 0.0


def cover(fingerprints: Sequence[bytes]) -> Covered:
    """Builds the covered set of a history, oldest first; b"" for what is left out."""
    covered = [(place, item) for place, item in enumerate(fingerprints) if item]
    older = covered[:-RECENT_COUNT]
    recent = covered[-RECENT_COUNT:]

    # Only gaps before the last older content are needed, to find the older ones again.
    last_older = older[-1][0] if older else 0
    searched = range(min(last_older, MAX_GAP_BITS))
    return Covered(
        older_count=len(older),
        older_digest=_digest_older(item for _, item in older),
        recent=tuple(item for _, item in recent),
        gaps=sum(1 << place for place in searched if not fingerprints[place]),
    )


def _digest_older(fingerprints: Iterable[bytes]) -> bytes:
    older = b"".join(fingerprints)
    return hashlib.blake2b(older, digest_size=8).digest() if older else b""


def encode_covered(covered: Covered) -> str:
    """Writes a covered set as one base64 string, about 7 KB at most."""
    gap_bytes = (covered.gaps.bit_length() + 7) // 8
    gaps = covered.gaps.to_bytes(gap_bytes, "little")
    head = _HEAD.pack(_VERSION, covered.older_count, gap_bytes, covered.older_digest)
    return base64.b64encode(head + gaps + b"".join(covered.recent)).decode()


def decode_covered(stored: str) -> Covered:
    """Reads a string of `encode_covered`; raises a ValueError for any other one."""
    raw = base64.b64decode(stored, validate=True)  # Raises a ValueError itself.
    # A string that is too short for a head is refused below: its length differs from
    # that of the string that would be written.
    head = raw.ljust(_HEAD.size)
    _, older_count, gap_bytes, digest = _HEAD.unpack_from(head)

    start = _HEAD.size + gap_bytes
    ends = range(start + FINGERPRINT_BYTES, len(raw) + 1, FINGERPRINT_BYTES)
    covered = Covered(
        older_count=older_count,
        older_digest=digest if older_count else b"",
        recent=tuple(raw[end - FINGERPRINT_BYTES : end] for end in ends),
        gaps=int.from_bytes(raw[_HEAD.size : start], "little"),
    )

    is_too_long = len(covered.recent) > RECENT_COUNT or covered.gaps >> MAX_GAP_BITS
    if is_too_long or encode_covered(covered) != stored:
        raise ValueError("not a covered set: wrong version or length")
    return covered


def align_covered(
    covered: Covered, fingerprints: Sequence[bytes]
) -> list[tuple[int, int]]:
    """Pairs the places of equal contents in a covered set and in a history, ascending.

    The older contents match together or not at all.
    """
    gaps = covered.gaps
    end = covered.older_count + gaps.bit_count()
    older = [i for i in range(min(end, len(fingerprints))) if not gaps >> i & 1]
    digest = _digest_older(fingerprints[i] for i in older)

    if digest == covered.older_digest and len(older) == covered.older_count:
        start = end
        pairs = list(enumerate(older))
    else:
        start = 0
        pairs = []

    for left, right in _align_recent(covered.recent, fingerprints[start:]):
        pairs.append((covered.older_count + left, start + right))
    return pairs


def _align_recent(
    recent: Sequence[bytes], sent: Sequence[bytes]
) -> list[tuple[int, int]]:
    """Matches the longest equal runs, in a part of what is sent: that is quadratic."""
    first_places = {sent[place]: place for place in reversed(range(len(sent)))}
    shifts = Counter(
        first_places[item] - place
        for place, item in enumerate(recent)
        if item in first_places
    )
    shift = shifts.most_common(1)[0][0] if shifts else 0
    start = max(0, shift - RECENT_COUNT // 2)
    window = sent[start : start + 2 * RECENT_COUNT]

    # Contents that repeat all the time make it slow, up to seconds. Then they only
    # lengthen runs.
    counts = Counter(window)
    has_many = sum(counts[item] for item in recent) > 4 * RECENT_COUNT
    matcher = SequenceMatcher(None, recent, window, autojunk=has_many)
    return [
        (block.a + step, start + block.b + step)
        for block in matcher.get_matching_blocks()
        for step in range(block.size)
    ]


def find_older(
    covered: Covered,
    pairs: Sequence[tuple[int, int]],
    contents: Sequence[types.Content],
    newer: Iterable[types.Content],
) -> list[tuple[int, int]]:
    """Pairs the places of older contents where their digest does not match.

    The session is loaded in part then, or has changed. All contents before the first
    of the `pairs` that were found count as covered. The exceptions are gaps, and
    contents that say what a `newer` event says: ADK moves a late result to the place of
    the first result of its call. While such a result is the newest event, ADK leaves
    out all between the call and it, so there may be no pairs at all.
    """
    if pairs:
        first_place, end = pairs[0]
        behind = contents[pairs[-1][1] + 1 :]
    else:
        first_place = len(contents)
        end = len(contents)
        behind = []

    # What stands behind the covered contents explains a newer event already.
    moved: Counter[str] = Counter()
    for content in newer:
        moved.update(handle_of(part) for part in parts_of(content))
    for content in behind:
        moved.subtract(handle_of(part) for part in parts_of(content))

    missing_count = max(0, first_place + covered.gaps.bit_count() - end)
    gaps = covered.gaps >> missing_count
    older = []
    for index in range(end):
        if gaps >> index & 1:
            continue
        parts = parts_of(contents[index])
        if all(moved[handle_of(part)] <= 0 for part in parts):
            older.append(index)

    first = max(0, covered.older_count - len(older))
    return list(enumerate(older, first))
