"""`SimulatedLlm` is as strict as a provider, alone and behind a real `Runner`."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import warnings
from typing import Any, Literal

import pytest
import tiktoken
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig
from google.adk.apps.llm_event_summarizer import LlmEventSummarizer
from google.adk.events.event import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from contextguard_adk.testing import (
    ContextOverflowError,
    ErrorStyle,
    InvalidRequestError,
    RecordedRequest,
    Reply,
    SimulatedLlm,
    SimulatedProviderError,
    call,
)
from contextguard_adk.testing.provider import (
    count_request_tokens,
    count_tokens,
    list_content_texts,
)
from tests.builders import model, user


def content(role: str | None, *parts: types.Part) -> types.Content:
    """Builds a content of parts."""
    return types.Content(role=role, parts=list(parts))


def called(name: str, call_id: str | None = None, **args: Any) -> types.Part:
    """Builds a call part, with an id where one is given."""
    part = call(name, **args)
    assert part.function_call
    part.function_call.id = call_id
    return part


def returned(name: str, call_id: str | None = None, **result: Any) -> types.Part:
    """Builds a response part, with an id where one is given."""
    response = types.FunctionResponse(name=name, id=call_id, response=result)
    return types.Part(function_response=response)


def ask(
    *contents: types.Content, config: types.GenerateContentConfig | None = None
) -> LlmRequest:
    """Builds a request."""
    return LlmRequest(
        contents=list(contents), config=config or types.GenerateContentConfig()
    )


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
    config = types.GenerateContentConfig(max_output_tokens=max_output_tokens)
    return ask(user(prompt), config=config)


# Counting


@pytest.mark.parametrize(
    ("texts", "ratio", "expected_tokens"),
    [
        pytest.param(["x" * 400], 1.0, 100, id="bytes by four"),
        pytest.param(["x" * 400], 3.0, 300, id="times the ratio"),
        pytest.param(["x"], 1.0, 1, id="rounded up"),
        pytest.param(["é" * 4], 1.0, 2, id="bytes not characters"),
        pytest.param(["\ud800"], 4.0, 3, id="lone surrogate"),
        pytest.param([], 1.0, 0, id="nothing"),
        pytest.param(["hello world"], None, 2, id="BPE"),
        pytest.param(["\ud800"], None, 1, id="BPE of a lone surrogate"),
    ],
)
def test_tokens_are_counted(
    texts: list[str], ratio: float | None, expected_tokens: int
) -> None:
    """A ratio counts bytes, its absence counts tokens of o200k_base."""
    assert count_tokens(texts, ratio) == expected_tokens


def test_bpe_counts_equal_those_of_tiktoken() -> None:
    """Slices and the cache do not change the count of a long prose text."""
    text = "The quick brown fox jumps over the lazy dog. " * 2_000
    expected_tokens = len(tiktoken.get_encoding("o200k_base").encode(text))
    for _ in range(2):
        counted_tokens = count_tokens([text], None)
        assert counted_tokens == pytest.approx(expected_tokens, rel=0.001)


def test_a_megabyte_of_blanks_can_be_counted() -> None:
    """Text on which tiktoken itself panics is counted in slices."""
    assert count_tokens([" " * 1_000_000], None) > 0


BLOB = types.Part.from_bytes(data=b"\xff\x00" * 50_000, mime_type="image/png")
FILE = types.Part.from_uri(file_uri="gs://bucket/a.pdf", mime_type="application/pdf")
PICTURED = types.Part(
    function_response=types.FunctionResponse(
        name="f",
        parts=[
            types.FunctionResponsePart(
                inline_data=types.FunctionResponseBlob(
                    data=b"\xff", mime_type="image/png"
                )
            )
        ],
    )
)


@pytest.mark.parametrize(
    ("part", "expected_tokens"),
    [
        pytest.param(types.Part(text="x" * 8), 2, id="text"),
        pytest.param(called("abcd"), 2, id="call without args"),
        pytest.param(called("abcd", a="é"), 4, id="call"),
        pytest.param(returned("abcd", a="é"), 4, id="response"),
        pytest.param(
            types.Part.from_executable_code(
                code="x = 1234", language=types.Language.PYTHON
            ),
            2,
            id="code",
        ),
        pytest.param(
            types.Part.from_code_execution_result(
                outcome=types.Outcome.OUTCOME_OK, output="1234"
            ),
            1,
            id="code output",
        ),
        pytest.param(
            types.Part(tool_call=types.ToolCall(id="a")), 3, id="server side call"
        ),
        pytest.param(BLOB, 258, id="inline image"),
        pytest.param(FILE, 258, id="file"),
        pytest.param(PICTURED, 1 + 258, id="image in a response"),
        pytest.param(called("abcd", a=float("nan")), 4, id="not a number"),
        pytest.param(returned("abcd", a=b"\xff"), 4, id="bytes"),
        pytest.param(types.Part(), 0, id="empty"),
    ],
)
def test_every_kind_of_part_counts(part: types.Part, expected_tokens: int) -> None:
    """Text, code, calls and results count by bytes, media at a fixed rate."""
    counted_tokens = count_request_tokens(
        ask(content("user", part)), token_ratio=1.0, media_tokens=258
    )
    assert counted_tokens == expected_tokens


@pytest.mark.parametrize(
    ("instruction", "expected_tokens"),
    [
        pytest.param(None, 0, id="none"),
        pytest.param("x" * 40, 10, id="string"),
        pytest.param(user("x" * 40), 10, id="content"),
        pytest.param(types.Part(text="x" * 40), 10, id="part"),
        pytest.param(["x" * 20, types.Part(text="x" * 20)], 10, id="list"),
        pytest.param(content("user", BLOB), 258, id="image"),
    ],
)
def test_the_system_instruction_counts(instruction: Any, expected_tokens: int) -> None:
    """A system instruction counts in all the forms that it can have."""
    config = types.GenerateContentConfig(system_instruction=instruction)
    counted_tokens = count_request_tokens(
        ask(config=config), token_ratio=1.0, media_tokens=258
    )
    assert counted_tokens == expected_tokens


@pytest.mark.parametrize("field", ["parameters", "parameters_json_schema"])
def test_tool_declarations_count(field: str) -> None:
    """Names, descriptions and schemas of tools are part of the prompt."""
    schema = {"type": "OBJECT", "description": "d" * 4_000}
    declaration = types.FunctionDeclaration.model_validate(
        {"name": "n" * 400, "description": "x" * 4_000, field: schema}
    )
    tool = types.Tool(function_declarations=[declaration])
    counted_tokens = count_request_tokens(
        ask(config=types.GenerateContentConfig(tools=[tool])),
        token_ratio=1.0,
        media_tokens=0,
    )
    assert 2_100 < counted_tokens < 2_150


def test_contents_cost_extra_tokens_by_bpe_only() -> None:
    """Every content costs three tokens more where BPE counts, none with a ratio."""
    request = ask(user("hello"), model("hello"))
    assert count_request_tokens(request, None, 258) == 2 * (1 + 3)
    assert count_request_tokens(request, 1.0, 258) == 3


def test_the_vocabulary_needs_neither_network_nor_litellm() -> None:
    """Counting takes what litellm ships, without the seconds of importing it, and
    puts the user's setting back."""
    code = (
        "import os, sys;"
        "from contextguard_adk.testing.provider import count_tokens;"
        "assert 'tiktoken' not in sys.modules;"
        "assert count_tokens(['hello world'], None) == 2;"
        "assert 'litellm' not in sys.modules;"
        "assert os.environ['TIKTOKEN_CACHE_DIR'] == '/mine'"
    )
    proxies = {"HTTPS_PROXY": "http://127.0.0.1:9", "TIKTOKEN_CACHE_DIR": "/mine"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    subprocess.run(command, check=True, env={**os.environ, **proxies})


# Overflow


async def test_a_prompt_of_exactly_the_window_is_accepted() -> None:
    """The window itself is still inside."""
    llm = SimulatedLlm(context_window=100, token_ratio=1.0)
    await answer(llm, ask(user("x" * 400)))
    with pytest.raises(ContextOverflowError):
        await answer(llm, ask(user("x" * 401)))
    assert (llm.calls, llm.rejections, llm.violations) == (2, 1, 0)
    assert llm.largest_request_tokens == 101


@pytest.mark.parametrize(
    ("style", "limit_pattern"),
    [
        ("openai", r"maximum context length is 100 tokens\. .* 150 tokens"),
        ("openai-responses", r"exceeds the context window of this model"),
        ("anthropic", r"prompt is too long: 150 tokens > 100 maximum"),
        ("gemini", r"count \(150\) exceeds .* number of tokens allowed \(100\)"),
        ("vertex", r"count is 150 but the model only supports up to 100"),
        ("bedrock", r"Input is too long for requested model"),
        ("mistral", r"contains 150 .* for model with 100 maximum context length"),
        ("groq", r"reduce the length of the messages or completion"),
        ("vllm", r"150 input tokens.*context length is only 100 tokens"),
        ("llama.cpp", r"\(150 tokens\) .* available context size \(100 tokens\)"),
        ("ollama", r"exceeded max context length by 50 tokens"),
        ("xai", r"maximum prompt length is 100 but .* 150 tokens"),
    ],
)
async def test_an_overflow_is_told_in_the_words_of_a_provider(
    style: ErrorStyle, limit_pattern: str
) -> None:
    """The refusal names the true count and limit where the provider does."""
    llm = SimulatedLlm(context_window=100, token_ratio=1.0, error_style=style)
    with pytest.raises(ContextOverflowError, match=limit_pattern) as caught:
        await answer(llm, ask(user("x" * 600)))
    assert isinstance(caught.value, SimulatedProviderError)
    assert caught.value.status_code == 400
    [record] = llm.requests
    assert (record.rejected, record.prompt_tokens) == ("overflow", 150)
    assert record.response is None
    assert llm.billed_tokens == 0


# Structure

ASK, ANSWER = user("hi"), model("hello")
CALL, RESULT = content("model", called("f")), content("user", returned("f", a=1))


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        pytest.param([], "contents is not specified", id="no contents"),
        pytest.param([ANSWER], 'must use the "user" role', id="model first"),
        pytest.param(
            [ASK, content("system", types.Part(text="x"))], "valid role", id="system"
        ),
        pytest.param([content("user")], "at least one parts field", id="empty parts"),
        pytest.param(
            [content("user", types.Part())], "one initialized field", id="empty part"
        ),
        pytest.param([user("")], "must be non-empty", id="empty text"),
        pytest.param([ASK, CALL], "were not answered: 'f'", id="call at the end"),
        pytest.param([ASK, CALL, ASK], "were not answered", id="call not answered"),
        pytest.param(
            [ASK, RESULT], "must answer a function call", id="response without call"
        ),
        pytest.param(
            [ASK, CALL, content("user", returned("f"), returned("f"))],
            "must answer",
            id="two responses to one call",
        ),
        pytest.param(
            [ASK, content("model", called("f"), called("f")), RESULT],
            "were not answered",
            id="one response to two calls",
        ),
        pytest.param(
            [ASK, CALL, content("user", returned("g"))], "must answer", id="other name"
        ),
        pytest.param(
            [
                ASK,
                content("model", called("f", "1")),
                content("user", returned("f", "2")),
            ],
            "must answer",
            id="other id",
        ),
        pytest.param(
            [ASK, CALL, content("model", returned("f"))], "user role", id="role model"
        ),
        pytest.param(
            [content("user", called("f")), RESULT], "model role", id="user calls"
        ),
    ],
)
async def test_a_broken_structure_is_refused(
    contents: list[types.Content], words: str
) -> None:
    """Every breach of a structural rule is raised, counted and recorded."""
    llm = SimulatedLlm()
    with pytest.raises(InvalidRequestError, match=re.escape(words)) as caught:
        await answer(llm, ask(*contents))
    assert caught.value.status_code == 400
    assert (llm.calls, llm.rejections, llm.violations) == (1, 0, 1)
    assert [record.rejected for record in llm.requests] == ["invalid"]


