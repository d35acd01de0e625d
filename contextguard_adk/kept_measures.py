"""What the parts of sessions' events measure, kept from run to run.

A session service hands out copies, or rows read anew, so a run cannot know its payloads
by identity. To walk through all that tools ever returned takes longer than anything
else that is done for a model call, and events stay what they are. So a payload is known
by its event, and by an outline that shows most edits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from google.genai import types

from contextguard_adk.tokens import PartMeasure

if TYPE_CHECKING:
    from google.adk.events.event import Event

_PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})
_OUTLINED_CONTAINERS = 3
_OUTLINED_ITEMS = 16
_OUTLINED_CHARS = 256

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A dict that forgets what two generations have not asked for."""

    __slots__ = ("_new", "_old")

    def __init__(self) -> None:
        self._new: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """Returns the value of a key, or None."""
        found = self._new.get(key)
        if found is None:
            found = self._old.pop(key, None)
            if found is not None:
                self._new[key] = found
        return found

    def put(self, key: K, value: V) -> V:
        """Sets a value, and returns it."""
        self._new[key] = value
        return value

    def begin_generation(self) -> None:
        """Forgets what was last asked for before the present generation."""
        self._old, self._new = self._new, {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)


class KeptMeasures:
    """What the last two runs of one session have met.

    Sizes and digests alone, nothing of what was said: some 300 bytes for each call,
    result, and text in another script.

    Attributes:
        texts: What texts measure, by their length and Python's own hash, which is
            secret and another one in each process.
        parts: What calls and results measure, by their origin and outline.
        prints: Fingerprints of contents, by their role and what each part is.
    """

    def __init__(self) -> None:
        self.texts: Recent[tuple[int, int], PartMeasure] = Recent()
        self.parts: Recent[Hashable, PartMeasure] = Recent()
        self.prints: Recent[Hashable, bytes] = Recent()
        self._invocation_id = ""

    def begin_run(self, invocation_id: str) -> None:
        """Forgets what neither this run nor the one before has met."""
        if invocation_id == self._invocation_id:
            return  # Another agent of the same run.
        self._invocation_id = invocation_id
        self.texts.begin_generation()
        self.parts.begin_generation()
        self.prints.begin_generation()


class Origins:
    """Which events the payloads of a run come from.

    Holds the payloads, so that nothing else can come to have their ids.

    Args:
        events: The session's events.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        found: list[tuple[dict[str, Any], str, int]] = []
        for event in events:
            parts = event.content.parts if event.content else None
            for number, part in enumerate(parts or ()):
                value = _payload_of(part)
                if value is not None:
                    found.append((value, event.id, number))
        self._places = {id(origin[0]): origin for origin in found}
        if not len(self._places) == len({origin[1:] for origin in found}) == len(found):
            self._places = _drop_ambiguous(found)

    def name(
        self, value: dict[str, Any], is_call: bool, tool: str | None
    ) -> Hashable | None:
        """Names a payload by its origin and its outline; None if either is missing.

        Args:
            value: The payload.
            is_call: Whether it is a call's.
            tool: The name of the tool.
        """
        origin = self._places.get(id(value))
        outline = _outline(value) if origin else None
        if origin is None or outline is None:
            return None
        return origin[1], origin[2], hash((is_call, tool, *outline))


def _drop_ambiguous(
    found: Sequence[tuple[dict[str, Any], str, int]],
) -> dict[int, tuple[dict[str, Any], str, int]]:
    """The payloads that stand in one place alone, where nothing else stands."""
    payloads = Counter(id(origin[0]) for origin in found)
    places = Counter(origin[1:] for origin in found)
    return {
        id(origin[0]): origin
        for origin in found
        if payloads[id(origin[0])] == places[origin[1:]] == 1
    }


def _payload_of(part: types.Part | None) -> dict[str, Any] | None:
    if part is None:
        return None
    call, result = part.function_call, part.function_response
    if call is not None:
        return call.args
    return result.response if result is not None else None


def _outline(value: dict[str, Any]) -> list[object] | None:
    """What is near the top of a payload, of what is large its size.

    None where things of other kinds are, which do not show what becomes of them.
    """
    seen: list[object] = [len(value)]
    waiting: list[Any] = [value]
    for container in waiting:
        items = container
        if type(container) is dict:
            seen.extend(container)
            items = container.values()
        for item in items:
            kind = type(item)
            if kind is dict or kind is list:
                seen.append(len(item))
                if len(item) <= _OUTLINED_ITEMS and len(waiting) < _OUTLINED_CONTAINERS:
                    waiting.append(item)
            elif kind is str and len(item) > _OUTLINED_CHARS:
                seen.append(len(item))
            elif kind in _PLAIN_TYPES:
                seen.append(item)
            else:
                return None
    return seen
