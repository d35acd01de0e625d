"""A provider that says "too long" is understood, obeyed, and asked once more."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.sessions import InMemorySessionService
from google.genai import types
from pydantic import Field

from contextguard_adk import CallRecord, SlidingWindow, Threshold
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import (
    ContextOverflowError,
    ErrorStyle,
    Reply,
    SimulatedLlm,
)
from tests.builders import (
    SUMMARY_BEGIN,
    Chat,
    answer_text,
    guarded_agent,
    user,
)
from tests.chats import (
    Changing,
    Registry,
    agent_requests,
    hide,
    take_apart,
    words,
)
from tests.refusing import (
    CONFIGURED_TOKENS,
    FINDING,
    INPUT_PLUS_OUTPUT,
    LIMITS,
    REAL_TOKENS,
    RESERVING,
    THRESHOLD,
    make_llm,
    open_chat,
    overflow,
    work,
    working_script,
)

SLIDING = SlidingWindow(**LIMITS, max_messages=1_000)
UNNAMED = ("openai-responses", "bedrock", "groq", "ollama")
"""The providers that do not say how much would have been accepted."""

both_strategies = pytest.mark.parametrize(
    ("strategy", "is_streaming"),
    [(THRESHOLD, True), (SLIDING, False)],
    ids=["threshold, streamed", "sliding window, whole"],
)


def check_smaller(llm: SimulatedLlm, start: int, count: int) -> list[int]:
    """The sizes of the agent's requests from `start` on: each smaller than the last."""
    sizes = [record.prompt_tokens for record in agent_requests(llm)[start:]]
    assert len(sizes) == count
    assert sizes == sorted(set(sizes), reverse=True)
    return sizes


def guard_errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the guard has logged as an error."""
    errors = [r for r in caplog.records if r.levelno == logging.ERROR]
    return [r.getMessage() for r in errors if r.name.startswith("contextguard")]


@pytest.mark.quick("anthropic", "gemini", "ollama")
@pytest.mark.parametrize("style", ["openai", "anthropic", "gemini", *UNNAMED])
async def test_one_rejection_teaches_the_limit(style: ErrorStyle) -> None:
    """No turn is lost, and later calls of the process keep to a window that was named;
    another process that goes on with the session is rejected once as well."""
    sessions = InMemorySessionService()
    script = working_script(4)
    for start in (0, 2):
        calls: list[CallRecord] = []
        guard = {"on_call": calls.append}
        settings: dict[str, Any] = {"token_ratio": 1.3, "error_style": style}
        llm = make_llm(script[start * 3 :], REAL_TOKENS, **settings)
        await work(open_chat(llm, guard=guard, session_service=sessions), 2, start)
        assert llm.violations == 0
        assert llm.rejections == 1
        assert [call.is_recovered for call in calls].count(True) == 1

        window_tokens = CONFIGURED_TOKENS if style in UNNAMED else REAL_TOKENS
        assert calls[-1].window_tokens == window_tokens


class BreaksOff(SimulatedLlm):
    """A provider that finds out in mid-stream that the request was too long."""

    breaks: list[Exception] = Field(default_factory=list)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers; with `stream` it breaks off after the first chunk, once."""
        async for response in super().generate_content_async(llm_request, stream):
            yield response
            if response.partial and self.breaks:
                raise self.breaks.pop()


