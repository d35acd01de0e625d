"""Measuring contents and requests: bytes / 4 of what the model reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.genai import types
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from contextguard_adk.measuring.tokens import (
    estimate_config_tokens,
    estimate_contents_tokens,
    estimate_part_tokens,
    estimate_request_tokens,
    json_bytes,
    json_text,
    measure_part,
    media_tokens,
    part_bytes,
    part_text,
    text_bytes,
)
from tests.builders import call_part, model, user

# A machine under load is no reason to fail.
unhurried = settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)


def table(cases: dict[str, tuple[Any, ...]], *names: str) -> pytest.MarkDecorator:
    """Parametrizes a test by rows with ids."""
    return pytest.mark.parametrize(names, cases.values(), ids=cases.keys())


def blob(mime_type: str, size_bytes: int) -> types.Part:
    """A part with data of that type and size."""
    return types.Part(
        inline_data=types.Blob(mime_type=mime_type, data=b"\0" * size_bytes)
    )


def reference(mime_type: str | None) -> types.Part:
    """A part that refers to a file."""
    return types.Part(
        file_data=types.FileData(file_uri="gs://bucket/file", mime_type=mime_type)
    )


def result_part(**fields: Any) -> types.Part:
    """A part with a tool result."""
    return types.Part(function_response=types.FunctionResponse(**fields))


def part(**fields: Any) -> types.Part:
    """A part of any kind."""
    return types.Part(**fields)


# --- parts and contents

CODE = types.ExecutableCode(code="print(1)", language=types.Language.PYTHON)
OUTPUT = types.CodeExecutionResult(output="1\n", outcome=types.Outcome.OUTCOME_OK)
IMAGES_IN_RESULT = [
    types.FunctionResponsePart(
        inline_data=types.FunctionResponseBlob(mime_type="image/png", data=b"x" * 9_000)
    ),
    types.FunctionResponsePart(
        file_data=types.FunctionResponseFileData(
            mime_type="image/png", file_uri="gs://bucket/file"
        )
    ),
]
PARTS: dict[str, tuple[types.Part | None, int]] = {
    "none": (None, 0),
    "empty": (part(), 0),
    "empty-text": (part(text="", thought=True, part_metadata={"a": "b"}), 0),
    "text": (part(text="hello"), 5),
    "utf8": (part(text="日本語"), 9),
    "lone-surrogate": (part(text="\ud800"), 3),
    "thought": (part(text="why", thought=True), 3),
    "signature": (part(thought_signature=b"x" * 900), 0),
    "call": (call_part("read", "call-1", path="/a"), 4 + 13),
    "no-args": (part(function_call=types.FunctionCall(name="stop")), 4),
    "no-name": (part(function_call=types.FunctionCall(args={"a": 1})), 7),
    "result": (result_part(name="read", response={"result": "ok"}), 4 + 15),
    "empty-result": (result_part(id="1"), 0),
    "bytes-in-result": (result_part(name="read", response={"a": b"\xff"}), 4 + 13),
    "code": (part(executable_code=CODE), 8),
    "code-output": (part(code_execution_result=OUTPUT), 2),
    "unknown-kind": (part(tool_call=types.ToolCall(id="1", args={"q": "x"})), 27),
    "image": (blob("image/png", 4_000_000), 4 * 1_120),
    "empty-blob": (part(inline_data=types.Blob()), 0),
    "reference": (reference("application/pdf"), 4 * 5_600),
    "unknown-reference": (reference(None), 4 * 1_000),
    "images-in-a-result": (
        result_part(name="shot", response={"a": "b"}, parts=IMAGES_IN_RESULT),
        2 * 4 * 1_120 + 4 + 9,
    ),
}


@table(PARTS, "part", "size_bytes")
def test_part_counts_what_the_model_reads(
    part: types.Part | None, size_bytes: int
) -> None:
    """Text, names, arguments, results and code count; media by kind; no ids."""
    assert part_bytes(part) == size_bytes
    assert estimate_part_tokens(part) == -(-size_bytes // 4)
    measure = measure_part(part)
    assert measure.text_bytes + measure.media_bytes == size_bytes
    assert measure.text_bytes == len(part_text(part))


def test_contents_are_rounded_up_once() -> None:
    """A thousand contents of one byte are 250 tokens, even from a generator."""
    assert estimate_contents_tokens(user("x") for _ in range(1_000)) == 250
    assert estimate_contents_tokens([types.Content(), user("a", "b", "é")]) == 1
    empty = types.Content.model_construct(role="user", parts=[None])
    assert estimate_contents_tokens([empty]) == 0


@pytest.mark.parametrize(
    ("mime_type", "size_bytes", "tokens"),
    [
        ("IMAGE/JPEG", 900, 1_120),
        ("image/svg+xml", None, 1_120),
        ("image/png", 0, 0),
        ("audio/mpeg", 80_000, 320),
        ("audio/mpeg", 1, 32),
        ("audio/x-wav", 320_000, 320),
        ("audio/l16;rate=16000", 320_000, 320),
        ("audio/mpeg", None, 1_920),
        ("video/mp4", 1_250_000, 2_630),
        ("video/*", None, 15_780),
        ("application/pdf", 500_000, 5_600),
        ("application/pdf", 10**9, 560_000),
        ("application/pdf", None, 5_600),
        ("text/csv", 4_001, 1_001),
        ("application/ld+json; charset=utf-8", 4_000, 1_000),
        ("text/plain", None, 1_000),
        ("application/jsonish", 9, 1_000),
        ("application/zip", 9_000_000, 1_000),
        (None, 9, 1_000),
    ],
)
def test_media_count_by_kind(
    mime_type: str | None, size_bytes: int | None, tokens: int
) -> None:
    """Images, recordings and documents count what providers publish for their kind."""
    assert media_tokens(mime_type, size_bytes) == tokens


# --- configuration and requests


class Answer(BaseModel):
    """A response schema."""

    text: str = Field(description="The answer")


class Unschemable(BaseModel):
    """A model for which there is no JSON schema."""

    value: Callable[[], int]


def configure(**fields: Any) -> types.GenerateContentConfig:
    """A configuration."""
    return types.GenerateContentConfig(**fields)


def declare(**fields: Any) -> types.GenerateContentConfig:
    """A configuration with one declared function."""
    declaration = types.FunctionDeclaration(name="read", **fields)
    return configure(tools=[types.Tool(function_declarations=[declaration])])


def some_tool(path: str) -> str:
    """A callable in the list of tools."""
    return path


SEARCH = types.Tool(google_search=types.GoogleSearch())
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TYPED_SCHEMA = types.Schema(
    type=types.Type.OBJECT, properties={"path": types.Schema(type=types.Type.STRING)}
)
CONFIGS: dict[str, tuple[types.GenerateContentConfig | None, int]] = {
    "none": (None, 0),
    "no-prompt": (configure(temperature=0.5), 0),
    "text": (configure(system_instruction="x" * 40), 10),
    "content": (configure(system_instruction=user("x" * 20, "y" * 20)), 10),
    "part": (configure(system_instruction=part(text="x" * 8)), 2),
    "list": (configure(system_instruction=["x" * 8, part(text="y" * 8)]), 4),
    "description": (declare(description="x" * 16), 5),
    "json-schema": (declare(parameters_json_schema=SCHEMA), 16),
    "typed-schema": (declare(parameters=TYPED_SCHEMA), 16),
    "response": (declare(parameters=TYPED_SCHEMA, response=TYPED_SCHEMA), 31),
    "behavior-is-unread": (declare(behavior=types.Behavior.NON_BLOCKING), 1),
    "nothing-declared": (configure(tools=[some_tool, SEARCH]), 0),
    "output": (configure(response_json_schema=SCHEMA), 15),
    "typed-output": (configure(response_schema=TYPED_SCHEMA), 15),
    "class": (configure(response_schema=Answer), 42),
    "list-of-a-class": (configure(response_schema=list[Answer]), 42),
    "class-without-schema": (configure(response_schema=Unschemable), 0),
    "plain-type": (configure(response_schema=list[int]), 0),
}


@table(CONFIGS, "config", "tokens")
def test_config_counts_what_reaches_the_prompt(
    config: types.GenerateContentConfig | None, tokens: int
) -> None:
    """Instruction, declared functions and response schema count, settings do not."""
    assert estimate_config_tokens(config) == pytest.approx(tokens, abs=2)


def test_request_is_contents_and_config_rounded_once() -> None:
    """The request's heuristic is the sum of all its bytes / 4."""
    request = LlmRequest(
        contents=[user("x"), model("y")], config=configure(system_instruction="zz")
    )
    assert estimate_request_tokens(request) == 1


