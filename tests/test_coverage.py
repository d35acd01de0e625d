"""Fingerprints, the stored covered set, and its alignment with a request."""

from __future__ import annotations

import base64
import datetime
import itertools
import json
import math
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

from contextguard_adk.history.coverage import (
    BLOCK_COUNT,
    FINGERPRINT_BYTES,
    MAX_BLOCKS,
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
    calls,
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
    max_leaves=12,
)


def content(*parts: types.Part, role: str = "user") -> types.Content:
    """A content with these parts."""
    return types.Content(role=role, parts=list(parts))


def blob(data: bytes, mime_type: str = "image/png") -> types.Part:
    """An image."""
    return types.Part.from_bytes(data=data, mime_type=mime_type)


def file(uri: str) -> types.Part:
    """A file that is named only."""
    return types.Part.from_uri(file_uri=uri, mime_type="text/plain")


def raw_response(payload: Any) -> types.Content:
    """A tool result that no validation has seen."""
    answer = types.FunctionResponse.model_construct(name="x", response=payload)
    part = types.Part.model_construct(function_response=answer)
    return types.Content.model_construct(role="user", parts=[part])


def shot(*images: bytes) -> types.Content:
    """A tool result with images of its own."""
    media = [
        types.FunctionResponsePart.from_bytes(data=data, mime_type="image/png")
        for data in images
    ]
    answer = types.FunctionResponse(name="look", response={"result": ""}, parts=media)
    return content(types.Part(function_response=answer))


def empty_shot() -> types.Content:
    """A tool result with a part that holds nothing."""
    media = [types.FunctionResponsePart()]
    answer = types.FunctionResponse(name="look", response={"result": ""}, parts=media)
    return content(types.Part(function_response=answer))


def named_shot(uri: str) -> types.Content:
    """A tool result with a file that is named only."""
    media = types.FunctionResponsePart.from_uri(file_uri=uri, mime_type="image/png")
    answer = types.FunctionResponse(name="look", response={"result": ""}, parts=[media])
    return content(types.Part(function_response=answer))


def code(text: str, signature: bytes | None = None) -> types.Part:
    """Code that the model runs."""
    return types.Part(
        executable_code=types.ExecutableCode(code=text, language=types.Language.PYTHON),
        thought_signature=signature,
    )


# --- fingerprints ---


