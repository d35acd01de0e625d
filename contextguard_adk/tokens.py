"""Measuring contents and requests in tokens, and calibrating the measure.

The heuristic is the documented one: the UTF-8 bytes of what the model reads, divided by
four. It is cheap and knows no provider; what the provider counted on the call before
turns it into an estimate (`estimate_prompt_tokens`). Bytes are summed over all that is
measured and rounded up once. Role names, call ids and thought signatures do not count;
the text of thoughts does.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_args

from google.genai import types
from pydantic import BaseModel, PydanticUserError

from contextguard_adk.density import (
    count_spare_tokens,
    estimate_text_density,
    json_bytes,
    json_text,
    text_bytes,
    weighted_tokens,
)

if TYPE_CHECKING:
    from google.adk.models.llm_request import LlmRequest

__all__ = [
    "DEFAULT_CORRECTION",
    "MAX_CORRECTION",
    "calibrated_tokens",
    "content_bytes",
    "correction_factor",
    "estimate_config_tokens",
    "estimate_content_tokens",
    "estimate_contents_tokens",
    "estimate_conversation_tokens",
    "estimate_growth_tokens",
    "estimate_part_tokens",
    "estimate_prompt_tokens",
    "estimate_request_tokens",
    "estimate_text_density",
    "json_bytes",
    "media_tokens",
    "part_bytes",
    "part_spare_tokens",
    "request_spare_tokens",
    "text_bytes",
]

DEFAULT_CORRECTION = 1.5
MAX_CORRECTION = 5.0

_BYTES_PER_TOKEN = 4
_MAX_TOKENIZER_RATIO = 2.0
_NOTABLE_GROWTH_RATIO = 0.05
# Of the least that the scripts allow, where English counts bytes / 4; o200k_base takes
# 0.76 of that for the Universal Declaration of Human Rights.
_BELIEVED_RATIO = 0.75

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


def _readable(part: types.Part | None) -> tuple[Sequence[object], int]:
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
    values, media_bytes = _readable(part)
    return sum(map(json_bytes, values)) + media_bytes


def part_spare_tokens(part: types.Part | None) -> float:
    """Returns how far below bytes / 4 the tokens of a part may be by its scripts.

    The sum of `count_spare_tokens` over what `part_bytes` measures; 0.0 for ASCII.
    """
    return sum(count_spare_tokens(json_text(value)) for value in _readable(part)[0])


def _contents_bytes(
    contents: Iterable[types.Content | None],
    measure_part: Callable[[types.Part | None], int] = part_bytes,
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
                size_bytes += measure_part(part)
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
    measure_part: Callable[[types.Part | None], int] = part_bytes,
) -> int:
    """Estimates the tokens of contents: the sum of their bytes / 4, rounded up once.

    Args:
        contents: The contents.
        measure_part: Gives the bytes of a part that is more than plain text.
    """
    return _tokens(_contents_bytes(contents, measure_part))


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


def correction_factor(
    real_tokens: int | None,
    last_heuristic_tokens: int | None,
    *,
    default: float = DEFAULT_CORRECTION,
) -> float:
    """Returns how many real tokens a heuristic token stood for on the last call.

    Args:
        real_tokens: Prompt tokens that the provider reported; None or 0 if unknown.
        last_heuristic_tokens: The heuristic of the same request; None or 0 if unknown.
        default: The factor if either is unknown.

    Returns:
        The ratio, at least 1.0 and at most 5.0: one odd call shall neither shrink the
        estimate nor blow it up.
    """
    if not real_tokens or not last_heuristic_tokens:
        return default
    return min(max(real_tokens / last_heuristic_tokens, 1.0), MAX_CORRECTION)


def calibrated_tokens(
    heuristic_tokens: int,
    real_tokens: int | None,
    last_heuristic_tokens: int | None,
    *,
    default: float = DEFAULT_CORRECTION,
) -> int:
    """Estimates a request by the documented rule, `max(real, heuristic x correction)`.

    The real count is a floor only while the request has not shrunk since: after a
    rewind or a compaction it speaks of contents that are gone.

    Args:
        heuristic_tokens: The heuristic of the request now.
        real_tokens: As for `correction_factor`.
        last_heuristic_tokens: As for `correction_factor`.
        default: As for `correction_factor`.
    """
    correction = correction_factor(real_tokens, last_heuristic_tokens, default=default)
    scaled_tokens = int(heuristic_tokens * correction)
    has_shrunk = heuristic_tokens < (last_heuristic_tokens or 0)
    return scaled_tokens if has_shrunk else max(scaled_tokens, real_tokens or 0)


def _newest_parts(contents: Sequence[types.Content]) -> Iterator[tuple[bytes, int]]:
    """Yields from the end each part's text and the bytes that its media count."""
    for content in reversed(contents):
        for part in reversed(content.parts or ()):
            values, media_bytes = _readable(part)
            yield b"".join(map(json_text, values)), media_bytes


