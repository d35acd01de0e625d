"""Calls with their responses, safe cuts, and the message that a turn is about."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

from contextguard_adk.history.pairs import (
    Pairs,
    content_text,
    find_live_request,
    find_safe_split,
    has_function_call,
    has_function_response,
    has_media,
    is_relay,
    keep_pairs_whole,
    pair_contents,
)
from tests.builders import (
    MadeHistory,
    call,
    call_part,
    calls,
    histories,
    model,
    response,
    response_part,
    responses,
    user,
)

PREAMBLE = (
    "For context: below is a transcript of what another agent did, quoted between "
    "<<<BEGIN>>> and <<<END>>>."
)
IMAGE = types.Part.from_bytes(data=b"pixels", mime_type="image/png")
FILE = types.Part.from_uri(file_uri="gs://bucket/report.pdf", mime_type="text/plain")
THOUGHT = types.Part(text="Hm.", thought=True)


def content(*parts: types.Part, role: str = "user") -> types.Content:
    """A content with these parts."""
    return types.Content(role=role, parts=list(parts))


def odd_content(*parts: types.Part | None) -> types.Content:
    """A content as a careless plugin may leave it: None among its parts."""
    return types.Content.model_construct(role="user", parts=list(parts))


def late(call_id: str | None = None) -> types.Content:
    """The final result of a long-running tool, merged with a quick one."""
    return responses(response_part("slow", "done", call_id), response_part("quick"))


# --- what a content is ---


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        pytest.param(types.Content(role="user"), (False, False, False), id="no-parts"),
        pytest.param(odd_content(None), (False, False, False), id="none-part"),
        pytest.param(user("hi"), (False, False, False), id="text"),
        pytest.param(call("search"), (True, False, False), id="call"),
        pytest.param(response("search"), (False, True, False), id="response"),
        pytest.param(content(IMAGE), (False, False, True), id="image"),
        pytest.param(odd_content(None, FILE), (False, False, True), id="file"),
    ],
)
def test_kind_of_content(item: types.Content, expected: tuple[bool, ...]) -> None:
    """Calls, responses and media are seen in any part, and nothing else is."""
    kinds = has_function_call(item), has_function_response(item), has_media(item)
    assert kinds == expected


@pytest.mark.parametrize(
    ("item", "text"),
    [
        pytest.param(None, "", id="none"),
        pytest.param(types.Content(role="user"), "", id="no-parts"),
        pytest.param(user("a", "b"), "a\nb", id="two-parts"),
        pytest.param(content(THOUGHT, types.Part(text="b")), "b", id="thought"),
        pytest.param(odd_content(None, types.Part(text="")), "", id="empty"),
    ],
)
def test_visible_text(item: types.Content | None, text: str) -> None:
    """The text of a content is its text parts in lines, without thoughts."""
    assert content_text(item) == text


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        pytest.param(user("For context:", "[b] said: hi"), True, id="said"),
        pytest.param(user(PREAMBLE, "[b] said:\n<<<hi>>>"), True, id="said-fenced"),
        pytest.param(user(PREAMBLE, "[b] thought:\n<<<hm>>>"), True, id="thought"),
        pytest.param(
            user("For context:", "[b] called tool `x` with parameters: {}"),
            True,
            id="called",
        ),
        pytest.param(
            user("For context:", "[b] `x` tool returned result: {}"), True, id="result"
        ),
        pytest.param(
            content(types.Part(text="For context:"), IMAGE), True, id="image-only"
        ),
        pytest.param(
            content(types.Part(text=PREAMBLE), IMAGE), True, id="image-only-fenced"
        ),
        pytest.param(user("For context: I live in Rome."), False, id="user"),
        pytest.param(user("For context:", "I live in Rome."), False, id="user-parts"),
        pytest.param(
            content(types.Part(text="For context: my photo"), IMAGE),
            False,
            id="user-image",
        ),
        pytest.param(user("Hi", "[b] said: hi"), False, id="other-opening"),
        pytest.param(model("For context:", "[b] said: hi"), False, id="model"),
        pytest.param(odd_content(None, types.Part(text="hi")), False, id="none-part"),
        pytest.param(content(IMAGE, IMAGE), False, id="no-text"),
    ],
)
def test_relay(item: types.Content, expected: bool) -> None:
    """Only ADK's form is a relay; a user may begin with the same words."""
    assert is_relay(item) is expected