@pytest.mark.parametrize(
    ("left", "right"),
    [
        pytest.param(call("x", "1", q="a"), call("x", "2", q="a"), id="call-id"),
        pytest.param(call("x", "1", q="a"), call("x", q="a"), id="no-call-id"),
        pytest.param(
            response("x", "ok", "1"), response("x", "ok"), id="id-of-response"
        ),
        pytest.param(call("x", a=1, b=2), call("x", b=2, a=1), id="key-order"),
        pytest.param(
            response("x", {"a": {"c": [1], "d": 2}}),
            response("x", {"a": {"d": 2, "c": [1]}}),
            id="nested-key-order",
        ),
        pytest.param(
            content(types.Part(text="a", thought_signature=b"1"), role="model"),
            model("a"),
            id="thought-signature",
        ),
        pytest.param(
            content(code("f()", b"1")), content(code("f()")), id="signature-of-code"
        ),
        pytest.param(
            types.Content.model_construct(
                role="user", parts=[None, types.Part(text="a")]
            ),
            user("a"),
            id="none-part",
        ),
        pytest.param(
            response("x", {"a": (1, 2)}), response("x", {"a": [1, 2]}), id="tuple"
        ),
        pytest.param(
            response("x", {"a": [1e22, (-2.5e30,)]}),
            response("x", {"a": [10**22, [-25 * 10**29]]}),
            id="float-stored-as-integer",
        ),
        pytest.param(
            response("x", {"a": -0.0}), response("x", {"a": 0.0}), id="negative-zero"
        ),
        pytest.param(
            response("x", {"a": {2: "b", 10: 1.5}}),
            response("x", {"a": {"10": 1.5, "2": "b"}}),
            id="number-keys",
        ),
    ],
)
def test_fingerprint_ignores(left: types.Content, right: types.Content) -> None:
    """Ids, signatures and the order of keys are no part of what was said."""
    assert fingerprint(left) == fingerprint(right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        pytest.param(user("abc"), user("abd"), id="one-character"),
        pytest.param(user("abc"), user("abc "), id="one-blank"),
        pytest.param(user("a"), model("a"), id="role"),
        pytest.param(user("a", "b"), user("ab"), id="parts-joined"),
        pytest.param(user("a", "b"), user("b", "a"), id="order-of-parts"),
        pytest.param(user("a", "b"), user("a\0tb"), id="part-in-a-text"),
        pytest.param(user("a", "b"), user("a1:t1:b"), id="part-and-length-in-a-text"),
        pytest.param(user(), types.Content(role="userx"), id="role-continued"),
        pytest.param(call("x", q="a"), call("x", q="b"), id="argument"),
        pytest.param(call("x", q="a"), call("y", q="a"), id="tool"),
        pytest.param(call("x", q=1), call("x", q="1"), id="number-or-text"),
        pytest.param(call("x", q=None), call("x"), id="null-or-nothing"),
        pytest.param(call("x"), response("x", {}), id="call-or-response"),
        pytest.param(response("x", "a"), response("x", "b"), id="result"),
        pytest.param(response("x", True), response("x", 1), id="true-or-one"),
        pytest.param(shot(b"a"), shot(b"b"), id="image-of-a-result"),
        pytest.param(shot(b"a"), shot(), id="no-image-of-a-result"),
        pytest.param(empty_shot(), shot(), id="empty-part-of-a-result"),
        pytest.param(
            response("x", {"a": 1e22}), response("x", {"a": 1e23}), id="large-float"
        ),
        pytest.param(
            response("x", {"a": "1e+22"}),
            response("x", {"a": 1e22}),
            id="float-as-text",
        ),
        pytest.param(
            named_shot("gs://b/1"), named_shot("gs://b/2"), id="file-of-a-result"
        ),
        pytest.param(
            shot(b"a"),
            content(response_part("look", ""), blob(b"a")),
            id="image-of-or-beside-a-result",
        ),
        pytest.param(content(blob(b"a")), content(blob(b"b")), id="image"),
        pytest.param(
            content(blob(b"a")), content(blob(b"a", "image/gif")), id="media-type"
        ),
        pytest.param(content(file("gs://b/1")), content(file("gs://b/2")), id="file"),
        pytest.param(content(code("f()")), content(code("g()")), id="code"),
        pytest.param(content(code("f()")), user("f()"), id="code-or-text"),
    ],
)
def test_fingerprint_differs(left: types.Content, right: types.Content) -> None:
    """Whatever was said differently has another fingerprint."""
    assert fingerprint(left) != fingerprint(right)


def nested(depth: int, leaf: object = 1) -> object:
    """Lists in lists."""
    value = leaf
    for _ in range(depth):
        value = [value]
    return value


def cyclic() -> dict[str, Any]:
    """A dict that holds itself, many times over."""
    value: dict[str, Any] = {"leaf": 1}
    value["again"] = [value] * 1_000
    return value


class Opaque:
    """A value of which JSON knows nothing."""

    def __repr__(self) -> str:
        return "Opaque()"


ODD_VALUES: list[Any] = [
    pytest.param(lambda: nested(10_000), id="deep-list"),
    pytest.param(lambda: {"a": nested(10_000)}, id="deep-in-a-dict"),
    pytest.param(cyclic, id="cycle"),
    pytest.param(lambda: math.nan, id="nan"),
    pytest.param(lambda: math.inf, id="infinity"),
    pytest.param(lambda: "\ud800 half", id="lone-surrogate"),
    pytest.param(lambda: {"\udfff": 1}, id="lone-surrogate-key"),
    pytest.param(lambda: b"plain", id="bytes"),
    pytest.param(lambda: b"\xff\x00", id="bytes-no-text"),
    pytest.param(lambda: datetime.datetime(2030, 1, 2, 3, 4), id="datetime"),
    pytest.param(lambda: datetime.timedelta(seconds=1), id="timedelta"),
    pytest.param(lambda: {1, 2}, id="set"),
    pytest.param(lambda: {1: "a", "b": 2}, id="mixed-keys"),
    pytest.param(lambda: {(1, 2): "a"}, id="tuple-key"),
    pytest.param(lambda: 10**5_000, id="long-integer"),
    pytest.param(lambda: [10**5_000, nested(10_000)], id="long-integer-deep"),
    pytest.param(Opaque, id="object"),
    pytest.param(lambda: user("a"), id="pydantic-model"),
    pytest.param(lambda: None, id="none"),
]


