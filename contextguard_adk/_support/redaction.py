"""Applies the user's own `redact` to all that leaves a conversation."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.genai import types

from contextguard_adk._support.log import REDACTORS, warn_once

logger = logging.getLogger("contextguard_adk.redaction")

FAILED = "[left out: redact failed]"


@dataclass(frozen=True)
class Redactor:
    """Changes texts by a function; None changes none, and costs nothing."""

    function: Callable[[str], str] | None = None

    def __post_init__(self) -> None:
        function = self.function
        is_sync = callable(function) and not inspect.iscoroutinefunction(function)
        if function is not None and not is_sync:
            message = "redact must be a sync function of a text that returns a text, "
            raise TypeError(f"{message}not {type(function).__name__}")
        if function is not None:
            REDACTORS.add(self.text)

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

    def value(self, value: Any) -> Any:
        """Returns any value of JSON, its keys as well, with its texts changed."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            items = value.items()
            return {self.value(name): self.value(each) for name, each in items}
        if isinstance(value, list | tuple):
            return [self.value(each) for each in value]
        if value is None or isinstance(value, bool):
            return value
        # A number may be one of a card; any other object shows as what it prints.
        said = self.text(text := str(value))
        return value if said == text else said

    def contents(
        self, contents: Sequence[types.Content], get: Callable[..., types.Content]
    ) -> Sequence[types.Content]:
        """Returns contents with their texts changed; `get` may know some already."""
        if self.function is None:
            return contents
        return [get(self.content, c, c.parts or (), c.role) for c in contents]

    def content(self, content: types.Content) -> types.Content:
        """Returns a content with its texts changed."""
        parts = [part and self._part(part) for part in content.parts or ()]
        return types.Content(role=content.role, parts=parts)

    def _part(self, part: types.Part) -> types.Part:
        update: dict[str, Any] = {"text": part.text and self.text(part.text)}
        for name, field in (
            ("function_call", "args"),
            ("function_response", "response"),
            ("executable_code", "code"),
            ("code_execution_result", "output"),
        ):
            if (said := getattr(part, name)) is not None:
                changed = self.value(getattr(said, field))
                update[name] = said.model_copy(update={field: changed})
        return part.model_copy(update=update)
