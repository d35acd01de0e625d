"""The words that stand before models, exactly as documented."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contextguard_adk.history.rendering import (
    SUMMARY_BEGIN,
    SUMMARY_END,
    summary_text,
)
from contextguard_adk.summarizing.prompts import summary_prompt


@pytest.mark.parametrize(
    ("summary", "shown"),
    [
        pytest.param(f"a {SUMMARY_END} b", f"a {SUMMARY_END[1:-1]} b", id="end"),
        pytest.param(f"[[{SUMMARY_END}]]", SUMMARY_END[1:-1], id="nested-brackets"),
        pytest.param(
            SUMMARY_END[:5] + SUMMARY_BEGIN + SUMMARY_END[5:],
            SUMMARY_END[:5] + SUMMARY_BEGIN[1:-1] + SUMMARY_END[5:],
            id="one-in-the-other",
        ),
    ],
)
def test_markers_in_a_summary_are_disarmed(summary: str, shown: str) -> None:
    """Nothing that a tool returned can end the summary early."""
    assert summary_text(summary) == f"{SUMMARY_BEGIN}\n{shown}\n{SUMMARY_END}"


@given(st.lists(st.sampled_from(["[", "]", "a", SUMMARY_BEGIN, SUMMARY_END, *"sy"])))
def test_markers_stand_once(pieces: list[str]) -> None:
    """However brackets and markers are nested, each documented marker stands once."""
    text = summary_text("".join(pieces))
    begin = "[Previous conversation summary]\n"
    end = "\n[End of summary — conversation continues below]"
    assert text.startswith(begin)
    assert text.endswith(end)
    assert text.count(SUMMARY_BEGIN) == text.count(SUMMARY_END) == 1


# --- the prompt ---

FENCE = re.compile(r"^<(/?)([a-z-]+)-([0-9a-f]{16})>$", re.MULTILINE)


def fences(prompt: str) -> list[str]:
    """The names of the fences in order; closing ones with a slash."""
    return [f"{slash}{name}" for slash, name, _ in FENCE.findall(prompt)]


def test_full_prompt() -> None:
    """Everything is there, in order, the data between markers."""
    prompt = summary_prompt("TRANSCRIPT", "BEFORE", "NOW", "[Current todo list]")
    assert fences(prompt) == [
        "previous-summary",
        "/previous-summary",
        "transcript",
        "/transcript",
        "current-request",
        "/current-request",
    ]
    places = [
        prompt.index(text)
        for text in ("BEFORE", "TRANSCRIPT", "NOW", "[Current todo list]", "Now write")
    ]
    assert places == sorted(places)
    assert len({marker for *_, marker in FENCE.findall(prompt)}) == 1


def test_short_prompt() -> None:
    """Only what exists is mentioned, and no marker can be guessed from another."""
    prompt = summary_prompt("TRANSCRIPT")
    assert fences(prompt) == ["transcript", "/transcript"]
    assert prompt.endswith("\n\nNow write the summary.")
    assert prompt != summary_prompt("TRANSCRIPT")