@pytest.mark.parametrize(
    "contents",
    [
        pytest.param([ASK, ASK, ANSWER, ANSWER], id="same role twice"),
        pytest.param([ASK, CALL, RESULT], id="call and response"),
        pytest.param(
            [
                ASK,
                content("model", called("f"), called("g"), called("f")),
                content("user", returned("g"), returned("f"), returned("f")),
            ],
            id="parallel calls in another order",
        ),
        pytest.param(
            [
                ASK,
                content("model", called("f", "1"), called("f", "2")),
                content("user", returned("f", "2"), returned("f", "1")),
            ],
            id="ids in another order",
        ),
        pytest.param(
            [
                ASK,
                content("model", called("f"), called("f", "1")),
                content("user", returned("f", "1"), returned("f", "2")),
            ],
            id="an id on one side",
        ),
        pytest.param(
            [ASK, content("model", types.Part(text="", thought_signature=b"x"))],
            id="signature on empty text",
        ),
        pytest.param(
            [ASK, content("model", types.Part(thought_signature=b"x"))],
            id="signature alone",
        ),
        pytest.param([content("user", BLOB, FILE)], id="media only"),
    ],
)
async def test_a_sound_structure_is_accepted(contents: list[types.Content]) -> None:
    """What providers accept is no violation."""
    llm = SimulatedLlm()
    await answer(llm, ask(*contents))
    assert llm.violations == 0


