"""The request with a summary in the place of what it covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

from contextguard_adk.history.coverage import cover, fingerprint
from contextguard_adk.history.pairs import keep_pairs_whole
from contextguard_adk.history.rendering import (
    continuation_text,
    find_fingerprint,
    find_quoted_request,
    render_head,
    render_request,
    summary_text,
)
from contextguard_adk.history.stored_summary import StoredSummary, SummaryMark
from contextguard_adk.history.truncation import Truncation
from contextguard_adk.history.view import HistoryView
from tests.builders import (
    MadeHistory,
    call,
    event,
    histories,
    model,
    response,
    user,
)

IMAGE = types.Part.from_bytes(data=b"pixels", mime_type="image/png")
FILE = types.Part.from_uri(file_uri="gs://b/a.pdf", mime_type="application/pdf")
INSTRUCTION = user("<<<SYSTEM>>> Today is May 1. <<<END>>>")
OLD = [user("Fix it."), call("read"), response("read", "a" * 60), model("Done.")]


def summary(request: types.Content | None = None, **mark: Any) -> StoredSummary:
    """A summary whose continuation quotes `request`."""
    quoted = "" if request is None else fingerprint(request).hex()
    return StoredSummary(
        "All is known.", (), cover([]), SummaryMark(request=quoted, **mark)
    )


def view_of(
    contents: Sequence[types.Content],
    said: types.Content | None = None,
    stored: StoredSummary | None = None,
) -> HistoryView:
    """A view in which everything but the instruction has an event."""
    events = [event(content) for content in contents if content != INSTRUCTION]
    return HistoryView(contents, events=events, user_content=said, stored=stored)


def texts(contents: Sequence[types.Content]) -> list[str]:
    """The first text of each content, or what else it is."""
    shown = []
    for content in contents:
        part = (content.parts or [types.Part()])[0]
        shown.append(part.text or ("call" if part.function_call else "result"))
    return shown


SUMMARY = summary_text("All is known.")
GENERIC = continuation_text("")
FIX_IT = continuation_text("Fix it.")


# --- where the summary stands ---


@pytest.mark.parametrize(
    ("contents", "covered", "expected"),
    [
        pytest.param(OLD, {0, 1, 2, 3}, [SUMMARY, FIX_IT], id="everything"),
        pytest.param(
            OLD, {0, 1, 2}, [SUMMARY, FIX_IT, "Done."], id="newest-content-stays"
        ),
        pytest.param(
            [INSTRUCTION, *OLD],
            {1, 2, 3, 4},
            [texts([INSTRUCTION])[0], SUMMARY, FIX_IT],
            id="instruction-before",
        ),
        pytest.param(
            [*OLD[:3], INSTRUCTION, OLD[3]],
            {0, 1, 2, 4},
            [SUMMARY, FIX_IT, texts([INSTRUCTION])[0]],
            id="instruction-within",
        ),
        pytest.param(
            OLD, {0, 3}, [SUMMARY, FIX_IT, "call", "result"], id="pair-came-back"
        ),
        pytest.param(
            OLD,
            {3},
            ["Fix it.", "call", "result", SUMMARY, GENERIC],
            id="first-contents-stay",
        ),
        pytest.param(
            [INSTRUCTION, *OLD[3:]],
            set(),
            [texts([INSTRUCTION])[0], SUMMARY, GENERIC, "Done."],
            id="nothing-of-it-is-loaded",
        ),
        pytest.param([], set(), [SUMMARY, GENERIC], id="empty"),
        pytest.param(
            [INSTRUCTION],
            set(),
            [SUMMARY, GENERIC, texts([INSTRUCTION])[0]],
            id="no-history",
        ),
    ],
)
def test_place_of_the_summary(
    contents: list[types.Content], covered: set[int], expected: list[str]
) -> None:
    """Summary and continuation stand where the covered contents began."""
    rendered = render_request(view_of(contents), summary(OLD[0]), covered)
    assert texts(rendered) == expected


def test_kept_contents_are_the_originals() -> None:
    """What is not covered is sent as ADK built it, not as a copy."""
    rendered = render_request(view_of(OLD), summary(), {0})
    assert all(new is old for new, old in zip(rendered[2:], OLD[1:], strict=True))


def test_no_continuation_where_the_request_stays() -> None:
    """A kept request needs no continuation."""
    rendered = render_request(view_of(OLD), summary(has_continuation=False), {1, 2})
    assert texts(rendered) == ["Fix it.", SUMMARY, "Done."]


def test_ledger_stands_inside_the_markers() -> None:
    """Excerpts of the user's messages follow the summary within its markers."""
    stored = replace(summary(), ledger=("Fix it.", "[End of summary] please"))
    text = render_request(view_of(OLD), stored, {0, 1, 2, 3})[0].parts
    assert text is not None
    shown = text[0].text or ""
    assert shown.startswith("[Previous conversation summary]\nAll is known.\n\n[")
    assert "\n- Fix it.\n- [End of summary] please\n[End of summary —" in shown


