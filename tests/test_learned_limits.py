"""What a provider's refusals and counts teach of a model's limits, and what not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.adk.sessions import InMemorySessionService
from google.genai import types

from contextguard_adk import CallRecord
from contextguard_adk.testing import (
    ContextOverflowError,
    Reply,
    SimulatedLlm,
    SimulatedProviderError,
)
from tests.builders import (
    Chat,
    answer_text,
    call,
    call_part,
    model,
    responses,
    user,
)
from tests.chats import KEY, words
from tests.payloads import CONFIGURED_TOKENS, image, open_chat, open_payload

RECORD = KEY.format("record")


def make_llm(script: list[Reply] | None = None, **settings: Any) -> SimulatedLlm:
    """A model that counts a token for four bytes."""
    settings = {"context_window": CONFIGURED_TOKENS, **settings}
    return SimulatedLlm(token_ratio=1.0, script=script, **settings)


def searching(turns: int, searches: int) -> list[Reply]:
    """Some searches and an answer, turn by turn."""
    turn: list[Reply] = [*[call_part("search")] * searches, "Done."]
    return turn * turns


async def learned(chat: Chat) -> dict[str, Any]:
    """What session state says about limits."""
    record = json.loads((await chat.state()).get(RECORD) or "{}")
    learned: dict[str, Any] = record.get("learned", {}).get("simulated", {})
    return learned


def overflow(limit: int) -> ContextOverflowError:
    """A rejection that names a limit."""
    words = f"prompt is too long: {limit + 999} tokens > {limit} maximum"
    return ContextOverflowError(words)


async def test_a_limit_is_of_the_model_that_named_it() -> None:
    """An agent that moves to a larger model has the larger window at once."""
    sessions = InMemorySessionService()
    calls = list[CallRecord]()
    windows = {"small": 4_000, "large": 100_000, "other": 4_000}
    rejected = {"small": 1, "large": 0, "other": 1}
    for name in ("small", "large", "small", "other"):
        llm = make_llm(model=name, context_window=windows[name])
        chat = open_chat(llm, session_service=sessions, guard={"on_call": calls.append})
        for turn in range(7 if name in rejected else 2):
            assert answer_text(await chat.say(words(750, f"Question {turn}.")))
        assert llm.rejections == rejected.pop(name, 0)
        assert bool(llm.summaries) is (name != "large")
        expected = CONFIGURED_TOKENS if name == "large" else 4_000
        assert calls[-1].window_tokens == expected


async def test_a_limit_that_only_state_says_has_to_be_named_again() -> None:
    """A process that goes on with a session is refused once, and knows it again."""
    sessions = InMemorySessionService()
    calls = list[CallRecord]()
    for count in (7, 14):
        llm = make_llm(context_window=4_000)
        chat = open_chat(llm, session_service=sessions, guard={"on_call": calls.append})
        for turn in range(count):
            assert answer_text(await chat.say(words(750, f"Question {turn}.")))
        assert llm.rejections == 1
        assert calls[-1].window_tokens == 4_000


async def test_a_new_limit_keeps_fields_of_a_later_release() -> None:
    """This release knows nothing of them, and the later one may need them again."""
    llm = make_llm(context_window=4_000)
    chat = open_chat(llm)
    stored = {"version": 2, "learned": {"simulated": {"later_field": 7}}}
    await chat.set_state({RECORD: json.dumps(stored)})

    for turn in range(7):
        assert answer_text(await chat.say(words(750, f"Question {turn}.")))
    limits = await learned(chat)
    assert limits["window_tokens"] == 4_000
    assert limits["later_field"] == 7


async def test_a_limit_below_what_was_accepted_is_believed_when_named_again() -> None:
    """One slip of a provider does not shrink a window that has proven larger."""
    again: list[Reply] = [overflow(3_000), "Resent.", "Yes."]
    llm = make_llm(["Yes.", *again, *again])
    calls = list[CallRecord]()
    chat = open_chat(llm, guard={"on_call": calls.append})
    await chat.say(words(20_000))
    for is_believed in (False, True):
        assert answer_text(await chat.say("Go on.")) == "Resent."
        await chat.say("Go on.")
        assert (calls[-1].window_tokens == 3_000) is is_believed
        assert is_believed or calls[-1].window_tokens >= 20_000


async def test_a_refusal_in_bytes_leaves_out_the_oldest_images() -> None:
    """The newest stay, the others are named; no window is learned, no turn lost."""
    calls = list[CallRecord]()
    chat, llm = open_payload(guard={"on_call": calls.append})
    for number in range(8):
        events = await chat.say(image(number, 3_000))
        assert answer_text(events) == f"Acknowledged: Image {number}."

    assert (llm.refusals, llm.summaries) == (1, 0)
    assert {call.window_tokens for call in calls} == {1_000_000}
    assert not await learned(chat)

    last = llm.requests[-1]
    assert "[attached image/png '0.png', 3000 bytes]" in last.text
    assert last.contents[-1] == image(7, 3_000)

    begins = [request.contents[:6] for request in llm.requests[-2:]]
    assert begins[0] == begins[1]


async def test_images_of_tool_results_are_left_out() -> None:
    """A result keeps all its words and names what it held."""
    chat, llm = open_payload()
    result = {"result": "a page", "attachments": ["page.pdf"]}
    shot = {"inline_data": {"mime_type": "image/png", "data": b"x" * 9_000}}
    found = {"name": "search", "response": result, "parts": [shot]}
    seen = responses(types.Part.model_validate({"function_response": found}))
    await chat.tell([user("Look."), call("search"), seen, model("Seen.")])
    llm.words = "request_too_large"
    for number, refusals in ((1, 0), (2, 1)):
        await chat.say(image(number, 9_999))
        assert llm.refusals == refusals

    [part] = llm.requests[-1].contents[2].parts or []
    named = {"attachments_left_out": ["[attached image/png, 9000 bytes]"]}

    assert part.function_response
    assert part.function_response.response == {**result, **named}


async def test_one_image_that_is_too_large_ends_in_the_error() -> None:
    """Nothing can be left out but what the user asks about."""
    chat, llm = open_payload()
    with pytest.raises(SimulatedProviderError, match="payload"):
        await chat.say(image(1, 20_000))
    assert llm.refusals <= 3
    assert not await learned(chat)


QUOTED = "maximum context length is 600 tokens"


@pytest.mark.parametrize(
    "said",
    [
        f"Invalid content in messages[3]: {{'result': 'The {QUOTED}.'}}",
        f"prompt is too long. Your request: The {QUOTED}.",
    ],
    ids=["another error", "a rejection"],
)
async def test_a_limit_that_an_error_quotes_teaches_nothing(said: str) -> None:
    """Words of the conversation in an error name no limit of the model."""
    calls = list[CallRecord]()
    script: list[Reply] = [call_part("search"), SimulatedProviderError(said)]
    llm = make_llm([*script, "Resent.", "Yes."])
    chat = open_chat(llm, f"The {QUOTED}. " * 40, guard={"on_call": calls.append})
    assert answer_text(await chat.say("Look it up. " * 900)) == "Resent."
    assert answer_text(await chat.say("And now?")) == "Yes."

    if "prompt is too long" not in said:
        assert calls[-1].window_tokens == CONFIGURED_TOKENS
    assert calls[-1].window_tokens > 1_000


async def test_a_quoted_rate_limit_does_not_hide_a_rejection() -> None:
    """A rejection that echoes a tool's "too many requests" is recovered."""
    limit = "prompt is too long: 9000 tokens > 8000 maximum"
    error = ContextOverflowError(f"{limit}; input: HTTP 429: too many requests")
    llm = make_llm([call_part("search"), error, "Resent."])
    chat = open_chat(llm, f"HTTP 429: too many requests. {words(2_000)}")
    assert answer_text(await chat.say("Look it up.")) == "Resent."
    assert (await learned(chat))["window_tokens"] == 8_000


async def test_other_error_in_the_resend_is_the_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The caller sees why the rescue failed, and the session keeps what it taught."""
    error = RuntimeError("It broke off.")
    llm = make_llm([call_part("search"), overflow(3_000), error, "Better."])
    chat = open_chat(llm, is_streaming=True)
    *_, last = await chat.say("Question 0?")

    assert (last.error_code, last.error_message) == ("RuntimeError", str(error))
    assert llm.calls - llm.summaries == 3
    assert "RuntimeError" in caplog.text
    assert (await learned(chat))["window_tokens"] == 3_000
    assert answer_text(await chat.say("Try again.")) == "Better."
