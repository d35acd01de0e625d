"""What the guard keeps: in session state, which anybody may have written, as little as
it needs; in process nothing of a conversation once its run is over."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import math
import re
import sys
import threading
import time
import tracemalloc
import types as python_types
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents.callback_context import CallbackContext
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import InMemorySessionService

import contextguard_adk
from contextguard_adk import (
    ContextGuardPlugin,
    Pipeline,
    SlidingWindow,
    Threshold,
    request_compaction,
)
from contextguard_adk.strategies import MessageWindow, Strategy, ToolOutputTruncation
from contextguard_adk.testing import Reply, SimulatedLlm
from tests.builders import (
    Chat,
    KeptSessions,
    answer_text,
    call,
    call_part,
    guarded_agent,
    model,
    queued_tool,
    response,
    user,
)
from tests.chats import (
    DEMAND,
    HEURISTIC,
    KEY,
    REAL,
    SUMMARY,
    guarded_chat,
    seed,
    take_apart,
    words,
)
from tests.guarded import SMALL

CONVERSATION = [
    user("The task."),
    call("look", "1"),
    response("look", words(2_000), "1"),
    model(words(4_000)),
]
WIDE = Threshold(context_window=20_000)
MAX_STATE_BYTES = 16 * 1024


def make_llm(summary: str = "All is known.", **settings: Any) -> SimulatedLlm:
    """A model whose summaries all say the same."""
    settings = {"context_window": 20_000, "token_ratio": 1.0, **settings}
    return SimulatedLlm(summary_replies=lambda _: summary, **settings)


async def compacted(llm: SimulatedLlm, **settings: Any) -> Chat:
    """A chat whose history was compacted."""
    chat = guarded_chat(llm, **settings)
    await seed(chat, *CONVERSATION, state=DEMAND)
    await chat.say("Go on.")
    assert (await chat.state())[SUMMARY]
    return chat


def guard_keys(state: dict[str, Any]) -> dict[str, Any]:
    """What the guard keeps in session state."""
    return {key: value for key, value in state.items() if "context_guard" in key}


def guard_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the guard has warned of."""
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    return [r.getMessage() for r in warnings if r.name.startswith("contextguard")]


# --- Session state ----------------------------------------------------------------


async def test_values_are_written_only_when_they_change() -> None:
    """A turn without a compaction changes the counts; no key is reset needlessly."""
    chat = await compacted(make_llm())
    count = len(await chat.events())
    await chat.say("And now?")
    events = (await chat.events())[count:]
    written = {key for e in events for key in guard_keys(e.actions.state_delta)}
    assert {REAL, HEURISTIC} <= written <= {REAL, HEURISTIC, *DEMAND}
    uncounted = await compacted(make_llm(usage="never"))
    assert None not in guard_keys(await uncounted.state()).values()


async def test_a_count_under_the_other_form_of_a_key_ends_with_a_compaction() -> None:
    """A 0 hides what a `state_schema` may forbid to change."""
    guard = {"state_keys": "namespaced"}
    chat = guarded_chat(make_llm(usage="never"), WIDE, guard=guard)
    counts = {REAL: 5_000, HEURISTIC: 4_000}
    await seed(chat, *CONVERSATION, state={**DEMAND, **counts})
    await chat.say("Go on.")
    state = await chat.state()
    names = [f"context_guard:{x}:agent" for x in ("real_tokens", "last_heuristic")]
    assert [state[name] for name in (*names, *counts)] == [0, 0, *counts.values()]


async def test_state_survives_json() -> None:
    """Any session service can keep it, and another process goes on with it; in another
    session it is not used."""
    llm = make_llm()
    chat = await compacted(llm)
    state = guard_keys(await chat.state())
    stored = json.loads(json.dumps(state, allow_nan=False))
    assert stored == state
    await chat.set_state(stored)
    sent = llm.requests[-1].contents
    await guarded_chat(llm, session_service=chat.sessions).say("And now?")
    assert llm.requests[-1].contents[: len(sent)] == sent
    other = guarded_chat(llm, session_service=chat.sessions, session_id="other")
    await seed(other, state=state)
    await other.say("Hello.")
    assert llm.requests[-1].contents == [user("Hello.")]


