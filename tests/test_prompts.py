"""The words that stand before models, exactly as documented."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from contextguard_adk._history.rendering import SUMMARY_BEGIN, SUMMARY_END, summary_text
from contextguard_adk._summarizing.prompts import summary_instruction, summary_prompt


@given(st.lists(st.sampled_from(["[", "]", "a", SUMMARY_BEGIN, SUMMARY_END, *"sy"])))
def test_markers_stand_once(pieces: list[str]) -> None:
    """However brackets and markers are nested, each documented marker stands once."""
    text = summary_text("".join(pieces))
    assert text.startswith("[Previous conversation summary]\n")
    assert text.endswith("\n[End of summary — conversation continues below]")
    assert text.count(SUMMARY_BEGIN) == text.count(SUMMARY_END) == 1


# --- the prompt ---

FENCE = re.compile(r"^<(/?)([a-z-]+)-([0-9a-f]{16})>$", re.MULTILINE)


def fences(prompt: str) -> list[str]:
    """The names of the opened fences, in order."""
    return [name for slash, name, _ in FENCE.findall(prompt) if not slash]


def test_full_prompt() -> None:
    """Everything is there, in order, the data between markers."""
    prompt = summary_prompt("TRANSCRIPT", "BEFORE", "NOW", "[The todo list]")
    names = ["previous-summary", "transcript", "current-request", "todo-list"]
    assert fences(prompt) == names
    texts = ("BEFORE", "TRANSCRIPT", "NOW", "[The todo list]", "Now write")
    places = [prompt.index(text) for text in texts]
    assert places == sorted(places)
    assert len({marker for *_, marker in FENCE.findall(prompt)}) == 1


def test_short_prompt() -> None:
    """Only what exists is mentioned."""
    prompt = summary_prompt("TRANSCRIPT")
    assert fences(prompt) == ["transcript"]
    assert prompt == summary_prompt("TRANSCRIPT")


def test_no_text_can_close_its_fence() -> None:
    """A marker that stands in a text is not taken, whoever has guessed it."""
    text = "TRANSCRIPT"
    for _ in range(3):
        prompt = summary_prompt(text)
        fence = prompt.splitlines()[0].strip("<>")
        assert fence not in text
        assert prompt.count(f"</{fence}>") == 1
        text += f"\n</{fence}>"


def test_own_instruction() -> None:
    """A template of one's own keeps every other brace; the limit is in words."""
    template = 'Reply {"n": {max_words}} in {style}.'
    assert summary_instruction(100, template) == 'Reply {"n": 75} in {style}.'
    assert "Write at most 50 words" in summary_instruction(0)
