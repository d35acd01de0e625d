"""`contextguard why`: where words stood, when they left the requests, what has them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from google.adk.events.event import Event
from google.adk.sessions import Session
from google.genai import types
from rich.console import Console

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.contents import parts_of
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._runtime.runs import branch_scope
from contextguard_adk._support.log import one_line
from contextguard_adk._tools import recordings, replay, terminal
from contextguard_adk._tools.replay import ReplaySettings
from contextguard_adk._tools.replaying.calls import list_calls
from contextguard_adk._tools.replaying.need import read_part
from contextguard_adk._tools.requests import Rebuilder, Rebuilt
from contextguard_adk._tools.terminal import CommandError, print_line
from contextguard_adk.records import REASONS

MAX_PLACES = 5
AS_SAID = "the message itself"
RECALLED = f"a result of {RECALL_TOOL}"
PAGE = "https://contextguard-adk.github.io/contextguard-adk/why-it-forgot/"
GONE = {
    "replaced": "nowhere in the request: the messages with it were left out",
    "hidden": "nowhere in the request: a result is shown without the part that has it",
    "absent": "nowhere in the request, nor in what the guard left out of it",
}
HINTS = {
    AS_SAID: "The model has it as it was said: the guard has taken nothing away.",
    RECALLED: "The agent has read it again, until that result is left out as well.",
    "beside": "The model has it, but not as it was said. To keep more, pin it.",
    "replaced": f"The agent can read it with {RECALL_TOOL}. To have it always, pin it.",
    "hidden": f"The agent can read it with {RECALL_TOOL}. `preview_tokens` shows more.",
    "absent": "Not the guard's doing: a rewind, ADK's own compaction, or another view.",
}


@dataclass(frozen=True)
class Place:
    """An event that holds the words; its number counts all events from 1."""

    event: int
    time: str
    what: str


@dataclass
class Period:
    """Calls of an agent whose requests had the words in the same places.

    `gone` says where they were otherwise, as a key of `GONE`; "" where a request had
    them. `compaction` has the figures of the one at the first of the calls, if any.
    """

    agent: str
    first_call: int
    last_call: int
    holders: list[str]
    gone: str
    compaction: dict[str, Any] | None

    def describe(self) -> Iterator[str]:
        """Yields a line on the compaction, if any, and one on the calls."""
        if facts := self.compaction:
            reason = one_line(str(facts.get("reason")))
            sizes = (
                recordings.read_number(facts.get(f"tokens_{x}"))
                for x in ("before", "after")
            )
            tokens = " → ".join(f"{size:,.0f}" for size in sizes)
            why = REASONS.get(reason, reason)
            yield f"call {self.first_call:,} was compacted: {why}, {tokens} tokens"
        calls = f"call {self.first_call:,}"
        if self.last_call > self.first_call:
            calls = f"calls {self.first_call:,} to {self.last_call:,}"
        held = f"in the request: {', '.join(self.holders)}"
        yield f"{calls}: {held if self.holders else GONE[self.gone]}"


def run_why(words: str, as_json: bool, **recording: Any) -> None:
    with terminal.quiet_logs(Console(stderr=True)):
        session, settings = replay.read_recording(**recording)
        finder = _Finder(words, session)
        places = list(finder.list_places(session))
        periods = asyncio.run(find_periods(session, settings, finder)) if places else []
    if as_json:
        found = {"places": [*map(asdict, places)], "calls": [*map(asdict, periods)]}
        print(json.dumps(found, indent=2))
        return
    print_line(str(recordings.describe_session(session)), "dim")
    for line in _describe(words, places, periods):
        print_line(line)


def _describe(words: str, places: list[Place], periods: list[Period]) -> Iterator[str]:
    said = repr(one_line(words))
    if not places:
        yield f"{said} stands in no event of this session: nobody has said it."
        return
    yield f"{said} stands in:"
    for place in places[:MAX_PLACES]:
        yield f"  event {place.event:,}, {place.time} UTC: {place.what}"
    if (more := len(places) - MAX_PLACES) > 0:
        yield f"  and {more:,} more event{'s'[: more - 1]}"
    last = {period.agent: period for period in periods}
    for agent in last:
        yield f"Requests of {agent}:"
        own = [period for period in periods if period.agent == agent]
        yield from (f"  {line}" for period in own for line in period.describe())
        holders = last[agent].holders
        gone = last[agent].gone
        usual = next((h for h in (AS_SAID, RECALLED) if h in holders), "beside")
        yield f"  {HINTS[gone or usual]}"
    if not last:
        yield "No model was called with it since, or it was called with no token count."
    yield f"What to do: {PAGE}"


async def find_periods(
    session: Session, settings: ReplaySettings, finder: _Finder
) -> list[Period]:
    """Rebuilds the requests, and says of each where it had the words."""
    rebuilder = Rebuilder(session, settings.guard, settings.window_tokens)
    last = dict[str, Period]()
    periods = list[Period]()
    calls = list(enumerate(list_calls(session), 1))
    if settings.agent not in {None, *(call.event.author for _, call in calls)}:
        raise CommandError(f"no model call of agent {settings.agent!r} is recorded")
    for number, call in terminal.show_progress(calls, "Reading"):
        rebuilt = await rebuilder.rebuild(call)
        name = call.event.author
        scope = branch_scope(call.event)
        if settings.agent not in (None, name):
            continue
        owner = f"{name}@{scope}" if scope else name
        holders, gone = finder.search(rebuilt)
        before = last.get(owner)
        done = recordings.read_facts(call.event).get("compaction")
        if before is None and gone == "absent":
            continue  # It was not said yet.
        if before and (before.holders, before.gone) == (holders, gone):
            before.last_call = number
            continue
        done = done if before and isinstance(done, dict) else None
        period = Period(owner, number, number, holders, gone, done)
        last[owner] = period
        periods.append(period)
    return periods


class _Finder:
    """Looks for words, whatever their case and the blanks between them."""

    def __init__(self, words: str, session: Session) -> None:
        self._words = _plain(words)
        self._memo = Memo(session.events)
        if not self._words:
            raise CommandError('give the words to look for: why SESSION "words"')

    def list_places(self, session: Session) -> Iterator[Place]:
        """Yields the events that hold the words."""
        for number, event in enumerate(session.events, 1):
            parts = [] if event.partial else parts_of(event.content)
            if part := next(filter(self._has, parts), None):
                time = f"{recordings.read_time(event.timestamp):%F %T}"
                yield Place(number, time, _name(event, part))

    def search(self, rebuilt: Rebuilt) -> tuple[list[str], str]:
        """Returns what in a request holds the words; else where they are."""
        parts = [part for each in rebuilt.messages for part in parts_of(each)]
        found = [*filter(self._has, parts)]
        recalled = [part for part in found if _is_recalled(part)]
        holders = [AS_SAID] * (len(found) > len(recalled)) + [RECALLED] * bool(recalled)
        beside = rebuilt.beside.items()
        holders += [name for name, text in beside if self._words in _plain(text)]
        gone = "" if holders else "absent"
        for name in ("shortened", "left_out") if gone else ():
            if self._holds(getattr(rebuilt, name)):
                gone = {"shortened": "hidden", "left_out": "replaced"}[name]
        return holders, gone

    def _holds(self, contents: list[types.Content]) -> bool:
        return any(self._has(part) for each in contents for part in parts_of(each))

    def _has(self, part: types.Part) -> bool:
        # Every request repeats the parts of those before it.
        return self._memo.remember(self._search, part, (part,))

    def _search(self, part: types.Part) -> bool:
        return self._words in _plain(read_part(part))


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _is_recalled(part: types.Part) -> bool:
    answer = part.function_response
    return bool(answer and answer.name == RECALL_TOOL)


def _name(event: Event, part: types.Part) -> str:
    author = "the user" if event.author == "user" else one_line(event.author)
    tool = part.function_call or part.function_response
    kind = "message" if tool is None else "call" if part.function_call else "result"
    return f"{kind} of {one_line(tool.name or '?') if tool else author}"
