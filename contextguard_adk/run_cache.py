"""What the model calls of one run measure again and again, measured once.

ADK builds the contents anew for every call, but the texts and payloads in them are
those of the session's events, the same objects throughout a run. (ADK 2.0 copies them
for every call; there results are measured in each.)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from google.genai import types

from contextguard_adk.history.coverage import fingerprint
from contextguard_adk.history.origin import EventIndex, find_history
from contextguard_adk.kept_measures import KeptMeasures, Origins, Recent, exact_key
from contextguard_adk.measuring.tokens import (
    PartMeasure,
    estimate_contents_tokens,
    measure_part,
)

if TYPE_CHECKING:
    from google.adk.events.event import Event

_PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})
_MAX_CONTAINERS = 10_000


class RunCache:
    """Sizes of parts and fingerprints of contents, for one run of one agent.

    Texts never change, payloads may: what a tool was given or returned in this run may
    still be in its hands. So it is measured again once anything in it has changed. A
    payload that is older than the run is the session's own; only its top is compared.

    The cache keeps alive the session's events and what the last two calls have met, so
    it must not outlive the run.

    Args:
        kept: What earlier runs of the session have measured.
        trusts_sizes: Whether a size stands while the outline of what it is of does.
    """

    def __init__(
        self, kept: KeptMeasures | None = None, trusts_sizes: bool = False
    ) -> None:
        self._kept = kept or KeptMeasures()
        self._trusts_sizes = trusts_sizes
        self._events: Sequence[Event] = ()
        self._origins: Origins | None = None
        self._texts: Recent[str, PartMeasure] = Recent()
        self._payloads: Recent[int, _Payload] = Recent()
        self._prints: Recent[Hashable, tuple[list[str | _Payload], bytes]] = Recent()
        self._fresh: frozenset[int] = frozenset()
        self._index: EventIndex | None = None

    def begin_call(self, events: Sequence[Event], invocation_id: str) -> None:
        """Notes what the tools of this run were given and have returned so far.

        Args:
            events: The session's events.
            invocation_id: The run.
        """
        self._events = events
        fresh = set()
        for event in reversed(events):
            if event.content is None or event.invocation_id != invocation_id:
                continue
            for part in event.content.parts or ():
                if part and part.function_response:
                    fresh.add(id(part.function_response.response))
                elif part and part.function_call:
                    fresh.add(id(part.function_call.args))
            if event.author == "user" and not event.get_function_responses():
                break  # The message that the run began with.
        self._fresh = frozenset(fresh)
        # What no call since the last one has met comes no more, such as copies.
        self._texts.begin_generation()
        self._payloads.begin_generation()
        self._prints.begin_generation()

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
        measure = self.measure_part(part)
        return measure.text_bytes + measure.media_bytes

    def measure_part(self, part: types.Part | None) -> PartMeasure:
        """Returns what the function of that name does."""
        payload = None
        if part is not None:
            if part.text:
                return self._measure_text(part.text, part)
            payload = self._payload(part)
        if payload is None:
            return measure_part(part)
        if payload.measure is None:
            payload.measure = self._measure_payload(payload, part)
        return payload.measure

    def _measure_payload(
        self, payload: _Payload, part: types.Part | None
    ) -> PartMeasure:
        if not payload.is_settled:
            return measure_part(part)
        if self._origins is None:
            self._origins = Origins(self._events)
        name = self._origins.name(payload.value, payload.is_call, payload.name)
        if name is None:
            return measure_part(part)
        kept = self._kept.payloads
        known = kept.get(name) if self._trusts_sizes else None
        return known or kept.put(name, measure_part(part))

    def _measure_text(self, text: str, part: types.Part) -> PartMeasure:
        if text.isascii():
            return PartMeasure(len(text), 0, 0.0, is_ascii=True)
        known = self._texts.get(text)
        if known is None:
            key, kept = (len(text), hash(text)), self._kept.texts
            known = kept.get(key) or kept.put(key, measure_part(part))
            self._texts.put(text, known)
        return known

    def fingerprint(self, content: types.Content) -> bytes:
        """Returns the fingerprint of a content, as the function of that name does."""
        said: list[str | _Payload] = []
        for part in content.parts or ():
            one = (part.text or self._payload(part)) if part else None
            if one is None:
                return fingerprint(content)
            said.append(one)
        # A payload that has changed takes the place of what it was.
        places = [one if isinstance(one, str) else id(one.value) for one in said]
        key = content.role, *places
        known = self._prints.get(key)
        if known is None or known[0] != said:
            taken = self._take_fingerprint(content, said)
            known = self._prints.put(key, (said, taken))
        return known[1]

    def _take_fingerprint(
        self, content: types.Content, said: Sequence[str | _Payload]
    ) -> bytes:
        keys = [one.exact_key for one in said if isinstance(one, _Payload)]
        # Texts are not kept: they take little time.
        if len(keys) < len(said) or None in keys:
            return fingerprint(content)
        key = content.role, *keys
        prints = self._kept.prints
        return prints.get(key) or prints.put(key, fingerprint(content))

    def _payload(self, part: types.Part) -> _Payload | None:
        """Returns what is known of a call's arguments or of a result as they are.

        None where there are none, where files go with them, and where it cannot be
        told whether they have changed.
        """
        call = part.function_call
        is_call = call is not None
        if call is not None:
            name, value = call.name, call.args
        else:
            result = part.function_response
            if result is None or result.parts:
                return None
            name, value = result.name, result.response
        if type(value) is not dict:
            return None
        known = self._payloads.get(id(value))
        if known is None or not known.stands_for(is_call, name):
            payload = _Payload(is_call, name, value, id(value) in self._fresh)
            payload.is_settled = known is None and id(value) not in self._fresh
            known = self._payloads.put(id(value), payload)
        return known if known.is_comparable else None


class _Payload:
    """The arguments of a call or a tool's result, and what they were at one time.

    Args:
        is_call: Whether they are arguments.
        name: Of the tool.
        value: The dict; it is held, so that nothing else can come to have its id.
        is_fresh: Whether everything in it may change, not only its top.

    Attributes:
        is_comparable: Whether a change would be seen.
        is_settled: Whether it is older than the run, and has not changed in it.
        measure: What it measures with the name; None while unknown.
    """

    __slots__ = (
        "_before",
        "_held",
        "is_call",
        "is_comparable",
        "is_settled",
        "measure",
        "name",
        "value",
    )

    def __init__(
        self, is_call: bool, name: str | None, value: dict[str, Any], is_fresh: bool
    ) -> None:
        self.is_call = is_call
        self.name = name
        self.value = value
        self.measure: PartMeasure | None = None
        self.is_comparable = True
        self.is_settled = False
        self._held: object = value
        self._before: object = value.copy()
        if is_fresh:
            containers = _find_containers(value)
            self.is_comparable = bool(containers)
            self._held = containers
            self._before = [container.copy() for container in containers]

    def stands_for(self, is_call: bool, name: str | None) -> bool:
        """Tells whether it is used so, and each container holds the same things, or
        equal ones."""
        if self.is_call is not is_call or self.name != name:
            return False
        try:
            return self._held == self._before
        except Exception:  # noqa: BLE001 - whoever compares may be anyone's object.
            return False

    @property
    def exact_key(self) -> Hashable | None:
        """Tells it from all others, also in other runs; None where that cannot be."""
        digest = exact_key(self.value)
        return None if digest is None else (self.is_call, self.name, digest)


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
