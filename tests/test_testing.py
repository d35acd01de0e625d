"""`SimulatedLlm` is as strict as a provider, alone and behind a real `Runner`."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from google.adk.apps.llm_event_summarizer import LlmEventSummarizer
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types
from pydantic import ValidationError

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.testing import (
    ContextOverflowError,
    ErrorStyle,
    InvalidRequestError,
    Reply,
    SimulatedLlm,
    SimulatedProviderError,
    VirtualTimeLoop,
    call,
)
from contextguard_adk.testing.provider import (
    count_request_tokens,
    count_tokens,
    list_content_texts,
)
from tests.builders import (
    Chat,
    answer_text,
    call_part,
    calls,
    event,
    guarded_agent,
    model,
    response_part,
    responses,
    user,
)


def ask(*contents: types.Content, **config: Any) -> LlmRequest:
    """Builds a request."""
    made = types.GenerateContentConfig(**config)
    return LlmRequest(contents=list(contents), config=made)


async def stream(llm: SimulatedLlm, request: LlmRequest) -> list[LlmResponse]:
    """Returns all chunks of a streamed answer."""
    return [chunk async for chunk in llm.generate_content_async(request, stream=True)]


async def answer(llm: SimulatedLlm, request: LlmRequest) -> LlmResponse:
    """Returns the one response to a request."""
    [response] = [chunk async for chunk in llm.generate_content_async(request)]
    return response


def text_of(response: LlmResponse | None) -> str:
    """Returns the text of a response."""
    assert response
    assert response.content
    return "\n".join(list_content_texts([response.content]))


def summary_request(material: str, max_output_tokens: int | None = None) -> LlmRequest:
    """Builds a request as the guard's summarizer makes it."""
    prompt = f"Merge this.\n<transcript-3f9a>\n{material}\n</transcript-3f9a>"
    return ask(user(prompt), max_output_tokens=max_output_tokens)


def test_tokens_are_counted() -> None:
    """A ratio counts bytes, its absence counts tokens of o200k_base."""
    for text, ratio, expected_tokens in (
        ("x" * 41, 3.0, 31),  # Bytes by four, times the ratio, rounded up.
        ("é" * 4, 1.0, 2),
        ("hello world", None, 2),
        ("The quick brown fox jumps. " * 4_000, None, 24_001),
        (" " * 1_000_000, None, 7_813),  # Tiktoken alone panics.
    ):
        assert count_tokens([text], ratio) == pytest.approx(expected_tokens, rel=0.001)

    # An instruction in any form; names, descriptions and schemas of tools.
    halves = ["x" * 20, types.Part(text="x" * 20)]
    for instruction in ("x" * 40, user("x" * 40), halves):
        request = ask(system_instruction=instruction)
        assert count_request_tokens(request, 1.0, 258) == 10
    for field in ("parameters", "parameters_json_schema"):
        schema = {"type": "OBJECT", "description": "d" * 4_000}
        declaration = types.FunctionDeclaration.model_validate(
            {"name": "n" * 400, "description": "x" * 4_000, field: schema}
        )
        request = ask(tools=[types.Tool(function_declarations=[declaration])])
        assert 2_100 < count_request_tokens(request, 1.0, 0) < 2_150


STYLES: dict[ErrorStyle, str] = {
    "openai": r"maximum context length is 100 tokens\. .* 150 tokens",
    "openai-responses": r"exceeds the context window of this model",
    "anthropic": r"prompt is too long: 150 tokens > 100 maximum",
    "gemini": r"count \(150\) exceeds .* number of tokens allowed \(100\)",
    "vertex": r"count is 150 but the model only supports up to 100",
    "bedrock": r"Input is too long for requested model",
    "mistral": r"contains 150 .* for model with 100 maximum context length",
    "groq": r"reduce the length of the messages or completion",
    "vllm": r"150 input tokens.*context length is only 100 tokens",
    "llama.cpp": r"\(150 tokens\) .* available context size \(100 tokens\)",
    "ollama": r"exceeded max context length by 50 tokens",
    "xai": r"maximum prompt length is 100 but .* 150 tokens",
}


@pytest.mark.parametrize("style", STYLES)
async def test_an_overflow_is_told_in_the_words_of_a_provider(
    style: ErrorStyle,
) -> None:
    """The refusal names the true count and limit where the provider does."""
    llm = SimulatedLlm(context_window=100, token_ratio=1.0, error_style=style)
    await answer(llm, ask(user("x" * 400)))  # The window itself is still inside.
    billed_tokens = llm.billed_tokens
    with pytest.raises(ContextOverflowError, match=STYLES[style]) as caught:
        await answer(llm, ask(user("x" * 600)))
    assert isinstance(caught.value, SimulatedProviderError)
    assert caught.value.status_code == 400

    record = llm.requests[-1]
    assert (record.rejected, record.prompt_tokens) == ("overflow", 150)
    assert (record.response, llm.billed_tokens) == (None, billed_tokens)
    assert (llm.calls, llm.rejections, llm.violations) == (2, 1, 0)


