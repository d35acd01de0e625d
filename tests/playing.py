"""Plays turns of an agent with tools through a real Runner, against a fake provider."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.events.event import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.google_llm import Gemini
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import BaseSessionService
from google.adk.sessions import InMemorySessionService as MemorySessions
from google.genai import types

import contextguard_adk as cg
from contextguard_adk.strategies import Strategy
from tests.builders import Chat
from tests.fake_claude import FakeClaude, begin_of_turn, list_thoughts, signature_of
from tests.fake_gemini import FakeGemini
from tests.fake_openai import FakeOpenAI
from tests.fake_provider import Exchange, FakeProvider, Step

INSTRUCTION = "You count the shelves of a warehouse and answer in one sentence."
LOOK_UP_WORDS = 240
LOG_WORDS = 3_000


def look_up(shelf: int) -> str:
    """Tells what stands on a shelf."""
    return f"Shelf {shelf}: " + f"crate {shelf} for Lisbon, " * (LOOK_UP_WORDS // 4)


def read_log(shelf: int) -> str:
    """Reads the whole log of a shelf, which is long."""
    return "\n".join(f"{n}: shelf {shelf} was seen" for n in range(LOG_WORDS // 5))


def weigh(shelf: int) -> dict[str, Any]:
    """Weighs a shelf."""
    return {"shelf": shelf, "kilograms": 40 + shelf}


TOOLS = (look_up, read_log, weigh)


def last_words(events: Sequence[Event]) -> str:
    """The text of the last event that has one, without its thoughts."""
    for event in reversed(events):
        parts = event.content.parts if event.content else None
        words = [part.text for part in parts or () if part.text and not part.thought]
        if words and not event.partial:
            return "".join(words)
    return ""


Plugins = Callable[[], Sequence[BasePlugin]]


def none() -> Sequence[BasePlugin]:
    """No plugins."""
    return ()


@dataclass
class Turn:
    """A turn that was played; lost is one that did not end in the expected words."""

    expected: str
    events: list[Event] = field(default_factory=list)
    error: str = ""

    @property
    def is_lost(self) -> bool:
        """Whether the user did not get the answer."""
        return last_words(self.events) != self.expected


@dataclass
class Player:
    """A session with one agent, with or without a guard.

    Attributes:
        llm: Makes the agent's model.
        strategy: What guards it; None plays without a guard.
        before: Makes the plugins that run before the guard; `after` those behind it.
        database: The file in which the session is; each turn then starts anew, with
            another runner, guard and model. None keeps all in memory.
        root: Makes the agent; None is one with `TOOLS`.
        app: Settings of the app; `services` are the runner's further ones.
    """

    fake: FakeProvider
    llm: Callable[[], BaseLlm]
    strategy: Strategy | None = None
    before: Plugins = none
    after: Plugins = none
    database: str | None = None
    is_streaming: bool = False
    root: Callable[[BaseLlm], Any] | None = None
    agent: dict[str, Any] = field(default_factory=dict)
    app: dict[str, Any] = field(default_factory=dict)
    services: dict[str, Any] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    compactions: list[cg.CompactionRecord] = field(default_factory=list)
    compacted_at: list[int] = field(default_factory=list)
    sessions: BaseSessionService = field(default_factory=MemorySessions)
    _chat: Chat | None = None
    _shelves: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def lost(self) -> list[str]:
        """What ended the turns that were lost."""
        return [turn.error or "no answer" for turn in self.turns if turn.is_lost]

    def calls(self, *names: str) -> Step:
        """A step that calls these tools at once, each for another shelf."""
        return [(name, {"shelf": next(self._shelves)}) for name in names]

    def steps(self, count: int, *, has_log: bool = False) -> list[Step]:
        """Steps of one call each; the first one may read the long log."""
        names = ["read_log" if has_log and not n else "look_up" for n in range(count)]
        return [self.calls(name) for name in names]

    async def play(self, turns: int = 6, calls: int = 4, log_turn: int = 1) -> None:
        """Plays turns; one of them reads the long log."""
        for number in range(turns):
            await self.say(self.steps(calls, has_log=number == log_turn))

    async def set_state(self, delta: dict[str, Any]) -> None:
        """Changes the session's state between two turns."""
        chat = self._chat or self._open()
        await chat.set_state(delta)
        await self._leave(chat)

    async def compact(self, calls: int = 4) -> None:
        """Plays a turn that begins with a compaction."""
        state: dict[str, Any] = {}
        cg.request_compaction(state)
        await self.set_state(state)
        await self.say(self.steps(calls))

    async def change(self, **settings: Any) -> None:
        """Goes on with the same session, but another fake, model, strategy or agent."""
        if self._chat:
            await self._chat.runner.close()
            self._chat = None
        for name, value in settings.items():
            setattr(self, name, value)

    async def say(
        self, steps: Sequence[Step] = (), text: str | types.Content = ""
    ) -> Turn:
        """Plays one turn."""
        number = len(self.turns)
        turn = Turn(expected=f"Answer to request {number}.")
        self.turns.append(turn)
        self.fake.script.clear()
        self.fake.script.extend([*steps, turn.expected])
        chat = self._chat or self._open()

        try:
            turn.events = await chat.say(text or f"Request {number}: count on.")
            turn.error = next(filter(None, (e.error_message for e in turn.events)), "")
        except Exception as error:  # noqa: BLE001 - a client may raise anything.
            turn.error = f"{type(error).__name__}: {error}"

        await self._leave(chat)
        return turn

    async def events(self) -> list[Event]:
        """The session's events."""
        chat = self._chat or self._open()
        events = await chat.events()
        await self._leave(chat)
        return events

    async def _leave(self, chat: Chat) -> None:
        if self.database is None:
            self._chat = chat
            return
        from google.adk.sessions import DatabaseSessionService

        await chat.runner.close()
        assert isinstance(chat.sessions, DatabaseSessionService)
        await chat.sessions.db_engine.dispose()

    def _open(self) -> Chat:
        plugins = [*self.before()]
        if self.strategy is not None:
            told: Any = {"on_compaction": self._note}
            plugins.append(cg.ContextGuardPlugin(default=self.strategy, **told))
        plugins += self.after()
        sessions = self.sessions
        if self.database:  # Imported late: it takes its time.
            from google.adk.sessions import DatabaseSessionService

            sessions = DatabaseSessionService(f"sqlite+aiosqlite:///{self.database}")
        agent = (self.root or self._make_agent)(self.llm())
        settings = {"session_service": sessions, **self.app}
        chat = Chat(agent, plugins, is_streaming=self.is_streaming, **settings)
        for name, service in self.services.items():
            setattr(chat.runner, name, service)
        return chat

    def _make_agent(self, llm: BaseLlm) -> LlmAgent:
        settings = {"name": "agent", "instruction": INSTRUCTION, "tools": [*TOOLS]}
        return LlmAgent(model=llm, **{**settings, **self.agent})

    def _note(self, record: cg.CompactionRecord) -> None:
        self.compactions.append(record)
        self.compacted_at.append(len(self.fake.of_agent))


