"""The numbers and formats that the design documents, each seen from outside.

A real Runner drives a guarded agent; what counts is the request that reaches the
provider and what session state holds afterwards.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types
from pydantic import BaseModel

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.testing import RecordedRequest, SimulatedLlm
from tests.builders import (
    Chat,
    call,
    call_part,
    event,
    guarded_agent,
    model,
    queued_tool,
    response,
    user,
)

SUMMARY_BEGINS = "[Previous conversation summary]\n"
SUMMARY_ENDS = "\n[End of summary — conversation continues below]"
COMPACTED = (
    "[System: The conversation was compacted because it exceeded the context window. "
    "The summary above contains all prior context. "
)


def words(token_count: int) -> str:
    """Prose of exactly four bytes for each token; a tokenizer would count less."""
    return ("notebooks " * token_count)[: 4 * token_count]


def report(answer: str | types.Part, prompt_tokens: int | None) -> LlmResponse:
    """An answer for which the provider reports this many prompt tokens."""
    part = types.Part(text=answer) if isinstance(answer, str) else answer
    return LlmResponse(
        content=types.Content(role="model", parts=[part]),
        usage_metadata=types.GenerateContentResponseUsageMetadata(
            prompt_token_count=prompt_tokens
        ),
    )


def guarded_chat(
    llm: SimulatedLlm, window_tokens: int = 200_000, **settings: Any
) -> Chat:
    """A chat with one agent whose history fits one summary call."""
    strategy = Threshold(
        context_window=window_tokens, summarizer_context_window=1_000_000
    )
    plugin = ContextGuardPlugin(default=strategy)
    return Chat(guarded_agent(llm, **settings), [plugin])


async def seed(chat: Chat, *contents: types.Content, **state: Any) -> None:
    """Puts an earlier conversation and state into the session."""
    place: dict[str, Any] = {"app_name": "app", "user_id": "user"}
    place["session_id"] = chat.session_id
    session = await chat.sessions.get_session(**place)
    if session is None:
        session = await chat.sessions.create_session(**place)
    for content in contents:
        await chat.sessions.append_event(session, event(content))
    if state:
        last = event(user("Noted."))
        last.content = None
        last.actions.state_delta = state
        await chat.sessions.append_event(session, last)


async def config_tokens(**settings: Any) -> int:
    """What instruction and tools of such an agent add to the documented heuristic."""
    chat = guarded_chat(SimulatedLlm(), **settings)
    await chat.say("word")
    return int((await chat.state())["__context_guard_last_heuristic_agent"]) - 1


def agent_requests(llm: SimulatedLlm) -> list[RecordedRequest]:
    """The requests for answers, without those for summaries."""
    return [request for request in llm.requests if not request.is_summary]


def summary_prompts(llm: SimulatedLlm) -> list[str]:
    """What summarisers were sent."""
    return [request.text for request in llm.requests if request.is_summary]


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
    results: list[str] = ["word"]
    tool = queued_tool("fetch", results)

    async def play(message: str) -> tuple[SimulatedLlm, Chat]:
        asked = report(call_part("fetch"), real_tokens)
        llm = SimulatedLlm(
            context_window=1_000_000,
            token_ratio=1.0,
            usage="never",
            script=[asked, report("Done.", 9)],
        )
        chat = guarded_chat(llm, tools=[tool])
        await chat.say(message)
        return llm, chat

    base_tokens = await config_tokens(tools=[tool])
    _, probe = await play("word")
    state = await probe.state()
    call_tokens = state["__context_guard_last_heuristic_agent"] - base_tokens - 2
    message = words(first_tokens - base_tokens)
    results[:] = [words(grown_tokens - first_tokens - call_tokens)]
    tool = queued_tool("fetch", results)

    llm, chat = await play(message)
    state = await chat.state()
    assert state.get("__context_guard_summarized_at_agent") == estimate
    assert llm.summaries == (estimate is not None)
    assert len(agent_requests(llm)) == 2
    assert len(agent_requests(llm)[-1].contents) == (3 if estimate is None else 2)


@pytest.mark.parametrize(
    ("window_tokens", "threshold_tokens", "budget_tokens"),
    [
        pytest.param(200_000, 180_000, 10_000, id="200k"),
        pytest.param(128_000, 102_400, 12_800, id="128k"),
        pytest.param(32_000, 25_600, 3_200, id="32k"),
        pytest.param(4_000, 3_200, 400, id="4k"),
    ],
)
async def test_threshold_and_summary_budget_follow_from_the_window(
    window_tokens: int, threshold_tokens: int, budget_tokens: int
) -> None:
    """Compaction fires at window minus buffer; a summary gets half of the buffer."""
    fixed_tokens = await config_tokens()
    requests: list[list[RecordedRequest]] = []
    for tokens in (threshold_tokens - 1, threshold_tokens):
        llm = SimulatedLlm(context_window=1_000_000, token_ratio=1.0)
        chat = guarded_chat(llm, window_tokens)
        # The last count was right to the token, so the heuristic stands as it is.
        await seed(
            chat,
            user(words(tokens - fixed_tokens - 2)),
            model("word"),
            __context_guard_real_tokens_agent=1_000,
            __context_guard_last_heuristic_agent=1_000,
        )
        await chat.say("word")
        requests.append(llm.requests)
    below, at = requests
    assert [request.is_summary for request in below] == [False]
    assert at[0].is_summary
    assert at[0].config.max_output_tokens == budget_tokens
    assert f"at most {budget_tokens * 3 // 4} words" in at[0].system_instruction
    assert at[-1].prompt_tokens < threshold_tokens


@pytest.mark.parametrize(
    ("real_tokens", "last_tokens", "tokens", "estimate"),
    [
        pytest.param(100_000, 10_000, 36_000, 180_000, id="capped at 5"),
        pytest.param(100_000, 10_000, 35_999, None, id="capped at 5, below"),
        pytest.param(50_000, 100_000, 180_000, 180_000, id="never below 1"),
        pytest.param(50_000, 100_000, 179_999, None, id="never below 1, below"),
        pytest.param(None, None, 120_000, 180_000, id="unknown is 1.5"),
        pytest.param(None, None, 119_999, None, id="unknown is 1.5, below"),
        pytest.param(0, 70_000, 120_000, 180_000, id="no count is unknown"),
        pytest.param(190_000, None, 100_000, 190_000, id="real count is a floor"),
        pytest.param(185_000, 90_000, 90_000, 185_000, id="not grown: as counted"),
        pytest.param(190_000, 170_000, 90_000, None, id="shrunk: no floor"),
    ],
)
async def test_estimate_is_the_calibrated_heuristic(
    real_tokens: int | None, last_tokens: int | None, tokens: int, estimate: int | None
) -> None:
    """The heuristic is scaled by the last call's ratio, clamped to 1 to 5."""
    llm = SimulatedLlm(context_window=1_000_000, token_ratio=1.0)
    chat = guarded_chat(llm)
    await seed(
        chat,
        user(words(tokens - await config_tokens() - 2)),
        model("word"),
        __context_guard_real_tokens_agent=real_tokens,
        __context_guard_last_heuristic_agent=last_tokens,
    )
    await chat.say("word")
    state = await chat.state()
    assert state.get("__context_guard_summarized_at_agent") == estimate
    assert llm.summaries == (estimate is not None)


