"""The cache of one run measures like the functions that it stands for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from google.adk.events.event import Event
from google.genai import types

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.history.coverage import fingerprint
from contextguard_adk.history.origin import find_history
from contextguard_adk.measuring.tokens import estimate_contents_tokens, measure_part
from contextguard_adk.run_cache import RunCache
from contextguard_adk.telemetry import CallRecord
from contextguard_adk.testing import SimulatedLlm
from tests.builders import (
    Chat,
    call,
    call_part,
    event,
    guarded_agent,
    model,
    response,
    response_part,
    responses,
    user,
)


def filed_part(data: bytes) -> types.Part:
    """A result with a file beside it."""
    blob = types.FunctionResponseBlob(mime_type="image/png", data=data)
    part = response_part("look", {"found": 1})
    assert part.function_response
    part.function_response.parts = [types.FunctionResponsePart(inline_data=blob)]
    return part


PAYLOAD: dict[str, Any] = {"rows": [{"id": 1, "name": "ünï", "of": None}] * 3}
CONTENTS = {
    "text": user("Hello."),
    "other role": model("Hello."),
    "not ASCII": user("你好"),
    "other script": user("Привет, как дела?"),
    "arguments in another script": call("look", at="Куда?"),
    "result in another script": response("look", "Здесь."),
    "code": types.Content(
        parts=[types.Part(executable_code=types.ExecutableCode(code="# Да"))]
    ),
    "several parts": user("Hello.", "There."),
    "no parts": types.Content(role="user"),
    "call": call("look", "id-1", at="x"),
    "result": response("look", PAYLOAD),
    "result of another tool": response("read", PAYLOAD),
    "result as text": response("look", "plain"),
    "empty result": response("look", {}),
    "result with a file": responses(filed_part(b"one")),
    "result with another file": responses(filed_part(b"another one")),
    "results": responses(response_part("look", PAYLOAD), response_part("look")),
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_the_cache_measures_like_the_functions(content: types.Content) -> None:
    """The first time, the second time, and beside contents that share a payload."""
    cache = RunCache()
    for other in CONTENTS.values():
        cache.fingerprint(other)
        cache.estimate_contents_tokens([other])
    for _ in range(2):
        assert cache.fingerprint(content) == fingerprint(content)
        assert cache.estimate_contents_tokens([content]) == estimate_contents_tokens(
            [content]
        )
        assert list(map(cache.measure_part, content.parts or ())) == list(
            map(measure_part, content.parts or ())
        )


def test_a_payload_in_two_places_is_not_confused() -> None:
    """A plugin may show what one tool returned as another's, or as arguments."""
    shared = {"page": 1}
    uses = [response("look"), response("read_it"), call("look"), call("read_it")]
    for content in uses:
        [part] = content.parts or []
        if part.function_call:
            part.function_call.args = shared
        elif part.function_response:
            part.function_response.response = shared
    cache = RunCache()
    for content in uses * 2:
        check_measures(cache, content)


def test_equal_ids_of_other_results_are_not_confused() -> None:
    """A result that takes the place of another in memory is measured anew."""
    cache = RunCache()
    for number in range(50):
        content = response("look", {"text": "x" * number})
        assert cache.fingerprint(content) == fingerprint(content)
        tokens = cache.estimate_contents_tokens([content])
        assert tokens == estimate_contents_tokens([content])


