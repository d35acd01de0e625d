"""Digests of contents, and the record of the contents that a summary covers.

A summary stores digests of the contents that it replaces, not their positions, because
ADK moves, merges and omits contents from one request to the next.

- To spell a content is to write the content as bytes, so that different contents have
  different bytes.
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
"""How many fingerprints of covered contents are stored one by one, at most."""

MAX_GAP_BITS = 16_384
"""How many of the oldest contents of a history can have a bit in `Covered.gaps`."""

_WINDOW_COUNT = 2 * RECENT_COUNT
"""How many contents of a history are compared with the recent ones.

The time to compare is quadratic, so not all contents are compared. The window has room
for the recent contents, and for other contents before and after the recent ones.
"""

_REFUSAL = "not a covered set: wrong version or length"

_HEAD = struct.Struct("<BIH8s")
"""The version, the number of older contents, the size of the gaps, the digest."""

_VERSION = 3

# What JSONB, a database's form of JSON, may write differently: the float -0.0, large
# floats such as 1e+22, and the order of fields with numbers as names, such as "10":.
_LARGE_FLOAT = re.compile(r"\de\+\d")
_NUMBER_AS_KEY = re.compile(r'"[-0-9][-0-9.e]*":')


@dataclass(frozen=True)
class Covered:
    """The contents that a summary replaces, oldest first.

    Attributes:
        older_count: How many older contents there are.
        older_digest: One digest of the fingerprints of the older contents; b"" if there
            are none.
        recent: The fingerprints of the newest covered contents, at most 512.
        gaps: One bit for each of the oldest contents of the history; bit 0 is for the
            oldest one. The bit is set if the content is a gap. Contents after the first
            16,384 have no bit. If one of these is a gap, `older_digest` never matches.
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
        """Whether the content at a position of the whole history is a gap.

        False for a content without a bit.
        """
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
    """Returns a short digest of the role and the parts of a content.

    The ids of calls and the signatures of thoughts are no part of the digest.
    """
    spelled = [_spell(b"", content.role)]
    spelled += [_spell_part(part) for part in parts_of(content)]
    digest = hashlib.blake2b(b"".join(spelled), digest_size=FINGERPRINT_BYTES)
    return digest.digest()


def handle_of(part: types.Part) -> str:
    """Returns a name for a part, which follows from the text or data of the part.

    The name stays the same after a restart, and after a database has stored the part.
    """
    digest = hashlib.blake2b(_spell_part(part), digest_size=FINGERPRINT_BYTES)
    # The model has to copy the name when it calls the recall tool. Ten hexadecimal
    # digits are enough to tell the parts of a session apart.
    return digest.hexdigest()[:10]


def _spell_part(part: types.Part) -> bytes:
    """Spells a part: a letter for the kind of its data, then its fields.

    For example, a call of `read` without arguments is spelled as c4:read2:{}. A part
    has data of one kind, so the first kind that is found is the only one.
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
        # The number of files is spelled too. Without it, the files could pass for the
        # next parts of the content.
        spelled.append(_spell(b"%d" % len(files)))
        spelled += [_spell_media(file) for file in files]
        return b"".join(spelled)

    if part.inline_data or part.file_data:
        return _spell_media(part)

    # A signature of a thought may differ although the content is the same.
    other_fields = part.model_dump(
        exclude_none=True, exclude={"thought_signature"}, warnings=False
    )
    return _spell(b"o", canonical_json(other_fields))


def _spell_media(part: types.Part | types.FunctionResponsePart) -> bytes:
    """Spells an image or a file by its data or address; b"" if it has neither."""
    if part.inline_data:
        return _spell(b"i", part.inline_data.mime_type, part.inline_data.data)
    if part.file_data:
        return _spell(b"f", part.file_data.file_uri)
    return b""


def _spell(kind: bytes, *fields: str | bytes | None) -> bytes:
    """Spells fields: the letter of the kind, then each field after its length in bytes.

    The lengths keep one field from passing for several. For example, the kind "c" with
    the fields "name" and "{}" is spelled as c4:name2:{}. None counts as an empty field.
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
    """Serializes any value; the result stays the same once a database stores the value.

    The names of fields are sorted: {"b": 1, "a": 2} becomes {"a": 2, "b": 1}. A value
    that JSON cannot write is serialized to a digest.
    """
    to_plain = partial(pydantic_core.to_jsonable_python, fallback=safe_repr)
    write_json = partial(
        json.dumps, sort_keys=True, ensure_ascii=False, default=to_plain
    )
    # If `json_text` gets a str, it only returns the bytes of the str in UTF-8.
    try:
        text = write_json(value)
        if _may_change(text):
            # The text is read and written again in the way of a database.
            as_stored = json.loads(text, parse_float=_read_float)
            return json_text(write_json(as_stored))
        return json_text(text)
    except (TypeError, ValueError, RecursionError):
        # The value has keys of mixed types, contains itself, or is nested too deep. If
        # a database changes such a value, the digest changes too. Then the content no
        # longer counts as covered, and is sent again. `json_text` never fails: it gets
        # the value itself, and writes it in a form close to JSON.
        return hashlib.blake2b(json_text(value)).digest()


def _may_change(text: str) -> bool:
    """Whether JSONB, a database's form of JSON, may write this text differently.

    True for a text with -0.0, a field with a number as its name, or a large float.
    """
    # One pattern for all three would take ten times as long.
    if "-0.0" in text or _NUMBER_AS_KEY.search(text):
        return True
    return "e+" in text and _LARGE_FLOAT.search(text) is not None


