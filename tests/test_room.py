"""The room of the texts beside a summary."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from google.genai import types

from contextguard_adk._history.history import History
from contextguard_adk._turn import room
from contextguard_adk._turn.room import Room, Rooms, measure_stored
from contextguard_adk._turn.turn import Turn
from tests.builders import model
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


def test_a_text_within_a_longer_word_does_not_count_as_shown() -> None:
    """A list beside the summary still has the shorter one."""
    rooms = Rooms(turn_with(model("x")), frozenset([0]), "See INV-12.", "Pay ORD-7!")
    rooms.show("- get(A-34): B-5")
    room_of_next = rooms.give(100, 1.0)

    shown = [text for text in ("INV-12", "ORD-7", "B-5") if room_of_next.shows(text)]
    hidden = [text for text in ("INV-1", "RD-7", "A-3") if room_of_next.shows(text)]
    assert shown == ["INV-12", "ORD-7", "B-5"]
    assert hidden == []
