"""Shortening tool results, wherever strings stand in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from google.genai import types

from contextguard_adk._history.coverage import handle_of
from contextguard_adk._history.truncation import (
    HANDLE_KEY,
    Truncation,
    truncate_content,
    truncate_text,
)
from tests.builders import call, response, response_part, responses, user

BARE = Truncation(max_length=10, show_truncation_notice=False)
SMART = replace(BARE, smart_truncate=True, head_length=3, tail_length=2)
EXCERPT = replace(BARE, max_length=50, result_length=50)


@pytest.mark.parametrize(
    ("text", "truncation", "wanted"),
    [
        pytest.param("0123456789", BARE, "0123456789", id="just fits"),
        pytest.param("0123456789a", BARE, "0123456789", id="head"),
        pytest.param("0123456789a", SMART, "0129a", id="head and tail"),
        pytest.param("😀" * 12, BARE, "😀" * 10, id="characters, not bytes"),
        pytest.param("y" * 30, Truncation(max_length=10), "y" * 30, id="no gain"),
    ],
)
def test_long_text_keeps_head_or_head_and_tail(
    text: str, truncation: Truncation, wanted: str
) -> None:
    """What is too long keeps its head, or head and tail."""
    assert truncate_text(text, truncation) == wanted


def result_of(content: types.Content) -> dict[str, Any]:
    """The response of the first tool result."""
    (part, *_) = content.parts or []
    assert part.function_response
    return part.function_response.response or {}


def test_many_short_strings_become_an_excerpt_where_asked() -> None:
    """A result without any long string is capped only by `result_length`."""
    content = response("query", {"rows": [{"id": number} for number in range(100)]})
    assert truncate_content(content, BARE) is content
    assert result_of(truncate_content(content, EXCERPT)) == {
        "result": '{"rows":[{"id":0},{"id":1},{"id":2},{"id":3},{"id"'
    }
    small = response("query", {"rows": [1, 2]})
    assert truncate_content(small, EXCERPT) is small


def test_a_shortened_result_names_its_handle() -> None:
    """The agent can read the result back; what is left whole needs no handle."""
    content = response("read", "x" * 500)
    shortened = truncate_content(content, BARE, content)
    (part,) = content.parts or []
    assert result_of(shortened)[HANDLE_KEY] == handle_of(part)
    small = response("read", "x")
    assert truncate_content(small, BARE, small) is small


NOTHING: Any = [None]


@pytest.mark.parametrize(
    "content",
    [
        user("y" * 50),
        call("search", query="y" * 50),
        types.Content.model_construct(role="user", parts=NOTHING),
    ],
    ids=["user", "call", "none"],
)
def test_other_contents_are_the_same_objects(content: types.Content) -> None:
    """Only results that are too long are copied."""
    assert truncate_content(content, BARE) is content


def test_every_parallel_result_is_shortened_and_stays_with_its_call() -> None:
    """Each result keeps its name and id."""
    content = responses(
        response_part("a", [{"y" * 12: "y" * 50}], "1"), response_part("b", "ok", "2")
    )
    shortened = truncate_content(content, BARE)
    found = [part.function_response for part in shortened.parts or []]
    assert [(item.name, item.id, item.response) for item in found if item] == [
        ("a", "1", {"result": [{"y" * 12: "y" * 10}]}),
        ("b", "2", {"result": "ok"}),
    ]
