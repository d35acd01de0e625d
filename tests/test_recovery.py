"""A provider that says "too long" is understood, obeyed, and asked once more.

The guard is told a window that is far too large, so that only the provider's own
words can teach it better. What counts is what reaches the provider and the caller.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, get_args

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import InMemorySessionService
from google.genai import types
from pydantic import Field

from contextguard_adk import ContextGuardPlugin, SlidingWindow, Threshold
from contextguard_adk.measuring.tokens import (
    estimate_config_tokens,
    estimate_contents_tokens,
)
from contextguard_adk.strategies import Strategy
from contextguard_adk.summarizing.context import Compaction, CompactionContext
from contextguard_adk.testing import (
    ContextOverflowError,
    ErrorStyle,
    RecordedRequest,
    Reply,
    SimulatedLlm,
)
from tests.builders import (
    Chat,
    answer_text,
    call_part,
    guarded_agent,
    queued_tool,
    user,
)

CONFIGURED_TOKENS = 200_000
REAL_TOKENS = 8_000
FINDING = "The scanner found part 7f3a of the old press in hall B. " * 130
UNNAMED = ("openai-responses", "bedrock", "groq", "ollama")
"""The providers that do not say how much would have been accepted."""

KEY = "__context_guard_{}_agent"


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def is_streaming(request: pytest.FixtureRequest) -> bool:
    """Both ways in which a model's answer arrives."""
    return bool(request.param)


@pytest.fixture(
    params=[
        Threshold(context_window=CONFIGURED_TOKENS),
        SlidingWindow(context_window=CONFIGURED_TOKENS, max_turns=1_000),
    ],
    ids=["threshold", "sliding window"],
)
def strategy(request: pytest.FixtureRequest) -> Strategy:
    """Both strategies, with a window that is far too large."""
    chosen: Strategy = request.param
    return chosen


def overflow(limit: int = REAL_TOKENS, used: int = 9_000) -> ContextOverflowError:
    """A rejection that names both numbers."""
    return ContextOverflowError(f"prompt is too long: {used} tokens > {limit} maximum")


def open_chat(
    llm: SimulatedLlm,
    strategy: Strategy | None = None,
    *,
    finding: str = FINDING,
    guard: dict[str, Any] | None = None,
    plugins: Sequence[BasePlugin] = (),
    agent: dict[str, Any] | None = None,
    **settings: Any,
) -> Chat:
    """A chat whose agent searches; `plugins` come after the guard."""
    plugin = ContextGuardPlugin(
        default=strategy or Threshold(context_window=CONFIGURED_TOKENS),
        **(guard or {}),
    )
    tool = queued_tool("search", [finding])
    return Chat(
        guarded_agent(llm, **{"tools": [tool], **(agent or {})}),
        [plugin, *plugins],
        **settings,
    )


def working_script(turns: int, searches: int = 2) -> list[Reply]:
    """Searches and then answers, turn by turn."""
    script: list[Reply] = []
    for turn in range(turns):
        script += [*[call_part("search")] * searches, f"Answer {turn}."]
    return script


async def work(chat: Chat, turns: int, start: int = 0) -> None:
    """Has some turns; each must end with its answer and with usage."""
    for turn in range(start, start + turns):
        events = await chat.say(f"Question {turn}?")
        assert answer_text(events) == f"Answer {turn}."
        final = [event for event in events if not event.partial][-1]
        assert final.usage_metadata is not None
        assert final.usage_metadata.prompt_token_count


def agent_requests(llm: SimulatedLlm) -> list[RecordedRequest]:
    """What the agent's model was sent, without the requests for summaries."""
    return [record for record in llm.requests if not record.is_summary]


def sizes_after(llm: SimulatedLlm, count: int) -> list[int]:
    """Sizes of the agent's requests after the first so many."""
    return [
        estimate_contents_tokens(record.contents)
        for record in agent_requests(llm)[count:]
    ]