# --- pairs ---


@pytest.mark.parametrize(
    ("contents", "answered", "open_calls", "orphans"),
    [
        pytest.param([], [], set(), set(), id="empty"),
        pytest.param([user("a"), model("b")], [], set(), set(), id="no-tools"),
        pytest.param([call("x"), response("x")], [(0, 1)], set(), set(), id="no-ids"),
        pytest.param(
            [call("x", "1"), response("x", call_id="1")],
            [(0, 1)],
            set(),
            set(),
            id="ids",
        ),
        pytest.param(
            [call("x", "1"), response("x")], [(0, 1)], set(), set(), id="id-of-call"
        ),
        pytest.param(
            [call("x"), response("x", call_id="1")],
            [(0, 1)],
            set(),
            set(),
            id="id-of-response",
        ),
        pytest.param(
            [call("x", "1"), response("x", call_id="2")],
            [],
            {0},
            {1},
            id="other-id-same-name",
        ),
        pytest.param(
            [call("x", "1"), response("renamed", call_id="1")],
            [(0, 1)],
            set(),
            set(),
            id="same-id-other-name",
        ),
        pytest.param(
            [
                call("x", "1"),
                call("y", "2"),
                response("y", "", "2"),
                response("x", "", "1"),
            ],
            [(0, 3), (1, 2)],
            set(),
            set(),
            id="nested-by-id",
        ),
        pytest.param(
            [calls(call_part("x"), call_part("y")), response("y"), response("x")],
            [(0, 1), (0, 2)],
            set(),
            set(),
            id="parallel-answered-apart",
        ),
        pytest.param(
            [calls(call_part("x"), call_part("x")), response("x")],
            [(0, 1)],
            {0},
            set(),
            id="parallel-one-open",
        ),
        pytest.param(
            [call("slow"), call("quick"), late()],
            [(0, 2), (1, 2)],
            set(),
            set(),
            id="merged-response",
        ),
        pytest.param(
            [call("x"), response("x"), call("x"), response("x")],
            [(0, 1), (2, 3)],
            set(),
            set(),
            id="name-again",
        ),
        pytest.param(
            [call("x", "1"), response("x", "", "1"), call("x", "1")],
            [(0, 1)],
            {2},
            set(),
            id="id-again-open",
        ),
        pytest.param(
            [call("x", "1"), call("x", "1"), response("x", "", "1")],
            [(1, 2)],
            {0},
            set(),
            id="id-again-newest",
        ),
        pytest.param(
            [call("x"), user("stop"), call("x"), response("x")],
            [(2, 3)],
            {0},
            set(),
            id="abandoned-call",
        ),
        pytest.param(
            [call("x", "1"), user("stop"), call("x"), response("x")],
            [(2, 3)],
            {0},
            set(),
            id="abandoned-call-with-id",
        ),
        pytest.param([response("x")], [], set(), {0}, id="orphan"),
        pytest.param([response("x"), call("x")], [], {1}, {0}, id="response-first"),
        pytest.param([call("x"), user("?")], [], {0}, set(), id="open"),
        pytest.param(
            [odd_content(None), types.Content(role="user")],
            [],
            set(),
            set(),
            id="odd-parts",
        ),
        pytest.param(
            [content(call_part("x"), response_part("x"))],
            [(0, 0)],
            set(),
            set(),
            id="one-content",
        ),
    ],
)
def test_pairs(
    contents: list[types.Content],
    answered: list[tuple[int, int]],
    open_calls: set[int],
    orphans: set[int],
) -> None:
    """Each call is linked with what answers it, by id, else by order and name."""
    partners: dict[int, set[int]] = {}
    for left, right in answered:
        partners.setdefault(left, set()).add(right)
        partners.setdefault(right, set()).add(left)
    assert pair_contents(contents) == Pairs(partners, open_calls, orphans)


