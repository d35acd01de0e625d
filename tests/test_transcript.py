"""The conversation as text for a summarizer, whole or within a budget."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from typing import Any

import pytest
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

from contextguard_adk.measuring.shortening import shorten, shorten_to_tokens
from contextguard_adk.summarizing.transcript import (
    MIN_BODY_TOKENS,
    Entry,
    describe_media,
    fit_entries,
    payload_text,
    render_entries,
    split_entries,
)
from tests.builders import (
    call,
    model,
    response,
    response_part,
    responses,
    user,
)


def count(text: str) -> int:
    """A tokenizer with four characters to a token."""
    return math.ceil(len(text) / 4)


def total(entries: Sequence[Entry]) -> int:
    """What a transcript of these entries takes, line breaks included."""
    return sum(count(entry.heading) + count(entry.body) + 1 for entry in entries)


def lines(*contents: types.Content) -> list[str]:
    """The transcript of contents, entry by entry."""
    return [entry.text for entry in render_entries(contents, range(len(contents)))]


def content(*parts: types.Part, role: str = "user") -> types.Content:
    """A content with these parts."""
    return types.Content(role=role, parts=list(parts))


def blob(name: str | None = None, mime_type: str | None = "image/png") -> types.Part:
    """An image of six bytes."""
    data = types.Blob(data=b"pixels", mime_type=mime_type, display_name=name)
    return types.Part(inline_data=data)


def file(uri: str | None, name: str | None = None) -> types.Part:
    """A file that is named only."""
    data = types.FileData(file_uri=uri, mime_type="text/plain", display_name=name)
    return types.Part(file_data=data)


def answer_with_image(payload: dict[str, Any]) -> types.Content:
    """A tool result with an image of its own."""
    image = types.FunctionResponsePart.from_bytes(data=b"ab", mime_type="image/png")
    answer = types.FunctionResponse(name="look", response=payload, parts=[image])
    return content(types.Part(function_response=answer))


CALL_X = types.FunctionCall(name="x", args={})

# --- rendering ---


RENDERED: dict[str, tuple[Any, Any]] = {
    "message": (user("Hi."), ["user: Hi."]),
    "two-parts": (user("a", "b"), ["user: a", "user: b"]),
    "no-role": (types.Content(parts=[types.Part(text="a")]), ["user: a"]),
    "call-without-arguments": (call("search"), ["model: [called tool: search]"]),
    "call": (
        call("search", query="Rome"),
        ['model: [called tool: search]\n{"query":"Rome"}'],
    ),
    "result": (
        response("search", {"a": 1, "b": ["ü"]}),
        ['user: [tool search returned a result]\n{"a":1,"b":["ü"]}'],
    ),
    "empty-result": (response("search", {}), ["user: [tool search returned a result]"]),
    "result-with-image": (
        answer_with_image({"result": "seen"}),
        ["user: [tool look returned a result] [attached image/png, 2 bytes]\nseen"],
    ),
    "parallel-results": (
        responses(response_part("a", "1"), response_part("b", "2")),
        [
            "user: [tool a returned a result]\n1",
            "user: [tool b returned a result]\n2",
        ],
    ),
    "credential-call": (call("adk_request_credential", secret="s3cret"), []),
    "credential-result": (response("adk_request_credential", {"token": "s3cret"}), []),
    "thought": (
        content(types.Part(text="I think.", thought=True), types.Part(text="Yes.")),
        ["user: Yes."],
    ),
    "call-in-a-thought": (
        content(types.Part(function_call=CALL_X, thought=True), role="model"),
        ["model: [called tool: x]"],
    ),
    "code": (
        content(
            types.Part(executable_code=types.ExecutableCode(code="f()")),
            types.Part(code_execution_result=types.CodeExecutionResult(output="5")),
            role="model",
        ),
        ["model: [ran code]\nf()", "model: [code returned a result]\n5"],
    ),
    "empty-code": (
        content(
            types.Part(executable_code=types.ExecutableCode()),
            types.Part(code_execution_result=types.CodeExecutionResult()),
        ),
        ["user: [ran code]\n", "user: [code returned a result]\n"],
    ),
    "image": (
        content(types.Part(text="See:"), blob()),
        ["user: See:", "user: [attached image/png, 6 bytes]"],
    ),
    "no-parts": (types.Content(role="user"), []),
    "odd-parts": (
        types.Content.model_construct(role="user", parts=[None, types.Part()]),
        [],
    ),
    "relay": (
        user("For context:", "[helper] said: It is sunny."),
        ["user: [helper] said: It is sunny."],
    ),
    "user-begins-like-a-relay": (
        user("For context: my host is 10.0.0.3."),
        ["user: For context: my host is 10.0.0.3."],
    ),
    "model-begins-like-a-relay": (
        model("For context: 10.0.0.3."),
        ["model: For context: 10.0.0.3."],
    ),
}


@pytest.mark.parametrize(("item", "expected"), RENDERED.values(), ids=RENDERED)
def test_rendered_content(item: types.Content, expected: list[str]) -> None:
    """Each part has its documented line; credentials and thoughts have none."""
    assert lines(item) == expected


def test_entries_know_what_they_are() -> None:
    """Entries tell tools from messages, what is pinned, copied and can be recalled."""
    contents = [user("a"), response("x", "b"), user("c"), content(blob())]
    contents.append(response("recall_history", "b"))
    entries = render_entries(contents, [1, 2, 3, 4], pinned=[2], with_handles=True)
    assert [(e.is_tool, e.is_pinned, e.is_copy) for e in entries] == [
        (True, False, False),
        (False, True, False),
        (False, False, False),
        (True, False, True),
    ]
    assert all(entry.handle for entry in entries)
    assert entries[2].text.endswith(f"6 bytes; item {entries[2].handle}]")
    assert not render_entries(contents, [1])[0].handle


MEDIA: dict[str, tuple[Any, Any]] = {
    "image": (blob("cat.png"), "[attached image/png 'cat.png', 6 bytes]"),
    "no-type": (blob(None, None), "[attached file, 6 bytes]"),
    "no-data": (
        types.Part(inline_data=types.Blob(mime_type="image/png")),
        "[attached image/png, 0 bytes]",
    ),
    "file": (file("gs://b/a"), "[attached text/plain 'gs://b/a']"),
    "named-file": (file("gs://b/a", "a.txt"), "[attached text/plain 'a.txt']"),
    "page-long": (file("gs://" + "b" * 9_000), f"[attached text/plain '{'b' * 120}']"),
    "no-name": (file(None), "[attached text/plain]"),
    "text": (types.Part(text="a"), ""),
}


@pytest.mark.parametrize(("part", "expected"), MEDIA.values(), ids=MEDIA)
def test_media_are_named(part: types.Part, expected: str) -> None:
    """An image or a file has a placeholder in place of its bytes."""
    assert describe_media(part) == expected


def deep(depth: int) -> list[Any]:
    """Lists in lists."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def cyclic() -> dict[str, Any]:
    """A dict that holds itself."""
    value: dict[str, Any] = {"note": "still shown", "\ud800": 1}
    value["again"] = value
    return value


