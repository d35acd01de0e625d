"""Fingerprints, the stored covered set, and its alignment with a request."""

from __future__ import annotations

import base64
import datetime
import itertools
import json
import math
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

from contextguard_adk.history.coverage import (
    FINGERPRINT_BYTES,
    RECENT_COUNT,
    Covered,
    align_covered,
    cover,
    decode_covered,
    encode_covered,
    fingerprint,
)
from tests.builders import (
    MadeHistory,
    call,
    call_part,
    histories,
    model,
    response,
    response_part,
    user,
)
from tests.growth import MAX_GROWTH, time_growth

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(-1e9, 1e9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=8,
)


def content(*parts: types.Part, role: str = "user") -> types.Content:
    """A content with these parts."""
    return types.Content(role=role, parts=list(parts))


def image(data: bytes, mime_type: str = "image/png") -> types.Content:
    """A message that is an image."""
    return content(types.Part.from_bytes(data=data, mime_type=mime_type))


def file(uri: str) -> types.Content:
    """A message that is a file, named only."""
    return content(types.Part.from_uri(file_uri=uri, mime_type="text/plain"))


def raw_response(payload: Any) -> types.Content:
    """A tool result that no validation has seen."""
    answer = types.FunctionResponse.model_construct(name="x", response=payload)
    part = types.Part.model_construct(function_response=answer)
    return types.Content.model_construct(role="user", parts=[part])


def shot(*media: types.FunctionResponsePart) -> types.Content:
    """A tool result with files of its own."""
    answer = types.FunctionResponse(
        name="look", response={"result": ""}, parts=list(media)
    )
    return content(types.Part(function_response=answer))


def pixels(data: bytes) -> types.FunctionResponsePart:
    """An image of a tool result."""
    return types.FunctionResponsePart.from_bytes(data=data, mime_type="image/png")


def address(uri: str) -> types.FunctionResponsePart:
    """A file of a tool result, named only."""
    return types.FunctionResponsePart.from_uri(file_uri=uri, mime_type="image/png")


def code(text: str, signature: bytes | None = None) -> types.Content:
    """Code that the model runs."""
    run = types.ExecutableCode(code=text, language=types.Language.PYTHON)
    return content(types.Part(executable_code=run, thought_signature=signature))


def result(value: Any) -> types.Content:
    """A tool result that holds a value."""
    return response("x", {"a": value})


# --- fingerprints ---

SAME = {
    "call-id": (call("x", "1", q="a"), call("x", q="a")),
    "response-id": (response("x", "ok", "1"), response("x", "ok")),
    "key-order": (result({"c": [1], "d": 2}), result({"d": 2, "c": [1]})),
    "signature": (
        content(types.Part(text="a", thought_signature=b"1"), role="model"),
        model("a"),
    ),
    "signature-of-code": (code("f()", b"1"), code("f()")),
    "none-part": (
        types.Content.model_construct(role="user", parts=[None, types.Part(text="a")]),
        user("a"),
    ),
    "no-role": (types.Content(), types.Content(role="")),
    "tuple": (result((1, 2)), result([1, 2])),
    "float-stored-as-integer": (
        result([1e22, (-2.5e30,)]),
        result([10**22, [-25 * 10**29]]),
    ),
    "negative-zero": (result(-0.0), result(0.0)),
    "number-keys": (result({2: "b", 10: 1.5}), result({"10": 1.5, "2": "b"})),
    "fraction-keys": (result({10.5: 1, 9.5: 2}), result({"10.5": 1, "9.5": 2})),
    "large-keys": (result({-1e22: 1, 5e22: 2}), result({"-1e+22": 1, "5e+22": 2})),
}


@pytest.mark.parametrize(("left", "right"), SAME.values(), ids=SAME.keys())
def test_fingerprint_ignores(left: types.Content, right: types.Content) -> None:
    """Ids, signatures, and what a JSONB column alters are no part of what was said."""
    assert fingerprint(left) == fingerprint(right)


