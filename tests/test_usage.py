"""What the provider counted is stored, and what it counted oddly is reported.

The provider's answers are scripted chunk by chunk; a real Runner carries them.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence

import pytest
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types
from pydantic import Field

from contextguard_adk import ContextGuardPlugin, Strategy, Threshold
from contextguard_adk.measuring.tokens import (
    estimate_config_tokens,
    estimate_contents_tokens,
)
from contextguard_adk.memory import CallInFlight, Memory
from contextguard_adk.summarizing.context import Compaction, CompactionContext
from contextguard_adk.testing import SimulatedLlm
from contextguard_adk.usage import finish_calls
from tests.builders import Chat, call_part, guarded_agent, model, queued_tool

REAL = "__context_guard_real_tokens_agent"
HEURISTIC = "__context_guard_last_heuristic_agent"
LOGGER = "contextguard_adk.usage"


class ChunkedLlm(BaseLlm):
    """A model that answers with prepared chunks, call by call, and counts nothing."""

    model: str = "chunked"
    answers: Sequence[Sequence[LlmResponse]] = ()
    last_answer: Sequence[LlmResponse] = ()
    """What is said when the user asks "Are you there?"."""
    requests: list[LlmRequest] = Field(default_factory=list)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Yields the chunks of the next answer, those of the last one again."""
        self.requests.append(llm_request)
        number = min(len(self.requests), len(self.answers))
        chunks = self.answers[number - 1]
        if "Are you there?" in str(llm_request.contents[-1]):
            chunks = self.last_answer
        for chunk in chunks:
            yield chunk.model_copy(deep=True)


def chunk(
    text: str = "", prompt_tokens: int | None = None, *, partial: bool = False
) -> LlmResponse:
    """One response of a stream; usage is there where a count is given, even 0."""
    usage = types.GenerateContentResponseUsageMetadata(prompt_token_count=prompt_tokens)
    return LlmResponse(
        content=model(text) if text else None,
        partial=partial,
        usage_metadata=None if prompt_tokens is None else usage,
    )


def guarded_chat(
    llm: BaseLlm, window_tokens: int = 100_000, **settings: object
) -> Chat:
    """A chat with a guarded agent and the prepared model."""
    plugin = ContextGuardPlugin(default=Threshold(context_window=window_tokens))
    agent = guarded_agent(llm, **settings)  # type: ignore[arg-type]
    return Chat(agent, [plugin], is_streaming=True)


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        pytest.param([chunk("Hi.", 120)], 120, id="one response"),
        pytest.param(
            [chunk("H", partial=True), chunk("Hi.", 120)], 120, id="usage on the last"
        ),
        pytest.param(
            [chunk("H", 7, partial=True), chunk("Hi.", 120)], 120, id="usage on both"
        ),
        pytest.param(
            [chunk("H", 120, partial=True), chunk("Hi.")], None, id="usage on a chunk"
        ),
        pytest.param([chunk("Hi.", 0)], None, id="a count of 0"),
        pytest.param([chunk("Hi.")], None, id="no usage"),
    ],
)
async def test_count_of_the_last_chunk_is_stored(
    chunks: Sequence[LlmResponse], expected: int | None
) -> None:
    """Partial chunks do not count; None and 0 say nothing."""
    chat = guarded_chat(ChunkedLlm(answers=[chunks]))
    await chat.say("Hello there.")
    state = await chat.state()
    assert state.get(REAL) == expected
    assert (HEURISTIC in state) == (REAL in state)


async def test_call_without_usage_leaves_the_older_pair_alone() -> None:
    """A correction is only ever taken from two numbers of the same call."""
    answers = [[chunk("One.", 50)], [chunk("Two.")], [chunk("Three.", 0)]]
    chat = guarded_chat(ChunkedLlm(answers=answers))
    await chat.say("Hello there.")
    first = await chat.state()
    await chat.say("A much longer message. " * 200)
    await chat.say("And another one. " * 200)
    later = await chat.state()
    assert (later[REAL], later[HEURISTIC]) == (first[REAL], first[HEURISTIC])


async def test_pair_belongs_to_the_request_that_was_sent() -> None:
    """Call by call both numbers are of the same request, compaction or not."""
    llm = SimulatedLlm(
        context_window=8_000,
        token_ratio=1.3,
        script=[call_part("search")] * 9 + ["Done."],
    )
    tool = queued_tool("search", ["The old press stands in hall B. " * 150])
    plugin = ContextGuardPlugin(default=Threshold(context_window=8_000))
    chat = Chat(guarded_agent(llm, [tool]), [plugin])
    events = await chat.say("Where is the press?")
    deltas = [event.actions.state_delta for event in events]
    pairs = [(d[REAL], d[HEURISTIC]) for d in deltas if d.get(REAL)]
    assert llm.summaries
    assert pairs == [
        (
            record.prompt_tokens,
            estimate_config_tokens(record.config)
            + estimate_contents_tokens(record.contents),
        )
        for record in llm.requests
        if not record.is_summary
    ]


