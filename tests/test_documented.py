"""The numbers and formats that the design documents, each seen from outside.

A real Runner drives a guarded agent; what counts is the request that reaches the
provider and what session state holds afterwards.
"""

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
from tests.builders import (
    Chat,
    call,
    call_part,
    guarded_agent,
    model,
    queued_tool,
    response,
    user,
)
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

COMPACTED = (
    "[System: The conversation was compacted because it exceeded the context window. "
    "The summary above contains all prior context. "
)


def report(answer: str | types.Part, prompt_tokens: int | None) -> LlmResponse:
    """An answer for which the provider reports this many prompt tokens."""
    part = types.Part(text=answer) if isinstance(answer, str) else answer
    usage = types.GenerateContentResponseUsageMetadata(prompt_token_count=prompt_tokens)
    content = types.Content(role="model", parts=[part])
    return LlmResponse(content=content, usage_metadata=usage)


def documented_chat(
    llm: SimulatedLlm, window_tokens: int = 200_000, **agent: Any
) -> Chat:
    """A chat with one agent whose history fits one summary call."""
    strategy = Threshold(
        context_window=window_tokens,
        summarizer_context_window=1_000_000,
        preview_tokens=None,
    )
    return guarded_chat(llm, strategy, agent=agent)


async def config_tokens(**agent: Any) -> int:
    """What instruction and tools of such an agent add to the documented heuristic."""
    chat = documented_chat(SimulatedLlm(), **agent)
    await chat.say("word")
    return int((await chat.state())[HEURISTIC]) - 1


def counting(*script: Any, **settings: Any) -> SimulatedLlm:
    """A large model that counts what the heuristic counts."""
    return SimulatedLlm(
        context_window=1_000_000, token_ratio=1.0, script=script or None, **settings
    )


@pytest.mark.parametrize(
    ("first_tokens", "grown_tokens", "real_tokens", "estimate"),
    [
        pytest.param(70_000, 90_000, 140_000, 180_000, id="at the threshold"),
        pytest.param(50_000, 150_008, 100_000, 300_016, id="massive tool result"),
        pytest.param(70_000, 89_999, 140_000, None, id="one token below"),
    ],
)
async def test_tool_results_since_the_last_count_are_seen(
    first_tokens: int, grown_tokens: int, real_tokens: int, estimate: int | None
) -> None:
    """What a tool returned since the provider counted is scaled by that count."""

    async def play(message: str, result: str) -> tuple[SimulatedLlm, Chat]:
        asked = report(call_part("fetch"), real_tokens)
        llm = counting(asked, report("Done.", 9), usage="never")
        chat = documented_chat(llm, tools=[queued_tool("fetch", [result])])
        await chat.say(message)
        return llm, chat

    base_tokens = await config_tokens(tools=[queued_tool("fetch", ["word"])])
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
    [
        pytest.param(200_000, 180_000, 10_000, id="200k"),
        pytest.param(128_000, 102_400, 12_800, id="128k"),
        pytest.param(4_000, 3_200, 400, id="4k"),
    ],
)
async def test_threshold_and_summary_budget_follow_from_the_window(
    window_tokens: int, threshold_tokens: int, budget_tokens: int
) -> None:
    """Compaction fires at window minus buffer; a summary gets half of the buffer."""
    fixed_tokens = await config_tokens()
    for tokens in (threshold_tokens - 1, threshold_tokens):
        llm = counting()
        chat = documented_chat(llm, window_tokens)
        message = user(words(tokens - fixed_tokens - 2))
        await seed(chat, message, model("word"), state=EXACT)
        await chat.say("word")
        assert llm.summaries == (tokens == threshold_tokens)
    [asked] = summary_requests(llm)
    assert asked.config.max_output_tokens == budget_tokens
    assert f"at most {budget_tokens * 3 // 4} words" in asked.system_instruction
    assert llm.requests[-1].prompt_tokens < threshold_tokens


