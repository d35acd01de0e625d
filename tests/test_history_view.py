"""What is known of one request: history, pairs, and what a summary stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

from contextguard_adk.history import view as history_view
from contextguard_adk.history.coverage import Covered, cover, fingerprint
from contextguard_adk.history.pairs import content_text, keep_pairs_whole, pair_contents
from contextguard_adk.history.stored_summary import StoredSummary, SummaryMark
from contextguard_adk.history.view import HistoryView, is_user_text
from tests.builders import (
    MadeHistory,
    call,
    call_part,
    calls,
    event,
    histories,
    model,
    response,
    response_part,
    responses,
    user,
)

RELAY = user("For context:", "[helper] said: It is sunny.")
INSTRUCTION = user("<<<SYSTEM>>> Today is May 1. <<<END>>>")


def summary_of(
    contents: Sequence[types.Content],
    invocation: str = "",
    model_covered_count: int | None = None,
) -> StoredSummary:
    """A summary that stands for these contents."""
    count = len(contents) if model_covered_count is None else model_covered_count
    return StoredSummary(
        text="Summary.",
        ledger=(),
        covered=cover([fingerprint(content) for content in contents]),
        mark=SummaryMark(
            invocation=invocation, model_summary_chars=3, model_covered_count=count
        ),
    )


def view_of(
    contents: Sequence[types.Content],
    stored: StoredSummary | None = None,
    *,
    said: types.Content | None = None,
    foreign: Sequence[types.Content] = (),
    invocation: str = "",
) -> HistoryView:
    """A view in which everything but `foreign` has an event."""
    return HistoryView(
        contents,
        events=[event(content) for content in contents if content not in foreign],
        transient=foreign,
        user_content=said,
        invocation_id=invocation,
        stored=stored,
    )


# --- the stored summary ---


@pytest.mark.parametrize(
    ("model_covered_count", "is_mechanical"),
    [(0, True), (1, True), (2, False), (3, False)],
)
def test_mechanical_summary(model_covered_count: int, is_mechanical: bool) -> None:
    """A summary is mechanical when a model summarised less than it covers."""
    stored = summary_of([user("a"), model("b")], "", model_covered_count)
    assert stored.is_mechanical is is_mechanical
    assert stored.model_text == "Sum"


# --- facts without a summary ---


def test_facts_of_a_plain_history() -> None:
    """Without a summary nothing is covered and all history may be compacted."""
    contents = [INSTRUCTION, user("a"), model("b"), RELAY, user("c")]
    view = view_of(contents, said=user("c"), foreign=[INSTRUCTION])
    assert view.history == [1, 2, 3, 4]
    assert view.user_messages == [1, 4]
    assert view.first_task_index == 1
    assert view.live_index == 4
    assert view.covered == view.model_covered == frozenset()
    assert view.uncovered == view.compactable == [1, 2, 3, 4]
    assert set(view.fingerprints) == {1, 2, 3, 4}


def test_empty_request() -> None:
    """A request without contents has no facts to tell."""
    view = HistoryView([])
    assert view.history == view.user_messages == view.uncovered == []
    assert view.first_task_index is None
    assert view.live_index is None


def test_nothing_is_computed_before_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that needs no compaction pays for no fingerprint."""

    def refuse(content: types.Content) -> bytes:
        raise AssertionError("computed")

    monkeypatch.setattr(history_view, "fingerprint", refuse)
    view = view_of([user("a"), model("b")], said=user("a"))
    assert view.covered == frozenset()
    assert view.compactable == [0, 1]
    assert view.live_index == 0


def test_only_what_may_be_covered_has_its_fingerprint_taken() -> None:
    """What follows a covered beginning costs nothing; a difference costs all."""
    contents = [user("a"), model("b"), user("c"), model("d"), user("e")]
    taken: list[str] = []

    def take(content: types.Content) -> bytes:
        taken.append(content_text(content))
        return fingerprint(content)

    def covered(contents: Sequence[types.Content]) -> frozenset[int]:
        taken.clear()
        return HistoryView(
            contents,
            events=[event(content) for content in contents],
            stored=summary_of([user("a"), model("b")]),
            take_fingerprint=take,
        ).covered

    assert covered(contents) == {0, 1}
    assert taken == ["a", "b"]
    assert covered(contents[1:]) == {0}
    assert taken == ["b", "c", "d", "e"]


def test_open_calls_are_pinned_with_their_answers() -> None:
    """A call still open, and what was answered beside it, is not compacted."""
    contents = [
        user("a"),
        calls(call_part("slow"), call_part("quick")),
        response("quick"),
        model("b"),
    ]
    view = view_of(contents)
    assert view.pinned_calls == {1, 2}
    assert view.compactable == [0, 3]


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        pytest.param(user("a"), True, id="text"),
        pytest.param(user("For context: I live in Rome."), True, id="like-a-relay"),
        pytest.param(RELAY, False, id="relay"),
        pytest.param(model("a"), False, id="model"),
        pytest.param(response("x"), False, id="tool-result"),
        pytest.param(user(""), False, id="empty"),
        pytest.param(types.Content(role="user"), False, id="no-parts"),
    ],
)
def test_user_text(item: types.Content, expected: bool) -> None:
    """What the user wrote is neither a tool's nor another agent's."""
    assert is_user_text(item) is expected


# --- what a summary covers ---

OLD = [user("a"), call("x"), response("x"), model("b"), user("c")]