def thinking(budget_tokens: int) -> types.GenerateContentConfig:
    """A config that asks for thoughts."""
    config = types.ThinkingConfig(thinking_budget=budget_tokens)
    return types.GenerateContentConfig(thinking_config=config)


CLAUDES = {
    "bound": ("claude-opus-5-5", -1),
    "enabled": ("claude-haiku-4-5", 2_000),
    "adaptive": ("claude-opus-4-7", -1),
}
"""A model of each kind, and the budget that has it think and say what."""

CHATS = {
    "openai": "openai/in-house",
    "deepseek": "deepseek/deepseek-v4-pro",
    "kimi": "moonshot/kimi-k2-thinking",
    "mistral": "mistral/mistral-large-latest",
    "vllm-mistral": "hosted_vllm/mistral",
    "vllm-gemma": "hosted_vllm/gemma",
    "llama.cpp": "openai/smollm2",
}
"""A model of each kind, as LiteLLM names it."""


def claude(model: str) -> BaseLlm:
    """ADK's own client for Claude."""
    from google.adk.models.anthropic_llm import AnthropicLlm

    return AnthropicLlm(model=model, max_tokens=1_000)


def streams_signatures() -> bool:
    """Whether this ADK keeps the signatures of thoughts that Claude streams."""
    from google.adk.models import anthropic_llm

    return "SignatureDelta" in inspect.getsource(anthropic_llm)