async def test_state_holds_the_prompt_tokens_and_the_heuristic_of_each_call() -> None:
    """Both numbers of the calibration are those of the latest call."""
    llm = SimulatedLlm(context_window=32_000, token_ratio=2.0)
    chat = guarded_chat(llm, 32_000)
    for message in ("Hello.", "How are you?"):
        await chat.say(message)
        state = await chat.state()
        sent = llm.requests[-1]
        assert state["__context_guard_real_tokens_agent"] == sent.prompt_tokens
        size = len(sent.text.replace("\n", "")) + len(sent.system_instruction)
        heuristic = state["__context_guard_last_heuristic_agent"]
        assert heuristic == pytest.approx(size / 4, abs=2)


async def test_only_prompt_tokens_count() -> None:
    """Output tokens become part of the next prompt by themselves."""
    usage = types.GenerateContentResponseUsageMetadata(
        prompt_token_count=1_000,
        candidates_token_count=170_000,
        thoughts_token_count=20_000,
        total_token_count=191_000,
    )
    answer = LlmResponse(content=model("Long."), usage_metadata=usage)
    llm = SimulatedLlm(script=[answer])
    chat = guarded_chat(llm)
    await chat.say("Hello.")
    assert (await chat.state())["__context_guard_real_tokens_agent"] == 1_000
    await chat.say("And now?")
    assert llm.summaries == 0


