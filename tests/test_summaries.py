"""Summaries by a model, in up to three calls, and without one."""

from __future__ import annotations

import asyncio
import base64
import random
import re
from typing import Any, ClassVar

import pytest
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
from contextguard_adk.testing import SimulatedProviderError as ProviderError
from contextguard_adk.testing import call as scripted_call
from tests.builders import answer_text, call, model, response, user
from tests.chats import (
    DEMAND,
    EXACT,
    SUMMARY,
    Doing,
    ProviderBusyError,
    guarded_chat,
    seed,
    summary_requests,
    take_apart,
    words,
)

FILLER = words(600, "FILLER")
"""Enough to make a compaction worth its while."""


class Talk:
    """A conversation whose summaries another model writes, when they are demanded."""

    def __init__(self, summarizer: SimulatedLlm, window: int = 4_000, **more: Any):
        more.setdefault("summarizer_context_window", 1_000_000)
        self.llm = SimulatedLlm(context_window=10_000_000, token_ratio=1.0)
        self.records: list[CompactionRecord] = []
        strategy = Threshold(
            context_window=window, summarizer=summarizer, recall=False, **more
        )
        guard = {"on_compaction": self.records.append}
        self.chat = guarded_chat(self.llm, strategy, guard=guard)

    async def compact(self, *contents: types.Content, message: str = "Go on.") -> str:
        """Has it summarized together with these contents; returns what is stored."""
        if len(contents) < 3:
            contents = (user(FILLER), *contents)
        await seed(self.chat, *contents, state={**EXACT, **DEMAND})
        assert answer_text(await self.chat.say(message))
        assert self.llm.rejections == self.llm.violations == 0
        return str((await self.chat.state())[SUMMARY])


def writing(*replies: Any, **settings: Any) -> SimulatedLlm:
    """A summarizer that gives these answers."""
    return SimulatedLlm(model="summarizer", summary_replies=list(replies), **settings)


def fences(request: RecordedRequest) -> dict[str, str]:
    """The fenced blocks of a prompt, by name."""
    fence = re.compile(r"^<([\w-]+)-(\w{16})>\n(.*?)\n</\1-\2>$", re.M | re.S)
    return {name: body for name, _, body in fence.findall(request.text)}


def read_by(summarizer: SimulatedLlm) -> str:
    """All transcripts that a summarizer was shown."""
    return "\n".join(fences(request)["transcript"] for request in summarizer.requests)


def numbered(count: int, size_tokens: int, name: str = "fact") -> list[types.Content]:
    """Alternating messages, recognizable by their number."""
    texts = [words(size_tokens, f"{name} {number}") for number in range(count)]
    return [(model if n % 2 else user)(text) for n, text in enumerate(texts)]


async def test_prompt_fences_what_is_to_be_summarized() -> None:
    """Transcript, previous summary and request stand apart, and nothing twice."""
    summarizer = writing("  The first.\n", "The second.")
    talk = Talk(summarizer)
    stored = await talk.compact(user("Hello."), model("Hi."), message="Sing.")
    assert stored == "The first."
    assert await talk.compact(message="Dance.") == "The second."
    first, second = map(fences, summarizer.requests)
    said = f"user:\n  {FILLER}\nuser:\n  Hello.\nmodel:\n  Hi.\nuser:\n  Sing."
    assert first == {"transcript": said, "current-request": "Sing."}
    assert second["previous-summary"] == "The first."
    assert second["transcript"].startswith("model:\n  Acknowledged")
    assert "Hello." not in summarizer.requests[1].text


THOUGHTS = [
    types.Part(text="Let me think.", thought=True),
    types.Part(text="One, "),
    types.Part(text="two."),
]
ENDED = types.FinishReason.MAX_TOKENS
CUT = LlmResponse(content=model(words(300) + "\nAnd th"), finish_reason=ENDED)


@pytest.mark.parametrize(
    ("reply", "stored"),
    [(THOUGHTS, "One, two."), (CUT, words(300).strip())],
    ids=["thoughts", "cut off"],
)
async def test_only_what_a_model_says_aloud_is_the_summary(
    reply: Any, stored: str
) -> None:
    """Parts are joined without thoughts; of a long one that was cut, whole lines."""
    talk = Talk(writing(reply))
    assert await talk.compact(user("Hello."), model("Hi.")) == stored
    assert not talk.records[0].is_mechanical


async def test_only_an_over_long_answer_is_cut() -> None:
    """Head and tail are kept; the provider's count wins over a larger estimate."""
    whole = "HEAD " + "middle ground " * 160 + "TAIL"
    assert len(whole) / 4 > 400
    talk = Talk(writing(f"HEAD {words(5_000)} TAIL", whole))
    summary = await talk.compact(user(words(2_000)))
    assert summary.startswith("HEAD")
    assert summary.endswith("TAIL")
    assert 200 <= len(summary) / 4 <= 400
    assert await talk.compact(user(words(2_000))) == whole


