"""The rules by which `SimulatedLlm` counts, rejects and summarizes requests.

A flaw is a rule of the provider that contents break.
"""

from __future__ import annotations

import base64
import functools
import gzip
import json
import math
import os
import re
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
"""Texts are counted in slices of this length.

The regular expression of tiktoken overflows its stack on a megabyte of blanks.
"""

_TOKENS_PER_CONTENT = 3
"""OpenAI's cookbook: every message costs three tokens more than its text."""

_SUMMARY_TOKENS = 1_000
"""The tokens of a summary if a request sets no maximum."""

_LINE_CHARS = 240
_LEAST_LINE_CHARS = 60
"""The characters of a line in a summary: at first, and after the last shortening."""

_IN_PLACE = re.compile(r"\[System: Summari[sz]e the conversation above now")
"""Begins the guard's prompt for a summary of the contents before the prompt."""

_FENCE = re.compile(r"^<transcript-([^>\s]*)", re.MULTILINE)
"""Finds the first block of material in the guard's other prompt, and the marker that
all blocks have: "<transcript-7f3a>" -> "7f3a"."""

_LISTED = re.compile(
    r"(?ms)^\[(?:The user's messages up|Values of what).*?(?=^$|^\[)"
    r'|,"not_shown":"(?:[^"\\]|\\.)*"'
    r'|\[not_shown: [^\n\[\]]*\](?=$|\\n|")'
)
"""Finds lists beside an earlier summary. The guard keeps these lists itself, so that no
summarizer has to copy them."""

_ADK_PROMPT = "The following is a conversation history between a user and an AI agent"
_ADK_PROMPT_END = "capture the essence of the interaction."
"""The beginning and the end of the prompt of ADK's `LlmEventSummarizer`, which the
material follows."""

_VOCABULARY = Path(__file__).with_name("o200k_base.tiktoken.gz")
"""The vocabulary o200k_base: in each line a token in base64, and its number.

It is here because tiktoken would download it.
"""

_WORD_PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""Splits a text into words, whose tokens are counted; from tiktoken's o200k_base."""


class SimulatedProviderError(Exception):
    """What a provider's SDK raises when it refuses a request."""

    status_code = 400


class ContextOverflowError(SimulatedProviderError):
    """The prompt has more tokens than the context window."""


class InvalidRequestError(SimulatedProviderError):
    """The contents break a structural rule of the provider."""


def find_violation(contents: list[types.Content]) -> str | None:
    """Returns a strict provider's first objection to the structure of contents.

    For example: "contents.2: text content blocks must be non-empty". Returns None if
    the contents have no flaw.
    """
    if not contents:
        return "contents is not specified"
    if contents[0].role == "model":
        return 'contents.0: first message must use the "user" role'

    # Each content must answer all calls of the content before it.
    open_calls: list[types.FunctionCall] = []
    for index, content in enumerate(contents):
        parts = content.parts or []
        responses = [p.function_response for p in parts if p.function_response]
        flaws = [*_list_flaws(content), *_list_broken_pairs(open_calls, responses)]
        if flaws:
            return f"contents.{index}: {flaws[0]}"
        open_calls = [p.function_call for p in parts if p.function_call]

    # After the last content, nothing answers its calls.
    flaws_at_end = list(_list_broken_pairs(open_calls, []))
    if flaws_at_end:
        return f"contents.{len(contents)}: {flaws_at_end[0]}"
    return None


def _list_flaws(content: types.Content) -> Iterator[str]:
    """Yields the flaws of a content that do not depend on other contents."""
    if content.role not in ("user", "model"):
        yield "Please use a valid role: user, model."
    if not content.parts:
        yield "must include at least one parts field"
    for part in content.parts or []:
        yield from _list_part_flaws(part, content.role)


def _list_part_flaws(part: types.Part, role: str | None) -> Iterator[str]:
    """Yields the flaws of a part; `role` is the role of the content with the part."""
    fields = [f for f in _PAYLOAD_FIELDS if getattr(part, f, None) is not None]
    has_empty_text = fields == ["text"] and not part.text
    # Gemini ends a turn with an empty part that has a signature, and wants it back.
    may_be_empty = bool(part.thought_signature)
    if not fields and not may_be_empty:
        yield "required oneof field 'data' must have one initialized field"
    if has_empty_text and not may_be_empty:
        yield "text content blocks must be non-empty"

    if part.function_response and role != "user":
        yield "a function response turn must use the user role"
    if part.function_call and role != "model":
        yield "a function call turn must use the model role"


