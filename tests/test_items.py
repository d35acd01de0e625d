"""The items of a history, their handles, and the index beside a summary."""

from __future__ import annotations

from google.genai import types

from contextguard_adk._history.coverage import HANDLE_CHARS
from contextguard_adk._summarizing.items import INDEX_GAP, list_items, write_index
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
from tests.chats import count_tokens


def listed(*contents: types.Content) -> list[str]:
    """The titles of items, without their handles."""
    items = list_items(contents, range(len(contents)))
    return [item.title[HANDLE_CHARS + 1 :] for item in items]


def test_each_part_is_an_item() -> None:
    """Messages, calls, results, code and files, each with what tells it apart."""
    code = types.Part(executable_code=types.ExecutableCode(code="x = 1"))
    output = types.Part(code_execution_result=types.CodeExecutionResult(output="1"))
    image = types.Part.from_bytes(data=b"1234", mime_type="image/png")
    assert listed(
        user("Read  it,\nplease."),
        call("read", path="a.py"),
        response("read", "x" * 1_200),
        model("word " * 40),
        types.Content(role="user", parts=[code, output, image]),
    ) == [
        'user message "Read it, please.", 17 characters',
        "read call, 15 characters",
        'read result {"path":"a.py"}, 1,200 characters',
        f'model message "{"word " * 12}…", 200 characters',
        "code that was run, 5 characters",
        "output of code, 1 characters",
        "[attached image/png, 4 bytes]",
    ]


def test_parallel_calls_give_each_result_its_own_arguments() -> None:
    """By id, and by order where there is none."""
    titles = listed(
        calls(call_part("look", path="a"), call_part("look", path="b")),
        responses(response_part("look", "x"), response_part("look", "xx")),
        calls(call_part("look", "1", at="c"), call_part("look", "2", at="d")),
        responses(response_part("look", "xx", "2"), response_part("look", "y", "1")),
    )
    assert [title for title in titles if "result" in title] == [
        'look result {"path":"a"}, 1 characters',
        'look result {"path":"b"}, 2 characters',
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


def read(name: str) -> list[types.Content]:
    """A call and a result that is worth a line of the index."""
    return [call("read", path=name), response("read", f"{name} " * 200)]


def index_of(
    contents: list[types.Content], known: str = "", budget_tokens: int = 500
) -> str:
    """The index of some contents, with what was known before."""
    items = list_items(contents, range(len(contents)))
    return write_index(items, known, budget_tokens, count_tokens)


def test_index_is_newest_first_and_keeps_what_it_knew() -> None:
    """New lines come before those of the summary before; the short are left out."""
    first = index_of([*read("a"), user("hi")])
    both = index_of(read("b"), first)
    _, *lines = both.splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        'read result {"path":"b"}, 400 characters',
        'read result {"path":"a"}, 400 characters',
    ]
    assert len(index_of(read("a"), both).splitlines()) == 3


def test_index_respects_its_budget() -> None:
    """The oldest lines give way, and the index says so from then on."""
    contents = [content for n in range(40) for content in read(f"{n}.py")]
    index = index_of(contents, budget_tokens=100)
    assert count_tokens(index) <= 100
    assert '"39.py"' in index.splitlines()[1]
    assert index.splitlines()[-1] == INDEX_GAP
    assert index_of([], index, 10_000) == index
    assert index_of(contents, budget_tokens=0) == ""
