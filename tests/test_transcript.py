"""The conversation as text for a summariser, whole or within a budget."""

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
    call_part,
    calls,
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


# --- rendering ---


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        pytest.param(user("Hi."), ["user: Hi."], id="user"),
        pytest.param(model("Hello."), ["model: Hello."], id="model"),
        pytest.param(user("a", "b"), ["user: a", "user: b"], id="two-parts"),
        pytest.param(
            types.Content(parts=[types.Part(text="a")]), ["user: a"], id="no-role"
        ),
        pytest.param(
            call("search"),
            ["model: [called tool: search]"],
            id="call-without-arguments",
        ),
        pytest.param(
            call("search", query="Rome"),
            ['model: [called tool: search]\n{"query":"Rome"}'],
            id="call",
        ),
        pytest.param(
            response("search", "sunny"),
            ["user: [tool search returned a result]\nsunny"],
            id="result-text",
        ),
        pytest.param(
            response("search", {"a": 1, "b": ["ü"]}),
            ['user: [tool search returned a result]\n{"a":1,"b":["ü"]}'],
            id="result-json",
        ),
        pytest.param(
            response("search", {}),
            ["user: [tool search returned a result]"],
            id="result-empty",
        ),
        pytest.param(
            response("search", {"error": "not found"}),
            ['user: [tool search returned a result]\n{"error":"not found"}'],
            id="result-error",
        ),
        pytest.param(
            answer_with_image({"result": "seen"}),
            ["user: [tool look returned a result] [attached image/png, 2 bytes]\nseen"],
            id="result-with-image",
        ),
        pytest.param(
            calls(call_part("a"), call_part("b")),
            ["model: [called tool: a]", "model: [called tool: b]"],
            id="parallel-calls",
        ),
        pytest.param(
            responses(response_part("a", "1"), response_part("b", "2")),
            [
                "user: [tool a returned a result]\n1",
                "user: [tool b returned a result]\n2",
            ],
            id="parallel-results",
        ),
        pytest.param(
            call("adk_request_credential", secret="s3cret"), [], id="credential-call"
        ),
        pytest.param(
            response("adk_request_credential", {"token": "s3cret"}),
            [],
            id="credential-result",
        ),
        pytest.param(
            content(types.Part(text="I think.", thought=True), types.Part(text="Yes.")),
            ["user: Yes."],
            id="thought",
        ),
        pytest.param(
            content(
                types.Part(
                    function_call=types.FunctionCall(name="x", args={}), thought=True
                ),
                role="model",
            ),
            ["model: [called tool: x]"],
            id="call-in-a-thought",
        ),
        pytest.param(
            content(
                types.Part.from_executable_code(
                    code="f()", language=types.Language.PYTHON
                ),
                types.Part.from_code_execution_result(
                    outcome=types.Outcome.OUTCOME_OK, output="5"
                ),
                role="model",
            ),
            ["model: [ran code]\nf()", "model: [code returned a result]\n5"],
            id="code",
        ),
        pytest.param(
            content(
                types.Part(executable_code=types.ExecutableCode()),
                types.Part(code_execution_result=types.CodeExecutionResult()),
            ),
            ["user: [ran code]\n", "user: [code returned a result]\n"],
            id="empty-code",
        ),
        pytest.param(
            content(types.Part(text="See:"), blob()),
            ["user: See:", "user: [attached image/png, 6 bytes]"],
            id="image",
        ),
        pytest.param(types.Content(role="user"), [], id="no-parts"),
        pytest.param(
            types.Content.model_construct(role="user", parts=[None, types.Part()]),
            [],
            id="odd-parts",
        ),
        pytest.param(
            user("For context:", "[helper] said: It is sunny."),
            ["user: [helper] said: It is sunny."],
            id="relay",
        ),
        pytest.param(
            user("For context: my host is 10.0.0.3."),
            ["user: For context: my host is 10.0.0.3."],
            id="user-begins-like-a-relay",
        ),
        pytest.param(
            model("For context: 10.0.0.3."),
            ["model: For context: 10.0.0.3."],
            id="model-begins-like-a-relay",
        ),
    ],
)
def test_rendered_content(item: types.Content, expected: list[str]) -> None:
    """Each part has its documented line; credentials and thoughts have none."""
    assert lines(item) == expected


