"""Summaries by a model, in up to three calls, and without one."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Any

import pytest
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.models.registry import LLMRegistry
from google.genai import types

from contextguard_adk import SummaryError, Threshold
from contextguard_adk.measuring.calibration import token_counter
from contextguard_adk.memory import Memory
from contextguard_adk.summarizers import Summarizers
from contextguard_adk.summarizing.summarizer import (
    SummaryTask,
    summarize,
    write_mechanical_summary,
)
from contextguard_adk.summarizing.summary_call import SummaryModel
from contextguard_adk.summarizing.transcript import Entry, render_entries
from contextguard_adk.testing import ContextOverflowError, SimulatedLlm
from contextguard_adk.testing import call as scripted_call
from tests.builders import call, model, response, user


def words(token_count: int, name: str = "") -> str:
    """Prose of four bytes for each token, recognisable by its name."""
    return f"{name} {'notebooks ' * token_count}"[: 4 * token_count]


def entries(*texts: str) -> list[Entry]:
    """A transcript of alternating messages."""
    roles = ("user: ", "model: ")
    return [Entry(roles[number % 2], text) for number, text in enumerate(texts)]


def fences(text: str) -> dict[str, str]:
    """The fenced blocks of a prompt, by name."""
    blocks = re.findall(r"^<([\w-]+)-(\w{16})>\n(.*?)\n</\1-\2>$", text, re.M | re.S)
    return {name: body for name, _, body in blocks}


# --- One call ---------------------------------------------------------------------


async def test_prompt_fences_what_is_to_be_summarised() -> None:
    """Transcript, previous summary and request stand apart, between markers."""
    llm = SimulatedLlm(summary_replies=["  The summary.\n"])
    task = SummaryTask(
        entries=entries("Hello.", "Hi."),
        previous_summary="What was before.",
        live_request="Sing.",
        todos="[Current todo list]\n- [pending] Sing\n[End todo list]",
    )
    assert await summarize(task, SummaryModel(llm, 32_000)) == "The summary."
    (request,) = llm.requests
    assert [content.role for content in request.contents] == ["user"]
    assert fences(request.text) == {
        "previous-summary": "What was before.",
        "transcript": "user: Hello.\nmodel: Hi.",
        "current-request": "Sing.",
    }
    assert "- [pending] Sing" in request.text
    assert request.text.endswith("Now write the summary.")


async def test_prompt_leaves_out_what_there_is_not() -> None:
    """Without a summary, a request and todos only the transcript is there."""
    llm = SimulatedLlm()
    await summarize(SummaryTask(entries("Hello.")), SummaryModel(llm, 32_000))
    assert list(fences(llm.requests[0].text)) == ["transcript"]


async def test_instruction_can_be_replaced() -> None:
    """A model may bring its own instruction; the word limit is filled in."""
    llm = SimulatedLlm()
    own = SummaryModel(llm, 32_000, instruction="Write {max_words} words about {x}.")
    await summarize(SummaryTask(entries("Hello."), budget_tokens=400), own)
    assert llm.requests[0].system_instruction == "Write 300 words about {x}."


async def test_parts_of_an_answer_are_joined_without_thoughts() -> None:
    """Only what a model says aloud is the summary."""
    parts = [
        types.Part(text="Let me think.", thought=True),
        types.Part(text="One, "),
        types.Part(text="two."),
    ]
    llm = SimulatedLlm(summary_replies=[parts])
    task = SummaryTask(entries("Hello."))
    assert await summarize(task, SummaryModel(llm, 32_000)) == "One, two."


async def test_an_answer_that_was_cut_off_counts() -> None:
    """A summary that reached its limit is better than none."""
    cut = LlmResponse(content=model("So far"), error_code="MAX_TOKENS")
    llm = SimulatedLlm(summary_replies=[cut])
    task = SummaryTask(entries("Hello."))
    assert await summarize(task, SummaryModel(llm, 32_000)) == "So far"


class Chunks(BaseLlm):
    """Yields the responses that it was given."""

    responses: list[LlmResponse]

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> Any:
        """Yields the responses."""
        for item in self.responses:
            yield item


async def test_partial_chunks_are_not_counted_twice() -> None:
    """A model that streams although it was not asked to is read once."""
    chunks = Chunks(
        model="chunks",
        responses=[
            LlmResponse(content=model("The "), partial=True),
            LlmResponse(content=model("The summary.")),
            LlmResponse(),
        ],
    )
    task = SummaryTask(entries("Hello."))
    assert await summarize(task, SummaryModel(chunks, 32_000)) == "The summary."


@pytest.mark.parametrize(
    "correction", [None, 1.0, 2.5], ids=["unknown", "exact", "dense"]
)
async def test_an_over_long_answer_is_cut_to_the_budget(
    correction: float | None,
) -> None:
    """Head and tail are kept; the measure is that of the agent's model."""
    llm = SimulatedLlm(summary_replies=[f"HEAD {words(5_000)} TAIL"])
    task = SummaryTask(entries("Hello."), budget_tokens=300, correction=correction)
    summary = await summarize(task, SummaryModel(llm, 32_000))
    assert summary.startswith("HEAD")
    assert summary.endswith("TAIL")
    assert 150 <= token_counter(correction)(summary) <= 300


