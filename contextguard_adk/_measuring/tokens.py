"""Measures contents and requests by a heuristic: UTF-8 bytes / 4 of all texts.

A payload is the arguments of a call, or the result of a tool. To spell a payload is to
write it as the text that a client sends. Media are images and files. Each token of a
medium counts as four bytes, so that bytes / 4 gives the tokens of media too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar, get_args

from google.adk.events.event import Event
from google.genai import types
from pydantic import BaseModel, PydanticUserError
from pydantic_core import SchemaSerializer, core_schema

from contextguard_adk._measuring.density import script_discount_tokens

V = TypeVar("V")


@dataclass(frozen=True)
class JsonForm:
    """The functions by which a client spells payloads as text.

    A payload whose function is None is measured as compact JSON.

    Attributes:
        args: Spells the arguments of a call.
        result: Spells the result of a tool.
    """

    args: Callable[[Any], str] | None = None
    result: Callable[[Any], str] | None = None


COMPACT = JsonForm()
"""Payloads are measured as compact JSON."""

# Tokens of media, as Gemini 3 documents them. OpenAI takes 765 to 1,105 for an image,
# Claude up to 1,600.
_IMAGE_TOKENS = 1_120
_AUDIO_TOKENS_PER_SECOND = 32
_VIDEO_TOKENS_PER_SECOND = 263
_PDF_TOKENS_PER_PAGE = 560
_OTHER_MEDIUM_TOKENS = 1_000
# The length of a medium is estimated from its size in bytes.
_RAW_AUDIO_BYTES_PER_SECOND = 32_000
_AUDIO_BYTES_PER_SECOND = 8_000
_VIDEO_BYTES_PER_SECOND = 125_000
_PDF_BYTES_PER_PAGE = 50_000
_MOST_PDF_PAGES = 1_000
# The length that a medium of unknown size is assumed to have.
_UNKNOWN_RECORDING_SECONDS = 60
_UNKNOWN_PDF_PAGES = 10

_MOST_WALKED_VALUES = 100_000
"""How many values are written of a value that `to_json` refuses, at most."""

_RAW_AUDIO = re.compile(r"audio/(x-|vnd\.)?(wav|l16|l24|pcm|aiff)")
_TEXT_FILE = re.compile(
    r"text/|application/([\w.-]+\+)?(json|xml|yaml|x-yaml|javascript|sql|toml)\b"
)
# Fields of a part that are not in the prompt.
_UNREAD_FIELDS = {
    "media_processing",
    "media_resolution",
    "part_metadata",
    "speech_metadata",
    "thought",
    "thought_signature",
    "video_metadata",
}

# `pydantic_core.to_json` makes a serializer in every call, which takes a fifth of the
# call's time. This one is made once.
_TO_JSON = SchemaSerializer(
    core_schema.any_schema(),
    core_schema.CoreConfig(ser_json_inf_nan="constants", ser_json_bytes="base64"),
).to_json


def text_bytes(text: str) -> int:
    """Returns the UTF-8 size of a text; a lone surrogate counts three bytes."""
    if text.isascii():
        return len(text)
    return len(text.encode("utf-8", "surrogatepass"))


def json_text(value: object) -> bytes:
    """Returns a text as it is, and any other value as compact JSON; never raises.

    A value that `to_json` refuses is written in a form close to JSON.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    try:
        return _TO_JSON(value, exclude_none=True)
    except ValueError:
        # The value has lone surrogates, cycles, deep nesting or unknown classes.
        return _walk_text(value)


