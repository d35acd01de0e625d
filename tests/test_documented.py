"""The numbers and formats that the design documents, each seen from outside."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types
from pydantic import BaseModel

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.testing import SimulatedLlm
from tests import builders
from tests.builders import Chat, call, guarded_agent, model, response, user
from tests.chats import (
    EXACT,
    HEURISTIC,
    KEY,
    REAL,
    SUMMARIZED_AT,
    SUMMARY,
    agent_requests,
    guarded_chat,
    seed,
    summary_requests,
    take_apart,
    text_of,
    words,
)


def report(answer: str | types.Part, count: int | None, **more: Any) -> LlmResponse:
    """An answer for which the provider reports this many prompt tokens."""
    part = types.Part(text=answer) if isinstance(answer, str) else answer
    usage = types.GenerateContentResponseUsageMetadata(prompt_token_count=count)
    content = types.Content(role="model", parts=[part])
    return LlmResponse(content=content, usage_metadata=usage, **more)


WINDOW = 20_000
"""Threshold 16,000 tokens."""


def documented_chat(
    llm: SimulatedLlm, window_tokens: int = WINDOW, **agent: Any
) -> Chat:
    """A chat with one agent whose history fits one summary call."""
    sizes: Any = {"context_window": window_tokens, "preview_tokens": None, "keep": 0}
    strategy = Threshold(summarizer_context_window=1_000_000, **sizes)
    return guarded_chat(llm, strategy, agent=agent)


async def config_tokens(**agent: Any) -> int:
    """What instruction and tools of such an agent add to the documented heuristic."""
    chat = documented_chat(SimulatedLlm(), **agent)
    await chat.say("word")
    return int((await chat.state())[HEURISTIC]) - 1


def counting(**settings: Any) -> SimulatedLlm:
    """A large model that counts what the heuristic counts."""
    return SimulatedLlm(context_window=1_000_000, token_ratio=1.0, **settings)


@pytest.mark.parametrize(
    ("first_tokens", "grown_tokens", "real_tokens", "estimate"),
    [
        pytest.param(7_000, 8_000, 14_000, 16_000, id="at the threshold"),
        pytest.param(5_000, 15_004, 10_000, 30_008, id="massive tool result"),
        pytest.param(7_000, 7_999, 14_000, None, id="one token below"),
    ],
)
async def test_tool_results_since_the_last_count_are_seen(
    first_tokens: int, grown_tokens: int, real_tokens: int, estimate: int | None
) -> None:
    """What a tool returned since the provider counted is scaled by that count."""

    async def play(message: str, result: str) -> tuple[SimulatedLlm, Chat]:
        asked = report(builders.call_part("fetch"), real_tokens)
        llm = counting(script=[asked, report("Done.", 9)], usage="never")
        tools = [builders.queued_tool("fetch", [result])]
        chat = documented_chat(llm, tools=tools)
        await chat.say(message)
        return llm, chat

    tools = [builders.queued_tool("fetch", ["word"])]
    base_tokens = await config_tokens(tools=tools)
    _, probe = await play("word", "word")
    call_tokens = (await probe.state())[HEURISTIC] - base_tokens - 2
    message = words(first_tokens - base_tokens)
    llm, chat = await play(message, words(grown_tokens - first_tokens - call_tokens))
    assert (await chat.state()).get(SUMMARIZED_AT) == estimate
    assert llm.summaries == (estimate is not None)
    # Once compacted: the message of the summary, then the call with its result.
    newest = take_apart(agent_requests(llm)[-1].contents)
    assert len(newest) == (3 if estimate is None else 4)


@pytest.mark.parametrize(
    ("window_tokens", "threshold_tokens", "budget_tokens"),
    [(200_000, 180_000, 10_000), (128_000, 102_400, 12_800), (4_000, 3_200, 400)],
)
async def test_threshold_and_summary_budget_follow_from_the_window(
    window_tokens: int, threshold_tokens: int, budget_tokens: int
) -> None:
    """Compaction fires at window minus buffer; a summary gets half of the buffer."""
    fixed_tokens = await config_tokens()
    for tokens in (threshold_tokens - 1, threshold_tokens):
        llm = counting()
        chat = documented_chat(llm, window_tokens)
        message = model(words(tokens - fixed_tokens - 2))
        await seed(chat, user("word"), message, state=EXACT)
        await chat.say("word")
        assert llm.summaries == (tokens == threshold_tokens)

    [asked] = summary_requests(llm)

    assert asked.config.max_output_tokens == budget_tokens
    assert f"at most {budget_tokens * 3 // 4} words" in asked.system_instruction
    assert llm.requests[-1].prompt_tokens < threshold_tokens


ESTIMATES: dict[str, tuple[Any, Any, int, int | None]] = {
    "capped at 5": (10_000, 1_000, 3_200, 16_000),
    "capped at 5, below": (10_000, 1_000, 3_199, None),
    "never below 1": (5_000, 10_000, 16_000, 16_000),
    "never below 1, below": (5_000, 10_000, 15_999, None),
    "unknown is its density, at least 1": (None, None, 16_000, 16_000),
    "unknown is its density, below": (None, None, 15_999, None),
    "real count is a floor": (17_000, None, 10_000, 17_000),
    "not grown: as counted": (16_500, 9_000, 9_000, 16_500),
    "shrunk: no floor": (17_000, 15_000, 9_000, None),
    "odd numbers are unknown": (math.nan, 2.0**60, 16_000, 16_000),
    "negative numbers are unknown": (-9, -9, 16_000, 16_000),
    "truth values are unknown": (True, True, 16_000, 16_000),
}


@pytest.mark.parametrize("name", ESTIMATES)
async def test_estimate_is_the_calibrated_heuristic(name: str) -> None:
    """The heuristic is scaled by the last call's ratio, clamped to 1 to 5."""
    real_tokens, last_tokens, tokens, estimate = ESTIMATES[name]
    llm = counting()
    chat = documented_chat(llm)
    message = user(words(tokens - await config_tokens() - 2))
    state = {REAL: real_tokens, HEURISTIC: last_tokens}
    await seed(chat, message, model("word"), state=state)
    await chat.say("word")

    assert (await chat.state()).get(SUMMARIZED_AT) == estimate
    assert llm.summaries == (estimate is not None)