PAYLOADS: dict[str, tuple[Any, Any]] = {
    "text": ({"result": "text"}, "text"),
    "wrapped": ({"result": ["text"]}, '{"result":["text"]}'),
    "other-key": ({"output": "text"}, '{"output":"text"}'),
    "list": (["a", 1, None], '["a",1,null]'),
    "nan": ({"n": math.nan}, '{"n":NaN}'),
    "raw-bytes": ({"b": b"\xff", "c": "kept"}, '{"b": "b\'\\\\xff\'", "c": "kept"}'),
    "surrogate": ({"a": {"b": "\ud800"}, "c": "ü"}, '{"a": {"b": "?"}, "c": "ü"}'),
    "date": ({"t": datetime.date(2030, 1, 2)}, '{"t":"2030-01-02"}'),
    "object": ({"o": object}, '{"o":"<class \'object\'>"}'),
}


@pytest.mark.parametrize(("payload", "expected"), PAYLOADS.values(), ids=PAYLOADS)
def test_payload(payload: object, expected: str) -> None:
    """A text stands as it is, everything else as JSON, whatever is in it."""
    assert payload_text(payload) == expected


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        pytest.param({"note": "still shown", "d": deep(100_000)}, "note", id="deep"),
        pytest.param(deep(100_000), "payload: <class 'list'>", id="deep-list"),
        pytest.param(cyclic(), "still shown", id="cycle"),
    ],
)
def test_payload_that_cannot_be_serialized(payload: object, expected: str) -> None:
    """Cycles and endless nesting are described, and what is readable is kept."""
    text = payload_text(payload)
    assert expected in text
    assert len(text) < 200
    assert text.encode()


