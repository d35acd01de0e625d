"""Shortening tool results, wherever strings stand in them."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

from contextguard_adk.history.coverage import handle_of
from contextguard_adk.history.truncation import (
    MAX_DEPTH,
    Truncation,
    truncate_content,
    truncate_text,
    truncate_value,
)
from tests.builders import call, model, response, response_part, responses, user

BARE = Truncation(max_length=10, show_truncation_notice=False)
SMART = Truncation(
    max_length=10,
    show_truncation_notice=False,
    smart_truncate=True,
    head_length=3,
    tail_length=2,
)
NO_HEAD = replace(SMART, head_length=0)
NOTHING = replace(SMART, head_length=0, tail_length=0)


@pytest.mark.parametrize(
    ("text", "truncation", "wanted"),
    [
        pytest.param("", BARE, "", id="empty"),
        pytest.param("0123456789", BARE, "0123456789", id="just fits"),
        pytest.param("0123456789a", BARE, "0123456789", id="head"),
        pytest.param("0123456789a", SMART, "0129a", id="head and tail"),
        pytest.param("éééééééééé", BARE, "éééééééééé", id="characters, not bytes"),
        pytest.param("漢" * 12, BARE, "漢" * 10, id="multi-byte"),
        pytest.param("😀" * 12, BARE, "😀" * 10, id="astral"),
        pytest.param("a" * 9 + "\ud83d\ude00x", BARE, "a" * 9, id="pair at the cut"),
        pytest.param(
            "ab\ud83d\ude00" + "c" * 9, SMART, "abcc", id="pair at the head's end"
        ),
        pytest.param(
            "a" * 10 + "\ud83d\ude00b",
            SMART,
            "aaa\ud83d\ude00b",
            id="pair at the tail's start",
        ),
        pytest.param("0123456789a", NO_HEAD, "9a", id="tail alone"),
        pytest.param("0123456789a", NOTHING, "", id="nothing"),
        pytest.param("a" * 9 + "\ud83dxx", BARE, "a" * 9 + "\ud83d", id="lone half"),
    ],
)
def test_text_is_cut_between_characters(
    text: str, truncation: Truncation, wanted: str
) -> None:
    """What is too long keeps its head, or head and tail; no character is split."""
    assert truncate_text(text, truncation) == wanted


def test_a_notice_says_how_much_is_missing() -> None:
    """The model sees that something was left out, and how much."""
    shortened = truncate_text("x" * 95, Truncation(max_length=10))
    assert shortened == "x" * 10 + "\n[… truncated: 10 of 95 characters kept …]\n"


@given(count=st.integers(0, 120), is_smart=st.booleans())
def test_a_notice_never_makes_a_string_longer(count: int, is_smart: bool) -> None:
    """Where the notice takes as much as the cut gains, the string stays."""
    text = "x" * count
    truncation = replace(SMART if is_smart else BARE, show_truncation_notice=True)
    shortened = truncate_text(text, truncation)
    assert len(shortened) <= len(text)
    assert (shortened == text) or "truncated" in shortened


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        pytest.param("y" * 12, "y" * 10, id="string"),
        pytest.param({"a": "y" * 12}, {"a": "y" * 10}, id="in a dict"),
        pytest.param(["y" * 12, 1], ["y" * 10, 1], id="in a list"),
        pytest.param(
            {"a": [{"b": ["y" * 12]}]}, {"a": [{"b": ["y" * 10]}]}, id="nested"
        ),
        pytest.param({"y" * 12: 1}, {"y" * 12: 1}, id="keys stay"),
        pytest.param(10**20, 10**20, id="number"),
        pytest.param(None, None, id="nothing"),
        pytest.param(True, True, id="truth"),
    ],
)
def test_strings_are_found_in_nested_values(value: Any, wanted: Any) -> None:
    """Strings are shortened wherever they stand; all else stays."""
    assert truncate_value(value, BARE) == wanted


def nest(depth: int, value: Any) -> Any:
    """A value so many lists deep."""
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("depth", "is_shortened"),
    [
        pytest.param(MAX_DEPTH, True, id="at the limit"),
        pytest.param(MAX_DEPTH + 1, False, id="beyond it"),
        pytest.param(10_000, False, id="10,000"),
    ],
)
def test_depth_is_limited(depth: int, is_shortened: bool) -> None:
    """Deeply nested JSON does not overflow the stack: it stays as it is there."""
    value = nest(depth, "y" * 12)
    shortened = truncate_value(value, BARE)
    assert (shortened is not value) is is_shortened
    while isinstance(shortened, list):
        shortened = shortened[0]
    assert shortened == "y" * (10 if is_shortened else 12)


def test_a_deep_result_becomes_an_excerpt() -> None:
    """An excerpt of JSON 10,000 deep does not overflow the stack either."""
    part = types.Part(
        function_response=types.FunctionResponse.model_construct(
            name="dump", response={"deep": nest(10_000, "y" * 12)}
        )
    )
    excerpt = Truncation(max_length=10, result_length=10, show_truncation_notice=False)
    content = types.Content.model_construct(role="user", parts=[part])
    shortened = truncate_content(content, excerpt)
    assert shortened is not content
    assert len(first_result(shortened)["result"]) == 10


def first_result(content: types.Content) -> dict[str, Any]:
    """The response of the first tool result."""
    assert content.parts
    assert content.parts[0].function_response
    return content.parts[0].function_response.response or {}


def test_many_short_strings_become_an_excerpt_where_asked() -> None:
    """A result without any long string is capped only by `result_length`."""
    rows = {"rows": [{"id": number} for number in range(100)]}
    content = response("query", rows)
    assert truncate_content(content, BARE) is content
    excerpt = Truncation(max_length=50, result_length=50, show_truncation_notice=False)
    shortened = truncate_content(content, excerpt)
    assert first_result(shortened) == {
        "result": '{"rows":[{"id":0},{"id":1},{"id":2},{"id":3},{"id"'
    }
    small = response("query", {"rows": [1, 2]})
    assert truncate_content(small, excerpt) is small


def test_a_shortened_result_names_its_handle() -> None:
    """Where the agent can read it back; what is left whole stays as it is."""
    content = response("read", "x" * 500)
    assert content.parts
    shortened = truncate_content(content, BARE, with_handles=True)
    assert shortened.parts
    found = shortened.parts[0].function_response
    assert found
    assert found.response
    assert found.response["recall_item"] == handle_of(content.parts[0])
    small = response("read", "x")
    assert truncate_content(small, BARE, with_handles=True) is small


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(user("y" * 50), id="user"),
        pytest.param(model("y" * 50), id="model"),
        pytest.param(call("search", query="y" * 50), id="call"),
        pytest.param(response("search", "short"), id="short result"),
        pytest.param(response("search", {}), id="empty result"),
        pytest.param(types.Content(role="user"), id="no parts"),
    ],
)
def test_other_contents_are_the_same_objects(content: types.Content) -> None:
    """Only results that are too long are copied."""
    assert truncate_content(content, BARE) is content


def test_every_parallel_result_is_shortened_and_stays_with_its_call() -> None:
    """Each result keeps its name and id."""
    content = responses(
        response_part("a", "y" * 50, "1"),
        response_part("b", "ok", "2"),
        response_part("c", "y" * 50, "3"),
    )
    shortened = truncate_content(content, BARE)
    found = [part.function_response for part in shortened.parts or []]
    assert [(item.name, item.id, item.response) for item in found if item] == [
        ("a", "1", {"result": "y" * 10}),
        ("b", "2", {"result": "ok"}),
        ("c", "3", {"result": "y" * 10}),
    ]
    assert shortened.parts
    assert content.parts
    assert shortened.parts[1] is content.parts[1]


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=30),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(value=_json, smart=st.booleans())
def test_values_are_never_changed_in_place(value: Any, smart: bool) -> None:
    """The stored session shares the values, so they stay; twice is the same as once."""
    before = copy.deepcopy(value)
    truncation = SMART if smart else BARE
    shortened = truncate_value(value, truncation)
    assert value == before
    assert truncate_value(shortened, truncation) == shortened
    json.dumps(shortened).encode()


@given(text=st.text(alphabet="ab漢😀\ud83d\ude00", max_size=40))
def test_a_cut_never_splits_a_pair(text: str) -> None:
    """Halves of surrogate pairs that stood together stay together."""

    def lone_halves(value: str) -> int:
        joined = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return joined.count("\ufffd")

    assert lone_halves(truncate_text(text, BARE)) <= lone_halves(text)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[1]", id="too few"),
        pytest.param("{}", id="no list"),
        pytest.param('["a", true, false, 1, 1, 0]', id="a wrong type"),
        pytest.param("{", id="no JSON"),
    ],
)
def test_broken_settings_are_refused(text: str) -> None:
    """State is untrusted: what is not of the form is an error."""
    with pytest.raises(ValueError, match=r"."):
        Truncation.from_json(text)


def test_settings_survive_json() -> None:
    """What is stored is read again unchanged."""
    assert Truncation.from_json(SMART.to_json()) == SMART