@pytest.mark.parametrize("make", ODD_VALUES)
def test_odd_results_have_a_stable_fingerprint(make: Callable[[], Any]) -> None:
    """Whatever a tool returned has a fingerprint, the same each time."""
    item = raw_response({"result": make()})
    assert fingerprint(item) == fingerprint(raw_response({"result": make()}))
    assert fingerprint(item) != fingerprint(response("x", "something else"))
    assert len(fingerprint(item)) == FINGERPRINT_BYTES


@pytest.mark.parametrize(
    ("left", "right"),
    [
        pytest.param(nested(10_000), nested(10_001), id="depth"),
        pytest.param(nested(10_000), nested(10_000, 2), id="leaf"),
        pytest.param([nested(10_000), 1], [1, nested(10_000)], id="order"),
        pytest.param([[nested(10_000), 1]], [nested(10_000), [1]], id="shape"),
        pytest.param({1: "a", "b": "c"}, {1: "a", "b": "d"}, id="mixed-keys-value"),
        pytest.param({1: "a", "b": "c"}, {1: "a", "d": "c"}, id="mixed-keys-key"),
        pytest.param({1: [], "b": 0}, {1: {}, "b": 0}, id="list-or-dict"),
        pytest.param({1: True, "b": 0}, {1: 1, "b": 0}, id="true-or-one"),
    ],
)
def test_odd_results_that_differ(left: Any, right: Any) -> None:
    """What cannot be written as JSON is told apart nevertheless."""
    one, other = raw_response({"result": left}), raw_response({"result": right})
    assert fingerprint(one) != fingerprint(other)


def test_odd_role_has_a_fingerprint() -> None:
    """A role may be missing, or hold what is no text."""
    assert fingerprint(types.Content()) == fingerprint(types.Content(role=""))
    assert fingerprint(types.Content(role="\ud800")) != fingerprint(types.Content())


@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans())
def test_fingerprint_survives_a_database(
    payload: dict[str, Any], is_call: bool
) -> None:
    """A JSON round trip that sorts keys, as a JSONB column does, changes nothing."""
    stored = json.loads(json.dumps(payload, sort_keys=True))
    if is_call:
        assert fingerprint(call("x", **payload)) == fingerprint(call("x", **stored))
    else:
        assert fingerprint(response("x", payload)) == fingerprint(response("x", stored))


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param({"rows": {10: "a", 9: "b"}}, id="integers"),
        pytest.param({"rows": {10.5: "a", 9.5: "b"}}, id="fractions"),
        pytest.param({"rows": {-1e-7: "a", 5e-8: "b"}}, id="small"),
        pytest.param({"rows": {-1e22: "a", 5e22: "b"}}, id="large"),
    ],
)
def test_numbers_as_keys_survive_a_database(payload: dict[str, Any]) -> None:
    """JSON turns keys into texts, which have another order than numbers."""
    stored = json.loads(json.dumps(payload))
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


def covered_right(covered: Covered, items: Sequence[bytes]) -> set[int]:
    """The positions in a request that are covered."""
    return {right for _, right in align_covered(covered, items)}


SIZES = [
    0,
    1,
    RECENT_COUNT,
    RECENT_COUNT + BLOCK_COUNT - 1,
    RECENT_COUNT + BLOCK_COUNT,
    RECENT_COUNT + MAX_BLOCKS * BLOCK_COUNT,
    RECENT_COUNT + (MAX_BLOCKS + 1) * BLOCK_COUNT,
    RECENT_COUNT + (MAX_BLOCKS + 1) * BLOCK_COUNT + 31,
    RECENT_COUNT + 2 * MAX_BLOCKS * BLOCK_COUNT + 100,
    20_000,
    100_000,
]


@pytest.mark.parametrize("count", SIZES)
def test_covered_set_of_any_length(count: int) -> None:
    """A covered set stays small, survives storage, and covers what it was made of."""
    items = prints(count)
    covered = cover(items)
    assert covered.content_count == count
    assert len(covered.blocks) <= MAX_BLOCKS
    stored = encode_covered(covered)
    assert len(stored) <= 9_500
    assert decode_covered(stored) == covered
    assert align_covered(covered, items) == [(n, n) for n in range(count)]


def test_newest_contents_are_kept_one_by_one() -> None:
    """At least the newest 512 fingerprints stand in the set as they are."""
    items = prints(10_000)
    recent = cover(items).recent
    assert RECENT_COUNT <= len(recent) < RECENT_COUNT + BLOCK_COUNT
    assert list(recent) == items[-len(recent) :]


def test_older_blocks_are_joined_first() -> None:
    """The farther back, the coarser the blocks."""
    levels = [level for level, _ in cover(prints(30_000)).blocks]
    assert levels == sorted(levels, reverse=True)