@pytest.mark.parametrize("style", get_args(ErrorStyle))
async def test_one_rejection_teaches_the_limit(
    strategy: Strategy, is_streaming: bool, style: ErrorStyle
) -> None:
    """Whatever the provider's words, one request is rejected and no turn is lost."""
    llm = SimulatedLlm(
        context_window=REAL_TOKENS,
        token_ratio=1.3,
        error_style=style,
        script=working_script(3),
    )
    chat = open_chat(llm, strategy, is_streaming=is_streaming)
    await work(chat, 3)
    assert (llm.rejections, llm.violations) == (1, 0)
    learned = (await chat.state())[KEY.format("learned_window")]
    [rejected] = [record for record in llm.requests if record.rejected]
    if style in UNNAMED:
        assert learned < rejected.prompt_tokens
    else:
        assert learned == REAL_TOKENS


@pytest.mark.parametrize("style", sorted({*get_args(ErrorStyle)} - {*UNNAMED}))
async def test_result_many_times_the_window_is_rejected_once(
    style: ErrorStyle,
) -> None:
    """A named limit is enough even where one tool result is five windows long."""
    llm = SimulatedLlm(
        context_window=REAL_TOKENS,
        token_ratio=1.3,
        error_style=style,
        script=working_script(2),
    )
    chat = open_chat(llm, finding=FINDING * 16)
    await work(chat, 2)
    assert (llm.rejections, llm.violations) == (1, 0)


async def test_learned_limit_survives_a_restart(is_streaming: bool) -> None:
    """What one process has learned, the next one reads from the session."""
    sessions = InMemorySessionService()
    for start in (0, 2):
        llm = SimulatedLlm(
            context_window=REAL_TOKENS,
            token_ratio=1.3,
            script=working_script(4)[start * 3 :],
        )
        chat = open_chat(llm, is_streaming=is_streaming, session_service=sessions)
        await work(chat, 2, start)
        assert llm.rejections == (1 if start == 0 else 0)


async def test_larger_limit_does_not_widen_the_window() -> None:
    """A limit above the configured window is not taken for the window."""
    llm = SimulatedLlm(token_ratio=1.0, script=[overflow(1_000_000, 1_000_001)])
    chat = open_chat(llm, Threshold(context_window=REAL_TOKENS))
    assert answer_text(await chat.say("Hello " * 400)) == "Done."
    assert KEY.format("learned_window") not in await chat.state()


async def test_limit_without_numbers_is_lowered_with_every_rejection() -> None:
    """The window that is assumed follows from the newest request that was rejected."""
    blunt = ContextOverflowError("Input is too long for requested model.")
    learned = []
    for rejections in (1, 2):
        script = [*working_script(1)[:2], *[blunt] * rejections, "Answer 0."]
        chat = open_chat(SimulatedLlm(token_ratio=1.0, script=script))
        await work(chat, 1)
        learned.append((await chat.state())[KEY.format("learned_window")])
    assert learned[1] < 0.8 * learned[0]


INPUT_PLUS_OUTPUT = (
    "input length and `max_tokens` exceed context limit: {} + 64000 > 200000, decrease "
    "input length or `max_tokens` and try again"
)


def reserved_tokens(record: RecordedRequest) -> int | None:
    """The output that a request reserves."""
    return record.config.max_output_tokens


async def test_input_plus_output_lowers_the_output_first(
    caplog: pytest.LogCaptureFixture, is_streaming: bool
) -> None:
    """Where only the sum is too large the same contents go out with less output."""
    error = ContextOverflowError(INPUT_PLUS_OUTPUT.format(178_959))
    llm = SimulatedLlm(token_ratio=1.0, script=[error, "Fine."])
    settings = types.GenerateContentConfig(max_output_tokens=64_000)
    chat = open_chat(
        llm, is_streaming=is_streaming, agent={"generate_content_config": settings}
    )
    assert answer_text(await chat.say("How are you?")) == "Fine."
    first, second = llm.requests
    assert second.contents == first.contents
    assert reserved_tokens(second) == int((200_000 - 178_959) * 0.98)
    assert KEY.format("learned_window") not in await chat.state()
    await chat.say("And now?")
    assert reserved_tokens(llm.requests[-1]) == 64_000


