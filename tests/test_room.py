"""The room of the texts beside a summary."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from google.genai import types

from contextguard_adk import Pipeline, SlidingWindow, Threshold
from contextguard_adk._history.history import History
from contextguard_adk._measuring.budgets import plan_budgets
from contextguard_adk._turn import room
from contextguard_adk._turn.room import Room, Rooms, measure_stored
from contextguard_adk._turn.turn import Turn
from contextguard_adk.testing import SimulatedLlm
from tests.builders import call, model, response, user
from tests.chats import (
    DEMAND,
    EXACT,
    agent_requests,
    guarded_chat,
    seed,
    summary_requests,
)
from tests.test_decide import turn_of


def turn_with(*contents: types.Content) -> Turn:
    """A model call with these contents."""
    return replace(turn_of(), history=History(contents))


@pytest.mark.parametrize(
    "text", ["", "a", 'He said "no".\n\tC:\\new', "\x00\x1f\x7f", "要確認。\u2028é"]
)
def test_a_text_is_measured_as_state_has_it(text: str) -> None:
    """As JSON within JSON: the record is a text of its own."""
    record = json.dumps({"text": text}, ensure_ascii=False)
    empty = json.dumps({"text": ""}, ensure_ascii=False)
    bytes_of = [
        len(json.dumps(each, ensure_ascii=False).encode()) for each in (record, empty)
    ]
    assert measure_stored(text) == bytes_of[0] - bytes_of[1]


def test_the_summary_and_each_text_take_room_of_the_others() -> None:
    """A fifth of the events in all: their contents, and 300 bytes for each event."""
    turn = turn_with(*(model("x" * 700) for _ in range(200)))
    covered = frozenset(range(200))
    whole = Rooms(turn, covered, "").give(100, 1.0).state_bytes
    assert whole == 200 * (700 + 300) // 5

    rooms = Rooms(turn, covered, "s" * 10_000)
    assert rooms.give(100, 1.0).state_bytes == whole - 10_000
    assert rooms.give(100, 0.5).state_bytes == (whole - 10_000) // 2
    rooms.take("t" * 4_000)
    assert rooms.give(100, 1.0).state_bytes == whole - 14_000
    rooms.take("t" * 90_000)
    assert rooms.give(100, 1.0).state_bytes == 0


def test_few_events_and_many_events_have_bounds() -> None:
    """At least 6 KB beside any summary, and at most 64 KB with it."""
    few = turn_with(model("x"))
    assert Rooms(few, frozenset({0}), "s" * 9_000).give(1, 1.0).state_bytes == 6 * 1024

    many = turn_with(model("x" * 1_000_000))
    rooms = Rooms(many, frozenset({0}), "s" * 1_024)
    assert rooms.give(1, 1.0).state_bytes == 63 * 1024


@pytest.mark.parametrize(
    ("tokens", "state_bytes"), [(200, 90_000), (90_000, 500), (0, 500), (200, 0)]
)
def test_a_text_fills_its_room(tokens: int, state_bytes: int) -> None:
    """In tokens and in bytes, and hardly less than that."""
    own = Room(tokens, state_bytes, turn_of())
    text = own.fill(lambda size_bytes: 'a "b"\n' * (size_bytes // 6))

    assert not text or own.holds(text)
    filled = max(
        own.turn.count(text) / max(1, tokens),
        measure_stored(text) / max(1, state_bytes),
    )
    assert filled > 0.85 or not (tokens and state_bytes)


def test_a_text_that_never_fits_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small it is asked to be; it is not asked for ever."""
    asked: list[int] = []

    def write(size_bytes: int) -> str:
        asked.append(size_bytes)
        return "x" * 10_000

    assert Room(10, 10_000, turn_of()).fill(write) == ""
    assert 0 < len(asked) <= room._MOST_GUESSES


def test_a_list_far_below_its_first_guess_gets_shorter() -> None:
    """The list has fewer bytes than the guess, and slightly too many in state."""
    entries = ['"' * 14 + "\n"] * 20

    def write(size_bytes: int) -> str:
        count = size_bytes // len(entries[0])
        return "".join(entries[:count])

    own = Room(9_000, 1_150, turn_of())
    assert not own.holds("".join(entries))
    text = own.fill(write)
    assert len(text) > 200
    assert own.holds(text)