async def test_an_answer_within_the_budget_by_its_usage_stays_whole() -> None:
    """The provider's count is exact; the estimate would cut what need not be cut."""
    whole = "HEAD " + "middle ground " * 120 + "TAIL"
    llm = SimulatedLlm(summary_replies=[whole])
    task = SummaryTask(entries("Hello."), budget_tokens=300, correction=2.5)
    assert token_counter(task.correction)(whole) > task.budget_tokens
    assert await summarize(task, SummaryModel(llm, 32_000)) == whole


# --- Failures ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        pytest.param(KeyError("secret"), "the call failed: KeyError", id="raises"),
        pytest.param(SummaryError("own words"), "own words", id="raises ours"),
        pytest.param("", "holds no text", id="empty"),
        pytest.param(" \n\t", "holds no text", id="blank"),
        pytest.param(scripted_call("look"), "holds no text", id="calls a tool"),
        pytest.param(
            types.Part(text="Hm.", thought=True), "holds no text", id="thinks only"
        ),
        pytest.param(LlmResponse(error_code="SAFETY"), "error SAFETY", id="refused"),
        pytest.param(LlmResponse(), "holds no text", id="nothing"),
    ],
)
async def test_failures_have_one_type(reply: Any, reason: str) -> None:
    """Whatever goes wrong is a `SummaryError` that quotes no message."""
    llm = SimulatedLlm(summary_replies=[reply])
    with pytest.raises(SummaryError, match=reason) as caught:
        await summarize(SummaryTask(entries("Hello.")), SummaryModel(llm, 32_000))
    assert "secret" not in str(caught.value)


async def test_a_call_may_take_so_long_and_no_longer() -> None:
    """The time limit ends a call that hangs."""
    llm = SimulatedLlm(latency_seconds=60)
    hanging = SummaryModel(llm, 32_000, timeout_seconds=0.02)
    with pytest.raises(SummaryError, match=r"no answer in 0\.02 s"):
        await asyncio.wait_for(summarize(SummaryTask(entries("Hello.")), hanging), 30)