def safe_repr(value: object) -> str:
    """Returns `repr`, or the type and address of an object whose own `repr` fails."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - anyone's code may raise anything
        return object.__repr__(value)


def _walk_text(value: object) -> bytes:
    """Writes a value in a form close to JSON.

    For example, {"a": [1]} becomes {,'a',{,1,},}. The names of a dict come before its
    values. A container is a dict, list, tuple or set. Each container is written only
    once, so that cycles end. At most `_MOST_WALKED_VALUES` texts are written.
    """
    texts = list[str]()
    # The containers that were written, by their `id`. They are kept here, so that no
    # other object gets the same `id`.
    walked = dict[int, object]()
    end_of_container = object()
    # The values that are still to be written; the last one is written next.
    stack = [value]

    while stack and len(texts) < _MOST_WALKED_VALUES:
        item = stack.pop()
        if item is end_of_container:
            texts.append("}")
        elif not isinstance(item, dict | list | tuple | set):
            texts.append(safe_repr(item))
        elif id(item) not in walked:
            walked[id(item)] = item
            texts.append("{")
            children = list(item)
            if isinstance(item, dict):
                children += item.values()
            stack.append(end_of_container)
            stack.extend(reversed(children))

    return ",".join(texts).encode("utf-8", "replace")


def media_tokens(mime_type: str | None, size_bytes: int | None) -> int:
    """Estimates the tokens that a provider takes for a medium.

    Args:
        mime_type: The MIME type of the medium; None if unknown.
        size_bytes: The size of the medium; None if unknown. A recording of unknown size
            counts as a minute, and a PDF of unknown size as ten pages.
    """
    if size_bytes == 0:
        return 0

    lower_type = (mime_type or "").lower()
    if lower_type.startswith("image/"):
        return _IMAGE_TOKENS

    if lower_type.startswith("audio/"):
        is_raw = _RAW_AUDIO.match(lower_type)
        bytes_per_second = (
            _RAW_AUDIO_BYTES_PER_SECOND if is_raw else _AUDIO_BYTES_PER_SECOND
        )
        seconds = _divide_up(
            size_bytes, bytes_per_second, unknown=_UNKNOWN_RECORDING_SECONDS
        )
        return seconds * _AUDIO_TOKENS_PER_SECOND

    if lower_type.startswith("video/"):
        seconds = _divide_up(
            size_bytes, _VIDEO_BYTES_PER_SECOND, unknown=_UNKNOWN_RECORDING_SECONDS
        )
        return seconds * _VIDEO_TOKENS_PER_SECOND

    if lower_type.startswith("application/pdf"):
        pages = _divide_up(size_bytes, _PDF_BYTES_PER_PAGE, unknown=_UNKNOWN_PDF_PAGES)
        return min(pages, _MOST_PDF_PAGES) * _PDF_TOKENS_PER_PAGE

    if size_bytes is not None and _TEXT_FILE.match(lower_type):
        return (size_bytes + 3) // 4  # Rounded up.
    return _OTHER_MEDIUM_TOKENS


def _divide_up(size_bytes: int | None, unit_bytes: int, unknown: int) -> int:
    """Returns how many units a size has, rounded up; `unknown` if the size is None."""
    if size_bytes is None:
        return unknown
    return (size_bytes + unit_bytes - 1) // unit_bytes


def _media_bytes(part: types.Part | types.FunctionResponsePart) -> int:
    """Returns four bytes for each token of the medium in a part; 0 for no medium."""
    blob = part.inline_data
    if blob is not None:
        return 4 * media_tokens(blob.mime_type, len(blob.data or b""))
    if part.file_data:
        # The medium is at an address, so its size is unknown.
        return 4 * media_tokens(part.file_data.mime_type, None)
    return 0


def media_bytes(contents: Iterable[types.Content]) -> int:
    """Returns four bytes for each token of the media in contents.

    Files in a tool's result are media too.
    """
    total_bytes = 0
    for content in contents:
        for part in content.parts or ():
            # Most parts are texts or calls, and have no media.
            if part is None or part.text or part.function_call:
                continue
            if part.function_response is None:
                total_bytes += _media_bytes(part)
                continue
            for file in part.function_response.parts or ():
                total_bytes += _media_bytes(file)
    return total_bytes


def _spell(payload: object, speller: Callable[[Any], str] | None) -> object:
    """Returns the text that a client sends for a payload.

    - Without a speller, returns the payload itself, which is then measured as JSON.
    - An empty payload has no text, so it is returned as it is.
    - If the speller fails, returns the `repr` of the payload.

    Args:
        payload: The payload; None if the part has none.
        speller: A function of `JsonForm`; None for compact JSON.
    """
    if speller is None or not payload:
        return payload

    try:
        return speller(payload)
    except Exception:  # noqa: BLE001 - anyone's code may raise anything
        return safe_repr(payload)


class _ReadPart(NamedTuple):
    """All of a part that the model reads.

    Attributes:
        values: Texts, and values that are sent as JSON. An empty value has no text.
        media_bytes: Four bytes for each token of the media in the part.
    """

    values: Sequence[object]
    media_bytes: int = 0


def _read_part(part: types.Part | None, form: JsonForm) -> _ReadPart:
    """Returns all of a part that the model reads.

    A part has data of one kind, so the first kind that is found is the only one.

    Args:
        part: The part; None, which a plugin may put into a content, has no data.
        form: The functions by which the client spells payloads.
    """
    if part is None:
        return _ReadPart(())

    if part.text:
        return _ReadPart((part.text,))

    call = part.function_call
    if call is not None:
        return _ReadPart((call.name, _spell(call.args, form.args)))

    result = part.function_response
    if result is not None:
        spelled = _spell(result.response, form.result)
        files_bytes = 0
        for file in result.parts or ():
            files_bytes += _media_bytes(file)
        return _ReadPart((result.name, spelled), files_bytes)

    code = part.executable_code
    if code is not None:
        return _ReadPart((code.code,))

    outcome = part.code_execution_result
    if outcome is not None:
        return _ReadPart((outcome.output,))

    if part.inline_data is not None or part.file_data is not None:
        return _ReadPart((), _media_bytes(part))

    # A newer release of google-genai may have added a kind of data.
    fields = part.__dict__.items()
    values = [value for name, value in fields if name not in _UNREAD_FIELDS]
    return _ReadPart(values)


class PartMeasure(NamedTuple):
    """The size of a part.

    Attributes:
        text_bytes: The UTF-8 bytes of the part's text.
        media_bytes: Four bytes for each token of the part's media.
        script_discount_tokens: The script discount of the text: see the function of
            the same name in `density`.
        is_ascii: Whether all of the text is ASCII.
    """

    text_bytes: int
    media_bytes: int
    script_discount_tokens: float
    is_ascii: bool


def measure_part(part: types.Part | None, form: JsonForm = COMPACT) -> PartMeasure:
    """Measures a part as a client with a given form of JSON spells the part."""
    read = _read_part(part, form)
    text = b"".join([json_text(value) for value in read.values if value])
    return PartMeasure(
        text_bytes=len(text),
        media_bytes=read.media_bytes,
        script_discount_tokens=script_discount_tokens(text),
        is_ascii=text.isascii(),
    )


def part_text(part: types.Part | None, form: JsonForm = COMPACT) -> bytes:
    """Returns the text of a part that the model reads, in UTF-8."""
    read = _read_part(part, form)
    return b"".join([json_text(value) for value in read.values if value])


def estimate_contents_tokens(contents: Iterable[types.Content]) -> int:
    """Estimates the tokens of contents without a memo of earlier measures."""
    return Memo().estimate_tokens(contents)


def config_texts(config: types.GenerateContentConfig | None) -> Iterator[bytes]:
    """Yields the texts in a config that the model reads.

    These are the texts of the instruction, the declared functions and the response
    schema. None has no texts.
    """
    if config is None:
        return

    yield from _instruction_texts(config.system_instruction)
    for tool in config.tools or ():
        if isinstance(tool, types.Tool):
            yield from _declaration_texts(tool)
    yield from _schema_texts(config.response_schema)
    yield from _schema_texts(config.response_json_schema)


def _declaration_texts(tool: types.Tool) -> Iterator[bytes]:
    """Yields the texts of the fields of all functions that a tool declares."""
    for declaration in tool.function_declarations or ():
        for name, value in declaration.__dict__.items():
            # The field `behavior` is for the client alone, and is not in the prompt.
            if value is not None and name != "behavior":
                yield json_text(value)


def _instruction_texts(instruction: Any) -> Iterator[bytes]:
    """Yields the texts of a system instruction.

    The instruction may be a content, a part, a text, a list of these, or None.
    """
    if isinstance(instruction, list | tuple):
        for item in instruction:
            yield from _instruction_texts(item)
    elif isinstance(instruction, types.Content):
        for part in instruction.parts or ():
            yield part_text(part)
    elif isinstance(instruction, types.Part):
        yield part_text(instruction)
    elif instruction is not None:
        yield json_text(instruction)


def _schema_texts(schema: object) -> Iterator[bytes]:
    """Yields the texts of a schema.

    - A Pydantic class has the text of its JSON schema.
    - A generic type such as `list[Answer]` has the texts of its arguments.
    - Another class, such as `int`, has no text. None has no text either.
    - Any other schema is measured as JSON.
    """
    type_arguments = get_args(schema)
    if type_arguments:
        for argument in type_arguments:
            yield from _schema_texts(argument)
    elif isinstance(schema, type):
        if issubclass(schema, BaseModel):
            yield _class_schema_text(schema)
    elif schema is not None:
        yield json_text(schema)


@lru_cache(maxsize=256)
def _class_schema_text(schema: type[BaseModel]) -> bytes:
    """Returns the JSON schema of a Pydantic class; b"" if the class has none."""
    try:
        return json_text(schema.model_json_schema())
    except PydanticUserError:
        return b""


def estimate_config_tokens(config: types.GenerateContentConfig | None) -> int:
    """Estimates the tokens of instruction, declared functions and response schema."""
    size_bytes = sum(len(text) for text in config_texts(config))
    return (size_bytes + 3) // 4  # Rounded up.


@dataclass(eq=False)
class Memo:
    """Measures contents, and remembers the measures of earlier runs' payloads.

    A payload is recognized by its identity, not by its value. Measures of this run's
    payloads are not remembered, because a tool may still change the arguments of a call
    or a result that the tool has returned. Measures of results with files are not
    remembered either.

    Attributes:
        events: The events of the session.
        invocation_id: The run whose payloads are not remembered.
        form: The functions by which the client spells payloads.
    """

    events: Sequence[Event] = ()
    invocation_id: str = ""
    form: JsonForm = COMPACT
    _remembered: dict[Hashable, Any] = field(default_factory=dict)
    # By `_key_of` the part.
    _measures: dict[Hashable, PartMeasure] = field(default_factory=dict)

    @cached_property
    def _old_payloads(self) -> dict[int, object]:
        """The payloads of earlier runs by their `id`.

        The payloads are kept as well, because another object may get the `id` of an
        object that no longer exists.
        """
        old_payloads = dict[int, object]()
        for event in self.events:
            if not event.content or event.invocation_id == self.invocation_id:
                continue
            for part in event.content.parts or ():
                payload = _payload_of(part) if part else None
                if payload is not None:
                    old_payloads[id(payload)] = payload
        return old_payloads

    def remember(
        self,
        compute: Callable[[Any], V],
        value: types.Content | types.Part,
        parts: Sequence[types.Part | None],
        role: str | None = None,
    ) -> V:
        """Returns `compute(value)`; remembers the result if no part can still change.

        A part with a text cannot change, nor can a part whose payload is one of an
        earlier run. If `parts` has any other part, such as a file or None, the result
        is computed each time.

        Args:
            compute: The function. Its result must depend on nothing but the role, and
                the texts, payloads and names of calls and results in the parts.
            value: A part, or a content.
            parts: The part itself, or the parts of the content.
            role: The role of the content; None if the result does not depend on a role.
        """
        keys = [self._key_of(part) for part in parts]
        if None in keys:
            return compute(value)

        key = (compute, role, *keys)
        if key not in self._remembered:
            self._remembered[key] = compute(value)
        result: V = self._remembered[key]
        return result

    def _key_of(self, part: types.Part | None) -> Hashable:
        """Returns a key that only equal parts have; None if the part can still change.

        A part with a text has its text as the key. A part with a payload of an earlier
        run has the identity of the payload, and the name of the call or result.
        """
        if part is None:
            return None
        if part.text:
            return part.text

        # None, for a part without a payload, is not among the old payloads.
        payload_id = id(_payload_of(part))
        if payload_id not in self._old_payloads:
            return None
        call_or_result = part.function_call or part.function_response
        return payload_id, call_or_result.name if call_or_result else None

    def measure_part(self, part: types.Part | None) -> PartMeasure:
        """Measures a part as the client spells the part, from memory if possible."""
        key = self._key_of(part)
        if key is None:
            return measure_part(part, self.form)
        measure = self._measures.get(key)
        if measure is None:
            measure = self._measures[key] = measure_part(part, self.form)
        return measure

    def part_bytes(self, part: types.Part | None) -> int:
        """Returns the UTF-8 bytes of a part, and four bytes for each token of media."""
        measure = self.measure_part(part)
        return measure.text_bytes + measure.media_bytes

    def part_text(self, part: types.Part | None) -> bytes:
        """Returns the text of a part as the client spells the part, in UTF-8."""
        return part_text(part, self.form)

    def estimate_tokens(self, contents: Iterable[types.Content]) -> int:
        """Estimates the tokens of contents: the bytes of all parts / 4, rounded up."""
        size_bytes = 0
        for content in contents:
            for part in content.parts or ():
                text = part.text if part else None
                if not text:
                    size_bytes += self.part_bytes(part)
                elif text.isascii():
                    # `text_bytes` would return the same number. Most texts are ASCII,
                    # and a call for each of them would triple the time.
                    size_bytes += len(text)
                else:
                    size_bytes += text_bytes(text)
        return (size_bytes + 3) // 4  # Rounded up.


def _payload_of(part: types.Part) -> dict[str, Any] | None:
    """Returns the payload of a part, if the part can be recognized by its payload.

    Returns None for a part without a payload. Returns None also for a result with
    files, because the files are not in the payload.
    """
    if part.function_call is not None:
        return part.function_call.args

    result = part.function_response
    if result is None or result.parts:
        return None
    return result.response