ASK = user("hi")
ANSWER = model("hello")
CALL = calls(call_part("f"))
RESULT = responses(response_part("f", {"a": 1}))
ID_1 = call_part("f", "1")
ID_2 = call_part("f", "2")
RESULT_1 = response_part("f", {}, "1")
RESULT_2 = response_part("f", {}, "2")
F = call_part("f")
F_RESULT = response_part("f", {})
G = call_part("g")
G_RESULT = response_part("g")
SYSTEM = types.Content(role="system", parts=[types.Part(text="x")])
BROKEN: dict[str, tuple[list[types.Content], str]] = {
    "no contents": ([], "contents is not specified"),
    "model first": ([ANSWER], 'must use the "user" role'),
    "system": ([ASK, SYSTEM], "valid role"),
    "empty part": ([responses(types.Part())], "one initialized field"),
    "empty text": ([user("")], "must be non-empty"),
    "call at the end": ([ASK, CALL], "were not answered: 'f'"),
    "response alone": ([ASK, RESULT], "must answer a function call"),
    "other id": ([ASK, calls(ID_1), responses(RESULT_2)], "must answer"),
    "model returns": ([ASK, CALL, calls(F_RESULT)], "user role"),
    "user calls": ([responses(F), RESULT], "model role"),
}


@pytest.mark.parametrize(("contents", "words"), BROKEN.values(), ids=[*BROKEN])
async def test_a_broken_structure_is_refused(
    contents: list[types.Content], words: str
) -> None:
    """Every breach of a structural rule is raised, counted and recorded."""
    llm = SimulatedLlm(context_window=1)  # Structure is judged before length.
    with pytest.raises(InvalidRequestError, match=re.escape(words)) as caught:
        await answer(llm, ask(*contents))
    assert caught.value.status_code == 400
    assert (llm.calls, llm.rejections, llm.violations) == (1, 0, 1)
    assert [record.rejected for record in llm.requests] == ["invalid"]


async def test_a_stream_ends_with_the_complete_response() -> None:
    """Partials carry the pieces, the last chunk all of it, as without streaming."""
    text = "The weather in Tokyo is sunny."
    thought = types.Part(text="thinking", thought=True)
    parts = [thought, types.Part(text=text), call("f", x=1), call("g")]
    llm = SimulatedLlm(script=[parts, parts])
    *partials, final = await stream(llm, ask(ASK))
    assert len(partials) == 3 + 3 + 2
    assert all(partial.partial for partial in partials)

    contents = [partial.content for partial in partials if partial.content]
    pieces = [part for piece in contents for part in piece.parts or []]
    assert "".join(p.text for p in pieces if p.text and not p.thought) == text
    assert "".join(p.text for p in pieces if p.text and p.thought) == "thinking"
    assert pieces[-2:] == parts[2:]
    assert final == await answer(llm, ask(ASK))
    assert [record.stream for record in llm.requests] == [True, False]


async def test_summaries_hold_nothing_of_what_asks_for_them() -> None:
    """Excerpts are of the conversation alone, also where one covers another."""
    llm = SimulatedLlm()
    guard = ContextGuardPlugin(default=Threshold(context_window=4_000))
    chat = Chat(guarded_agent(llm), [guard])
    for number in range(2):
        await chat.tell([user(f"Fact {number}."), model("notebooks " * 1_900)])
        await chat.say("Go on.")

    summaries = [text_of(each.response) for each in llm.requests if each.is_summary]
    assert ["Fact 0." in summary for summary in summaries[:2]] == [True, True]

    for summary in summaries:
        assert not re.search("write the summary|keep whatever|transcript", summary)


async def test_summary_replies_script_the_summarizer() -> None:
    """Scripted summaries come first, extraction after; the agent's script waits."""
    llm = SimulatedLlm(script=["agent"], summary_replies=[ValueError("no"), ""])
    with pytest.raises(ValueError, match="no"):
        await answer(llm, summary_request("x"))
    assert text_of(await answer(llm, summary_request("x"))) == ""
    assert text_of(await answer(llm, ask(ASK))) == "agent"
    assert "key 12" in text_of(await answer(llm, summary_request("key 12")))
    assert (llm.calls, llm.summaries) == (4, 3)

    said = user("please find order ORD-4711"), model("it is in \\warehouse nine")
    events = [event(content) for content in said]
    assert await LlmEventSummarizer(llm=llm).maybe_summarize_events(events=events)
    assert llm.summaries == 4

    text = "user: please find order ORD-4711\nagent: it is in \\warehouse nine"
    assert text_of(llm.requests[-1].response) == text


