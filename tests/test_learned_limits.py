"""What a provider's refusals and counts teach of a model's limits, and what not."""

from __future__ import annotations

from typing import Any

import pytest
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
from tests.chats import words
from tests.payloads import CONFIGURED_TOKENS, image, open_chat, open_payload


def make_llm(script: list[Reply] | None = None, **settings: Any) -> SimulatedLlm:
    """A model that counts a token for four bytes, unless `token_ratio` is set."""
    settings = {"context_window": CONFIGURED_TOKENS, "token_ratio": 1.0, **settings}
    return SimulatedLlm(script=script, **settings)


def searching(turns: int, searches: int) -> list[Reply]:
    """Some searches and an answer, turn by turn."""
    turn: list[Reply] = [*[call_part("search")] * searches, "Done."]
    return turn * turns


def overflow(limit: int) -> ContextOverflowError:
    """A rejection that names a limit."""
    words = f"prompt is too long: {limit + 999} tokens > {limit} maximum"
    return ContextOverflowError(words)


async def test_a_limit_is_of_the_model_that_named_it() -> None:
    """An agent that moves to a larger model has the larger window at once."""
    calls = list[CallRecord]()
    windows = {"small": 4_000, "large": 100_000, "other": 4_000}
    llms = {
        name: make_llm(model=name, context_window=window)
        for name, window in windows.items()
    }
    chat = open_chat(llms["small"], guard={"on_call": calls.append})
    agent: Any = chat.app.root_agent
    for name in ("small", "large", "small", "other"):
        agent.model = llms[name]
        for turn in range(2 if name == "large" else 7):
            assert answer_text(await chat.say(words(750, f"Question {turn}.")))
        expected = CONFIGURED_TOKENS if name == "large" else 4_000
        assert calls[-1].window_tokens == expected

    assert {name: llm.rejections for name, llm in llms.items()} == {
        "small": 1,
        "large": 0,
        "other": 1,
    }


async def test_other_sessions_of_the_process_keep_to_a_named_window() -> None:
    """They are not refused, and state says nothing of it."""
    calls = list[CallRecord]()
    llm = make_llm(context_window=4_000)
    chat = open_chat(llm, guard={"on_call": calls.append})
    for turn in range(7):
        assert answer_text(await chat.say(words(750, f"Question {turn}.")))
    assert llm.rejections == 1

    shown = len(calls)
    other = Chat(chat.app.root_agent, chat.app.plugins, session_id="other")
    for turn in range(7):
        assert answer_text(await other.say(words(750, f"Question {turn}.")))
    assert llm.rejections == 1
    assert {call.window_tokens for call in calls[shown:]} == {4_000}
    for each in (chat, other):
        assert "window_tokens" not in str(await each.state())


async def test_a_session_keeps_to_a_named_window_with_a_new_model_object() -> None:
    """The app may make one for each turn."""
    llm = make_llm(context_window=4_000)
    chat = open_chat(llm)
    agent: Any = chat.app.root_agent
    rejections = 0
    for turn in range(14):
        agent.model = make_llm(context_window=4_000)
        assert answer_text(await chat.say(words(750, f"Question {turn}.")))
        rejections += agent.model.rejections
    assert rejections == 1


async def test_a_window_is_forgotten_once_more_was_accepted() -> None:
    """The first request of another session is larger than it was estimated."""
    calls = list[CallRecord]()
    llm = make_llm(["Yes.", overflow(3_000), "Resent.", "Yes."], token_ratio=2.0)
    chat = open_chat(llm, guard={"on_call": calls.append})
    await chat.say(words(1_000))
    assert answer_text(await chat.say("Go on.")) == "Resent."
    assert answer_text(await chat.say("And now?")) == "Yes."
    assert calls[-1].window_tokens == 3_000

    other = Chat(chat.app.root_agent, chat.app.plugins, session_id="other")
    await other.say(words(2_000))
    assert calls[-1].window_tokens == 3_000
    assert (calls[-1].real_tokens or 0) > 3_000
    for each in (chat, other):
        await each.say("Go on.")
        assert calls[-1].window_tokens == CONFIGURED_TOKENS


async def test_a_refusal_in_bytes_leaves_out_the_oldest_images() -> None:
    """The newest stay, the others are named; no window is kept, no turn lost."""
    calls = list[CallRecord]()
    chat, llm = open_payload(guard={"on_call": calls.append})
    for number in range(8):
        events = await chat.say(image(number, 3_000))
        assert answer_text(events) == f"Acknowledged: Image {number}."

    assert (llm.refusals, llm.summaries) == (1, 0)
    assert {call.window_tokens for call in calls} == {1_000_000}

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
    told = "[attachments_left_out: [attached image/png, 9000 bytes]]"
    named = {"result": f"a page\n{told}"}

    assert part.function_response
    assert part.function_response.response == {**result, **named}


async def test_one_image_that_is_too_large_ends_in_the_error() -> None:
    """Nothing can be left out but what the user asks about; no window is kept."""
    calls = list[CallRecord]()
    chat, llm = open_payload(guard={"on_call": calls.append})
    with pytest.raises(SimulatedProviderError, match="payload"):
        await chat.say(image(1, 20_000))
    assert llm.refusals <= 3

    await chat.say("Never mind.")
    assert calls[-1].window_tokens == 1_000_000


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

    assert calls[-1].window_tokens == CONFIGURED_TOKENS


async def test_a_quoted_rate_limit_does_not_hide_a_rejection() -> None:
    """A rejection that echoes a tool's "too many requests" is recovered."""
    limit = "prompt is too long: 9000 tokens > 8000 maximum"
    error = ContextOverflowError(f"{limit}; input: HTTP 429: too many requests")
    llm = make_llm([call_part("search"), error, "Resent.", "Yes."])
    calls = list[CallRecord]()
    found = f"HTTP 429: too many requests. {words(2_000)}"
    chat = open_chat(llm, found, guard={"on_call": calls.append})
    assert answer_text(await chat.say("Look it up.")) == "Resent."
    await chat.say("And now?")
    assert calls[-1].window_tokens == 8_000


async def test_other_error_in_the_resend_is_the_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The caller sees why the rescue failed, and the named window is kept."""
    error = RuntimeError("It broke off.")
    llm = make_llm([call_part("search"), overflow(3_000), error, "Better."])
    calls = list[CallRecord]()
    chat = open_chat(llm, is_streaming=True, guard={"on_call": calls.append})
    *_, last = await chat.say("Question 0?")

    assert (last.error_code, last.error_message) == ("RuntimeError", str(error))
    assert llm.calls - llm.summaries == 3
    assert "RuntimeError" in caplog.text
    assert answer_text(await chat.say("Try again.")) == "Better."
    assert calls[-1].window_tokens == 3_000
