"""Applies the user's own `redact` to all that leaves a conversation."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic_core
from google.genai import types

from contextguard_adk._support.log import warn_once

logger = logging.getLogger("contextguard_adk.redaction")

FAILED = "[left out: redact failed]"

_FIELDS = {
    "function_call": "args",
    "function_response": "response",
    "executable_code": "code",
    "code_execution_result": "output",
}


@dataclass(frozen=True)
class Redactor:
    """Changes texts by a function; None changes none, and costs nothing."""

    function: Callable[[str], str] | None = None

    def __post_init__(self) -> None:
        function = str if self.function is None else self.function
        if not callable(function) or inspect.iscoroutinefunction(function):
            message = "redact must be a sync function of a text that returns a text, "
            raise TypeError(f"{message}not {type(function).__name__}")

    def __bool__(self) -> bool:
        return self.function is not None

    def text(self, text: str) -> str:
        """Returns a text as it may leave; of one that is refused, nothing."""
        if self.function is None or not text:
            return text
        try:
            said: object = self.function(text)
        except Exception as error:  # noqa: BLE001 - anyone's code may raise anything
            said = error
        if isinstance(said, str):
            return str(said)
        message = "`redact` gave %s in place of a str; such texts are left out."
        warn_once(logger, message, type(said).__name__)
        return FAILED

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

    def _part(self, part: types.Part) -> types.Part:
        update: dict[str, Any] = {"text": part.text and self.text(part.text)}
        for name, field in _FIELDS.items():
            if (said := getattr(part, name)) is not None:
                changed = self._payload(getattr(said, field))
                update[name] = said.model_copy(update={field: changed})
        return part.model_copy(update=update)

    def _payload(self, payload: object) -> object:
        try:
            # Of an object what it would show as, as where the payload is written.
            plain = pydantic_core.to_jsonable_python(payload, fallback=str)
            return self._walk(plain)
        except Exception:  # noqa: BLE001 - it may hold itself, or be nested too deeply
            return {"result": FAILED}

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