class FlakyStrategy(Strategy):
    """A strategy that fails on long requests."""

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Raises where the request is long."""
        if context.tokens > 1_000:
            raise RuntimeError("too long for me")
        return None


async def test_call_that_the_guard_failed_on_counts_for_nothing() -> None:
    """What was measured of an earlier call is not taken for the later one."""
    llm = SimulatedLlm(token_ratio=1.3, script=[call_part("search"), "Done."])
    tool = queued_tool("search", ["The old press stands in hall B. " * 300])
    plugin = ContextGuardPlugin(default=FlakyStrategy(context_window=50_000))
    chat = Chat(guarded_agent(llm, [tool]), [plugin])
    await chat.say("Where is the press?")
    state = await chat.state()
    assert state[REAL] == llm.requests[0].prompt_tokens
    assert state[HEURISTIC] < 100


async def test_silent_truncation_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A count far below what was sent is logged once for an agent, with the window."""
    chat = guarded_chat(ChunkedLlm(answers=[[chunk("Fine.", 900)]]), 91_234)
    for _ in range(3):
        await chat.say("A long message. " * 2_000)
    [record] = [r for r in caplog.records if r.name == LOGGER]
    assert record.levelno == logging.WARNING
    assert record.args == ("agent", 91_234)


@pytest.mark.parametrize(
    ("repeats", "count"),
    [
        pytest.param(2_000, 5_000, id="a little below"),
        pytest.param(50, 10, id="a small request"),
        pytest.param(2_000, 0, id="unknown"),
    ],
)
async def test_plausible_counts_are_not_reported(
    caplog: pytest.LogCaptureFixture, repeats: int, count: int
) -> None:
    """Dense tokenizers, small requests and unknown counts raise no suspicion."""
    chat = guarded_chat(ChunkedLlm(answers=[[chunk("Fine.", count)]]), 92_345)
    await chat.say("A long message. " * repeats)
    assert not [r for r in caplog.records if r.name == LOGGER]


async def test_a_second_answer_to_a_request_raises_no_suspicion(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was sent is forgotten with the first one, and so explains no low count."""
    hindi = "पुराना प्रेस बड़े हॉल में रखा है और कोई नहीं जानता कि चाबी किसके पास है। "
    answers = [chunk("Fine.", 9_000), chunk("Fine.", 9_000)]
    chat = guarded_chat(ChunkedLlm(answers=[answers]), 93_456)
    await chat.say(hindi * 400)
    assert (await chat.state())[HEURISTIC] > 18_500
    assert not [r for r in caplog.records if r.name == LOGGER]


OVERFULL = CallInFlight(
    heuristic_tokens=900, estimated_tokens=1_350, window_tokens=1_000
)


@pytest.mark.parametrize(
    ("answers", "window_tokens", "is_reported"),
    [
        pytest.param([], 1_000, True, id="no chunk at all"),
        pytest.param([chunk(partial=True), chunk()], 1_000, True, id="empty chunks"),
        pytest.param([chunk()], 4_000, True, id="a count that may be far too low"),
        pytest.param([chunk()], 100_000, False, id="well within the window"),
        pytest.param([chunk("Fine.")], 1_000, False, id="an answer"),
        pytest.param([chunk("F", partial=True)], 1_000, False, id="part of an answer"),
        pytest.param([chunk(prompt_tokens=900)], 1_000, False, id="only usage"),
    ],
)
async def test_empty_answer_to_a_large_request_is_reported(
    caplog: pytest.LogCaptureFixture,
    answers: Sequence[LlmResponse],
    window_tokens: int,
    is_reported: bool,
) -> None:
    """A stream that ends with nothing says "too long" where nobody looks."""
    llm = ChunkedLlm(answers=[answers], last_answer=[chunk("Fine.")])
    chat = guarded_chat(llm, window_tokens, instruction="Be helpful. " * 400)
    await chat.say("Hello there.")
    await chat.say("Are you there?")  # ADK 2.0 does not tell when a run ends.
    reports = [r for r in caplog.records if r.name == LOGGER]
    assert len(reports) == is_reported
    if is_reported:
        assert isinstance(reports[0].args, tuple)
        agent, estimate, window = reports[0].args
        assert (agent, window) == ("agent", window_tokens)
        assert isinstance(estimate, int)
        assert estimate >= estimate_contents_tokens(llm.requests[0].contents)


def test_finished_runs_are_forgotten() -> None:
    """Only what belongs to the finished invocation goes."""
    memory = Memory()
    for invocation in ("one", "two"):
        memory.calls.put(("session", invocation, "agent", ""), OVERFULL)
    finish_calls(lambda key: key[1] == "one", memory)
    assert memory.calls.get(("session", "one", "agent", "")) is None
    assert memory.calls.get(("session", "two", "agent", "")) is OVERFULL


async def test_contents_are_not_kept_after_the_answer() -> None:
    """A call that was answered keeps no history alive in the process."""
    plugin = ContextGuardPlugin(default=Threshold(context_window=50_000))
    kept: list[Sequence[types.Content]] = []

    class Watching(ChunkedLlm):
        async def generate_content_async(
            self, llm_request: LlmRequest, stream: bool = False
        ) -> AsyncGenerator[LlmResponse, None]:
            kept.append(_contents_in_flight(plugin))
            async for response in super().generate_content_async(llm_request, stream):
                yield response
            kept.append(_contents_in_flight(plugin))

    chat = Chat(guarded_agent(Watching(answers=[[chunk("Fine.", 9)]])), [plugin])  # type: ignore[arg-type]
    await chat.say("Hello there.")
    during, after = kept
    assert len(during) == 1
    assert not after


def _contents_in_flight(plugin: ContextGuardPlugin) -> list[types.Content]:
    calls = plugin._memory.calls._items.values()
    return [content for call in calls for content in call.original_contents]