async def test_rejection_in_mid_stream_is_recovered() -> None:
    """Chunks that came before the rejection are followed by a whole answer."""
    llm = BreaksOff(
        context_window=CONFIGURED_TOKENS,
        token_ratio=1.0,
        script=["A first try.", "Answer 0."],
        breaks=[ConnectionError(str(overflow()))],
    )
    events = await open_chat(llm, is_streaming=True).say("Question 0? " * 500)

    assert answer_text(events) == "Answer 0."
    assert [event.partial for event in events] == [True, False]


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "streamed"])
async def test_input_plus_output_lowers_the_output_first(is_streaming: bool) -> None:
    """If only the sum is too large the same contents go out with less output."""
    calls: list[CallRecord] = []
    llm = make_llm([INPUT_PLUS_OUTPUT, "Fine."])
    guard = {"on_call": calls.append}
    chat = open_chat(llm, is_streaming=is_streaming, guard=guard, agent=RESERVING)
    assert answer_text(await chat.say("How are you?")) == "Fine."

    first, second = llm.requests
    assert second.contents == first.contents
    assert second.config.max_output_tokens == int((200_000 - 178_959) * 0.98)

    await chat.say("And now?")
    assert llm.requests[-1].config.max_output_tokens == 64_000
    assert calls[-1].window_tokens == CONFIGURED_TOKENS


@pytest.mark.parametrize(("refusing", "is_kept"), [("", True), ("small", False)])
async def test_a_refused_sum_lowers_the_output_in_other_sessions(
    refusing: str, is_kept: bool
) -> None:
    """The refused output may be the provider's default; a fallback's is not kept."""
    refusal = ContextOverflowError(str(INPUT_PLUS_OUTPUT))
    refusal.model = refusing  # type: ignore[attr-defined]
    llm = make_llm([refusal, "Fine.", "Yes."])
    chat = open_chat(llm, agent=RESERVING)
    await chat.say("How are you?")

    other = Chat(guarded_agent(llm), chat.app.plugins, session_id="other")
    await other.say(words(150_000))
    asked_tokens = llm.requests[-1].config.max_output_tokens
    assert asked_tokens == (pytest.approx(45_000, rel=0.02) if is_kept else None)


