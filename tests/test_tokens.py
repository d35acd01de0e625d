"""Measuring contents and requests: bytes / 4 of what the model reads."""

from __future__ import annotations

from typing import Any

import pytest
from google.genai import types
from pydantic import BaseModel, Field

from contextguard_adk._measuring.tokens import (
    Memo,
    estimate_config_tokens,
    estimate_contents_tokens,
    measure_part,
    media_tokens,
    part_text,
)
from tests.builders import call_part, response_part, user


def part(**fields: Any) -> types.Part:
    """A part of any kind."""
    return types.Part(**fields)


def shot(**fields: Any) -> types.Part:
    """A part with a tool's result."""
    return part(function_response={"name": "shot", **fields})


PNG = {"mime_type": "image/png", "data": bytes(9_000)}
LINK = {"mime_type": "image/png", "file_uri": "gs://bucket/file"}
IMAGES = [{"inline_data": PNG}, {"file_data": LINK}]
IMAGE_BYTES = 4 * 1_120
PARTS: dict[str, tuple[types.Part, int]] = {
    "empty-text": (part(text="", thought=True, part_metadata={"a": "b"}), 0),
    "text": (part(text="hello"), 5),
    "utf8": (part(text="日本語"), 9),
    "lone-surrogate": (part(text="\ud800"), 3),
    "signature": (part(thought_signature=b"x" * 900), 0),
    "call": (call_part("read", "call-1", path="/a"), 4 + 13),
    "result": (response_part("read", "ok", "call-1"), 4 + 15),
    "bytes-in-result": (shot(response={"a": b"\xff"}), 4 + 12),
    "code": (part(executable_code={"code": "print(1)", "language": "PYTHON"}), 8),
    "code-output": (
        part(code_execution_result={"output": "1\n", "outcome": "OUTCOME_OK"}),
        2,
    ),
    "unknown-kind": (part(tool_call={"id": "1", "args": {"q": "x"}}), 27),
    "image": (part(inline_data=PNG), IMAGE_BYTES),
    "reference": (part(file_data={**LINK, "mime_type": "a/b"}), 4_000),
    "images-in-a-result": (
        shot(response={"a": "b"}, parts=IMAGES),
        2 * IMAGE_BYTES + 4 + 9,
    ),
}


@pytest.mark.parametrize(("part", "size_bytes"), PARTS.values(), ids=PARTS)
def test_part_counts_what_the_model_reads(part: types.Part, size_bytes: int) -> None:
    """Text, names, arguments, results and code count; media by kind; no ids."""
    assert Memo().part_bytes(part) == size_bytes
    tokens = estimate_contents_tokens([types.Content(parts=[part])])
    assert tokens == -(-size_bytes // 4)
    measure = measure_part(part)
    assert measure.text_bytes + measure.media_bytes == size_bytes
    assert measure.text_bytes == len(part_text(part))


@pytest.mark.parametrize(
    ("mime_type", "size_bytes", "tokens"),
    [
        ("IMAGE/JPEG", 900, 1_120),
        ("audio/mpeg", 80_000, 320),
        ("audio/mpeg", None, 1_920),
        ("audio/l16;rate=16000", 320_000, 320),
        ("video/mp4", 1_250_000, 2_630),
        ("application/pdf", 500_000, 5_600),
        ("application/pdf", 10**9, 560_000),
        ("text/csv", 4_001, 1_001),
        ("application/ld+json; charset=x", 4_000, 1_000),
    ],
)
def test_media_count_by_kind(
    mime_type: str, size_bytes: int | None, tokens: int
) -> None:
    """Images, recordings and documents count what providers publish for their kind."""
    assert media_tokens(mime_type, size_bytes) == tokens


class Answer(BaseModel):
    """A response schema."""

    text: str = Field(description="The answer")


def configure(**fields: Any) -> types.GenerateContentConfig:
    """A configuration."""
    return types.GenerateContentConfig(**fields)


def declare(**fields: Any) -> types.GenerateContentConfig:
    """A configuration with one declared function."""
    declaration = types.FunctionDeclaration(name="read", **fields)
    return configure(tools=[types.Tool(function_declarations=[declaration])])


SEARCH = types.Tool(google_search=types.GoogleSearch())
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TYPED = types.Schema.model_validate(
    {"type": "OBJECT", "properties": {"path": {"type": "STRING"}}}
)
CONFIGS: dict[str, tuple[types.GenerateContentConfig | None, int]] = {
    "none": (None, 0),
    "content": (configure(system_instruction=user("x" * 20, "y" * 20)), 10),
    "list": (configure(system_instruction=["x" * 8, part(text="y" * 8)]), 4),
    "description": (declare(description="x" * 16), 5),
    "json-schema": (declare(parameters_json_schema=SCHEMA), 16),
    "typed-schema": (declare(parameters=TYPED), 16),
    "response": (declare(parameters=TYPED, response=TYPED), 31),
    "nothing-declared": (configure(tools=[SEARCH]), 0),
    "output": (configure(response_json_schema=SCHEMA), 15),
    "class": (configure(response_schema=Answer), 42),
}


@pytest.mark.parametrize(("config", "tokens"), CONFIGS.values(), ids=CONFIGS)
def test_config_counts_what_reaches_the_prompt(
    config: types.GenerateContentConfig | None, tokens: int
) -> None:
    """Instruction, declared functions and response schema count, settings do not."""
    assert estimate_config_tokens(config) == pytest.approx(tokens, abs=2)