class ChunkedLlm(BaseLlm):
    """Streams the chunks that it was given."""

    chunks: list[LlmResponse]

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Yields the chunks."""
        for chunk in self.chunks:
            yield chunk.model_copy(deep=True)


def partial(text: str, prompt_tokens: int | None) -> LlmResponse:
    """A chunk of a stream that reports usage of its own."""
    return report(text, prompt_tokens).model_copy(update={"partial": True})


@pytest.mark.parametrize(
    ("chunks", "real_tokens"),
    [
        pytest.param([partial("Do", 77), report("Done.", 500)], 500, id="partials"),
        pytest.param([report("Done.", None)], 300, id="usage without a count"),
        pytest.param([report("Done.", 0)], 300, id="usage of zero"),
        pytest.param([LlmResponse(content=model("Done."))], 300, id="no usage"),
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
    await seed(
        chat,
        user("Earlier."),
        __context_guard_real_tokens_agent=300,
        __context_guard_last_heuristic_agent=200,
    )
    await chat.say("Hello.")
    state = await chat.state()
    assert state["__context_guard_real_tokens_agent"] == real_tokens
    is_new = real_tokens != 300
    assert (state["__context_guard_last_heuristic_agent"] != 200) == is_new


async def test_agents_that_are_not_configured_are_untouched() -> None:
    """An unknown agent's requests and state stay as they are."""
    llm = SimulatedLlm(context_window=1_000_000, token_ratio=1.0)
    plugin = ContextGuardPlugin(
        agents={"other": Threshold(context_window=1_000)}, default=None
    )
    chat = Chat(guarded_agent(llm), [plugin])
    await chat.say(words(5_000))
    assert llm.summaries == 0
    assert llm.requests[0].contents == [user(words(5_000))]
    assert await chat.state() == {}


async def compact(llm: SimulatedLlm, message: str, **state: Any) -> Chat:
    """Has a conversation with tool calls compacted, and returns the chat."""
    chat = guarded_chat(llm, 4_000)
    await seed(
        chat,
        user("Check the pods"),
        call("kubectl_get_pods"),
        response("kubectl_get_pods", words(2_500)),
        model("There are 40 pods running."),
        **state,
    )
    await chat.say(message)
    return chat


async def test_after_compaction_the_request_is_summary_and_continuation() -> None:
    """Two contents are left, in the documented words."""
    llm = SimulatedLlm(summary_replies=["All pods run."])
    chat = await compact(llm, "Restart `web-1`")
    sent = llm.requests[-1].contents
    assert [content.role for content in sent] == ["user", "user"]
    summary, continuation = (
        str(content.parts[0].text) for content in sent if content.parts
    )
    assert summary.startswith(f"{SUMMARY_BEGINS}All pods run.")
    assert summary.endswith(SUMMARY_ENDS)
    assert continuation.startswith(
        f"{COMPACTED}The user's current request is: `Restart `web-1``. Continue "
        "working on this request without asking the user to repeat anything."
    )
    assert continuation.endswith("]")
    state = await chat.state()
    assert state["__context_guard_summary_agent"] == "All pods run."
    assert llm.requests[-1].prompt_tokens < 500


async def test_continuation_is_generic_without_user_text() -> None:
    """A tool result that resumes a turn is no request to be quoted."""
    llm = SimulatedLlm(summary_replies=["Waiting for the approval."])
    chat = guarded_chat(llm, 4_000)
    await seed(
        chat,
        user(f"Buy it. {words(2_500)}"),
        call("approve", "id-1"),
        response("approve", "pending", "id-1"),
        model("I wait."),
    )
    await chat.say(response("approve", "granted", "id-1"))
    continuation = llm.requests[-1].contents[1].parts
    assert continuation
    assert str(continuation[0].text).startswith(f"{COMPACTED}Continue")
    assert "`" not in str(continuation[0].text)