BROKEN: dict[str, Any] = {
    "number": 7,
    "huge number": 10**400,
    "nan": math.nan,
    "none": None,
    "bytes": b"SECRET",
    "list": ["SECRET"],
    "no JSON": "SECRET {",
    "JSON list": "[1]",
    "JSON of wrong types": '{"scope": 1, "request_chars": "7", "version": "1"}',
    "deep JSON": "[" * 100_000,
    "long number": '{"request_chars": ' + "9" * 5_000 + "}",
}


@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN)
async def test_a_broken_value_costs_no_turn(
    value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever stands under a key, the turn and the next compaction work, and at most
    one warning tells of it."""
    pipeline = Pipeline(
        context_window=4_000,
        summarizer_context_window=100_000,
        window=MessageWindow(),
        tool_output=ToolOutputTruncation(max_length=500),
    )
    sessions = KeptSessions()
    await compacted(make_llm(), strategy=pipeline, session_service=sessions)
    before = sessions.kept["session"].model_copy(deep=True)
    for key in guard_keys(before.state):
        caplog.clear()
        sessions.kept["session"] = before.model_copy(deep=True)
        sessions.kept["session"].state[key] = value
        # A new process: nothing is remembered but what state holds.
        llm = make_llm("Written anew.")
        successor = guarded_chat(llm, pipeline, session_service=sessions)
        assert answer_text(await successor.say("And now?"))
        await seed(successor, user(words(600)), state=DEMAND)
        assert answer_text(await successor.say("And then?"))
        assert (await successor.state())[SUMMARY].startswith("Written anew.")
        assert "Written anew." in llm.requests[-1].text
        assert llm.violations == llm.rejections == 0
        warnings = guard_warnings(caplog)
        assert len(warnings) <= 1
        assert "SECRET" not in "".join(warnings)


RECORD = KEY.format("record")


@pytest.mark.parametrize(
    "changed",
    [{RECORD: json.dumps({"version": 999})}, {SUMMARY: None}, {RECORD: None}],
    ids=["unknown version", "text is lost", "record is lost"],
)
async def test_a_summary_that_is_not_understood_is_ignored(
    changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Its text is nothing without what it stands for, and the other way round: the
    originals go out again, and the next compaction works."""
    llm = make_llm()
    chat = await compacted(llm)
    await chat.set_state(changed)
    chat = guarded_chat(llm, WIDE, session_service=chat.sessions)
    for _ in range(2):
        assert answer_text(await chat.say("And now?"))
        assert "The task." in llm.requests[-1].text
        assert "All is known." not in llm.requests[-1].text
    if any(changed.values()):
        [warning] = guard_warnings(caplog)
        assert RECORD in warning
    await chat.set_state(DEMAND)
    await chat.say("And now?")
    state = await chat.state()
    assert state[SUMMARY].startswith("All is known.")
    assert json.loads(state[RECORD])["version"] != 999


@pytest.mark.parametrize(
    ("agent", "value", "count"),
    [
        *((None, True, 1), ("", True, 1), ("agent", True, 1), ("other", True, 0)),
        *((None, None, 0), (None, False, 0), (None, 1, 0), (None, "yes", 0)),
    ],
)
async def test_requested_compaction(
    agent: str | None, value: object, count: int
) -> None:
    """True reaches its agent, or whoever comes first, and is served once."""
    state: dict[str, Any] = {}
    request_compaction(state, agent)
    llm = make_llm()
    chat = guarded_chat(llm, WIDE)
    await seed(chat, *CONVERSATION, state=dict.fromkeys(state, value))
    for _ in range(2):
        await chat.say("Go on.")
    assert llm.summaries == count


# --- Memory of the process --------------------------------------------------------

SAID = "what-the-model-said"
SUMMED_UP = "what-the-summary-says"
NOT_OURS = (type, python_types.ModuleType, python_types.FunctionType)


def holds(plugin: ContextGuardPlugin, text: str) -> bool:
    """Whether a text is in anything that a plugin holds."""
    gc.collect()
    seen, waiting = set[int](), list[object]([plugin])
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, NOT_OURS):
            continue
        seen.add(id(found))
        if isinstance(found, str) and text in found:
            return True
        waiting.extend(gc.get_referents(found))
    return False


