"""Limits that are contradicted, of a fallback, or only stored are tried again."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
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
from tests.builders import Chat, answer_text
from tests.chats import KEY, ProviderBusyError, slow, words

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
async def test_a_contradicted_limit_is_tried_again(said: str, kind: Any) -> None:
    """One slip narrows the window for some calls; then the configured one counts."""
    llm = Gateway(context_window=WINDOW, token_ratio=1.0, script=None, words=said)
    chat, calls = open_chat(llm, kind)
    await talk(chat, 8)
    llm.is_degraded = True
    await chat.say("One more.")
    llm.is_degraded = False
    assert calls[-1].is_recovered
    assert calls[-1].window_tokens < WINDOW

    await talk(chat, 30)
    assert calls[-1].window_tokens == WINDOW

    learned = json.loads((await chat.state())[RECORD])["learned"]
    assert "window_tokens" not in learned["simulated"]


@pytest.mark.slow
@pytest.mark.parametrize("backup", ["", "provider/small"])
async def test_a_backup_that_stays_costs_a_refusal_in_twenty_calls(backup: str) -> None:
    """No turn is lost while the limit is tried again and again."""
    llm = Gateway(context_window=WINDOW, token_ratio=1.0, backup=backup)
    chat, calls = open_chat(llm)
    await talk(chat, 8)
    llm.is_degraded = True
    await talk(chat, 5)
    believed = llm.refused
    # A summary may be refused as well, until the limit is believed.
    assert 1 <= believed <= 4

    await talk(chat, 25)
    assert believed < llm.refused <= believed + 2

    llm.is_degraded = False
    await talk(chat, 24)
    assert calls[-1].window_tokens == WINDOW


@pytest.mark.parametrize(
    ("backup", "is_trusted"),
    [
        ("provider/simulated", True),
        ("provider/small", False),
        pytest.param("", True, marks=pytest.mark.slow),
    ],
)
async def test_the_limit_of_another_model_is_tried_again(
    backup: str, is_trusted: bool
) -> None:
    """What the model itself refuses stays refused, as long as it takes no more."""
    llm = Gateway(context_window=WINDOW, token_ratio=1.0, backup=backup)
    chat, calls = open_chat(llm)
    llm.is_degraded = True
    await talk(chat, 8)
    assert llm.refused == 1
    assert calls[-1].window_tokens == SMALL

    llm.is_degraded = False
    await talk(chat, 26)
    assert (calls[-1].window_tokens == SMALL) is is_trusted


async def test_a_limit_that_is_true_is_refused_once() -> None:
    """Nothing contradicts it: it is not tried again."""
    llm = SimulatedLlm(context_window=SMALL, token_ratio=1.0)
    chat, calls = open_chat(llm)
    await talk(chat, 30)
    assert llm.rejections == 1
    assert calls[-1].window_tokens == SMALL


async def test_a_fallback_of_adk_is_told_by_the_model_of_the_request() -> None:
    """The first model's window counts again, and its own name keeps the limit."""
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
    assert 1 <= backup.rejections <= 4
    first.is_degraded = False
    await talk(chat, 26)
    assert backup.rejections <= 4
    assert calls[-1].window_tokens == WINDOW
    assert calls[-1].model == "first"


async def plant(chat: Chat, **limits: Any) -> None:
    """Writes to session state what nobody has shown."""
    record = json.loads((await chat.state()).get(RECORD) or '{"version": 2}')
    record["learned"] = {"simulated": limits}
    await chat.set_state({RECORD: json.dumps(record)})


@pytest.mark.parametrize(
    "limits",
    [
        {"window_tokens": 1_000},
        {"output_tokens": 2**53},
        *slow(
            {"window_tokens": 1_000, "is_used": True},
            {"window_tokens": 8_000},
            {"correction": 20.0},
            {"window_tokens": 1_000, "is_guess": True, "unproven_count": 0},
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("usage", ["last", *slow("never")])
async def test_limits_that_only_state_names_cost_twenty_calls(
    usage: Any, limits: dict[str, Any]
) -> None:
    """And two compactions within them; then the configured window counts."""
    llm = SimulatedLlm(context_window=WINDOW, token_ratio=1.0, usage=usage)
    chat, calls = open_chat(llm)
    await talk(chat, 2, 200)
    await plant(chat, **limits)
    await talk(chat, 30, 200)
    assert sum(call.compaction is not None for call in calls) <= 2
    assert llm.rejections == 0

    for call in calls[22:]:
        assert call.window_tokens == WINDOW
        assert call.estimated_tokens < 3 * llm.largest_request_tokens

    assert llm.requests[-1].config.max_output_tokens is None


async def test_nothing_in_state_narrows_what_a_provider_has_shown() -> None:
    """A limit that this process knows stands, whatever is written in its place."""
    llm = SimulatedLlm(context_window=SMALL, token_ratio=1.0)
    chat, calls = open_chat(llm)
    await talk(chat, 8)
    assert llm.rejections == 1

    for window_tokens in (1_000, 2**50):
        await plant(chat, window_tokens=window_tokens)
        await talk(chat, 8)
        assert calls[-1].window_tokens == SMALL

    assert llm.rejections == 1


@pytest.mark.slow
async def test_a_stored_limit_that_is_true_is_refused_once_a_process() -> None:
    """A process that goes on with a session keeps to it, and is then sure of it."""
    sessions = InMemorySessionService()
    for known_tokens in (WINDOW, SMALL):
        llm = SimulatedLlm(context_window=SMALL, token_ratio=1.0)
        chat, calls = open_chat(llm, session_service=sessions)
        await talk(chat, 28)
        assert calls[0].window_tokens == known_tokens
        assert llm.rejections == 1
        assert calls[-1].window_tokens == SMALL


async def test_what_a_refusal_teaches_beside_it_keeps_a_stored_limit() -> None:
    """Another process learns how dense the words are, and forgets no window."""
    sessions = InMemorySessionService()
    for ratio in (1.0, 2.5):
        llm = SimulatedLlm(context_window=SMALL, token_ratio=ratio)
        chat, calls = open_chat(llm, session_service=sessions)
        await talk(chat, 10)
    assert {call.window_tokens for call in calls} == {SMALL}