@pytest.mark.parametrize("is_refused", [False, True])
async def test_output_that_was_set_is_lowered_only_after_a_refusal(
    is_refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A provider may count input and output apart; what cannot fit is told once."""
    error = ContextOverflowError(
        "input length and `max_tokens` exceed context limit: 300 + 7800 > 8000"
    )
    llm = make_llm([*[error] * is_refused, "Fine.", "Yes.", "Well."])
    settings = types.GenerateContentConfig(max_output_tokens=7_800)
    chat = open_chat(
        llm,
        Threshold(context_window=8_000),
        agent={"generate_content_config": settings},
    )

    for _ in range(3):
        assert answer_text(await chat.say("How are you? " * 80))
    asked = [record.config.max_output_tokens or 0 for record in agent_requests(llm)]
    assert asked[0] == 7_800
    assert (max(asked[1:]) < 7_800) is is_refused

    told = [r.getMessage() for r in caplog.records if "output limit" in r.getMessage()]
    assert len(told) == 1
    assert all(figure in told[0] for figure in ("7,800", "8,000", "max_output_tokens"))


class AnthropicLlm(SimulatedLlm):
    """A model whose client asks for output by itself, as ADK's of that name."""

    max_tokens: int = 8_192


@pytest.mark.parametrize(("real_tokens", "is_lowered"), [(200_000, False), (0, True)])
async def test_output_that_nobody_set_is_lowered_where_it_does_not_fit(
    real_tokens: int, is_lowered: bool
) -> None:
    """What counts is the model's real window, not a smaller one that is configured."""
    llm = AnthropicLlm(script=working_script(6), token_ratio=1.0)
    calls = list[CallRecord]()
    guard = {"registry": Registry(real_tokens or None), "on_call": calls.append}
    chat = open_chat(llm, Threshold(context_window=16_000), guard=guard)
    await work(chat, 6)
    assert {call.threshold_tokens for call in calls} == {12_800}

    requests = agent_requests(llm)
    asked = [record.config.max_output_tokens for record in requests]
    assert any(asked) is is_lowered

    for record in requests:
        output_tokens = record.config.max_output_tokens or 8_192
        assert record.prompt_tokens + output_tokens <= max(16_000, real_tokens)


async def test_output_that_cannot_be_lowered_enough_leads_to_compaction() -> None:
    """The history is compacted if less output does not help."""
    errors = [INPUT_PLUS_OUTPUT] * 2
    llm = make_llm([*working_script(1)[:2], *errors, "Answer 0."])
    await work(open_chat(llm, agent=RESERVING), 1)
    assert agent_requests(llm)[-1].config.max_output_tokens == 20_620
    check_smaller(llm, start=3, count=2)
    assert SUMMARY_BEGIN in llm.requests[-1].text


@both_strategies
async def test_second_rejection_leads_to_a_minimal_request(
    strategy: Strategy, is_streaming: bool
) -> None:
    """Each further request is strictly smaller, and still holds what the user wants."""
    tail: list[Reply] = [overflow(), overflow(), "Answer 1."]
    llm = make_llm([*working_script(1, 4), *working_script(1, 4)[:-1], *tail])
    await work(open_chat(llm, strategy, is_streaming=is_streaming), 2)
    check_smaller(llm, start=9, count=3)
    final = llm.requests[-1]
    assert "Question 1?" in final.text
    assert SUMMARY_BEGIN in final.text
    assert final.stream is False


def hide_calls(request: LlmRequest) -> None:
    """Takes the calls out of a request, as plugins do that mask arguments."""
    for content in request.contents:
        parts = [part for part in content.parts or () if not part.function_call]
        content.parts = parts
    request.contents = [content for content in request.contents if content.parts]


async def test_minimal_request_is_told_as_text_if_its_form_is_refused() -> None:
    """Each refusal of the minimal request leads to another form, lone results too."""
    refusal = RuntimeError(
        "messages with role 'tool' must be a response to a preceding message with "
        "'tool_calls'."
    )
    tail: list[Reply] = [overflow(), overflow(), refusal, refusal, "Answer 0."]
    llm = make_llm([*working_script(1, 4)[:-1], *tail])
    await work(open_chat(llm, before=[Changing(hide_calls)]), 1)

    in_turn, as_text = agent_requests(llm)[-2:]
    told = "[System: The conversation so far, as text.]"
    assert told not in in_turn.text
    assert told in as_text.text


@both_strategies
async def test_original_error_reaches_the_caller_when_nothing_helps(
    caplog: pytest.LogCaptureFixture, strategy: Strategy, is_streaming: bool
) -> None:
    """After two minimal requests the first error is raised, and logged with numbers."""
    errors = [overflow(used=9_000 + n) for n in range(4)]
    llm = make_llm([*working_script(1)[:-1], *errors, "Better."])
    chat = open_chat(llm, strategy, is_streaming=is_streaming)
    with pytest.raises(ContextOverflowError) as raised:
        await chat.say("Question 0?")
    assert raised.value is errors[0]

    sizes = check_smaller(llm, start=2, count=4)
    [said] = guard_errors(caplog)
    assert "'agent'" in said
    assert "Question" not in said

    numbers = [int(number) for number in re.findall(r"\d+", said)]
    assert REAL_TOKENS in numbers
    assert all(pytest.approx(size, rel=0.05, abs=100) in numbers for size in sizes)
    assert answer_text(await chat.say("Try again.")) == "Better."
    assert llm.violations == 0


RATE_LIMIT = "Rate limit reached for gpt-6: Limit 30000, Used 29000. Try again in 2s."
QUOTA = "429 RESOURCE_EXHAUSTED. Quota exceeded for input token count."
EXTRA = "Extra usage is required for long context requests."


@pytest.mark.parametrize(
    ("guard", "said", "error", "is_logged"),
    [
        pytest.param({}, "Hello.", overflow(), True, id="a short message"),
        pytest.param({"observe": True}, FINDING * 3, overflow(), False, id="observing"),
        pytest.param(
            {"agents": {"agent": None}}, FINDING * 3, overflow(), False, id="exempt"
        ),
        pytest.param({}, FINDING * 3, RuntimeError(RATE_LIMIT), False, id="rate limit"),
        pytest.param({}, FINDING * 3, RuntimeError(QUOTA), False, id="quota"),
        pytest.param({}, FINDING * 3, RuntimeError(EXTRA), False, id="extra usage"),
        pytest.param({}, FINDING * 3, RuntimeError(), False, id="no words"),
    ],
)
async def test_rejected_request_is_not_sent_again(
    caplog: pytest.LogCaptureFixture,
    guard: dict[str, Any],
    said: str,
    error: Exception,
    is_logged: bool,
) -> None:
    """If nothing can be gained or nothing may be changed, or it is another error, it
    reaches the caller and costs no further request."""
    llm = make_llm([error, "never"])
    with pytest.raises(type(error)) as raised:
        await open_chat(llm, guard=guard).say(said)
    assert raised.value is error
    assert len(agent_requests(llm)) == 1
    assert len(guard_errors(caplog)) == is_logged


async def test_instruction_beyond_the_limit_costs_no_summary(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If instruction and tools alone exceed the limit nothing is paid for."""
    llm = SimulatedLlm(
        context_window=REAL_TOKENS, token_ratio=1.0, error_style="anthropic"
    )
    agent = {"instruction": "Be helpful. " * 3_000}
    with pytest.raises(ContextOverflowError):
        await open_chat(llm, agent=agent).say("How? " * 900)

    assert llm.summaries == 0
    assert llm.rejections <= 2
    assert len(guard_errors(caplog)) == 1


def append_reminder(request: LlmRequest) -> None:
    """Adds a content, as callbacks do that inject context."""
    request.contents.append(user("Mind the gap."))


@pytest.mark.parametrize(
    ("change", "is_streaming"), [(append_reminder, False), (partial(hide, "Ada"), True)]
)
async def test_resend_respects_what_later_callbacks_did(
    is_streaming: bool, change: Callable[[LlmRequest], None]
) -> None:
    """What a callback behind the guard added stays, what it took away stays away."""
    tail: list[Reply] = [overflow(limit=3_500, used=6_000), "Answer 0."]
    llm = make_llm(
        ["Good day.", *working_script(1, searches=3)[:-1], *tail],
        summary_replies=lambda _: "The scanner was used.",
    )
    chosen = SlidingWindow(context_window=CONFIGURED_TOKENS)
    chat = open_chat(llm, chosen, plugins=[Changing(change)], is_streaming=is_streaming)

    await chat.say("My name is Ada.")
    await work(chat, 1)
    resent = agent_requests(llm)[-1]
    assert llm.violations == 0
    assert ("Ada" in resent.text) is (change is append_reminder)
    assert resent.text.count("Mind the gap.") == (change is append_reminder)

    shown = take_apart(resent.contents)
    asked = [content for content in shown if content == user("Question 0?")]
    quoted = "The user's current request is: `Question 0?`"
    assert len(asked) + resent.text.count(quoted) == 1


def copy_contents(callback_context: Any, llm_request: LlmRequest) -> None:
    """Copies each content, as callbacks do before they change one."""
    copies = [each.model_copy(deep=True) for each in llm_request.contents]
    llm_request.contents = copies


@both_strategies
async def test_a_callback_that_copies_contents_leaves_one_summary(
    strategy: Strategy, is_streaming: bool
) -> None:
    """What the guard has sent is known by what it says, not by the object."""
    script = [*working_script(2, searches=3), *working_script(1, searches=3)[:-1]]
    script += [overflow(limit=3_500, used=6_000), "Answer 2."]
    llm = make_llm(script, summary_replies=lambda _: "The scanner was used.")
    agent = {"before_model_callback": copy_contents}
    chat = open_chat(llm, strategy, agent, is_streaming=is_streaming)
    await work(chat, 2)
    await chat.set_state({"context_guard:compact": True})
    await work(chat, 1, start=2)
    rejected, resent = agent_requests(llm)[-2:]

    assert rejected.text.count(SUMMARY_BEGIN) == resent.text.count(SUMMARY_BEGIN) == 1
    assert resent.prompt_tokens < rejected.prompt_tokens
