"""Capabilities beside the core: each can be taken out, and a new one is a line."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.genai import types

from contextguard_adk import Threshold, _listeners, _recall, _sections, _shapes
from contextguard_adk._tools.cli import main
from contextguard_adk._turn.room import Room
from contextguard_adk._turn.units import Shape
from contextguard_adk.strategies import Section, Turn
from contextguard_adk.testing import SimulatedLlm
from tests.builders import SUMMARY_BEGIN, answer_text, model, user
from tests.chats import DEMAND, guarded_chat, seed, text_of, words

KINDS = {
    "section": (_sections, "SECTIONS"),
    "shape": (_shapes, "SHAPES"),
    "listener": (_listeners, "LISTENERS"),
    "tool": (_recall, "TOOLS"),
}
UNITS = [
    (kind, place)
    for kind, (module, name) in KINDS.items()
    for place in range(len(getattr(module, name)))
]


def name_unit(unit: tuple[str, int]) -> str:
    """The name of a unit, for the test's id."""
    module, name = KINDS[unit[0]]
    made = getattr(module, name)[unit[1]]
    what = made.apply.__name__ if isinstance(made, Shape) else type(made).__name__
    return f"{unit[0]} {what}"


def take_out(unit: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the line of a unit."""
    module, name = KINDS[unit[0]]
    units = getattr(module, name)
    place = unit[1]
    monkeypatch.setattr(module, name, (*units[:place], *units[place + 1 :]))
    if unit[0] == "listener":
        for event in ("SENT", "SUMMARIZED", "COMPACTED", "ANSWERED", "RECOVERED"):
            told = getattr(module, event)
            rest = tuple(each for each in told if each is not units[place])
            monkeypatch.setattr(module, event, rest)


@pytest.mark.parametrize("unit", UNITS, ids=name_unit)
async def test_a_package_without_one_unit_works(
    unit: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compacts, goes on after a restart, and recovers from a rejection."""
    take_out(unit, monkeypatch)
    llm = SimulatedLlm(context_window=4_000)
    chat = guarded_chat(llm, Threshold(context_window=4_000))
    for turn in range(4):
        assert answer_text(await chat.say(words(950, f"Question {turn}.")))
    assert llm.summaries >= 1

    later = guarded_chat(
        llm, Threshold(context_window=4_000), session_service=chat.sessions
    )
    assert answer_text(await later.say("And now?"))
    assert SUMMARY_BEGIN in llm.requests[-1].text
    assert (llm.rejections, llm.violations) == (0, 0)

    wrong = guarded_chat(
        llm, Threshold(context_window=50_000), session_service=chat.sessions
    )
    assert answer_text(await wrong.say(words(10_000, "Much.")))
    assert (llm.rejections, llm.violations) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS, ids=name_unit)
def test_a_package_without_one_unit_plays_the_demo(
    unit: tuple[str, int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It compacts, and no guarded step is refused."""
    take_out(unit, monkeypatch)
    for number in range(4):
        path = tmp_path / f"module_{number}.py"
        path.write_text("\n".join(f"NAME_{n} = {n}" for n in range(300)))
    assert main(["demo", str(tmp_path), "--steps=6", "--window=4000"]) == 0
    told = capsys.readouterr().out
    assert "compaction 1:" in told
    assert "6 of 6 steps were done, no request refused" in told


class Rules(Section):
    """Keeps every message of the user that gives a rule."""

    name = "rules"
    goes_at = None

    def write(self, turn: Turn, covered: frozenset[int], known: str, room: Room) -> str:
        """Adds the rules among the messages that are loaded."""
        lines = known.splitlines() or ["[Rules of the user]"]
        for index in sorted(covered):
            text = text_of(turn.messages[index])
            if text.startswith("Rule:") and text not in lines:
                lines.append(text)
        return "\n".join(lines) if lines[1:] else ""


async def test_a_new_section_is_a_file_and_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it keeps stands beside every later summary, whatever the model writes."""
    monkeypatch.setattr(_sections, "SECTIONS", (*_sections.SECTIONS, Rules()))
    llm = SimulatedLlm(summary_replies=lambda _: "Nothing happened.")
    chat = guarded_chat(llm, Threshold(context_window=8_000))
    rule = "Rule: never touch production."
    await seed(chat, user(rule), model("Yes."), state=DEMAND)
    for turn in range(8):
        await chat.say(words(1_900, f"Question {turn}."))
    assert llm.summaries >= 2

    head = text_of(llm.requests[-1].contents[0])
    assert f"[Rules of the user]\n{rule}\n" in f"{head}\n"


def shout(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Writes what the user says in capitals."""
    return [
        user(text_of(each).upper()) if each.role == "user" else each
        for each in contents
    ]


async def test_a_new_shape_is_a_file_and_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every request is sent in the form that it gives, and measured in it."""
    monkeypatch.setattr(_shapes, "SHAPES", (*_shapes.SHAPES, Shape(shout)))
    llm = SimulatedLlm()
    chat = guarded_chat(llm, Threshold(context_window=8_000))
    await chat.say("Hello.")
    await chat.say("How are you?")

    assert [text_of(each) for each in llm.requests[-1].contents][::2] == [
        "HELLO.",
        "HOW ARE YOU?",
    ]
