"""Digests of contents, and the record of the contents that a summary covers.

A summary knows its contents by their digests, not by their positions: ADK moves, merges
and omits contents from one request to the next. To spell a content here is to write it
as bytes in which no two contents look the same.
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
from typing import NamedTuple

import pydantic_core
from google.genai import types

from contextguard_adk._history.contents import parts_of
from contextguard_adk._measuring.tokens import json_text, safe_repr

FINGERPRINT_BYTES = 6
"""The length of a fingerprint, which is a digest of blake2b.

A mere checksum would be unsafe: somebody could write a tool result with the checksum of
a covered content, and the model would never see that result.
"""

RECENT_COUNT = 512
"""How many fingerprints of covered contents are stored one by one."""

MAX_GAP_BITS = 16_384
"""How many of the oldest contents have a bit in `Covered.gaps`."""

_HEAD = struct.Struct("<BIH8s")
"""The version, the number of older contents, the bytes of the gaps, the digest."""

_VERSION = 3
_LARGE_FLOAT = re.compile(r"\de\+\d")
_NUMBER_AS_KEY = re.compile(r'"[-0-9][-0-9.e]*":')


@dataclass(frozen=True)
class Covered:
    """The contents that a summary replaces, oldest first.

    Attributes:
        older_count: How many covered contents stand before the `recent` ones.
        older_digest: One digest of the fingerprints of the older contents; b"" if there
            are none.
        recent: The fingerprints of the newest covered contents.
        gaps: One bit for each of the oldest contents of the history. The bit is set if
            the content is not covered. Contents after the first 16,384 have no bit: if
            one of them is a gap, the older contents match nothing.
    """

    older_count: int = 0
    older_digest: bytes = b""
    recent: tuple[bytes, ...] = ()
    gaps: int = 0

    @property
    def content_count(self) -> int:
        return self.older_count + len(self.recent)

    def is_gap(self, place: int) -> bool:
        """Whether the content at a place of the whole history is not covered."""
        return self.gaps >> place & 1 == 1


class Match(NamedTuple):
    """A covered content that is in a history.

    Attributes:
        covered_place: Its place among the covered contents, from 0 for the oldest.
        history_place: Its place in the history.
    """

    covered_place: int
    history_place: int


def fingerprint(content: types.Content) -> bytes:
    """Returns a short digest of what a content says, without the ids of calls."""
    spelled = [_spell(b"", content.role)]
    spelled += [_spell_part(part) for part in parts_of(content)]
    digest = hashlib.blake2b(b"".join(spelled), digest_size=FINGERPRINT_BYTES)
    return digest.digest()


def handle_of(part: types.Part) -> str:
    """Returns a name for a part, made of its text or data.

    The name stays the same after a restart, and after a database has stored the part.
    """
    digest = hashlib.blake2b(_spell_part(part), digest_size=FINGERPRINT_BYTES)
    return digest.hexdigest()[:10]


def _spell_part(part: types.Part) -> bytes:
    """Spells a part: a letter for its kind, then its fields."""
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

    other_fields = part.model_dump(
        exclude_none=True, exclude={"thought_signature"}, warnings=False
    )
    return _spell(b"o", canonical_json(other_fields))


def _spell_media(part: types.Part | types.FunctionResponsePart) -> bytes:
    if part.inline_data:
        return _spell(b"i", part.inline_data.mime_type, part.inline_data.data)
    if part.file_data:
        return _spell(b"f", part.file_data.file_uri)
    return b""


def _spell(kind: bytes, *fields: str | bytes | None) -> bytes:
    """Spells fields: each one after its length, so that one cannot pass for several.

    ("c", "name", "{}") -> c4:name2:{}. None is spelled as an empty field.
    """
    spelled = [kind]
    for field in fields:
        raw = json_text(field) if isinstance(field, str) else field or b""
        spelled.append(b"%d:%b" % (len(raw), raw))
    return b"".join(spelled)


def canonical_json(value: object) -> bytes:
    """Serializes any value; the result is the same after a database has stored it."""
    to_plain = partial(pydantic_core.to_jsonable_python, fallback=safe_repr)
    write = partial(json.dumps, sort_keys=True, ensure_ascii=False, default=to_plain)
    try:
        text = write(value)
        if _may_change(text):
            as_stored = json.loads(text, parse_float=_read_float)
            return json_text(write(as_stored))
        return json_text(text)
    except (TypeError, ValueError, RecursionError):
        # Mixed key types, cycles, nesting beyond the recursion limit. The fallback
        # need not survive a round trip: a content that does not match is sent again.
        return hashlib.blake2b(json_text(value)).digest()


def _may_change(text: str) -> bool:
    """Whether JSONB, a database's form of JSON, may write this text differently."""
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
    """Builds the covered set of a history.

    Args:
        fingerprints: One for each content of the history, oldest first; b"" for a
            content that is not covered.
    """
    covered_places = [place for place, item in enumerate(fingerprints) if item]
    older_places = covered_places[:-RECENT_COUNT]
    recent_places = covered_places[-RECENT_COUNT:]

    # Gaps tell which contents the digest is made of. A gap after the last older content
    # is not needed for that.
    last_older_place = older_places[-1] if older_places else 0
    places_with_bit = range(min(last_older_place, MAX_GAP_BITS))
    gap_places = [place for place in places_with_bit if not fingerprints[place]]

    return Covered(
        older_count=len(older_places),
        older_digest=_digest_older(fingerprints[place] for place in older_places),
        recent=tuple(fingerprints[place] for place in recent_places),
        gaps=sum(1 << place for place in gap_places),
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
    head = raw.ljust(_HEAD.size)  # A string that is too short is refused below.
    _version, older_count, gap_bytes, digest = _HEAD.unpack_from(head)

    recent_start = _HEAD.size + gap_bytes
    ends = range(recent_start + FINGERPRINT_BYTES, len(raw) + 1, FINGERPRINT_BYTES)
    covered = Covered(
        older_count=older_count,
        older_digest=digest if older_count else b"",
        recent=tuple(raw[end - FINGERPRINT_BYTES : end] for end in ends),
        gaps=int.from_bytes(raw[_HEAD.size : recent_start], "little"),
    )

    has_too_many = len(covered.recent) > RECENT_COUNT
    has_late_gap = covered.gaps.bit_length() > MAX_GAP_BITS
    # A string of another version or length is not equal to the one written anew.
    if has_too_many or has_late_gap or encode_covered(covered) != stored:
        raise ValueError("not a covered set: wrong version or length")
    return covered


def align_covered(covered: Covered, fingerprints: Sequence[bytes]) -> list[Match]:
    """Matches covered contents with the equal contents of a history, oldest first.

    The older contents match all together, by their digest, or not at all. If they do,
    the recent contents are searched after them, otherwise in the whole history.

    Args:
        covered: The covered set.
        fingerprints: One for each content of the history, oldest first.
    """
    # If nothing has changed, the older contents and the gaps are the first contents.
    older_end = covered.older_count + covered.gaps.bit_count()
    candidates = range(min(older_end, len(fingerprints)))
    older_places = [place for place in candidates if not covered.is_gap(place)]
    digest = _digest_older(fingerprints[place] for place in older_places)

    if digest == covered.older_digest and len(older_places) == covered.older_count:
        older_matches = [
            Match(covered_place, history_place)
            for covered_place, history_place in enumerate(older_places)
        ]
        recent_start = older_end
    else:
        older_matches = []
        recent_start = 0

    recent_matches = _align_recent(covered, fingerprints, recent_start)
    return [*older_matches, *recent_matches]


def _align_recent(
    covered: Covered, fingerprints: Sequence[bytes], history_start: int
) -> list[Match]:
    """Matches the longest runs of recent fingerprints that a history also has.

    Only the history from `history_start` on is searched.

    Matching is quadratic, so only a window of the history is compared. Most of the
    recent fingerprints have moved by the same number of places, the shift. The window
    begins before the place to which the oldest of them has moved.
    """
    recent = covered.recent
    history = fingerprints[history_start:]

    # Of equal fingerprints in the history the first one counts: it is set last.
    first_places = {history[place]: place for place in reversed(range(len(history)))}
    shifts = Counter(
        first_places[item] - place
        for place, item in enumerate(recent)
        if item in first_places
    )
    shift = shifts.most_common(1)[0][0] if shifts else 0

    # Beside the recent contents, the window has room for others before and after them.
    window_start = max(0, shift - RECENT_COUNT // 2)
    window = history[window_start : window_start + 2 * RECENT_COUNT]

    # Contents that repeat all the time make matching slow, up to seconds. With
    # `autojunk` such contents begin no run, they only lengthen one. Without repeats
    # there are `RECENT_COUNT` equal pairs at most.
    window_counts = Counter(window)
    equal_pairs_count = sum(window_counts[item] for item in recent)
    has_many_repeats = equal_pairs_count > 4 * RECENT_COUNT

    matcher = SequenceMatcher(None, recent, window, autojunk=has_many_repeats)
    matches: list[Match] = []
    for run in matcher.get_matching_blocks():
        covered_start = covered.older_count + run.a
        run_start = history_start + window_start + run.b
        matches += [
            Match(covered_start + step, run_start + step) for step in range(run.size)
        ]
    return matches


def match_older(
    covered: Covered,
    matches: Sequence[Match],
    contents: Sequence[types.Content],
    newer: Iterable[types.Content],
) -> list[Match]:
    """Matches the older contents of a history whose digest does not match.

    The digest does not match if the session is loaded in part, or has changed. Then all
    contents before the first of the `matches` count as covered, with two exceptions:
    gaps of the covered set, and contents that ADK has moved there from newer events.

    A content has a history place, its position in `contents`. It also has a former
    place, its position in the history when the summary was made. The bits of the gaps
    are numbered by former places.

    Args:
        covered: The covered set.
        matches: The matches of `align_covered`. There may be none: while a late result
            is the newest event, ADK omits all contents between its call and the result.
            Then all contents count as those before the first match.
        contents: The contents of the history.
        newer: The contents of the events since the last covered event.
    """
    # How many contents before the first match are covered, and how many are loaded.
    if matches:
        covered_count = matches[0].covered_place
        loaded_count = matches[0].history_place
        contents_behind = contents[matches[-1].history_place + 1 :]
    else:
        covered_count = len(contents)
        loaded_count = len(contents)
        contents_behind = []

    # When the summary was made, the covered contents and all gaps were before the first
    # match. If fewer contents are loaded now, the oldest are missing. So the former
    # place of a content is its history place plus the number of missing contents.
    former_count = covered_count + covered.gaps.bit_count()
    missing_count = max(0, former_count - loaded_count)
    moved_handles = _find_moved(newer, contents_behind)

    older_places: list[int] = []
    for history_place in range(loaded_count):
        former_place = missing_count + history_place
        if covered.is_gap(former_place):
            continue

        handles = [handle_of(part) for part in parts_of(contents[history_place])]
        if moved_handles.isdisjoint(handles):
            older_places.append(history_place)

    # The older contents that are missing were the oldest, so their covered places, from
    # 0 on, are left out.
    first_covered_place = max(0, covered.older_count - len(older_places))
    return [
        Match(covered_place, history_place)
        for covered_place, history_place in enumerate(older_places, first_covered_place)
    ]


def _find_moved(
    newer: Iterable[types.Content], behind: Iterable[types.Content]
) -> set[str]:
    """Finds the handles of parts that ADK has moved to the place of an older event.

    ADK moves a late result to the place of the first result of its call. A part has
    moved if the newer events have it more often than the contents behind.

    Args:
        newer: The contents of the events since the last covered event.
        behind: The contents of the history behind the covered ones.
    """
    newer_counts: Counter[str] = Counter()
    for content in newer:
        newer_counts.update(handle_of(part) for part in parts_of(content))

    behind_counts: Counter[str] = Counter()
    for content in behind:
        behind_counts.update(handle_of(part) for part in parts_of(content))

    return set(newer_counts - behind_counts)
