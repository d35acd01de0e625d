"""What the model calls of one run measure again and again, measured once.

ADK builds the contents anew for every call, but the texts and payloads in them are
those of the session's events, the same objects throughout a run.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from google.genai import types

from contextguard_adk.coverage import fingerprint
from contextguard_adk.density import count_spare_tokens, json_text
from contextguard_adk.provenance import EventIndex, find_history
from contextguard_adk.tokens import (
    estimate_contents_tokens,
    part_bytes,
    part_spare_tokens,
    text_bytes,
)

if TYPE_CHECKING:
    from google.adk.events.event import Event

_PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})
_MAX_CONTAINERS = 10_000


class RunCache:
    """Sizes of parts and fingerprints of contents, for one run of one agent.

    Texts never change, payloads may: what a tool returned in this run may still be in
    the tool's hands. So it is measured again once anything in it has changed. A
    payload that is older than the run is the session's own; only its top is compared.

    The cache keeps alive the payloads that the last two calls have met, and texts that
    are not ASCII, so it must not outlive the run.
    """

    def __init__(self) -> None:
        self._text_bytes: dict[str, int] = {}
        self._text_spares: dict[str, float] = {}
        self._payloads: dict[int, _Payload] = {}
        self._prints: dict[Hashable, tuple[tuple[_Payload, ...], bytes]] = {}
        self._fresh: frozenset[int] = frozenset()
        self._met: set[int] = set()
        self._named: set[Hashable] = set()
        self._index: EventIndex | None = None

    def begin_call(self, events: Sequence[Event], invocation_id: str) -> None:
        """Notes what the tools of this run have returned so far.

        Args:
            events: The session's events.
            invocation_id: The run.
        """
        fresh = set()
        for event in reversed(events):
            if event.content is None or event.invocation_id != invocation_id:
                continue
            for part in event.content.parts or ():
                if part and part.function_response:
                    fresh.add(id(part.function_response.response))
            if event.author == "user" and not event.get_function_responses():
                break  # The message that the run began with.
        self._fresh = frozenset(fresh)
        # What no call since the last one has met comes no more, such as copies.
        self._payloads = {
            i: self._payloads[i] for i in self._met if i in self._payloads
        }
        self._prints = {k: self._prints[k] for k in self._named if k in self._prints}
        self._met, self._named = set(), set()

    def find_history(
        self,
        contents: Sequence[types.Content],
        events: Sequence[Event],
        transient: Sequence[types.Content] = (),
    ) -> list[int]:
        """Finds the history among contents, as the function of that name does."""
        if self._index is not None and self._index.follow(events):
            found = find_history(contents, events, transient, self._index)
            if len(found) == len(contents):
                return found
        # What is not found may come from an event that was edited in place.
        self._index = EventIndex(events)
        return find_history(contents, events, transient, self._index)

    def estimate_contents_tokens(self, contents: Iterable[types.Content]) -> int:
        """Estimates the tokens of contents, as the function of that name does."""
        return estimate_contents_tokens(contents, self._part_bytes)

    def _part_bytes(self, part: types.Part | None) -> int:
        text = part.text if part else None
        if text:
            size_bytes = self._text_bytes.get(text)
            if size_bytes is None:
                size_bytes = self._text_bytes[text] = text_bytes(text)
            return size_bytes
        kind, name, value = _tool_use(part)
        payload = self._payload(value) if kind else None
        if payload is None:
            return part_bytes(part)
        return text_bytes(name) + payload.measure(value)[0]

    def part_spare_tokens(self, part: types.Part | None) -> float:
        """Returns what the function of that name does, names of tools left out."""
        text = part.text if part else None
        if text:
            spare_tokens = self._text_spares.get(text)
            if spare_tokens is None:
                spare_tokens = self._text_spares[text] = part_spare_tokens(part)
            return spare_tokens
        kind, _, value = _tool_use(part)
        payload = self._payload(value) if kind else None
        return part_spare_tokens(part) if payload is None else payload.measure(value)[1]

    def fingerprint(self, content: types.Content) -> bytes:
        """Returns the fingerprint of a content, as the function of that name does."""
        key: list[Hashable] = [content.role]
        used: list[_Payload] = []
        for part in content.parts or ():
            text = part.text if part else None
            if text:
                key.append(text)
                continue
            kind, name, value = _tool_use(part)
            payload = self._payload(value) if kind else None
            if payload is None:
                return fingerprint(content)
            key.append((kind, name, id(value)))
            used.append(payload)
        place, payloads = tuple(key), tuple(used)
        self._named.add(place)
        known = self._prints.get(place)
        if known is None or known[0] != payloads:
            known = self._prints[place] = (payloads, fingerprint(content))
        return known[1]

    def _payload(self, value: dict[str, Any]) -> _Payload | None:
        """Returns what is known of a payload as it is; None if it cannot be told."""
        self._met.add(id(value))
        known = self._payloads.get(id(value))
        if known is None or not known.is_unchanged():
            known = _Payload(value, id(value) in self._fresh)
            self._payloads[id(value)] = known
        return known if known.is_comparable else None


class _Payload:
    """The arguments of a call or a tool's result, and what they were at one time.

    Args:
        value: What to hold, so that nothing else can come to have its id.
        is_fresh: Whether everything in it may change, not only its top.
    """

    __slots__ = ("_before", "_measured", "_value", "is_comparable")

    def __init__(self, value: dict[str, Any], is_fresh: bool) -> None:
        self._measured: tuple[int, float] | None = None
        self.is_comparable = True
        self._value: object = value
        self._before: object = value.copy()
        if is_fresh:
            containers = _find_containers(value)
            self.is_comparable = bool(containers)
            self._value = containers
            self._before = [container.copy() for container in containers]

    def measure(self, value: dict[str, Any]) -> tuple[int, float]:
        """Returns its bytes, and what `count_spare_tokens` says of it."""
        if self._measured is None:
            # An empty one counts nothing.
            text = json_text(value) if value else b""
            self._measured = len(text), count_spare_tokens(text)
        return self._measured

    def is_unchanged(self) -> bool:
        """Tells whether each container still holds the same things, or equal ones."""
        try:
            return self._value == self._before
        except Exception:  # noqa: BLE001 - whoever compares may be anyone's object.
            return False


def _find_containers(value: dict[str, Any]) -> list[Any]:
    """All lists and dicts in a payload; empty where others in it could change."""
    found: list[Any] = [value]
    for container in found:
        for item in container.values() if type(container) is dict else container:
            if type(item) in _PLAIN_TYPES:
                continue
            if type(item) not in (dict, list) or len(found) == _MAX_CONTAINERS:
                return []
            found.append(item)
    return found


def _tool_use(part: types.Part | None) -> tuple[str, str, Any]:
    """The kind, name and payload of a call or of a result without files, if any."""
    call = part.function_call if part else None
    if call is not None:
        return ("c", call.name or "", call.args) if type(call.args) is dict else _NONE
    result = part.function_response if part else None
    if result is None or result.parts or type(result.response) is not dict:
        return _NONE
    return "r", result.name or "", result.response


_NONE = "", "", None