class Talk:
    """A conversation that is compacted with its first message."""

    def __init__(self, strategy: Strategy = SMALL, has_tools: bool = False) -> None:
        self.reply: Reply | None = "Done."
        self.was_asked = asyncio.Event()
        summary = f"A summary: {SUMMED_UP}."
        self.llm = make_llm(summary, context_window=100_000, script=self._answer)
        self.plugin = ContextGuardPlugin(default=strategy)
        tools = [queued_tool("look", [])] if has_tools else []
        self.chat = Chat(guarded_agent(self.llm, tools), [self.plugin])

    async def _answer(self, request: LlmRequest) -> Reply:
        self.was_asked.set()
        if self.reply is None:
            await asyncio.Event().wait()
        assert self.reply is not None
        return self.reply

    async def say(self, tokens: int = 2_500, said: str = SAID) -> None:
        """Puts a history into the session, and has a turn that compacts it."""
        await seed(self.chat, user("Do it."), model(words(tokens, said)), state=DEMAND)
        assert answer_text(await self.chat.say("Go on.")) == "Done."

    async def break_off(self, is_cancelled: bool = True) -> None:
        """Says something; the run fails, or is cancelled while the model works."""
        self.reply = None if is_cancelled else ConnectionError("reset")
        self.was_asked.clear()
        turn = asyncio.create_task(self.chat.say("Go on."))
        await asyncio.wait_for(self.was_asked.wait(), 5)
        if is_cancelled:
            turn.cancel()
        with suppress(ConnectionError, asyncio.CancelledError):
            await turn
        for _ in range(10):  # ADK's own tasks end a little later.
            await asyncio.sleep(0)
        self.reply = "Done."


async def test_nothing_stays_of_a_run_that_has_ended() -> None:
    """Contents and summary are the session's alone, and go with that; no later turn
    that is cancelled takes the summary back."""
    talk = Talk()
    await talk.say()
    assert SUMMED_UP in (await talk.chat.state())[SUMMARY]
    for is_broken_off in (False, True):
        if is_broken_off:
            await talk.break_off()
        assert not holds(talk.plugin, SAID)
        assert not holds(talk.plugin, SUMMED_UP)


@pytest.mark.parametrize("has_recall", [False, True])
async def test_nothing_stays_of_a_run_that_planned_a_summary(has_recall: bool) -> None:
    """It is cancelled before the summary that would be written ahead of time."""
    talk = Talk(Threshold(context_window=10_000, ahead=0.5), has_recall)
    if has_recall:
        await talk.say(4_500, "Something else")
    await seed(talk.chat, user("Do it."), model(words(4_500, SAID)))
    await talk.break_off()
    assert talk.llm.summaries == has_recall
    declared = talk.llm.requests[-1].config.model_dump_json()
    assert ("recall_history" in declared) is has_recall
    assert not holds(talk.plugin, SAID)


