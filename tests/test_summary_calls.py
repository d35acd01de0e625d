"""How a summary is asked for, when it is asked for again, and what is a summary."""

from __future__ import annotations

import logging
from collections.abc import Callable
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from contextguard_adk import Threshold
from contextguard_adk._measuring.budgets import plan_budgets
from contextguard_adk._providers.calling import call_with_retries, is_transient
from contextguard_adk.testing import Reply, SimulatedLlm, call
from contextguard_adk.testing import SimulatedProviderError as ProviderError
from tests.builders import model, user
from tests.chats import (
    DEMAND,
    ProviderBusyError,
    Registry,
    guarded_chat,
    seed,
    text_of,
    words,
)
from tests.written import GOOD, Written, ended

# --- the config of a call ---


THOUGHTS: dict[str, tuple[int, int | None, int | None, int]] = {
    "vertex_ai/gemini-2.5-flash-001": (200_000, None, 0, 0),
    "gemini-pro-latest": (200_000, None, None, 4_096),
    "gemini-2.5-flash-preview": (100_000, 128, 0, 0),
    "claude-haiku-4-5": (100_000, 2_048, None, 4_096),
}


@pytest.mark.parametrize("name", THOUGHTS)
async def test_thinking_is_off_or_has_room(name: str) -> None:
    """Thoughts count as output: they are turned off, or get tokens of their own."""
    window_tokens, wish, expected, headroom_tokens = THOUGHTS[name]
    thinking = types.ThinkingConfig(thinking_budget=wish) if wish else None
    config = types.GenerateContentConfig(thinking_config=thinking)
    agent = {"generate_content_config": config}
    written = Written(GOOD, model=name, agent=agent, context_window=window_tokens)
    await written.compact()
    found = written.asked[0].thinking_config
    assert (found.thinking_budget if found else None) == expected

    budget_tokens = plan_budgets(window_tokens).summary_tokens
    assert written.asked[0].max_output_tokens == budget_tokens + headroom_tokens


class Limited(Registry):
    """Knows a window, and fails where it is asked for an output limit, or knows one."""

    limit_tokens: int | None = None

    def max_output_tokens(self, model: str) -> int:
        """Returns it."""
        if self.limit_tokens is None:
            raise RuntimeError("down")
        return self.limit_tokens


@pytest.mark.parametrize(("limit", "asked"), [(500, 500), (None, 10_000)])
async def test_a_registry_may_know_output_limits(limit: int | None, asked: int) -> None:
    """One that fails knows none."""
    registry = Limited(100_000)
    guard = {"registry": registry}
    registry.limit_tokens = limit
    written = Written(GOOD, model="gpt-in-house", guard=guard, context_window=None)
    await written.compact()
    assert written.asked[0].max_output_tokens == asked


# --- asking again ---


async def test_a_call_that_failed_is_made_again() -> None:
    """A refused one without our limits, which can be what was wrong."""
    refused = Written(ProviderError("max_tokens is too large"), GOOD)
    assert await refused.compact() == GOOD
    first, second = refused.asked
    assert first.max_output_tokens == 800
    assert first.thinking_config
    assert (second.max_output_tokens, second.thinking_config) == (None, None)

    busy = Written(ProviderBusyError("secret"), ProviderBusyError("secret"), GOOD)
    assert await busy.compact() == GOOD
    assert [config.max_output_tokens for config in busy.asked] == [800] * 3

    invalid = ProviderError("max_tokens is too large")
    invalid.status_code = 422
    unprocessable = Written(invalid, GOOD)
    assert await unprocessable.compact() == GOOD
    assert unprocessable.asked[1].max_output_tokens is None

    later = ProviderBusyError("later")
    later.response = SimpleNamespace(headers={"Retry-After": "3600"})
    waiting = Written(later, GOOD)
    assert not await waiting.compact()
    assert len(waiting.asked) == 1