def estimate_growth_tokens(
    contents: Sequence[types.Content], growth_heuristic_tokens: int
) -> int:
    """Estimates what a request grew by, weighted by the density of its newest text.

    A correction learned on prose says nothing of the base64 that a tool has just
    returned. The newest contents are taken to be what grew; a bounded sample of their
    text is judged by `estimate_text_density`.

    Args:
        contents: The contents of the request.
        growth_heuristic_tokens: Its heuristic less that of the last call.

    Returns:
        Tokens, never less than `growth_heuristic_tokens`; 0 if nothing grew.
    """
    if growth_heuristic_tokens <= 0:
        return 0
    weighted = weighted_tokens(_newest_parts(contents), growth_heuristic_tokens)
    return max(growth_heuristic_tokens, int(weighted))


def _grown_tokens(
    real_tokens: int,
    last_heuristic_tokens: int,
    growth_tokens: int,
    contents: Sequence[types.Content],
) -> int:
    """Returns the real count plus the growth in tokens of the provider's own size.

    The density is that of o200k_base. Where the growth matters, the older contents show
    how many of the provider's tokens stand for one of those: some count a third more.
    """
    parts = _newest_parts(contents)
    weighted = weighted_tokens(parts, growth_tokens)
    if growth_tokens >= last_heuristic_tokens * _NOTABLE_GROWTH_RATIO:
        ratio = real_tokens / weighted_tokens(parts, last_heuristic_tokens)
        weighted *= min(max(ratio, 1.0), _MAX_TOKENIZER_RATIO)
    return real_tokens + max(int(weighted), growth_tokens)


def request_spare_tokens(
    contents: Iterable[types.Content | None],
    config: types.GenerateContentConfig | None = None,
    measure_spare: Callable[[types.Part | None], float] = part_spare_tokens,
) -> int:
    """Returns how far below bytes / 4 the tokens of a request may be by its scripts.

    Args:
        contents: Its contents.
        config: Its configuration; the instruction counts if it is a text.
        measure_spare: Gives what `part_spare_tokens` does.

    Returns:
        Tokens; 0 where all is ASCII.
    """
    spare_tokens = 0.0
    instruction = config.system_instruction if config is not None else None
    if isinstance(instruction, str):
        spare_tokens += count_spare_tokens(json_text(instruction))
    for content in contents:
        parts = content.parts if content is not None else None
        for part in parts or ():
            text = part.text if part is not None else None
            if not text or not text.isascii():
                spare_tokens += measure_spare(part)
    return int(spare_tokens)


def _lowered_tokens(
    heuristic_tokens: int,
    real_tokens: int,
    last_heuristic_tokens: int,
    spare_tokens: int,
) -> int | None:
    """Returns what replaces the documented rule where scripts explain a low count.

    Cyrillic, Greek, Arabic or Devanagari take 0.4 to 0.8 tokens for each four bytes.
    Below what they are known to take the result never is, and ASCII counts in full. A
    count that even they do not explain leaves something out, such as what a cache
    held: it is not believed.

    Returns:
        Tokens, without what growth adds; None where the documented rule stands.
    """
    growth_tokens = max(heuristic_tokens - last_heuristic_tokens, 0)
    known_tokens = heuristic_tokens - growth_tokens
    carried_tokens = int(real_tokens * known_tokens / last_heuristic_tokens)
    least_tokens = heuristic_tokens - spare_tokens
    # Growth may have no share in what is spare: then this asks for less than it could.
    if carried_tokens < (least_tokens - growth_tokens) * _BELIEVED_RATIO:
        return None
    return max(carried_tokens, least_tokens)


def estimate_prompt_tokens(
    heuristic_tokens: int,
    real_tokens: int | None,
    last_heuristic_tokens: int | None,
    contents: Sequence[types.Content],
    *,
    default: float = DEFAULT_CORRECTION,
    config: types.GenerateContentConfig | None = None,
    measure_spare: Callable[[types.Part | None], float] = part_spare_tokens,
) -> int:
    """Estimates the prompt tokens of a request before it is sent.

    The larger of the documented rule (`calibrated_tokens`) and of what the provider
    counted last plus what grew since, weighted by its density. Where nothing is known
    the density of the whole request stands in for the second.

    The documented rule takes no count for less than bytes / 4. Where the provider
    counted less and the scripts of the text explain it, the count stands; what grew
    since counts bytes / 4 all the same. A request in ASCII, Latin letters, Han, kana or
    Hangul is never below bytes / 4.

    Args:
        heuristic_tokens: The heuristic of the request now.
        real_tokens: As for `correction_factor`.
        last_heuristic_tokens: As for `correction_factor`.
        contents: The contents of the request.
        default: As for `correction_factor`.
        config: Its configuration, for the script of the instruction.
        measure_spare: Gives what `part_spare_tokens` does.
    """
    calibrated = calibrated_tokens(
        heuristic_tokens, real_tokens, last_heuristic_tokens, default=default
    )
    if not real_tokens or not last_heuristic_tokens:
        return max(calibrated, estimate_growth_tokens(contents, heuristic_tokens))
    if real_tokens < last_heuristic_tokens:
        spare_tokens = request_spare_tokens(contents, config, measure_spare)
        lowered = _lowered_tokens(
            heuristic_tokens, real_tokens, last_heuristic_tokens, spare_tokens
        )
        calibrated = calibrated if lowered is None else lowered
    growth_tokens = heuristic_tokens - last_heuristic_tokens
    if growth_tokens <= 0:
        return calibrated
    return max(
        calibrated,
        _grown_tokens(real_tokens, last_heuristic_tokens, growth_tokens, contents),
    )