@pytest.mark.parametrize("way", ["failed", "cancelled", "deleted"])
async def test_only_the_paid_summary_stays_of_a_run_that_was_broken_off(
    way: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call uses it, and it is paid for once; after that it is the session's
    alone. It waits for ten minutes: its session may have been deleted."""
    # What ADK logs of a failure would hold the whole run.
    caplog.set_level(logging.CRITICAL + 1, "google_adk")
    talk = Talk()
    await seed(talk.chat, user("Do it."), model(words(2_500, SAID)), state=DEMAND)
    await talk.break_off(is_cancelled=way != "failed")
    assert not holds(talk.plugin, SAID)
    # The event that tells of a failure may have brought it to the session.
    is_stored = bool((await talk.chat.state()).get(SUMMARY))
    assert holds(talk.plugin, SUMMED_UP) is not is_stored
    if way == "deleted":
        clock = time.monotonic
        talk.chat.session_id = "another"
        await talk.chat.say("Hello.")
        assert holds(talk.plugin, SUMMED_UP)
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 601)
        await talk.chat.say("Hello.")
    else:
        assert answer_text(await talk.chat.say("Are you there?")) == "Done."
        assert talk.llm.summaries == 1
        assert SUMMED_UP in talk.llm.requests[-1].text
        assert not holds(talk.plugin, SAID)
    assert not holds(talk.plugin, SUMMED_UP)


@pytest.mark.slow
def test_threads_may_share_a_guard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No turn ends by it, and nothing of its own fails, whatever is cancelled."""
    plugin = ContextGuardPlugin(default=SMALL)
    failures, turns = list[Exception](), list[int]()

    def talk(thread: int) -> None:
        llm = SimulatedLlm(context_window=4_000, script=lambda _: words(300))
        chat = Chat(guarded_agent(llm), [plugin])
        for turn in range(12):
            chat.session_id = f"{thread}"
            deadline = 0.05 if turn % 5 == 0 else 60
            try:
                with suppress(TimeoutError):
                    asyncio.run(asyncio.wait_for(chat.say(words(300)), deadline))
            except Exception as error:  # noqa: BLE001 - it is what is looked for.
                failures.append(error)
            turns.append(thread)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=talk, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not failures
    assert len(turns) == 192
    assert not [r for r in caplog.records if r.name == "contextguard_adk.plugin"]


# --- Many sessions at once, and very long ones ------------------------------------

SECRET = re.compile(r"secret-\w{3}!")


class Eavesdropper(BasePlugin):
    """Notes behind the guard which secrets the sessions send, and which requests are
    still in memory."""

    def __init__(self) -> None:
        super().__init__(name="eavesdropper")
        self.heard: dict[str, set[str]] = {}
        self.requests: list[weakref.ref[LlmRequest]] = []

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Notes the secrets; changes nothing."""
        self.requests.append(weakref.ref(llm_request))
        heard = self.heard.setdefault(callback_context.session.user_id, set())
        for content in llm_request.contents:
            heard.update(SECRET.findall(content.model_dump_json()))


def fetch(topic: str) -> dict[str, Any]:
    """Fetches notes on a topic."""
    return {"topic": topic, "notes": [f"{topic} notebook {row}" for row in range(50)]}


def fetch_once(request: LlmRequest) -> Reply:
    """Fetches what the newest content speaks of, then answers."""
    newest = request.contents[-1]
    secret = SECRET.findall(newest.model_dump_json())[-1]
    if any(part.function_response for part in newest.parts or ()):
        return f"All about {secret}."
    return call_part("fetch", topic=secret)


def state_bytes(state: dict[str, Any]) -> int:
    """What the guard keeps besides the text of the summary."""
    kept = {key: value for key, value in guard_keys(state).items() if key != SUMMARY}
    return sum(len(str(value).encode()) for value in kept.values())


@pytest.mark.parametrize(
    ("kind", "settings"), [(Threshold, {}), (SlidingWindow, {"max_messages": 6})]
)
async def test_sessions_at_once_do_not_mix(
    kind: type[Strategy], settings: dict[str, Any]
) -> None:
    """One guard, one model and one runner serve many sessions; each keeps its own, and
    no request waits for the collector."""
    llm = SimulatedLlm(
        context_window=2_500, token_ratio=1.0, latency_seconds=0.001, script=fetch_once
    )
    strategy = kind.model_validate({"context_window": 2_500, **settings})
    spy, sessions = Eavesdropper(), InMemorySessionService()
    plugins = [ContextGuardPlugin(default=strategy), spy]
    chat = Chat(guarded_agent(llm, [fetch]), plugins, session_service=sessions)

    async def converse(number: int) -> dict[str, Any]:
        # Only together with the user does the id name a session.
        place: Any = {
            "user_id": f"user-{number}",
            "session_id": f"session-{number % 5}",
        }
        await sessions.create_session(app_name="app", **place)
        for turn in range(7):
            asked = user(f"Question {turn} on secret-{number:03}!, please.")
            run = chat.runner.run_async(**place, new_message=asked)
            answer = answer_text([event async for event in run])
            assert answer == f"All about secret-{number:03}!."
        session = await sessions.get_session(app_name="app", **place)
        assert session is not None
        return session.state

    gc.disable()
    try:
        states = await asyncio.gather(*map(converse, range(12)))
        assert not [made for made in spy.requests if made() is not None]
    finally:
        gc.enable()
    assert (llm.rejections, llm.violations) == (0, 0)
    assert llm.summaries >= len(states)
    assert "recall_history" in llm.requests[-1].config.model_dump_json()
    for number, state in enumerate(states):
        own = {f"secret-{number:03}!"}
        assert spy.heard[f"user-{number}"] == own
        assert set(SECRET.findall(json.dumps(state))) == own
        assert state_bytes(state) <= MAX_STATE_BYTES
    summaries = [record for record in llm.requests if record.is_summary]
    assert all(len(set(SECRET.findall(record.text))) == 1 for record in summaries)


@pytest.mark.slow
async def test_many_calls_leave_memory_and_state_flat() -> None:
    """After the first tenth our own memory grows no more, and state stays small."""
    answers = itertools.count(1)
    llm = make_llm(
        "So far so good.",
        context_window=1_200,
        script=lambda request: f"Answer {next(answers)}: {'words ' * 60}",
        keep_requests=1,
    )
    strategy, sessions = Threshold(context_window=1_200), KeptSessions()
    chat = guarded_chat(llm, strategy, session_service=sessions)
    session, sizes = await chat.session(), []
    tracemalloc.start()
    try:
        for turn in range(500):
            await chat.say(f"Message {turn}: {'please ' * 20}")
            assert f"Message {turn}:" in llm.requests[-1].text
            assert state_bytes(session.state) <= MAX_STATE_BYTES
            del session.events[:-16]  # A database has the rest.
            if turn + 1 in (50, 500):
                sizes.append(own_bytes())
    finally:
        tracemalloc.stop()
    assert (llm.rejections, llm.violations) == (0, 0)
    assert llm.summaries >= 10
    assert sizes[1] - sizes[0] <= 64 * 1024


def own_bytes() -> int:
    """What is allocated by this package's own code and still there."""
    gc.collect()
    folder = Path(contextguard_adk.__file__).parent
    ours = tracemalloc.Filter(True, str(folder / "*"))
    simulation = tracemalloc.Filter(False, str(folder / "testing" / "*"))
    snapshot = tracemalloc.take_snapshot().filter_traces([ours, simulation])
    return sum(trace.size for trace in snapshot.traces)


async def test_state_of_a_huge_history_is_small() -> None:
    """Thousands of messages, whatever they hold, take 16 KiB beside the summary."""
    kinds = ["words " * 60, '"\\\x01' * 130, "漢字" * 200]
    speak, sessions = (user, model), KeptSessions()
    llm = make_llm(context_window=1_000_000)
    strategy = Threshold(context_window=1_000_000)
    chat = guarded_chat(llm, strategy, session_service=sessions)
    await chat.tell(speak[n % 2](f"{n} {kinds[n % 3]}") for n in range(3_000))
    await chat.set_state(DEMAND)
    await chat.say("Go on.")
    assert len(take_apart(llm.requests[-1].contents)) == 2
    assert state_bytes(await chat.state()) <= MAX_STATE_BYTES
    assert llm.summaries >= 1
