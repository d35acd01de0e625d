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
    """Changes texts by a function; None changes none, and costs nothing."""

    function: Callable[[str], str] | None = None

    def __post_init__(self) -> None:
        function = self.function
        if function is None:
            return
        method = getattr(function, "__call__", None)  # noqa: B004 - of an object.
        is_async = any(inspect.iscoroutinefunction(each) for each in (function, method))
        if is_async or not callable(function):
            raise TypeError(
                "redact must be a sync function of a text that returns a text, not "
                f"{type(function).__name__}"
            )

    def __bool__(self) -> bool:
        return self.function is not None

    def text(self, text: str) -> str:
        """Returns a text as it may leave.

        Raises:
            RedactionError: The function fails, or returns no text.
        """
        if self.function is None or not text:
            return text

        try:
            said: object = self.function(text)
        except Exception as error:
            raise RedactionError("redact has failed") from error
        if not isinstance(said, str):
            raise RedactionError(f"redact gave {type(said).__name__} in place of a str")
        return str(said)

    def contents(
        self, contents: Sequence[types.Content], get: Callable[..., types.Content]
    ) -> Sequence[types.Content]:
        """Returns contents with their texts changed; `get` may know some already."""
        if self.function is None:
            return contents
        return [
            get(self._content, content, content.parts or (), content.role)
            for content in contents
        ]

    def _content(self, content: types.Content) -> types.Content:
        parts = [part and self._part(part) for part in content.parts or ()]
        return types.Content(role=content.role, parts=parts)

    def _part(self, part: Any) -> Any:
        """Changes texts, payloads and the names of files, of results as well."""
        update: dict[str, Any] = {}
        for name, payloads in _FIELDS.items():
            value = getattr(part, name, None)
            if value is None:
                continue
            if isinstance(value, str):
                update[name] = self.text(value)
                continue

            changed = {
                field: self._payload(getattr(value, field)) for field in payloads
            }
            if name == "function_response" and value.parts:
                changed["parts"] = [self._part(inner) for inner in value.parts]
            update[name] = value.model_copy(update=changed)
        return part.model_copy(update=update)

    def _payload(self, payload: object) -> object:
        try:
            # Of an object the text that it would show, as where a payload is written.
            return self._walk(pydantic_core.to_jsonable_python(payload, fallback=str))
        except (ValueError, TypeError, RecursionError):
            return {"result": "[left out]"}  # It holds itself, or is nested too deeply.

    def _walk(self, value: Any) -> Any:
        """Changes all texts in nested JSON, names of fields and numbers included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(name): self._walk(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self._walk(each) for each in value]
        if value is None or isinstance(value, bool):
            return value

        # A number may be that of a card.
        text = str(value)
        redacted = self.text(text)
        return value if redacted == text else redacted