def test_no_summary_and_nothing_covered_changes_nothing() -> None:
    """Where neither a summary nor covered contents exist all stays as it is."""
    stored = replace(summary(), text="")
    assert render_request(view_of(OLD), stored, ()) == OLD


def test_excerpts_without_a_summary() -> None:
    """Contents that are covered without a summary leave a note in their place."""
    stored = replace(summary(), text="")
    head = render_head(view_of(OLD), stored, {0, 1})
    assert head[0].parts is not None
    lines = (head[0].parts[0].text or "").splitlines()
    assert lines[0] == "[Previous conversation summary]"
    assert lines[1]


# --- the continuation ---


@pytest.mark.parametrize(
    ("live", "expected"),
    [
        pytest.param(user("Fix it."), [FIX_IT], id="text"),
        pytest.param(
            user("Fix", "it."), [continuation_text("Fix\nit.")], id="two-parts"
        ),
        pytest.param(
            types.Content(role="user", parts=[types.Part(text="Fix it."), IMAGE, FILE]),
            [FIX_IT, IMAGE, FILE],
            id="text-and-media",
        ),
        pytest.param(
            types.Content(role="user", parts=[IMAGE]), [GENERIC, IMAGE], id="media-only"
        ),
    ],
)
def test_continuation_quotes_the_live_message(
    live: types.Content, expected: list[str | types.Part]
) -> None:
    """The live message's words are quoted, and its images and files ride along."""
    parts = [types.Part(text=p) if isinstance(p, str) else p for p in expected]
    contents = [live, model("Done.")]
    for covered, said in (({0, 1}, None), ({1}, live)):
        view = view_of(contents, said)
        continuation = render_head(view, summary(live), covered)[1]
        assert continuation == types.Content(role="user", parts=parts)


@pytest.mark.parametrize(
    ("chars", "expected"),
    [
        pytest.param(-1, "b" * 300, id="whole"),
        pytest.param(300, "b" * 300, id="enough"),
        pytest.param(120, None, id="clipped"),
    ],
)
def test_long_request_is_clipped_in_the_middle(
    chars: int, expected: str | None
) -> None:
    """A request is quoted at the length that was once decided."""
    live = user("b" * 300)
    rendered = render_head(view_of([live]), summary(live, request_chars=chars), {0})
    text = texts(rendered)[1]
    if expected is not None:
        assert text == continuation_text(expected)
    else:
        assert "`bb" in text
        assert "bb`" in text
        assert "300 characters in all" in text
        assert len(text) == len(continuation_text("b" * chars))


@pytest.mark.parametrize(
    ("wanted", "covered", "said", "expected"),
    [
        pytest.param(None, {0}, None, None, id="nothing-is-quoted"),
        pytest.param(user("yes"), {0, 1, 2}, None, 2, id="newest-covered"),
        pytest.param(user("yes"), {0, 1}, None, 0, id="covered"),
        pytest.param(user("yes"), {1}, None, None, id="not-covered"),
        pytest.param(user("yes"), {1}, user("yes"), -1, id="what-was-said"),
        pytest.param(user("yes"), {1}, user("no"), None, id="something-else-was-said"),
    ],
)
def test_quoted_request(
    wanted: types.Content | None,
    covered: set[int],
    said: types.Content | None,
    expected: int | None,
) -> None:
    """The quoted message is the newest covered one, else what started the turn."""
    contents = [user("yes"), model("go"), user("yes")]
    view = view_of(contents, said)
    quoted = "" if wanted is None else fingerprint(wanted).hex()
    found = find_quoted_request(view, quoted, covered)
    if expected is None:
        assert found is None
    else:
        assert found is (said if expected < 0 else contents[expected])


# --- shortened tool results ---

SHORT = Truncation(max_length=50, show_truncation_notice=False)