def _list_broken_pairs(
    calls: list[types.FunctionCall], responses: list[types.FunctionResponse]
) -> Iterator[str]:
    """Yields the flaws in the pairs of calls and responses.

    Each response without a call is a flaw. All calls without a response together are
    one flaw.

    Args:
        calls: The calls of a content.
        responses: The responses of the next content.
    """
    unanswered = list(calls)
    # A response without an id could take the call that has the id of another response.
    # So the responses with an id choose first.
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
    """Finds the call that a response answers; None if there is no such call.

    If call and response have an id, the ids must be equal. Otherwise the names must be
    equal.
    """
    if response.id:
        for call in calls:
            if call.id == response.id:
                return call

    for call in calls:
        # After the loop above, two ids can only be different ones.
        have_different_ids = bool(call.id and response.id)
        if call.name == response.name and not have_different_ids:
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
    """Returns a request's system instruction as a content.

    The instruction may be a content, a text, a part, or a list of texts and parts. For
    a request without an instruction, the content has no parts.
    """
    instruction: Any = request.config.system_instruction
    if isinstance(instruction, types.Content):
        return instruction
    return types.UserContent(instruction) if instruction else types.Content()


def list_prompt_texts(request: LlmRequest) -> list[tuple[str, str]]:
    """Lists the texts of a prompt in order, as pairs of a place and a text.

    Tools and system instruction have the place "head". The place of a content's texts
    is the index and the role of the content, such as "3 user".
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
    """Counts the prompt tokens of a request: system instruction, tools, contents.

    Args:
        request: The request.
        token_ratio: Tokens per four UTF-8 bytes. None counts by BPE, and adds three
            tokens per content.
        media_tokens: The tokens of each image, sound, document or file reference.
    """
    media_count = 0
    for content in (read_system(request), *request.contents):
        for part in content.parts or ():
            if part.inline_data or part.file_data:
                media_count += 1
            if part.function_response:
                media_count += len(part.function_response.parts or [])

    texts = [text for _, text in list_prompt_texts(request)]
    tokens = count_tokens(texts, token_ratio) + media_count * media_tokens
    if token_ratio is None:
        tokens += _TOKENS_PER_CONTENT * len(request.contents)
    return tokens


def count_shared_tokens(
    old_prompt: list[tuple[str, str]],
    new_prompt: list[tuple[str, str]],
    token_ratio: float | None,
) -> int:
    """Counts the tokens of the beginning that two prompts have in common.

    The head of a prompt is its tools and its system instruction. If the heads differ,
    the result is 0.

    Args:
        old_prompt: The items of a prompt, a place and a text each, as
            `list_prompt_texts` returns them.
        new_prompt: The items of another prompt.
        token_ratio: Tokens per four UTF-8 bytes; None counts by BPE.
    """
    shared_texts: list[str] = []
    shared_places: set[str] = set()
    for old_item, new_item in zip(old_prompt, new_prompt, strict=False):
        old_place, old_text = old_item
        new_place, new_text = new_item
        is_in_head = "head" in (old_place, new_place)
        if is_in_head and old_item != new_item:
            return 0
        if old_place != new_place:
            break

        shared_places.add(new_place)
        if old_text != new_text:
            # A cache may end within a text, so a part of the text is shared.
            start = os.path.commonprefix([old_text, new_text])  # noqa: RUF071 - chars
            shared_texts.append(start)
            break
        shared_texts.append(new_text)

    tokens = count_tokens(shared_texts, token_ratio)
    if token_ratio is None:
        tokens += _TOKENS_PER_CONTENT * len(shared_places - {"head"})
    return tokens


def count_tokens(texts: Iterable[str], token_ratio: float | None) -> int:
    """Counts the tokens of texts.

    `token_ratio` is the number of tokens per four UTF-8 bytes; None counts by BPE.
    """
    if token_ratio is not None:
        utf8_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        return math.ceil(utf8_bytes / 4 * token_ratio)

    tokens = 0
    for text in texts:
        for start in range(0, len(text), _SLICE_CHARS):
            tokens += _count_slice(text[start : start + _SLICE_CHARS])
    return tokens


@functools.lru_cache(maxsize=16_384)  # Every request repeats the history before it.
def _count_slice(text: str) -> int:
    return len(_load_encoding().encode_ordinary(text))


@functools.cache
def _load_encoding() -> tiktoken.Encoding:
    """Loads o200k_base from the file of this package."""
    import tiktoken

    ranks = dict[bytes, int]()
    with gzip.open(_VOCABULARY) as lines:
        for line in lines:
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)

    return tiktoken.Encoding(
        "o200k_base", pat_str=_WORD_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )


def _to_json_text(value: Any) -> str:
    try:
        data = to_json(value, exclude_none=True, bytes_mode="base64", fallback=repr)
    except PydanticSerializationError:  # UTF-8 has no lone surrogates.
        return json.dumps(value, default=repr)
    return data.decode("utf-8", "replace")


def looks_like_summary_request(request: LlmRequest) -> bool:
    """Whether a request asks for a summary, by a prompt of the guard or of ADK."""
    prompt = "\n".join(list_content_texts(request.contents[-1:]))
    is_of_guard = bool(_IN_PLACE.match(prompt) or _FENCE.search(prompt))
    is_of_adk = prompt.startswith(_ADK_PROMPT)
    return is_of_guard or is_of_adk


def read_summary_material(request: LlmRequest) -> str:
    """Returns the material that a request wants summarized, without the prompt.

    The last content of the request is one of these:

    - The guard's prompt for a summary in place: the material is in the contents before
      the prompt.
    - The prompt of ADK's `LlmEventSummarizer`: the material stands after the prompt, in
      the same content.
    - The guard's other prompt: the material stands in fenced blocks of the prompt.
    - Any other text: the whole text is the material.
    """
    prompt = "\n".join(list_content_texts(request.contents[-1:]))
    if _IN_PLACE.match(prompt):
        conversation = "\n".join(list_content_texts(request.contents[:-1]))
        return _LISTED.sub("", conversation)

    if prompt.startswith(_ADK_PROMPT):
        _, _, material = prompt.partition(_ADK_PROMPT_END)
        # ADK 2.0 escapes the line breaks of its prompt by mistake.
        is_escaped = material.startswith(r"\n\n")
        return material.replace(r"\n", "\n") if is_escaped else material

    fence = _FENCE.search(prompt)
    if fence:
        return "\n".join(_read_blocks(prompt, marker=fence[1]))
    return prompt


def _read_blocks(text: str, marker: str) -> list[str]:
    """Returns the texts of all blocks that a prompt fences with a marker.

    With the marker "7f3a", a block stands between the lines "<transcript-7f3a>" and
    "</transcript-7f3a>". In both lines, another word may stand for "transcript".
    """
    blocks: list[str] = []
    block_lines: list[str] = []
    closing_line = ""  # The line that ends the open block; "" between blocks.
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

    At first, only lines of more than 240 characters are shortened. While the excerpts
    take more tokens than the request allows, the first of these steps that is possible
    makes the excerpts shorter:

    1. The length of lines is halved. The shortest length is 60 characters.
    2. About an eighth of the lines is left out. At least one line stays.
    3. The only line is cut in half.
    """
    max_tokens = request.config.max_output_tokens or _SUMMARY_TOKENS
    line_chars = _LINE_CHARS
    stripped = [line.strip() for line in read_summary_material(request).splitlines()]
    shortened = [_shorten(line, line_chars) for line in stripped if line]

    lines = list(dict.fromkeys(shortened))  # A repeated line is kept once.
    while count_tokens(["\n".join(lines)], token_ratio) > max_tokens:
        if line_chars > _LEAST_LINE_CHARS:
            line_chars //= 2
            lines = [_shorten(line, line_chars) for line in lines]
        elif len(lines) > 1:
            # The oldest lines have the task, the newest lines have the last steps. So
            # lines after the first third are removed: of the lines 1 to 9, these are
            # [1 2 3 | 4 5 | 6 7 8 9] -> [1 2 3 6 7 8 9].
            first_removed = len(lines) // 3
            removed_count = 1 + len(lines) // 8
            del lines[first_removed : first_removed + removed_count]
        else:
            half_chars = len(lines[0]) // 2
            lines[0] = lines[0][:half_chars]
    return "\n".join(lines)


def _shorten(line: str, max_chars: int) -> str:
    """Returns a line, shortened to head and tail if it is longer than `max_chars`."""
    if len(line) <= max_chars:
        return line
    head_chars = max_chars // 2
    tail_chars = max_chars // 3
    return f"{line[:head_chars]} … {line[-tail_chars:]}"
