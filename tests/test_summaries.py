"""Summaries by a model, in up to three calls, and without one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.models.registry import LLMRegistry
from google.genai import types

from contextguard_adk import (
    Compaction,
    CompactionContext,
    CompactionRecord,
    SummaryError,
    Threshold,
)
from contextguard_adk.testing import RecordedRequest, SimulatedLlm
from contextguard_adk.testing import call as scripted_call
from tests.builders import answer_text, call, model, response, user
from tests.chats import (
    EXACT,
    KEY,
    Doing,
    demand,
    guarded_chat,
    seed,
    summary_requests,
    words,
)

FILLER = words(600, "FILLER")
"""Enough to make a compaction worth its while."""

LARGE = 1_000_000
"""A window of the agent that never asks for a compaction by itself."""


@dataclass
class Talk:
    """A conversation whose summaries another model writes, when they are demanded."""

    summarizer: BaseLlm
    settings: dict[str, Any] = field(default_factory=dict)
    window_tokens: int = LARGE

    def __post_init__(self) -> None:
        """Opens the chat."""
        self.llm = SimulatedLlm(context_window=10_000_000, token_ratio=1.0)
        self.records: list[CompactionRecord] = []
        strategy = Threshold(
            context_window=self.window_tokens,
            summarizer=self.summarizer,
            recall=False,
            **{"summarizer_context_window": LARGE, **self.settings},
        )
        guard = {"on_compaction": self.records.append}
        self.chat = guarded_chat(self.llm, strategy, guard=guard)

    async def compact(
        self, *contents: types.Content, message: str | types.Content = "Go on."
    ) -> str:
        """Has it summarized together with these contents; returns what is stored."""
        state = {**EXACT, **demand()}
        if len(contents) < 3:
            contents = (user(FILLER), *contents)
        await seed(self.chat, *contents, state=state)
        assert answer_text(await self.chat.say(message))
        assert self.llm.rejections == self.llm.violations == 0
        return str((await self.chat.state())[KEY.format("summary")])


def writing(*replies: Any, **settings: Any) -> SimulatedLlm:
    """A summarizer that gives these answers."""
    return SimulatedLlm(model="summarizer", summary_replies=list(replies), **settings)


def fences(request: RecordedRequest) -> dict[str, str]:
    """The fenced blocks of a prompt, by name."""
    blocks = re.findall(
        r"^<([\w-]+)-(\w{16})>\n(.*?)\n</\1-\2>$", request.text, re.M | re.S
    )
    return {name: body for name, _, body in blocks}


def numbered(count: int, size_tokens: int, name: str = "fact") -> list[types.Content]:
    """Alternating messages, recognizable by their number."""
    texts = [words(size_tokens, f"{name} {number}") for number in range(count)]
    return [(model if n % 2 else user)(text) for n, text in enumerate(texts)]


# --- What the summarizer is shown -------------------------------------------------


async def test_prompt_fences_what_is_to_be_summarized() -> None:
    """Transcript, previous summary and request stand apart, and nothing twice."""
    summarizer = writing("  First.\n", "Second.")
    talk = Talk(summarizer)
    assert await talk.compact(user("Hello."), model("Hi."), message="Sing.") == "First."
    assert await talk.compact(message="Dance.") == "Second."
    first, second = map(fences, summarizer.requests)
    assert first == {
        "transcript": f"user: {FILLER}\nuser: Hello.\nmodel: Hi.\nuser: Sing.",
        "current-request": "Sing.",
    }
    assert second["previous-summary"] == "First."
    assert second["transcript"].startswith("model: Acknowledged")
    assert "Hello." not in summarizer.requests[1].text
    assert [content.role for content in summarizer.requests[0].contents] == ["user"]


async def test_instruction_can_be_replaced() -> None:
    """A strategy may bring its own instruction; the word limit is filled in."""
    summarizer = writing("Short.")
    own = {"summary_instruction": "Write {max_words} words about {x}."}
    await Talk(summarizer, own, 4_000).compact(user("Hello."))
    assert summarizer.requests[0].system_instruction == "Write 300 words about {x}."


async def test_a_shorter_summary_can_be_asked_for() -> None:
    """A budget of its own replaces the usual one; attempts are counted."""
    compactions: list[Compaction] = []

    async def act(context: CompactionContext) -> Compaction | None:
        covered = context.older_than(0)
        compactions.append(await context.summarize(covered))
        return (await context.summarize(covered, 123)).after(2)

    llm = SimulatedLlm(summary_replies=["One.", "Two."])
    records: list[CompactionRecord] = []
    guard = {"on_compaction": records.append}
    chat = guarded_chat(
        llm, Doing(act=act, context_window=4_000, recall=False), guard=guard
    )
    await seed(chat, user(words(1_200)))
    await chat.say("Go on.")
    asked = summary_requests(llm)
    assert [request.config.max_output_tokens for request in asked] == [400, 123]
    assert compactions[0].attempts == 1
    assert records[0].attempts == 2
    assert (await chat.state())[KEY.format("summary")] == "Two."


# --- What it answers --------------------------------------------------------------


class Chunks(BaseLlm):
    """Yields the responses that it was given."""

    responses: list[LlmResponse]

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Yields the responses."""
        for item in self.responses:
            yield item