# --- shortening ---


def test_shortened_text() -> None:
    """Head and tail stay, with the whole length between them; at least the notice."""
    notice = "\n[… 120 characters in all, middle left out …]\n"
    text = "a" * 60 + "b" * 60
    assert shorten(text, 64) == "a" * 10 + notice + "b" * 8
    assert shorten(text, 5) == shorten(text, -5) == notice
    assert "left out; item ab12 …" in shorten(text, 64, "ab12")


@given(st.text(max_size=200), st.integers(60, 300))
def test_shortened_text_has_its_length(text: str, max_chars: int) -> None:
    """A shortened text is exactly as long as allowed."""
    assert len(shorten(text, max_chars)) == min(len(text), max_chars)


def dense_count(text: str) -> int:
    """A tokenizer that takes digits four times as expensive as anything else."""
    return sum(4 if char.isdigit() else 1 for char in text)


@given(
    st.lists(st.sampled_from(["word ", "9" * 40, "漢字"]), max_size=120).map("".join),
    st.integers(-5, 800),
    st.sampled_from([count, len, dense_count]),
)
def test_text_fits_a_budget_of_tokens(text: str, max_tokens: int, counter: Any) -> None:
    """Whatever the tokenizer, a shortened text fits, or nothing is left of it."""
    short = shorten_to_tokens(text, max_tokens, counter)
    assert short == "" or counter(short) <= max_tokens
    if counter(text) <= max_tokens:
        assert short == text


def test_budget_is_used() -> None:
    """Shortening to a budget does not give away much of it."""
    assert count(shorten_to_tokens("word " * 4_000, 1_000, count)) > 900


# --- fitting ---


def tool(body: str, **settings: Any) -> Entry:
    """A tool's result."""
    return Entry("user: [tool x returned a result]\n", body, True, **settings)


def said(body: str, **settings: Any) -> Entry:
    """A message."""
    return Entry("user: ", body, **settings)


def test_everything_stays_while_it_fits() -> None:
    """Within the budget no entry is touched."""
    entries = [said("a" * 400), tool("b" * 4_000), said("c")]
    assert fit_entries(entries, total(entries), count) == entries
    assert fit_entries([], 0, count) == []


def test_tool_results_are_shortened_before_messages() -> None:
    """Messages and small results stay whole, large results keep head and tail."""
    small, large = tool("small"), tool("b" * 20_000)
    entries = [said("a" * 2_000), large, small, large, said("c" * 2_000)]
    fitted = fit_entries(entries, 4_000, count)
    assert fitted[0] == entries[0]
    assert fitted[2] == small
    assert fitted[4] == entries[4]
    assert total(fitted) <= 4_000
    for entry in (fitted[1], fitted[3]):
        assert entry.body.startswith("bbb")
        assert entry.body.endswith("bbb")
        assert "20000 characters in all" in entry.body


def test_results_share_the_room() -> None:
    """Equal results keep equally much; what was recalled once already keeps little."""
    results = [tool("b" * 9_000), tool("b" * 9_000, is_copy=True), tool("b" * 9_000)]
    first, copied, last = fit_entries(results, 2_000, count)
    assert len(first.body) == len(last.body) > 3_000
    assert 0 < len(copied.body) < 200


def test_messages_are_shortened_when_results_are_not_enough() -> None:
    """A long message is clipped where nothing else is left to shorten."""
    entries = [said("a" * 8_000), tool("b" * 400), said("c" * 400)]
    fitted = fit_entries(entries, 1_000, count)
    assert total(fitted) <= 1_000
    assert len(fitted) == 3
    assert "8000 characters in all" in fitted[0].body
    assert fitted[2] == entries[2]


def test_oldest_are_dropped_last_but_never_the_pinned() -> None:
    """Beyond shortening the oldest entries go, and a note says how many."""
    entries = [said(f"{n} " + "a" * 400) for n in range(100)]
    entries[0] = said("task " + "t" * 400, is_pinned=True)
    entries[40] = said("live " + "l" * 400, is_pinned=True)
    entries[60] = said("a" * 400, handle="ab12")
    entries[61] = said("a" * 400, handle="cd34")
    fitted = fit_entries(entries, 1_000, count)
    assert total(fitted) <= 1_000
    assert fitted[0].text == (
        f"[{100 - len(fitted) + 1} earlier messages left out; "
        "the newest are items cd34, ab12]"
    )
    kept = [entry.body.split()[0] for entry in fitted[1:]]
    assert kept[:2] == ["task", "live"]
    assert kept[2:] == [str(n) for n in range(100 - len(kept) + 2, 100)]


