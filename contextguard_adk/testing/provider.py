"""What `SimulatedLlm` counts, rejects and summarizes."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from google.adk.models.llm_request import LlmRequest
from google.genai import types
from pydantic_core import PydanticSerializationError, to_json

if TYPE_CHECKING:
    import tiktoken

ErrorStyle = Literal[
    "openai", "openai-responses", "anthropic", "gemini", "vertex", "bedrock",
    "mistral", "groq", "vllm", "llama.cpp", "ollama", "xai",
]  # fmt: skip

OVERFLOW_WORDS: dict[ErrorStyle, str] = {
    "openai": "This model's maximum context length is {limit} tokens. However, your"
    " messages resulted in {used} tokens. Please reduce the length of the messages.",
    "openai-responses": "Your input exceeds the context window of this model."
    " Please adjust your input and try again. (context_length_exceeded)",
    "anthropic": "prompt is too long: {used} tokens > {limit} maximum",
    "gemini": "The input token count ({used}) exceeds the maximum number of tokens"
    " allowed ({limit}).",
    "vertex": "The input token count is {used} but the model only supports up to"
    " {limit}.",
    "bedrock": "Input is too long for requested model.",
    "mistral": "Prompt contains {used} tokens and 0 draft tokens, too large for model"
    " with {limit} maximum context length",
    "groq": "Please reduce the length of the messages or completion.",
    "vllm": "You passed {used} input tokens. However, the model's context length is"
    " only {limit} tokens.",
    "llama.cpp": "request ({used} tokens) exceeds the available context size"
    " ({limit} tokens), try increasing it",
    "ollama": "prompt too long; exceeded max context length by {excess} tokens",
    "xai": "This model's maximum prompt length is {limit} but the request contains"
    " {used} tokens.",
}

_PAYLOAD_FIELDS = (
    "text", "inline_data", "file_data", "function_call", "function_response",
    "executable_code", "code_execution_result", "tool_call", "tool_response",
)  # fmt: skip

_TOKENS_PER_CONTENT = 3  # OpenAI's cookbook: every message costs three more.
_loading = threading.Lock()

_FENCE = re.compile(r"^<transcript-([^>\s]*)", re.MULTILINE)
_LISTED = re.compile(  # What the guard keeps by itself, and asks not to be copied.
    r"(?ms)^\[(?:The user's messages up|Values of what).*?(?=^$|^\[)"
    r'|,"not_shown":"(?:[^"\\]|\\.)*"'
)
_IN_PLACE = re.compile(r"\[System: Summari[sz]e the conversation above now")
_ADK_PROMPT = "The following is a conversation history between a user and an AI agent"


class SimulatedProviderError(Exception):
    """What a provider's SDK raises when it refuses a request."""

    status_code = 400


class ContextOverflowError(SimulatedProviderError):
    """The prompt has more tokens than the context window."""


class InvalidRequestError(SimulatedProviderError):
    """The contents break a structural rule of the provider."""


def find_violation(contents: list[types.Content]) -> str | None:
    """Returns what a strict provider objects to in the structure, None for nothing."""
    if not contents:
        return "contents is not specified"
    if contents[0].role == "model":
        return 'contents.0: first message must use the "user" role'
    calls: list[types.FunctionCall] = []
    end = types.Content(role="user", parts=[types.Part(text="end")])
    for index, content in enumerate([*contents, end]):
        parts = content.parts or []
        responses = [p.function_response for p in parts if p.function_response]
        problems = (*_list_flaws(content), *_list_broken_pairs(calls, responses))
        if problems:
            return f"contents.{index}: {problems[0]}"
        calls = [p.function_call for p in parts if p.function_call]
    return None


def _list_flaws(content: types.Content) -> Iterator[str]:
    if content.role not in ("user", "model"):
        yield "Please use a valid role: user, model."
    if not content.parts:
        yield "must include at least one parts field"
    for part in content.parts or []:
        payloads = [f for f in _PAYLOAD_FIELDS if getattr(part, f, None) is not None]
        # Gemini closes a turn with a signature on an empty part and wants it back.
        if not payloads and not part.thought_signature:
            yield "required oneof field 'data' must have one initialized field"
        if payloads == ["text"] and not part.text and not part.thought_signature:
            yield "text content blocks must be non-empty"
        if part.function_response and content.role != "user":
            yield "a function response turn must use the user role"
        if part.function_call and content.role != "model":
            yield "a function call turn must use the model role"


