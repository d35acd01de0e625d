"""Applies the user's `redact` to all that leaves a conversation.

`redact` is an argument of the plugin: a function that returns a text without what must
stay secret.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic_core
from google.genai import types

from contextguard_adk.errors import ContextGuardError

# The attributes of a part that hold an object, such as a tool call. Each stands with
# the attributes of the object that are redacted.
_PAYLOAD_FIELDS: dict[str, tuple[str, ...]] = {
    "function_call": ("args",),
    "function_response": ("response",),
    "executable_code": ("code",),
    "code_execution_result": ("output",),
    "inline_data": ("display_name",),
    "file_data": ("display_name", "file_uri"),
}


class RedactionError(ContextGuardError):
    """A text cannot be redacted, so the text must not leave the conversation."""


@dataclass(frozen=True, eq=False)  # Each redactor is its own member of a set.
class Redactor:
    """Redacts texts by the user's function; None leaves all texts as they are."""

    function: Callable[[str], str] | None = None

    def __bool__(self) -> bool:
        return self.function is not None

    def redact_text(self, text: str) -> str:
        """Returns the redacted form of a text, which may leave the conversation.

        Raises:
            RedactionError: The function fails, or returns no text.
        """
        if self.function is None or not text:
            return text

        try:
            redacted: object = self.function(text)
        except Exception as error:
            raise RedactionError("redact has failed") from error
        if not isinstance(redacted, str):
            kind = type(redacted).__name__
            raise RedactionError(f"redact gave {kind} in place of a str")
        return str(redacted)  # A subclass of str becomes a plain str.

    def redact_contents(
        self, contents: Sequence[types.Content], remember: Callable[..., types.Content]
    ) -> Sequence[types.Content]:
        """Returns redacted copies of contents; without a function, the contents.

        Args:
            contents: The contents, which are not changed.
            remember: The method `Memo.remember`. It calls `_redact_content`, or returns
                the result of an earlier call for the same content.
        """
        if self.function is None:
            return contents

        copies = list[types.Content]()
        for content in contents:
            parts = content.parts or ()
            copy = remember(self._redact_content, content, parts, content.role)
            copies.append(copy)
        return copies

    def _redact_content(self, content: types.Content) -> types.Content:
        parts = [part and self._redact_part(part) for part in content.parts or ()]
        return types.Content(role=content.role, parts=parts)

    def _redact_part(self, part: Any) -> Any:
        """Returns a copy of a part with its text, its payloads and file names redacted.

        `part` is a `types.Part`, or a `types.FunctionResponsePart` of a tool result,
        which has only some of the attributes of a `types.Part`.
        """
        changes: dict[str, Any] = {}
        text = getattr(part, "text", None)
        if text is not None:
            changes["text"] = self.redact_text(text)

        for name, payload_fields in _PAYLOAD_FIELDS.items():
            value = getattr(part, name, None)
            if value is None:
                continue

            redacted_fields = {
                field: self._redact_payload(getattr(value, field))
                for field in payload_fields
            }
            if name == "function_response" and value.parts:
                inner_parts = [self._redact_part(inner) for inner in value.parts]
                redacted_fields["parts"] = inner_parts
            changes[name] = value.model_copy(update=redacted_fields)
        return part.model_copy(update=changes)

    def _redact_payload(self, payload: object) -> object:
        """Returns the redacted form of a payload, made of JSON values.

        An object that is no JSON value is replaced by its `str`. A payload that
        contains itself, or is nested too deeply, is replaced by a note.
        """
        try:
            values = pydantic_core.to_jsonable_python(payload, fallback=str)
            return self._redact_json(values)
        except (ValueError, TypeError, RecursionError):
            return {"result": "[left out]"}

    def _redact_json(self, value: Any) -> Any:
        """Returns nested JSON with texts, field names and numbers redacted.

        A number becomes a text if the user's function changes its digits; otherwise it
        stays a number. True, False and None stay as they are.
        """
        if isinstance(value, str):
            return self.redact_text(value)
        if isinstance(value, dict):
            return {
                self.redact_text(name): self._redact_json(item)
                for name, item in value.items()
            }
        if isinstance(value, list):
            return [self._redact_json(item) for item in value]
        if value is None or isinstance(value, bool):
            return value

        # A number may be the number of a credit card.
        digits = str(value)
        redacted = self.redact_text(digits)
        return value if redacted == digits else redacted
