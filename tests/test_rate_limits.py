"""A key may send fewer tokens in a minute than its model's window holds."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from google.genai import types

from contextguard_adk import CallRecord, Pipeline, SlidingWindow, Threshold
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import RecordedRequest, SimulatedLlm
from tests.builders import Chat, answer_text, guarded_agent
from tests.chats import KEY, agent_requests, guarded_chat, slow, words

WINDOW_TOKENS = 128_000
LIMIT_TOKENS = 12_000
WORDS = {
    "openai": "Request too large for gpt-6 in organization org on tokens per min "
    "(TPM): Limit {limit}, Requested {sent}. The input or output tokens must be "
    "reduced in order to run successfully.",
    "groq": "Request too large for model `m` on tokens per minute (TPM): Limit "
    "{limit}, Requested {sent}, please reduce your message size and try again.",
    "anthropic": "This request would exceed your organization's rate limit of "
    "{limit:,} input tokens per minute. Please reduce the prompt length.",
}
WAIT = "on tokens per min (TPM): Limit {limit}, Used {used}, Requested {sent}."


class RateLimitError(Exception):
    """What a client raises, which asks to be asked again at once."""

    status_code = 429
    response = SimpleNamespace(headers={"Retry-After": "0"})


class Key(SimulatedLlm):
    """A model behind a key with a limit; what was used in a minute counts as well."""

    words: str = WORDS["openai"]
    used_tokens: int = 0
    refused: int = 0

    def _judge(self, record: RecordedRequest) -> None:
        sent = record.prompt_tokens
        limit = LIMIT_TOKENS
        numbers = {"limit": limit, "sent": sent, "used": self.used_tokens}
        if sent > limit:
            self.refused += 1
            raise RateLimitError(self.words.format(**numbers))
        if sent + self.used_tokens > limit:
            self.refused += 1
            raise RateLimitError(WAIT.format(**numbers))
        super()._judge(record)


def open_chat(
    llm: Key, strategy: Strategy | None = None, **settings: Any
) -> tuple[Chat, list[CallRecord]]:
    """A chat whose window is far above the limit."""
    calls = list[CallRecord]()
    chosen = strategy or Threshold(context_window=WINDOW_TOKENS)
    chat = guarded_chat(llm, chosen, guard={"on_call": calls.append}, **settings)
    return chat, calls


def make_key(said: str = "openai", **settings: Any) -> Key:
    """A key that counts a token for four bytes."""
    settings = {"context_window": WINDOW_TOKENS, "token_ratio": 1.0, **settings}
    return Key(words=WORDS[said], **settings)


def tell_rates(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of the limit."""
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [each for each in told if "key's limit" in each]


