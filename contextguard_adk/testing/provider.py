"""What `SimulatedLlm` counts, rejects and remembers, as pure functions.

Nothing here reads another module of this package: the simulated provider judges
them, so it must not share their mistakes.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import math
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.adk.models.llm_request import LlmRequest
from google.genai import types
from pydantic_core import PydanticSerializationError, to_json

if TYPE_CHECKING:
    import tiktoken

_PAYLOAD_FIELDS = (
    "text",
    "inline_data",
    "file_data",
    "function_call",
    "function_response",
    "executable_code",
    "code_execution_result",
    "tool_call",
    "tool_response",
)

# tiktoken's regex overflows its stack on a megabyte of blanks; slices also make
# the counts of a growing text reusable.
_SLICE_CHARS = 8_192
_MAX_CACHED_COUNTS = 65_536
_TOKENS_PER_CONTENT = 3  # OpenAI's cookbook: every message costs three more.
# The SHA-1 of the address that tiktoken downloads o200k_base from.
_O200K_FILE = "fb374d419588a4632f3f557e76b4b70aebbca790"
_counts: dict[bytes, int] = {}
_loading = threading.Lock()


def find_violation(contents: list[types.Content]) -> str | None:
    """Returns what a strict provider objects to in the structure, None for nothing."""
    if not contents:
        return "contents is not specified"
    if contents[0].role == "model":
        return 'contents.0: first message must use the "user" role'
    calls: list[types.FunctionCall] = []
    for index, content in enumerate(contents):
        parts = content.parts or []
        responses = [p.function_response for p in parts if p.function_response]
        problem = _find_content_violation(content) or _find_broken_pair(
            calls, responses
        )
        if problem:
            return f"contents.{index}: {problem}"
        calls = [p.function_call for p in parts if p.function_call]
    problem = _find_broken_pair(calls, [])
    return f"contents.{len(contents)}: {problem}" if problem else None


def _find_content_violation(content: types.Content) -> str | None:
    if content.role not in ("user", "model"):
        return "Please use a valid role: user, model."
    if not content.parts:
        return "must include at least one parts field"
    for index, part in enumerate(content.parts):
        problem = _find_part_violation(part, content.role)
        if problem:
            return f"parts.{index}: {problem}"
    return None


def _find_part_violation(part: types.Part, role: str) -> str | None:
    payloads = [f for f in _PAYLOAD_FIELDS if getattr(part, f, None) is not None]
    # Gemini closes a turn with a signature on an empty part and wants it back.
    if not payloads and not part.thought_signature:
        return "required oneof field 'data' must have one initialized field"
    if payloads == ["text"] and not part.text and not part.thought_signature:
        return "text content blocks must be non-empty"
    if part.function_response and role != "user":
        return "a function response turn must use the user role"
    if part.function_call and role != "model":
        return "a function call turn must use the model role"
    return None


def _find_broken_pair(
    calls: list[types.FunctionCall], responses: list[types.FunctionResponse]
) -> str | None:
    unanswered = list(calls)
    for response in sorted(responses, key=lambda response: not response.id):
        index = _find_call(response, unanswered)
        if index is None:
            return (
                "a function response must answer a function call in the turn right"
                f" before it; there is none for {response.name!r} (id {response.id})"
            )
        del unanswered[index]
    if unanswered:
        names = ", ".join(f"{call.name!r} (id {call.id})" for call in unanswered)
        return (
            "a function call must be followed by its function response; the following"
            f" calls were not answered: {names}"
        )
    return None


def _find_call(
    response: types.FunctionResponse, calls: list[types.FunctionCall]
) -> int | None:
    loose = None
    for index, call in enumerate(calls):
        if response.id and call.id:
            if response.id == call.id:
                return index
        elif loose is None and response.name == call.name:
            loose = index
    return loose


def list_part_texts(part: types.Part) -> Iterator[str]:
    """Yields what a part says in text: words, code, calls and results as JSON."""
    if part.text:
        yield part.text
    if call := part.function_call:
        yield call.name or ""
        yield _to_json_text(call.args or {})
    if response := part.function_response:
        yield response.name or ""
        yield _to_json_text(response.response or {})
    if part.executable_code:
        yield part.executable_code.code or ""
    if part.code_execution_result:
        yield part.code_execution_result.output or ""
    for server_side in (part.tool_call, part.tool_response):
        if server_side:
            yield _to_json_text(server_side)


def list_content_texts(contents: Iterable[types.Content]) -> Iterator[str]:
    """Yields the texts of all parts of some contents, in order."""
    for content in contents:
        for part in content.parts or []:
            yield from list_part_texts(part)


def list_system_parts(instruction: Any) -> list[types.Part]:
    """Returns the parts of a system instruction, whichever form it has."""
    if not instruction:
        return []
    if isinstance(instruction, types.Content):
        return instruction.parts or []
    if isinstance(instruction, types.Part):
        return [instruction]
    if isinstance(instruction, list):
        return [part for item in instruction for part in list_system_parts(item)]
    return [types.Part(text=str(instruction))]


def count_request_tokens(
    request: LlmRequest, token_ratio: float | None, media_tokens: int
) -> int:
    """Counts the prompt tokens of a request: system instruction, tools, contents."""
    system = types.Content(parts=list_system_parts(request.config.system_instruction))
    texts = list(list_content_texts([system, *request.contents]))
    texts += [_to_json_text(tool) for tool in request.config.tools or []]
    media = sum(map(_count_media, [system, *request.contents]))
    overhead = 0 if token_ratio else _TOKENS_PER_CONTENT * len(request.contents)
    return count_tokens(texts, token_ratio) + media * media_tokens + overhead


def count_shared_tokens(
    before: LlmRequest, now: LlmRequest, token_ratio: float | None
) -> int:
    """Counts how many tokens two requests begin with in common, media left out.

    The order is that of providers' prompt caches: tools, system instruction, contents.
    """
    tools = [
        [_to_json_text(tool) for tool in one.config.tools or []]
        for one in (before, now)
    ]
    systems = [_list_system_texts(one) for one in (before, now)]
    if tools[0] != tools[1] or systems[0] != systems[1]:
        return 0
    shared, overhead = [*tools[0], *systems[0]], 0
    for old, new in zip(before.contents, now.contents, strict=False):
        if old.role != new.role:
            break
        overhead += 0 if token_ratio else _TOKENS_PER_CONTENT
        texts = [list(list_content_texts([content])) for content in (old, new)]
        for one, other in zip(*texts, strict=False):
            if one != other:
                shared.append(_common_beginning(one, other))
                return count_tokens(shared, token_ratio) + overhead
            shared.append(one)
        if len(texts[0]) != len(texts[1]):
            break
    return count_tokens(shared, token_ratio) + overhead


def _common_beginning(one: str, other: str) -> str:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return one[:low]


def _list_system_texts(request: LlmRequest) -> list[str]:
    parts = list_system_parts(request.config.system_instruction)
    return list(list_content_texts([types.Content(parts=parts)]))


def count_tokens(texts: Iterable[str], token_ratio: float | None) -> int:
    """Counts the tokens of texts: by BPE without a ratio, else by UTF-8 bytes."""
    if token_ratio is None:
        return sum(map(_count_bpe_tokens, texts))
    return math.ceil(sum(map(_count_utf8_bytes, texts)) / 4 * token_ratio)


def _count_media(content: types.Content) -> int:
    count = 0
    for part in content.parts or []:
        count += bool(part.inline_data or part.file_data)
        if part.function_response and part.function_response.parts:
            count += len(part.function_response.parts)
    return count


def _count_utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _count_bpe_tokens(text: str) -> int:
    starts = range(0, len(text), _SLICE_CHARS)
    return sum(_count_slice(text[start : start + _SLICE_CHARS]) for start in starts)


def _count_slice(text: str) -> int:
    data = text.encode("utf-8", "surrogatepass")
    key = hashlib.blake2b(data, digest_size=16).digest()
    count = _counts.get(key)
    if count is None:
        count = len(_load_encoding().encode_ordinary(text))
        if len(_counts) >= _MAX_CACHED_COUNTS:
            _counts.clear()
        _counts[key] = count
    return count


@functools.lru_cache(maxsize=1)
def _load_encoding() -> tiktoken.Encoding:
    import tiktoken

    with _loading, _shipped_vocabulary():
        return tiktoken.get_encoding("o200k_base")


@contextmanager
def _shipped_vocabulary() -> Iterator[None]:
    """Lets tiktoken read the vocabulary that litellm ships, without the network."""
    spec = importlib.util.find_spec("litellm")
    roots = spec.submodule_search_locations if spec else None
    folder = Path(*(roots or [])[:1], "litellm_core_utils", "tokenizers")
    if not (folder / _O200K_FILE).is_file():
        yield
        return
    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TIKTOKEN_CACHE_DIR"]
        else:
            os.environ["TIKTOKEN_CACHE_DIR"] = before


def _to_json_text(value: Any) -> str:
    try:
        data = to_json(value, exclude_none=True, bytes_mode="base64", fallback=repr)
    except PydanticSerializationError:  # Of lone surrogates.
        return json.dumps(value, default=repr)
    return data.decode("utf-8", "replace")
