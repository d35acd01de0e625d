"""What providers refuse of a history, apart from its length, and what then helps.

Each kind of refusal is answered once for a request; what has helped is kept in session
state, so that later requests begin with the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from google.genai import types

from contextguard_adk._history.coverage import fingerprint
from contextguard_adk._history.pairs import (
    find_running_turn,
    has_function_response,
    is_message,
    media_parts,
    parts_of,
)
from contextguard_adk._history.rendering import join_messages, mend_contents
from contextguard_adk._history.thoughts import newest_thoughts
from contextguard_adk._providers.retry import read_status
from contextguard_adk._summarizing.transcript import render_entries

_KINDS = {
    "thoughts": r"bound to a different conversation|Invalid `?(signature|data)`? in "
    r"`?(redacted_)?thinking`?|cannot be thinking|cannot contain thinking|must contain "
    r"thinking",
    "turn": r"in the latest assistant message cannot be modified|Expected `?thinking`?"
    r"|must start with a thinking block",
    "signatures": r"missing a `?thought_signature|Corrupted thought signature|"
    r"Thought signature is not valid",
    "reasoning": r"`?reasoning_content`? (in the thinking mode must be passed back|is "
    r"missing)|Missing `?reasoning_content",
    "shape": r"first message must use the|must start with a user message|roles must "
    r"alternate|unexpected `?tool_use_id`? found|ids were found without|function call "
    r"turn comes immediately after|function response parts is equal|must include at "
    r"least one parts field|contents is not specified|must be a response to a prec|"
    r"must be followed by tool messages|Expected last role|Unexpected role|same number "
    r"of function calls|toolConfig field must be|must define tools|text content blocks "
    r"must be non-empty|assistant message prefill",
}
_PATTERNS = {kind: re.compile(words) for kind, words in _KINDS.items()}

_DUMMY_SIGNATURE = b"skip_thought_signature_validator"
"""Gemini's documented signature for calls that another model has made."""

_FLAT_HEAD = "[System: The conversation so far, as text.]"
_FLAT_END = "[System: Continue with the newest request of the user above.]"


def parse_refusal(error: BaseException) -> str:
    """The kind of a provider's refusal of a history; "" where it is none."""
    if isinstance(error, UnicodeDecodeError):
        return "thoughts"  # ADK's Claude class reads a signature of another client.
    if read_status(error) not in (None, 400, 422):
        return ""
    text = str(error)
    kinds = (kind for kind, words in _PATTERNS.items() if words.search(text))
    return next(kinds, "")


def answer_refusal(
    kind: str,
    known: Mapping[str, str],
    contents: Sequence[types.Content],
    model: str,
    has_lost_thoughts: bool,
) -> dict[str, str]:
    """What to keep in session state so that requests like this one are accepted.

    Args:
        known: What is kept so far.
        contents: What was refused.
        has_lost_thoughts: Whether the guard has left out thoughts of the running turn.
    """
    if kind == "thoughts":
        gone = newest_thoughts(contents) or known.get("gone", "")
        return {**known, "gone": gone, "binds": model, "free": ""}
    if kind == "turn" and has_lost_thoughts:
        return {**known, "free": model, "binds": ""}
    if kind == "signatures":
        return {**known, "signed": _name_end(contents)}
    if kind == "shape" and not known.get("shape"):
        return {**known, "shape": "strict"}
    return {**known, "flat": _name_end(contents)}


def apply_answers(
    contents: list[types.Content], known: Mapping[str, str], is_strict: bool
) -> list[types.Content]:
    """Gives contents the form that the provider has not refused so far.

    `is_strict` says that it wants a signature on each step of the running turn.
    """
    if end := _find_end(contents, known.get("flat", "")):
        contents = _flatten(contents, end)
    if known.get("shape"):
        contents = _take_turns(contents)
    end = _find_end(contents, known.get("signed", ""))
    return _sign_calls(contents, end) if end or is_strict else contents


def _name_end(contents: Sequence[types.Content]) -> str:
    """Names the newest result, or message, by fingerprint and number among equals."""
    results = (i for i, each in enumerate(contents) if has_function_response(each))
    end = max(results, default=len(contents) - 1) + 1
    prints = [fingerprint(content) for content in contents[:end]]
    return f"{prints[-1].hex()}.{prints.count(prints[-1])}" if prints else ""


def _find_end(contents: Sequence[types.Content], name: str) -> int:
    """How many contents end with what `_name_end` has named; 0 if it is not there."""
    digest, _, number = name.partition(".")
    prints = [fingerprint(each).hex() for each in contents] if digest else []
    same = [i + 1 for i, each in enumerate(prints) if each == digest]
    wanted = int(number) if number.isdecimal() and len(number) < 10 else 0
    return same[wanted - 1] if 0 < wanted <= len(same) else 0


def _flatten(contents: Sequence[types.Content], end: int) -> list[types.Content]:
    """Tells the first contents in one message, with their images and files."""
    told = [entry.text for entry in render_entries(contents, range(end))]
    parts = [types.Part(text="\n\n".join([_FLAT_HEAD, *told, _FLAT_END]))]
    for content in contents[:end]:
        parts += media_parts(content)
    message = types.Content(role="user", parts=parts)
    return join_messages((), [message], contents[end:])


def _take_turns(contents: list[types.Content]) -> list[types.Content]:
    """Makes neighbors one: messages of the user, and results of parallel calls."""
    turns: list[types.Content] = []
    for content in mend_contents(contents):
        parts = [p for p in parts_of(content) if p.text != "" or p.thought_signature]
        before = turns[-1] if turns and parts else content
        are_users = before.role == content.role == "user"
        is_alike = is_message(before) == is_message(content)
        if before is not content and are_users and is_alike:
            parts = [*(before.parts or ()), *parts]
            turns.pop()
        if parts:
            turns.append(content.model_copy(update={"parts": parts}))
    return turns


def _sign_calls(contents: list[types.Content], end: int) -> list[types.Content]:
    """Gives the first call of each step of the running turn a signature.

    Those before `end` were refused, so that they lose their own.
    """
    signed = list(contents)
    for index in range(find_running_turn(contents), len(contents)):
        parts = list(contents[index].parts or ())
        calls = (i for i, part in enumerate(parts) if part and part.function_call)
        if (first := next(calls, None)) is None:
            continue
        if index < end or not parts[first].thought_signature:
            update = {"thought_signature": _DUMMY_SIGNATURE}
            parts[first] = parts[first].model_copy(update=update)
            signed[index] = contents[index].model_copy(update={"parts": parts})
    return signed
