"""Limits that change one request only, or none: contradicted, of a fallback, stored."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.sessions import InMemorySessionService
from pydantic import Field

from contextguard_adk import (
    CallRecord,
    ContextGuardPlugin,
    Pipeline,
    SlidingWindow,
    Threshold,
)
from contextguard_adk.testing import ContextOverflowError, SimulatedLlm
from contextguard_adk.testing.provider import count_request_tokens
from tests.builders import SUMMARY_BEGIN, Chat, answer_text, model, user
from tests.chats import (
    DEMAND,
    KEY,
    ProviderBusyError,
    agent_requests,
    seed,
    slow,
    words,
)

WINDOW = 32_000
SMALL = 4_000
RECORD = KEY.format("record")
STRATEGIES = [Threshold, *slow(SlidingWindow, Pipeline)]
NAMED = (
    "This model's maximum context length is {limit} tokens. However, your "
    "messages resulted in {sent} tokens."
)
UNNAMED = "prompt too long; exceeded max context length"


class RefusalError(ContextOverflowError):
    """What a client raises that names the model which it has asked."""

    def __init__(self, text: str, model: str) -> None:
        super().__init__(text)
        self.model = model


class Gateway(SimulatedLlm):
    """A gateway that lets a small backup answer while `is_degraded`."""

    is_degraded: bool = False
    words: str = NAMED
    backup: str = ""
    refused: int = 0
    sizes: list[int] = Field(default_factory=list)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers, or refuses what the backup does not take."""
        sent = count_request_tokens(llm_request, 1.0, 258)
        self.sizes.append(sent)
        if self.is_degraded and sent > SMALL:
            self.refused += 1
            text = self.words.format(limit=SMALL, sent=sent)
            raise RefusalError(text, self.backup or self.model)
        async for response in super().generate_content_async(llm_request, stream):
            yield response


def open_chat(
    llm: BaseLlm, kind: Any = Threshold, **settings: Any
) -> tuple[Chat, list[CallRecord]]:
    """A chat whose window is configured."""
    calls = list[CallRecord]()
    few = {"max_messages": 1_000} if kind is SlidingWindow else {}
    strategy = kind(context_window=WINDOW, **few)
    plugin = ContextGuardPlugin(default=strategy, on_call=calls.append)
    agent = LlmAgent(name="agent", model=llm, instruction="You help.")
    return Chat(agent, [plugin], **settings), calls


async def talk(chat: Chat, turns: int, tokens: int = 800) -> None:
    """Has turns, each of which is answered."""
    for turn in range(turns):
        assert answer_text(await chat.say(words(tokens, f"Question {turn}.")))


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("said", [NAMED, UNNAMED], ids=["named", "unnamed"])
async def test_a_slip_changes_one_request(said: str, kind: Any) -> None:
    """Larger prompts were accepted: the turn is answered, and the window stays."""
    llm = Gateway(context_window=WINDOW, token_ratio=1.0, script=None, words=said)
    chat, calls = open_chat(llm, kind)
    await talk(chat, 8)
    llm.is_degraded = True
    assert answer_text(await chat.say("One more."))
    llm.is_degraded = False

    await talk(chat, 8)
    assert [call.is_recovered for call in calls] == [False] * 8 + [True] + [False] * 8
    assert {call.window_tokens for call in calls} == {WINDOW}
    assert llm.sizes[-1] > SMALL


async def test_a_slip_is_known_by_what_the_session_has_sent() -> None:
    """Also with a new model object, and so it narrows no other session's window."""
    chat, calls = open_chat(Gateway(context_window=WINDOW, token_ratio=1.0))
    await talk(chat, 8)
    agent: Any = chat.app.root_agent
    agent.model = Gateway(context_window=WINDOW, token_ratio=1.0, is_degraded=True)
    assert answer_text(await chat.say("One more."))
    assert calls[-1].is_recovered

    other = Chat(agent, chat.app.plugins, session_id="other")
    for each in (chat, other):
        await each.say("Go on.")
    assert {call.window_tokens for call in calls} == {WINDOW}


@pytest.mark.quick("unnamed")
@pytest.mark.parametrize(
    ("said", "backup", "accepted_turns"),
    [(NAMED, "provider/small", 0), (NAMED, "", 8), (UNNAMED, "", 0)],
    ids=["of a fallback", "contradicted", "unnamed"],
)
async def test_each_compaction_costs_one_refusal(
    said: str, backup: str, accepted_turns: int
) -> None:
    """A small backup stays: no turn is lost, and nothing is remembered."""
    llm = Gateway(context_window=WINDOW, token_ratio=1.0, words=said, backup=backup)
    chat, calls = open_chat(llm)
    await talk(chat, accepted_turns)
    llm.is_degraded = True
    await talk(chat, 16)

    compacted = [call for call in calls if call.compaction is not None]
    assert 2 <= len(compacted) <= 6
    assert all(call.is_recovered for call in compacted)
    assert sum(call.is_recovered for call in calls) == len(compacted)
    assert {call.window_tokens for call in calls} == {WINDOW}


