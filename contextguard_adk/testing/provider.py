"""The rules of `SimulatedLlm`: it counts, rejects and summarizes requests by them."""

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

_SLICE_CHARS = 8_192
_TOKENS_PER_CONTENT = 3  # OpenAI's cookbook: every message costs three more.
_loading = threading.Lock()

# The tokens of a summary if a request sets no maximum.
_SUMMARY_TOKENS = 1_000
# The characters of a line in a summary: at first, and when no line is shortened more.
_LINE_CHARS = 240
_LEAST_LINE_CHARS = 60

_FENCE = re.compile(r"^<transcript-([^>\s]*)", re.MULTILINE)
_LISTED = re.compile(  # Lists that the guard keeps itself, and wants nobody to copy.
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
    """Returns a strict provider's objection to the structure, None if it has none."""
    if not contents:
        return "contents is not specified"
    if contents[0].role == "model":
        return 'contents.0: first message must use the "user" role'

    open_calls: list[types.FunctionCall] = []  # The next content must answer them.
    # A content after the last one shows whether the last one leaves a call open.
    end = types.Content(role="user", parts=[types.Part(text="end")])
    for index, content in enumerate([*contents, end]):
        parts = content.parts or []
        responses = [p.function_response for p in parts if p.function_response]
        flaws = [*_list_flaws(content), *_list_broken_pairs(open_calls, responses)]
        if flaws:
            return f"contents.{index}: {flaws[0]}"
        open_calls = [p.function_call for p in parts if p.function_call]
    return None


def _list_flaws(content: types.Content) -> Iterator[str]:
    """Yields the flaws of a content, whatever stands before and after it."""
    if content.role not in ("user", "model"):
        yield "Please use a valid role: user, model."
    if not content.parts:
        yield "must include at least one parts field"
    for part in content.parts or []:
        yield from _list_part_flaws(part, content.role)


def _list_part_flaws(part: types.Part, role: str | None) -> Iterator[str]:
    """Yields the flaws of a part in a content of this role."""
    fields = [f for f in _PAYLOAD_FIELDS if getattr(part, f, None) is not None]
    # Gemini closes a turn with a signature on an empty part and wants it back.
    may_be_empty = bool(part.thought_signature)
    if not fields and not may_be_empty:
        yield "required oneof field 'data' must have one initialized field"
    if fields == ["text"] and not part.text and not may_be_empty:
        yield "text content blocks must be non-empty"

    if part.function_response and role != "user":
        yield "a function response turn must use the user role"
    if part.function_call and role != "model":
        yield "a function call turn must use the model role"


def _list_broken_pairs(
    calls: list[types.FunctionCall], responses: list[types.FunctionResponse]
) -> Iterator[str]:
    """Yields a flaw for each response without a call, and one for all open calls."""
    unanswered = list(calls)
    # Responses with an id find their calls first. The others take the remaining calls.
    with_id = [response for response in responses if response.id]
    without_id = [response for response in responses if not response.id]
    for response in [*with_id, *without_id]:
        answered_call = _find_answered(unanswered, response)
        if answered_call:
            unanswered.remove(answered_call)
        else:
            name = f"{response.name!r} (id {response.id})"
            yield f"a function response must answer a function call; none for {name}"

    if unanswered:
        names = ", ".join(f"{call.name!r} (id {call.id})" for call in unanswered)
        yield f"function calls need responses; these were not answered: {names}"


def _find_answered(
    calls: list[types.FunctionCall], response: types.FunctionResponse
) -> types.FunctionCall | None:
    """Finds the call that a response answers: by its id, else by its name."""
    if response.id:
        for call in calls:
            if call.id == response.id:
                return call

    for call in calls:
        has_other_id = bool(call.id and response.id)
        if call.name == response.name and not has_other_id:
            return call
    return None


def list_content_texts(contents: Iterable[types.Content]) -> Iterator[str]:
    """Yields the text of contents: words, code, calls and results as JSON."""
    for content in contents:
        for part in content.parts or ():
            yield from _list_part_texts(part)


def _list_part_texts(part: types.Part) -> Iterator[str]:
    """Yields the text of each field of a part that a model reads."""
    if part.text:
        yield part.text

    call = part.function_call
    if call:
        yield call.name or ""
        yield _to_json_text(call.args or {})
    response = part.function_response
    if response:
        yield response.name or ""
        yield _to_json_text(response.response or {})

    if part.executable_code:
        yield part.executable_code.code or ""
    if part.code_execution_result:
        yield part.code_execution_result.output or ""
    if part.tool_call:
        yield _to_json_text(part.tool_call)
    if part.tool_response:
        yield _to_json_text(part.tool_response)


def read_system(request: LlmRequest) -> types.Content:
    """Returns a request's system instruction, whichever form it has."""
    instruction: Any = request.config.system_instruction
    if isinstance(instruction, types.Content):
        return instruction
    return types.UserContent(instruction) if instruction else types.Content()


def list_prompt_texts(request: LlmRequest) -> list[tuple[str, str]]:
    """Lists a prompt's texts in order, each after the place that it belongs to.

    The place of tools and system instruction is "head"; that of a content is its index
    and its role, such as "3 user".
    """
    tool_texts = [_to_json_text(tool) for tool in request.config.tools or []]
    system_texts = list_content_texts([read_system(request)])
    prompt = [("head", text) for text in (*tool_texts, *system_texts)]
    for index, content in enumerate(request.contents):
        place = f"{index} {content.role}"
        prompt += [(place, text) for text in list_content_texts([content])]
    return prompt


def count_request_tokens(
    request: LlmRequest, token_ratio: float | None, media_tokens: int
) -> int:
    """Counts the prompt tokens of a request: system instruction, tools, contents."""
    media_count = 0
    for content in (read_system(request), *request.contents):
        for part in content.parts or ():
            if part.inline_data or part.file_data:
                media_count += 1
            if part.function_response:
                media_count += len(part.function_response.parts or [])

    overhead = 0 if token_ratio else _TOKENS_PER_CONTENT * len(request.contents)
    texts = [text for _, text in list_prompt_texts(request)]
    return count_tokens(texts, token_ratio) + media_count * media_tokens + overhead


def count_shared_tokens(
    old_prompt: list[tuple[str, str]],
    new_prompt: list[tuple[str, str]],
    token_ratio: float | None,
) -> int:
    """Counts the tokens with which two prompts begin in common; 0 if the heads differ.

    The head of a prompt is its tools and its system instruction. The prompts are those
    of `list_prompt_texts`: the items are a place and a text.
    """
    shared_texts: list[str] = []
    shared_places: set[str] = set()
    for old_item, new_item in zip(old_prompt, new_prompt, strict=False):
        old_place, old_text = old_item
        new_place, new_text = new_item
        if "head" in (old_place, new_place) and old_item != new_item:
            return 0
        if old_place != new_place:
            break

        # A cache can end within a text, so the last one may be shared in part.
        shared_places.add(new_place)
        if old_text != new_text:
            start = os.path.commonprefix([old_text, new_text])  # noqa: RUF071 - chars
            shared_texts.append(start)
            break
        shared_texts.append(new_text)

    overhead = 0
    if not token_ratio:
        overhead = _TOKENS_PER_CONTENT * len(shared_places - {"head"})
    return count_tokens(shared_texts, token_ratio) + overhead


def count_tokens(texts: Iterable[str], token_ratio: float | None) -> int:
    """Counts the tokens of texts.

    `token_ratio` are the tokens per four UTF-8 bytes; None counts by BPE.
    """
    if token_ratio is None:
        # Slices: tiktoken's regex overflows its stack on a megabyte of blanks.
        return sum(
            _count_slice(text[start : start + _SLICE_CHARS])
            for text in texts
            for start in range(0, len(text), _SLICE_CHARS)
        )
    utf8_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    return math.ceil(utf8_bytes / 4 * token_ratio)


@functools.lru_cache(maxsize=16_384)  # Every request repeats the history before it.
def _count_slice(text: str) -> int:
    return len(load_encoding("o200k_base").encode_ordinary(text))


@functools.lru_cache(maxsize=4)
def load_encoding(name: str) -> tiktoken.Encoding:
    """Loads a vocabulary, if possible the copy that litellm ships.

    Without it, tiktoken takes its own cache, or downloads the vocabulary.
    """
    import tiktoken

    spec = importlib.util.find_spec("litellm")
    roots = (spec and spec.submodule_search_locations) or []
    folder = Path(*roots[:1], "litellm_core_utils", "tokenizers")
    # The file is named by the SHA-1 of the address that tiktoken downloads it from.
    is_shipped = (folder / "fb374d419588a4632f3f557e76b4b70aebbca790").is_file()

    # tiktoken takes the folder of its files from the environment alone.
    with _loading:
        old_folder = os.environ.get("TIKTOKEN_CACHE_DIR")
        if is_shipped:
            os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
        try:
            return tiktoken.get_encoding(name)
        finally:
            os.environ.pop("TIKTOKEN_CACHE_DIR", None)
            if old_folder is not None:
                os.environ["TIKTOKEN_CACHE_DIR"] = old_folder


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
    """Returns the material that a request wants summarized, without the request.

    The last content tells how the request has it:
    - It asks for a summary of the contents before it: they are the material.
    - It is the prompt of ADK's `LlmEventSummarizer`: the material ends it.
    - It is the guard's prompt: the material stands in fenced blocks.
    - It is any other text: all of it is the material.
    """
    text = "\n".join(list_content_texts(request.contents[-1:]))
    if _IN_PLACE.match(text):
        return _LISTED.sub("", "\n".join(list_content_texts(request.contents[:-1])))

    if text.startswith(_ADK_PROMPT):
        material = text.partition("capture the essence of the interaction.")[2]
        # ADK 2.0 escapes the line breaks of its prompt by mistake.
        is_escaped = material.startswith(r"\n\n")
        return material.replace(r"\n", "\n") if is_escaped else material

    fence = _FENCE.search(text)
    if fence:
        # One marker fences every block of material; the request stands between them.
        return "\n".join(_read_blocks(text, fence[1]))
    return text


def _read_blocks(text: str, marker: str) -> list[str]:
    """Reads the blocks between an opening line with the marker and its closing line.

    With the marker "7f3a", a block stands between the lines "<transcript-7f3a>" and
    "</transcript-7f3a>".
    """
    blocks: list[str] = []
    block_lines: list[str] = []
    closing_line = ""  # Of the open block, if there is one.
    for line in text.split("\n"):
        if closing_line:
            if line == closing_line:
                blocks.append("\n".join(block_lines))
                closing_line = ""
            else:
                block_lines.append(line)
        elif line.startswith("<") and line.endswith(f"-{marker}>"):
            block_lines = []
            closing_line = f"</{line[1:]}"
    return blocks


def summarize(request: LlmRequest, token_ratio: float | None) -> str:
    """Summarizes by excerpts: keeps the head and the tail of each line.

    While the excerpts are too long for the summary, this is done again and again:
    - The lines are shortened to half of their length, down to 60 characters.
    - Then lines are left out, until one is left.
    - Then this line is cut in half.
    """
    max_tokens = request.config.max_output_tokens or _SUMMARY_TOKENS
    line_chars = _LINE_CHARS
    stripped = [line.strip() for line in read_summary_material(request).splitlines()]
    shortened = [_shorten(line, line_chars) for line in stripped if line]

    lines = list(dict.fromkeys(shortened))
    while count_tokens(["\n".join(lines)], token_ratio) > max_tokens:
        if line_chars > _LEAST_LINE_CHARS:
            line_chars //= 2
            lines = [_shorten(line, line_chars) for line in lines]
        elif len(lines) > 1:
            # An eighth of the lines is left out, from the end of the first third on:
            # the newer lines count for more.
            first = len(lines) // 3
            removed_count = 1 + len(lines) // 8
            del lines[first : first + removed_count]
        else:
            half_chars = len(lines[0]) // 2
            lines[0] = lines[0][:half_chars]
    return "\n".join(lines)


def _shorten(line: str, max_chars: int) -> str:
    """Returns a line, or its head and its tail if it is longer than `max_chars`."""
    if len(line) <= max_chars:
        return line
    return f"{line[: max_chars // 2]} … {line[-max_chars // 3 :]}"
