"""A shift: a session of several turns, which may be interrupted, and its judge.

In each turn the agent does some more jobs. Each of its requests is judged by what the
session knew when the turn began, whatever has interrupted the turns before.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.adk.agents.run_config import RunConfig
from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import BaseSessionService
from google.adk.tools.long_running_tool import LongRunningFunctionTool
from google.genai import types

from contextguard_adk import PinTool, Threshold, TodosTool
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import Reply, SimulatedLlm, SimulatedProviderError, call
from contextguard_adk.testing.provider import list_content_texts
from tests.acting import ActingAgent, find_named, make_jobs
from tests.builders import SUMMARY_BEGIN, answer_text
from tests.chats import SUMMARY, guarded_chat, text_of
from tests.rewriting import SECRET
from tests.talks import MARKER, message

WINDOW = 4_000
"""Threshold 3,200 tokens; the result of a job has 300 to 800."""

SHIFT = Threshold(context_window=WINDOW, summarizer_context_window=100_000)
AHEAD = SHIFT.model_copy(update={"ahead": 0.5})

RULE = "Never ship on a Sunday."
TODO = "Count the pallets"
KEPT = {
    "the pin": re.compile(rf'\n- {RULE}|"text":"{RULE}'),
    "the todo": re.compile(rf'\n- \[pending\] {TODO}|{{"todos":\[.*{TODO}'),
    "the open call": re.compile(r'approve\(what=doors\): no ans|{"what":"doors"}'),
}
"""What each request has once the shift is set up, beside its summary or in a call."""

_START = "Set up the shift."
_ASKED = re.compile(r"Handle the jobs up to place (\d+)\.")
_ANSWER = re.compile(r"All (\d+) are done\.")
_SUMMARY_NAME = re.compile(r"summary-\w+!")
_MAX_TRIES = 40
_MAX_SECONDS = 60
_MAX_CALLS = 40


@dataclass(frozen=True)
class Counts:
    """What happened in a shift.

    Attributes:
        lost_turns: Turns that nobody interrupted, without their answer.
        lost_words: Messages of the user, pins, todos and open calls that a request does
            not have, although the session had them when the turn began.
        repeated_calls: Calls for a job whose result the session or the turn had.
        wrong_summaries: Summaries, in a request or in session state, that no model has
            written, and requests with two summaries, or with messages or calls that a
            rewind took back.
        paid: Calls to the summarizer.
        interrupted: Turns that were cancelled, killed or failed, or came too late.
    """

    lost_turns: int = 0
    lost_words: int = 0
    repeated_calls: int = 0
    wrong_summaries: int = 0
    paid: int = 0
    interrupted: int = 0


class Notes:
    """What happened in a shift, in a file that outlives a killed process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def add(self, kind: str, text: str = "") -> None:
        """Notes something at once; `kind` is a field of `Counts`, or another word."""
        with self.path.open("a") as file:
            file.write(json.dumps([kind, text]) + "\n")

    def texts(self, kind: str) -> list[str]:
        """The texts that were noted of a kind, the oldest first."""
        notes = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [text for noted, text in notes if noted == kind]

    def count(self) -> Counts:
        """How often each kind was noted."""
        return Counts(**{kind: len(self.texts(kind)) for kind in vars(Counts())})

    def faults(self) -> dict[str, list[str]]:
        """All that went wrong, by kind; empty if nothing did."""
        kinds = vars(Counts()).keys() - {"paid", "interrupted"}
        return {kind: self.texts(kind) for kind in kinds if self.texts(kind)}


def ask(number: int, asked: int) -> str:
    """The user's message of a turn; the first one also has the shift set up."""
    begin = "" if number else f" {_START}"
    marked = message(number, words=5)
    return f"{marked}({SECRET}) Handle the jobs up to place {asked}.{begin}"


def find_marker(number: int) -> str:
    """The marker of such a message."""
    [marker] = set[str](MARKER.findall(ask(number, 0)))
    return marker