@pytest.mark.parametrize(
    ("real_tokens", "last_tokens", "tokens", "estimate"),
    [
        pytest.param(100_000, 10_000, 36_000, 180_000, id="capped at 5"),
        pytest.param(100_000, 10_000, 35_999, None, id="capped at 5, below"),
        pytest.param(50_000, 100_000, 180_000, 180_000, id="never below 1"),
        pytest.param(50_000, 100_000, 179_999, None, id="never below 1, below"),
        pytest.param(None, None, 120_000, 180_000, id="unknown is 1.5"),
        pytest.param(None, None, 119_999, None, id="unknown is 1.5, below"),
        pytest.param(190_000, None, 100_000, 190_000, id="real count is a floor"),
        pytest.param(185_000, 90_000, 90_000, 185_000, id="not grown: as counted"),
        pytest.param(190_000, 170_000, 90_000, None, id="shrunk: no floor"),
        pytest.param(math.nan, 2.0**60, 120_000, 180_000, id="so are odd numbers"),
        pytest.param(-9, -9, 120_000, 180_000, id="so are negative numbers"),
        pytest.param(True, True, 120_000, 180_000, id="so are truth values"),
    ],
)
async def test_estimate_is_the_calibrated_heuristic(
    real_tokens: Any, last_tokens: Any, tokens: int, estimate: int | None
) -> None:
    """The heuristic is scaled by the last call's ratio, clamped to 1 to 5."""
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


def partial(text: str, prompt_tokens: int) -> LlmResponse:
    """A chunk of a stream that reports usage of its own."""
    return report(text, prompt_tokens).model_copy(update={"partial": True})


@pytest.mark.parametrize(
    ("chunks", "real_tokens"),
    [
        pytest.param([partial("Do", 77), report("Done.", 500)], 500, id="partials"),
        pytest.param([report("Done.", None)], 300, id="usage without a count"),
        pytest.param([partial("Do", 77), partial("ne", 78)], 300, id="partials only"),
    ],
)
async def test_partials_and_missing_usage_leave_the_count_alone(
    chunks: list[LlmResponse], real_tokens: int
) -> None:
    """A correction is only taken from two numbers of the same finished call."""
    agent = guarded_agent(SimulatedLlm())
    agent.model = ChunkedLlm(model="chunked", chunks=chunks)
    plugin = ContextGuardPlugin(default=Threshold(context_window=32_000))
    chat = Chat(agent, [plugin], is_streaming=True)
    await seed(chat, user("Earlier."), state={REAL: 300, HEURISTIC: 200})
    await chat.say("Hello.")
    state = await chat.state()
    assert state[REAL] == real_tokens
    assert (state[HEURISTIC] != 200) is (real_tokens != 300)


async def compact(
    llm: SimulatedLlm, message: str = "Go on", state: dict[str, Any] | None = None
) -> Chat:
    """Has a conversation with tool calls compacted, and returns the chat."""
    chat = documented_chat(llm, 4_000)
    await seed(
        chat,
        user("Check the pods"),
        call("kubectl_get_pods"),
        response("kubectl_get_pods", words(2_500)),
        model("There are 40 pods running."),
        call("approve", "id-1"),
        response("approve", "pending", "id-1"),
        state=state,
    )
    await chat.say(message)
    return chat


async def test_after_compaction_the_request_is_summary_and_continuation() -> None:
    """One message of two parts is left, in the documented words."""
    llm = SimulatedLlm(summary_replies=["All pods run."])
    chat = await compact(llm, "Restart `web-1`")
    sent = llm.requests[-1].contents
    assert [content.role for content in sent] == ["user"]
    summary, continuation = map(text_of, take_apart(sent))
    assert summary.startswith("[Previous conversation summary]\nAll pods run.")
    assert summary.endswith("\n[End of summary — conversation continues below]")
    assert continuation.startswith(
        f"{COMPACTED}The user's current request is: `Restart `web-1``. Continue "
        "working on this request without asking the user to repeat anything."
    )
    assert continuation.endswith("]")
    assert (await chat.state())[SUMMARY] == "All pods run."
    assert llm.requests[-1].prompt_tokens < 500


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
async def test_summarizer_is_shown_the_todo_list(key: str, todos: list[Any]) -> None:
    """The todo list stands in the prompt, as it stands in state."""
    llm = SimulatedLlm()
    await compact(llm, state={key: todos})
    [asked] = summary_requests(llm)
    assert (
        "[The todo list as it stands]\n"
        "- [in_progress] Analyze timing gap\n"
        "- [completed] Implement real token counts\n"
    ) in asked.text