@pytest.mark.parametrize(
    ("text", "beside", "is_shown"),
    [
        ("A-1", "Order A-1, as agreed.", True),
        ("A-1", "Order A-12.", False),
        ("A-1", "Orders A-12 and A-1", True),
        ("A-1", "AA-1", False),
        ("要确认", "先要确认。", True),
    ],
)
def test_a_text_stands_beside_a_list_only_as_a_whole(
    text: str, beside: str, is_shown: bool
) -> None:
    """The beginning of another id is not the id."""
    assert Room(100, 100, turn_of(), beside).shows(text) is is_shown


REPLY = "The rules were noted, and all of the parts were looked up, one by one. " * 3


def rows_of(step: int) -> str:
    """A result with many ids, and many lines that tell something."""
    lines = [
        f"Part {step}-{n} of lot {n * 7919 + step} lies in hall H{n % 9}, shelf S-{n}."
        for n in range(60)
    ]
    return "\n".join(lines)


@pytest.mark.quick("SlidingWindow-1", "Pipeline-1")
@pytest.mark.parametrize("rule_count", [1, 120])
@pytest.mark.parametrize("kind", [Threshold, SlidingWindow, Pipeline])
async def test_the_texts_beside_a_summary_have_one_budget(
    kind: Any, rule_count: int
) -> None:
    """The user's words, values and lines together take at most `BESIDE_RATIO` of the
    room, though each has a lot to say."""
    window = 16_000
    llm = SimulatedLlm(
        context_window=window, token_ratio=1.0, summary_replies=lambda _: REPLY
    )
    chat = guarded_chat(llm, kind(context_window=window))
    contents: list[types.Content] = []
    for step in range(12):
        wish = " ".join(f"Mind rule {step}.{n}, it is new." for n in range(rule_count))
        contents += [
            user(wish),
            call("look", f"c{step}"),
            response("look", rows_of(step), f"c{step}"),
            model(f"Step {step} is done, and part {step * 31} is at the gate now."),
        ]
    await seed(chat, *contents, state=EXACT | DEMAND)
    await chat.say("Go on.")

    text = agent_requests(llm)[-1].text
    start = text.index("[Previous conversation summary]")
    beside = text[start : text.index("[End of summary")]
    for heading in ("[The user's messages", "[Values of", "[Lines of"):
        assert heading in beside
    shared = re.sub(r"\n\[Already done.*?(?=\n\n|\n\[|$)", "", beside, flags=re.DOTALL)
    # The texts also use their budget.
    most_tokens = room.BESIDE_RATIO * 0.8 * window
    assert 0.4 * most_tokens < len(shared) / 4 < 1.03 * most_tokens


async def test_a_summary_of_tool_calls_has_a_quarter_of_the_budget() -> None:
    """A summary of a chat gets the whole budget."""
    window = 16_000
    wish = user("The task.")
    chat_contents: list[types.Content] = []
    tool_contents: list[types.Content] = []
    for step in range(12):
        chat_contents += [user(f"Tell {step}."), model(rows_of(step))]
        tool_contents += [
            call("look", f"c{step}"),
            response("look", rows_of(step), f"c{step}"),
        ]

    asked_tokens: list[int] = []
    for contents in (chat_contents, tool_contents):
        llm = SimulatedLlm(
            context_window=window, token_ratio=1.0, summary_replies=lambda _: REPLY
        )
        chat = guarded_chat(llm, Threshold(context_window=window))
        await seed(chat, wish, *contents, state=EXACT | DEMAND)
        await chat.say("Go on.")
        [asked] = summary_requests(llm)
        asked_tokens.append(asked.config.max_output_tokens or 0)

    whole_tokens = plan_budgets(window).summary_tokens
    assert asked_tokens == [whole_tokens, int(0.25 * whole_tokens)]


def test_a_text_within_a_longer_word_does_not_count_as_shown() -> None:
    """A list beside the summary still has the shorter one."""
    rooms = Rooms(turn_with(model("x")), frozenset([0]), "See INV-12.", "Pay ORD-7!")
    rooms.show("- get(A-34): B-5")
    room_of_next = rooms.give(100, 1.0)

    shown = [text for text in ("INV-12", "ORD-7", "B-5") if room_of_next.shows(text)]
    hidden = [text for text in ("INV-1", "RD-7", "A-3") if room_of_next.shows(text)]
    assert shown == ["INV-12", "ORD-7", "B-5"]
    assert hidden == []