async def test_structure_is_judged_before_length() -> None:
    """A request that is both broken and too long counts as broken."""
    llm = SimulatedLlm(context_window=1)
    with pytest.raises(InvalidRequestError):
        await answer(llm, ask(user("long " * 100), CALL))
    assert (llm.rejections, llm.violations) == (0, 1)


# Script


async def reply_later(request: LlmRequest) -> Reply:
    """Replies after the event loop had its turn."""
    await asyncio.sleep(0)
    return "later"


@pytest.mark.parametrize(
    ("script", "expected_texts"),
    [
        pytest.param(None, ["Acknowledged: hi"] * 2, id="default"),
        pytest.param([], ["Done."] * 2, id="used up from the start"),
        pytest.param(["a"], ["a", "Done."], id="used up"),
        pytest.param(
            [types.Part(text="a"), [types.Part(text="b"), types.Part(text="c")]],
            ["a", "b\nc"],
            id="parts",
        ),
        pytest.param([model("a"), [call("f", x=1)]], ["a", 'f\n{"x":1}'], id="calls"),
        pytest.param([LlmResponse(content=model("a")), ""], ["a", ""], id="response"),
        pytest.param(reply_later, ["later", "later"], id="coroutine function"),
    ],
)
async def test_a_script_is_played(script: Any, expected_texts: list[str]) -> None:
    """Replies come in order and in whichever form they are given."""
    llm = SimulatedLlm(script=script)
    responses = [await answer(llm, ask(ASK)) for _ in expected_texts]
    assert [text_of(response) for response in responses] == expected_texts
    assert all(response.partial is False for response in responses)
    assert {response.model_version for response in responses} == {"simulated"}


