"""What one run measured serves the next, and what has changed is measured anew."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from google.adk.apps.app import EventsCompactionConfig
from google.adk.events.event import Event
from google.genai import types

from contextguard_adk import ContextGuardPlugin, Threshold, run_cache
from contextguard_adk.history.coverage import fingerprint
from contextguard_adk.kept_measures import KeptMeasures
from contextguard_adk.measuring.tokens import estimate_contents_tokens, measure_part
from contextguard_adk.run_cache import RunCache
from contextguard_adk.telemetry import CallRecord
from contextguard_adk.testing import SimulatedLlm
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


def begin_run(
    kept: KeptMeasures, events: Sequence[Event], trusts_sizes: bool, run: str = "i-2"
) -> tuple[RunCache, list[types.Content]]:
    """A run on the session, loaded anew."""
    loaded = copy.deepcopy(list(events))
    kept.begin_run(run)
    cache = RunCache(kept, trusts_sizes)
    cache.begin_call(loaded, run)
    return cache, [event.content for event in loaded if event.content]


def check_run(
    kept: KeptMeasures,
    events: Sequence[Event],
    trusts_sizes: bool = True,
    run: str = "i-2",
) -> None:
    """The run measures like the functions."""
    cache, contents = begin_run(kept, events, trusts_sizes, run)
    for content in contents:
        assert cache.fingerprint(content) == fingerprint(content)
        assert cache.estimate_contents_tokens([content]) == estimate_contents_tokens(
            [content]
        )
        for part in content.parts or ():
            assert cache.measure_part(part) == measure_part(part)


def test_a_later_run_looks_through_nothing_again(looks: Counted) -> None:
    """Calls, results, several in one content, and texts in other scripts."""
    kept = KeptMeasures()
    parallel = responses(response_part("look", RESULT), response_part("read"))
    russian = user("Привет, как дела?")
    events = events_of(
        call("look", page=1), response("look", RESULT), parallel, russian
    )
    check_run(kept, events)
    assert looks.take() == 4 + 5  # Fingerprints of contents, measures of parts.
    check_run(kept, events)
    assert looks.take() == 1  # The fingerprint of a text is not kept.


def test_sizes_are_taken_anew_where_they_matter(looks: Counted) -> None:
    """Near the threshold only what is in a result now counts, however deep."""
    kept = KeptMeasures()
    content = response("look", {"a": {"b": {"c": {"d": "x"}}}})
    events = events_of(content)
    check_run(kept, events)
    _payload_of(content)["a"]["b"]["c"]["d"] = "x" * 1_000
    check_run(kept, events, trusts_sizes=False)
    looks.take()
    check_run(kept, events)
    assert looks.take() == 0


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "key added": lambda value: value.update(more=2),
    "key renamed": lambda value: value.update(sort=value.pop("kind")),
    "short text of the same length": lambda value: value.update(kind="Pods"),
    "long text": lambda value: value.update(note="x" * 1_001),
    "another script": lambda value: value.update(note="я" * 1_000),
    "count for a text": lambda value: value.update(note=1_000),
    "number": lambda value: value["data"].update(next=12_345),
    "switch": lambda value: value.update(ok=None),
    "one for true": lambda value: value.update(ok=1),
    "text for true": lambda value: value.update(ok="True"),
    "list in it grows": lambda value: value["data"]["rows"].append({"id": 3}),
    "count for a list": lambda value: value["data"].update(rows=2),
    "item of the list": lambda value: value["data"]["rows"].__setitem__(0, "one"),
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


DEEP: dict[str, Callable[[dict[str, Any]], None]] = {
    "masked": lambda value: value.update(note="y" * 1_000),
    "deep": lambda value: value["data"]["rows"][1].update(id=3),
    "negative": lambda value: value.update(count=-2),
    "whole": lambda value: value.update(ok=1.0),
}


@pytest.mark.parametrize("change", DEEP.values(), ids=DEEP.keys())
def test_a_fingerprint_is_of_all_that_is_there_now(
    change: Callable[[dict[str, Any]], None],
) -> None:
    """However small or deep a change is: what is sent depends on it."""
    kept = KeptMeasures()
    content = response("look", {**copy.deepcopy(RESULT), "count": -1, "ok": 1})
    for _ in range(2):
        cache, [loaded] = begin_run(kept, events_of(content), trusts_sizes=True)
        assert cache.fingerprint(loaded) == fingerprint(content)
        change(_payload_of(content))


def test_a_replaced_text_of_the_same_length_is_seen_within_a_run() -> None:
    """What is no longer there is compared as it was, not by its outline."""
    kept = KeptMeasures()
    [event] = events_of(response("look", copy.deepcopy(RESULT)))
    check_run(kept, [event])
    cache = RunCache(kept, trusts_sizes=True)
    cache.begin_call([event], "i-2")
    assert event.content
    [part] = event.content.parts or []
    for letter in "xyя":
        _payload_of(event.content)["note"] = letter * 1_000
        assert cache.fingerprint(event.content) == fingerprint(event.content)
        assert cache.measure_part(part) == measure_part(part)


def test_what_is_there_twice_is_not_confused() -> None:
    """Ids that someone has set by hand, and contents that differ in one thing."""
    kept = KeptMeasures()
    note = {"note": "x" * 300}
    other = {"note": "x" * 299 + '"'}
    check_run(
        kept,
        [
            Event(id="e", author="agent", content=response("look", payload))
            for payload in (note, other)
        ],
    )
    check_run(kept, events_of(user("я" * 100), user("人" * 100)))
    for content in (
        response("look", note),
        response("read_it", note),
        call("look", **note),
        types.Content(role="model", parts=response("look", note).parts),
        responses(response_part("look", note), response_part("look", other)),
    ):
        check_run(kept, events_of(content))


def test_a_result_of_this_run_is_never_taken_for_settled() -> None:
    """What a tool was given or returned may change as long as the run lasts."""
    kept = KeptMeasures()
    deep: dict[str, Any] = {"a": {"b": {"c": {"d": "x"}}}}
    events = events_of(call("look", **copy.deepcopy(deep)), response("look", deep))
    for chars in (10, 1_000):
        cache, contents = begin_run(kept, events, trusts_sizes=True, run="i-1")
        for content in contents:
            payload = _payload_of(content)
            payload["a"]["b"]["c"]["d"] = "x" * chars
            for part in content.parts or ():
                assert cache.measure_part(part) == measure_part(part)


def test_what_cannot_be_outlined_is_measured_in_each_run(looks: Counted) -> None:
    """An object of another kind does not show what becomes of it."""
    kept = KeptMeasures()

    class Thing:
        """Neither JSON nor a plain value."""

    for _ in range(2):
        check_run(kept, events_of(response("look", {"rows": [1], "thing": Thing()})))
        assert looks.take() == 2


def test_what_two_runs_have_not_met_is_forgotten(looks: Counted) -> None:
    """Events that were taken back, or are loaded no more, take no room for good."""
    kept = KeptMeasures()
    events = events_of(*(response("look", {"page": page}) for page in range(10)))
    for run in range(30):
        for loaded in (events, [*events, *events_of(user("Да."))]):
            check_run(kept, loaded[run % 10 :], run=f"run-{run}")
        assert len(kept.payloads) == len(kept.prints) <= 10
    for run in range(30, 32):
        check_run(kept, [], run=f"run-{run}")
    assert len(kept.payloads) == len(kept.prints) == len(kept.texts) == 0
    looks.take()
    check_run(kept, events, run="run-33")
    assert looks.take() == 20


@pytest.mark.skipif(
    EventsCompactionConfig.model_fields["compaction_interval"].is_required(),
    reason="this google-adk copies what tools returned for every call",
)
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


@pytest.mark.skipif(
    EventsCompactionConfig.model_fields["compaction_interval"].is_required(),
    reason="this google-adk copies what tools returned for every call",
)
async def test_sizes_are_taken_anew_where_the_window_is_nearly_full(
    looks: Counted,
) -> None:
    """Below four fifths of the threshold, old results are not looked through."""

    async def play(window_tokens: int) -> tuple[list[CallRecord], int]:
        records: list[CallRecord] = []
        guard = ContextGuardPlugin(
            default=Threshold(context_window=window_tokens), on_call=records.append
        )
        script: list[Any] = [*([call_part("fetch"), "Done."] * 20), "Good."]
        llm = SimulatedLlm(script=script, token_ratio=1.0)
        chat = Chat(guarded_agent(llm, [fetch]), [guard])
        for number in range(20):
            await chat.say(f"Go {number}.")
        looks.take()
        await chat.say("How is it?")
        return records, looks.take()

    records, count = await play(1_000_000)
    assert count < 5
    used_tokens = records[-1].real_tokens or 0
    nearly_full, count = await play(int(used_tokens / 0.9 / 0.8))
    assert not any(record.compaction for record in nearly_full)
    assert count >= 20


def fetch() -> dict[str, Any]:
    """Fetches."""
    return copy.deepcopy(RESULT)


def _payload_of(content: types.Content) -> dict[str, Any]:
    [part] = content.parts or []
    if part.function_call and part.function_call.args:
        return part.function_call.args
    assert part.function_response
    assert part.function_response.response
    return part.function_response.response