def failure(**attributes: Any) -> Exception:
    """A client's error."""
    error = named("ClientError")
    vars(error).update(attributes)
    return error


def named(name: str) -> Exception:
    """A client's error without a status."""
    error: Exception = type(name, (Exception,), {})("Something happened.")
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        *((failure(status_code=n), True) for n in (429, 500, 529)),
        *((failure(code=n), True) for n in (429, "503")),
        *((failure(status_code=n), False) for n in (400, 401, 413)),
        (failure(response=SimpleNamespace(status_code=503)), True),
        (failure(code="context_length_exceeded"), False),
        (failure(status_code=500, message="maximum context length is 600"), False),
        (failure(code=400, name="ServiceUnavailable"), False),
        *((named(n), True) for n in ("APITimeoutError", "OverloadedError")),
        *((each(), True) for each in (TimeoutError, ConnectionResetError)),
        *((each(), False) for each in (ValueError, OSError)),
    ],
    ids=str,
)
def test_which_errors_are_transient(error: Exception, expected: bool) -> None:
    """The status decides, then the names of classes."""
    assert is_transient(error) is expected


@pytest.mark.parametrize(
    "says",
    [
        {"response": SimpleNamespace(headers={"retry-after": "0.01"})},
        {"response": SimpleNamespace(headers={"Retry-After": formatdate(0)})},
        {"litellm_response_headers": {"retry-after": "0.01"}},
        {"args": ("{'retryDelay': '0.01s'}",)},
    ],
    ids=["seconds", "date", "LiteLLM's", "Gemini's"],
)
async def test_a_provider_says_when_to_come_back(says: dict[str, Any]) -> None:
    """In a header, or in the body; ours would not fit the time that is left."""
    error = failure(status_code=429)
    outcomes = [True]
    for name, value in says.items():
        setattr(error, name, value)

    async def ask_once() -> str:
        if outcomes:
            outcomes.pop()
            raise error
        return "Here."

    assert await call_with_retries(ask_once, 0.9) == "Here."


DOWN = RuntimeError("out of order")
REFUSAL = "I'm sorry, but I can't help with that."


@pytest.mark.parametrize(
    ("settings", "replies", "expected"),
    [
        ({}, [DOWN, DOWN, DOWN, "They spoke."], [1, 1, 0, 1, 0, 0, 1, 1]),
        ({}, [DOWN, "They spoke."] * 3, [1] * 6),
        ({}, [REFUSAL] * 4 + ["They spoke."], [2, 0, 2, 0, 0, 0, 0, 1]),
        ({"summarizer": "no-such-model"}, None, [1, 1]),
    ],
    ids=["fails", "a success ends the count", "refuses", "unknown"],
)
async def test_a_failing_summarizer_is_asked_less_often(
    settings: dict[str, Any], replies: Any, expected: list[int]
) -> None:
    """After two failures in a row it is left alone until the history has grown by a
    tenth of the window, with each further one by another tenth."""
    written = Written(context_window=20_000, **settings)
    written.llm.summary_replies = replies
    asked = []
    for number in range(len(expected)):
        before = written.llm.summaries
        await seed(written.chat, user(words(600)), model(words(600)), state=DEMAND)
        await written.chat.say(f"{number} {words(225)}")
        asked.append(written.llm.summaries - before)

    assert asked == expected


async def test_a_refusing_summarizer_leaves_others_alone() -> None:
    """Another session's history may be nothing to refuse."""
    written = Written(REFUSAL, REFUSAL, GOOD)
    assert not await written.compact()
    written.chat.session_id = "another"
    written.records.clear()
    assert await written.compact() == GOOD


# --- what is a summary ---