@pytest.mark.parametrize(
    ("contents", "expected_text"),
    [
        pytest.param([user("x" * 99), ANSWER], f"Acknowledged: {'x' * 60}", id="long"),
        pytest.param([ASK, CALL, RESULT], "Acknowledged: hi", id="after a result"),
        pytest.param([content("user", BLOB)], "Acknowledged.", id="no text"),
    ],
)
async def test_the_default_agent_quotes_the_user(
    contents: list[types.Content], expected_text: str
) -> None:
    """Without a script the answer quotes the head of the last user text."""
    assert text_of(await answer(SimulatedLlm(), ask(*contents))) == expected_text


async def test_a_scripted_exception_is_raised() -> None:
    """An exception in a script leaves a record without a response, unbilled."""
    llm = SimulatedLlm(script=[TimeoutError("slow"), "then"])
    with pytest.raises(TimeoutError, match="slow"):
        await answer(llm, ask(ASK))
    assert text_of(await answer(llm, ask(ASK))) == "then"
    failed, answered = llm.requests
    assert (failed.response, failed.rejected) == (None, None)
    assert text_of(answered.response) == "then"


async def test_replies_are_copied() -> None:
    """What ADK does to a response changes neither the script nor the record."""
    part = call("f")
    llm = SimulatedLlm(script=lambda _: part)
    response = await answer(llm, ask(ASK))
    response.get_function_calls()[0].id = "adk-1"
    assert part.function_call
    assert part.function_call.id is None
    recorded = llm.requests[0].response
    assert recorded
    assert recorded.get_function_calls()[0].id is None


async def test_call_ids_are_unique() -> None:
    """With `call_ids` every call has an id of its own, unless the script gives one."""
    llm = SimulatedLlm(
        call_ids=True, script=[[call("f"), call("f")], [called("f", "mine"), call("g")]]
    )
    responses = [await answer(llm, ask(ASK)) for _ in range(2)]
    ids = [made.id for response in responses for made in response.get_function_calls()]
    assert ids == ["call_1", "call_2", "mine", "call_3"]


# Usage and streaming


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ("last", [True, True, True, True, True]),
        ("never", [False, False, False, False, False]),
        ("late", [False, False, False, True, True]),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