@pytest.mark.parametrize(
    ("truncation", "upto", "expected"),
    [
        pytest.param(SHORT.to_json(), OLD[2], 50, id="shortened"),
        pytest.param(SHORT.to_json(), OLD[3], 50, id="shortened-before"),
        pytest.param(SHORT.to_json(), OLD[1], 60, id="result-is-newer"),
        pytest.param(SHORT.to_json(), user("gone"), 60, id="content-is-gone"),
        pytest.param("", OLD[3], 60, id="no-truncation"),
        pytest.param("{", OLD[3], 60, id="broken"),
        pytest.param("[" * 100_000, OLD[3], 60, id="deep"),
        pytest.param("[1]", OLD[3], 60, id="other-settings"),
    ],
)
def test_tool_results_are_shortened_as_decided(
    truncation: str, upto: types.Content, expected: int
) -> None:
    """Results up to the noted content are shortened again, the stored ones are not."""
    stored = summary(truncation=truncation, truncated_upto=fingerprint(upto).hex())
    rendered = render_request(view_of(OLD), stored, {0})
    part = (rendered[3].parts or [])[0]
    assert part.function_response is not None
    assert len((part.function_response.response or {})["result"]) == expected
    assert OLD[2] == response("read", "a" * 60)


YES = fingerprint(user("yes")).hex()


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        pytest.param(YES, 4, id="newest"),
        pytest.param(f"{YES}.1", 0, id="first"),
        pytest.param(f"{YES}.2", 2, id="second"),
        pytest.param(f"{YES}.9", 4, id="no-ninth"),
        pytest.param(f"{YES}.0", -1, id="none"),
        pytest.param(f"{YES}.x", 4, id="no-number"),
        pytest.param(fingerprint(user("no")).hex(), -1, id="not-there"),
        pytest.param("", -1, id="empty"),
    ],
)
def test_content_is_found_by_its_fingerprint(wanted: str, expected: int) -> None:
    """Of equal contents the newest is found, or the how-manyth."""
    contents = [user("yes"), model("go"), user("yes"), model("on"), user("yes")]
    assert find_fingerprint(view_of(contents), wanted) == expected


@given(histories(), st.data())
def test_named_place_is_found_again(made: MadeHistory, data: st.DataObject) -> None:
    """A place keeps its name, and is found by it, whatever comes later."""
    if not made.contents:
        return
    view = view_of(made.contents)
    index = data.draw(st.sampled_from(view.history))
    name = view.name_place(index)
    assert find_fingerprint(view, name) == index
    later = view_of([*made.contents, *made.contents])
    assert later.name_place(index) == name
    assert find_fingerprint(later, name) == index


# --- properties ---


@given(histories(), st.data())
def test_nothing_uncovered_is_lost(made: MadeHistory, data: st.DataObject) -> None:
    """Uncovered contents stay, in order, pairs whole, whatever else is covered."""
    contents = list(made.contents)
    count = len(contents)
    chosen = data.draw(st.sets(st.integers(0, max(0, count - 1))))
    view = view_of(contents, user("yes"))
    covered = keep_pairs_whole(chosen & set(range(count)), view.pairs)
    rendered = render_request(view, summary(user("yes")), covered)
    kept = [content for i, content in enumerate(contents) if i not in covered]
    places = [i for i, c in enumerate(rendered) if texts([c])[0] == SUMMARY]
    assert len(places) == 1
    rest = rendered[: places[0]] + rendered[places[0] + 2 :]
    assert [id(content) for content in rest] == [id(content) for content in kept]
    assert not made.splits_pair(set(range(count)) - covered)


@given(histories(), st.booleans())
def test_rendering_is_stable(made: MadeHistory, has_continuation: bool) -> None:
    """The same call gives the same bytes, again and after a reload, and no change."""
    contents = list(made.contents)
    before = [content.model_dump_json() for content in contents]
    stored = replace(
        summary(contents[0] if contents else None, has_continuation=has_continuation),
        covered=cover(
            [fingerprint(content) for content in contents[: len(contents) // 2]]
        ),
        ledger=("yes",),
    )

    def render(items: Sequence[types.Content]) -> list[str]:
        view = view_of(items, stored=stored)
        request = render_request(view, stored, view.covered)
        again = render_request(view, stored, view.covered)
        assert request == again
        return [content.model_dump_json() for content in request]

    reloaded = [types.Content.model_validate_json(dump) for dump in before]
    assert render(contents) == render(reloaded)
    assert [content.model_dump_json() for content in contents] == before
