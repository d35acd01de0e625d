"""Finding items by a phrase or by words."""

from __future__ import annotations

import pytest

from contextguard_adk.recall.tool import find_matches
from contextguard_adk.summarizing.items import Item, list_items
from tests.builders import call, response, user

FAR = "token " + "x" * 500 + " the token of service-7 " + "y" * 500 + " service-7"


def items(*texts: str) -> list[Item]:
    """One message each."""
    contents = [user(text) for text in texts]
    return list_items(contents, range(len(contents)))


@pytest.mark.parametrize(
    ("query", "texts", "expected"),
    [
        pytest.param(
            "deploy token",
            ["token to deploy", "x", "The DEPLOY Token is 7"],
            [("The DEPLOY Token is 7", 4), ("token to deploy", 0)],
            id="phrase-beats-words-in-any-case",
        ),
        pytest.param(
            "red green",
            ["red 1", "red 2", "green, red"],
            [("green, red", 0), ("red 1", 0), ("red 2", 0)],
            id="more-words-beat-fewer-and-equals-keep-their-order",
        ),
        pytest.param(
            "service-7 token",
            [FAR],
            [(FAR, FAR.index("token of"))],
            id="where-the-words-stand-together",
        ),
        pytest.param("zebra", ["lion"], [], id="nothing"),
        pytest.param(".*", ["lion"], [], id="a-pattern-is-no-pattern"),
        pytest.param("部署 令牌", ["令牌是 7"], [("令牌是 7", 0)], id="any-script"),
        pytest.param("§", ["see § 4"], [("see § 4", 4)], id="signs"),
    ],
)
def test_best_matches_come_first(
    query: str, texts: list[str], expected: list[tuple[str, int]]
) -> None:
    """Each item that matches is found once, with the place of its best match."""
    matches = find_matches(items(*texts), query)
    assert [(match.item.text, match.position) for match in matches] == expected


def test_further_places_of_a_phrase_are_told() -> None:
    """A few at most, so that reading can go on there."""
    (match,) = find_matches(items("ab " * 10), "ab")
    assert match.position == 0
    assert match.others == (3, 6, 9)


def test_what_a_tool_was_called_with_counts() -> None:
    """A result is found by the path that was read."""
    contents = [call("read", path="conf/app.toml"), response("read", "port = 1")]
    matches = find_matches(list_items(contents, range(2)), "conf/app.toml")
    assert [match.item.label for match in matches] == ["read call", "read result"]