async def test_usage_is_reported_on_the_last_chunk(
    usage: Literal["last", "never", "late"],
    expected: list[bool],
    is_streamed: bool,
) -> None:
    """Usage is on no partial, and on the final response of the calls that report."""
    llm = SimulatedLlm(token_ratio=1.0, usage=usage, script=["abcdefgh"] * 5)
    send = stream if is_streamed else answer
    reported = []
    for _ in expected:
        sent = await send(llm, ask(user("x" * 40)))
        *partials, final = sent if isinstance(sent, list) else [sent]
        assert all(partial.usage_metadata is None for partial in partials)
        reported.append(final.usage_metadata)
    assert [found is not None for found in reported] == expected
    for found in filter(None, reported):
        assert found.prompt_token_count == 10
        assert found.candidates_token_count == 2
        assert found.total_token_count == 12
    assert llm.billed_tokens == 5 * 12


async def test_late_usage_counts_agent_calls_only() -> None:
    """Summaries do not bring the first report of usage nearer."""
    llm = SimulatedLlm(usage="late")
    for request in (summary_request("x"),) * 4 + (ask(ASK),) * 3:
        assert (await answer(llm, request)).usage_metadata is None
    assert (await answer(llm, ask(ASK))).usage_metadata is not None


async def test_a_stream_ends_with_the_complete_response() -> None:
    """Partials carry the pieces, the last chunk all of it, as without streaming."""
    parts = [
        types.Part(text="thinking", thought=True),
        types.Part(text="The weather in Tokyo is sunny."),
        call("f", x=1),
        call("g"),
    ]
    llm = SimulatedLlm(script=[parts, parts])
    *partials, final = await stream(llm, ask(ASK))
    assert len(partials) == 3 + 3 + 2
    assert all(partial.partial for partial in partials)
    contents = [partial.content for partial in partials if partial.content]
    pieces = [part for piece in contents for part in piece.parts or []]
    assert "".join(p.text for p in pieces if p.text and not p.thought) == parts[1].text
    assert "".join(p.text for p in pieces if p.text and p.thought) == "thinking"
    assert [p.function_call for p in pieces[-2:]] == [
        p.function_call for p in parts[2:]
    ]
    assert final == await answer(llm, ask(ASK))
    assert [record.stream for record in llm.requests] == [True, False]


async def test_a_script_may_say_usage_and_end_with_a_partial() -> None:
    """A scripted response is sent as it is: with zero usage, or never complete."""
    zero = types.GenerateContentResponseUsageMetadata(prompt_token_count=0)
    script = [
        LlmResponse(content=ANSWER, usage_metadata=zero),
        LlmResponse(content=ANSWER, partial=True),
        LlmResponse(error_code="SAFETY"),
    ]
    llm = SimulatedLlm(script=script)
    assert (await answer(llm, ask(ASK))).usage_metadata == zero
    assert all(chunk.partial for chunk in await stream(llm, ask(ASK)))
    [refusal] = await stream(llm, ask(ASK))
    assert (refusal.error_code, refusal.content) == ("SAFETY", None)


# Summaries


async def test_requests_of_adks_summarizer_are_summaries() -> None:
    """ADK's own summarizer is recognised and gets its conversation summarized."""
    llm = SimulatedLlm()
    events = [
        Event(author="user", content=user("please find order ORD-4711")),
        Event(author="agent", content=model("it is in \\warehouse nine")),
    ]
    compacted = await LlmEventSummarizer(llm=llm).maybe_summarize_events(events=events)
    assert compacted
    assert llm.summaries == 1
    assert text_of(llm.requests[0].response) == (
        "user: please find order ORD-4711\nagent: it is in \\warehouse nine"
    )


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        pytest.param(summary_request("x"), True, id="fence"),
        pytest.param(ask(ASK, user("a\n<transcript-0>\nb")), True, id="last content"),
        pytest.param(ask(user("<transcript-0>"), ASK), False, id="earlier content"),
        pytest.param(ask(user("see <transcript-0>")), False, id="inside a line"),
        pytest.param(ask(ASK), False, id="agent"),
        pytest.param(ask(), False, id="no contents"),
    ],
)
def test_summary_requests_are_told_apart(request_: LlmRequest, expected: bool) -> None:
    """A fence at the start of a line of the last content marks a summary request."""
    assert SimulatedLlm().is_summary_request(request_) is expected


