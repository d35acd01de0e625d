"""`contextguard why`: where words stood, and which requests had them."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
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

    Attributes:
        agent: The agent, with its scope.
        first_call: The number of the first call, from 1.
        last_call: The number of the last call.
        holders: The parts of the request that had the words.
        gone: Where else they were, as a key of `GONE`; "" where a request had them.
        compaction: The figures of a compaction at the first call; None for none.
    """

    agent: str
    first_call: int
    last_call: int
    holders: list[str]
    gone: str
    compaction: dict[str, Any] | None

    def describe(self) -> Iterator[str]:
        """Yields a line on the compaction, if any, and one on the calls."""
        if self.compaction:
            reason = one_line(str(self.compaction.get("reason")))
            before = recordings.read_number(self.compaction.get("tokens_before"))
            after = recordings.read_number(self.compaction.get("tokens_after"))
            why = REASONS.get(reason, reason)
            yield (
                f"call {self.first_call:,} was compacted: {why}, "
                f"{before:,.0f} → {after:,.0f} tokens"
            )

        calls = f"call {self.first_call:,}"
        if self.last_call > self.first_call:
            calls = f"calls {self.first_call:,} to {self.last_call:,}"
        if self.holders:
            yield f"{calls}: in the request: {', '.join(self.holders)}"
        else:
            yield f"{calls}: {GONE[self.gone]}"

    def choose_hint(self) -> str:
        """Returns what can be done where this is the last period of its agent."""
        if self.gone:
            return HINTS[self.gone]
        for holder in (AS_SAID, RECALLED):
            if holder in self.holders:
                return HINTS[holder]
        return HINTS["beside"]


def run_why(words: str, as_json: bool, **recording: Any) -> None:
    """Runs the command; `recording` names a session, as for `replay.read_recording`."""
    with terminal.quiet_logs(Console(stderr=True)):
        session, settings = replay.read_recording(**recording)
        finder = _Finder(words, session)
        places = list(finder.list_places(session))
        periods = asyncio.run(find_periods(session, settings, finder)) if places else []

    if as_json:
        found = {
            "places": [asdict(place) for place in places],
            "calls": [asdict(period) for period in periods],
        }
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
    more_count = len(places) - MAX_PLACES
    if more_count > 0:
        events = "event" if more_count == 1 else "events"
        yield f"  and {more_count:,} more {events}"

    by_agent = defaultdict[str, list[Period]](list)
    for period in periods:
        by_agent[period.agent].append(period)
    for agent, own in by_agent.items():
        yield f"Requests of {agent}:"
        for period in own:
            for line in period.describe():
                yield f"  {line}"
        yield f"  {own[-1].choose_hint()}"
    if not periods:
        yield "No model was called with it since, or it was called with no token count."
    yield f"What to do: {PAGE}"


async def find_periods(
    session: Session, settings: ReplaySettings, finder: _Finder
) -> list[Period]:
    """Rebuilds the requests, and joins calls of an agent that had the words alike."""
    rebuilder = Rebuilder(session, settings.guard, settings.window_tokens)
    calls = list(list_calls(session))
    if settings.agent not in {None, *(call.event.author for call in calls)}:
        raise CommandError(f"no model call of agent {settings.agent!r} is recorded")

    periods: list[Period] = []
    last: dict[str, Period] = {}
    numbered = list(enumerate(calls, 1))
    for number, call in terminal.show_progress(numbered, "Reading"):
        rebuilt = await rebuilder.rebuild(call)
        name = call.event.author
        if settings.agent not in (None, name):
            continue

        scope = branch_scope(call.event)
        owner = f"{name}@{scope}" if scope else name
        before = last.get(owner)
        holders, gone = finder.search(rebuilt)
        if before is None and gone == "absent":
            continue  # Nobody had said it yet.
        if before and (before.holders, before.gone) == (holders, gone):
            before.last_call = number
            continue

        facts = recordings.read_facts(call.event).get("compaction")
        compaction = facts if before and isinstance(facts, dict) else None
        period = Period(owner, number, number, holders, gone, compaction)
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
            found = [part for part in parts if self._has(part)]
            if found:
                time = f"{recordings.read_time(event.timestamp):%F %T}"
                yield Place(number, time, _name(event, found[0]))

    def search(self, rebuilt: Rebuilt) -> tuple[list[str], str]:
        """Returns the parts of a request that hold the words, and a key of `GONE`.

        The key is "" where a part holds them.
        """
        parts = [part for content in rebuilt.messages for part in parts_of(content)]
        found = [part for part in parts if self._has(part)]
        holders = []
        if any(not _is_recalled(part) for part in found):
            holders.append(AS_SAID)
        if any(_is_recalled(part) for part in found):
            holders.append(RECALLED)
        for name, text in rebuilt.beside.items():
            if self._words in _plain(text):
                holders.append(name)

        if holders:
            return holders, ""
        if self._holds(rebuilt.left_out):
            return holders, "replaced"
        return holders, "hidden" if self._holds(rebuilt.shortened) else "absent"

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
    call = part.function_call
    result = part.function_response
    if call:
        return f"call of {one_line(call.name or '?')}"
    if result:
        return f"result of {one_line(result.name or '?')}"
    author = "the user" if event.author == "user" else one_line(event.author)
    return f"message of {author}"