def hang(request: LlmRequest) -> Any:
    """Answers after the time limit."""
    return asyncio.sleep(30, "Too late.")


FAILURES: dict[str, tuple[Any, str, int]] = {
    "raises": (KeyError("secret"), "KeyError", 1),
    "raises ours": (SummaryError("own words"), "own words", 1),
    "refused": (ProviderError("secret"), "SimulatedProviderError, status 400", 2),
    "busy": (ProviderBusyError("secret"), "ProviderBusyError, status 503", 3),
    "blank": (" \n\t", "no text", 2),
    "calls a tool": (scripted_call("look"), "no text", 2),
    "only thinks": (types.Part(text="Hm.", thought=True), "no text", 2),
    "blocked": (LlmResponse(error_code="SAFETY"), "SAFETY", 1),
    "nothing": (LlmResponse(), "no text", 2),
    "hangs": (hang, r"0\.02 s", 1),
}


@pytest.mark.parametrize(("reply", "reason", "tries"), FAILURES.values(), ids=FAILURES)
async def test_a_failed_summary_is_replaced_by_a_mechanical_one(
    reply: Any, reason: str, tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The turn goes on, and the next compaction reads the originals again."""
    replies = [*[reply] * tries, "A good summary."]

    def write(request: LlmRequest) -> Any:
        following = replies.pop(0)
        return following(request) if callable(following) else following

    summarizer = SimulatedLlm(model="summarizer", summary_replies=write)
    talk = Talk(summarizer, summary_timeout_seconds=0.02 if reply is hang else 60.0)
    middle = f"BEGIN {words(1_500)} MIDDLE {words(1_500)} END"
    summary = await talk.compact(user("The task."), model(middle))
    assert summary.startswith("user:\n  FILLER")
    assert "\nuser:\n  The task.\nmodel:\n  BEGIN" in summary
    assert "END" in summary
    assert "MIDDLE" not in summary
    assert talk.records[0].is_mechanical
    assert talk.records[0].tokens_after < 3_200
    [warning] = [r for r in caplog.records if r.name.startswith("contextguard")]
    assert re.search(reason, warning.getMessage())
    assert "secret" not in warning.getMessage()
    assert await talk.compact() == "A good summary."
    assert "MIDDLE" in fences(summarizer.requests[-1])["transcript"]
    assert summarizer.calls == tries + 1
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
    [failure] = failures
    assert "RuntimeError" in failure
    assert "secret" not in failure


@pytest.mark.parametrize(
    ("window_tokens", "is_mechanical"), [(6_000, False), (1_000, True)]
)
async def test_input_that_is_too_long_is_tried_once_with_less(
    window_tokens: int, is_mechanical: bool
) -> None:
    """A summarizer whose window is smaller than assumed still gets its chance."""
    # Nearly all of the assumed 10,000 is too much, 60 % of that is not.
    real = {"context_window": window_tokens, "token_ratio": 1.0}
    summarizer = writing(*["The summary."] * 9, **real)
    talk = Talk(summarizer, summarizer_context_window=10_000)
    summary = await talk.compact(user(words(7_000)), model("Hm."))
    assert talk.records[0].is_mechanical is is_mechanical
    assert (summary == "The summary.") is not is_mechanical
    assert summarizer.rejections == 1 + is_mechanical


@pytest.mark.parametrize(
    ("size_tokens", "call_count"), [(4_000, 1), (8_400, 1), (11_000, 2), (100_000, 3)]
)
async def test_long_transcripts_take_up_to_three_calls(
    size_tokens: int, call_count: int
) -> None:
    """One is the rule; each has room for its answer and merges the summary so far."""
    summarizer = writing("PART 1", "PART 2", "PART 3", token_ratio=1.0)
    talk = Talk(summarizer, summarizer_context_window=8_000)
    summary = await talk.compact(*numbered(20, size_tokens // 20))
    assert summary == f"PART {call_count}"
    assert summarizer.calls == call_count
    assert summarizer.largest_request_tokens <= 0.95 * 8_000 - 400
    previous = [fences(r).get("previous-summary") for r in summarizer.requests]
    assert previous == [None, "PART 1", "PART 2"][:call_count]
    read = read_by(summarizer)
    assert read.endswith("user:\n  Go on.")
    if size_tokens <= 11_000:
        facts = [int(number) for number in re.findall(r"fact (\d+) ", read)]
        assert facts == list(range(20))


async def test_a_dense_beginning_does_not_push_out_the_first_task() -> None:
    """Parts may count for more than the whole did; then all of it is shortened."""
    summarizer = writing("PART 1", "PART 2", "PART 3", token_ratio=1.0)
    talk = Talk(summarizer, summarizer_context_window=8_000)
    dense = base64.b64encode(random.Random(1).randbytes(7_200)).decode()
    contents = user("The first task."), model(dense + words(20_000)), user("More.")
    await talk.compact(*contents)
    assert "The first task." in read_by(summarizer)


@pytest.mark.parametrize(
    ("name", "window_tokens", "budget", "headroom_tokens"),
    [
        ("vertex_ai/gemini-2.5-flash-001", 200_000, 0, 0),
        ("gemini-2.5-pro", 200_000, None, 4_096),
        ("openai/o3", 10_000, None, 800),
        ("gpt-4o", 200_000, None, 0),
    ],
)
async def test_thinking_is_off_or_has_room(
    name: str, window_tokens: int, budget: int | None, headroom_tokens: int
) -> None:
    """Thoughts count as output: they are turned off, or get tokens of their own."""
    summarizer = SimulatedLlm(model=name)
    talk = Talk(summarizer, summarizer_context_window=window_tokens)
    await talk.compact(user("Hello."))
    config = summarizer.requests[0].config
    thinking = config.thinking_config
    assert (thinking.thinking_budget if thinking else None) == budget
    assert config.max_output_tokens == 400 + headroom_tokens


@pytest.mark.parametrize(
    ("settings", "window_tokens"),
    [
        ({}, 50_000),
        ({"summarizer_context_window": 30_000}, 30_000),
        ({"summarizer": "no-such-model"}, 50_000),
    ],
)
async def test_a_summary_call_uses_the_window(
    settings: dict[str, Any], window_tokens: int
) -> None:
    """The agent's own model summarizes, up to its window or the one that is set."""
    llm = SimulatedLlm(token_ratio=1.0, context_window=1_000_000)
    chat = guarded_chat(llm, Threshold(context_window=50_000, **settings))
    await seed(chat, *numbered(100, 2_000), state={**EXACT, **DEMAND})
    await chat.say("Go on.")
    asked = [request.prompt_tokens for request in summary_requests(llm)]
    assert len(asked) == 3
    assert 0.5 * window_tokens < max(asked) <= 0.95 * window_tokens - 5_000


class NamedLlm(SimulatedLlm):
    """A model that ADK finds by its name; notes who was made."""

    made: ClassVar[list[SimulatedLlm]] = []

    @classmethod
    def supported_models(cls) -> list[str]:
        """The names."""
        return [r"contextguard-test-.*"]

    def model_post_init(self, context: Any, /) -> None:
        """Notes it."""
        super().model_post_init(context)
        self.made.append(self)


async def test_a_summarizer_by_name_is_made_in_each_event_loop() -> None:
    """A client belongs to the loop that it was made in; ADK keeps to that too."""
    LLMRegistry.register(NamedLlm)
    strategy = Threshold(context_window=4_000, summarizer="contextguard-test-1")

    async def compact() -> None:
        chat = guarded_chat(SimulatedLlm(), strategy)
        await seed(chat, user(FILLER), state=DEMAND)
        await chat.say("Go on.")

    for _ in range(2):
        await asyncio.to_thread(asyncio.run, compact())
    assert len([made for made in NamedLlm.made if made.summaries]) == 2


def failing(*replies: Any) -> SimulatedLlm:
    """A summarizer that fails after these replies."""
    return writing(*replies, *[RuntimeError("down")] * 9)


@pytest.mark.parametrize("place", [3, 13])
async def test_without_a_model_the_newest_part_stays(place: int) -> None:
    """Wherever the user has last spoken, and where there is no message to cut at."""
    contents = [user("The task.")]
    for n in range(12):
        contents += [call("look", f"{n}"), response("look", words(250), f"{n}")]
    contents.insert(place, user("And one thing more."))
    talk = Talk(failing())
    await talk.compact(*contents)
    kept = [
        content
        for content in take_apart(talk.llm.requests[-1].contents)
        if content in contents
    ]
    assert kept == contents[len(contents) - len(kept) :]
    assert 3 <= len(kept) <= 11
    assert talk.records[0].tokens_after <= 3_200


async def test_what_a_model_wrote_outlives_later_failures() -> None:
    """Excerpts of a failure are made anew, the model's part stays in front."""
    summarizer = writing("By a model.", *[RuntimeError("down")] * 2, "A good one.")
    talk = Talk(summarizer, 10_000)
    await talk.compact(*numbered(4, 100, "old"))
    for name in ("first", "second"):
        summary = await talk.compact(*numbered(14, 500, name))
        assert summary.startswith("By a model.\n")
        assert summary.count("first 0 ") == 1
    assert await talk.compact() == "A good one."
    last = fences(summarizer.requests[-1])
    assert last["previous-summary"] == "By a model."
    assert words(500, "first 0") in last["transcript"]
    assert "old 0 " not in last["transcript"]