async def test_another_predicate_can_tell_summaries() -> None:
    """A summarizer of the user's own is recognised by the user's own predicate."""
    llm = SimulatedLlm(is_summary_request=lambda request: len(request.contents) == 2)
    assert text_of(await answer(llm, ask(ASK, user("Sum up 12")))) == "Sum up 12"
    assert llm.summaries == 1


async def test_a_summary_keeps_head_and_tail_of_each_line() -> None:
    """As much as its budget allows; order stays, repetitions and fences go."""
    lines = [f"Entry {n} begins {'and goes on ' * 90}and ends {n}." for n in range(9)]
    request = summary_request("\n".join([*lines, *lines]))
    kept = text_of(await answer(SimulatedLlm(), request)).splitlines()
    assert kept[0] == "Merge this."
    for number, line in enumerate(kept[1:]):
        assert line.startswith(f"Entry {number} begins and")
        assert line.endswith(f"and ends {number}.")
    assert len(kept) == 1 + len(lines)


async def test_what_stands_outside_the_fence_can_be_carried_over() -> None:
    """A previous summary in the prompt is material too."""
    before = "<previous-summary-3f9a>\nThe key is K-17.\n</previous-summary-3f9a>"
    request = summary_request("new")
    request.contents[0].parts = [
        types.Part(text=before),
        *(request.contents[0].parts or []),
    ]
    summary = text_of(await answer(SimulatedLlm(), request))
    assert summary == "The key is K-17.\nMerge this.\nnew"


async def test_nothing_is_made_of_nothing() -> None:
    """A transcript without words is answered without parts."""
    request = ask(user("<transcript-0>\n" + "\n" * 500 + "\n</transcript-0>"))
    assert text_of(await answer(SimulatedLlm(), request)) == ""


@pytest.mark.parametrize("ratio", [None, 2.0], ids=["BPE", "ratio"])
@pytest.mark.parametrize("max_output_tokens", [None, 1, 50, 400])
async def test_a_summary_obeys_its_budget(
    ratio: float | None, max_output_tokens: int | None
) -> None:
    """The output limit of the request holds, 1,000 tokens without one."""
    material = "\n".join(f"item {n} is called name{n * 7919}" for n in range(3_000))
    llm = SimulatedLlm(token_ratio=ratio, context_window=1_000_000)
    response = await answer(llm, summary_request(material, max_output_tokens))
    budget_tokens = max_output_tokens or 1_000
    used_tokens = count_tokens([text_of(response)], ratio)
    assert budget_tokens / 2 <= used_tokens + 1 <= budget_tokens + 1


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.text(max_size=600), max_size=30),
    budget_tokens=st.integers(1, 300),
)
def test_summaries_keep_to_any_budget(lines: list[str], budget_tokens: int) -> None:
    """Whatever the text."""
    request = summary_request("\n".join(lines), budget_tokens)
    summary = text_of(asyncio.run(answer(SimulatedLlm(), request)))
    assert count_tokens([summary], None) <= budget_tokens


async def test_summary_replies_script_the_summarizer() -> None:
    """Scripted summaries come first, extraction after; the agent's script waits."""
    llm = SimulatedLlm(
        script=["agent"], summary_replies=[ValueError("no"), "", call("f")]
    )
    with pytest.raises(ValueError, match="no"):
        await answer(llm, summary_request("x"))
    assert text_of(await answer(llm, summary_request("x"))) == ""
    assert (await answer(llm, summary_request("x"))).get_function_calls()
    assert text_of(await answer(llm, ask(ASK))) == "agent"
    assert "key 12" in text_of(await answer(llm, summary_request("key 12")))
    assert (llm.calls, llm.summaries) == (5, 4)


async def test_a_summary_can_hang() -> None:
    """A reply that never comes can be cancelled, and stays on record."""

    async def hang(request: LlmRequest) -> Reply:
        await asyncio.Event().wait()
        return "never"

    llm = SimulatedLlm(summary_replies=hang)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(answer(llm, summary_request("x")), timeout=0.01)
    [record] = llm.requests
    assert record.is_summary
    assert record.response is None


# Records and settings