# --- JSON


class Plain:
    """An object that JSON does not know."""

    def __init__(self) -> None:
        self.label = "x" * 50


class Silent:
    """An object without anything to show."""

    __slots__ = ()


def make_deep(depth: int, leaf: object) -> object:
    """Lists in lists."""
    for _ in range(depth):
        leaf = [leaf]
    return leaf


def make_cycle() -> dict[str, Any]:
    """A value that contains itself."""
    value: dict[str, Any] = {"text": "x" * 40}
    value["self"] = value
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("naïve 日\ud800", "naïve 日\ud800".encode("utf-8", "surrogatepass")),
        ({"a": [1, None, True]}, b'{"a":[1,null,true]}'),
        ({"a": '日"\n'}, '{"a":"日\\"\\n"}'.encode()),
        (float("nan"), b"NaN"),
        (None, b"null"),
    ],
    ids=["text-as-it-is", "compact", "escapes", "nan", "none"],
)
def test_json_is_compact(value: object, text: bytes) -> None:
    """JSON has no spaces and no escaped letters."""
    assert json_text(value) == text
    assert json_bytes(value) == len(text)
    if isinstance(value, str):
        assert text_bytes(value) == len(text)


ODD_VALUES: dict[str, tuple[object, int, int]] = {
    "lone-surrogates": ({"a": "\ud800" * 10}, 30, 50),
    "bytes": ({"a": b"\xff" * 30}, 40, 60),
    "bytearray": ({"a": bytearray(b"\xff" * 30), "b": Silent()}, 40, 80),
    "object": ({"a": Plain()}, 50, 80),
    "opaque": ({"a": Silent()}, 6, 30),
    "class": ({"a": Plain}, 4, 30),
    "deep": (make_deep(10_000, "x" * 100), 20_100, 40_000),
    "cycle": (make_cycle(), 50, 80),
    "scalars": ([Silent(), None, 1.5, 7, True, (1, {2})], 20, 60),
    "long-number": ([Silent(), 10**9_000], 7_000, 10_000),
    "shared": ([object()] * 5, 4, 40),
    "huge": ([Silent(), *range(500_000)], 100_000, 1_000_000),
}


@table(ODD_VALUES, "value", "least", "most")
def test_json_has_a_size_for_every_value(value: object, least: int, most: int) -> None:
    """What JSON cannot express counts about what its parts count, in bounded work."""
    assert least <= json_bytes(value) <= most


# --- properties

any_value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(alphabet=st.characters())
    | st.binary()
    | st.builds(Plain)
    | st.builds(Silent)
    | st.complex_numbers(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner)
    ),
    max_leaves=20,
)


@unhurried
@given(any_value, st.text(alphabet=st.characters(), max_size=60))
def test_any_part_is_measured(value: object, text: str) -> None:
    """Every value has a size and a text of that size, and a sum has the sum of them."""
    assert json_bytes(value) == len(json_text(value)) >= 0
    result = types.FunctionResponse.model_construct(
        name=text, response={"result": value}, parts=None
    )
    parts = [
        types.Part(text=text),
        types.Part.model_construct(function_response=result),
    ]
    sizes = [part_bytes(each) for each in parts]
    contents = [types.Content.model_construct(role="user", parts=parts)] * 2
    assert estimate_contents_tokens(contents) == -(-sum(sizes) // 2)