@pytest.mark.parametrize(
    ("prompts", "output_tokens"),
    [
        pytest.param([199_900], 64_000, id="no room for output"),
        pytest.param([178_959, 178_959], 20_620, id="rejected again"),
    ],
)
async def test_output_that_cannot_be_lowered_enough_leads_to_compaction(
    prompts: Sequence[int], output_tokens: int
) -> None:
    """The history is compacted where less output does not help."""
    errors = [ContextOverflowError(INPUT_PLUS_OUTPUT.format(n)) for n in prompts]
    llm = SimulatedLlm(
        context_window=CONFIGURED_TOKENS,
        token_ratio=1.0,
        script=[*working_script(1)[:2], *errors, "Answer 0."],
    )
    settings = types.GenerateContentConfig(max_output_tokens=64_000)
    chat = open_chat(llm, agent={"generate_content_config": settings})
    await work(chat, 1)
    assert reserved_tokens(agent_requests(llm)[-1]) == output_tokens
    *_, rejected, answered = sizes_after(llm, 2)
    assert answered < rejected
    assert "[Previous conversation summary]" in llm.requests[-1].text


async def test_tool_of_a_compaction_after_lowered_output_is_in_the_request() -> None:
    """Its summary speaks of `recall_history`, so the agent has to have it."""
    error = ContextOverflowError(INPUT_PLUS_OUTPUT.format(178_959))
    llm = SimulatedLlm(
        context_window=CONFIGURED_TOKENS,
        token_ratio=1.0,
        script=["Noted.", error, error, "Fine."],
    )
    settings = types.GenerateContentConfig(max_output_tokens=64_000)
    chat = open_chat(
        llm,
        Threshold(context_window=CONFIGURED_TOKENS, recall=True),
        agent={"generate_content_config": settings, "tools": []},
    )
    await chat.say(FINDING)
    assert answer_text(await chat.say("How are you?")) == "Fine."
    answered = llm.requests[-1]
    assert "recall_history(" in answered.text
    (tool,) = answered.config.tools or [None]
    assert isinstance(tool, types.Tool)
    declared = [declaration.name for declaration in tool.function_declarations or ()]
    assert declared == ["recall_history"]


async def test_second_rejection_leads_to_a_minimal_request(
    strategy: Strategy, is_streaming: bool
) -> None:
    """Each further request is strictly smaller, and still holds what the user wants."""
    script: list[Reply] = [
        *working_script(1, searches=4),
        *working_script(1, searches=4)[:-1],
        overflow(),
        overflow(),
        "Answer 1.",
    ]
    llm = SimulatedLlm(context_window=CONFIGURED_TOKENS, token_ratio=1.0, script=script)
    chat = open_chat(llm, strategy, is_streaming=is_streaming)
    await work(chat, 2)
    sizes = sizes_after(llm, 9)
    assert len(sizes) == 3
    assert sizes == sorted(set(sizes), reverse=True)
    final = llm.requests[-1]
    assert "Question 1?" in final.text
    assert "[Previous conversation summary]" in final.text
    assert final.stream is False