def test_group_follows_every_partner() -> None:
    """A merged response ties all the contents whose calls it answers together."""
    contents = [call("slow"), call("quick"), user("?"), late(), model("!")]
    pairs = pair_contents(contents)
    for index in (0, 1, 3):
        assert pairs.group_of(index) == {0, 1, 3}
    assert pairs.group_of(2) == {2}


@given(histories())
def test_pairs_of_generated_histories(made: MadeHistory) -> None:
    """What was generated as a pair is found as one, with and without ids."""
    pairs = pair_contents(made.contents)
    expected: dict[int, set[int]] = {}
    for left, right in made.answered.items():
        expected[left], expected[right] = {right}, {left}
    assert pairs == Pairs(expected, made.open_calls, set())


@pytest.mark.parametrize(
    ("covered", "kept"),
    [
        pytest.param(set(), set(), id="nothing"),
        pytest.param({0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 5}, id="everything"),
        pytest.param({0, 1, 2}, {0}, id="response-missing"),
        pytest.param({0, 3, 4}, {0, 4}, id="calls-missing"),
        pytest.param({1, 3, 4, 5}, {4, 5}, id="one-call-missing"),
        pytest.param({5}, {5}, id="open-call-alone"),
    ],
)
def test_pairs_are_kept_whole(covered: set[int], kept: set[int]) -> None:
    """A pair that would be split is taken out entirely, and nothing else is."""
    contents = [user("?"), call("slow"), call("quick"), late(), model("!"), call("x")]
    assert keep_pairs_whole(covered, pair_contents(contents)) == kept


@given(histories(), st.data())
def test_kept_pairs_are_the_largest_whole_subset(
    made: MadeHistory, data: st.DataObject
) -> None:
    """Whatever is covered, no pair is split and only split pairs are given up."""
    covered = data.draw(st.sets(st.integers(0, max(0, len(made.contents) - 1))))
    kept = keep_pairs_whole(covered, pair_contents(made.contents))
    assert kept <= covered
    assert not made.splits_pair(kept)
    for index in covered - kept:
        pair = next(set(p) for p in made.answered.items() if index in p)
        assert not pair <= covered


# --- safe cuts ---

TOOLS = [call("x"), response("x")]


@pytest.mark.parametrize(
    ("contents", "split", "expected"),
    [
        pytest.param([], 3, 0, id="empty"),
        pytest.param([user("a")], 1, 1, id="one"),
        pytest.param([user("a"), model("b"), user("c")], 2, 2, id="plain-text"),
        pytest.param([user("a"), *TOOLS, model("b")], 2, 3, id="on-behind-the-result"),
        pytest.param([*TOOLS, user("a"), *TOOLS], 3, 2, id="back-to-the-text"),
        pytest.param(
            [user("a"), *TOOLS * 4, user("b")], 5, 5, id="text-is-more-than-half-back"
        ),
        pytest.param(TOOLS * 4, 4, 4, id="all-tools-boundary"),
        pytest.param(TOOLS * 4, 3, 4, id="all-tools-forward"),
        pytest.param(TOOLS * 4, 7, 6, id="all-tools-last-pair"),
        pytest.param([user("a"), *TOOLS], 2, 1, id="whole-tail-is-a-pair"),
        pytest.param(
            [user("a"), user("b"), user("c"), user("d"), call("x"), response("x")],
            5,
            3,
            id="back-within-half",
        ),
        pytest.param([user("a"), model("b")], 0, 1, id="never-zero"),
        pytest.param([user("a"), model("b")], -5, 1, id="negative"),
        pytest.param([user("a"), model("b")], 99, 1, id="never-everything"),
        pytest.param(
            [
                user("a"),
                calls(call_part("x"), call_part("y")),
                response("x"),
                response("y"),
                model("b"),
            ],
            3,
            4,
            id="parallel-answered-apart",
        ),
        pytest.param([user("a"), call("x"), user("b")], 2, 2, id="open-call"),
    ],
)
def test_safe_split(contents: list[types.Content], split: int, expected: int) -> None:
    """A cut moves back to text, else on to the end of a pair, else back to one."""
    assert find_safe_split(contents, split) == expected
    assert find_safe_split(contents, split, pair_contents(contents)) == expected


