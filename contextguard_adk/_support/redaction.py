"""Applies the user's own `redact` to all that leaves a conversation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic_core
from google.genai import types

from contextguard_adk.errors import ContextGuardError

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
    """What is to leave cannot be redacted: it does not leave."""


@dataclass(frozen=True, eq=False)
class Redactor:
    """Changes texts by a function; None changes none, and costs nothing."""

    function: Callable[[str], str] | None = None

    def __post_init__(self) -> None:
        function = str if self.function is None else self.function
        calls = function, getattr(function, "__call__", None)  # noqa: B004
        if not callable(function) or any(map(inspect.iscoroutinefunction, calls)):
            message = "redact must be a sync function of a text that returns a text, "
            raise TypeError(f"{message}not {type(function).__name__}")

    def __bool__(self) -> bool:
        return self.function is not None

    def text(self, text: str) -> str:
        """Returns a text as it may leave; raises a RedactionError where that fails."""
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
        return [get(self._content, c, c.parts or (), c.role) for c in contents]

    def _content(self, content: types.Content) -> types.Content:
        parts = [part and self._part(part) for part in content.parts or ()]
        return types.Content(role=content.role, parts=parts)

    def _part(self, part: Any) -> Any:
        """Changes texts, payloads and the names of files, of results as well."""
        update: dict[str, Any] = {}
        for name, fields in _FIELDS.items():
            said = getattr(part, name, None)
            if isinstance(said, str):
                update[name] = self.text(said)
            elif said is not None:
                values = {field: getattr(said, field) for field in fields}
                changed = {field: self._payload(v) for field, v in values.items()}
                if name == "function_response" and said.parts:
                    changed["parts"] = [*map(self._part, said.parts)]
                update[name] = said.model_copy(update=changed)
        return part.model_copy(update=update)

    def _payload(self, payload: object) -> object:
        try:
            # Of an object what it would show as, as where the payload is written.
            return self._walk(pydantic_core.to_jsonable_python(payload, fallback=str))
        except (ValueError, TypeError, RecursionError):
            return {"result": "[left out]"}  # It holds itself, or is nested too deeply.

    def _walk(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(name): self._walk(each) for name, each in value.items()}
        if isinstance(value, list):
            return [*map(self._walk, value)]
        if value is None or isinstance(value, bool):
            return value
        said = self.text(text := str(value))  # A number may be that of a card.
        return value if said == text else said