async def test_requests_are_recorded() -> None:
    """A record holds the request as it was and the answer to it."""
    llm = SimulatedLlm(token_ratio=1.0, script=["fine"])
    config = types.GenerateContentConfig(system_instruction=["be", "brief"])
    request = ask(
        ASK, CALL, content("user", returned("f", found="K-17")), config=config
    )
    response = await answer(llm, request)
    request.contents.clear()
    config.system_instruction = "changed"
    [record] = llm.requests
    assert isinstance(record, RecordedRequest)
    assert len(record.contents) == 3
    assert record.text == 'hi\nf\n{}\nf\n{"found":"K-17"}'
    assert record.system_instruction == "be\nbrief"
    assert record.config.system_instruction == ["be", "brief"]
    assert record.response == response
    assert (record.is_summary, record.stream, record.rejected) == (False, False, None)
    assert response.usage_metadata
    assert response.usage_metadata.prompt_token_count == record.prompt_tokens


@pytest.mark.parametrize(
    ("keep_requests", "expected_texts"),
    [(None, ["0", "1", "2"]), (2, ["1", "2"]), (0, [])],
)
async def test_records_are_bounded_and_counters_are_not(
    keep_requests: int | None, expected_texts: list[str]
) -> None:
    """The newest requests stay on record; all are counted."""
    llm = SimulatedLlm(keep_requests=keep_requests, token_ratio=4.0, script=["a"] * 3)
    for number in range(3):
        await answer(llm, ask(user(str(number))))
    assert [record.text for record in llm.requests] == expected_texts
    assert all(record.response for record in llm.requests)
    assert (llm.calls, llm.billed_tokens, llm.largest_request_tokens) == (3, 6, 1)


# --- The prompt cache ---------------------------------------------------------------


def cached(response: LlmResponse) -> int | None:
    """What an answer reports of the cache."""
    assert response.usage_metadata
    return response.usage_metadata.cached_content_token_count


async def test_a_prompt_cache_serves_what_an_earlier_prompt_began_with() -> None:
    """Tools, instruction and contents up to the first difference, none of it media."""
    bare = SimulatedLlm(script=["a"] * 2)
    llm = SimulatedLlm(prompt_cache=True, token_ratio=4.0, script=["a"] * 20)
    first = user("one two three")
    assert [cached(await answer(bare, ask(first))) for _ in range(2)] == [None, None]
    assert cached(await answer(llm, ask(first))) is None
    assert cached(await answer(llm, ask(first, model("a"), user("x")))) == 13
    assert cached(await answer(llm, ask(user("one two four")))) == len("one two ")
    assert cached(await answer(llm, ask(user("zero")))) is None
    await answer(llm, ask(user("zero, zero")))
    # The first prompt is forgotten by now; the second begins with it.
    assert cached(await answer(llm, ask(first, model("b")))) == 13
    assert llm.requests[1].cached_tokens == 13


async def test_a_prompt_cache_knows_tools_and_instruction() -> None:
    """With others, nothing of the contents is served."""
    llm = SimulatedLlm(prompt_cache=True, token_ratio=4.0, script=["a"] * 20)
    declared = types.FunctionDeclaration(name="f")
    tool = types.Tool(function_declarations=[declared])
    for settings_, expected in (
        ({}, None),
        ({"system_instruction": "Be brief."}, None),
        ({"system_instruction": "Be brief."}, 12),
        ({"system_instruction": "Be brief.", "tools": [tool]}, None),
    ):
        request = ask(user("one"))
        request.config = types.GenerateContentConfig(**settings_)
        assert cached(await answer(llm, request)) == expected


async def test_concurrent_calls_keep_their_own_answers() -> None:
    """Interleaved calls are recorded in order of arrival, each with its answer."""

    async def echo(request: LlmRequest) -> Reply:
        last = next(list_content_texts(request.contents))
        await asyncio.sleep(0.001 * (5 - int(last)))
        return f"answer {last}"

    llm = SimulatedLlm(script=echo, latency_seconds=0.001)
    await asyncio.gather(*(answer(llm, ask(user(str(n)))) for n in range(5)))
    assert [r.text for r in llm.requests] == [str(n) for n in range(5)]
    assert [text_of(r.response) for r in llm.requests] == [
        f"answer {n}" for n in range(5)
    ]