async def test_requests_are_recorded() -> None:
    """A record holds the request as it was and the answer to it."""
    llm = SimulatedLlm(token_ratio=1.0, script=["fine"])
    result = responses(response_part("f", {"found": "K-17"}))
    request = ask(ASK, CALL, result, system_instruction=["be", "brief"])
    response = await answer(llm, request)
    request.contents.clear()
    request.config.system_instruction = "changed"
    [record] = llm.requests

    assert record.text == 'hi\nf\n{}\nf\n{"found":"K-17"}'
    assert record.system_instruction == "be\nbrief"
    assert record.config.system_instruction == ["be", "brief"]
    assert record.response == response
    assert (record.is_summary, record.stream, record.rejected) == (False, False, None)
    assert response.usage_metadata
    assert response.usage_metadata.prompt_token_count == record.prompt_tokens


async def test_a_prompt_cache_serves_what_an_earlier_prompt_began_with() -> None:
    """Contents up to the first difference; nothing with another head."""
    llm = SimulatedLlm(prompt_cache=True, token_ratio=4.0, script=["a"] * 20)
    first = user("one two three")
    brief = {"system_instruction": "Be brief."}
    tool = types.Tool(function_declarations=[types.FunctionDeclaration(name="f")])
    for request, expected in (
        (ask(first), 0),
        (ask(first, model("a"), user("x")), 13),
        (ask(user("one two four")), len("one two ")),
        (ask(user("one"), **brief), 0),
        (ask(user("one"), **brief), 12),
        (ask(user("one"), **brief, tools=[tool]), 0),
    ):
        usage = (await answer(llm, request)).usage_metadata
        assert usage
        assert usage.cached_content_token_count == (expected or None)
        assert llm.requests[-1].cached_tokens == expected


def test_wrong_settings_are_refused() -> None:
    """A mistake in the settings fails when the model is made."""
    wrong: list[dict[str, Any]] = [
        {"context_windw": 1},
        {"context_window": 0},
        {"token_ratio": 0},
        {"media_tokens": -1},
        {"error_style": "nobody"},
        {"usage": "sometimes"},
        {"script": "text"},
        {"keep_requests": -1},
        {"latency_seconds": -1},
    ]
    for setting in wrong:
        with pytest.raises(ValidationError):
            SimulatedLlm.model_validate(setting)


def look_up(key: str) -> dict[str, Any]:
    """Looks up a key."""
    return {"value": key.upper()}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
async def test_an_agent_with_a_tool_runs(is_streamed: bool) -> None:
    """Tool calls, parallel ones too, come back answered in ADK's own requests."""
    both = [call("look_up", key="a"), call("look_up", key="b")]
    script: list[Reply] = [both, "first", call("look_up", key="c")]
    llm = SimulatedLlm(call_ids=is_streamed, script=script)
    chat = Chat(guarded_agent(llm, [look_up]), is_streaming=is_streamed)
    turns = [await chat.say(message) for message in ("one", "two")]
    assert [answer_text(events) for events in turns] == ["first", "Done."]
    assert any(event.partial for event in turns[0]) is is_streamed
    assert (llm.calls, llm.violations, llm.rejections) == (4, 0, 0)

    last = llm.requests[-1]
    assert last.stream is is_streamed
    assert "You help." in last.system_instruction
    assert all(f'"value":"{key}"' in last.text for key in "ABC")

    parts = [part for content in last.contents for part in content.parts or []]
    ids = [part.function_call.id for part in parts if part.function_call]
    assert ids == (["call_1", "call_2", "call_3"] if is_streamed else [None] * 3)


def test_on_the_virtual_clock_waiting_takes_no_time() -> None:
    """Timers pass in their order; what is waited for tells how long it would take."""
    llm = SimulatedLlm(latency_seconds=3_600)
    ended: list[tuple[str, float]] = []

    async def wait(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        ended.append((name, asyncio.get_running_loop().time()))

    async def work() -> None:
        await asyncio.gather(wait("late", 86_400), wait("early", 60))
        assert await answer(llm, ask(ASK))
        ended.append(("answered", asyncio.get_running_loop().time()))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 10)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(work())
        assert runner.get_loop().time() == 90_010
    assert ended == [("early", 60), ("late", 86_400), ("answered", 90_000)]
