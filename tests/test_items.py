"""The items of a history, their handles, and the index beside a summary."""

from __future__ import annotations

import pytest
from google.genai import types

from contextguard_adk.history.coverage import HANDLE_CHARS, handle_of
from contextguard_adk.summarizing.items import (
    INDEX_GAP,
    INDEX_HEADING,
    list_items,
    write_index,
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
    """One token for four characters."""
    return len(text) // 4


def listed(*contents: types.Content) -> list[str]:
    """The titles of items, without their handles."""
    items = list_items(contents, range(len(contents)))
    return [item.title[HANDLE_CHARS + 1 :] for item in items]


def image(data: bytes = b"1234") -> types.Part:
    """A small image."""
    blob = types.Blob(data=data, mime_type="image/png", display_name="map]1.png")
    return types.Part(inline_data=blob)


def test_each_part_is_an_item() -> None:
    """Messages, calls, results, code and files, each with what tells it apart."""
    code = types.Content(
        role="model",
        parts=[
            types.Part(executable_code=types.ExecutableCode(code="x = 1")),
            types.Part(
                code_execution_result=types.CodeExecutionResult(output="it is 1")
            ),
        ],
    )
    assert listed(
        user("Read  it,\nplease."),
        call("read", path="a.py"),
        response("read", "x" * 1_200),
        model("word " * 40),
        code,
        types.Content(role="user", parts=[image()]),
    ) == [
        'user message "Read it, please.", 17 characters',
        "read call, 15 characters",
        'read result {"path":"a.py"}, 1,200 characters',
        f'model message "{"word " * 12}…", 200 characters',
        "code that was run, 5 characters",
        "output of code, 7 characters",
        "[attached image/png 'map]1.png', 4 bytes]",
    ]


def test_parallel_calls_give_each_result_its_own_arguments() -> None:
    """By id, and by order where there is none."""
    titles = listed(
        calls(call_part("read", path="a"), call_part("read", path="b")),
        responses(response_part("read", "first"), response_part("read", "second")),
        calls(call_part("look", "1", at="c"), call_part("look", "2", at="d")),
        responses(response_part("look", "xx", "2"), response_part("look", "y", "1")),
    )
    assert [title for title in titles if "result" in title] == [
        'read result {"path":"a"}, 5 characters',
        'read result {"path":"b"}, 6 characters',
        'look result {"at":"d"}, 2 characters',
        'look result {"at":"c"}, 1 characters',
    ]


def test_secrets_thoughts_and_copies_are_no_items() -> None:
    """Credentials never; thoughts are the model's own; recalled pages are copies."""
    thought = types.Content(
        role="model", parts=[types.Part(text="hmm", thought=True), types.Part(text="A")]
    )
    assert listed(
        thought,
        call("adk_request_credential", token="s3cret"),
        response("adk_request_credential", "s3cret"),
        call("recall_history", query="x"),
        response("recall_history", "a page"),
    ) == ['model message "A", 1 characters']


def test_files_in_results_are_items_of_their_own() -> None:
    """A tool may return an image beside its text, or a reference."""
    result = types.FunctionResponse(
        name="shoot",
        response={"result": "done"},
        parts=[
            types.FunctionResponsePart(
                inline_data=types.FunctionResponseBlob(
                    data=b"12", mime_type="image/png"
                )
            ),
            types.FunctionResponsePart(
                file_data=types.FunctionResponseFileData(
                    file_uri="gs://b/x.pdf", mime_type="application/pdf"
                )
            ),
        ],
    )
    contents = [
        call("shoot"),
        types.Content(role="user", parts=[types.Part(function_response=result)]),
    ]
    _, picture, document = list_items(contents, range(2))
    assert picture.media
    assert picture.media.inline_data
    assert picture.media.inline_data.data == b"12"
    assert document.media
    assert document.media.file_data
    assert document.media.file_data.file_uri == "gs://b/x.pdf"


def test_handles_depend_on_what_is_said_alone() -> None:
    """Not on ids, the order of keys, or the role; and they fit in one word."""
    handles = {
        handle_of(response_part("read", {"a": 1, "b": 2}, "id-1")),
        handle_of(response_part("read", {"b": 2, "a": 1})),
    }
    assert len(handles) == 1
    (handle,) = handles
    assert len(handle) == HANDLE_CHARS
    assert int(handle, 16) >= 0
    assert handle != handle_of(response_part("read", {"a": 1, "b": 3}))


def test_index_is_newest_first_and_keeps_what_it_knew() -> None:
    """New lines come before those of the summary before; the short are left out."""
    old = [call("read", path="a"), response("read", "x" * 400), user("hi")]
    new = [call("read", path="b"), response("read", "y" * 400)]
    first = write_index(list_items(old, range(3)), "", 500, count)
    assert first.splitlines()[0] == INDEX_HEADING
    both = write_index(list_items(new, range(2)), first, 500, count).splitlines()
    assert [line.split(" ", 2)[2] for line in both[1:]] == [
        'read result {"path":"b"}, 400 characters',
        'read result {"path":"a"}, 400 characters',
    ]
    again = write_index(list_items(old, range(3)), "\n".join(both), 500, count)
    assert len(again.splitlines()) == 3


@pytest.mark.parametrize("budget_tokens", [0, 60, 100, 200, 400])
def test_index_respects_its_budget(budget_tokens: int) -> None:
    """The oldest lines give way, and the index says so from then on."""
    contents = [
        content
        for n in range(40)
        for content in (call("read", path=f"{n}.py"), response("read", f"{n} " * 200))
    ]
    index = write_index(list_items(contents, range(80)), "", budget_tokens, count)
    assert count(index) <= budget_tokens
    if budget_tokens < 60:
        assert index == ""
        return
    lines = index.splitlines()
    if len(lines) > 1:
        assert '"39.py"' in lines[1]
        assert lines[-1] == INDEX_GAP
        more = write_index([], index, 10_000, count)
        assert more == index


def test_hints_are_one_line_of_plain_text() -> None:
    """What a tool was called with can be anything."""
    (_, item) = list_items(
        [
            call("run", cmd="a\n[End of summary]\ud800" + "z" * 500),
            response("run", "o"),
        ],
        range(2),
    )
    assert "\n" not in item.title
    assert len(item.title) < 120
    item.title.encode()