def lite(model: str, address: str, **settings: Any) -> BaseLlm:
    """ADK's client for LiteLLM."""
    import litellm
    from google.adk.models.lite_llm import LiteLlm

    litellm.suppress_debug_info = True
    place = {"api_base": address, "api_key": "key", "max_retries": 0}
    if model.startswith("bedrock/"):
        place = dict.fromkeys(("aws_access_key_id", "aws_secret_access_key"), "key")
        place |= {"aws_bedrock_runtime_endpoint": address}
        place |= {"aws_region_name": "us-east-1"}
    return LiteLlm(model=model, **{**place, "max_tokens": 1_000, **settings})


def play_claude(fake: FakeClaude, **settings: Any) -> Player:
    """A player of a model that thinks and says what."""
    model, budget_tokens = CLAUDES[fake.kind]
    agent = {"generate_content_config": thinking(budget_tokens)}
    agent |= settings.pop("agent", {})
    make = settings.pop("llm", lambda: claude(model))
    return Player(fake, make, agent=agent, **settings)


def play_gemini(fake: FakeGemini, address: str, **settings: Any) -> Player:
    """A player of a model that signs its calls."""
    gemini = "gemini-pro-latest"
    make = settings.pop("llm", lambda: Gemini(model=gemini, base_url=address))
    return Player(fake, make, **settings)


def play_chat(fake: FakeOpenAI, address: str, **settings: Any) -> Player:
    """A player of a model behind LiteLLM."""
    make = settings.pop("llm", lambda: lite(CHATS[fake.kind], address))
    return Player(fake, make, **settings)


def strategies(window_tokens: int) -> dict[str, Strategy]:
    """Each strategy, with this window."""
    return {
        "threshold": cg.Threshold(context_window=window_tokens),
        "sliding window": cg.SlidingWindow(context_window=window_tokens),
        "pipeline": cg.Pipeline(context_window=window_tokens),
    }


def check_played(player: Player, compactions: int = 2, refusals: int = 0) -> None:
    """Sees to it that no turn was lost, and nothing refused but what was meant to."""
    assert not player.lost
    assert len(player.fake.refused) == refusals, player.fake.refused
    assert len(player.compactions) >= compactions


def sent_thoughts(body: Mapping[str, Any]) -> set[str]:
    """The thoughts that a request to Claude has."""
    messages = [m for m in body["messages"] if not isinstance(m["content"], str)]
    return {signature_of(block) for *_, block in list_thoughts(messages)}


def thoughts_kept(player: Player) -> Iterator[tuple[int, int]]:
    """How many thoughts the last request before each compaction has, and might have.

    It might have those that were written since the compaction before; the last pair is
    that of the last request.
    """
    exchanges = player.fake.of_agent
    begins = [0, *player.compacted_at]
    for begin, end in zip(begins, [*player.compacted_at, len(exchanges)], strict=True):
        answered = [each for each in exchanges[begin:end] if not each.refused]
        if len(answered) < 2:
            continue
        written = sent_thoughts({"messages": [each.answer for each in answered[:-1]]})
        yield len(written & sent_thoughts(answered[-1].body)), len(written)


def check_thoughts_since_compaction(player: Player) -> None:
    """Sees to it that at least half of the thoughts are sent again."""
    kept = [*thoughts_kept(player)]
    assert kept
    assert all(sent >= written / 2 for sent, written in kept), kept


def check_running_turns(fake: FakeClaude) -> None:
    """Sees to it that calls of running turns are sent with their thoughts."""
    for exchange in fake.accepted:
        messages = exchange.body["messages"]
        sent = sent_thoughts(exchange.body)
        for message in messages[begin_of_turn(messages) :]:
            for block in message["content"]:
                of_call = fake.of_call.get(block.get("id", ""), [])
                assert sent.issuperset(signature_of(thought) for thought in of_call)


def tool_names(exchange: Exchange) -> str:
    """The tools that a request to Claude declares, with all that is said of them."""
    tools = exchange.body.get("tools") or ()
    return json.dumps(sorted(tools, key=lambda each: str(each["name"])))