NO_SUMMARY: dict[str, Reply] = {
    "English": "I'm sorry, but I can't help with that.",
    "typographic": "I\u2019m sorry, I can\u2019t assist with that request.",
    "German": "Es tut mir leid, dabei kann ich nicht helfen.",
    "Japanese": "申し訳ありませんが、お手伝いできません。",
    "stub": "The",
    "heading": "## Done\n",
    "nothing said": "## Constraints\nNone\n\n## Done\n- None.\n\n## Pending\n**None**",
    "cut": ended("## Current State\nThe budg", "MAX_TOKENS"),
    "back-ticks": "```\n```",
    "tool": '{"name": "look", "arguments": {"at": "the budget of 4,711 EUR"}}',
    "words beside a call": [types.Part(text=GOOD), call("look")],
    "question": "Sure! What would you like me to summarize?",
    "polite": "Could you please provide the conversation you'd like summarized?",
    "French": "Que souhaitez-vous que je résume ?",
    "Spanish": "¡Claro! ¿Qué texto te gustaría que resumiera?",
    "Chinese": "您想让我总结什么内容?",
    "Arabic": "بالتأكيد! ماذا تريد أن ألخص؟",
}


async def test_sections_may_say_that_there_is_nothing() -> None:
    """One fact makes it a summary, whatever stands under the other headings."""
    partly = "## Constraints\nNone\n\n## Done\nThe budget is set.\n\n## Pending\nNone"
    assert await Written(partly).compact() == partly


async def test_the_prompt_asks_for_what_is_there_and_what_is_not() -> None:
    """Also None where there is nothing; the guard's own lines are no wishes."""
    written = Written(GOOD)
    await written.compact()
    said = str(written.asked[0].system_instruction)
    for expected in ("## Constraints", "word for word", "## Artifacts", "## Done"):
        assert expected in said
    for expected in ("## Pending", "## Open Questions", "write None", "[System: …]"):
        assert expected in said


@pytest.mark.parametrize("reply", NO_SUMMARY.values(), ids=NO_SUMMARY)
async def test_what_is_no_summary_is_asked_for_once_more(reply: Reply) -> None:
    """A second answer of that kind leaves it to a mechanical summary."""
    written = Written(reply, GOOD)
    assert await written.compact() == GOOD
    hopeless = Written(reply, reply, GOOD)
    assert not await hopeless.compact()
    assert len(hopeless.asked) == 2