def test_entries_know_where_they_come_from() -> None:
    """Entries carry the index of their content, and whether it may be dropped."""
    contents = [user("a"), call("x", q=1), response("x", "b"), user("c", "d")]
    entries = render_entries(contents, [0, 2, 3], pinned=[3])
    assert [(e.content_index, e.is_tool, e.is_pinned) for e in entries] == [
        (0, False, False),
        (2, True, False),
        (3, False, True),
        (3, False, True),
    ]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        pytest.param(blob(), "[attached image/png, 6 bytes]", id="image"),
        pytest.param(
            blob("cat.png"), "[attached image/png 'cat.png', 6 bytes]", id="named-image"
        ),
        pytest.param(
            blob(None, None), "[attached file, 6 bytes]", id="image-without-type"
        ),
        pytest.param(
            types.Part(inline_data=types.Blob(mime_type="image/png")),
            "[attached image/png, 0 bytes]",
            id="image-without-data",
        ),
        pytest.param(file("gs://b/a"), "[attached text/plain 'gs://b/a']", id="file"),
        pytest.param(
            file("gs://b/a", "a.txt"), "[attached text/plain 'a.txt']", id="named-file"
        ),
        pytest.param(file(None), "[attached text/plain '']", id="file-without-name"),
        pytest.param(
            types.Part(file_data=types.FileData(file_uri="gs://b/a")),
            "[attached file 'gs://b/a']",
            id="file-without-type",
        ),
        pytest.param(types.Part(text="a"), "", id="text"),
    ],
)
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


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        pytest.param({"result": "text"}, "text", id="wrapped-text"),
        pytest.param({"result": ["text"]}, '{"result":["text"]}', id="wrapped-list"),
        pytest.param({"output": "text"}, '{"output":"text"}', id="other-key"),
        pytest.param(["a", 1, None], '["a",1,null]', id="list"),
        pytest.param({"n": math.nan}, '{"n":NaN}', id="nan"),
        pytest.param({"b": b"ab"}, '{"b":"ab"}', id="bytes"),
        pytest.param(
            {"b": b"\xff", "c": "kept"},
            '{"b": "b\'\\\\xff\'", "c": "kept"}',
            id="raw-bytes",
        ),
        pytest.param(
            {"a": {"b": "\ud800"}, "c": "ü"},
            '{"a": {"b": "?"}, "c": "ü"}',
            id="lone-surrogate",
        ),
        pytest.param({"t": datetime.date(2030, 1, 2)}, '{"t":"2030-01-02"}', id="date"),
        pytest.param({"o": object}, '{"o":"<class \'object\'>"}', id="object"),
    ],
)
def test_payload(payload: object, expected: str) -> None:
    """A text stands as it is, everything else as JSON, whatever is in it."""
    assert payload_text(payload) == expected


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        pytest.param({"note": "still shown", "d": deep(100_000)}, "note", id="deep"),
        pytest.param(deep(100_000), "list that cannot be shown", id="deep-list"),
        pytest.param(cyclic(), "still shown", id="cycle"),
    ],
)
def test_payload_that_cannot_be_serialised(payload: object, expected: str) -> None:
    """Cycles and endless nesting are described, and what is readable is kept."""
    text = payload_text(payload)
    assert expected in text
    assert len(text) < 200
    assert text.encode()


# --- shortening ---


@pytest.mark.parametrize(
    ("text", "max_chars", "expected"),
    [
        pytest.param("", 0, "", id="empty"),
        pytest.param("abc", 3, "abc", id="fits"),
        pytest.param(
            "a" * 60 + "b" * 60,
            64,
            "aaaaaaaaaa\n[… 120 characters in all, middle left out …]\nbbbbbbbb",
            id="head-and-tail",
        ),
        pytest.param(
            "a" * 60, 5, "\n[… 60 characters in all, middle left out …]\n", id="notice"
        ),
        pytest.param(
            "a" * 60,
            -5,
            "\n[… 60 characters in all, middle left out …]\n",
            id="negative",
        ),
    ],
)
def test_shorten(text: str, max_chars: int, expected: str) -> None:
    """Head and tail are kept, with the whole length between them."""
    assert shorten(text, max_chars) == expected


@given(st.text(max_size=2_000), st.integers(60, 2_000))
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


def test_newer_results_keep_more() -> None:
    """The newest of equal results keeps about three times what the oldest does."""
    fitted = fit_entries([tool("b" * 9_000) for _ in range(9)], 5_000, count)
    lengths = [len(entry.body) for entry in fitted]
    assert lengths == sorted(lengths)
    assert 2.5 < lengths[-1] / lengths[0] < 3.5


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
    fitted = fit_entries(entries, 1_000, count)
    assert total(fitted) <= 1_000
    assert fitted[0].text == f"[{100 - len(fitted) + 1} earlier messages left out]"
    kept = [entry.body.split()[0] for entry in fitted[1:]]
    assert kept[:2] == ["task", "live"]
    assert kept[2:] == [str(n) for n in range(100 - len(kept) + 2, 100)]


def test_pinned_entries_stay_however_small_the_budget() -> None:
    """Where not even the pinned entries fit their headings remain."""
    entries = [said("t" * 4_000, is_pinned=True), said("a"), tool("b", is_pinned=True)]
    fitted = fit_entries(entries, 10, count)
    assert [entry.heading for entry in fitted[1:]] == [
        entries[0].heading,
        entries[2].heading,
    ]
    assert fitted[1].body == ""


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


@pytest.mark.parametrize(
    ("entries", "budget", "expected"),
    [
        pytest.param([], 100, [[]], id="empty"),
        pytest.param([said("a"), said("b")], 100, [["a", "b"]], id="one-part"),
        pytest.param(
            [said("a" * 160), said("b" * 160), said("c" * 160)],
            100,
            [["a" * 160, "b" * 160], ["c" * 160]],
            id="between-entries",
        ),
        pytest.param([Entry("h" * 800, "b")], 100, [["b"]], id="heading-too-long"),
        pytest.param(
            [said("a"), Entry("h" * 800), said("b")],
            100,
            [["a"], ["", "b"]],
            id="heading-too-long-between",
        ),
    ],
)
def test_split(entries: list[Entry], budget: int, expected: list[list[str]]) -> None:
    """A part ends between two entries where it can."""
    parts = split_entries(entries, budget, count)
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
    entry = said("".join(pieces))
    parts = split_entries([entry], budget, dense_count)
    assert joined(parts) == entry.body
    for part in parts:
        assert (
            sum(dense_count(e.heading) + dense_count(e.body) + 1 for e in part)
            <= budget
        )