def forge(version: int, block_count: int, recent_count: int, size: int) -> str:
    """A string with a right head and any length."""
    head = struct.pack("<BHH", version, block_count, recent_count)
    return base64.b64encode(head + bytes(size)).decode()


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param("", id="empty"),
        pytest.param("A", id="no-base64"),
        pytest.param("not base64!", id="blanks"),
        pytest.param("Ä" * 8, id="not-ascii"),
        pytest.param("\ud800", id="lone-surrogate"),
        pytest.param("AQAA", id="short-head"),
        pytest.param(forge(2, 0, 0, 0), id="version"),
        pytest.param(forge(1, 0, 1, 0), id="recent-missing"),
        pytest.param(forge(1, 1, 0, 8), id="block-cut-off"),
        pytest.param(forge(1, 0, 0, 1), id="trailing"),
        pytest.param(forge(1, 65_535, 65_535, 100), id="large-counts"),
    ],
)
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


@pytest.mark.parametrize("level", [0, 20, 255])
def test_forged_blocks_cover_nothing(level: int) -> None:
    """Blocks of any claimed length are looked for and not found, in linear time."""
    forged = Covered(((level, bytes(8)),) * MAX_BLOCKS, ())
    covered = decode_covered(encode_covered(forged))
    assert align_covered(covered, prints(2_000)) == []
    growth = time_growth(prints, lambda sent: align_covered(covered, sent), 1_000)
    assert growth < MAX_GROWTH


# --- alignment ---


@pytest.mark.parametrize(
    ("made_of", "request_items", "expected"),
    [
        pytest.param("", "", [], id="empty"),
        pytest.param("", "ab", [], id="nothing-covered"),
        pytest.param("ab", "", [], id="nothing-sent"),
        pytest.param("ab", "abcd", [(0, 0), (1, 1)], id="prefix"),
        pytest.param("abcd", "abXd", [(0, 0), (1, 1), (3, 3)], id="edited"),
        pytest.param("abcd", "abXcd", [(0, 0), (1, 1), (2, 3), (3, 4)], id="inserted"),
        pytest.param("abcd", "acd", [(0, 0), (2, 1), (3, 2)], id="deleted"),
        pytest.param("abcd", "cdef", [(2, 0), (3, 1)], id="starts-in-the-middle"),
        pytest.param("abcd", "ab", [(0, 0), (1, 1)], id="rewound"),
        pytest.param("abcd", "abef", [(0, 0), (1, 1)], id="rewound-and-on"),
        pytest.param("abcd", "efgh", [], id="another-history"),
        pytest.param("ab", "ba", [(0, 1)], id="order-counts"),
        pytest.param("aba", "abaa", [(0, 0), (1, 1), (2, 2)], id="repeated-later"),
        pytest.param("aaaa", "aa", [(0, 0), (1, 1)], id="repeated-and-rewound"),
    ],
)
def test_alignment(
    made_of: str, request_items: str, expected: list[tuple[int, int]]
) -> None:
    """What was summarised is found in order; whatever else there is stays."""
    covered = cover([item.encode() * FINGERPRINT_BYTES for item in made_of])
    items = [item.encode() * FINGERPRINT_BYTES for item in request_items]
    assert align_covered(covered, items) == expected


COUNT = 3_000


def edited(at: int) -> list[bytes]:
    """A long history of which one content was changed."""
    items = prints(COUNT)
    items[at] = b"edited"
    return items


@pytest.mark.parametrize("at", [0, 31, 32, 1_000, 1_023, 2_400])
def test_edit_brings_back_one_block(at: int) -> None:
    """A change in the older part uncovers the block that it is in, not more."""
    start = at - at % BLOCK_COUNT
    back = set(range(COUNT)) - covered_right(cover(prints(COUNT)), edited(at))
    assert back == set(range(start, start + BLOCK_COUNT))


def test_edit_among_the_recent_brings_back_itself() -> None:
    """A change in the newer part uncovers one content."""
    at = COUNT - 10
    covered = cover(prints(COUNT))
    assert set(range(COUNT)) - covered_right(covered, edited(at)) == {at}


@pytest.mark.parametrize("count", [1, 5, 64])
@pytest.mark.parametrize("at", [0, 100, 1_000])
def test_inserted_contents_are_not_covered(at: int, count: int) -> None:
    """Contents that appear in the older part uncover at most their block."""
    items = prints(COUNT)
    new = prints(count, 900_000)
    sent = [*items[:at], *new, *items[at:]]
    found = covered_right(cover(items), sent)
    assert not found & set(range(at, at + count))
    assert len(found) >= COUNT - BLOCK_COUNT