def test_pinned_entries_stay_however_small_the_budget() -> None:
    """Where not even the pinned entries fit their headings remain."""
    entries = [said("t" * 4_000, is_pinned=True), said("a"), tool("b", is_pinned=True)]
    _, *kept = fit_entries(entries, 10, count)
    assert [e.heading for e in kept] == [entries[0].heading, entries[2].heading]
    assert kept[0].body == ""


ENTRIES = st.lists(
    st.builds(
        Entry,
        heading=st.sampled_from(["user: ", "model: [called tool: x]\n"]),
        body=st.integers(0, 3_000).map(lambda n: "word " * (n // 5)),
        is_tool=st.booleans(),
        is_pinned=st.sampled_from([False] * 9 + [True]),
    ),
    max_size=30,
)


@given(ENTRIES, st.integers(0, 6_000))
def test_fitted_transcript(entries: list[Entry], budget: int) -> None:
    """A fitted transcript is within its budget, in order, and keeps what is pinned."""
    fitted = fit_entries(entries, budget, count)
    pinned = [entry for entry in entries if entry.is_pinned]
    least = sum(count(e.heading) + 1 + MIN_BODY_TOKENS for e in pinned)
    if budget >= least + 2 * MIN_BODY_TOKENS:
        assert total(fitted) <= budget
    note = len(fitted) > 0 and "left out]" in fitted[0].heading
    kept = fitted[1:] if note else fitted
    assert [e.heading for e in kept if e.is_pinned] == [e.heading for e in pinned]
    newest = [e for e in entries if not e.is_pinned]
    free = [e for e in kept if not e.is_pinned]
    assert [e.heading for e in free] == [
        e.heading for e in newest[len(newest) - len(free) :]
    ]


# --- splitting ---


def joined(parts: list[list[Entry]]) -> str:
    """All bodies of all parts."""
    return "".join(entry.body for part in parts for entry in part)


SPLIT = {
    "empty": ([], [[]]),
    "one-part": ([said("a"), said("b")], [["a", "b"]]),
    "between-entries": (
        [said("a" * 160), said("b" * 160), said("c" * 160)],
        [["a" * 160, "b" * 160], ["c" * 160]],
    ),
    "heading-too-long": (
        [said("a"), Entry("h" * 800), said("b")],
        [["a"], [""], ["b"]],
    ),
}


@pytest.mark.parametrize(("entries", "expected"), SPLIT.values(), ids=SPLIT)
def test_split(entries: list[Entry], expected: list[list[str]]) -> None:
    """A part ends between two entries where it can."""
    parts = split_entries(entries, 100, count)
    assert [[entry.body for entry in part] for part in parts] == expected


def test_long_entry_is_continued() -> None:
    """An entry that fits no part is cut, and every further piece says so."""
    parts = split_entries([tool("b" * 4_000)], 300, count)
    headings = [entry.heading for part in parts for entry in part]
    assert len(headings) == len(parts) > 3
    assert headings[0] == "user: [tool x returned a result]\n"
    again = "user: [tool x returned a result] (continued)\n"
    assert headings[1:] == [again] * (len(parts) - 1)
    assert joined(parts) == "b" * 4_000


@given(ENTRIES, st.integers(30, 4_000))
def test_split_loses_nothing(entries: list[Entry], budget: int) -> None:
    """Whatever the budget, parts fit it and hold every character in order."""
    parts = split_entries(entries, budget, count)
    assert joined(parts) == "".join(entry.body for entry in entries)
    assert all(total(part) <= budget for part in parts)
    assert len(parts) == 1 or all(parts)


@given(
    st.lists(st.sampled_from(["9" * 200, " " * 200, "漢" * 50]), max_size=40),
    st.integers(400, 4_000),
)
def test_uneven_entries_fit_their_parts(pieces: list[str], budget: int) -> None:
    """A part fits its budget even where a text is denser at its beginning."""
    parts = split_entries([said("".join(pieces))], budget, dense_count)
    assert joined(parts) == "".join(pieces)
    for part in parts:
        costs = [dense_count(e.heading) + dense_count(e.body) + 1 for e in part]
        assert sum(costs) <= budget
