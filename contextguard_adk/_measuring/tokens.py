"""Measures contents and requests in tokens: the UTF-8 bytes of what is read, / 4."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, TypeVar, get_args

from google.adk.events.event import Event
from google.genai import types
from pydantic import BaseModel, PydanticUserError
from pydantic_core import SchemaSerializer, core_schema

from contextguard_adk._measuring.density import script_discount_tokens

V = TypeVar("V")


@dataclass(frozen=True)
class JsonForm:
    """How a client spells arguments and results; None where it sends the values."""

    args: Callable[[Any], str] | None = None
    result: Callable[[Any], str] | None = None


COMPACT = JsonForm()

_RAW_AUDIO = re.compile(r"audio/(x-|vnd\.)?(wav|l16|l24|pcm|aiff)")
_TEXT_FILE = re.compile(
    r"text/|application/([\w.-]+\+)?(json|xml|yaml|x-yaml|javascript|sql|toml)\b"
)
# Fields of a part that are not in the prompt.
_UNREAD_FIELDS = {
    *("media_processing", "media_resolution", "part_metadata", "speech_metadata"),
    *("thought", "thought_signature", "video_metadata"),
}

# `pydantic_core.to_json` makes one anew on every call, which takes a fifth of the time.
_TO_JSON = SchemaSerializer(
    core_schema.any_schema(),
    core_schema.CoreConfig(ser_json_inf_nan="constants", ser_json_bytes="base64"),
).to_json


def text_bytes(text: str) -> int:
    """Returns the UTF-8 size of a text; a lone surrogate counts three bytes."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def json_text(value: object) -> bytes:
    """Returns any value as compact JSON, a text as it is; never raises."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    try:
        return _TO_JSON(value, exclude_none=True)
    except ValueError:  # Lone surrogates, cycles, deep nesting, unknown classes.
        return _walk_text(value)


def safe_repr(value: object) -> str:
    """Returns `repr`, or type and address of an object whose own fails."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - anyone's code may raise anything
        return object.__repr__(value)


def _walk_text(value: object) -> bytes:
    """Returns what `to_json` refuses as something close to JSON, each object once."""
    texts = list[str]()
    seen = dict[int, object]()
    end = object()
    stack = [value]
    while stack and len(texts) < 100_000:
        item = stack.pop()
        if item is end:
            texts.append("}")
        elif not isinstance(item, dict | list | tuple | set):
            texts.append(safe_repr(item))
        elif id(item) not in seen:
            seen[id(item)] = item
            texts.append("{")
            children = [*item, *item.values()] if isinstance(item, dict) else [*item]
            stack += [end, *reversed(children)]
    return ",".join(texts).encode("utf-8", "replace")


def _tokens(size_bytes: int) -> int:
    return (size_bytes + 3) // 4