PARTIALS = [
    LlmResponse(content=model("The "), partial=True),
    LlmResponse(content=model("The summary.")),
    LlmResponse(),
]
THOUGHTS = [
    types.Part(text="Let me think.", thought=True),
    types.Part(text="One, "),
    types.Part(text="two."),
]
CUT = LlmResponse(content=model("So far"), error_code="MAX_TOKENS")


@pytest.mark.parametrize(
    ("summarizer", "stored"),
    [
        pytest.param(lambda: writing(THOUGHTS), "One, two.", id="thoughts"),
        pytest.param(lambda: writing(CUT), "So far", id="cut off"),
        pytest.param(
            lambda: Chunks(model="chunks", responses=PARTIALS),
            "The summary.",
            id="partials",
        ),
    ],
)
async def test_only_what_a_model_says_aloud_is_the_summary(
    summarizer: Callable[[], BaseLlm], stored: str
) -> None:
    """Parts are joined without thoughts, chunks are read once, a cut answer counts."""
    talk = Talk(summarizer())
    assert await talk.compact(user("Hello."), model("Hi.")) == stored
    assert not talk.records[0].is_mechanical


async def test_only_an_over_long_answer_is_cut() -> None:
    """Head and tail are kept; the provider's count wins over a larger estimate."""
    whole = "HEAD " + "middle ground " * 160 + "TAIL"
    assert len(whole) / 4 > 400
    talk = Talk(writing(f"HEAD {words(5_000)} TAIL", whole), {}, 4_000)
    summary = await talk.compact(user(words(2_000)))
    assert summary.startswith("HEAD")
    assert summary.endswith("TAIL")
    assert 200 <= len(summary) / 4 <= 400
    assert await talk.compact(user(words(2_000))) == whole