async def test_the_window_of_the_asked_model_is_kept() -> None:
    """Some clients name the provider, others do not: it is the same model."""
    llm = Gateway(context_window=WINDOW, token_ratio=1.0, backup="provider/simulated")
    chat, calls = open_chat(llm)
    llm.is_degraded = True
    await talk(chat, 16)
    assert llm.refused == 1
    assert calls[-1].window_tokens == SMALL


async def test_a_fallback_of_adk_is_told_by_the_model_of_the_request() -> None:
    """The first model's window counts again as soon as the first model answers."""
    models = pytest.importorskip("google.adk.models")
    fallback = getattr(models, "FallbackModel", None)
    if fallback is None:
        pytest.skip("this ADK has no FallbackModel")

    class Busy(Gateway):
        async def generate_content_async(
            self, llm_request: LlmRequest, stream: bool = False
        ) -> AsyncGenerator[LlmResponse, None]:
            if self.is_degraded:
                raise ProviderBusyError("busy")
            async for each in super().generate_content_async(llm_request, stream):
                yield each

    first = Busy(model="first", context_window=WINDOW, token_ratio=1.0)
    backup = SimulatedLlm(model="backup", context_window=SMALL, token_ratio=1.0)
    chat, calls = open_chat(fallback(models=[first, backup]))
    await talk(chat, 8)
    first.is_degraded = True
    await talk(chat, 12)
    compacted_count = sum(call.compaction is not None for call in calls)
    assert 1 <= backup.rejections <= 2 * compacted_count

    first.is_degraded = False
    await talk(chat, 8)
    assert {call.window_tokens for call in calls} == {WINDOW}
    assert first.sizes[-1] > SMALL
    assert calls[-1].model == "first"


async def plant(chat: Chat, learned: object) -> None:
    """Writes to session state what an older release has stored of limits."""
    record = json.loads((await chat.state()).get(RECORD) or '{"version": 2}')
    await chat.set_state({RECORD: json.dumps({**record, "learned": learned})})


PLANTED = {
    "small window": {"simulated": {"window_tokens": 1_000}},
    "huge output": {"simulated": {"output_tokens": 2**53}},
    "dense words": {"simulated": {"correction": 20.0, "is_used": False}},
    "infinity": {"simulated": {"correction": math.inf}},
    "no numbers": {"simulated": {"window_tokens": [["1"]], "output_tokens": {}}},
    "no dict": ["simulated", 1_000],
    "a text": "window_tokens",
    "many models": {f"model-{number}": {} for number in range(500)},
}


@pytest.mark.parametrize("learned", PLANTED.values(), ids=PLANTED)
async def test_limits_in_session_state_are_ignored(learned: object) -> None:
    """They narrow nothing, whatever they are, and the summary beside them is used."""
    llm = SimulatedLlm(
        context_window=WINDOW, token_ratio=1.0, summary_replies=["A summary."] * 2
    )
    chat, calls = open_chat(llm, partial(Threshold, user_messages=0))
    await seed(chat, user("The task."), model(words(2_000, "OLD")), state=DEMAND)
    await talk(chat, 1)
    assert llm.summaries == 1

    await plant(chat, learned)
    await talk(chat, 6, 600)
    assert llm.summaries == 1
    assert llm.rejections == 0
    assert {call.window_tokens for call in calls} == {WINDOW}
    last = agent_requests(llm)[-1]
    assert last.text.startswith(f"{SUMMARY_BEGIN}\nA summary.")
    assert last.config.max_output_tokens is None

    await chat.set_state(DEMAND)
    await talk(chat, 1)
    assert llm.summaries == 2
    assert "learned" not in json.loads((await chat.state())[RECORD])


async def test_limits_in_session_state_widen_nothing() -> None:
    """What this process was told stands, whatever is written."""
    llm = SimulatedLlm(context_window=SMALL, token_ratio=1.0)
    chat, calls = open_chat(llm)
    await talk(chat, 8)
    assert llm.rejections == 1

    await plant(chat, {"simulated": {"window_tokens": 2**50}})
    await talk(chat, 8)
    assert llm.rejections == 1
    assert calls[-1].window_tokens == SMALL


async def test_a_new_process_is_refused_once() -> None:
    """It knows no window until the provider names it again; every turn is answered."""
    sessions = InMemorySessionService()
    for _ in range(2):
        llm = SimulatedLlm(context_window=SMALL, token_ratio=1.0)
        chat, calls = open_chat(llm, session_service=sessions)
        await talk(chat, 12)
        assert llm.rejections == 1
        assert calls[0].window_tokens == WINDOW
        assert calls[-1].window_tokens == SMALL

    assert "window_tokens" not in (await chat.state())[RECORD]