async def test_cancellation_is_no_failure() -> None:
    """Whoever waits for a summary may give up."""
    llm = SimulatedLlm(latency_seconds=60)
    task = SummaryTask(entries("Hello."))
    waiting = asyncio.create_task(summarize(task, SummaryModel(llm, 32_000)))
    while not llm.calls:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_input_that_is_too_long_is_tried_once_with_less(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A summariser whose window is smaller than assumed still gets its chance."""
    caplog.set_level(logging.INFO, logger="contextguard_adk")
    # 80 % of the assumed 10,000 are too much, 60 % of that are not.
    llm = SimulatedLlm(
        context_window=6_000, token_ratio=1.0, summary_replies=["The summary."] * 9
    )
    task = SummaryTask(entries(words(7_000)), correction=1.0)
    assert await summarize(task, SummaryModel(llm, 10_000)) == "The summary."
    assert llm.rejections == 1
    assert llm.largest_request_tokens <= 8_000
    assert "input too long" in caplog.text


async def test_input_that_stays_too_long_is_a_failure() -> None:
    """There is no third try."""
    llm = SimulatedLlm(context_window=1_000, token_ratio=1.0)
    task = SummaryTask(entries(words(7_000)), correction=1.0)
    with pytest.raises(SummaryError, match="ContextOverflowError") as caught:
        await summarize(task, SummaryModel(llm, 10_000))
    assert isinstance(caught.value.__cause__, ContextOverflowError)
    assert llm.calls == 2


# --- Rolling calls ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("size_tokens", "call_count"),
    [(4_000, 1), (9_000, 2), (14_000, 3), (40_000, 3), (400_000, 3)],
)
async def test_long_transcripts_take_up_to_three_calls(
    size_tokens: int, call_count: int
) -> None:
    """Each call stays within 80 % of the window and merges the summary so far."""
    llm = SimulatedLlm(
        token_ratio=1.0,
        summary_replies=[f"PART {number}" for number in (1, 2, 3)],
    )
    texts = [words(size_tokens // 20, f"m{number}") for number in range(20)]
    task = SummaryTask(
        entries(*texts), previous_summary="PART 0", budget_tokens=400, correction=1.0
    )
    summary = await summarize(task, SummaryModel(llm, 8_000))
    assert summary == f"PART {call_count}"
    assert llm.calls == call_count
    assert llm.largest_request_tokens <= 0.8 * 8_000
    for number, request in enumerate(llm.requests):
        assert fences(request.text)["previous-summary"] == f"PART {number}"


async def test_nothing_is_left_out_while_three_calls_hold_it() -> None:
    """A transcript of two windows is read whole, in its order."""
    llm = SimulatedLlm(token_ratio=1.0, summary_replies=["ONE", "TWO", "THREE"])
    texts = [f"fact {number} {words(120)}" for number in range(100)]
    task = SummaryTask(entries(*texts), budget_tokens=400, correction=1.0)
    await summarize(task, SummaryModel(llm, 8_000))
    read = "\n".join(fences(request.text)["transcript"] for request in llm.requests)
    facts = [int(number) for number in re.findall(r"fact (\d+) ", read)]
    assert facts == list(range(100))
    assert "left out" not in read


async def test_messages_stay_while_tool_results_are_shortened() -> None:
    """Beyond three calls it is the payloads that give way first."""
    llm = SimulatedLlm(token_ratio=1.0, summary_replies=["ONE", "TWO", "THREE"])
    contents = [user("The task.")]
    for number in range(30):
        result = f"BEGIN {number} {words(2_000)} END {number}"
        contents += [call("look", n=number), response("look", result)]
        contents += [model(f"I have seen page {number}.")]
    contents.append(user("The request."))
    task = SummaryTask(
        render_entries(contents, range(len(contents)), [0, len(contents) - 1]),
        budget_tokens=400,
        correction=1.0,
    )
    await summarize(task, SummaryModel(llm, 8_000))
    read = "\n".join(fences(request.text)["transcript"] for request in llm.requests)
    assert llm.largest_request_tokens <= 0.8 * 8_000
    assert read.startswith("user: The task.")
    assert read.endswith("user: The request.")
    for number in range(30):
        assert f"model: I have seen page {number}." in read
        assert f"BEGIN {number} " in read
        assert f"END {number}" in read


async def test_there_are_never_more_than_three_calls() -> None:
    """Where nothing can be shortened any more, the newest part is read."""
    llm = SimulatedLlm(token_ratio=1.0)
    fixed = [
        Entry(f"user: heading {number} {words(80)}", is_pinned=True)
        for number in range(400)
    ]
    task = SummaryTask(fixed, budget_tokens=400, correction=1.0)
    await summarize(task, SummaryModel(llm, 8_000))
    assert llm.calls == 3
    assert llm.largest_request_tokens <= 0.8 * 8_000
    assert "heading 399 " in llm.requests[-1].text


async def test_huge_requests_and_summaries_leave_room_for_the_transcript() -> None:
    """What stands beside the transcript is shortened where it would crowd it out."""
    llm = SimulatedLlm(token_ratio=1.0)
    task = SummaryTask(
        entries(*[f"fact {number}" for number in range(100)]),
        previous_summary=words(9_000, "SUMMARY"),
        live_request=words(9_000, "REQUEST"),
        budget_tokens=400,
        correction=1.0,
    )
    await summarize(task, SummaryModel(llm, 8_000))
    assert llm.largest_request_tokens <= 0.8 * 8_000
    first = fences(llm.requests[0].text)
    assert first["previous-summary"].startswith("SUMMARY")
    assert first["current-request"].startswith("REQUEST")
    assert "fact 99" in "".join(fences(r.text)["transcript"] for r in llm.requests)


async def test_an_empty_transcript_is_one_call() -> None:
    """Merging a summary without anything new is possible."""
    llm = SimulatedLlm(summary_replies=["Merged."])
    task = SummaryTask([], previous_summary="What was before.")
    assert await summarize(task, SummaryModel(llm, 32_000)) == "Merged."
    assert llm.calls == 1


# --- Settings of the call ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "budget", "headroom_tokens"),
    [
        pytest.param("gemini-2.5-flash", 0, 0, id="flash"),
        pytest.param("gemini-2.5-flash-lite", 0, 0, id="flash-lite"),
        pytest.param("vertex_ai/gemini-2.5-flash-001", 0, 0, id="flash by path"),
        pytest.param("gemini-2.5-pro", None, 4_096, id="pro thinks"),
        pytest.param("openai/o3", None, 4_096, id="o3 thinks"),
        pytest.param("gpt-4o", None, 0, id="gpt-4o does not"),
        pytest.param("nobody-knows-me", None, 0, id="unknown"),
    ],
)
async def test_thinking_is_off_or_has_room(
    name: str, budget: int | None, headroom_tokens: int
) -> None:
    """Thoughts count as output: they are turned off, or get tokens of their own."""
    llm = SimulatedLlm(model=name)
    await summarize(
        SummaryTask(entries("Hello."), budget_tokens=500), SummaryModel(llm, 200_000)
    )
    config = llm.requests[0].config
    thinking = config.thinking_config
    assert (thinking.thinking_budget if thinking else None) == budget
    assert config.max_output_tokens == 500 + headroom_tokens


async def test_headroom_is_small_in_a_small_window() -> None:
    """In a small window thinking gets 8 % of it."""
    llm = SimulatedLlm(model="openai/o3")
    await summarize(SummaryTask(entries("Hello.")), SummaryModel(llm, 10_000))
    assert llm.requests[0].config.max_output_tokens == 1_000 + 800


async def test_call_settings_of_the_agent_are_shared() -> None:
    """Transport, labels and safety settings are taken over, nothing else."""
    llm = SimulatedLlm()
    config = types.GenerateContentConfig(
        system_instruction="You are a pirate.",
        http_options=types.HttpOptions(timeout=1_234),
        labels={"team": "blue"},
        safety_settings=[
            types.SafetySetting(
                category=types.HarmCategory.HARM_CATEGORY_HARASSMENT,
                threshold=types.HarmBlockThreshold.BLOCK_NONE,
            )
        ],
        temperature=0.9,
        max_output_tokens=7,
        response_mime_type="application/json",
        tools=[types.Tool(google_search=types.GoogleSearch())],
    )
    await summarize(
        SummaryTask(entries("Hello.")), SummaryModel(llm, 32_000, config=config)
    )
    sent = llm.requests[0].config
    assert sent.http_options == config.http_options
    assert sent.labels == {"team": "blue"}
    assert sent.safety_settings == config.safety_settings
    assert (sent.temperature, sent.tools, sent.response_mime_type) == (None,) * 3
    assert sent.max_output_tokens == 1_000
    assert "pirate" not in llm.requests[0].system_instruction


# --- Counting ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("correction", "text", "tokens"),
    [
        pytest.param(1.0, "", 0, id="nothing"),
        pytest.param(2.0, "notebooks " * 40, 200, id="correction wins over prose"),
        pytest.param(5.0, "ü" * 400, 1_000, id="bytes are counted, not characters"),
    ],
)
def test_tokens_follow_the_correction(
    correction: float | None, text: str, tokens: int
) -> None:
    """Bytes by four, times what is known of the tokenizer."""
    assert token_counter(correction)(text) == tokens


@pytest.mark.parametrize("correction", [None, 0.5, 1.0])
def test_dense_text_counts_more_than_the_correction_says(
    correction: float | None,
) -> None:
    """A correction learned on prose does not make base64 cheap."""
    base64 = "q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQ" * 40
    assert token_counter(correction)(base64) > 1.5 * len(base64) / 4


# --- Without a model --------------------------------------------------------------


def mechanical(previous: str, budget_tokens: int, *contents: types.Content) -> str:
    """The mechanical summary of some contents."""
    return write_mechanical_summary(
        render_entries(contents, range(len(contents))),
        previous,
        budget_tokens,
        token_counter(1.0),
    )


def test_mechanical_summary_is_the_transcript_while_it_fits() -> None:
    """Short messages stay whole."""
    contents = [user("Look."), call("look"), response("look", "found"), model("Good.")]
    assert mechanical("", 1_000, *contents) == (
        "user: Look.\nmodel: [called tool: look]\n"
        "user: [tool look returned a result]\nfound\nmodel: Good."
    )


def test_mechanical_summary_begins_with_the_previous_one() -> None:
    """What an earlier summary says is not cut again."""
    previous = words(3_000, "BEFORE")
    text = mechanical(previous, 100, user("Look."), model(words(900)))
    assert text.startswith(f"{previous}\nuser: Look.\n")


@pytest.mark.parametrize("count", [2, 6, 12])
def test_mechanical_summary_keeps_two_hundred_characters_of_each(count: int) -> None:
    """Where the budget allows it, each message leaves its head and its tail."""
    contents = [
        (model if number % 2 else user)(f"BEGIN{number} {words(900)} END{number}")
        for number in range(count)
    ]
    text = mechanical("", count * 100, *contents)
    for number in range(count):
        excerpt = text[text.index(f"BEGIN{number} ") : text.index(f" END{number}")]
        assert len(excerpt) >= 190
        assert "left out" in excerpt
    assert token_counter(1.0)(text) <= count * 100


def test_mechanical_summary_keeps_the_newest_where_not_all_fit() -> None:
    """A note says how many of the oldest are missing."""
    contents = [
        (model if number % 2 else user)(f"BEGIN{number} {words(400)}")
        for number in range(50)
    ]
    text = mechanical("", 600, *contents)
    kept = [int(number) for number in re.findall(r"BEGIN(\d+) ", text)]
    assert kept == list(range(50 - len(kept), 50))
    assert text.startswith(f"[{50 - len(kept)} earlier messages left out]")
    assert token_counter(1.0)(text) <= 600


# --- Choosing the model -----------------------------------------------------------


class Registry:
    """Knows every model's window."""

    def context_window(self, model: str) -> int | None:
        """Returns a window by the length of the name."""
        return 1_000 * len(model)


def choose(
    strategy: Threshold, agent_model: BaseLlm | None, memory: Memory | None = None
) -> SummaryModel | None:
    """The summariser of an agent whose window has 5,000 tokens."""
    summarizers = Summarizers(memory or Memory(), Registry())
    return summarizers.choose(strategy, agent_model, 5_000, LlmRequest())


@pytest.mark.parametrize(
    ("settings", "name", "window_tokens"),
    [
        pytest.param({}, "agents", 5_000, id="the agent's own"),
        pytest.param({"summarizer_context_window": 9_000}, "agents", 9_000, id="set"),
        pytest.param(
            {"summarizer": SimulatedLlm(model="other")}, "other", 5_000, id="m"
        ),
        pytest.param(
            {"summarizer": SimulatedLlm(model="another-model")},
            "another-model",
            13_000,
            id="another, by the registry",
        ),
        pytest.param({"summarizer": "no such model"}, "agents", 5_000, id="unknown"),
    ],
)
def test_the_summariser_and_its_window(
    settings: dict[str, Any], name: str, window_tokens: int
) -> None:
    """The agent's window counts for its own model, the registry's for another."""
    chosen = choose(Threshold(**settings), SimulatedLlm(model="agents"))
    assert chosen is not None
    assert chosen.llm.model == name
    assert chosen.window_tokens == window_tokens


def test_without_any_model_there_is_no_summariser() -> None:
    """An agent of another kind gets mechanical summaries."""
    assert choose(Threshold(), None) is None
    Summarizers(Memory(), None).note(Threshold(), None, has_failed=True)


class NamedLlm(SimulatedLlm):
    """A model that ADK finds by its name."""

    @classmethod
    def supported_models(cls) -> list[str]:
        """The names."""
        return [r"contextguard-test-.*"]


def test_a_summariser_is_found_by_its_name() -> None:
    """A name that ADK's registry knows stands for its model."""
    LLMRegistry.register(NamedLlm)
    chosen = choose(Threshold(summarizer="contextguard-test-1"), None)
    assert chosen is not None
    assert isinstance(chosen.llm, NamedLlm)
    assert chosen.llm.model == "contextguard-test-1"


def test_each_event_loop_gets_a_summariser_of_its_own() -> None:
    """A client belongs to the loop that it was made in; ADK keeps to that too."""
    LLMRegistry.register(NamedLlm)

    async def chosen() -> BaseLlm:
        found = choose(Threshold(summarizer="contextguard-test-2"), None)
        assert found is not None
        return found.llm

    assert asyncio.run(chosen()) is not asyncio.run(chosen())


def spared(outcomes: Sequence[bool], compactions: int) -> list[bool]:
    """After these outcomes (True is a failure): is the summariser asked?"""
    memory, llm = Memory(), SimulatedLlm()
    summarizers = Summarizers(memory, None)
    for has_failed in outcomes:
        summarizers.note(Threshold(), llm, has_failed)
    return [choose(Threshold(), llm, memory) is None for _ in range(compactions)]


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        pytest.param([True, True], [False] * 7, id="two failures"),
        pytest.param([True] * 3, [True] * 5 + [False] * 2, id="three failures"),
        pytest.param([True, True, False, True, True], [False] * 7, id="a success"),
    ],
)
def test_a_failing_summariser_is_spared(
    outcomes: list[bool], expected: list[bool]
) -> None:
    """Three failures in a row spare it for five compactions."""
    assert spared(outcomes, 7) == expected