class ChunkedLlm(BaseLlm):
    """Streams the chunks that it was given."""

    chunks: list[LlmResponse]

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Yields the chunks."""
        for chunk in self.chunks:
            yield chunk.model_copy(deep=True)


DO, NE = (report(text, 77, partial=True) for text in ("Do", "ne"))


async def test_partials_and_missing_usage_leave_the_count_alone() -> None:
    """A correction is only taken from two numbers of the same finished call."""
    for chunks, real_tokens in (
        ([DO, report("Done.", 500)], 500),
        ([report("Done.", None)], 300),
        ([DO, NE], 300),
    ):
        agent = guarded_agent(SimulatedLlm())
        agent.model = ChunkedLlm(model="chunked", chunks=chunks)
        plugin = ContextGuardPlugin(default=Threshold(context_window=32_000))
        chat = Chat(agent, [plugin], is_streaming=True)
        await seed(chat, user("Earlier."), state={REAL: 300, HEURISTIC: 200})
        await chat.say("Hello.")
        state = await chat.state()
        assert state[REAL] == real_tokens
        assert (state[HEURISTIC] != 200) is (real_tokens != 300)


class TodoItem(BaseModel):
    """A task as an agent's own tool may keep it."""

    content: str
    status: str


TODOS = [
    {"content": "Analyze timing gap", "status": "in_progress"},
    {"content": "Implement real token counts", "status": "completed"},
]


@pytest.mark.parametrize(
    ("key", "todos"),
    [
        pytest.param("todos", TODOS, id="dicts"),
        pytest.param(KEY.format("todos"), TODOS, id="the guard's key"),
        pytest.param("todos", [TodoItem(**t) for t in TODOS], id="models"),
    ],
)
async def test_after_compaction_the_request_is_summary_and_continuation(
    key: str, todos: list[Any]
) -> None:
    """One message of two parts is left, in the documented words; the summarizer was
    shown the todo list as it stands in state."""
    llm = SimulatedLlm(summary_replies=["All pods run."])
    chat = documented_chat(llm, 4_000)
    await seed(
        chat,
        user("Check the pods"),
        call("kubectl_get_pods"),
        response("kubectl_get_pods", words(3_300)),
        model("There are 40 pods running."),
        call("approve", "id-1"),
        response("approve", "pending", "id-1"),
        state={key: todos},
    )
    await chat.say("Restart `web-1`")

    [asked] = summary_requests(llm)
    assert (
        "[The todo list as it stands]\n"
        "- [in_progress] Analyze timing gap\n"
        "- [completed] Implement real token counts\n"
    ) in asked.text

    sent = llm.requests[-1].contents
    assert [content.role for content in sent] == ["user"]
    summary, continuation = (text_of(content) for content in take_apart(sent))
    assert summary.startswith("[Previous conversation summary]\nAll pods run.")
    assert summary.endswith("\n[End of summary — conversation continues below]")
    assert continuation.startswith(
        "[System: The conversation was compacted because it exceeded the context "
        "window. The summary above contains all prior context. The user's current "
        "request is: `Restart `web-1``. Continue working on this request without "
        "asking the user to repeat anything."
    )
    assert continuation.endswith("]")

    assert (await chat.state())[SUMMARY] == "All pods run."
    assert llm.requests[-1].prompt_tokens < 500