async def test_summariser_reads_calls_and_results_as_documented() -> None:
    """The transcript names each message's role, each called tool, each result."""
    llm = SimulatedLlm()
    await compact(llm, "Go on")
    (prompt,) = summary_prompts(llm)
    lines = prompt.splitlines()
    expected = [
        "user: Check the pods",
        "model: [called tool: kubectl_get_pods]",
        "user: [tool kubectl_get_pods returned a result]",
        "model: There are 40 pods running.",
    ]
    positions = [lines.index(line) for line in expected]
    assert positions == sorted(positions)


@pytest.mark.parametrize(
    "heading",
    ["Current State", "Key Information", "Context & Decisions", "Exact Next Steps"],
)
async def test_summariser_is_told_the_documented_sections(heading: str) -> None:
    """The system instruction asks for each section."""
    llm = SimulatedLlm()
    await compact(llm, "Go on")
    instruction = llm.requests[0].system_instruction
    assert f"## {heading}" in instruction.splitlines()


class TodoItem(BaseModel):
    """A task as an agent's own tool may keep it."""

    content: str
    status: str


TODOS = [
    {"content": "Analyze timing gap", "status": "in_progress"},
    {"content": "Implement real token counts", "status": "completed"},
]


@pytest.mark.parametrize("key", ["todos", "__context_guard_todos_agent"])
@pytest.mark.parametrize(
    "todos",
    [
        pytest.param(TODOS, id="dicts"),
        pytest.param([TodoItem(**item) for item in TODOS], id="models"),
    ],
)
async def test_summariser_is_shown_the_todo_list(key: str, todos: list[Any]) -> None:
    """The todo list stands in the prompt, with what to do with it."""
    llm = SimulatedLlm()
    await compact(llm, "Go on", **{key: todos})
    (prompt,) = summary_prompts(llm)
    assert (
        "[Current todo list]\n"
        "- [in_progress] Analyze timing gap\n"
        "- [completed] Implement real token counts\n"
        "[End todo list]\n\n"
        "Include these tasks and their statuses in your summary under a dedicated "
        '"## Todo List" section.'
    ) in prompt


@pytest.mark.parametrize("has_tool", [True, False], ids=["with tool", "without"])
async def test_todos_are_restored_by_the_tool_where_there_is_one(
    has_tool: bool,
) -> None:
    """The summariser speaks of the `todos` tool only to agents that have it."""
    llm = SimulatedLlm()
    tools = [queued_tool("todos", ["ok"])] if has_tool else []
    chat = guarded_chat(llm, 4_000, tools=tools)
    await seed(chat, user(words(2_500)), model("Yes."), todos=TODOS)
    await chat.say("Go on")
    (prompt,) = summary_prompts(llm)
    assert ("restore them using the `todos` tool" in prompt) is has_tool


async def test_there_is_no_todo_block_without_todos() -> None:
    """Nothing is said about todos where there are none."""
    llm = SimulatedLlm()
    await compact(llm, "Go on", todos=[])
    (prompt,) = summary_prompts(llm)
    assert "odo list" not in prompt


async def test_fallback_keeps_two_hundred_characters_of_each_message() -> None:
    """Without a model, each message leaves its head and its tail."""
    llm = SimulatedLlm(context_window=40_000, summary_replies=[RuntimeError("down")])
    chat = guarded_chat(llm, 20_000)
    messages = [
        f"Message {number} begins here. {words(900)} Message {number} ends here."
        for number in range(12)
    ]
    for number, message in enumerate(messages):
        await seed(chat, user(message) if number % 2 == 0 else model(message))
    await chat.say("And now?")
    summary = str((await chat.state())["__context_guard_summary_agent"])
    covered = [number for number in range(12) if f"Message {number} begins" in summary]
    assert covered
    for number in covered:
        begins = summary.index(f"Message {number} begins here.")
        ends = summary.index(f"Message {number} ends here.") + 20
        assert ends - begins >= 200
    sent = llm.requests[-1]
    assert sent.rejected is None
    # What it does not cover stands in the request, word for word.
    for number in set(range(12)) - set(covered):
        assert messages[number] in sent.text