DIFFERENT = {
    "one-blank": (user("abc"), user("abc ")),
    "role": (user("a"), model("a")),
    "surrogate-role": (types.Content(role="\ud800"), types.Content()),
    "role-continued": (user(), types.Content(role="userx")),
    "parts-joined": (user("a", "b"), user("ab")),
    "order-of-parts": (user("a", "b"), user("b", "a")),
    "order-of-calls": (
        content(call_part("x"), call_part("y")),
        content(call_part("y"), call_part("x")),
    ),
    "part-in-a-text": (user("a", "b"), user("a1:t1:b")),
    "argument": (call("x", q="a"), call("x", q="b")),
    "tool": (call("x", q="a"), call("y", q="a")),
    "number-or-text": (call("x", q=1), call("x", q="1")),
    "null-or-nothing": (call("x", q=None), call("x")),
    "call-or-response": (call("x"), response("x", {})),
    "true-or-one": (result(True), result(1)),
    "large-float": (result(1e22), result(1e23)),
    "float-as-text": (result("1e+22"), result(1e22)),
    "image-of-a-result": (shot(pixels(b"a")), shot(pixels(b"b"))),
    "no-image-of-a-result": (shot(pixels(b"a")), shot()),
    "empty-part-of-a-result": (shot(types.FunctionResponsePart()), shot()),
    "file-of-a-result": (shot(address("gs://b/1")), shot(address("gs://b/2"))),
    "image-of-or-beside-a-result": (
        shot(pixels(b"a")),
        content(response_part("look", ""), *(image(b"a").parts or ())),
    ),
    "image": (image(b"a"), image(b"b")),
    "media-type": (image(b"a"), image(b"a", "image/gif")),
    "file": (file("gs://b/1"), file("gs://b/2")),
    "code": (code("f()"), code("g()")),
    "code-or-text": (code("f()"), user("f()")),
}


