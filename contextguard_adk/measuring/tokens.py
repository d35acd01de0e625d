"""Measuring contents and requests in tokens.

The heuristic is the documented one: the UTF-8 bytes of what the model reads, divided by
four. It is cheap and knows no provider; `calibration` turns it into an estimate. Bytes
are summed over all that is measured and rounded up once. Role names, call ids and
thought signatures do not count; the text of thoughts does.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from google.genai import types
from pydantic import BaseModel, PydanticUserError

from contextguard_adk.measuring.density import count_spare_tokens, estimate_text_density
from contextguard_adk.measuring.json_size import json_bytes, json_text, text_bytes

if TYPE_CHECKING:
    from google.adk.models.llm_request import LlmRequest

__all__ = [
    "PartMeasure",
    "content_bytes",
    "estimate_config_tokens",
    "estimate_content_tokens",
    "estimate_contents_tokens",
    "estimate_conversation_tokens",
    "estimate_part_tokens",
    "estimate_request_tokens",
    "estimate_text_density",
    "json_bytes",
    "measure_part",
    "media_tokens",
    "part_bytes",
    "part_text",
    "read_part",
    "text_bytes",
]

_BYTES_PER_TOKEN = 4

_RAW_AUDIO = re.compile(r"audio/(x-|vnd\.)?(wav|l16|l24|pcm|aiff)")
_TEXT_FILE = re.compile(
    r"text/|application/([\w.-]+\+)?(json|xml|yaml|x-yaml|javascript|sql|toml)\b"
)
# Fields of a part that are not in the prompt.
_UNREAD_FIELDS = {
    *("media_processing", "media_resolution", "part_metadata", "speech_metadata"),
    *("thought", "thought_signature", "video_metadata"),
}


def _tokens(size_bytes: int) -> int:
    return (size_bytes + _BYTES_PER_TOKEN - 1) // _BYTES_PER_TOKEN


def media_tokens(mime_type: str | None, size_bytes: int | None) -> int:
    """Estimates what a provider takes for an image, a recording or a document.

    An image takes 1,120 (the default of Gemini 3; Gemini 2 takes 258 for each tile of
    768 pixels, OpenAI 765 to 1,105 at high detail, Claude up to about 1,600). Audio
    takes 32 a second (Gemini), taken to be 64 kbit/s or, raw, 256 kbit/s. Video takes
    263 a second (Gemini), taken to be 1 Mbit/s. A PDF takes 560 a page (Gemini 3;
    Gemini 2 takes 258, Claude 1,500 to 3,000) of 50 kB, for at most 1,000 pages. A file
    of text counts as text, any other 1,000.

    Args:
        mime_type: The declared type, None if unknown.
        size_bytes: Size of the data; None for a reference, which counts as a minute
            of audio or video or as ten pages.
    """
    kind = (mime_type or "").lower()
    if size_bytes == 0:
        return 0
    if kind.startswith("image/"):
        return 1_120
    if kind.startswith("audio/"):
        bytes_per_second = 32_000 if _RAW_AUDIO.match(kind) else 8_000
        return 32 * _units(size_bytes, bytes_per_second, if_unknown=60)
    if kind.startswith("video/"):
        return 263 * _units(size_bytes, 125_000, if_unknown=60)
    if kind.startswith("application/pdf"):
        return 560 * min(_units(size_bytes, 50_000, if_unknown=10), 1_000)
    if size_bytes is not None and _TEXT_FILE.match(kind):
        return _tokens(size_bytes)
    return 1_000


def _units(size_bytes: int | None, bytes_per_unit: int, if_unknown: int) -> int:
    return if_unknown if size_bytes is None else -(-size_bytes // bytes_per_unit)


def _media_bytes(media: Any) -> int:
    """Returns what a blob or a file reference counts, in bytes of text."""
    if media is None:
        return 0
    is_reference = getattr(media, "file_uri", None) is not None
    size_bytes = None if is_reference else len(getattr(media, "data", None) or b"")
    return media_tokens(media.mime_type, size_bytes) * _BYTES_PER_TOKEN


def read_part(part: types.Part | None) -> tuple[Sequence[object], int]:
    """Returns what a part lets the model read, and the bytes that its media count."""
    if part is None:
        return (), 0
    # A part holds one kind of data: the first that is there is all there is.
    if part.text:
        return (part.text,), 0
    call = part.function_call
    if call is not None:
        return (call.name or "", call.args or ""), 0
    result = part.function_response
    if result is not None:
        media_bytes = sum(
            _media_bytes(nested.inline_data) + _media_bytes(nested.file_data)
            for nested in result.parts or ()
        )
        return (result.name or "", result.response or ""), media_bytes
    if part.executable_code is not None:
        return (part.executable_code.code or "",), 0
    if part.code_execution_result is not None:
        return (part.code_execution_result.output or "",), 0
    if part.inline_data is not None or part.file_data is not None:
        return (), _media_bytes(part.inline_data) + _media_bytes(part.file_data)
    others = part.__dict__.items()
    return [value for name, value in others if value and name not in _UNREAD_FIELDS], 0


def part_bytes(part: types.Part | None) -> int:
    """Returns the UTF-8 bytes that the model reads of a part.

    Text, names, arguments and results as JSON, code and its output. Media count four
    bytes for each of their `media_tokens`. A kind of part that is not known here
    counts as JSON.
    """
    values, media_bytes = read_part(part)
    return sum(map(json_bytes, values)) + media_bytes


class PartMeasure(NamedTuple):
    """What is known of a part.

    Attributes:
        text_bytes: The UTF-8 bytes of its text, which `part_text` returns.
        media_bytes: What its media count, in bytes of text.
        spare_tokens: How far below bytes / 4 the tokens of its text may be by its
            scripts, as `count_spare_tokens` says; 0.0 for ASCII.
        is_ascii: Whether its text is ASCII.
    """

    text_bytes: int
    media_bytes: int
    spare_tokens: float
    is_ascii: bool


def measure_part(part: types.Part | None) -> PartMeasure:
    """Returns what `part_bytes` measures, and what the scripts of it may spare."""
    values, media_bytes = read_part(part)
    text = b"".join(map(json_text, values))
    return PartMeasure(len(text), media_bytes, count_spare_tokens(text), text.isascii())


def part_text(part: types.Part | None) -> bytes:
    """Returns what the model reads of a part, in UTF-8, without its media."""
    return b"".join(map(json_text, read_part(part)[0]))


def _contents_bytes(
    contents: Iterable[types.Content | None],
    count_bytes: Callable[[types.Part | None], int] = part_bytes,
) -> int:
    size_bytes = 0
    for content in contents:
        parts = content.parts if content is not None else None
        for part in parts or ():
            # Most parts are text, and calling for each would triple the time.
            text = part.text if part is not None else None
            if text and text.isascii():
                size_bytes += len(text)
            else:
                size_bytes += count_bytes(part)
    return size_bytes


def content_bytes(content: types.Content | None) -> int:
    """Returns the UTF-8 bytes that the model reads of a content, without its role."""
    return _contents_bytes((content,))


def estimate_part_tokens(part: types.Part | None) -> int:
    """Estimates the tokens of a part: its bytes / 4, rounded up."""
    return _tokens(part_bytes(part))


def estimate_content_tokens(content: types.Content | None) -> int:
    """Estimates the tokens of a content: its bytes / 4, rounded up."""
    return _tokens(content_bytes(content))


def estimate_contents_tokens(
    contents: Iterable[types.Content],
    count_bytes: Callable[[types.Part | None], int] = part_bytes,
) -> int:
    """Estimates the tokens of contents: the sum of their bytes / 4, rounded up once.

    Args:
        contents: The contents.
        count_bytes: Gives what `part_bytes` does.
    """
    return _tokens(_contents_bytes(contents, count_bytes))


def estimate_conversation_tokens(
    contents: Iterable[types.Content], *, count_roles: bool = True
) -> int:
    """Estimates the tokens of a conversation as a chat API spells it.

    Roles are named `user`, `assistant`, or `tool` where there are tool results, and a
    result that is only a text stands without the `{"result": ...}` that ADK puts
    around it.

    Args:
        contents: The conversation.
        count_roles: False measures like `estimate_contents_tokens` instead.
    """
    contents = list(contents)
    spelled_bytes = sum(map(_chat_bytes, contents)) if count_roles else 0
    return _tokens(_contents_bytes(contents) + spelled_bytes)


def _chat_bytes(content: types.Content) -> int:
    """Returns the bytes that a chat API takes beyond what `content_bytes` counts."""
    role = "assistant" if content.role == "model" else content.role or ""
    wrapper_bytes = 0
    for part in content.parts or ():
        if part is not None and part.function_response:
            role = "tool"
            result = part.function_response.response or {}
            text = result.get("result") if len(result) == 1 else None
            if isinstance(text, str):
                wrapper_bytes += json_bytes(result) - text_bytes(text)
    return len(role) - wrapper_bytes


def _instruction_bytes(instruction: Any) -> int:
    if isinstance(instruction, list | tuple):
        return sum(map(_instruction_bytes, instruction))
    if isinstance(instruction, types.Content):
        return content_bytes(instruction)
    if isinstance(instruction, types.Part):
        return part_bytes(instruction)
    return 0 if instruction is None else json_bytes(instruction)


def _tool_bytes(tool: object) -> int:
    """Returns the bytes of the functions that a tool declares.

    Callables and sessions stand in the list of tools too; they declare nothing there.
    """
    declarations = tool.function_declarations if isinstance(tool, types.Tool) else None
    return sum(
        json_bytes(value)
        for declaration in declarations or ()
        for name, value in declaration.__dict__.items()
        if value is not None and name != "behavior"
    )


def _schema_bytes(schema: object) -> int:
    if arguments := get_args(schema):
        return sum(map(_schema_bytes, arguments))
    if isinstance(schema, type):
        return _class_schema_bytes(schema) if issubclass(schema, BaseModel) else 0
    return 0 if schema is None else json_bytes(schema)


@lru_cache(maxsize=256)
def _class_schema_bytes(schema: type[BaseModel]) -> int:
    try:
        return json_bytes(schema.model_json_schema())
    except PydanticUserError:
        return 0


def _config_bytes(config: types.GenerateContentConfig | None) -> int:
    if config is None:
        return 0
    return (
        _instruction_bytes(config.system_instruction)
        + sum(map(_tool_bytes, config.tools or ()))
        + _schema_bytes(config.response_schema)
        + _schema_bytes(config.response_json_schema)
    )


def estimate_config_tokens(config: types.GenerateContentConfig | None) -> int:
    """Estimates what a request's configuration adds to the prompt.

    That is the system instruction, the declared functions and the response schema.
    Tools that run at the provider, and callables, are not counted.
    """
    return _tokens(_config_bytes(config))


def estimate_request_tokens(request: "LlmRequest") -> int:
    """Estimates the tokens of a request, contents and configuration, rounded up once.

    This is the heuristic that the calibration compares with the provider's count.
    """
    return _tokens(_contents_bytes(request.contents) + _config_bytes(request.config))
