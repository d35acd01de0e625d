"""What the guard keeps in session state, which anybody may have written."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from google.adk.agents.callback_context import CallbackContext
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import InMemorySessionService, Session
from google.genai import types

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
    response,
    user,
)
from tests.chats import (
    DEMAND,
    KEY,
    SUMMARY,
    guarded_chat,
    seed,
    slow,
    some_slow,
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
SMALL_STATE_BYTES = 16 * 1024
"""Conversations as short as these have the guard store no more."""
LOG = "The press in hall B was oiled and its belt was checked again. " * 12


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


async def test_state_survives_json() -> None:
    """Any session service can keep it, and another process goes on with it."""
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


@pytest.mark.parametrize("window_tokens", [16_000, *slow(200_000)])
async def test_state_takes_a_fifth_of_what_it_stands_for(window_tokens: int) -> None:
    """With a long summary, and with much to list: values, calls, the user's words."""
    count = window_tokens // 400
    steps: list[types.Content] = []
    for number in range(count):
        found = {"id": f"order-{number}", "path": f"src/part_{number}.py", "log": LOG}
        steps += [
            user(f"Please look at number {number}, and never at {number + 1}!"),
            call("look", f"{number}"),
            response("look", json.dumps(found), f"{number}"),
            model(f"It is order-{number}."),
        ]
    llm = make_llm(words(window_tokens // 10), context_window=window_tokens)
    chat = guarded_chat(llm, Threshold(context_window=window_tokens))
    await seed(chat, *steps, state=DEMAND)
    await chat.say("Go on.")

    events = await chat.events()
    covered_bytes = 0
    for event in events:
        written = guard_keys(event.actions.state_delta)
        if SUMMARY in written:
            break
        covered_bytes += len(event.model_dump_json(exclude_none=True).encode())
    written_bytes = len(json.dumps(written, ensure_ascii=False).encode())
    assert SUMMARY in written
    assert window_tokens // 4 < written_bytes <= covered_bytes / 5
    assert written_bytes < 80 * 1024


BROKEN: dict[str, Any] = {
    "huge number": 10**400,
    "nan": math.nan,
    "bytes": b"SECRET",
    "list": ["SECRET"],
    "no JSON": "SECRET {",
    "JSON of wrong types": '{"scope": 1, "request_chars": "7", "version": "1"}',
    "deep JSON": "[" * 100_000,
    "long number": '{"request_chars": ' + "9" * 5_000 + "}",
}


PIPELINE = Pipeline(
    context_window=4_000,
    summarizer_context_window=100_000,
    window=MessageWindow(),
    tool_output=ToolOutputTruncation(max_length=500),
)


@pytest.fixture(scope="module")
def before() -> Session:
    """A session that was compacted once."""
    sessions = KeptSessions()
    llm = make_llm()
    asyncio.run(compacted(llm, strategy=PIPELINE, session_service=sessions))
    return sessions.kept["session"]


@pytest.mark.quick("nan", "JSON of wrong types")
@pytest.mark.parametrize("name", some_slow(BROKEN, "bytes", "list", "long number"))
async def test_a_broken_value_costs_no_turn(
    name: str, before: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever stands under a key, the turn and the next compaction work."""
    value = BROKEN[name]
    sessions = KeptSessions()
    for key in guard_keys(before.state):
        caplog.clear()
        sessions.kept["session"] = before.model_copy(deep=True)
        sessions.kept["session"].state[key] = value

        # A new process: nothing is remembered but what state holds.
        llm = make_llm("Written anew.")
        successor = guarded_chat(llm, PIPELINE, session_service=sessions)
        assert answer_text(await successor.say("And now?"))
        await seed(successor, model(words(600)), state=DEMAND)
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
    [{RECORD: json.dumps({"version": 1})}, {SUMMARY: None}, {RECORD: None}],
    ids=["old version", "text is lost", "record is lost"],
)
async def test_a_summary_that_is_not_understood_is_ignored(
    changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Its text is nothing without what it stands for."""
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
    assert json.loads(state[RECORD])["version"] == 2


@pytest.mark.parametrize(
    ("agent", "value", "count"),
    [
        (None, True, 1),
        ("", True, 1),
        ("agent", True, 1),
        ("other", True, 0),
        (None, None, 0),
        (None, False, 0),
        (None, 1, 0),
        (None, "yes", 0),
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


# --- Cancelled runs, and threads ---------------------------------------------------


async def test_the_summary_of_a_run_that_was_cancelled_is_used() -> None:
    """The next call has it, and it is paid for once; another session never sees it."""
    was_asked = asyncio.Event()

    async def answer(request: LlmRequest) -> Reply:
        if not was_asked.is_set():
            was_asked.set()
            await asyncio.Event().wait()
        return "Done."

    llm = make_llm("The summary says so.", context_window=100_000, script=answer)
    chat = Chat(guarded_agent(llm), [ContextGuardPlugin(default=SMALL)])
    await seed(chat, user("Do it."), model(words(2_500)), state=DEMAND)
    turn = asyncio.create_task(chat.say("Go on."))
    await asyncio.wait_for(was_asked.wait(), 5)
    turn.cancel()
    with suppress(asyncio.CancelledError):
        await turn
    chat.session_id = "another"
    await chat.say("Hello.")
    assert llm.requests[-1].contents == [user("Hello.")]
    chat.session_id = "session"
    assert answer_text(await chat.say("Are you there?")) == "Done."
    assert llm.summaries == 1
    assert "The summary says so." in llm.requests[-1].text


def test_threads_may_share_a_guard(caplog: pytest.LogCaptureFixture) -> None:
    """Each has an event loop of its own; all turns are answered, and nothing fails."""
    plugin = ContextGuardPlugin(default=SMALL)
    answers = list[str]()

    def talk(thread: int) -> None:
        llm = SimulatedLlm(context_window=4_000, script=lambda _: words(300))
        chat = Chat(guarded_agent(llm), [plugin], session_id=f"{thread}")
        for _ in range(5):
            answers.append(answer_text(asyncio.run(chat.say(words(300)))))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(talk, range(8)))
    assert answers == [words(300)] * 40
    assert not guard_warnings(caplog)


# --- Many sessions at once --------------------------------------------------------

SECRET = re.compile(r"secret-\w{3}!")


class Eavesdropper(BasePlugin):
    """Notes behind the guard which secrets the sessions send."""

    def __init__(self) -> None:
        super().__init__(name="eavesdropper")
        self.heard: dict[str, set[str]] = {}

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Notes the secrets; changes nothing."""
        heard = self.heard.setdefault(callback_context.session.user_id, set())
        for content in llm_request.contents:
            heard.update(SECRET.findall(content.model_dump_json()))


def fetch(topic: str) -> list[str]:
    """Fetches notes on a topic."""
    return [f"{topic} notebook {row}" for row in range(75)]


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
    ("kind", "settings"),
    [
        (Threshold, {}),
        pytest.param(SlidingWindow, {"max_messages": 6}, marks=pytest.mark.slow),
    ],
)
async def test_sessions_at_once_do_not_mix(
    kind: type[Strategy], settings: dict[str, Any]
) -> None:
    """One guard, one model and one runner serve many sessions; each keeps its own."""
    llm = SimulatedLlm(
        context_window=2_500, token_ratio=1.0, latency_seconds=0.001, script=fetch_once
    )
    strategy = kind.model_validate({"context_window": 2_500, **settings})
    spy = Eavesdropper()
    sessions = InMemorySessionService()
    plugins = [ContextGuardPlugin(default=strategy), spy]
    chat = Chat(guarded_agent(llm, [fetch]), plugins, session_service=sessions)

    async def converse(number: int) -> dict[str, Any]:
        # Only together with the user does the id name a session.
        place: Any = {
            "user_id": f"user-{number}",
            "session_id": f"session-{number % 5}",
        }
        await sessions.create_session(app_name="app", **place)

        for turn in range(5):
            asked = user(f"Question {turn} on secret-{number:03}!, please.")
            run = chat.runner.run_async(**place, new_message=asked)
            answer = answer_text([event async for event in run])
            assert answer == f"All about secret-{number:03}!."

        session = await sessions.get_session(app_name="app", **place)
        assert session is not None
        return session.state

    states = await asyncio.gather(*(converse(number) for number in range(6)))
    assert (llm.rejections, llm.violations) == (0, 0)
    assert llm.summaries >= len(states)
    assert "recall_history" in llm.requests[-1].config.model_dump_json()
    for number, state in enumerate(states):
        own = {f"secret-{number:03}!"}
        assert spy.heard[f"user-{number}"] == own
        assert set(SECRET.findall(json.dumps(state))) == own
        assert state_bytes(state) <= SMALL_STATE_BYTES
    summaries = [record for record in llm.requests if record.is_summary]
    assert all(len(set(SECRET.findall(record.text))) == 1 for record in summaries)


async def test_a_record_of_an_earlier_version_is_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With one warning; the history is sent and summarized anew."""
    llm = SimulatedLlm()
    chat = guarded_chat(llm, SMALL)
    old = {"version": 1, "summary": {"scope": "", "ledger": ["Old."], "done": ""}}
    state = {KEY.format("record"): json.dumps(old), SUMMARY: "What was summarized."}
    await seed(chat, user("The task."), model("Yes."), state=state)
    for _ in range(2):
        await chat.say("Go on.")
    assert "What was summarized." not in llm.requests[-1].text
    assert "The task." in llm.requests[-1].text

    warned = [r for r in caplog.records if "a record of this version" in r.getMessage()]
    assert len(warned) == 1

    await chat.set_state(DEMAND)
    await chat.say(words(2_000))
    assert json.loads((await chat.state())[KEY.format("record")])["version"] == 2
