"""What one run measured serves the next, and what has changed is measured anew."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from google.adk.events.event import Event
from google.genai import types

from contextguard_adk import ContextGuardPlugin, Threshold, run_cache
from contextguard_adk.coverage import fingerprint
from contextguard_adk.kept_measures import KeptMeasures
from contextguard_adk.run_cache import RunCache
from contextguard_adk.telemetry import CallRecord
from contextguard_adk.testing import SimulatedLlm
from contextguard_adk.tokens import measure_part
from tests.builders import (
    Chat,
    call,
    call_part,
    guarded_agent,
    response,
    response_part,
    responses,
    user,
)

RESULT: dict[str, Any] = {
    "kind": "List",
    "note": "x" * 1_000,
    "data": {"rows": [{"id": 1}, {"id": 2}], "next": None},
    "ok": True,
}


class Counted:
    """Counts how often parts and contents are looked through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(run_cache, "measure_part", self._count(measure_part))
        monkeypatch.setattr(run_cache, "fingerprint", self._count(fingerprint))

    def _count(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counted(value: Any) -> Any:
            self.count += 1
            return function(value)

        return counted

    def take(self) -> int:
        """Returns the count, and begins anew."""
        count, self.count = self.count, 0
        return count


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Counts what the cache cannot answer itself."""
    return Counted(monkeypatch)


def events_of(*contents: types.Content) -> list[Event]:
    """Events of an earlier run, each with an id of its own."""
    return [
        Event(id=f"e-{number}", author="agent", invocation_id="i-1", content=content)
        for number, content in enumerate(contents)
    ]


def check_run(kept: KeptMeasures, events: Sequence[Event], run: str = "i-2") -> None:
    """A run on the session, loaded anew, measures like the functions."""
    loaded = copy.deepcopy(list(events))
    cache = RunCache(kept)
    cache.begin_call(loaded, run)
    for event in loaded:
        assert event.content
        assert cache.fingerprint(event.content) == fingerprint(event.content)
        for part in event.content.parts or ():
            assert cache.measure_part(part) == measure_part(part)


def test_a_later_run_looks_through_nothing_again(looks: Counted) -> None:
    """Calls, results, several in one content, and texts in other scripts."""
    kept = KeptMeasures()
    parallel = responses(response_part("look", RESULT), response_part("read"))
    russian = user("Привет, как дела?")
    events = events_of(call("look", page=1), response("look", RESULT), parallel)
    check_run(kept, [*events, *events_of(russian)[:1]])
    assert looks.take() == 3 + 4 + 2  # Fingerprints, parts; the text for both.
    check_run(kept, [*events, *events_of(russian)[:1]])
    assert looks.take() == 1  # The fingerprint of a text is not kept.


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "key added": lambda value: value.update(more=2),
    "key renamed": lambda value: value.update(sort=value.pop("kind")),
    "short text of the same length": lambda value: value.update(kind="Pods"),
    "long text": lambda value: value.update(note="x" * 1_001),
    "number": lambda value: value["data"].update(next=12_345),
    "switch": lambda value: value.update(ok=None),
    "list in it grows": lambda value: value["data"]["rows"].append({"id": 3}),
    "item in the list": lambda value: value["data"].update(rows=[[]]),
    "another kind of thing": lambda value: value.update(data={1, 2}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_an_event_that_was_edited_is_measured_anew(
    change: Callable[[dict[str, Any]], None],
) -> None:
    """Someone masks what stands in the session, or a tool keeps its list."""
    kept = KeptMeasures()
    content = response("look", copy.deepcopy(RESULT))
    events = events_of(call("look"), content)
    check_run(kept, events)
    change(_payload_of(content))
    check_run(kept, events)
    check_run(kept, events)


def test_a_replaced_text_of_the_same_length_is_seen_within_a_run() -> None:
    """What is no longer there is compared as it was, not by its outline."""
    [event] = events_of(response("look", copy.deepcopy(RESULT)))
    cache = RunCache(KeptMeasures())
    cache.begin_call([event], "i-2")
    assert event.content
    for letter in "xyz":
        _payload_of(event.content)["note"] = letter * 1_000
        assert cache.fingerprint(event.content) == fingerprint(event.content)


def test_what_is_there_twice_is_not_confused() -> None:
    """Ids that someone has set by hand, a dict that a tool returns again and again."""
    kept = KeptMeasures()
    same = {"note": "x" * 300}
    other = {"note": "y" * 300}
    twins = [
        Event(id="e", author="agent", content=response("look", payload))
        for payload in (same, other)
    ]
    check_run(kept, twins)
    nameless = [Event(author="agent", content=response("look", other))]
    nameless[0].id = "e"
    check_run(kept, nameless)
    shared = events_of(response("look", same), response("read", same))
    check_run(kept, shared)
    check_run(kept, events_of(call("look", **other)))


def test_what_cannot_be_outlined_is_measured_in_each_run(looks: Counted) -> None:
    """An object of another kind does not show what becomes of it."""
    kept = KeptMeasures()
    for _ in range(2):
        check_run(kept, events_of(response("look", {"rows": (1, 2)})))
        assert looks.take() == 2


def test_what_two_runs_have_not_met_is_forgotten(looks: Counted) -> None:
    """Events that were taken back, or are loaded no more, take no room for good."""
    kept = KeptMeasures()
    events = events_of(*(response("look", {"page": page}) for page in range(10)))
    for run in range(30):
        check_run(kept, events[run % 10 :], run=f"i-{run}")
        check_run(kept, [*events, *events_of(user("Да."))][run % 10 :], run=f"i-{run}")
        assert len(kept.parts) == len(kept.prints) <= 10
    for run in range(30, 32):
        check_run(kept, [], run=f"i-{run}")
    assert len(kept.parts) == len(kept.prints) == len(kept.texts) == 0
    looks.take()
    check_run(kept, events, run="i-33")
    assert looks.take() == 20


async def test_a_run_knows_what_the_ones_before_have_measured(looks: Counted) -> None:
    """Through ADK's runner, where each run has a copy of the session."""
    records: list[CallRecord] = []
    guard = ContextGuardPlugin(
        default=Threshold(context_window=1_000_000), on_call=records.append
    )
    llm = SimulatedLlm(script=[call_part("fetch"), "Done."] * 6, token_ratio=1.0)
    chat = Chat(guarded_agent(llm, [fetch]), [guard])
    counts = []
    for number in range(6):
        await chat.say(f"Go {number}.")
        counts.append(looks.take())
    assert counts[2] == counts[5]
    for record in records[1:]:
        assert record.real_tokens
        assert record.estimated_tokens >= record.real_tokens


def fetch() -> dict[str, Any]:
    """Fetches."""
    return copy.deepcopy(RESULT)


def _payload_of(content: types.Content) -> dict[str, Any]:
    result = (content.parts or [])[0].function_response
    assert result
    assert result.response
    return result.response