def _list_broken_pairs(
    calls: list[types.FunctionCall], responses: list[types.FunctionResponse]
) -> Iterator[str]:
    unanswered = list(calls)
    for response in sorted(responses, key=lambda response: not response.id):
        same_id = [c for c in unanswered if response.id and c.id == response.id]
        named = [c for c in unanswered if c.name == response.name]
        # An id on one side only is as good as none.
        if matches := same_id or [c for c in named if not (c.id and response.id)]:
            unanswered.remove(matches[0])
        else:
            name = f"{response.name!r} (id {response.id})"
            yield f"a function response must answer a function call; none for {name}"
    if unanswered:
        names = ", ".join(f"{call.name!r} (id {call.id})" for call in unanswered)
        yield f"function calls need responses; these were not answered: {names}"


def list_content_texts(contents: Iterable[types.Content]) -> Iterator[str]:
    """Yields what contents say in text: words, code, calls and results as JSON."""
    for part in (part for content in contents for part in content.parts or []):
        if part.text:
            yield part.text
        if call := part.function_call:
            yield call.name or ""
            yield _to_json_text(call.args or {})
        if response := part.function_response:
            yield response.name or ""
            yield _to_json_text(response.response or {})
        if code := part.executable_code:
            yield code.code or ""
        if result := part.code_execution_result:
            yield result.output or ""
        others = filter(None, (part.tool_call, part.tool_response))
        yield from map(_to_json_text, others)


def read_system(request: LlmRequest) -> types.Content:
    """Returns a request's system instruction, whichever form it has."""
    instruction: Any = request.config.system_instruction
    if isinstance(instruction, types.Content):
        return instruction
    return types.UserContent(instruction) if instruction else types.Content()


def list_prompt_texts(request: LlmRequest) -> list[tuple[str, str]]:
    """Lists a prompt's texts in order, each with the place that it belongs to."""
    tools = map(_to_json_text, request.config.tools or [])
    system = list_content_texts([read_system(request)])
    texts = [("head", text) for text in (*tools, *system)]
    for index, content in enumerate(request.contents):
        place = f"{index} {content.role}"
        texts += [(place, text) for text in list_content_texts([content])]
    return texts


def count_request_tokens(
    request: LlmRequest, token_ratio: float | None, media_tokens: int
) -> int:
    """Counts the prompt tokens of a request: system instruction, tools, contents."""
    contents = read_system(request), *request.contents
    media_count = 0
    for part in (part for content in contents for part in content.parts or []):
        media_count += bool(part.inline_data or part.file_data)
        if part.function_response:
            media_count += len(part.function_response.parts or [])
    overhead = 0 if token_ratio else _TOKENS_PER_CONTENT * len(request.contents)
    texts = [text for _, text in list_prompt_texts(request)]
    return count_tokens(texts, token_ratio) + media_count * media_tokens + overhead


def count_shared_tokens(
    before: list[tuple[str, str]], now: list[tuple[str, str]], token_ratio: float | None
) -> int:
    """Counts what two prompts begin with in common; nothing where the heads differ."""
    shared: list[str] = []
    places: set[str] = set()
    for (old_place, old), (place, new) in zip(before, now, strict=False):
        if "head" in (old_place, place) and (old_place, old) != (place, new):
            return 0
        if old_place != place:
            break
        places.add(place)
        if old != new:
            shared.append(os.path.commonprefix([old, new]))  # noqa: RUF071 - characters
            break
        shared.append(new)
    overhead = 0 if token_ratio else _TOKENS_PER_CONTENT * len(places - {"head"})
    return count_tokens(shared, token_ratio) + overhead


def count_tokens(texts: Iterable[str], token_ratio: float | None) -> int:
    """Counts the tokens of texts: by BPE without a ratio, else by UTF-8 bytes."""
    if token_ratio is None:
        # Slices: tiktoken's regex overflows its stack on a megabyte of blanks.
        return sum(
            _count_slice(text[start : start + 8_192])
            for text in texts
            for start in range(0, len(text), 8_192)
        )
    utf8_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    return math.ceil(utf8_bytes / 4 * token_ratio)