class NoEmergency(SlidingWindow):
    """A strategy that will not compact harder than it is used to."""

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Compacts as usual; after a rejection not at all."""
        return None if context.reason == "overflow" else await super().compact(context)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(SlidingWindow(max_turns=8), id="summarised again"),
        pytest.param(NoEmergency(max_turns=8), id="summary of its own turn"),
        pytest.param(
            NoEmergency(context_window=13_000, max_turns=99),
            id="summary of an earlier turn",
        ),
    ],
)
async def test_minimal_request_holds_what_the_user_wants_now(
    strategy: Strategy,
) -> None:
    """The live request stays although the summary quotes none, or an older one."""
    rejected = [ContextOverflowError("Input is too long for requested model.")] * 2
    script: list[Reply] = [
        *working_script(1, searches=5),
        *working_script(1, searches=3)[:-1],
        *rejected[: 1 if isinstance(strategy, NoEmergency) else 2],
        "Answer 1.",
    ]
    llm = SimulatedLlm(
        context_window=CONFIGURED_TOKENS,
        token_ratio=1.0,
        script=script,
        summary_replies=lambda _: "The scanner was used.",
    )
    chat = open_chat(llm, strategy)
    await work(chat, 2)
    rejected_count = 1 if isinstance(strategy, NoEmergency) else 2
    assert len(agent_requests(llm)) == 10 + rejected_count
    assert "[Previous conversation summary]" in agent_requests(llm)[9].text
    assert "The scanner was used." in llm.requests[-1].text
    assert "Question 1?" in llm.requests[-1].text
    assert llm.violations == 0


async def test_original_error_reaches_the_caller_when_nothing_helps(
    caplog: pytest.LogCaptureFixture, strategy: Strategy, is_streaming: bool
) -> None:
    """After the minimal request the first error is raised, and logged with numbers."""
    errors = [overflow(used=9_000 + n) for n in range(5)]
    script = [*working_script(1)[:-1], *errors]
    llm = SimulatedLlm(context_window=CONFIGURED_TOKENS, token_ratio=1.0, script=script)
    chat = open_chat(llm, strategy, is_streaming=is_streaming)
    with pytest.raises(ContextOverflowError) as raised:
        await chat.say("Question 0?")
    assert raised.value is errors[0]
    sizes = sizes_after(llm, 2)
    assert len(sizes) == 3
    assert sizes == sorted(set(sizes), reverse=True)
    [record] = [r for r in caplog.records if r.name.endswith("recovery")]
    assert record.levelno == logging.ERROR
    assert isinstance(record.args, tuple)
    agent, window, fixed, tried = record.args
    assert (agent, window) == ("agent", REAL_TOKENS)
    assert isinstance(fixed, int)
    assert 0 < fixed < 250
    # With the first compaction the tool to recall was added.
    before = estimate_config_tokens(agent_requests(llm)[2].config)
    assert tried == [sizes[0] + before, *(size + fixed for size in sizes[1:])]


async def test_request_that_cannot_shrink_is_not_sent_again(
    is_streaming: bool,
) -> None:
    """A single short message gains nothing by a summary."""
    llm = SimulatedLlm(token_ratio=1.0, script=[overflow(), "never"])
    chat = open_chat(llm, is_streaming=is_streaming)
    with pytest.raises(ContextOverflowError):
        await chat.say("Hello.")
    assert len(agent_requests(llm)) == 1


async def test_instruction_beyond_the_limit_costs_no_summary(
    caplog: pytest.LogCaptureFixture, is_streaming: bool
) -> None:
    """Where instruction and tools alone exceed the limit nothing is paid for."""
    llm = SimulatedLlm(
        context_window=REAL_TOKENS, token_ratio=1.0, error_style="anthropic"
    )
    settings = {"instruction": "Be helpful. " * 3_000}
    chat = open_chat(llm, is_streaming=is_streaming, agent=settings)
    with pytest.raises(ContextOverflowError):
        await chat.say("How are you? " * 300)
    assert llm.summaries == 0
    assert llm.rejections <= 2
    assert "rejected every request" in caplog.text


async def test_session_goes_on_after_a_turn_that_was_lost(is_streaming: bool) -> None:
    """A turn that no request could save does not spoil the next one."""
    script = [*working_script(1)[:-1], *[overflow()] * 3, "Better."]
    llm = SimulatedLlm(context_window=CONFIGURED_TOKENS, token_ratio=1.0, script=script)
    chat = open_chat(llm, is_streaming=is_streaming)
    with pytest.raises(ContextOverflowError):
        await chat.say("Question 0?")
    assert answer_text(await chat.say("Try again.")) == "Better."
    assert llm.violations == 0


@pytest.mark.parametrize(
    "text",
    [
        "Rate limit reached for gpt-4o: Limit 30000, Used 29000. Try again in 2s.",
        "Request too large for model on tokens per minute (TPM): Limit 6000",
        "429 RESOURCE_EXHAUSTED. Quota exceeded for input token count.",
        "Too many tokens, please wait before trying again.",
        "Extra usage is required for long context requests.",
        "The server is overloaded.",
        "",
    ],
)
async def test_other_errors_are_left_alone(
    caplog: pytest.LogCaptureFixture, is_streaming: bool, text: str
) -> None:
    """A rate limit or a fault costs no second request and reaches the caller."""
    error = RuntimeError(text)
    llm = SimulatedLlm(token_ratio=1.0, script=[error])
    chat = open_chat(llm, is_streaming=is_streaming)
    with pytest.raises(RuntimeError) as raised:
        await chat.say("Hello.")
    assert raised.value is error
    assert llm.calls == 1
    assert not any(r.name.startswith("contextguard") for r in caplog.records)


@pytest.mark.parametrize(
    "guard",
    [
        pytest.param({"observe": True}, id="observing"),
        pytest.param({"agents": {"agent": None}}, id="exempt agent"),
    ],
)
async def test_guard_that_may_not_change_requests_does_not_resend(
    is_streaming: bool, guard: dict[str, Any]
) -> None:
    """Where the guard only observes, or not at all, a rejection stays one."""
    llm = SimulatedLlm(token_ratio=1.0, script=[overflow()])
    chat = open_chat(llm, guard=guard, is_streaming=is_streaming)
    with pytest.raises(ContextOverflowError):
        await chat.say("Hello.")
    assert llm.calls == 1
    assert not any("context_guard" in key for key in await chat.state())


async def test_other_error_in_the_resend_gives_way_to_the_original(
    caplog: pytest.LogCaptureFixture, is_streaming: bool
) -> None:
    """The caller sees why the request failed, not why the rescue did."""
    error = overflow()
    script = [*working_script(1)[:-1], error, OSError("reset"), "never"]
    llm = SimulatedLlm(context_window=CONFIGURED_TOKENS, token_ratio=1.0, script=script)
    chat = open_chat(llm, is_streaming=is_streaming)
    with pytest.raises(ContextOverflowError) as raised:
        await chat.say("Question 0?")
    assert raised.value is error
    assert len(agent_requests(llm)) == 4
    assert "failed with OSError" in caplog.text


async def test_failing_summariser_does_not_stop_the_recovery(
    is_streaming: bool,
) -> None:
    """A mechanical summary serves where the model will not write one."""
    llm = SimulatedLlm(
        context_window=REAL_TOKENS,
        token_ratio=1.3,
        script=working_script(3),
        summary_replies=lambda _: RuntimeError("out of order"),
    )
    chat = open_chat(llm, is_streaming=is_streaming)
    await work(chat, 3)
    assert llm.rejections == 1


async def test_recovered_tool_call_is_executed(is_streaming: bool) -> None:
    """An answer to the resend that calls a tool carries the turn on."""
    script: list[Reply] = [
        *working_script(1)[:-1],
        overflow(),
        call_part("search"),
        "Answer 0.",
    ]
    llm = SimulatedLlm(context_window=CONFIGURED_TOKENS, token_ratio=1.0, script=script)
    chat = open_chat(llm, is_streaming=is_streaming)
    await work(chat, 1)
    assert len(agent_requests(llm)) == 5
    assert llm.violations == 0


class BreaksOff(SimulatedLlm):
    """A provider that finds out in mid-stream that the request was too long."""

    breaks: list[Exception] = Field(default_factory=list)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers; with `stream` it breaks off after the first chunk, once."""
        async for response in super().generate_content_async(llm_request, stream):
            yield response
            if response.partial and self.breaks:
                raise self.breaks.pop()


