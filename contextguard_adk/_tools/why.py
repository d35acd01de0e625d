"""`contextguard why`: where words stood, and which requests had them.

The words are those that the user looks for. A holder is a part of a request that has
the words. A period is a number of calls of one agent, one after another, whose requests
had the words in the same holders.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from google.adk.events.event import Event
from google.adk.sessions import Session
from google.genai import types
from rich.console import Console

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.contents import parts_of
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._runtime.runs import branch_scope
from contextguard_adk._support.folding import fold
from contextguard_adk._support.log import one_line
from contextguard_adk._tools import recordings, replay, terminal
from contextguard_adk._tools.replay import ReplaySettings
from contextguard_adk._tools.replaying.calls import list_calls
from contextguard_adk._tools.replaying.need import read_part
from contextguard_adk._tools.requests import Rebuilder, Rebuilt
from contextguard_adk._tools.terminal import CommandError, print_line
from contextguard_adk.records import REASONS

MAX_PLACES = 5

# The names of holders. The texts of `Rebuilt.replacements` can hold the words as well.
# Their names, such as "the summary", are the keys of that dict.
AS_SAID = "the message itself"
RECALLED = f"a result of {RECALL_TOOL}"

PAGE = "https://contextguard-adk.github.io/contextguard-adk/why-it-forgot/"
# Why a request does not hold the words, for the user.
GONE = {
    "replaced": "nowhere in the request: the messages with it were left out",
    "hidden": "nowhere in the request: a result is shown without the part that has it",
    "absent": "nowhere in the request, nor in what the guard left out of it",
}
# What a user can do, by the name of the holder ("beside" for any text of
# `Rebuilt.replacements`), or by a key of `GONE`.
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
    """An event that holds the words.

    Attributes:
        event: The number of the event, from 1.
        time: The time of the event in UTC.
        what: The part of the event that holds the words: "result of search".
    """

    event: int
    time: str
    what: str


@dataclass
class Period:
    """Calls of an agent whose requests had the words in the same holders.

    Attributes:
        agent: The agent, with its scope: "agent@scope", or "agent" outside all scopes.
        first_call: The number of the first call in the recording, from 1.
        last_call: The number of the last call. Calls of other agents may have numbers
            between the two.
        holders: The names of the holders.
        gone: A key of `GONE` if there are no holders; else "".
        compaction: The noted figures of a compaction before the first call; None if
            there was no compaction, and for the first period of an agent.
    """

    agent: str
    first_call: int
    last_call: int
    holders: list[str]
    gone: str
    compaction: dict[str, Any] | None

    def describe(self) -> Iterator[str]:
        """Yields a line on the compaction, if there was one, and one on the calls."""
        if self.compaction:
            change = _describe_compaction(self.compaction)
            yield f"call {self.first_call:,} was compacted: {change}"

        calls = f"call {self.first_call:,}"
        if self.last_call > self.first_call:
            calls = f"calls {self.first_call:,} to {self.last_call:,}"
        if self.holders:
            yield f"{calls}: in the request: {', '.join(self.holders)}"
        else:
            yield f"{calls}: {GONE[self.gone]}"

    def choose_hint(self) -> str:
        """Returns the hint of `HINTS` for the calls of this period."""
        if self.gone:
            return HINTS[self.gone]
        if AS_SAID in self.holders:
            return HINTS[AS_SAID]
        if RECALLED in self.holders:
            return HINTS[RECALLED]
        return HINTS["beside"]


def _describe_compaction(facts: dict[str, Any]) -> str:
    """Describes a compaction: "a compaction was asked for, 9,120 → 2,310 tokens".

    `facts` are the figures as a guard has noted them. They may be incomplete, or of any
    type.
    """
    reason_key = one_line(str(facts.get("reason")))
    reason = REASONS.get(reason_key, reason_key)
    before = recordings.read_number(facts.get("tokens_before"))
    after = recordings.read_number(facts.get("tokens_after"))
    return f"{reason}, {before:,.0f} → {after:,.0f} tokens"


def run_why(words: str, as_json: bool, **recording: Any) -> None:
    """Prints where words stood in a session, and which requests had them.

    `recording` are the arguments of `replay.read_recording`.
    """
    with terminal.quiet_logs(Console(stderr=True)):
        session, settings = replay.read_recording(**recording)
        finder = _Finder(words, session)
        places = list(finder.list_places(session))
        periods = list[Period]()
        if places:
            periods = asyncio.run(find_periods(session, settings, finder))

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
    """Yields the lines of the answer: places, periods of each agent, and hints."""
    quoted_words = repr(one_line(words))
    if not places:
        yield f"{quoted_words} stands in no event of this session: nobody has said it."
        return

    yield f"{quoted_words} stands in:"
    for place in places[:MAX_PLACES]:
        yield f"  event {place.event:,}, {place.time} UTC: {place.what}"
    more_count = len(places) - MAX_PLACES
    if more_count > 0:
        events = "event" if more_count == 1 else "events"
        yield f"  and {more_count:,} more {events}"

    yield from _describe_periods(periods)
    if not periods:
        yield "No model was called with it since, or it was called with no token count."
    yield f"What to do: {PAGE}"


def _describe_periods(periods: list[Period]) -> Iterator[str]:
    """Yields the lines on the periods of each agent, and a hint for its last period."""
    periods_by_agent = defaultdict[str, list[Period]](list)
    for period in periods:
        periods_by_agent[period.agent].append(period)

    for agent, agent_periods in periods_by_agent.items():
        yield f"Requests of {agent}:"
        for period in agent_periods:
            for line in period.describe():
                yield f"  {line}"
        # The last period tells what the model has now.
        last_period = agent_periods[-1]
        yield f"  {last_period.choose_hint()}"


async def find_periods(
    session: Session, settings: ReplaySettings, finder: _Finder
) -> list[Period]:
    """Rebuilds the requests, and joins the calls of each agent to periods.

    The calls of an agent before the first one whose history has the words are left out.

    Returns:
        The periods, in the order of their first calls.
    """
    periods: list[Period] = []
    last_periods: dict[str, Period] = {}  # By the agent with its scope.
    async for request in _rebuild_requests(session, settings):
        owner = _name_owner(request.event)
        last = last_periods.get(owner)
        holders = finder.list_holders(request.rebuilt)
        gone = "" if holders else finder.explain_absence(request.rebuilt)

        if last is None and gone == "absent":  # Nobody had said the words yet.
            continue
        if last is not None and (last.holders, last.gone) == (holders, gone):
            last.last_call = request.number
            continue

        # A compaction may explain the change from the period before. The first period
        # of an agent is no change.
        compaction = None if last is None else _read_compaction(request.event)
        period = Period(
            agent=owner,
            first_call=request.number,
            last_call=request.number,
            holders=holders,
            gone=gone,
            compaction=compaction,
        )
        last_periods[owner] = period
        periods.append(period)
    return periods


class _Request(NamedTuple):
    """The request of a recorded call.

    Attributes:
        number: The number of the call in the recording, from 1.
        event: The event of the answer.
        rebuilt: The messages of the request.
    """

    number: int
    event: Event
    rebuilt: Rebuilt


async def _rebuild_requests(
    session: Session, settings: ReplaySettings
) -> AsyncIterator[_Request]:
    """Yields the requests of the agent in the settings, in their order.

    If the settings name no agent, yields the requests of all agents.

    Raises:
        CommandError: The agent has no recorded call.
    """
    calls = list(list_calls(session))
    agents = {call.event.author for call in calls}
    if settings.agent is not None and settings.agent not in agents:
        raise CommandError(f"no model call of agent {settings.agent!r} is recorded")

    rebuilder = Rebuilder(session, settings.guard, settings.window_tokens)
    numbered_calls = list(enumerate(calls, 1))
    for number, call in terminal.show_progress(numbered_calls, "Reading"):
        # The calls of other agents are rebuilt as well, in the order of the recording.
        rebuilt = await rebuilder.rebuild(call)
        is_wanted = settings.agent in (None, call.event.author)
        if is_wanted:
            yield _Request(number, call.event, rebuilt)


def _name_owner(event: Event) -> str:
    """Returns the agent of an event with its scope: "agent@scope", or "agent"."""
    scope = branch_scope(event)
    return f"{event.author}@{scope}" if scope else event.author


def _read_compaction(event: Event) -> dict[str, Any] | None:
    """Returns the figures of the compaction that an event notes; None for none."""
    noted = recordings.read_facts(event).get("compaction")
    return noted if isinstance(noted, dict) else None


class _Finder:
    """Looks for words, in any spelling and with any kind of blanks between them."""

    def __init__(self, words: str, session: Session) -> None:
        """Prepares a search; raises a `CommandError` if `words` has only blanks."""
        self._words = _normalize(words)
        self._memo = Memo(session.events)
        if not self._words:
            raise CommandError('give the words to look for: why SESSION "words"')

    def list_places(self, session: Session) -> Iterator[Place]:
        """Yields the events that hold the words, each with its first part that does."""
        for number, event in enumerate(session.events, 1):
            if event.partial:  # A complete event repeats the text of a partial one.
                continue
            holding_parts = self._list_holding_parts([event.content])
            if holding_parts:
                time = f"{recordings.read_time(event.timestamp):%F %T}"
                what = _describe_part(event, holding_parts[0])
                yield Place(number, time, what)

    def list_holders(self, rebuilt: Rebuilt) -> list[str]:
        """Lists the names of the parts of a request that hold the words."""
        holders = list[str]()
        holding_parts = self._list_holding_parts(rebuilt.messages)
        recalled_parts = [part for part in holding_parts if _is_recalled(part)]
        has_other_parts = len(recalled_parts) < len(holding_parts)
        if has_other_parts:
            holders.append(AS_SAID)
        if recalled_parts:
            holders.append(RECALLED)

        for name, text in rebuilt.replacements.items():
            if self._words in _normalize(text):
                holders.append(name)
        return holders

    def explain_absence(self, rebuilt: Rebuilt) -> str:
        """Returns the key of `GONE` for a request that does not hold the words."""
        if self._list_holding_parts(rebuilt.left_out):
            return "replaced"
        if self._list_holding_parts(rebuilt.shortened):
            return "hidden"
        return "absent"

    def _list_holding_parts(
        self, contents: Sequence[types.Content | None]
    ) -> list[types.Part]:
        """Lists the parts of contents that hold the words."""
        holding_parts = list[types.Part]()
        for content in contents:
            for part in parts_of(content):
                # A request repeats most parts of the request before. For these parts
                # the memo has the result. For a new part, the memo calls `_holds_words`
                # with `part`. The memo makes its key from the parts in `(part,)`.
                if self._memo.remember(self._holds_words, part, (part,)):
                    holding_parts.append(part)
        return holding_parts

    def _holds_words(self, part: types.Part) -> bool:
        return self._words in _normalize(read_part(part))


def _normalize(text: str) -> str:
    """Returns a folded text, with one space for all blanks between words."""
    return " ".join(fold(text).split())


def _is_recalled(part: types.Part) -> bool:
    """Whether a part is a result of the recall tool."""
    result = part.function_response
    return result is not None and result.name == RECALL_TOOL


def _describe_part(event: Event, part: types.Part) -> str:
    """Describes a part of an event in a few words: "result of search"."""
    call = part.function_call
    result = part.function_response
    if call:
        return f"call of {one_line(call.name or '?')}"
    if result:
        return f"result of {one_line(result.name or '?')}"
    author = "the user" if event.author == "user" else one_line(event.author)
    return f"message of {author}"
