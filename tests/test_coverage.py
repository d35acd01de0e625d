"""Fingerprints, the stored covered set, and its alignment with a request."""

from __future__ import annotations

import base64
import itertools
import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

from contextguard_adk._history.coverage import (
    FINGERPRINT_BYTES,
    RECENT_COUNT,
    align_covered,
    align_in_order,
    cover,
    decode_covered,
    encode_covered,
    fingerprint,
)
from tests.builders import DETACHED, call, model, response, user

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(-1e9, 1e9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=8,
)


def raw_response(payload: Any) -> types.Content:
    """A tool result that no validation has seen."""
    answer = types.FunctionResponse.model_construct(name="x", response=payload)
    part = types.Part.model_construct(function_response=answer)
    return types.Content.model_construct(role="user", parts=[part])


def result(value: Any) -> types.Content:
    """A tool result that holds a value."""
    return response("x", {"a": value})


# --- fingerprints ---

SIGNED = types.Part(text="a", thought_signature=b"1")
SAME = {
    "call-id": (call("x", "1", q="a"), call("x", q="a")),
    "key-order": (result({"c": [1], "d": 2}), result({"d": 2, "c": [1]})),
    "signature": (types.Content(role="model", parts=[SIGNED]), model("a")),
    "float-stored-as-integer": (
        result([1e22, -2.5e30]),
        result([10**22, -25 * 10**29]),
    ),
    "number-keys": (result({2: "b", 10: 1.5}), result({"10": 1.5, "2": "b"})),
}


def shot(data: bytes) -> types.Content:
    """A tool result with an image of its own."""
    pixels = types.FunctionResponsePart.from_bytes(data=data, mime_type="image/png")
    answer = types.FunctionResponse(name="look", response={}, parts=[pixels])
    return types.Content(role="user", parts=[types.Part(function_response=answer)])


DIFFERENT = {
    "role": (user("a"), model("a")),
    "parts-joined": (user("a", "b"), user("ab")),
    "argument": (call("x", q="a"), call("x", q="b")),
    "number-or-text": (call("x", q=1), call("x", q="1")),
    "null-or-nothing": (call("x", q=None), call("x")),
    "true-or-one": (result(True), result(1)),
    "image-of-a-result": (shot(b"a"), shot(b"b")),
}


@pytest.mark.parametrize(
    ("pair", "is_same"),
    [
        *(pytest.param(pair, True, id=name) for name, pair in SAME.items()),
        *(pytest.param(pair, False, id=name) for name, pair in DIFFERENT.items()),
    ],
)
def test_fingerprint(pair: tuple[types.Content, types.Content], is_same: bool) -> None:
    """Ids, signatures, and what a JSONB column alters are no part of what was said;
    whatever was said differently has another fingerprint."""
    left, right = pair
    assert (fingerprint(left) == fingerprint(right)) is is_same


def nested(depth: int, leaf: object = 1) -> object:
    """Lists in lists."""
    for _ in range(depth):
        leaf = [leaf]
    return leaf


def cyclic() -> dict[str, Any]:
    """A dict that holds itself, many times over."""
    value: dict[str, Any] = {"leaf": 1}
    value["again"] = [value] * 1_000
    return value


ODD_VALUES: dict[str, Callable[[], Any]] = {
    "deep-list": lambda: nested(10_000),
    "cycle": cyclic,
    "lone-surrogate": lambda: {"\udfff": "\ud800 half"},
    "long-integer": lambda: 10**5_000,
    "object": lambda: object,
    "detached": lambda: [DETACHED, {1: DETACHED, "1": 2}],
    "deeper-list": lambda: nested(10_001),
    "longer-integer": lambda: 10**5_000 + 1,
    "number-as-key": lambda: {1: 1, "1": 2},
}


@pytest.mark.parametrize("make", ODD_VALUES.values(), ids=ODD_VALUES.keys())
def test_odd_results_have_a_stable_fingerprint(make: Callable[[], Any]) -> None:
    """Whatever a tool returned has a fingerprint, the same each time."""
    item = raw_response({"result": make()})
    assert fingerprint(item) == fingerprint(raw_response({"result": make()}))
    assert len(fingerprint(item)) == FINGERPRINT_BYTES


def test_odd_results_do_not_collide() -> None:
    """What JSON refuses is told apart as well."""
    items = [raw_response({"result": make()}) for make in ODD_VALUES.values()]
    assert len(set(map(fingerprint, items))) == len(ODD_VALUES)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_fingerprint_survives_a_database(payload: dict[str, Any]) -> None:
    """A JSON round trip that sorts keys, as a JSONB column does, changes nothing."""
    stored = json.loads(json.dumps(payload, sort_keys=True))
    before, after = call("x"), call("x")
    for content, args in ((before, payload), (after, stored)):
        content.parts = [
            types.Part(function_call=types.FunctionCall(name="x", args=args))
        ]
    assert fingerprint(before) == fingerprint(after)
    assert fingerprint(response("x", payload)) == fingerprint(response("x", stored))


# --- the stored form ---


def prints(count: int, start: int = 0) -> list[bytes]:
    """Fingerprints that are all different."""
    return [struct.pack(">IH", n, 7) for n in range(start, start + count)]


