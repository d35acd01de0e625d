"""What holds for any session, any strategy and any summarizer."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.genai import types
from hypothesis import example, given
from hypothesis import strategies as st

from contextguard_adk import (
    CompactionRecord,
    ContextGuardPlugin,
    Pipeline,
    SlidingWindow,
    Threshold,
)
from contextguard_adk._support.phrases import quote
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import ErrorStyle, RecordedRequest, Reply, SimulatedLlm
from tests.builders import (
    SUMMARY_BEGIN,
    Chat,
    KeptSessions,
    RequestTap,
    answer_text,
    call_part,
    calls,
    guarded_agent,
    model,
    response_part,
    responses,
    user,
)
from tests.chats import take_apart

WINDOW_TOKENS = 4_000
SMALL_STATE_BYTES = 16 * 1024
"""Conversations as short as these have the guard store no more."""

PIECES = {
    "prose": "The old press stands in hall B, behind the second gate. ",
    "digits": "9081726354, 77, 1.000001; ",
    "base64": base64.b64encode(bytes(range(7, 200, 3))).decode(),
    "kana": "古い機械は二番目の門の奥にあります。",
    "markup": '<a href="#">&amp;</a>\n',
    "markers": f"[End of conversation]\n{SUMMARY_BEGIN}\n",
}

MOODS: dict[str, Reply] = {
    "short": "They spoke of a press.",
    "rambles": "They spoke of the old press. " * 150,
    "nothing": "",
    "raises": RuntimeError("out of order"),
}


def strategies(window_tokens: int = WINDOW_TOKENS) -> st.SearchStrategy[Strategy]:
    """Any strategy, with settings that matter for short histories."""
    window = st.just(window_tokens)
    counts = st.integers
    return st.one_of(
        st.builds(
            Threshold, context_window=window, max_compaction_attempts=counts(1, 3)
        ),
        st.builds(SlidingWindow, context_window=window, max_messages=counts(4, 12)),
        st.builds(Pipeline, context_window=window),
    )


@dataclass(frozen=True)
class Step:
    """A message, or parallel calls with their results, in the order of the results."""

    kind: str
    text: str
    order: tuple[int, ...] = ()

    def build(self, number: int) -> list[types.Content]:
        """The contents, which no other number repeats."""
        text = f"[{number}] {self.text}"
        if self.kind != "tools":
            return [(user if self.kind == "user" else model)(text)]
        ids = [f"call-{number}-{n}" for n in range(len(self.order))]
        asked = [call_part("search", id_, query=number) for id_ in ids]
        found = {"rows": [text, 1, None]}
        answers = [response_part("search", found, ids[n]) for n in self.order]
        return [calls(*asked), responses(*answers)]


moods = st.lists(st.sampled_from(sorted(MOODS)), min_size=1, max_size=3)
texts = st.builds(
    lambda piece, count: PIECES[piece] * count,
    st.sampled_from(sorted(PIECES)),
    st.sampled_from([0, 0, 1, 20, 80]),
)
orders = st.integers(1, 3).flatmap(lambda n: st.permutations(range(n)).map(tuple))
kinds = st.sampled_from(["user", "model", "tools"])
steps = st.lists(st.builds(Step, kind=kinds, text=texts, order=orders), max_size=8)
no_or_few = st.just(frozenset[int]()) | st.frozensets(st.integers(0, 20), max_size=4)


class Play:
    """A session that is judged after every turn; the moods of the summarizer recur."""

    def __init__(
        self,
        strategy: Strategy,
        moods: Sequence[str],
        instruction: str = "You help.",
        **settings: Any,
    ) -> None:
        answers = itertools.count()
        replies = itertools.cycle(moods)
        self.llm = SimulatedLlm(
            context_window=WINDOW_TOKENS,
            script=lambda _: f"Done {next(answers)}.",
            summary_replies=lambda _: MOODS[next(replies)],
            **settings,
        )

        self.strategy = strategy
        self.instruction = instruction
        self.sessions = KeptSessions()
        self.tap = RequestTap()
        self.compactions: list[CompactionRecord] = []
        self.chat = self.open()
        self.steps: dict[int, list[str]] = {}
        self.numbers = itertools.count()

    def open(self) -> Chat:
        """The session as a process that has just started sees it."""
        note = self.compactions.append
        guard = ContextGuardPlugin(default=self.strategy, on_compaction=note)
        agent = guarded_agent(self.llm, instruction=self.instruction)
        return Chat(agent, [self.tap, guard], session_service=self.sessions)

    async def tell(self, steps: Sequence[Step]) -> None:
        """Adds steps to the session, as if they had been said after a greeting."""
        if not await self.chat.events():
            await self.chat.tell([user("Hello.")])
        for step, number in zip(steps, self.numbers, strict=False):
            before = len(await self.chat.events())
            await self.chat.tell(step.build(number))
            added = (await self.chat.events())[before:]
            self.steps[number] = [event.id for event in added]

    async def take_back(self, numbers: frozenset[int]) -> None:
        """Removes whole steps from the session."""
        gone = {id_ for number in numbers for id_ in self.steps.pop(number, ())}
        session = await self.chat.session()
        session.events[:] = [event for event in session.events if event.id not in gone]

    async def ask(self, message: str) -> RecordedRequest:
        """Sends a message; returns the request that the provider answered."""
        assert answer_text(await self.chat.say(message)).startswith("Done")
        assert self.llm.violations == 0
        newest = self.llm.requests[-1]
        assert not newest.is_summary
        assert message in newest.text
        return newest


Spoken = tuple[str | None, str]


def spoken(contents: Sequence[types.Content]) -> list[Spoken]:
    """The texts in contents, each with its role."""
    parts = [(each.role, part) for each in contents for part in each.parts or ()]
    return [(role, part.text) for role, part in parts if part.text]


def spoken_again(
    contents: Sequence[types.Content], known: Sequence[types.Content]
) -> list[Spoken]:
    """The texts in what is sent; those that are known each for itself, also where the
    guard has joined them."""
    said = {quote(text): text for _, text in spoken(known)}
    texts = list[Spoken]()
    for role, text in spoken(take_apart(contents, known)):
        rest = text
        while found := [each for each in said if f"{rest}\n".startswith(f"{each}\n")]:
            longest = max(found, key=len)
            texts.append((role, said[longest]))
            rest = rest[len(longest) + 1 :]
        if rest:
            texts.append((role, rest))

    return texts


async def change_session(play: Play, data: st.DataObject) -> None:
    """Changes the session at will between two messages of the user."""
    await play.tell(data.draw(steps))
    await play.take_back(data.draw(no_or_few))
    if data.draw(st.booleans(), "a compaction is asked for"):
        await play.chat.set_state({"context_guard:compact": True})
    if data.draw(st.booleans(), "another process takes over"):
        play.chat = play.open()


def check_left_out(
    play: Play, request: RecordedRequest, left_out: set[Spoken], *, has_paid: bool
) -> set[Spoken]:
    """What is sent keeps its order, and nothing that was left out comes back, but for a
    mechanical summary. Returns what is left out now."""
    original = spoken(play.tap.contents[-1])
    sent = spoken_again(request.contents, play.tap.contents[-1])
    kept = [text for text in sent if text in original]
    assert kept == [text for text in original if text in kept]
    assert len(sent) - len(kept) <= 2  # What the guard has put in.

    # A summarizer that has failed may be left alone.
    is_mechanical = any(record.is_mechanical for record in play.compactions)
    if is_mechanical:
        left_out.clear()  # It is made from the originals, as far as it must.
    assert not left_out & {*kept}

    gone = {*original} - {*kept}
    if not (has_paid or is_mechanical or isinstance(play.strategy, Pipeline)):
        assert gone <= left_out
    return gone


async def check_state(play: Play) -> None:
    """What the guard has stored is JSON and small."""
    state = await play.chat.state()
    ours = {key: state[key] for key in state if "context_guard" in key}
    assert json.loads(json.dumps(ours)) == ours
    ours.pop("__context_guard_summary_agent", None)
    assert len(json.dumps(ours)) <= SMALL_STATE_BYTES


@given(strategies(), moods, st.data())
async def test_a_session_goes_on_whatever_happens(
    strategy: Strategy, moods: Sequence[str], data: st.DataObject
) -> None:
    """Every turn is answered at the first try."""
    play = Play(strategy, moods)
    left_out: set[Spoken] = set()

    for number in range(data.draw(st.integers(1, 3))):
        await change_session(play, data)
        paid = play.llm.summaries
        play.compactions.clear()
        request = await play.ask(f"Request {number}?")
        assert play.llm.rejections == 0

        gone = check_left_out(
            play, request, left_out, has_paid=play.llm.summaries > paid
        )
        left_out |= gone
        await check_state(play)

    if data.draw(st.booleans(), "another process answers the last request"):
        play.chat = play.open()
    play.compactions.clear()
    after = await play.ask("And the last?")
    if not (play.compactions or isinstance(strategy, Pipeline)):
        assert after.contents[: len(request.contents)] == request.contents


STYLES: list[ErrorStyle] = ["openai", "bedrock", "ollama"]
GIANTS = [Step("user", PIECES["base64"] * 80)] * 4
WINDOW = SlidingWindow(context_window=64_000, max_messages=4)
THRESHOLD = Threshold(context_window=64_000)


@given(
    strategies(window_tokens=64_000),
    moods,
    steps,
    st.sampled_from(["You help.", "You help. " * 200, "You help. " * 900]),
    st.sampled_from(STYLES),
)
@example(WINDOW, ["nothing"], GIANTS, "You help.", "bedrock")
@example(WINDOW, ["short"], GIANTS, "You help. " * 900, "openai")
@example(THRESHOLD, ["short"], 5 * GIANTS, "You help. " * 900, "openai")
async def test_a_refused_request_is_made_to_fit(
    strategy: Strategy,
    moods: Sequence[str],
    steps: Sequence[Step],
    instruction: str,
    style: ErrorStyle,
) -> None:
    """The turn is answered, although the window is smaller than anyone has said."""
    play = Play(strategy, moods, instruction, error_style=style)
    await play.tell(steps)
    await play.ask("Request 0?")
    await play.ask("Request 1?")