def media_tokens(mime_type: str | None, size_bytes: int | None) -> int:
    """Estimates what a provider takes for a medium, as Gemini 3 documents it.

    OpenAI takes 765 to 1,105 for an image, Claude up to 1,600. Of unknown size a
    recording counts as a minute, a PDF as ten pages of 50 kB.
    """
    kind = (mime_type or "").lower()
    if size_bytes == 0:
        return 0
    if kind.startswith("image/"):
        return 1_120
    if kind.startswith("audio/"):
        bytes_per_second = 32_000 if _RAW_AUDIO.match(kind) else 8_000
        return 32 * (60 if size_bytes is None else -(-size_bytes // bytes_per_second))
    if kind.startswith("video/"):
        return 263 * (60 if size_bytes is None else -(-size_bytes // 125_000))
    if kind.startswith("application/pdf"):
        return 560 * (10 if size_bytes is None else min(-(-size_bytes // 50_000), 1000))
    if size_bytes is not None and _TEXT_FILE.match(kind):
        return _tokens(size_bytes)
    return 1_000


def _media_bytes(part: types.Part | types.FunctionResponsePart) -> int:
    if (blob := part.inline_data) is not None:
        return 4 * media_tokens(blob.mime_type, len(blob.data or b""))
    return 4 * media_tokens(part.file_data.mime_type, None) if part.file_data else 0


def media_bytes(part: types.Part) -> int:
    """Returns four bytes for each token that the media of a part are taken for."""
    return _read_part(part, COMPACT)[1]


def _spell(value: object, spell: Callable[[Any], str] | None) -> object:
    """Returns what a client makes of a value, or the value where it makes nothing."""
    if not value or spell is None:
        return value or ""
    try:
        return spell(value)
    except Exception:  # noqa: BLE001 - anyone's code may raise anything
        return safe_repr(value)


def _read_part(part: types.Part | None, form: JsonForm) -> tuple[Sequence[object], int]:
    """Returns what a part lets the model read, and the bytes that its media count."""
    if part is None:
        return (), 0
    # A part holds one kind of data: the first that is there is all there is.
    if part.text:
        return (part.text,), 0
    if (call := part.function_call) is not None:
        return (call.name or "", _spell(call.args, form.args)), 0
    if (result := part.function_response) is not None:
        said = (result.name or "", _spell(result.response, form.result))
        return said, sum(map(_media_bytes, result.parts or ()))
    if (code := part.executable_code) is not None:
        return (code.code or "",), 0
    if (outcome := part.code_execution_result) is not None:
        return (outcome.output or "",), 0
    if part.inline_data is not None or part.file_data is not None:
        return (), _media_bytes(part)
    fields = part.__dict__.items()
    return [value for name, value in fields if value and name not in _UNREAD_FIELDS], 0


class PartMeasure(NamedTuple):
    """Bytes of text and media of a part, and what depends on its scripts."""

    text_bytes: int
    media_bytes: int
    script_discount_tokens: float
    is_ascii: bool


def measure_part(part: types.Part | None, form: JsonForm = COMPACT) -> PartMeasure:
    """Returns what a part takes, as its client spells it."""
    values, others = _read_part(part, form)
    text = b"".join(map(json_text, values))
    discount = script_discount_tokens(text)
    return PartMeasure(len(text), others, discount, text.isascii())


def part_text(part: types.Part | None, form: JsonForm = COMPACT) -> bytes:
    """Returns what the model reads of a part, in UTF-8, without its media."""
    return b"".join(map(json_text, _read_part(part, form)[0]))


def estimate_contents_tokens(contents: Iterable[types.Content]) -> int:
    """Estimates the tokens of contents, of which nothing is remembered."""
    return Memo().estimate_tokens(contents)


def config_texts(config: types.GenerateContentConfig | None) -> Iterator[bytes]:
    """Yields the texts of instruction, declared functions and response schema."""
    if config is None:
        return
    yield from _instruction_texts(config.system_instruction)
    for tool in config.tools or ():
        found = tool.function_declarations if isinstance(tool, types.Tool) else None
        for declaration in found or ():
            for name, value in declaration.__dict__.items():
                if value is not None and name != "behavior":
                    yield json_text(value)
    for schema in (config.response_schema, config.response_json_schema):
        yield from _schema_texts(schema)


def _instruction_texts(instruction: Any) -> Iterator[bytes]:
    if isinstance(instruction, list | tuple):
        for item in instruction:
            yield from _instruction_texts(item)
    elif isinstance(instruction, types.Content):
        yield from map(part_text, instruction.parts or ())
    elif isinstance(instruction, types.Part):
        yield part_text(instruction)
    elif instruction is not None:
        yield json_text(instruction)


def _schema_texts(schema: object) -> Iterator[bytes]:
    if arguments := get_args(schema):
        for argument in arguments:
            yield from _schema_texts(argument)
    elif isinstance(schema, type):
        yield _class_schema_text(schema) if issubclass(schema, BaseModel) else b""
    elif schema is not None:
        yield json_text(schema)


@lru_cache(maxsize=256)
def _class_schema_text(schema: type[BaseModel]) -> bytes:
    try:
        return json_text(schema.model_json_schema())
    except PydanticUserError:
        return b""


def estimate_config_tokens(config: types.GenerateContentConfig | None) -> int:
    """Estimates the tokens of instruction, declared functions and response schema."""
    return _tokens(sum(map(len, config_texts(config))))


@dataclass(eq=False)
class Memo:
    """Measures contents as a client spells them; knows the payloads of earlier runs.

    Results are remembered by the identity of these payloads. A tool of this run may
    still change what it was given or has returned.
    """

    events: Sequence[Event] = ()
    invocation_id: str = ""
    form: JsonForm = COMPACT
    _known: dict[object, Any] = field(default_factory=dict)

    @cached_property
    def _old(self) -> dict[int, object]:
        return {
            id(payload): payload
            for event in self.events
            if event.content and event.invocation_id != self.invocation_id
            for part in event.content.parts or ()
            if part and (payload := _payload_of(part)) is not None
        }

    def remember(
        self,
        compute: Callable[[Any], V],
        value: types.Content | types.Part,
        parts: Sequence[types.Part | None],
        role: str | None = None,
    ) -> V:
        """Returns `compute(value)`, from memory where all of its `parts` are old."""
        key: list[object] = [compute, role]
        for part in parts:
            if part is not None and part.text:
                key.append(part.text)
                continue
            payload = _payload_of(part) if part is not None else None
            if part is None or id(payload) not in self._old:
                return compute(value)
            tool = part.function_call or part.function_response
            key += id(payload), tool and tool.name
        if (found := tuple(key)) not in self._known:
            self._known[found] = compute(value)
        result: V = self._known[found]
        return result

    def measure_part(self, part: types.Part | None) -> PartMeasure:
        return (
            self.remember(self._measure, part, (part,)) if part else measure_part(part)
        )

    @cached_property
    def _measure(self) -> Callable[[types.Part], PartMeasure]:
        return partial(measure_part, form=self.form)

    def part_bytes(self, part: types.Part | None) -> int:
        """Returns the UTF-8 bytes that the model reads; media count as tokens."""
        measure = self.measure_part(part)
        return measure.text_bytes + measure.media_bytes

    def part_text(self, part: types.Part | None) -> bytes:
        return part_text(part, self.form)

    def estimate_tokens(self, contents: Iterable[types.Content]) -> int:
        """Estimates tokens of contents: the sum of their bytes / 4, rounded up once."""
        size_bytes = 0
        for content in contents:
            for part in content.parts or ():
                # Most parts are ASCII, and calling for each would triple the time.
                text = part.text if part else None
                if text and text.isascii():
                    size_bytes += len(text)
                else:
                    size_bytes += text_bytes(text) if text else self.part_bytes(part)
        return _tokens(size_bytes)


def _payload_of(part: types.Part) -> dict[str, Any] | None:
    """The arguments of a call, or a result that comes without files."""
    if part.function_call is not None:
        return part.function_call.args
    result = part.function_response
    return result.response if result is not None and not result.parts else None
