"""Recognizes errors by which a provider refuses a history for its form.

Errors about the length of a history are recognized in `overflow.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from google.genai import types

from contextguard_adk._measuring.tokens import part_text
from contextguard_adk._providers.calling import read_status

_WORDINGS = {
    # The messages before a signed thought have changed since the thought was written.
    "binding": r"bound to a different conversation",
    # A thought or its signature is not valid, or stands in the wrong place.
    "thoughts": r"Invalid `?(signature|data)`? in `?(redacted_)?thinking`?|cannot be "
    r"thinking|cannot contain thinking|must contain thinking",
    # Thoughts of the running turn are missing or changed.
    "turn": r"in the latest assistant message cannot be modified|Expected `?thinking`?"
    r"|must start with a thinking block",
    # Gemini's signature of a call is missing or not valid.
    "signatures": r"missing a `?thought_signature|Corrupted thought signature|"
    r"Thought signature is not valid",
    # A request in OpenAI's form lacks the thoughts that DeepSeek and others want back.
    "reasoning": r"in the thinking mode must be passed back|reasoning_content`? is "
    r"missing|Missing `?reasoning_content",
    # Roles do not alternate, a call has no result, or a message is empty.
    "shape": r"first message must use the|must start with a user message|roles must "
    r"alternate|unexpected `?tool_use_id`? found|ids were found without|function call "
    r"turn comes immediately after|function response parts is equal|must include at "
    r"least one parts field|contents is not specified|must be a response to a prec|"
    r"must be followed by tool messages|No tool output found for function call|"
    r"function calls need responses|Expected last role|Unexpected role|same number "
    r"of function calls|toolConfig field must be|must define tools|text content blocks "
    r"must be non-empty|assistant message prefill",
}
"""The wordings of providers as regular expressions, by the kind of the refusal."""

_PATTERNS = {kind: re.compile(wording) for kind, wording in _WORDINGS.items()}


def parse_refusal(error: BaseException, contents: Iterable[types.Content]) -> str:
    """Returns the kind of a refusal, such as "shape"; "" if an error is no refusal.

    The kinds are the keys of `_WORDINGS`. The first kind that matches is returned.

    Args:
        error: The error that the call raised.
        contents: The contents of the request. The error may quote the request, so a
            wording that also stands in one of the contents does not count.
    """
    if isinstance(error, UnicodeDecodeError):
        # ADK's Claude class decodes signatures, and raises this error if another client
        # wrote the signature. No request was sent.
        return "thoughts"

    # 400 and 422 stand for an invalid request. The errors of some clients have no
    # status.
    if read_status(error) not in (400, 422, None):
        return ""

    message = str(error)
    parts = [part for content in contents for part in content.parts or ()]
    for kind, pattern in _PATTERNS.items():
        match = pattern.search(message)
        if match is None:
            continue

        words = match[0].encode()
        is_quoted = any(words in part_text(part) for part in parts)
        if not is_quoted:
            return kind
    return ""
