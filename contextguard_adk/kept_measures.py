"""What was measured in one run of a session and serves the next.

A session service hands out copies, or rows read anew, so nothing is known again by
identity. A fingerprint, on which it depends what the model sees, is known by all that
is in the content. To look through every result once a run takes longer than anything
else in a model call, though. So a size is known by the event, and by an outline that
shows most edits; the guard relies on that until the window is nearly full.
"""

from __future__ import annotations

import hashlib
import marshal
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from google.genai import types

from contextguard_adk.measuring.tokens import PartMeasure

if TYPE_CHECKING:
    from google.adk.events.event import Event

_DIGEST_BYTES = 16
# An outline takes a tenth of the time of a size: the first containers that are no long
# lists, and texts no longer than names and identifiers.
_OUTLINED_CONTAINERS = 3
_OUTLINED_ITEMS = 16
_OUTLINED_CHARS = 256
# Without references: those depend on who else holds an object.
_MARSHAL_VERSION = 2

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
            found = self._old.get(key)
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
        return len(self._new.keys() | self._old.keys())


class KeptMeasures:
    """What the last two runs of one session have met.

    Sizes and digests alone, nothing of what was said: 200 to 500 bytes for each call
    and result, and for each text that is not ASCII.

    Attributes:
        texts: What texts measure, by their length and Python's own hash.
        payloads: What calls and results measure, by what `Origins.name` returns.
        prints: Fingerprints of contents of calls and results, by role and `exact_key`.
    """

    def __init__(self) -> None:
        self.texts: Recent[tuple[int, int], PartMeasure] = Recent()
        self.payloads: Recent[Hashable, PartMeasure] = Recent()
        self.prints: Recent[Hashable, bytes] = Recent()
        self._invocation_id = ""

    def begin_run(self, invocation_id: str) -> None:
        """Forgets what neither this run nor the one before has met."""
        if invocation_id == self._invocation_id:
            return  # Another agent of the same run.
        self._invocation_id = invocation_id
        self.texts.begin_generation()
        self.payloads.begin_generation()
        self.prints.begin_generation()


def exact_key(value: dict[str, Any]) -> bytes | None:
    """Returns a digest of all that is in a payload, down to the types of numbers.

    None where things are in it that do not show all of themselves, or it is too deep.
    """
    try:
        spelled = marshal.dumps(value, _MARSHAL_VERSION)
    except ValueError:
        return None
    return hashlib.blake2b(spelled, digest_size=_DIGEST_BYTES).digest()


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
        self._origins = {id(origin[0]): origin for origin in found}
        if len({origin[1:] for origin in found}) < len(found):
            # Ids that someone has set tell nothing apart.
            counts = Counter(origin[1:] for origin in found)
            unique = [origin for origin in found if counts[origin[1:]] == 1]
            self._origins = {id(origin[0]): origin for origin in unique}

    def name(
        self, value: dict[str, Any], is_call: bool, tool: str | None
    ) -> Hashable | None:
        """Names a payload by its event and its outline; None if either is missing.

        Args:
            value: The payload.
            is_call: Whether it is a call's.
            tool: The name of the tool.
        """
        origin = self._origins.get(id(value))
        outline = _outline(value) if origin else None
        if origin is None or outline is None:
            return None
        return origin[1], origin[2], hash((is_call, tool, *outline))


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
    seen: list[object] = []
    waiting: list[Any] = [value]
    for container in waiting:
        items = container
        if type(container) is dict:
            seen.extend(container)
            items = container.values()
        for item in items:
            kind = type(item)
            if kind is dict or kind is list:
                seen += kind, len(item)
                if len(item) <= _OUTLINED_ITEMS and len(waiting) < _OUTLINED_CONTAINERS:
                    waiting.append(item)
            elif kind is str:
                is_long = len(item) > _OUTLINED_CHARS
                seen += (kind, len(item), item.isascii()) if is_long else (item,)
            elif kind is int or kind is float or kind is bool or item is None:
                seen += kind, item
            else:
                return None
    return seen