def is_answer(text: str, asked: int) -> bool:
    """Whether a text says that the jobs up to a place are done, or even more."""
    found = _ANSWER.fullmatch(text)
    return found is not None and int(found[1]) >= asked


class ServerError(SimulatedProviderError):
    """What a client raises where the provider fails."""

    status_code = 500


def is_too_late(error: Exception) -> bool:
    """Whether a database has refused an event, as another worker was faster."""
    # The class of the error, which not every ADK has, is none of ADK's public names.
    return isinstance(error, ValueError) and "session" in str(error)


def approve(what: str) -> None:
    """Asks a person, who says nothing."""


def live_events(events: Iterable[Event]) -> list[Event]:
    """The events without those that a rewind took back."""
    live: list[Event] = []
    for event in events:
        back_to = event.actions.rewind_before_invocation_id
        if back_to:
            begin = next(n for n, e in enumerate(live) if e.invocation_id == back_to)
            del live[begin:]
        else:
            live.append(event)

    return live


def find_markers(events: Iterable[Event]) -> set[str]:
    """The markers of the user's messages."""
    said = [each.content for each in events if each.author == "user" and each.content]
    return set(MARKER.findall("\n".join(text_of(content) for content in said)))


class Worker:
    """A guarded agent of a process or plugin of its own, in a session of the shift.

    Its summaries tell which jobs were done, as far as the summarizer was told. What a
    request still has of the user's messages and the like, it has from the guard.

    Attributes:
        chat: The session.
        notes: What happened.
        is_failing: Whether the provider fails for requests with a summary.
        load: Returns how the session is loaded for the next turn; None for whole.
    """

    def __init__(
        self,
        sessions: BaseSessionService,
        notes: Notes,
        strategy: Strategy = SHIFT,
        *,
        guard: dict[str, Any] | None = None,
        before: Sequence[BasePlugin] = (),
        session_id: str = "session",
        summary_seconds: float = 0,
    ) -> None:
        self.notes = notes
        self.is_failing = False
        self.load: Callable[[], Any] | None = None
        self._summary_seconds = summary_seconds
        self._acting = ActingAgent(make_jobs(99))
        self._is_set_up = False
        self._said: set[str] = set()
        self._taken_back: set[str] = set()
        self._done: set[str] = set()

        llm = SimulatedLlm(
            context_window=100_000,  # Of the summarizer; the guard keeps to `WINDOW`.
            token_ratio=1.0,
            script=self._reply,
            summary_replies=self._summarize,
        )
        keeping = [PinTool(), TodosTool(), LongRunningFunctionTool(approve)]
        self.chat = guarded_chat(
            llm,
            strategy,
            guard=guard,
            agent={"tools": [*self._acting.tools, *keeping]},
            before=before,
            session_service=sessions,
            session_id=session_id,
            run_config=RunConfig(max_llm_calls=_MAX_CALLS),
        )

    async def say(self, number: int, asked: int) -> None:
        """Plays a turn in which the jobs up to a place are to be done.

        If another worker was faster, the message is sent again, as callers do.
        """
        for _ in range(_MAX_TRIES):
            try:
                await self.look(number)
                run = self.attempt(number, asked)
                answer = answer_text(await asyncio.wait_for(run, _MAX_SECONDS))
                await self._check_state()
            except ServerError as error:
                self.notes.add("interrupted", str(error))
                return
            except Exception as error:  # noqa: BLE001 - it is noted, whatever it is.
                if is_too_late(error):
                    self.notes.add("interrupted", str(error))
                    await asyncio.sleep(0.01)
                    continue
                answer = repr(error)

            if not is_answer(answer, asked):
                self.notes.add("lost_turns", f"turn {number}: {answer}")
            return

        self.notes.add("lost_turns", f"turn {number}: others are always faster")

    async def attempt(self, number: int, asked: int) -> list[Event]:
        """Sends the message of a turn."""
        if self.load:
            config = await self.load()
            self.chat.run_config = RunConfig(
                max_llm_calls=_MAX_CALLS, get_session_config=config
            )
        return await self.chat.say(ask(number, asked))

    async def look(self, number: int) -> None:
        """Reads in the session what the requests of the next turn have to show."""
        self._acting.executed.clear()
        events = await self.chat.events()
        live = live_events(events)
        self._said = find_markers(live) | {find_marker(number)}
        results = [each for event in live for each in event.get_function_responses()]
        self._is_set_up = any(each.name == "pin" for each in results)

        calls = [each for event in live for each in event.get_function_calls()]
        answered = {each.id for each in results}
        self._done = self._find_jobs(each for each in calls if each.id in answered)
        all_calls = [each for event in events for each in event.get_function_calls()]
        jobs_taken_back = self._find_jobs(all_calls) - self._find_jobs(calls)
        self._taken_back = find_markers(events) - self._said | jobs_taken_back

    async def rewind(self, number: int) -> None:
        """Takes the session back to before a turn, if it has the turn's message."""
        marker = find_marker(number)
        events = live_events(await self.chat.events())
        runs = [each.invocation_id for each in events if marker in find_markers([each])]
        for invocation_id in runs[:1]:
            await self.chat.runner.rewind_async(
                user_id=self.chat.user_id,
                session_id=self.chat.session_id,
                rewind_before_invocation_id=invocation_id,
            )

    def _find_jobs(self, calls: Iterable[types.FunctionCall]) -> set[str]:
        args = [each.args or {} for each in calls]
        values = {str(value) for each in args for value in each.values()}
        return {job.name for job in self._acting.jobs if job.name in values}

    async def _check_state(self) -> None:
        state = await self.chat.state()
        stored = state.get(SUMMARY)
        if stored and stored not in self.notes.texts("paid"):
            self.notes.add("wrong_summaries", f"stored: {stored}")

    async def _summarize(self, request: LlmRequest) -> str:
        text = "\n".join(list_content_texts(request.contents))
        done = [job.name for job in self._acting.jobs if job.name in text]
        summary = f"Written as summary-{uuid.uuid4().hex}! Done: {', '.join(done)}."
        self.notes.add("paid", summary)
        await asyncio.sleep(self._summary_seconds)
        return summary

    def _reply(self, request: LlmRequest) -> Reply:
        """Does the first job that the request does not show as done."""
        text = "\n".join(list_content_texts(request.contents))
        self._judge(text)
        if self.is_failing and SUMMARY_BEGIN in text:
            return ServerError("500 Server error")
        if _START in text_of(request.contents[-1]):
            todos = [{"content": TODO, "status": "pending"}]
            kept = [call("pin", text=RULE), call("todos", todos=todos)]
            return [*kept, call("approve", what="doors")]

        asked = max((int(place) for place in _ASKED.findall(text)), default=0)
        jobs = self._acting.jobs[:asked]
        shown = find_named(request.contents, [job.name for job in jobs])
        waiting = [job for job in jobs if job.name not in shown]
        if not waiting:
            return f"All {asked} are done."
        job = waiting[0]
        if job.name in self._done.union(self._acting.executed):
            self.notes.add("repeated_calls", job.name)
        return call(job.tool, **job.args)

    def _judge(self, text: str) -> None:
        """Notes what a request lacks, and what is wrong with its summary."""
        lost = {marker for marker in self._said if marker not in text}
        if self._is_set_up:
            lost |= {name for name, form in KEPT.items() if not form.search(text)}
        for name in sorted(lost):
            self.notes.add("lost_words", name)

        written = "\n".join(self.notes.texts("paid"))
        names = _SUMMARY_NAME.findall(text)
        is_one = len(names) == text.count(SUMMARY_BEGIN) <= 1
        is_known = all(name in written for name in names)
        taken_back = self._taken_back.difference(self._acting.executed)
        back = sorted(name for name in taken_back if name in text)
        if back or not (is_one and is_known):
            self.notes.add("wrong_summaries", f"sent: {names} {back}")