@pytest.mark.parametrize("count", [1, 5, 64])
@pytest.mark.parametrize("at", [0, 100, 1_000])
def test_deleted_contents_uncover_their_blocks_only(at: int, count: int) -> None:
    """Contents that are gone leave the rest covered but for the blocks they were in."""
    items = prints(COUNT)
    sent = items[:at] + items[at + count :]
    touched = (at + count - 1) // BLOCK_COUNT - at // BLOCK_COUNT + 1
    found = covered_right(cover(items), sent)
    assert len(found) >= COUNT - touched * BLOCK_COUNT


@pytest.mark.parametrize("offset", [1, 32, 500, 2_000, 2_600, 2_999])
def test_history_that_starts_in_the_middle(offset: int) -> None:
    """Of a partly loaded history all but an incomplete first block is covered."""
    sent = prints(COUNT)[offset:]
    found = covered_right(cover(prints(COUNT)), sent)
    assert len(sent) - len(found) < BLOCK_COUNT
    assert len(sent) - 1 in found


@pytest.mark.parametrize("left", [0, 100, 2_300, 2_600])
def test_rewound_history_stays_covered(left: int) -> None:
    """After a rewind what is left is covered, and what follows is not."""
    new = prints(50, 900_000)
    found = covered_right(cover(prints(COUNT)), prints(COUNT)[:left] + new)
    assert len(found) > left - BLOCK_COUNT
    assert found <= set(range(left))


def test_long_rest_is_aligned_in_linear_time() -> None:
    """After an edit among the recent, time is in proportion to the new history."""
    items = prints(RECENT_COUNT)
    covered = cover(items)

    def edit(count: int) -> list[bytes]:
        return [b"edited", *items[1:], *prints(count, 900_000)]

    assert covered_right(covered, edit(5_000)) == set(range(1, RECENT_COUNT))
    growth = time_growth(edit, lambda sent: covered_right(covered, sent), 5_000)
    assert growth < MAX_GROWTH


def test_repeated_contents_are_aligned_in_linear_time() -> None:
    """A history of a few words said again and again takes no more than others."""

    def repeat(count: int) -> tuple[Covered, list[bytes]]:
        chance = random.Random(1)
        items = [chance.choice(prints(3)) for _ in range(count)]
        return cover(items[: count // 2]), items[count // 6 :]

    growth = time_growth(repeat, lambda made: covered_right(*made), 2_000)
    assert growth < MAX_GROWTH


WORDS = st.lists(st.sampled_from(prints(4)) | st.sampled_from(prints(60)), max_size=60)


@given(WORDS)
def test_alignment_covers_what_it_was_made_of(items: list[bytes]) -> None:
    """A covered set covers all of the history that it was made of."""
    assert align_covered(cover(items), items) == [(n, n) for n in range(len(items))]


@given(WORDS, WORDS)
def test_alignment_is_in_order_and_true(
    made_of: list[bytes], sent: list[bytes]
) -> None:
    """Matches ascend on both sides and never join different contents."""
    matches = align_covered(cover(made_of), sent)
    for (left, right), (next_left, next_right) in itertools.pairwise(matches):
        assert left < next_left
        assert right < next_right
    assert all(made_of[left] == sent[right] for left, right in matches)


@given(st.integers(600, 1_500), st.data())
def test_alignment_of_long_histories_is_true(count: int, data: st.DataObject) -> None:
    """With blocks too, only contents that were covered are taken for covered."""
    items = prints(count)
    sent = list(items)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(sent) - 1))
        edit = data.draw(st.sampled_from(["change", "insert", "delete", "cut"]))
        new = prints(1, 900_000 + at)
        if edit == "cut":
            sent = sent[at:]
        else:
            sent[at : at + (edit != "insert")] = [] if edit == "delete" else new
        if not sent:
            break
    matches = align_covered(cover(items), sent)
    assert all(items[left] == sent[right] for left, right in matches)
    assert matches == sorted(matches)


def test_parallel_calls_have_one_fingerprint() -> None:
    """Several calls in one content are one thing that was said."""
    parts = [part for name in ("x", "y") for part in call(name).parts or ()]
    assert fingerprint(calls(*parts)) != fingerprint(calls(*reversed(parts)))