def hang(request: LlmRequest) -> Any:
    """Answers after the time limit."""
    return asyncio.sleep(30, "Too late.")


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        pytest.param(KeyError("secret"), "KeyError", id="raises"),
        pytest.param(SummaryError("own words"), "own words", id="raises ours"),
        pytest.param("", "no text", id="empty"),
        pytest.param(" \n\t", "no text", id="blank"),
        pytest.param(scripted_call("look"), "no text", id="calls a tool"),
        pytest.param(types.Part(text="Hm.", thought=True), "no text", id="only thinks"),
        pytest.param(LlmResponse(error_code="SAFETY"), "SAFETY", id="refused"),
        pytest.param(LlmResponse(), "no text", id="nothing"),
        pytest.param(hang, r"0\.02 s", id="hangs"),
    ],
)
async def test_a_failed_summary_is_replaced_by_a_mechanical_one(
    reply: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The turn goes on, and the next compaction reads the originals again."""
    replies = [reply, "A good summary."]

    def write(request: LlmRequest) -> Any:
        following = replies.pop(0)
        return following(request) if callable(following) else following

    summarizer = SimulatedLlm(model="summarizer", summary_replies=write)
    talk = Talk(summarizer, {"summary_timeout_seconds": 0.02}, 4_000)
    middle = f"BEGIN {words(1_500)} MIDDLE {words(1_500)} END"
    summary = await talk.compact(user("The task."), model(middle))
    assert summary.startswith("user: FILLER")
    assert "\nuser: The task.\nmodel: BEGIN" in summary
    assert "END" in summary
    assert "MIDDLE" not in summary
    assert talk.records[0].is_mechanical
    assert talk.records[0].tokens_after < 3_200
    [warning] = [r for r in caplog.records if r.name.startswith("contextguard")]
    assert re.search(reason, warning.getMessage())
    assert "secret" not in warning.getMessage()
    assert await talk.compact() == "A good summary."
    assert "MIDDLE" in fences(summarizer.requests[1])["transcript"]
    assert not talk.records[1].is_mechanical


async def test_a_strategy_may_read_what_went_wrong() -> None:
    """Within one compaction a failing summarizer costs one timeout, not several."""
    failures: list[str] = []

    async def act(context: CompactionContext) -> Compaction | None:
        for _ in range(3):
            compaction = await context.summarize(context.older_than(0))
        failures.extend(str(error) for error in context.failures)
        return compaction

    llm = SimulatedLlm(summary_replies=[RuntimeError("secret"), "Too late."])
    await guarded_chat(llm, Doing(act=act)).say("Hello. " * 500)
    assert llm.summaries == 1
    assert len(failures) == 1
    assert "RuntimeError" in failures[0]
    assert "secret" not in failures[0]


@pytest.mark.parametrize(
    ("window_tokens", "is_mechanical"),
    [
        pytest.param(6_000, False, id="less is enough"),
        pytest.param(1_000, True, id="less is not"),
    ],
)
async def test_input_that_is_too_long_is_tried_once_with_less(
    window_tokens: int, is_mechanical: bool
) -> None:
    """A summarizer whose window is smaller than assumed still gets its chance."""
    # 80 % of the assumed 10,000 are too much, 60 % of that are not.
    summarizer = writing(
        *["The summary."] * 9, context_window=window_tokens, token_ratio=1.0
    )
    talk = Talk(summarizer, {"summarizer_context_window": 10_000}, 4_000)
    summary = await talk.compact(user(words(7_000)), model("Hm."))
    assert talk.records[0].is_mechanical is is_mechanical
    assert (summary == "The summary.") is not is_mechanical
    assert summarizer.rejections == 1 + is_mechanical
    assert summarizer.largest_request_tokens <= 8_000


# --- Rolling calls ----------------------------------------------------------------

SMALL = {"summarizer_context_window": 8_000}


@pytest.mark.parametrize(
    ("size_tokens", "call_count"), [(4_000, 1), (9_000, 2), (14_000, 3), (100_000, 3)]
)
async def test_long_transcripts_take_up_to_three_calls(
    size_tokens: int, call_count: int
) -> None:
    """Each call stays within 80 % of the window and merges the summary so far."""
    summarizer = writing("PART 1", "PART 2", "PART 3", token_ratio=1.0)
    talk = Talk(summarizer, SMALL, 4_000)
    summary = await talk.compact(*numbered(20, size_tokens // 20))
    assert summary == f"PART {call_count}"
    assert summarizer.calls == call_count
    assert summarizer.largest_request_tokens <= 0.8 * 8_000
    previous = [fences(r).get("previous-summary") for r in summarizer.requests]
    assert previous == [None, "PART 1", "PART 2"][:call_count]
    read = "\n".join(fences(r)["transcript"] for r in summarizer.requests)
    assert read.endswith("user: Go on.")
    if size_tokens <= 14_000:
        facts = [int(number) for number in re.findall(r"fact (\d+) ", read)]
        assert facts == list(range(20))
        assert "left out" not in read


async def test_messages_stay_while_tool_results_are_shortened() -> None:
    """Beyond three calls it is the payloads that give way first."""
    summarizer = writing("ONE", "TWO", "THREE", token_ratio=1.0)
    contents = [user("The task.")]
    for number in range(30):
        result = f"BEGIN {number} {words(2_000)} END {number}"
        contents += [call("look", n=number), response("look", result)]
        contents += [model(f"I have seen page {number}.")]
    await Talk(summarizer, SMALL, 4_000).compact(*contents, message="The request.")
    read = "\n".join(fences(request)["transcript"] for request in summarizer.requests)
    assert summarizer.largest_request_tokens <= 0.8 * 8_000
    assert read.startswith("user: The task.")
    assert read.endswith("user: The request.")
    for number in range(30):
        assert f"model: I have seen page {number}." in read
        assert f"BEGIN {number} " in read
        assert f"END {number}" in read


async def test_huge_requests_and_summaries_leave_room_for_the_transcript() -> None:
    """What stands beside the transcript is shortened where it would crowd it out."""
    summarizer = writing(*[words(9_000, "SUMMARY")] * 2, token_ratio=1.0)
    talk = Talk(summarizer, SMALL, 30_000)
    await talk.compact(user(words(9_000)))
    await talk.compact(*numbered(100, 5), message=words(9_000, "REQUEST"))
    second = [r for r in summarizer.requests if "REQUEST" in r.text]
    assert summarizer.largest_request_tokens <= 0.8 * 8_000
    assert fences(second[0])["previous-summary"].startswith("SUMMARY")
    assert fences(second[0])["current-request"].startswith("REQUEST")
    assert "fact 99" in "".join(fences(request)["transcript"] for request in second)


# --- Settings of the call ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "window_tokens", "budget", "headroom_tokens"),
    [
        pytest.param("gemini-2.5-flash", 200_000, 0, 0, id="flash"),
        pytest.param("vertex_ai/gemini-2.5-flash-001", 200_000, 0, 0, id="by path"),
        pytest.param("gemini-2.5-pro", 200_000, None, 4_096, id="pro thinks"),
        pytest.param("openai/o3", 200_000, None, 4_096, id="o3 thinks"),
        pytest.param("openai/o3", 10_000, None, 800, id="in a small window"),
        pytest.param("gpt-4o", 200_000, None, 0, id="gpt-4o does not"),
        pytest.param("nobody-knows-me", 200_000, None, 0, id="unknown"),
    ],
)
async def test_thinking_is_off_or_has_room(
    name: str, window_tokens: int, budget: int | None, headroom_tokens: int
) -> None:
    """Thoughts count as output: they are turned off, or get tokens of their own."""
    summarizer = SimulatedLlm(model=name)
    settings = {"summarizer_context_window": window_tokens}
    await Talk(summarizer, settings, 4_000).compact(user("Hello."))
    config = summarizer.requests[0].config
    thinking = config.thinking_config
    assert (thinking.thinking_budget if thinking else None) == budget
    assert config.max_output_tokens == 400 + headroom_tokens


# --- Choosing the model -----------------------------------------------------------


class Registry:
    """Knows one model's window."""

    def context_window(self, model: str) -> int | None:
        """Returns a window of 16,000 tokens."""
        return 16_000 if model == "summarizer" else None


class NamedLlm(SimulatedLlm):
    """A model that ADK finds by its name."""

    @classmethod
    def supported_models(cls) -> list[str]:
        """The names."""
        return [r"contextguard-test-.*"]

    def model_post_init(self, context: Any, /) -> None:
        """Notes who was made."""
        super().model_post_init(context)
        MADE.append(self)


MADE: list[NamedLlm] = []


@pytest.mark.parametrize(
    ("settings", "is_own", "window_tokens"),
    [
        pytest.param({}, True, 50_000, id="the agent's own"),
        pytest.param({"summarizer_context_window": 30_000}, True, 30_000, id="set"),
        pytest.param({"summarizer": True}, False, 16_000, id="by the registry"),
        pytest.param({"summarizer": "no-such-model"}, True, 50_000, id="unknown"),
    ],
)
async def test_the_summarizer_and_its_window(
    settings: dict[str, Any], is_own: bool, window_tokens: int
) -> None:
    """The agent's window counts for its own model, the registry's for another."""
    llm, other = SimulatedLlm(token_ratio=1.0, context_window=LARGE), writing()
    other.token_ratio, other.context_window = 1.0, LARGE
    if settings.get("summarizer") is True:
        settings = {**settings, "summarizer": other}
    chat = guarded_chat(
        llm,
        Threshold(context_window=50_000, **settings),
        guard={"registry": Registry()},
    )
    await seed(chat, *numbered(100, 2_000), state={**EXACT, **demand()})
    await chat.say("Go on.")
    asked = summary_requests(llm if is_own else other)
    assert len(asked) == 3
    assert not summary_requests(other if is_own else llm)
    largest = max(request.prompt_tokens for request in asked)
    assert 0.5 * window_tokens < largest <= 0.8 * window_tokens


async def test_a_summarizer_by_name_is_made_in_each_event_loop() -> None:
    """A client belongs to the loop that it was made in; ADK keeps to that too."""
    LLMRegistry.register(NamedLlm)

    async def compact() -> None:
        chat = guarded_chat(
            SimulatedLlm(),
            Threshold(context_window=4_000, summarizer="contextguard-test-1"),
        )
        await seed(chat, user("Hello."), state=demand())
        await chat.say("Go on.")

    for _ in range(2):
        await asyncio.to_thread(asyncio.run, compact())
    asked = [made for made in MADE if made.summaries]
    assert [made.model for made in asked] == ["contextguard-test-1"] * 2


# --- Without a model --------------------------------------------------------------


def down(*replies: Any) -> SimulatedLlm:
    """A summarizer that fails after these replies."""
    return writing(*replies, *[RuntimeError("down")] * 9)


def kept_count(request: RecordedRequest, contents: Sequence[types.Content]) -> int:
    """How many of the newest contents stand in a request word for word."""
    kept = [content for content in request.contents if content in contents]
    assert kept == contents[len(contents) - len(kept) :]
    return len(kept)


def tool_work(count: int, size_tokens: int) -> list[types.Content]:
    """A task and then nothing but calls and results."""
    contents = [user("The task.")]
    for number in range(count):
        result = words(size_tokens, f"r{number}")
        contents += [
            call("look", f"id{number}", n=number),
            response("look", result, f"id{number}"),
        ]
    return contents


async def test_without_a_model_the_newest_part_stays() -> None:
    """A mechanical summary covers no more than it must."""
    talk, contents = Talk(down(), {}, 4_000), numbered(20, 200)
    await talk.compact(*contents)
    count = kept_count(talk.llm.requests[-1], [*contents, user("Go on.")])
    assert 0.2 * 3_200 <= 200 * count <= 0.45 * 3_200 + 200
    assert talk.records[0].tokens_after <= 3_200


@pytest.mark.parametrize("place", [3, 13, 25])
async def test_without_a_model_the_newest_tool_results_stay(place: int) -> None:
    """Wherever the user has last spoken, and where there is no message to cut at."""
    contents = tool_work(12, 250)
    contents.insert(place, user("And one thing more."))
    talk = Talk(down(), {}, 4_000)
    await seed(talk.chat, *contents[:-1], state={**EXACT, **demand()})
    await talk.chat.say(contents[-1])
    assert 4 <= kept_count(talk.llm.requests[-1], contents) <= 11
    assert talk.records[0].tokens_after <= 3_200


@pytest.mark.parametrize("has_task", [True, False], ids=["answer", "first message"])
async def test_one_giant_message_is_excerpted(has_task: bool) -> None:
    """Where nothing fits, nothing stays as it is."""
    talk, giant = Talk(down(), {}, 4_000), words(5_000, "GIANT")
    if has_task:
        summary = await talk.compact(user("The task."), model(giant))
    else:
        summary = await talk.compact(message=giant)
    assert talk.records[0].tokens_after <= 3_200
    assert "GIANT" in summary
    assert "left out" in summary


async def test_where_not_all_messages_fit_the_newest_are_kept() -> None:
    """A note says how many of the oldest are missing."""
    talk, contents = Talk(down(), {}, 4_000), numbered(200, 100)
    summary = await talk.compact(user("The task."), *contents)
    kept = [int(number) for number in re.findall(r"fact (\d+) ", summary)]
    assert len(kept) < 150
    assert kept == list(range(kept[0], kept[0] + len(kept)))
    assert f"[{kept[0] + 1} earlier messages left out]" in summary
    assert f"fact {kept[-1] + 1} " in talk.llm.requests[-1].text


async def test_what_a_model_wrote_outlives_later_failures() -> None:
    """Excerpts of a failure are made anew, the model's part stays in front."""
    summarizer = writing("By a model.", *[RuntimeError("down")] * 2, "Good.")
    talk = Talk(summarizer, {}, 10_000)
    await talk.compact(*numbered(4, 100, "old"))
    for name in ("first", "second"):
        summary = await talk.compact(*numbered(14, 500, name))
        assert summary.startswith("By a model.\n")
        assert summary.count("first 0 ") == 1
    assert await talk.compact() == "Good."
    last = fences(summarizer.requests[-1])
    assert last["previous-summary"] == "By a model."
    assert words(500, "first 0") in last["transcript"]
    assert "old 0 " not in last["transcript"]