@pytest.mark.parametrize(("left", "right"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_fingerprint_differs(left: types.Content, right: types.Content) -> None:
    """Whatever was said differently has another fingerprint."""
    assert fingerprint(left) != fingerprint(right)


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


class Opaque:
    """A value of which JSON knows nothing."""

    def __repr__(self) -> str:
        return "Opaque()"


ODD_VALUES: dict[str, Callable[[], Any]] = {
    "deep-list": lambda: nested(10_000),
    "cycle": cyclic,
    "nan": lambda: math.nan,
    "infinity": lambda: math.inf,
    "lone-surrogate": lambda: {"\udfff": "\ud800 half"},
    "bytes-no-text": lambda: b"\xff\x00",
    "datetime": lambda: datetime.datetime(2030, 1, 2, 3, 4),
    "set": lambda: {1, 2},
    "mixed-keys": lambda: {1: "a", "b": 2},
    "tuple-key": lambda: {(1, 2): "a"},
    "long-integer": lambda: 10**5_000,
    "object": Opaque,
    "pydantic-model": lambda: user("a"),
}


@pytest.mark.parametrize("make", ODD_VALUES.values(), ids=ODD_VALUES.keys())
def test_odd_results_have_a_stable_fingerprint(make: Callable[[], Any]) -> None:
    """Whatever a tool returned has a fingerprint, the same each time."""
    item = raw_response({"result": make()})
    assert fingerprint(item) == fingerprint(raw_response({"result": make()}))
    assert fingerprint(item) != fingerprint(response("x", "something else"))
    assert len(fingerprint(item)) == FINGERPRINT_BYTES


ODD_PAIRS: dict[str, tuple[Any, Any]] = {
    "depth": (nested(10_000), nested(10_001)),
    "leaf": (nested(10_000), nested(10_000, 2)),
    "order": ([nested(10_000), 1], [1, nested(10_000)]),
    "shape": ([[nested(10_000), 1]], [nested(10_000), [1]]),
    "mixed-keys-value": ({1: "a", "b": "c"}, {1: "a", "b": "d"}),
    "mixed-keys-key": ({1: "a", "b": "c"}, {1: "a", "d": "c"}),
    "list-or-dict": ({1: [], "b": 0}, {1: {}, "b": 0}),
    "true-or-one": ({1: True, "b": 0}, {1: 1, "b": 0}),
}


@pytest.mark.parametrize(("left", "right"), ODD_PAIRS.values(), ids=ODD_PAIRS.keys())
def test_odd_results_that_differ(left: Any, right: Any) -> None:
    """What cannot be written as JSON has a fingerprint of its own nevertheless."""
    one, other = raw_response({"result": left}), raw_response({"result": right})
    assert fingerprint(one) != fingerprint(other)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_fingerprint_survives_a_database(payload: dict[str, Any]) -> None:
    """A JSON round trip that sorts keys, as a JSONB column does, changes nothing."""
    stored = json.loads(json.dumps(payload, sort_keys=True))
    assert fingerprint(call("x", **payload)) == fingerprint(call("x", **stored))
    assert fingerprint(response("x", payload)) == fingerprint(response("x", stored))


@given(st.lists(st.text(min_size=1), min_size=1), st.lists(st.text(min_size=1)))
def test_fingerprints_of_different_texts_differ(
    left: list[str], right: list[str]
) -> None:
    """No way to cut a text into parts gives another content's fingerprint."""
    is_same = fingerprint(user(*left)) == fingerprint(user(*right))
    assert is_same == (left == right)


@given(histories())
def test_fingerprint_of_an_event_read_back(made: MadeHistory) -> None:
    """A content that a session service wrote and read has the same fingerprint."""
    for item in made.contents:
        stored = types.Content.model_validate_json(item.model_dump_json())
        assert fingerprint(stored) == fingerprint(item)


# --- the stored form ---


def prints(count: int, start: int = 0) -> list[bytes]:
    """Fingerprints that are all different."""
    return [struct.pack(">IH", n, 7) for n in range(start, start + count)]


@pytest.mark.parametrize("count", [0, 1, RECENT_COUNT, RECENT_COUNT + 1, 100_000])
def test_covered_set_of_any_length(count: int) -> None:
    """A covered set stays small, survives storage, and covers what it was made of."""
    items = prints(count)
    covered = cover(items)
    assert covered.content_count == count
    stored = encode_covered(covered)
    assert len(stored) <= 4_200
    assert decode_covered(stored) == covered
    assert align_covered(covered, items) == [(n, n) for n in range(count)]


def forge(
    version: int, older_count: int, size: int, digest: bytes = b"digest.."
) -> str:
    """A string with a right head and any length."""
    head = struct.pack("<BI8s", version, older_count, digest)
    return base64.b64encode(head + bytes(size)).decode()


GARBAGE = {
    "empty": "",
    "blanks": "not base64!",
    "not-ascii": "Ä" * 8,
    "lone-surrogate": "\ud800",
    "short-head": "AgAA",
    "version": forge(9, 600, 0),
    "digest-of-nothing": forge(2, 0, 0),
    "cut-off": forge(2, 600, FINGERPRINT_BYTES - 1),
    "too-many": forge(2, 600, FINGERPRINT_BYTES * (RECENT_COUNT + 1)),
}


@pytest.mark.parametrize("stored", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_refused(stored: str) -> None:
    """A string that is no covered set is a ValueError and nothing else."""
    with pytest.raises(ValueError, match=r"covered set|ASCII"):
        decode_covered(stored)


@given(st.binary(max_size=60) | st.text(max_size=60))
def test_any_string_is_read_or_refused(raw: bytes | str) -> None:
    """Whatever stands in session state is a covered set or a ValueError."""
    stored = base64.b64encode(raw).decode() if isinstance(raw, bytes) else raw
    try:
        covered = decode_covered(stored)
    except ValueError:
        return
    assert encode_covered(covered) == stored


@pytest.mark.parametrize("older_count", [1, 2_000, 2_000_000_000])
def test_forged_count_covers_nothing(older_count: int) -> None:
    """A number of older contents that the digest does not confirm is not believed."""
    forged = decode_covered(forge(2, older_count, 0))
    assert forged.content_count == older_count
    assert align_covered(forged, prints(2_000)) == []


# --- alignment ---

SHORT = {
    "empty": ("", "", []),
    "nothing-covered": ("", "ab", []),
    "nothing-sent": ("ab", "", []),
    "prefix": ("ab", "abcd", [(0, 0), (1, 1)]),
    "edited": ("abcd", "abXd", [(0, 0), (1, 1), (3, 3)]),
    "inserted": ("abcd", "abXcd", [(0, 0), (1, 1), (2, 3), (3, 4)]),
    "deleted": ("abcd", "acd", [(0, 0), (2, 1), (3, 2)]),
    "starts-in-the-middle": ("abcd", "cdef", [(2, 0), (3, 1)]),
    "rewound-and-on": ("abcd", "abef", [(0, 0), (1, 1)]),
    "another-history": ("abcd", "efgh", []),
    "order-counts": ("ab", "ba", [(0, 1)]),
    "repeated-later": ("aba", "abaa", [(0, 0), (1, 1), (2, 2)]),
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
OLDER_COUNT = COUNT - RECENT_COUNT
ITEMS = prints(COUNT)
NEW = prints(100, 900_000)


def recent(first: int = OLDER_COUNT, last: int = COUNT) -> set[int]:
    """Positions of recent contents."""
    return set(range(first, last))


LONG = {
    "unchanged": (ITEMS, set(range(COUNT))),
    "and-on": (ITEMS + NEW, set(range(COUNT))),
    "edited-first": ([*NEW[:1], *ITEMS[1:]], recent()),
    "edited-older": ([*ITEMS[:900], *NEW[:1], *ITEMS[901:]], recent()),
    "edited-recent": (
        [*ITEMS[: COUNT - 10], *NEW[:1], *ITEMS[COUNT - 9 :]],
        set(range(COUNT)) - {COUNT - 10},
    ),
    "inserted-older": ([*ITEMS[:900], *NEW, *ITEMS[900:]], recent()),
    "inserted-recent": ([*ITEMS[:2_900], *NEW, *ITEMS[2_900:]], set(range(COUNT))),
    "deleted-older": (ITEMS[:900] + ITEMS[964:], recent()),
    "starts-among-the-older": (ITEMS[500:], recent()),
    "starts-among-the-older-and-on": (ITEMS[500:] + NEW, recent()),
    "starts-among-the-recent": (ITEMS[2_600:] + NEW, recent(2_600)),
    "rewound-to-the-older": (ITEMS[:2_300] + NEW, set()),
    "rewound-to-the-recent": (ITEMS[:2_600] + NEW, set(range(2_600))),
    "recent-repeated-among-the-older": (
        [*NEW[:1], *ITEMS[-1:], *ITEMS[1:]],
        recent(),
    ),
    "recent-repeated-later": ([*ITEMS[9:], *NEW, *ITEMS[-1:]], recent()),
}


@pytest.mark.parametrize(("sent", "expected"), LONG.values(), ids=LONG.keys())
def test_alignment_of_a_long_history(sent: list[bytes], expected: set[int]) -> None:
    """A change among the older contents uncovers these, one among the recent itself."""
    matches = align_covered(cover(ITEMS), sent)
    assert all(ITEMS[left] == sent[right] for left, right in matches)
    assert {left for left, _ in matches} == expected


def test_repeated_contents_are_aligned_in_linear_time() -> None:
    """A history of a few words said again and again takes no more than others."""

    def repeat(count: int) -> tuple[Covered, list[bytes]]:
        chance = random.Random(1)
        items = [chance.choice(prints(3)) for _ in range(count)]
        return cover(items[: count // 2]), items[count // 6 :]

    growth = time_growth(repeat, lambda made: align_covered(*made), 2_000)
    assert growth < MAX_GROWTH


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