async def test_an_answer_that_a_filter_ended_is_not_asked_for_again() -> None:
    """The same transcript would end so again."""
    written = Written(ended(GOOD, "SAFETY"), GOOD)
    assert not await written.compact()
    assert len(written.asked) == 1


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("SAFETY", "(the answer was ended by SAFETY)"),
        ("429", "(the answer holds no text (429))"),
        ("block\n\x1b[2J of zq-77", "(the answer was ended by a filter)"),
        ("bad\nERROR zq-77", "(the answer holds no text (an unnamed reason))"),
        ("zq-77" * 9, "(the answer holds no text (an unnamed reason))"),
    ],
)
async def test_a_code_is_logged_only_if_it_is_one(
    code: str, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What a client puts in its place may be anything, also of the conversation."""
    written = Written(*[LlmResponse(error_code=code)] * 2)
    assert not await written.compact()
    said = [r.getMessage() for r in caplog.records if r.name.startswith("contextguard")]
    assert shown in "".join(said)
    assert "zq-77" not in "".join(said)
    assert all(line.isprintable() for line in said)


async def test_names_from_outside_break_no_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those of models, and what a registry of the user's own says."""
    caplog.set_level(logging.INFO, "contextguard_adk")

    class Odd:
        def __repr__(self) -> str:
            return "odd\n\x1b[2J"

        def context_window(self, model: str) -> Any:
            return self

    llm = SimulatedLlm(context_window=100_000, model="gpt\n\x1b[2J\u2028x")
    chat = guarded_chat(llm, Threshold(), guard={"registry": Odd()})
    await seed(chat, user(words(600)), model(words(600)), state=DEMAND)
    await chat.say("Go on.")
    said = [r.getMessage() for r in caplog.records if r.name.startswith("contextguard")]
    assert (
        sum(text.startswith(("Compacted", "The model registry")) for text in said) == 2
    )
    assert all(line.isprintable() for line in said)


def parrot(part: str) -> Callable[[LlmRequest], Reply]:
    """Answers with a part of what it is asked."""

    def reply(request: LlmRequest) -> Reply:
        prompt = text_of(request.contents[-1])
        whole = prompt.partition(">\n")[2].rpartition("\n</transcript")[0]
        return {"all": prompt, "transcript": whole, "beginning": whole[:2_000]}[part]

    return reply


@pytest.mark.parametrize("part", ["all", "transcript", "beginning"])
async def test_an_echo_of_the_transcript_is_no_summary(part: str) -> None:
    """It would stand there in place of a summary, and as long as that may be."""
    written = Written()
    written.llm.summary_replies = parrot(part)
    said = [user(words(3_000)), model("Noted.\nAnd now?"), user("Look.")] * 3
    assert not await written.compact(*said)
    assert len(written.asked) == 2


GENUINE = {
    "English": "The user books a flight to Lisbon for May 3 (PNR KX42PD), 212 EUR.",
    "German": "## Stand\nDer Bericht ist halb fertig.\n## Offen\nSoll es mit?",
    "French": "L'utilisateur veut un vol pour Lisbonne le 3 mai ; reste le siège.",
    "Spanish": "El usuario reserva un vuelo a Lisboa (KX42PD). ¿Ventana o pasillo?",
    "Chinese": "用户要预订五月三日飞往里斯本的航班, 编号KX42PD。靠窗吗?",
    "Japanese": "利用者は五月三日のリスボン行きの便を予約中。窓側の席にするか?",
    "Russian": "Пользователь бронирует рейс в Лиссабон на 3 мая. Место выбрать?",
    "Arabic": "يحجز المستخدم رحلة إلى لشبونة في 3 مايو. أي مقعد بجانب النافذة؟",
    "quoting": "The code so far:\n  def book(flight):\n      return PNRS[flight]\n"
    "user: wants a window seat\nmodel: asked which side\nOpen: which side?",
    "a list": "- KX42PD is paid\n- the seat is open\n  - window or aisle?",
}
FLIGHT = """Book the flight KX42PD to Lisbon on May 3, window seat if possible. Chapter
  def book(flight):
Reserva un vuelo a Lisboa, por favor. Пожалуйста, рейс в Лиссабон, пользователь.
请预订五月三日飞往里斯本的航班. 五月三日のリスボン行きの便、窓側の席で。
رحلة إلى لشبونة في 3 مايو، مقعد بجانب النافذة من فضلك"""


@pytest.mark.parametrize("text", GENUINE.values(), ids=GENUINE)
async def test_a_genuine_summary_is_taken(text: str) -> None:
    """Also where it is short, ends with an open question, or quotes."""
    written = Written(text)
    assert await written.compact(user(f"{FLIGHT} {words(3_000)}")) == text
    assert len(written.asked) == 1


ACCEPTED: dict[str, tuple[Reply, dict[str, Any]]] = {
    "Chinese": ("用户要预订机票。", {}),
    "bad news": ("Leider war der Flug ausgebucht; es geht am Montag weiter.", {}),
    "long and sorry": (f"I'm sorry, said the user. {words(200)}".strip(), {}),
    "JSON of one's own": ('{"said": "tea"}', {"summary_instruction": "Write JSON."}),
    "of one's own": ("Tea.", {"summary_instruction": "Write one word."}),
}


@pytest.mark.parametrize(("reply", "settings"), ACCEPTED.values(), ids=ACCEPTED)
async def test_a_summary_may_be_short(reply: Reply, settings: dict[str, Any]) -> None:
    """What it says cannot be judged, and is taken at the first try."""
    written = Written(reply, **settings)
    assert await written.compact()
    assert len(written.asked) == 1