@pytest.mark.quick("groq-Threshold")
@pytest.mark.parametrize("strategy", [Threshold, *slow(SlidingWindow, Pipeline)])
@pytest.mark.parametrize("said", WORDS)
async def test_a_limit_below_the_request_costs_one_refusal(
    said: str, strategy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The turn is answered, later ones stay below it, and one warning says so."""
    llm = make_key(said)
    chat, calls = open_chat(llm, strategy(context_window=WINDOW_TOKENS))
    for turn in range(20):
        assert answer_text(await chat.say(words(1_500, f"Question {turn}.")))
    assert llm.refused == 1
    assert [call.is_recovered for call in calls].count(True) == 1
    assert calls[-1].window_tokens == LIMIT_TOKENS // 2

    record = (await chat.state()).get(KEY.format("record")) or "{}"
    assert "window_tokens" not in record

    [told] = tell_rates(caplog)
    figures = "12,000 tokens per minute", "context_window=6000"
    assert all(each in told for each in figures)


async def test_other_sessions_of_the_process_keep_to_it() -> None:
    """A new session is not refused again."""
    llm = make_key()
    chat, calls = open_chat(llm)
    for turn in range(9):
        assert answer_text(await chat.say(words(1_500, f"Question {turn}.")))
    other = Chat(chat.app.root_agent, chat.app.plugins, session_id="other")
    for turn in range(9):
        assert answer_text(await other.say(words(1_500, f"Question {turn}.")))

    assert llm.refused == 1
    assert calls[-1].window_tokens == LIMIT_TOKENS // 2


class Sum(Key):
    """A key whose limit counts the output that a request asks for as well."""

    def _judge(self, record: RecordedRequest) -> None:
        sent = record.prompt_tokens + (record.config.max_output_tokens or 0)
        if sent > LIMIT_TOKENS:
            self.refused += 1
            raise RateLimitError(self.words.format(limit=LIMIT_TOKENS, sent=sent))


@pytest.mark.quick("3000")
@pytest.mark.parametrize("output_tokens", [3_000, 8_000, 11_000])
async def test_output_counts_against_a_limit_that_names_the_request(
    output_tokens: int,
) -> None:
    """Prompts leave room for it; one of nearly all of the limit is lowered."""
    llm = Sum(context_window=WINDOW_TOKENS, token_ratio=1.0)
    config = types.GenerateContentConfig(max_output_tokens=output_tokens)
    chat, calls = open_chat(llm, agent={"generate_content_config": config})
    for turn in range(12):
        assert answer_text(await chat.say(words(1_400, f"Question {turn}.")))
    assert llm.refused == 1
    asked = agent_requests(llm)[-1].config.max_output_tokens or 0
    assert asked + calls[-1].threshold_tokens <= LIMIT_TOKENS


async def test_output_does_not_count_against_a_limit_of_input() -> None:
    """What is set stays, and takes no room."""
    llm = make_key("anthropic")
    config = types.GenerateContentConfig(max_output_tokens=8_000)
    chat, calls = open_chat(llm, agent={"generate_content_config": config})
    for turn in range(12):
        assert answer_text(await chat.say(words(1_400, f"Question {turn}.")))
    assert llm.refused == 1
    assert calls[-1].threshold_tokens == 0.4 * LIMIT_TOKENS

    asked = {each.config.max_output_tokens for each in agent_requests(llm)}
    assert asked == {8_000}


async def test_a_dense_vocabulary_is_refused_once() -> None:
    """What the refusal says of the request's size is remembered without usage."""
    llm = make_key(token_ratio=1.7, usage="never")
    chat, _ = open_chat(llm)
    for turn in range(16):
        assert answer_text(await chat.say(words(1_500, f"Question {turn}.")))
    assert llm.refused == 1


async def test_a_limit_that_a_wait_helps_with_stays_a_refusal() -> None:
    """The error is the turn's end, as without a guard; nothing is learned."""
    llm = make_key()
    chat, calls = open_chat(llm)
    await chat.say(words(2_000))
    llm.used_tokens = 11_000
    with pytest.raises(RateLimitError, match="Used 11000"):
        await chat.say("Go on.")
    assert llm.refused == 1

    llm.used_tokens = 0
    assert answer_text(await chat.say("Go on."))
    assert calls[-1].window_tokens == WINDOW_TOKENS


async def test_a_resend_in_the_same_minute_ends_in_its_error() -> None:
    """It is smaller, and still too much for what is left: that is the answer."""
    llm = make_key()
    chat, _ = open_chat(llm)
    for turn in range(4):
        assert answer_text(await chat.say(words(2_400, f"Question {turn}.")))
    llm.used_tokens = 10_500
    *_, last = await chat.say(words(2_400, "Question 4."))
    assert last.error_code == "RateLimitError"
    assert "Used 10500" in (last.error_message or "")
    assert llm.refused <= 7  # The summary and the resend, three times each.

    llm.used_tokens = 0
    assert answer_text(await chat.say("And now?"))


async def test_more_than_the_limit_may_be_served_by_a_cache() -> None:
    """What was accepted once passes again: a limit on what is new is no window."""
    llm = make_key("anthropic")
    chat, calls = open_chat(llm)
    llm.words = "unused"
    error = RateLimitError(WORDS["anthropic"].format(limit=3_000))
    llm.script = ["Yes.", error, "Yes."]
    await chat.say(words(4_000))
    with pytest.raises(RateLimitError):
        await chat.say("Go on.")

    assert answer_text(await chat.say("Go on.")) == "Yes."
    assert calls[-1].window_tokens == WINDOW_TOKENS


async def test_a_limit_that_a_tool_quotes_is_none() -> None:
    """Words of the conversation in a refusal teach nothing."""
    quoted = WORDS["openai"].format(limit=1_200, sent=9_000)
    llm = make_key()
    llm.script = ["Yes.", RateLimitError(f"Slow down. Your input: {quoted}"), "Yes."]
    chat, calls = open_chat(llm)
    await chat.say(quoted)
    with pytest.raises(RateLimitError):
        await chat.say("Go on.")
    await chat.say("Go on.")

    assert len(agent_requests(llm)) == 3
    assert calls[-1].window_tokens == WINDOW_TOKENS


class Bucket(Key):
    """A key whose limit is what all calls of a turn may take, summaries included."""

    left_tokens: int = LIMIT_TOKENS

    def _judge(self, record: RecordedRequest) -> None:
        self.used_tokens = LIMIT_TOKENS - self.left_tokens
        super()._judge(record)
        self.left_tokens -= record.prompt_tokens


async def test_summary_and_request_fit_into_one_minute() -> None:
    """A compaction does not use up what the request needs that it makes room for."""
    llm = Bucket(context_window=WINDOW_TOKENS, token_ratio=1.0)
    chat, calls = open_chat(llm)
    for turn in range(24):
        llm.left_tokens = LIMIT_TOKENS
        assert answer_text(await chat.say(words(1_500, f"Question {turn}.")))
    assert llm.refused == 1
    assert sum(call.compaction is not None for call in calls) > 2


async def test_a_session_that_has_had_more_accepted_keeps_it() -> None:
    """Another one's refusal, which names no request, does not cut it down."""
    llm = make_key("anthropic")
    chat, calls = open_chat(llm)
    for turn in range(6):
        assert answer_text(await chat.say(words(1_500, f"Question {turn}.")))
    accepted_tokens = calls[-1].real_tokens or 0
    other = Chat(chat.app.root_agent, chat.app.plugins, session_id="other")
    for turn in range(9):
        assert answer_text(await other.say(words(1_500, f"Question {turn}.")))

    assert llm.refused == 1
    assert answer_text(await chat.say("And now?"))
    assert accepted_tokens > LIMIT_TOKENS // 2
    assert calls[-1].window_tokens == WINDOW_TOKENS
    assert calls[-1].compaction is None


async def test_a_key_of_another_client_has_a_limit_of_its_own() -> None:
    """Two agents may ask models of one name."""
    limited = make_key()
    free = SimulatedLlm(context_window=WINDOW_TOKENS)
    chat, _ = open_chat(limited)
    for turn in range(9):
        assert answer_text(await chat.say(words(1_500, f"Question {turn}.")))
    assert limited.refused == 1

    agent = guarded_agent(free)
    other = Chat(agent, chat.app.plugins, session_id="other")
    for turn in range(9):
        assert answer_text(await other.say(words(1_500, f"Question {turn}.")))
    assert free.summaries == 0


@pytest.mark.parametrize(
    "said", ["tpm limit=1", "tokens per min (TPM): Limit 10, Requested 4000"]
)
async def test_odd_figures_are_no_limits(said: str) -> None:
    """Nobody sends less for them."""
    llm = SimulatedLlm(
        context_window=WINDOW_TOKENS,
        script=["One.", RateLimitError(said), "Two.", "Three."],
    )
    chat = guarded_chat(llm, Threshold(context_window=WINDOW_TOKENS))
    await chat.say(words(9_000))
    with contextlib.suppress(RateLimitError):
        await chat.say("And now?")
    await chat.say("Go on.")

    assert llm.summaries == 0
    assert llm.requests[-1].prompt_tokens > 3_000
