"""The words that stand before models, exactly as documented."""

from __future__ import annotations

import re
import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contextguard_adk.history.rendering import (
    SUMMARY_BEGIN,
    SUMMARY_END,
    continuation_text,
    summary_text,
)
from contextguard_adk.summarizing.prompts import summary_instruction, summary_prompt

COMPACTED = (
    "[System: The conversation was compacted because it exceeded the context window. "
    "The summary above contains all prior context. "
)


@pytest.mark.parametrize(
    ("summary", "shown"),
    [
        pytest.param(f"a {SUMMARY_END} b", f"a {SUMMARY_END[1:-1]} b", id="end"),
        pytest.param(f"a {SUMMARY_BEGIN} b", f"a {SUMMARY_BEGIN[1:-1]} b", id="begin"),
        pytest.param(f"[[{SUMMARY_END}]]", SUMMARY_END[1:-1], id="nested-brackets"),
        pytest.param(
            SUMMARY_END[:5] + SUMMARY_BEGIN + SUMMARY_END[5:],
            SUMMARY_END[:5] + SUMMARY_BEGIN[1:-1] + SUMMARY_END[5:],
            id="one-in-the-other",
        ),
        pytest.param("[End of summary]", "[End of summary]", id="something-like-it"),
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


def test_continuation_quotes_the_request() -> None:
    """The current request stands in backticks, and a newer message comes first."""
    assert continuation_text("Fix it.") == (
        COMPACTED + "The user's current request is: `Fix it.`. "
        "Continue working on this request without asking the user to repeat anything. "
        "If a newer message of the user follows below, that message is the current "
        "request instead.]"
    )


def test_generic_continuation() -> None:
    """Without a request the continuation names none."""
    assert continuation_text("") == (
        COMPACTED + "Continue where it leaves off without asking the user to repeat "
        "anything. If a newer message of the user follows below, that message is the "
        "current request.]"
    )


@pytest.mark.parametrize("request_text", ["{request}", "{}", "{0!r}", "`", "%s"])
def test_request_is_quoted_as_it_is(request_text: str) -> None:
    """Braces and backticks in a request are text."""
    assert f"`{request_text}`." in continuation_text(request_text)


@pytest.mark.parametrize(
    ("max_tokens", "words"),
    [(1_000, 750), (0, 50)],
)
def test_instruction_limits_the_words(max_tokens: int, words: int) -> None:
    """The summarizer is told three words for four tokens, and at least fifty."""
    instruction = summary_instruction(max_tokens)
    assert f"Write at most {words} words" in instruction
    assert "\n## Language and Tools\n" in instruction


def test_own_instruction() -> None:
    """A template of one's own keeps every other brace."""
    template = 'Reply {"n": {max_words}} in {style}.'
    assert summary_instruction(100, template) == 'Reply {"n": 75} in {style}.'


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


@pytest.mark.parametrize("place", range(3))
def test_marker_is_not_contained_in_the_text(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A marker that stands in the data is not used."""
    drawn = iter(["taken", "free"])
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(drawn))
    texts = ["transcript", "summary", "request"]
    texts[place] += "</transcript-taken>"
    prompt = summary_prompt(*texts)
    assert "<transcript-free>" in prompt
    assert "<transcript-taken>" not in prompt
