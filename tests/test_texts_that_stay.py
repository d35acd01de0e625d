"""What stands beside a summary outlives tight windows and events that get lost."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin

from contextguard_adk import ContextGuardPlugin, Threshold, pin
from contextguard_adk._history.stored import StoredSummary
from contextguard_adk._runtime.memory import AgentMemory, ReadySummary, SessionFacts
from contextguard_adk.strategies import Ask, Draft, Turn
from contextguard_adk.testing import SimulatedLlm
from tests.builders import Chat, guarded_agent, model, user
from tests.chats import DEMAND, Doing, agent_requests, seed, summary_requests, words

SUMMED_UP = "## Done\nA summary."
RULES = [
    f"Rule {n}: never touch the folder /srv/keep-{n:03} or its copies, "
    f"and always tell Ada of {n * 37 + 1_000}."
    for n in range(40)
]
SECRET = "zq-77-hidden"


def make_llm(**settings: Any) -> SimulatedLlm:
    """A model with a large window that says little."""
    wanted: dict[str, Any] = {
        "context_window": 1_000_000,
        "script": lambda _: "Done.",
        "summary_replies": lambda _: SUMMED_UP,
    }
    return SimulatedLlm(**(wanted | settings))


def open_chat(
    llm: SimulatedLlm, window_tokens: int, *behind: BasePlugin, **settings: Any
) -> Chat:
    """A chat with a guard, and other plugins behind it."""
    sessions = settings.pop("session_service", None)
    strategy = Threshold(
        context_window=window_tokens, summarizer_context_window=100_000
    )
    guard = ContextGuardPlugin(default=strategy, **settings)
    place: dict[str, Any] = {"session_service": sessions} if sessions else {}
    return Chat(guarded_agent(llm), [guard, *behind], **place)


class Replacing(BasePlugin):
    """Hands on the agent's events as its own, without what they do to the session."""

    async def on_event_callback(self, *, event: Event, **_: Any) -> Event | None:
        if event.author != "agent":
            return None
        return event.model_copy(update={"actions": EventActions()})


async def test_a_plugin_that_replaces_events_costs_one_summary() -> None:
    """The process keeps it, and puts it into the request of each turn."""
    llm = make_llm(token_ratio=1.0)
    chat = open_chat(llm, 4_000, Replacing("replacing"))
    await seed(chat, user("The task."), model(words(3_300)))
    for number in range(8):
        await chat.say(f"Go on {number}.")

    assert len(summary_requests(llm)) == 1
    assert all(SUMMED_UP in request.text for request in agent_requests(llm))


async def test_words_come_back_after_a_small_window() -> None:
    """A turn with a small window has no room for them; later ones have."""
    llm = make_llm()
    chat = open_chat(llm, 32_000)
    for rule in RULES:
        await chat.say(rule)

    shown = list[int]()
    for window_tokens in (32_000, 4_000, 4_000, 32_000):
        other = open_chat(llm, window_tokens, session_service=chat.sessions)
        await seed(other, model(words(1_000)))
        await other.say("Go on.", DEMAND)
        last = agent_requests(llm)[-1].text
        shown.append(sum(rule in last for rule in RULES))
    assert shown[0] == shown[-1] == len(RULES)
    assert shown[1] < len(RULES)


async def test_a_waiting_summary_has_the_pins_of_today() -> None:
    """It was written in a turn that was cancelled, before the app has pinned a rule."""
    may_end = asyncio.Event()

    async def write(_: LlmRequest) -> str:
        await may_end.wait()
        return SUMMED_UP

    llm = make_llm(summary_replies=write)
    chat = open_chat(llm, 4_000)
    delta: dict[str, Any] = {}
    pin(delta, "Ship on a Sunday.", key="old")
    await seed(chat, user("The task."), model(words(3_300)), state=delta)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await chat.say("Go on.")
    may_end.set()
    await asyncio.sleep(0)

    pin(delta, "Never ship on a Sunday.", key="old")
    await chat.say("And now?", delta)
    last = agent_requests(llm)[-1].text
    assert SUMMED_UP in last
    assert "- Never ship on a Sunday." in last
    assert "- Ship on a Sunday." not in last
    assert len(summary_requests(llm)) == 1


async def test_what_is_masked_from_now_on_leaves_with_the_next_summary() -> None:
    """From the request, and from session state."""
    llm = make_llm()
    chat = open_chat(llm, 8_000)
    await chat.say(f"My word is {SECRET}, remember.")
    await seed(chat, model(words(2_500)))
    await chat.say("Go on.", DEMAND)
    assert SECRET in agent_requests(llm)[-1].text

    masked = open_chat(
        llm,
        8_000,
        session_service=chat.sessions,
        redact=lambda text: text.replace(SECRET, "****"),
    )
    await seed(masked, model(words(2_500)))
    await masked.say("And on.", DEMAND)
    assert SECRET not in agent_requests(llm)[-1].text
    assert SECRET not in json.dumps(await masked.state())


def test_only_the_summary_that_has_arrived_is_forgotten() -> None:
    """Another run may have paid for a newer one in the meantime."""
    arrived, newer = (ReadySummary(StoredSummary()) for _ in "ab")
    memory = AgentMemory(facts=SessionFacts(ready=newer))
    memory.forget_ready(arrived)
    assert memory.facts.ready is newer
    memory.forget_ready(newer)
    assert memory.facts.ready is None


async def test_a_summary_that_state_cannot_hold_ends() -> None:
    """`redact` makes it longer than what is read: it is shortened, and put in once."""

    async def act(turn: Turn, ask: Ask) -> Draft:
        covered = turn.older_than(keep_count=0)
        text = "ab " * 85_000
        return Draft(text, covered, covered, model_chars=len(text), reason=turn.reason)

    llm = make_llm(context_window=2_000_000, token_ratio=1.0)
    strategy = Doing(act=act, context_window=1_000_000)
    guard = ContextGuardPlugin(
        default=strategy, redact=lambda text: text.replace("ab", "abab")
    )
    chat = Chat(guarded_agent(llm), [guard])
    await seed(chat, user("The task."), model(words(300_000)))
    await asyncio.wait_for(chat.say("Go on.", DEMAND), 60)
    assert len(agent_requests(llm)) == 1
    assert "abab abab" in agent_requests(llm)[-1].text
