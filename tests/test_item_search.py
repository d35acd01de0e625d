"""Finding items by a phrase or by words."""

from __future__ import annotations

from contextguard_adk.recall.search import find_matches
from contextguard_adk.summarizing.items import Item, list_items
from tests.builders import call, response, user


def items(*texts: str) -> list[Item]:
    """One message each."""
    contents = [user(text) for text in texts]
    return list_items(contents, range(len(contents)))


def found(query: str, *texts: str) -> list[tuple[str, int]]:
    """The texts that match, best first, with the place of the match."""
    return [(m.item.text, m.position) for m in find_matches(items(*texts), query)]


def test_a_phrase_beats_its_words() -> None:
    """Whatever the order of the items, and whatever the case of the letters."""
    assert found("deploy token", "token to deploy", "x", "The DEPLOY Token is 7") == [
        ("The DEPLOY Token is 7", 4),
        ("token to deploy", 0),
    ]


def test_more_words_beat_fewer_and_equals_keep_their_order() -> None:
    """The caller gives the newest first."""
    assert [text for text, _ in found("red green", "red 1", "red 2", "green, red")] == [
        "green, red",
        "red 1",
        "red 2",
    ]


def test_the_place_is_where_the_words_stand_together() -> None:
    """One word may stand anywhere; all of them hardly by chance."""
    text = "token " + "x" * 500 + " the token of service-7 " + "y" * 500 + " service-7"
    assert found("service-7 token", text) == [(text, text.index("token of"))]


def test_further_places_of_a_phrase_are_told() -> None:
    """At most a few."""
    (match,) = find_matches(items("ab " * 10), "ab")
    assert match.position == 0
    assert match.others == (3, 6, 9)


def test_what_a_tool_was_called_with_counts() -> None:
    """A result is found by the path that was read."""
    contents = [call("read", path="conf/app.toml"), response("read", "port = 1")]
    matches = find_matches(list_items(contents, range(2)), "conf/app.toml")
    assert [m.item.label for m in matches] == ["read call", "read result"]


def test_nothing_is_found_where_nothing_is() -> None:
    """Signs and letters of any script can be searched, and patterns are no patterns."""
    assert found("zebra", "lion") == []
    assert found(".*", "lion") == []
    assert found("部署 令牌", "令牌是 7") == [("令牌是 7", 0)]
    assert found("§", "see § 4") == [("see § 4", 4)]


def test_equal_items_are_found_once() -> None:
    """A file that was read twice is one item."""
    assert len(found("lion", "lion", "lion")) == 1