def _read_float(text: str) -> float | int:
    """Reads a number as JSONB does: 1e22 is an integer, -0.0 is 0.0."""
    number = float(text)
    if number == 0:
        return 0.0
    # From 1e16 on, Python writes an exponent where JSONB writes all digits.
    is_written_as_integer = abs(number) >= 1e16 and number.is_integer()
    return int(Decimal(text)) if is_written_as_integer else number


def cover(fingerprints: Sequence[bytes]) -> Covered:
    """Builds the covered set of a history.

    Args:
        fingerprints: One for each content of the history, oldest first; b"" for a
            content that is not covered.
    """
    # All positions here are positions in the history.
    positions = [position for position, item in enumerate(fingerprints) if item]
    older_positions = positions[:-RECENT_COUNT]
    recent_positions = positions[-RECENT_COUNT:]

    # The digest is made of the older contents, and the gaps tell which contents these
    # are. So only the gaps before the last older content are stored.
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
    # A string with another version or a wrong length differs from the string that
    # `encode_covered` writes for the same covered set.
    if has_too_many or has_late_gap or encode_covered(covered) != stored:
        raise ValueError(_REFUSAL)
    return covered


def align_covered(covered: Covered, fingerprints: Sequence[bytes]) -> list[Match]:
    """Matches covered contents with the equal contents of a history, oldest first.

    The older contents match all together, by their digest, or not at all. If the older
    contents match, the recent contents are searched behind them, otherwise in the whole
    history.

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
    """Matches the recent contents with the equal contents in a window of a history.

    The matched contents have the same order on both sides. The longest run of equal
    neighbors is matched first, then the longest runs before and behind that run.

    Args:
        covered: The covered set.
        fingerprints: The fingerprints of the history.
        history_start: The first position of the history that may be in the window.
    """
    recent = covered.recent
    window_start = _find_window(recent, fingerprints, history_start)
    window = fingerprints[window_start : window_start + _WINDOW_COUNT]

    # The matcher looks at each pair of a recent and an equal content of the window.
    # Without repeats there are at most `RECENT_COUNT` pairs, and four times as many are
    # quick too. Contents that repeat all the time make so many pairs that matching
    # takes seconds. With `autojunk`, the matcher begins no run at such contents.
    window_counts = Counter(window)
    equal_pairs_count = sum(window_counts[item] for item in recent)
    has_many_repeats = equal_pairs_count > 4 * RECENT_COUNT

    matcher = SequenceMatcher(None, recent, window, autojunk=has_many_repeats)
    matches: list[Match] = []
    for recent_start, start_in_window, run_length in matcher.get_matching_blocks():
        covered_start = covered.older_count + recent_start
        history_run_start = window_start + start_in_window
        for step in range(run_length):
            matches.append(Match(covered_start + step, history_run_start + step))
    return matches


def _find_window(
    recent: Sequence[bytes], fingerprints: Sequence[bytes], history_start: int
) -> int:
    """Finds the position in a history at which the window of `_align_recent` begins.

    A move is the position of a content in the history less its position in `recent`.
    Most of the recent contents have the same move, which is thus the position of
    `recent[0]` in the history. The window begins half of `RECENT_COUNT` before that
    position, so it has equal room before and behind the recent contents. If no recent
    content is in the history, the result is `history_start`.

    Args:
        recent: The recent fingerprints.
        fingerprints: The fingerprints of the history.
        history_start: The first position of the history that may be in the window.
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
    """Matches older contents by their positions, if their digest does not match.

    The digest does not match if the session is loaded in part, or has changed. Then the
    contents before the first match count as older contents, apart from two kinds:

    - gaps
    - contents with a part of a newer event, which ADK has moved before the first match

    Args:
        covered: The covered set.
        matches: The matches of `align_covered`, oldest first; all of them are matches
            of recent contents. If `matches` is empty, all contents count as contents
            before the first match.
        contents: The contents of the history, oldest first.
        newer: The contents of the events since the last covered event.

    Returns:
        The matches of the older contents, oldest first; none of them is in `matches`.
    """
    if matches:
        covered_before_count = matches[0].covered_position
        contents_before = contents[: matches[0].history_position]
        contents_behind = contents[matches[-1].history_position + 1 :]
    else:
        # While a late result is the newest event, ADK omits all contents between the
        # call and this result. Then only older contents may be left. Nothing tells
        # their number, so each content counts as covered.
        covered_before_count = len(contents)
        contents_before = contents
        contents_behind = []

    # The bits of `gaps` are for positions in the whole history, as it was when the
    # summary was made. If the first match has fewer contents before it now, the oldest
    # contents are missing: position 0 is now the position `missing_count` of the whole
    # history.
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

    # If older contents are missing, the oldest ones are missing. So the last of
    # `older_positions` always has the last covered position before the recent contents.
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

    ADK moves a late result to the position of the first result of the same call. A part
    has moved if it is more often in `newer` than in `behind`.

    Args:
        newer: The contents of the events since the last covered event.
        behind: The contents of the history behind the last match.
    """
    # A difference of counters has only the handles with a count above 0.
    moved_counts = _count_handles(newer) - _count_handles(behind)
    return set(moved_counts)


def _count_handles(contents: Iterable[types.Content]) -> Counter[str]:
    """Counts how often contents have each part, by the handle of the part."""
    counts: Counter[str] = Counter()
    for content in contents:
        counts.update(handle_of(part) for part in parts_of(content))
    return counts
