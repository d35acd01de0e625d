"""Applies the user's `redact` to all that leaves a conversation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic_core
from google.genai import types

from contextguard_adk.errors import ContextGuardError

# The attributes of a part, each with its own attributes that hold payloads.
_FIELDS: dict[str, tuple[str, ...]] = {
    "text": (),
    "function_call": ("args",),
    "function_response": ("response",),
    "executable_code": ("code",),
    "code_execution_result": ("output",),
    "inline_data": ("display_name",),
    "file_data": ("display_name", "file_uri"),
}


class RedactionError(ContextGuardError):
    """A text cannot be redacted, so it must not leave."""


@dataclass(frozen=True, eq=False)
class Redactor:
    """Changes texts by the user's function; None leaves all texts as they are."""

    function: Callable[[str], str] | None = None

    def __post_init__(self) -> None:
        """Raises a TypeError for an object that is no sync function."""
        function = self.function
        if function is None:
            return

        # An object may be callable by an async method.
        method = getattr(function, "__call__", None)  # noqa: B004
        is_async = any(inspect.iscoroutinefunction(each) for each in (function, method))
        if is_async or not callable(function):
            raise TypeError(
                "redact must be a sync function of a text that returns a text, not "
                f"{type(function).__name__}"
            )

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
        return str(redacted)

    def redact_contents(
        self, contents: Sequence[types.Content], remember: Callable[..., types.Content]
    ) -> Sequence[types.Content]:
        """Returns copies of contents with their texts redacted.

        Without a function of the user, it returns the contents themselves.

        Args:
            contents: The contents, which stay as they are.
            remember: `Memo.remember`, which returns the copy of an earlier call or has
                a new one made. Its arguments are the function that makes a copy, the
                content, and the parts and the role that identify the content.
        """
        if self.function is None:
            return contents
        return [
            remember(self._redact_content, content, content.parts or (), content.role)
            for content in contents
        ]

    def _redact_content(self, content: types.Content) -> types.Content:
        parts = [part and self._redact_part(part) for part in content.parts or ()]
        return types.Content(role=content.role, parts=parts)

    def _redact_part(self, part: Any) -> Any:
        """Returns a copy of a part with its text, its payloads and file names redacted.

        The parts within a tool result are redacted too.
        """
        changed_attributes: dict[str, Any] = {}
        for name, payload_fields in _FIELDS.items():
            value = getattr(part, name, None)
            if value is None:
                continue
            if isinstance(value, str):
                changed_attributes[name] = self.redact_text(value)
                continue

            changed_fields = {
                field: self._redact_payload(getattr(value, field))
                for field in payload_fields
            }
            if name == "function_response" and value.parts:
                inner_parts = [self._redact_part(inner) for inner in value.parts]
                changed_fields["parts"] = inner_parts
            changed_attributes[name] = value.model_copy(update=changed_fields)
        return part.model_copy(update=changed_attributes)

    def _redact_payload(self, payload: object) -> object:
        """Returns the redacted form of a payload as JSON values.

        An object that JSON does not know becomes its `str`. A payload that holds
        itself, or is nested too deeply, is left out.
        """
        try:
            values = pydantic_core.to_jsonable_python(payload, fallback=str)
            return self._redact_json(values)
        except (ValueError, TypeError, RecursionError):
            return {"result": "[left out]"}

    def _redact_json(self, value: Any) -> Any:
        """Returns nested JSON with all texts redacted, also field names and numbers.

        A number that the user's function changes becomes a text. True, False and None
        stay as they are.
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
