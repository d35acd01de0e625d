"""Calls with their responses, safe cuts, and the message that a turn is about."""

from __future__ import annotations

import pytest
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

from contextguard_adk._history.pairs import (
    Pairs,
    find_live_request,
    find_safe_split,
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


def content(*parts: types.Part | str) -> types.Content:
    """A message with these parts."""
    made = [types.Part(text=part) if isinstance(part, str) else part for part in parts]
    return types.Content(role="user", parts=made)


LATE = responses(response_part("slow", "done"), response_part("quick"))
"""The final result of a long-running tool, merged with a quick one."""


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (user("For context:", "[b] said: hi"), True),
        (user("For context:", "[b] `x` tool returned result: {}"), True),
        (content(PREAMBLE, IMAGE), True),
        (user("For context: I live in Rome."), False),
        (user("For context:", "I live in Rome."), False),
        (model("For context:", "[b] said: hi"), False),
    ],
)
def test_relay(item: types.Content, expected: bool) -> None:
    """Only ADK's form is a relay; a user may begin with the same words."""
    assert is_relay(item) is expected


# --- pairs ---

ONE, TWO = call("x", "1"), call("x", "2")
DONE_ONE, DONE_TWO = response("x", "", "1"), response("x", "", "2")
BOTH = calls(call_part("x"), call_part("y"))
TOOLS = [call("x"), response("x")]
PAIRED = {
    "no-ids": (TOOLS, [(0, 1)], set()),
    "other-id-same-name": ([ONE, DONE_TWO], [], {0}),
    "nested-by-id": ([ONE, TWO, DONE_TWO, DONE_ONE], [(0, 3), (1, 2)], set()),
    "answered-apart": ([BOTH, response("y"), response("x")], [(0, 1), (0, 2)], set()),
    "parallel-one-open": ([BOTH, response("x")], [(0, 1)], {0}),
    "merged-response": ([call("slow"), call("quick"), LATE], [(0, 2), (1, 2)], set()),
    "id-again-newest": ([ONE, ONE, DONE_ONE], [(1, 2)], {0}),
    "abandoned-call": ([call("x"), user("stop"), *TOOLS], [(2, 3)], {0}),
    "response-first": ([response("x"), call("x")], [], {1}),
    "odd-parts": (
        [types.Content.model_construct(parts=[None]), types.Content(role="user")],
        [],
        set(),
    ),
}


@pytest.mark.parametrize(
    ("contents", "answered", "open_calls"), PAIRED.values(), ids=PAIRED.keys()
)
def test_pairs(
    contents: list[types.Content], answered: list[tuple[int, int]], open_calls: set[int]
) -> None:
    """Each call is linked with what answers it, by id, else by order and name."""
    partners: dict[int, set[int]] = {}
    for left, right in answered:
        partners.setdefault(left, set()).add(right)
        partners.setdefault(right, set()).add(left)
    assert pair_contents(contents) == Pairs(partners, open_calls)


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

APART = [BOTH, response("x"), response("y")]
CUTS = {
    "plain-text": ([user("a"), model("b"), user("c")], 2, 2),
    "on-behind-the-result": ([user("a"), *TOOLS, model("b")], 2, 3),
    "back-to-the-text": ([*TOOLS, user("a"), *TOOLS], 3, 2),
    "text-is-more-than-half-back": ([user("a"), *TOOLS * 4, user("b")], 5, 5),
    "all-tools-forward": (TOOLS * 4, 3, 4),
    "parallel-answered-apart": ([user("a"), *APART, model("b")], 3, 4),
}


@pytest.mark.parametrize(
    ("contents", "split", "expected"), CUTS.values(), ids=CUTS.keys()
)
def test_safe_split(contents: list[types.Content], split: int, expected: int) -> None:
    """A cut moves back to text, else on to the end of a pair, else back to one."""
    assert find_safe_split(contents, split) == expected


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
RAIN = user("For context: it rains.")
LIVE = {
    "found": ([user("a"), model("b")], user("a"), 0),
    "repeated": ([user("yes"), model("b"), user("yes"), model("c")], user("yes"), 2),
    "part-was-added": ([user("a", "added by a plugin")], user("a"), 0),
    "beside-a-result": ([user("a"), content("a", response_part("x"))], user("a"), 0),
    "user-begins-like-a-relay": ([RAIN, RELAY], RAIN, 0),
    "media-only": ([content(IMAGE), model("b"), user("c")], content(IMAGE), 0),
    "resumed-long-running-tool": ([user("a"), *TOOLS], response("x"), None),
}


@pytest.mark.parametrize(
    ("contents", "user_content", "expected"), LIVE.values(), ids=LIVE.keys()
)
def test_live_request(
    contents: list[types.Content],
    user_content: types.Content | None,
    expected: int | None,
) -> None:
    """The newest message that carries what the user said starts the turn."""
    assert find_live_request(contents, range(len(contents)), user_content) == expected