async def test_copies_count_together() -> None:
    """ADK may copy a model; its shallow copies share one account."""
    llm = SimulatedLlm()
    await answer(llm.model_copy(), ask(ASK))
    assert llm.calls == 1


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"context_windw": 1}, id="misspelt"),
        pytest.param({"context_window": 0}, id="no window"),
        pytest.param({"token_ratio": 0}, id="no ratio"),
        pytest.param({"media_tokens": -1}, id="negative media"),
        pytest.param({"error_style": "nobody"}, id="unknown style"),
        pytest.param({"usage": "sometimes"}, id="unknown usage"),
        pytest.param({"script": "text"}, id="script of one text"),
        pytest.param({"keep_requests": -1}, id="negative record"),
        pytest.param({"latency_seconds": -1}, id="negative latency"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any]) -> None:
    """A mistake in the settings fails when the model is made."""
    with pytest.raises(ValidationError):
        SimulatedLlm.model_validate(fields)


def test_settings_can_be_serialised() -> None:
    """Functions and scripts stay out of what ADK dumps and logs."""
    llm = SimulatedLlm(script=lambda _: "x", summary_replies=["y"])
    assert set(llm.model_dump(mode="json")).isdisjoint({"script", "summary_replies"})
    assert "script" not in repr(llm)


@pytest.mark.skipif(
    not hasattr(BaseLlm, "capabilities"), reason="this ADK does not ask"
)
def test_capabilities_are_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model named like Gemini does not fall back to ADK's guess from the name."""
    monkeypatch.setenv("GOOGLE_GENAI_USE_VERTEXAI", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        declared = SimulatedLlm(model="gemini-2.5-pro").capabilities
    assert declared.output_schema_and_tools is False


# Behind a real runner


def look_up(key: str) -> dict[str, Any]:
    """Looks up a key."""
    return {"value": key.upper()}


async def run(llm: SimulatedLlm, messages: list[str], is_streamed: bool) -> list[Event]:
    """Runs an agent with a tool over some user messages."""
    agent = LlmAgent(name="agent", model=llm, instruction="Be brief.", tools=[look_up])
    # By value: ADK moves the enumeration from module to module.
    mode = {"streaming_mode": "sse"} if is_streamed else {}
    run_config = RunConfig.model_validate(mode)
    service = InMemorySessionService()
    runner = Runner(app_name="app", agent=agent, session_service=service)
    session = await service.create_session(app_name="app", user_id="u")
    events = []
    for message in messages:
        async for event in runner.run_async(
            user_id="u",
            session_id=session.id,
            new_message=user(message),
            run_config=run_config,
        ):
            events.append(event)
    return events


@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("call_ids", [False, True], ids=["no ids", "ids"])
async def test_an_agent_with_a_tool_runs(is_streamed: bool, call_ids: bool) -> None:
    """Tool calls, parallel ones too, come back answered in ADK's own requests."""
    both = [call("look_up", key="a"), call("look_up", key="b")]
    script: list[Reply] = [both, "first", call("look_up", key="c")]
    llm = SimulatedLlm(call_ids=call_ids, script=script)
    events = await run(llm, ["one", "two"], is_streamed)
    complete = [event for event in events if not event.partial]
    assert any(event.partial for event in events) is is_streamed
    assert [
        text_of_event(event) for event in complete if event.is_final_response()
    ] == [
        "first",
        "Done.",
    ]
    assert (llm.calls, llm.violations, llm.rejections) == (4, 0, 0)
    last = llm.requests[-1]
    assert last.stream is is_streamed
    assert "Be brief." in last.system_instruction
    assert all(f'"value":"{key}"' in last.text for key in "ABC")
    assert ids_of(last) == (
        ["call_1", "call_2", "call_3"] if call_ids else [None, None, None]
    )
    usage = complete[-1].usage_metadata
    assert usage
    assert usage.prompt_token_count == last.prompt_tokens
    assert last.prompt_tokens > count_request_tokens(ask(*last.contents), None, 258)


def text_of_event(event: Event) -> str:
    """Returns the text of an event."""
    return "".join(list_content_texts([event.content or types.Content()]))


def ids_of(record: RecordedRequest) -> list[str | None]:
    """Returns the ids of the calls in a request."""
    parts = [part for item in record.contents for part in item.parts or []]
    return [part.function_call.id for part in parts if part.function_call]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
async def test_an_overflow_ends_an_unguarded_run(is_streamed: bool) -> None:
    """Without a guard the conversation outgrows the window and the turn fails."""
    llm = SimulatedLlm(context_window=2_000)
    with pytest.raises(ContextOverflowError, match="maximum context length is 2000"):
        await run(
            llm, [f"message {n}: " + "word " * 300 for n in range(9)], is_streamed
        )
    assert llm.rejections == 1
    assert llm.requests[-1].rejected == "overflow"
    assert llm.violations == 0