@pytest.mark.parametrize(
    "contents",
    [
        pytest.param(TOOLS, id="one-pair"),
        pytest.param([call("slow"), call("quick"), late()], id="merged"),
    ],
)
def test_split_without_a_boundary_warns(
    contents: list[types.Content], caplog: pytest.LogCaptureFixture
) -> None:
    """Where every cut splits a pair the first content is cut off, with a warning."""
    with caplog.at_level(logging.WARNING, "contextguard_adk.history.pairs"):
        assert find_safe_split(contents, 1) == 1
    assert f"No boundary between tool calls found in {len(contents)}" in caplog.text


@given(histories(), st.integers(-3, 40))
def test_safe_split_of_generated_histories(made: MadeHistory, split: int) -> None:
    """A cut leaves something on both sides and, where any can, splits no pair."""
    count = len(made.contents)
    cut = find_safe_split(made.contents, split)
    if count < 2:
        assert cut == count
        return
    assert 1 <= cut < count
    if any(not made.splits_pair(range(n)) for n in range(1, count)):
        assert not made.splits_pair(range(cut))


# --- the live request ---

RELAY = user("For context:", "[helper] said: It is sunny.")


def all_of(contents: Sequence[types.Content]) -> range:
    """The indexes of all contents."""
    return range(len(contents))


@pytest.mark.parametrize(
    ("contents", "user_content", "expected"),
    [
        pytest.param([], user("a"), None, id="empty"),
        pytest.param([user("a"), model("b")], user("a"), 0, id="found"),
        pytest.param([user("a"), model("b")], user("c"), None, id="not-there"),
        pytest.param(
            [user("yes"), model("b"), user("yes"), model("c")],
            user("yes"),
            2,
            id="repeated",
        ),
        pytest.param([model("a")], user("a"), None, id="model-said-the-same"),
        pytest.param(
            [user("a", "added by a plugin")], user("a"), 0, id="part-was-added"
        ),
        pytest.param([user("a")], user("a", "b"), None, id="part-is-missing"),
        pytest.param(
            [user("a"), content(types.Part(text="a"), response_part("x"))],
            user("a"),
            0,
            id="text-beside-a-result",
        ),
        pytest.param(
            [user("For context: it rains."), RELAY],
            user("For context: it rains."),
            0,
            id="user-begins-like-a-relay",
        ),
        pytest.param(
            [content(IMAGE), model("b"), user("c")], content(IMAGE), 0, id="media-only"
        ),
        pytest.param(
            [content(FILE), content(types.Part(text="For context:"), IMAGE)],
            content(FILE),
            0,
            id="media-only-and-a-relayed-image",
        ),
        pytest.param([user("a")], content(IMAGE), None, id="media-not-there"),
        pytest.param(
            [user("a"), *TOOLS], response("x"), None, id="resumed-long-running-tool"
        ),
        pytest.param([user("a")], content(THOUGHT), None, id="nothing-visible"),
        pytest.param([user("a"), model("b")], None, 0, id="unknown"),
        pytest.param([user("a"), RELAY, *TOOLS], None, 0, id="unknown-relay-and-tool"),
        pytest.param([user("a")], types.Content(role="user"), 0, id="no-parts"),
        pytest.param([content(IMAGE), RELAY], None, None, id="unknown-no-text"),
    ],
)
def test_live_request(
    contents: list[types.Content],
    user_content: types.Content | None,
    expected: int | None,
) -> None:
    """The newest message that carries what the user said starts the turn."""
    assert find_live_request(contents, all_of(contents), user_content) == expected


def test_live_request_is_history() -> None:
    """An instruction with the user's very words is not taken for the message."""
    contents = [user("a"), model("b"), user("a")]
    assert find_live_request(contents, [1, 0], user("a")) == 0