@functools.lru_cache(maxsize=16_384)  # Every request repeats the history before it.
def _count_slice(text: str) -> int:
    return len(load_encoding("o200k_base").encode_ordinary(text))


@functools.lru_cache(maxsize=4)
def load_encoding(name: str) -> tiktoken.Encoding:
    """Loads a vocabulary that litellm ships: tiktoken would download it."""
    import tiktoken

    spec = importlib.util.find_spec("litellm")
    roots = (spec and spec.submodule_search_locations) or []
    folder = Path(*roots[:1], "litellm_core_utils", "tokenizers")
    # The SHA-1 of the address that tiktoken downloads o200k_base from.
    is_there = (folder / "fb374d419588a4632f3f557e76b4b70aebbca790").is_file()
    with _loading:
        before = os.environ.get("TIKTOKEN_CACHE_DIR")
        if is_there:
            os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
        try:
            return tiktoken.get_encoding(name)
        finally:
            os.environ.pop("TIKTOKEN_CACHE_DIR", None)
            if before is not None:
                os.environ["TIKTOKEN_CACHE_DIR"] = before


def _to_json_text(value: Any) -> str:
    try:
        data = to_json(value, exclude_none=True, bytes_mode="base64", fallback=repr)
    except PydanticSerializationError:  # Of lone surrogates.
        return json.dumps(value, default=repr)
    return data.decode("utf-8", "replace")


def looks_like_summary_request(request: LlmRequest) -> bool:
    """Whether a request asks for a summary: by the guard's or ADK's own prompt."""
    text = "\n".join(list_content_texts(request.contents[-1:]))
    has_marker = _IN_PLACE.match(text) or _FENCE.search(text)
    return text.startswith(_ADK_PROMPT) or bool(has_marker)


def read_summary_material(request: LlmRequest) -> str:
    """Returns what a request wants summarized, without what asks for the summary."""
    text = "\n".join(list_content_texts(request.contents[-1:]))
    if _IN_PLACE.match(text):
        return _LISTED.sub("", "\n".join(list_content_texts(request.contents[:-1])))
    if text.startswith(_ADK_PROMPT):
        text = text.partition("capture the essence of the interaction.")[2]
        # ADK 2.0 escapes the line breaks of its prompt by mistake.
        return text.replace(r"\n", "\n") if text.startswith(r"\n\n") else text
    if fence := _FENCE.search(text):
        # Every block of data is fenced with one marker; what is between is the request.
        return "\n".join(_read_blocks(text, fence[1]))
    return text


def _read_blocks(text: str, marker: str) -> list[str]:
    """Reads what stands between an opening line with the marker and its closing one."""
    blocks: list[str] = []
    lines: list[str] = []
    end = ""
    for line in text.split("\n"):
        if end and line == end:
            blocks.append("\n".join(lines))
            end = ""
        elif end:
            lines.append(line)
        elif line.startswith("<") and line.endswith(f"-{marker}>"):
            lines = []
            end = f"</{line[1:]}"
    return blocks


def summarize(request: LlmRequest, token_ratio: float | None) -> str:
    """Keeps head and tail of each line, as much as the summary may take."""
    material = map(str.strip, read_summary_material(request).splitlines())
    line_chars = 240
    lines = list(dict.fromkeys(_shorten(line, line_chars) for line in material if line))
    max_tokens = request.config.max_output_tokens or 1_000
    while count_tokens(["\n".join(lines)], token_ratio) > max_tokens:
        if line_chars > 60:
            line_chars //= 2
            lines = [_shorten(line, line_chars) for line in lines]
        elif len(lines) > 1:
            middle = len(lines) // 3  # What is newer counts for more.
            del lines[middle : middle + 1 + len(lines) // 8]
        else:
            lines = [lines[0][: len(lines[0]) // 2]]
    return "\n".join(lines)


def _shorten(line: str, max_chars: int) -> str:
    if len(line) <= max_chars:
        return line
    return f"{line[: max_chars // 2]} … {line[-max_chars // 3 :]}"
