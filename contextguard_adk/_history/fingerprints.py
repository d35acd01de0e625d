"""Digests of contents, and the record of the contents that a summary covers.

A summary knows its contents by their digests, not by their positions: ADK moves, merges
and omits contents from one request to the next.

- To spell a content is to write it as bytes in which no two contents look the same.
- A fingerprint is a short digest of a spelled content.
- The history is all contents of a request that come from session events, oldest first.
- A content is covered if a summary replaces it. The last 512 covered contents are
  called recent, the ones before them older. A gap is a content that is not covered and
  stands among the older ones.
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

_WINDOW_COUNT = 2 * RECENT_COUNT
"""How many contents of a history are compared with the recent ones.

The time to compare is quadratic, so not all contents are compared. The window has room
for the recent contents, and for others before and after them.
"""

_REFUSAL = "not a covered set: wrong version or length"

_HEAD = struct.Struct("<BIH8s")
"""The version, the number of older contents, the bytes of the gaps, the digest."""

_VERSION = 3

# What JSONB, a database's form of JSON, may write differently: the float -0.0, large
# floats such as 1e+22, and the order of fields with numbers as names, such as "10":.
_LARGE_FLOAT = re.compile(r"\de\+\d")
_NUMBER_AS_KEY = re.compile(r'"[-0-9][-0-9.e]*":')


@dataclass(frozen=True)
class Covered:
    """The contents that a summary replaces, oldest first.

    Attributes:
        older_count: How many covered contents stand before the `recent` ones.
        older_digest: One digest of the fingerprints of the older contents; b"" if there
            are none.
        recent: The fingerprints of the newest covered contents, at most 512.
        gaps: One bit for each of the oldest contents of the history; bit 0 is for the
            oldest one. The bit is set if the content is not covered. Contents after the
            first 16,384 have no bit: if one of them is a gap, the older contents match
            nothing.
    """

    older_count: int = 0
    older_digest: bytes = b""
    recent: tuple[bytes, ...] = ()
    gaps: int = 0

    @property
    def content_count(self) -> int:
        """How many contents are covered."""
        return self.older_count + len(self.recent)

    def is_gap(self, history_position: int) -> bool:
        """Whether the content at a position of the whole history is a gap."""
        gap_bit = self.gaps >> history_position & 1
        return gap_bit == 1


class Match(NamedTuple):
    """A covered content that is in a history.

    Attributes:
        covered_position: Its position among the covered contents; 0 is the oldest.
        history_position: Its position in the history.
    """

    covered_position: int
    history_position: int


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
    # The model has to copy the name when it calls the recall tool, so ten digits do.
    return digest.hexdigest()[:10]


def _spell_part(part: types.Part) -> bytes:
    """Spells a part: a letter for the kind of its data, then its fields.

    For example, a call of `read` without arguments is spelled as c4:read2:{}.
    """
    if part.text:
        return _spell(b"t", part.text)

    call = part.function_call
    if call:
        return _spell(b"c", call.name, canonical_json(call.args))

    result = part.function_response
    if result:
        files = result.parts or []
        spelled = [_spell(b"r", result.name, canonical_json(result.response))]
        # Without their number, the files could pass for the next parts of the content.
        spelled.append(_spell(b"%d" % len(files)))
        spelled += [_spell_media(file) for file in files]
        return b"".join(spelled)

    if part.inline_data or part.file_data:
        return _spell_media(part)

    # The signature of a thought is no part of what a content says.
    other_fields = part.model_dump(
        exclude_none=True, exclude={"thought_signature"}, warnings=False
    )
    return _spell(b"o", canonical_json(other_fields))


def _spell_media(part: types.Part | types.FunctionResponsePart) -> bytes:
    """Spells an image or a file; b"" for a part with neither data nor address."""
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
        if field is None:
            raw = b""
        elif isinstance(field, str):
            raw = json_text(field)
        else:
            raw = field
        spelled.append(b"%d:%b" % (len(raw), raw))
    return b"".join(spelled)


def canonical_json(value: object) -> bytes:
    """Serializes any value; the result is the same after a database has stored it.

    The names of fields are sorted: {"b": 1, "a": 2} becomes {"a": 2, "b": 1}.
    """
    to_plain = partial(pydantic_core.to_jsonable_python, fallback=safe_repr)
    write = partial(json.dumps, sort_keys=True, ensure_ascii=False, default=to_plain)
    try:
        text = write(value)
        if _may_change(text):
            as_stored = json.loads(text, parse_float=_read_float)
            return json_text(write(as_stored))
        return json_text(text)
    except (TypeError, ValueError, RecursionError):
        # Mixed key types, cycles, nesting beyond the recursion limit. A database may
        # change such a value. Then its content matches no longer and is sent again.
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
    if number == 0:
        return 0.0
    is_written_as_integer = abs(number) >= 1e16 and number.is_integer()
    return int(Decimal(text)) if is_written_as_integer else number


def cover(fingerprints: Sequence[bytes]) -> Covered:
    """Builds the covered set of a history.

    Args:
        fingerprints: One for each content of the history, oldest first; b"" for a
            content that is not covered.
    """
    covered_positions = [position for position, item in enumerate(fingerprints) if item]
    older_positions = covered_positions[:-RECENT_COUNT]
    recent_positions = covered_positions[-RECENT_COUNT:]

    # The gaps tell which contents the digest is made of, so only the gaps before the
    # last older content are stored.
    last_older_position = older_positions[-1] if older_positions else 0
    gaps = 0
    for position in range(min(last_older_position, MAX_GAP_BITS)):
        is_covered = fingerprints[position] != b""
        if not is_covered:
            gaps |= 1 << position

    return Covered(
        older_count=len(older_positions),
        older_digest=_digest_older([fingerprints[i] for i in older_positions]),
        recent=tuple(fingerprints[i] for i in recent_positions),
        gaps=gaps,
    )


def _digest_older(fingerprints: Iterable[bytes]) -> bytes:
    """Returns one digest of the fingerprints of all older contents; b"" for none."""
    older = b"".join(fingerprints)
    return hashlib.blake2b(older, digest_size=8).digest() if older else b""


def encode_covered(covered: Covered) -> str:
    """Writes a covered set as one base64 string, about 7 KB at most."""
    gap_bytes = (covered.gaps.bit_length() + 7) // 8
    gaps = covered.gaps.to_bytes(gap_bytes, "little")
    head = _HEAD.pack(_VERSION, covered.older_count, gap_bytes, covered.older_digest)
    return base64.b64encode(head + gaps + b"".join(covered.recent)).decode()


def decode_covered(stored: str) -> Covered:
    """Reads a string of `encode_covered`; raises a ValueError for any other string."""
    raw = base64.b64decode(stored, validate=True)
    if len(raw) < _HEAD.size:
        raise ValueError(_REFUSAL)

    _version, older_count, gap_bytes, digest = _HEAD.unpack_from(raw)
    gaps_end = _HEAD.size + gap_bytes
    raw_gaps = raw[_HEAD.size : gaps_end]
    raw_recent = raw[gaps_end:]

    recent: list[bytes] = []
    for number in range(len(raw_recent) // FINGERPRINT_BYTES):
        start = number * FINGERPRINT_BYTES
        recent.append(raw_recent[start : start + FINGERPRINT_BYTES])

    covered = Covered(
        older_count=older_count,
        # An empty digest is stored as eight zeros.
        older_digest=digest if older_count else b"",
        recent=tuple(recent),
        gaps=int.from_bytes(raw_gaps, "little"),
    )

    has_too_many = len(covered.recent) > RECENT_COUNT
    has_late_gap = covered.gaps.bit_length() > MAX_GAP_BITS
    # If the version or a length is wrong, the same covered set is written differently.
    if has_too_many or has_late_gap or encode_covered(covered) != stored:
        raise ValueError(_REFUSAL)
    return covered


def align_covered(covered: Covered, fingerprints: Sequence[bytes]) -> list[Match]:
    """Matches covered contents with the equal contents of a history, oldest first.

    The older contents match all together, by their digest, or not at all. If they do,
    the recent contents are searched after them, otherwise in the whole history.

    Args:
        covered: The covered set.
        fingerprints: One for each content of the history, oldest first.
    """
    # If the history has only grown, it begins with the older contents and the gaps.
    older_end = covered.older_count + covered.gaps.bit_count()
    older_positions = [
        position
        for position in range(min(older_end, len(fingerprints)))
        if not covered.is_gap(position)
    ]
    digest = _digest_older([fingerprints[position] for position in older_positions])
    has_all_older = len(older_positions) == covered.older_count
    if not has_all_older or digest != covered.older_digest:
        return _align_recent(covered, fingerprints, history_start=0)

    older_matches = [
        Match(covered_position, history_position)
        for covered_position, history_position in enumerate(older_positions)
    ]
    recent_matches = _align_recent(covered, fingerprints, history_start=older_end)
    return [*older_matches, *recent_matches]


def _align_recent(
    covered: Covered, fingerprints: Sequence[bytes], history_start: int
) -> list[Match]:
    """Matches the longest runs of recent fingerprints that a history also has.

    Only a window of the history is searched, which begins at `history_start` or later.
    """
    recent = covered.recent
    window_start = _find_window(recent, fingerprints, history_start)
    window = fingerprints[window_start : window_start + _WINDOW_COUNT]

    # Contents that repeat all the time make matching slow, up to seconds. With
    # `autojunk` such contents begin no run, they only lengthen a run. Without repeats
    # there are `RECENT_COUNT` equal pairs at most.
    window_counts = Counter(window)
    equal_pairs_count = sum(window_counts[item] for item in recent)
    has_many_repeats = equal_pairs_count > 4 * RECENT_COUNT

    matcher = SequenceMatcher(None, recent, window, autojunk=has_many_repeats)
    matches: list[Match] = []
    for run in matcher.get_matching_blocks():
        covered_start = covered.older_count + run.a
        run_start = window_start + run.b
        for step in range(run.size):
            matches.append(Match(covered_start + step, run_start + step))
    return matches


def _find_window(
    recent: Sequence[bytes], fingerprints: Sequence[bytes], history_start: int
) -> int:
    """Finds the position in a history at which the window with recent contents begins.

    Most recent contents have moved by the same number of positions. So the window
    begins somewhat before the position to which the oldest of them has moved.

    Args:
        recent: The recent fingerprints.
        fingerprints: The fingerprints of the history.
        history_start: The first position that may be in the window.
    """
    first_positions: dict[bytes, int] = {}
    for position in range(history_start, len(fingerprints)):
        first_positions.setdefault(fingerprints[position], position)

    move_counts: Counter[int] = Counter()
    for recent_position, item in enumerate(recent):
        if item in first_positions:
            move_counts[first_positions[item] - recent_position] += 1
    if not move_counts:
        return history_start

    most_common_move = max(move_counts, key=lambda move: move_counts[move])
    return max(history_start, most_common_move - RECENT_COUNT // 2)


def match_older(
    covered: Covered,
    matches: Sequence[Match],
    contents: Sequence[types.Content],
    newer: Iterable[types.Content],
) -> list[Match]:
    """Matches the older contents of a history whose digest does not match.

    The digest does not match if the session is loaded in part, or has changed. Then all
    contents before the first of the `matches` count as older contents, except gaps, and
    contents that ADK has moved there from newer events.

    Args:
        covered: The covered set.
        matches: The matches of `align_covered`; there may be none.
        contents: The contents of the history.
        newer: The contents of the events since the last covered event.
    """
    # Which contents are before the first match, and how many of them are covered.
    if matches:
        covered_before_count = matches[0].covered_position
        contents_before = contents[: matches[0].history_position]
        contents_behind = contents[matches[-1].history_position + 1 :]
    else:
        # While a late result is the newest event, ADK omits all contents between its
        # call and the result. Then only older contents may be left, and all count as
        # covered.
        covered_before_count = len(contents)
        contents_before = contents
        contents_behind = []

    # The bits of the gaps belong to positions in the history as it was when the summary
    # was made. If more contents were before the first match then, the oldest of them
    # are missing now, and the positions differ by their number.
    former_before_count = covered_before_count + covered.gaps.bit_count()
    missing_count = max(0, former_before_count - len(contents_before))

    moved_handles = _find_moved(newer, contents_behind)
    older_positions: list[int] = []
    for position, content in enumerate(contents_before):
        if covered.is_gap(missing_count + position):
            continue
        is_moved = any(handle_of(part) in moved_handles for part in parts_of(content))
        if not is_moved:
            older_positions.append(position)

    # If older contents are missing, the loaded ones are the last of the older contents.
    first_covered_position = max(0, covered.older_count - len(older_positions))
    return [
        Match(covered_position, history_position)
        for covered_position, history_position in enumerate(
            older_positions, start=first_covered_position
        )
    ]


def _find_moved(
    newer: Iterable[types.Content], behind: Iterable[types.Content]
) -> set[str]:
    """Finds the handles of parts that ADK has moved to the position of an older event.

    ADK moves a late result to the position of the first result of its call. A part has
    moved if the newer events have it more often than the contents behind.

    Args:
        newer: The contents of the events since the last covered event.
        behind: The contents of the history behind the covered ones.
    """
    moved_counts = _count_handles(newer) - _count_handles(behind)
    return set(moved_counts)


def _count_handles(contents: Iterable[types.Content]) -> Counter[str]:
    """Counts how often contents have each part, by the handle of the part."""
    counts: Counter[str] = Counter()
    for content in contents:
        counts.update(handle_of(part) for part in parts_of(content))
    return counts