SMALL: dict[str, Any] = {"rows": [{"id": 1}], "of": {"page": 1}}
CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "key added": lambda payload: payload.update(next=2),
    "value replaced": lambda payload: payload.update(of="all pages"),
    "key removed": lambda payload: payload.pop("of", None),
    "list grows": lambda payload: payload["rows"].append({"id": 2}),
    "item changes": lambda payload: payload["rows"][0].update(id=12_345),
    "new item changes": lambda payload: payload["rows"][-1].update(name="x"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_result_of_this_run_that_changes_is_measured_anew(
    change: Callable[[dict[str, Any]], None],
) -> None:
    """A tool may go on with the lists that it has returned."""
    content = response("look", copy.deepcopy(SMALL))
    cache = begin_call(content, "i-1")
    check_measures(cache, content)
    for _ in range(3):
        change(payload_of(content))
        check_measures(cache, content)
        check_measures(cache, content)


@pytest.mark.parametrize("name", ["key added", "value replaced", "key removed"])
def test_an_older_result_that_is_edited_is_measured_anew(name: str) -> None:
    """Another plugin may put something else in the place of what a tool returned."""
    for content in (
        response("look", copy.deepcopy(SMALL)),
        call("look", "id-1", **copy.deepcopy(SMALL)),
        responses(response_part("look", copy.deepcopy(SMALL)), response_part("read")),
    ):
        cache = begin_call(content, "i-2")
        check_measures(cache, content)
        CHANGES[name](payload_of(content))
        check_measures(cache, content)


def test_a_result_whose_changes_cannot_be_seen_is_measured_each_time() -> None:
    """Neither tuples nor objects of other kinds show what becomes of their parts."""
    inner: list[str] = []
    content = response("look", {"rows": (inner, "x")})
    cache = begin_call(content, "i-1")
    check_measures(cache, content)
    inner.append("more")
    check_measures(cache, content)


def test_a_result_that_contains_itself_is_measured() -> None:
    """The search for what could change comes to an end."""
    payload: dict[str, Any] = {"rows": []}
    payload["rows"].append(payload)
    content = response("look", payload)
    cache = begin_call(content, "i-1")
    check_measures(cache, content)


def test_objects_that_cannot_be_compared_do_no_harm() -> None:
    """An equality of someone else's may fail; then the result is measured anew."""

    class Odd:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("boom")

        __hash__ = None  # type: ignore[assignment]

    content = response("look", {"odd": Odd()})
    cache = RunCache()
    check_measures(cache, content)
    payload_of(content)["odd"] = Odd()
    check_measures(cache, content)


def test_changes_do_not_pile_up() -> None:
    """However often a result changes, one measure of it is kept."""
    content = response("look", {"rows": []})
    cache = begin_call(content, "i-1")
    for number in range(20):
        payload_of(content)["rows"].append(number)
        check_measures(cache, content)
    assert len(cache._prints) == len(cache._payloads) == 1


def test_what_no_call_meets_any_more_is_let_go() -> None:
    """Copies that are made anew for each call are not kept to the end of the run."""
    kept = response("look", {"page": 0})
    cache = begin_call(kept, "i-2")
    for number in range(20):
        cache.begin_call([], "i-2")
        check_measures(cache, kept)
        check_measures(cache, response("look", {"page": number}))
    assert len(cache._payloads) <= 4
    assert len(cache._prints) <= 4


def test_an_event_of_another_run_hides_no_result_of_this_one() -> None:
    """A plugin may append an event of its own in the middle of a run."""
    rows: list[int] = []
    content = response("look", {"data": {"rows": rows}})
    events = [
        Event(author="agent", invocation_id="i-1", content=content),
        Event(author="app", content=user("Noted.")),
    ]
    cache = RunCache()
    for number in range(3):
        cache.begin_call(events, "i-1")
        rows.extend(range(100 * number))
        check_measures(cache, content)


def begin_call(content: types.Content, invocation_id: str) -> RunCache:
    """A cache in a run that began with a content of the run `i-1`."""
    cache = RunCache()
    known = Event(author="agent", invocation_id="i-1", content=content)
    # What has no content, such as a compaction of ADK's, is of no run.
    silent = Event(author="user", invocation_id="i-9")
    cache.begin_call([known, silent], invocation_id)
    return cache


def payload_of(content: types.Content) -> Any:
    """The arguments or the result in the first part of a content."""
    part = (content.parts or [])[0]
    if part.function_call:
        return part.function_call.args
    assert part.function_response
    return part.function_response.response


def check_measures(cache: RunCache, content: types.Content) -> None:
    """The cache says of a content as it is now what the functions say."""
    assert cache.fingerprint(content) == fingerprint(content)
    tokens = cache.estimate_contents_tokens([content])
    assert tokens == estimate_contents_tokens([content])


async def test_a_list_that_a_tool_keeps_filling_counts_whole() -> None:
    """An older result of a run has grown as well when its list comes again."""
    rows: list[str] = []

    def note() -> dict[str, Any]:
        """Notes something."""
        rows.append(f"{len(rows)} " + "note " * 100)
        return {"rows": rows}

    records: list[CallRecord] = []
    guard = ContextGuardPlugin(
        default=Threshold(context_window=1_000_000), on_call=records.append
    )
    llm = SimulatedLlm(script=[call_part("note")] * 5 + ["Done."], token_ratio=1.0)
    await Chat(guarded_agent(llm, [note]), [guard]).say("Go.")
    for record in records[1:]:
        assert record.real_tokens
        assert record.estimated_tokens >= record.real_tokens


def test_history_is_found_while_events_come_and_go() -> None:
    """The index of a run's events follows what becomes of them."""
    cache = RunCache()
    contents = [user("One."), model("Two."), user("Three."), user("An instruction.")]
    events = [event(content) for content in contents[:3]]
    other = [*events[:1], event(user("Four.")), *events[2:]]
    steps = {
        "first": events[:1],
        "new ones": events,
        "the same": list(events),
        "another in its place": other,
        "gone": events[:1],
        "none": [],
    }
    for step, loaded in steps.items():
        found = cache.find_history(contents, loaded)
        assert found == find_history(contents, loaded), step


def test_history_is_found_in_an_event_that_was_edited() -> None:
    """A plugin that rewrites a message in the session does not make it a stranger."""
    cache = RunCache()
    said = event(user("My number is 4711."))
    assert cache.find_history([user("My number is 4711.")], [said]) == [0]
    assert said.content
    said.content.parts = [types.Part(text="My number is masked.")]
    assert cache.find_history([user("My number is masked.")], [said]) == [0]


async def test_nothing_is_kept_when_a_run_has_ended() -> None:
    """A cache lives as long as its run: it holds what tools returned."""
    guard = ContextGuardPlugin(default=Threshold(context_window=8_000))
    llm = SimulatedLlm(script=[call_part("fetch"), "Done."])
    chat = Chat(guarded_agent(llm, [fetch]), [guard])
    await chat.say("Go.")
    assert llm.calls == 2
    assert len(guard._memory.caches) <= 1  # ADK 2.0 does not tell when a run ends.
    await chat.say("Again.")
    assert len(guard._memory.caches) <= 1


def fetch() -> dict[str, Any]:
    """Fetches."""
    return PAYLOAD