def test_covered_contents_are_found_among_others() -> None:
    """A moved instruction is not covered; new contents are not either."""
    contents = [*OLD[:3], INSTRUCTION, *OLD[3:], model("d")]
    view = view_of(contents, summary_of(OLD), foreign=[INSTRUCTION])
    assert view.covered == {0, 1, 2, 4, 5}
    assert view.model_covered == view.covered
    assert view.uncovered == view.compactable == [6]
    assert view.cover(frozenset(view.covered)) == summary_of(OLD).covered


def test_foreign_content_is_never_covered() -> None:
    """Even an instruction that reads like a covered message stays."""
    lookalike = user("c")
    contents = [user("a"), lookalike, model("b")]
    view = HistoryView(
        contents,
        events=[event(contents[0]), event(contents[2])],
        stored=summary_of([user("a"), user("c"), model("b")]),
    )
    assert view.covered == {0, 2}


@pytest.mark.parametrize(
    ("contents", "covered"),
    [
        pytest.param(OLD, {0, 1, 2, 3, 4}, id="unchanged"),
        pytest.param(
            [*OLD[:2], response("x", "late"), *OLD[3:]], {0, 3, 4}, id="late-result"
        ),
        pytest.param([OLD[0], *OLD[2:]], {0, 1, 2, 3}, id="call-is-gone"),
        pytest.param(OLD[2:], {0, 1, 2}, id="starts-with-a-result"),
        pytest.param([*OLD[:2], user("new")], {0}, id="its-call-is-open-again"),
        pytest.param([*OLD[:1], user("new"), model("n")], {0}, id="rewound"),
        pytest.param([user("new")], set(), id="nothing-left"),
    ],
)
def test_changed_history(contents: list[types.Content], covered: set[int]) -> None:
    """What was changed comes back, calls and results together."""
    assert view_of(contents, summary_of(OLD)).covered == covered


def test_result_that_came_later_brings_its_call_back() -> None:
    """A prefix that ends between a call and its result is not covered so far."""
    view = view_of([user("a"), call("x"), response("x")], summary_of(OLD[:2]))
    assert view.covered == {0}


@pytest.mark.parametrize(
    ("invocation", "said", "covered"),
    [
        pytest.param("made", user("yes"), {0, 1, 2, 3}, id="invocation-of-summary"),
        pytest.param("later", user("yes"), {0, 1}, id="later-same-words"),
        pytest.param("later", user("new"), {0, 1, 2, 3}, id="later-other-words"),
        pytest.param("later", response("x"), {0, 1, 2, 3}, id="later-resumed"),
    ],
)
def test_repeated_message(
    invocation: str, said: types.Content, covered: set[int]
) -> None:
    """In a later turn nothing from the user's message onward is covered."""
    contents = [user("yes"), model("a"), user("yes"), model("b")]
    view = view_of(
        contents, summary_of(contents, "made"), said=said, invocation=invocation
    )
    assert view.covered == covered


def test_part_that_a_model_summarised() -> None:
    """Of a mechanical summary only the leading part counts as summarised."""
    contents = [*OLD, model("d")]
    view = view_of(contents, summary_of(OLD, "", 3))
    assert view.covered == {0, 1, 2, 3, 4}
    assert view.model_covered == {0, 1, 2}
    assert view.uncovered == [5]
    assert view.compactable == [3, 4, 5]


def test_empty_covered_set_covers_nothing() -> None:
    """A summary without fingerprints stands for no content."""
    stored = replace(summary_of([]), covered=Covered())
    view = view_of(OLD, stored)
    assert view.covered == frozenset()
    assert view.uncovered == [0, 1, 2, 3, 4]


def test_place_is_named_by_fingerprint_and_number() -> None:
    """Equal contents are told apart by their number, which later ones do not change."""
    view = view_of([user("yes"), model("go"), user("yes")])
    print_of_yes = fingerprint(user("yes")).hex()
    assert view.name_place(0) == f"{print_of_yes}.1"
    assert view.name_place(2) == f"{print_of_yes}.2"


# --- properties ---


@given(histories(), st.integers(0, 30))
def test_what_was_covered_is_covered_again(made: MadeHistory, keep: int) -> None:
    """A covered prefix of whole pairs is recognised on the next call."""
    split = max(0, len(made.contents) - keep)
    covered = keep_pairs_whole(range(split), pair_contents(made.contents))
    stored = summary_of([made.contents[i] for i in sorted(covered)])
    view = view_of(made.contents, stored)
    assert len(view.covered) == len(covered)
    if covered == frozenset(range(split)):
        assert view.covered == covered


@given(histories(), histories(), st.data())
def test_covered_contents_never_split_a_pair(
    made: MadeHistory, other: MadeHistory, data: st.DataObject
) -> None:
    """Whatever a summary was made of, it takes no call without its result."""
    pool = [*made.contents, *other.contents]
    chosen = data.draw(st.lists(st.sampled_from(pool), max_size=12)) if pool else []
    view = view_of(made.contents, summary_of(chosen))
    assert not made.splits_pair(view.covered)
    known = {fingerprint(content) for content in chosen}
    assert all(view.fingerprints[index] in known for index in view.covered)
    assert sorted([*view.covered, *view.uncovered]) == view.history
    assert view.model_covered <= view.covered


def test_merged_results_come_back_together() -> None:
    """A late part of a merged result brings back every call that it answers."""
    ask = calls(call_part("slow"), call_part("quick"))
    pending = responses(response_part("slow", "pending"), response_part("quick"))
    final = responses(response_part("slow", "done"), response_part("quick"))
    stored = summary_of([user("a"), ask, pending, model("b")])
    view = view_of([user("a"), ask, final, model("b")], stored)
    assert view.covered == {0, 3}
