"""What was computed of old texts and payloads, remembered for one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from google.genai import types

from contextguard_adk.measuring.tokens import PartMeasure, measure_part

if TYPE_CHECKING:
    from google.adk.events.event import Event

V = TypeVar("V")


class Memo:
    """Remembers results by the identity of the payloads that they were computed from.

    Only payloads of earlier runs, which it keeps alive, are remembered: a tool of this
    run may still change what it was given or has returned.
    """

    def __init__(self, events: Sequence[Event], invocation_id: str) -> None:
        self._old = {
            id(payload): payload
            for event in events
            if event.content and event.invocation_id != invocation_id
            for part in event.content.parts or ()
            if part and (payload := _payload_of(part)) is not None
        }
        self._known: dict[object, Any] = {}

    def get(
        self,
        compute: Callable[[Any], V],
        value: types.Content | types.Part,
        parts: Sequence[types.Part | None],
        role: str | None = None,
    ) -> V:
        """Returns `compute(value)`, from memory where all of its `parts` are old."""
        key: list[object] = [compute, role]
        for part in parts:
            if part is not None and part.text:
                key.append(part.text)
                continue
            payload = _payload_of(part) if part is not None else None
            if part is None or id(payload) not in self._old:
                return compute(value)
            tool = part.function_call or part.function_response
            key += id(payload), tool and tool.name
        found = tuple(key)
        if found not in self._known:
            self._known[found] = compute(value)
        result: V = self._known[found]
        return result

    def measure_part(self, part: types.Part | None) -> PartMeasure:
        """Returns what the function of that name does."""
        return self.get(measure_part, part, (part,)) if part else measure_part(part)

    def part_bytes(self, part: types.Part | None) -> int:
        """Returns what the function of that name does."""
        measure = self.measure_part(part)
        return measure.text_bytes + measure.media_bytes


def _payload_of(part: types.Part) -> dict[str, Any] | None:
    """The arguments of a call, or a result that comes without files."""
    if part.function_call is not None:
        return part.function_call.args
    result = part.function_response
    return result.response if result is not None and not result.parts else None