async def test_rejection_in_mid_stream_is_recovered() -> None:
    """Chunks that came before the rejection are followed by a whole answer."""
    llm = BreaksOff(
        context_window=CONFIGURED_TOKENS,
        token_ratio=1.0,
        script=["A first try.", "Answer 0."],
        breaks=[ConnectionError(str(overflow()))],
    )
    chat = open_chat(llm, is_streaming=True)
    events = await chat.say("Question 0? " * 500)
    assert answer_text(events) == "Answer 0."
    assert [event.partial for event in events] == [True, False]


class Watcher(BasePlugin):
    """A plugin behind the guard; may change requests and sees the answers."""

    def __init__(
        self, change: Callable[[LlmRequest], None] = lambda request: None
    ) -> None:
        super().__init__(name="watcher")
        self.change = change
        self.answers: list[LlmResponse] = []

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Changes the request."""
        self.change(llm_request)

    async def after_model_callback(
        self, *, callback_context: CallbackContext, llm_response: LlmResponse
    ) -> None:
        """Notes the answer."""
        self.answers.append(llm_response)


async def test_later_plugins_see_the_recovered_answer(is_streaming: bool) -> None:
    """The answer passes through after_model, and its usage is stored."""
    llm = SimulatedLlm(
        context_window=REAL_TOKENS, token_ratio=1.3, script=working_script(3)
    )
    watcher = Watcher()
    chat = open_chat(llm, plugins=[watcher], is_streaming=is_streaming)
    await work(chat, 3)
    rejected = next(n for n, r in enumerate(agent_requests(llm)) if r.rejected)
    answers = [answer for answer in watcher.answers if not answer.partial]
    usage = answers[rejected].usage_metadata
    assert usage is not None
    resent = agent_requests(llm)[rejected + 1]
    assert usage.prompt_token_count == resent.prompt_tokens
    state = await chat.state()
    ratio = state[KEY.format("real_tokens")] / state[KEY.format("last_heuristic")]
    assert ratio == pytest.approx(1.3, rel=0.02)


def append_reminder(request: LlmRequest) -> None:
    """Adds a content, as callbacks do that inject context."""
    request.contents.append(user("Mind the gap."))


def drop_oldest(request: LlmRequest) -> None:
    """Removes a content, as callbacks do that trim history."""
    if len(request.contents) > 2:
        request.contents = request.contents[2:]


def hide_names(request: LlmRequest) -> None:
    """Replaces contents by others, as callbacks do that hide personal data."""
    request.contents = [_without_name(content) for content in request.contents]


def _without_name(content: types.Content) -> types.Content:
    parts = [
        part.model_copy(update={"text": part.text.replace("Ada", "[name]")})
        if part.text
        else part
        for part in content.parts or ()
    ]
    return content.model_copy(update={"parts": parts})


@pytest.mark.parametrize("change", [append_reminder, drop_oldest, hide_names])
async def test_resend_respects_what_later_callbacks_did(
    is_streaming: bool, change: Callable[[LlmRequest], None]
) -> None:
    """What a callback behind the guard added stays, what it took away stays away."""
    script: list[Reply] = [
        "Good day.",
        *working_script(1, searches=3)[:-1],
        overflow(limit=3_500, used=6_000),
        "Answer 0.",
    ]
    llm = SimulatedLlm(
        context_window=CONFIGURED_TOKENS,
        token_ratio=1.0,
        script=script,
        summary_replies=lambda _: "The scanner was used.",
    )
    watcher = Watcher(change)
    chat = open_chat(
        llm,
        SlidingWindow(context_window=CONFIGURED_TOKENS),
        plugins=[watcher],
        is_streaming=is_streaming,
    )
    await chat.say("My name is Ada.")
    await work(chat, 1)
    resent = agent_requests(llm)[-1]
    assert llm.violations == 0
    assert ("Ada" in resent.text) is (change is append_reminder)
    assert resent.text.count("Mind the gap.") == (change is append_reminder)
    asked = [content for content in resent.contents if content == user("Question 0?")]
    quoted = "The user's current request is: `Question 0?`"
    assert len(asked) + resent.text.count(quoted) == 1


async def test_recovery_starts_from_the_contents_before_the_guard(
    is_streaming: bool,
) -> None:
    """The summariser sees the originals again, not the summary that stood for them."""
    script: list[Reply] = [
        *working_script(1, searches=6),
        *working_script(1, searches=3)[:-1],
        overflow(limit=6_000, used=8_000),
        "Answer 1.",
    ]
    numbers = itertools.count(1)
    llm = SimulatedLlm(
        context_window=CONFIGURED_TOKENS,
        token_ratio=1.0,
        script=script,
        summary_replies=lambda _: f"Summary {next(numbers)}.",
    )
    strategy = Threshold(context_window=10_000, summarizer_context_window=1_000_000)
    chat = open_chat(llm, strategy, is_streaming=is_streaming)
    await work(chat, 2)
    assert llm.violations == 0
    last_task = [record for record in llm.requests if record.is_summary][-1]
    assert "[Previous conversation summary]" not in last_task.text
    assert last_task.text.count(f"Summary {next(numbers) - 2}.") == 1
    assert "[called tool: search]" in last_task.text


@pytest.mark.parametrize("style", ["openai", "anthropic", "gemini", "llama.cpp"])
async def test_silent_provider_with_many_tokens_is_rejected_once(
    strategy: Strategy, is_streaming: bool, style: ErrorStyle
) -> None:
    """Five times our count and never a word of usage: the rejection calibrates."""
    llm = SimulatedLlm(
        context_window=32_000,
        token_ratio=5.0,
        usage="never",
        error_style=style,
        script=working_script(3),
    )
    chat = open_chat(
        llm,
        strategy.model_copy(update={"context_window": 32_000}),
        is_streaming=is_streaming,
    )
    for turn in range(3):
        assert answer_text(await chat.say(f"Question {turn}?")) == f"Answer {turn}."
    assert llm.rejections <= 1
    learned = (await chat.state()).get(KEY.format("learned_correction"))
    assert llm.rejections == 0 or learned in range(300, 600)


@pytest.mark.parametrize("style", get_args(ErrorStyle))
async def test_resends_stay_bounded_in_a_session_of_surprises(
    style: ErrorStyle,
) -> None:
    """Sizes that jump by ten windows cost no turn, and few rejections."""
    sizes = itertools.cycle([1, 20, 3, 9])
    findings = [FINDING * next(sizes) for _ in range(8)]
    llm = SimulatedLlm(
        context_window=REAL_TOKENS,
        token_ratio=2.0,
        error_style=style,
        script=working_script(3),
    )
    plugin = ContextGuardPlugin(default=Threshold(context_window=CONFIGURED_TOKENS))
    chat = Chat(guarded_agent(llm, [queued_tool("search", findings)]), [plugin])
    await work(chat, 3)
    rejected = [record for record in agent_requests(llm) if record.rejected]
    assert len(rejected) <= (3 if style in UNNAMED else 1)
    assert llm.violations == 0


async def test_model_by_name_is_resolved_for_the_resend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An agent without a model of its own inherits one; the resend goes there."""
    llm = SimulatedLlm(token_ratio=1.0, script=[overflow(), "Fine."])
    child = LlmAgent(name="child", instruction="You help.")
    parent = LlmAgent(
        name="agent",
        model=SimulatedLlm(script=[call_part("transfer_to_agent", agent_name="child")]),
        sub_agents=[child],
    )
    monkeypatch.setattr(parent, "model", _Relay(first=parent.model, then=llm))
    plugin = ContextGuardPlugin(default=Threshold(context_window=CONFIGURED_TOKENS))
    events = await Chat(parent, [plugin]).say("Hello " * 500)
    assert answer_text(events) == "Fine."


class _Relay(SimulatedLlm):
    """One model that answers for two."""

    first: Any = None
    then: Any = None
    taken: list[int] = Field(default_factory=list)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Passes the first request on to one model, all others to the other."""
        chosen = self.then if self.taken else self.first
        self.taken.append(1)
        async for response in chosen.generate_content_async(llm_request, stream):
            yield response