async def test_fallback_begins_with_the_previous_summary() -> None:
    """What an earlier summary says is kept whole when the summariser fails."""
    llm = SimulatedLlm(
        context_window=40_000,
        summary_replies=["THE FIRST SUMMARY.", RuntimeError("down")],
    )
    chat = guarded_chat(llm, 4_000)
    await seed(chat, user(words(2_500)), model("Yes."))
    await chat.say("Go on.")
    await chat.say(words(1_500))
    await chat.say(words(1_700))
    state = await chat.state()
    assert llm.summaries == 2
    assert str(state["__context_guard_summary_agent"]).startswith(
        "THE FIRST SUMMARY.\n"
    )
    assert f"{SUMMARY_BEGINS}THE FIRST SUMMARY.\n" in llm.requests[-1].text


PAYLOADS = {
    "prose": "The notebook is on the table, and the light is on. ",
    "json": json.dumps({"id": 4711, "name": "web-1", "ok": True, "tags": ["a", "b"]}),
    "digits": "8203 5519 7730 0042 9913 ",
    "base64": "q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQ/+Zs1kP0",
    "japanese": "会議は来週の火曜日に延期されました。",
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
async def test_summariser_input_stays_within_four_fifths_of_its_window(
    payload: str,
) -> None:
    """However large the history, each summary call leaves a fifth of the window."""
    window_tokens = 8_000
    summariser = SimulatedLlm(model="summariser", context_window=window_tokens)
    llm = SimulatedLlm(context_window=10_000_000)
    plugin = ContextGuardPlugin(
        default=Threshold(
            context_window=100_000,
            summarizer=summariser,
            summarizer_context_window=window_tokens,
        )
    )
    chat = Chat(guarded_agent(llm), [plugin])
    await seed(chat, user("The task."))
    for number in range(20):
        size = 40_000 if number % 5 else 800
        result = (payload * (1 + size // len(payload)))[:size]
        await seed(chat, call("fetch", page=number), response("fetch", result))
    await chat.say("What does it say?")
    assert 1 <= summariser.summaries <= 3
    assert summariser.rejections == 0
    assert summariser.largest_request_tokens <= 0.8 * window_tokens
    assert "The task." in summariser.requests[0].text
    assert "What does it say?" in summariser.requests[-1].text


async def test_calibration_starts_anew_after_a_compaction() -> None:
    """The old ratio is not applied to the new, short request."""
    llm = SimulatedLlm(
        context_window=100_000, usage="never", script=[report("One.", 4_000), "Two."]
    )
    chat = guarded_chat(llm, 4_000)
    await chat.say(words(1_500))
    assert (await chat.state())["__context_guard_real_tokens_agent"] == 4_000
    await chat.say("Go on.")
    state = await chat.state()
    assert llm.summaries == 1
    assert state["__context_guard_real_tokens_agent"] is None
    assert state["__context_guard_last_heuristic_agent"] is None
    await chat.say("Go on.")
    assert llm.summaries == 1


@pytest.mark.parametrize("window_tokens", [4_000, 32_000, 128_000, 200_000])
async def test_compacted_request_is_small(window_tokens: int) -> None:
    """With a full-length summary the request is far below the threshold."""
    llm = SimulatedLlm(context_window=window_tokens)
    plugin = ContextGuardPlugin(default=Threshold(context_window=window_tokens))
    chat = Chat(guarded_agent(llm), [plugin])
    numbered = [f"Fact {n}: the port of host-{n} is {n + 7000}." for n in range(20_000)]
    text = "\n".join(numbered)[: 4 * window_tokens]
    await seed(chat, user("Read this."), model(text), user("And?"), model("Read."))
    await chat.say("Go on.")
    assert llm.requests[-1].prompt_tokens < window_tokens // 4
    assert llm.rejections == 0