@pytest.mark.parametrize("count", [0, RECENT_COUNT, 100_000])
def test_covered_set_of_any_length(count: int) -> None:
    """A covered set stays small, survives storage, and covers what it was made of."""
    items = prints(count)
    covered = cover(items)
    assert covered.content_count == count
    stored = encode_covered(covered)
    assert len(stored) <= 4_200
    assert decode_covered(stored) == covered
    assert align_covered(covered, items) == [(n, n) for n in range(count)]


@given(st.binary(max_size=60) | st.text(max_size=60))
def test_any_string_is_read_or_refused(raw: bytes | str) -> None:
    """Whatever stands in session state is a covered set or a ValueError."""
    stored = base64.b64encode(raw).decode() if isinstance(raw, bytes) else raw
    try:
        covered = decode_covered(stored)
    except ValueError:
        return
    assert encode_covered(covered) == stored


def test_forged_count_covers_nothing() -> None:
    """A number of older contents that the digest does not confirm is not believed."""
    head = struct.pack("<BIH8s", 3, 2_000, 0, b"digest..")
    forged = decode_covered(base64.b64encode(head).decode())
    assert forged.content_count == 2_000
    assert align_covered(forged, prints(2_000)) == []


# --- alignment ---

SHORT = {
    "edited": ("abcd", "abXd", [(0, 0), (1, 1), (3, 3)]),
    "inserted": ("abcd", "abXcd", [(0, 0), (1, 1), (2, 3), (3, 4)]),
    "deleted": ("abcd", "acd", [(0, 0), (2, 1), (3, 2)]),
    "rewound-and-on": ("abcd", "abef", [(0, 0), (1, 1)]),
    "repeated-and-rewound": ("aaaa", "aa", [(0, 0), (1, 1)]),
}


@pytest.mark.parametrize(
    ("made_of", "request_items", "expected"), SHORT.values(), ids=SHORT.keys()
)
def test_alignment(
    made_of: str, request_items: str, expected: list[tuple[int, int]]
) -> None:
    """What was summarized is found in order; whatever else there is stays."""
    covered = cover([item.encode() * FINGERPRINT_BYTES for item in made_of])
    items = [item.encode() * FINGERPRINT_BYTES for item in request_items]
    assert align_covered(covered, items) == expected


COUNT = 3_000
ITEMS = prints(COUNT)
NEW = prints(100, 900_000)
ALL = set(range(COUNT))
RECENT = set(range(COUNT - RECENT_COUNT, COUNT))
LONG = {
    "and-on": (ITEMS + NEW, ALL),
    "edited-older": ([*ITEMS[:900], *NEW[:1], *ITEMS[901:]], RECENT),
    "edited-recent": ([*ITEMS[:2_990], *NEW[:1], *ITEMS[2_991:]], ALL - {2_990}),
    "starts-among-the-older-and-on": (ITEMS[500:] + NEW, RECENT),
    "rewound-to-the-older": (ITEMS[:2_300] + NEW, set()),
    "rewound-to-the-recent": (ITEMS[:2_600] + NEW, set(range(2_600))),
    "recent-repeated-among-the-older": ([*NEW[:1], *ITEMS[-1:], *ITEMS[1:]], RECENT),
}


@pytest.mark.parametrize(("sent", "expected"), LONG.values(), ids=LONG.keys())
def test_alignment_of_a_long_history(sent: list[bytes], expected: set[int]) -> None:
    """A change among the older contents uncovers these, one among the recent itself."""
    matches = align_covered(cover(ITEMS), sent)
    assert all(ITEMS[left] == sent[right] for left, right in matches)
    assert {left for left, _ in matches} == expected


def test_contents_left_out_of_the_older_hide_no_others() -> None:
    """A first task that stays in the request is skipped, wherever it stands."""
    left_out = {0, 7, *range(100, 2_000, 3), 2_900}
    covered = cover([b"" if n in left_out else item for n, item in enumerate(ITEMS)])
    matches = align_covered(decode_covered(encode_covered(covered)), ITEMS + NEW)
    assert [left for left, _ in matches] == list(range(COUNT - len(left_out)))
    assert {right for _, right in matches} == ALL - left_out


WORDS = st.lists(st.sampled_from(prints(4)) | st.sampled_from(prints(60)), max_size=60)


@given(WORDS, WORDS)
def test_alignment_is_in_order_and_true(
    made_of: list[bytes], sent: list[bytes]
) -> None:
    """Matches ascend on both sides, join equal contents, and cover all of the same."""
    matches = align_covered(cover(made_of), sent)
    for (left, right), (next_left, next_right) in itertools.pairwise(matches):
        assert left < next_left
        assert right < next_right
    assert all(made_of[left] == sent[right] for left, right in matches)
    assert len(align_covered(cover(sent), sent)) == len(sent)


IN_ORDER = {
    "equal": ("abc", "abc", [(0, 0), (1, 1), (2, 2)]),
    "inserted": ("abc", "xaxbc", [(0, 1), (1, 3), (2, 4)]),
    "moved": ("abcd", "dabc", [(0, 1), (1, 2), (2, 3)]),
    "repeated": ("aba", "aba", [(0, 0), (1, 1), (2, 2)]),
    "not as often": ("aab", "ab", [(2, 1)]),
    "nothing": ("abc", "", []),
}


@pytest.mark.parametrize(("left", "right", "pairs"), IN_ORDER.values(), ids=IN_ORDER)
def test_align_in_order(left: str, right: str, pairs: list[tuple[int, int]]) -> None:
    """What is equal goes together as far as it keeps its order."""
    found = align_in_order(*([char.encode() for char in it] for it in (left, right)))
    assert found == pairs
