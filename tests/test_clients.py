"""The guard between a real Runner and the real clients, which speak HTTP on loopback.

The provider counts what it is sent, by BPE, and refuses as the real ones do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.models.base_llm import BaseLlm
from google.adk.models.google_llm import Gemini
from google.genai import types

from contextguard_adk import CompactionRecord, ContextGuardPlugin, Threshold
from contextguard_adk._providers.clients import Client
from contextguard_adk.records import CallRecord
from tests.builders import Chat, answer_text, call_part, queued_tool
from tests.chats import Registry, slow
from tests.loopback import Loopback, Mood, Provider
from tests.scenarios import Writer

pytestmark = [
    pytest.mark.litellm,  # Its import takes seconds.
    # Those of the clients, none of which is ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

WINDOW = 20_000
CLIENTS = ("gemini", "openai", "anthropic", "claude")
INSTRUCTION = Writer("instruction", WINDOW, None).text("prose", 0.05)
SETTINGS = {
    "right": Threshold(context_window=WINDOW, preview_tokens=0.2),
    "too large": Threshold(context_window=6 * WINDOW, preview_tokens=0.2),
    "unknown": Threshold(preview_tokens=0.2),
}


class Limited(Registry):
    """Knows how much output each model may write."""

    def max_output_tokens(self, model: str) -> int:
        """Returns it."""
        return 9_000


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch, one_authority: str) -> Iterator[Loopback]:
    """A provider, to which the clients find by themselves."""
    with Loopback(Provider(WINDOW)) as running:
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("SSL_CERT_FILE", one_authority)
        monkeypatch.setenv("GOOGLE_API_KEY", "key")
        monkeypatch.setenv("ANTHROPIC_API_KEY", "key")
        monkeypatch.setenv("ANTHROPIC_BASE_URL", running.address)
        yield running


def connect(client: str, address: str, **settings: Any) -> BaseLlm:
    """A model that no table knows, as ADK reaches it through a client."""
    if client == "gemini":
        return Gemini(model="gemini-in-house", base_url=address, **settings)
    if client == "claude":  # Imported late, as litellm: it takes its time.
        from google.adk.models.anthropic_llm import AnthropicLlm

        return AnthropicLlm(model="claude-in-house", **settings)
    import litellm
    from google.adk.models.lite_llm import LiteLlm

    litellm.suppress_debug_info = True
    base = f"{address}/v1" if client == "openai" else address
    name = "claude-in-house" if client == "anthropic" else "in-house"
    return LiteLlm(model=f"{client}/{name}", api_base=base, api_key="key", **settings)


class Talk:
    """A session with an agent that calls a tool, with or without a guard."""

    def __init__(
        self,
        loopback: Loopback,
        client: str,
        strategy: Threshold | None,
        results: Sequence[Any] = ("ok",),
        *,
        is_streaming: bool = False,
        **settings: Any,
    ) -> None:
        self.loopback = loopback
        self.calls: list[CallRecord] = []
        self.compactions: list[CompactionRecord] = []

        guard = ContextGuardPlugin(
            default=strategy,
            on_call=self.calls.append,
            on_compaction=self.compactions.append,
        )
        agent = LlmAgent(
            name="agent",
            model=connect(client, loopback.address, **settings),
            tools=[queued_tool("look_up", results)],
            instruction=INSTRUCTION,
        )

        plugins = [guard] if strategy else []
        self.chat = Chat(agent, plugins, is_streaming=is_streaming)

    async def say(self, text: str, tool_calls: int = 0) -> str:
        """Has a turn; returns the agent's last words."""
        replies = self.loopback.provider.replies
        replies.clear()
        replies += [call_part("look_up", step=n) for n in range(tool_calls)]
        replies.append(f"Answer to {text}")
        return answer_text(await self.chat.say(text))

    async def talk(self, turns: int, tool_calls: int) -> int:
        """Has turns; returns how many were lost."""
        lost = 0
        for turn in range(turns):
            answer = await self.say(f"Request {turn}.", tool_calls)
            lost += answer != f"Answer to Request {turn}."
        return lost

    def check(self, rejections: int) -> None:
        """Sees to it that the provider had no more to refuse than that."""
        provider = self.loopback.provider
        assert provider.count("invalid") == 0, "broken pairs or roles"
        assert provider.count("parameter") == 0
        assert provider.count("overflow") <= rejections
        assert self.compactions
        assert not any(each.is_mechanical for each in self.compactions)


def pods(window_tokens: int, share: float, count: int = 6) -> list[Any]:
    """Large structured results."""
    writer = Writer("clients", window_tokens, None)
    return [writer.result("json", share) for _ in range(count)]


TOO_LARGE = [
    ("gemini", "too large"),
    *(
        pytest.param(client, "too large", marks=pytest.mark.slow)
        for client in ("openai", "anthropic", "claude")
    ),
]


@pytest.mark.parametrize(
    ("client", "setting"),
    [*((client, "right") for client in CLIENTS), *TOO_LARGE, ("openai", "unknown")],
)
async def test_no_turn_is_lost(loopback: Loopback, client: str, setting: str) -> None:
    """A window that is wrong or unknown costs one rejection, a right one none."""
    is_right = setting == "right"
    results = pods(WINDOW, 0.2)
    strategy = SETTINGS[setting]
    talk = Talk(loopback, client, strategy, results, is_streaming=is_right)
    assert await talk.talk(turns=4, tool_calls=2) == 0
    talk.check(rejections=0 if is_right else 1)


@pytest.mark.quick("claude")
@pytest.mark.parametrize("client", ["gemini", "openai", *slow("anthropic"), "claude"])
async def test_a_result_larger_than_the_window_is_not_sent(
    loopback: Loopback, client: str
) -> None:
    """A structured result makes the request too long by a twentieth."""
    provider = loopback.provider
    results = pods(WINDOW, 1.0, 2)
    provider.window_tokens = 1_000_000
    assert await Talk(loopback, client, None, results).talk(1, tool_calls=1) == 0

    window = int(provider.requests[-1].prompt_tokens / 1.05)
    loopback.provider = Provider(window)
    strategy = Threshold(context_window=window, preview_tokens=None)
    talk = Talk(loopback, client, strategy, results)
    assert await talk.talk(turns=2, tool_calls=1) == 0
    talk.check(rejections=0)


MOODS: dict[bool, tuple[Mood, ...]] = {False: (429, "reset"), True: (503, "cut")}
"""How requests fail, whole and streamed."""

NO_RETRIES: dict[str, dict[str, Any]] = {
    "gemini": {"retry_options": types.HttpRetryOptions(attempts=1)},
    "openai": {"max_retries": 0},
    "anthropic": {"max_retries": 0},
    "claude": {},
}
"""What keeps clients from trying again, which may take them ten seconds."""


async def outcome(talk: Talk) -> str:
    """How a turn ends: with what answer, or with whose error."""
    try:
        return await talk.say("Go on.")
    except Exception as error:  # noqa: BLE001 - a client may raise anything.
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("client", "is_streaming"),
    [
        ("gemini", True),
        ("openai", True),
        ("claude", False),
        pytest.param("gemini", False, marks=pytest.mark.slow),
        pytest.param("openai", False, marks=pytest.mark.slow),
        pytest.param("anthropic", True, marks=pytest.mark.slow),
        pytest.param("anthropic", False, marks=pytest.mark.slow),
        pytest.param("claude", True, marks=pytest.mark.slow),
    ],
)
async def test_other_failures_are_the_providers_own(
    loopback: Loopback, client: str, is_streaming: bool
) -> None:
    """They end the turn as without a guard, and the next one is answered."""
    provider = loopback.provider
    ends = list[list[str]]()
    kinds = [*MOODS[is_streaming]]
    if client in ("anthropic", "claude") and not is_streaming:
        kinds.append(529)

    for strategy in (None, SETTINGS["right"]):
        settings = {"is_streaming": is_streaming, **NO_RETRIES[client]}
        talk = Talk(loopback, client, strategy, **settings)
        assert await talk.say("Hello.") == "Answer to Hello."
        ends.append([])
        for kind in kinds:
            first = len(provider.of_agent) + 1
            # What comes with a broken connection may be sent again at once.
            count = 20 if isinstance(kind, int) else 1
            provider.moods = dict.fromkeys(range(first, first + count), kind)
            ends[-1].append(await outcome(talk))
            provider.moods = {}
            assert await talk.say("And now?") == "Answer to And now?"
        assert not talk.compactions

    assert ends[0] == ends[1]


@pytest.mark.quick("claude-8192")
@pytest.mark.parametrize(
    ("client", "max_tokens"),
    [
        ("openai", 6_000),
        pytest.param("openai", 19_000, marks=pytest.mark.slow),
        pytest.param("anthropic", 16_000, marks=pytest.mark.slow),
        ("claude", 8_192),
    ],
)
async def test_reserved_output_costs_one_rejection_at_most(
    loopback: Loopback, client: str, max_tokens: int
) -> None:
    """Where input and output share the window, what the model reserves is seen."""
    loopback.provider.counts_output = True
    strategy = SETTINGS["right"]
    results = pods(WINDOW, 0.1)
    talk = Talk(loopback, client, strategy, results, max_tokens=max_tokens)
    assert await talk.talk(turns=5, tool_calls=2) == 0
    talk.check(rejections=1)


@pytest.mark.parametrize("client", ["anthropic", "claude"])
async def test_output_that_nobody_set_takes_no_room(
    loopback: Loopback, client: str
) -> None:
    """The threshold stays, and no request is refused: the output is lowered before."""
    loopback.provider.counts_output = True
    talk = Talk(loopback, client, SETTINGS["right"], pods(WINDOW, 0.1))
    assert await talk.talk(turns=5, tool_calls=2) == 0
    talk.check(rejections=0)
    assert {call.threshold_tokens for call in talk.calls} == {0.8 * WINDOW}
    asked = {each.sent.max_tokens for each in loopback.provider.of_agent}
    assert len(asked) > 1


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("anthropic/claude-in-house", 9_000),
        ("vertex_ai/claude-in-house", 9_000),
        ("openrouter/claude-in-house", None),
        ("openai/gpt-in-house", None),
    ],
)
def test_litellm_asks_for_the_most_for_claude_alone(
    model: str, expected: int | None
) -> None:
    """Anthropic's API wants a number, others get none that nobody asked for."""
    llm = connect("openai", "http://127.0.0.1:9")
    client = Client.of(llm)
    assert client.default_output_tokens(model, Limited(WINDOW)) == expected
    assert client.chosen_output_tokens(types.GenerateContentConfig()) is None


@pytest.mark.parametrize(
    ("client", "name"),
    [
        ("claude", "max_tokens"),
        ("anthropic", "max_tokens"),
        ("openai", "max_completion_tokens"),
    ],
)
def test_a_limit_that_was_set_is_told_from_a_default(client: str, name: str) -> None:
    """A number is reserved where somebody has written it, even if it is the usual."""
    config = types.GenerateContentConfig()
    address = "http://127.0.0.1:9"
    assert Client.of(connect(client, address)).chosen_output_tokens(config) is None
    llm = connect(client, address, **{name: 8_192})
    assert Client.of(llm).chosen_output_tokens(config) == 8_192
    config.max_output_tokens = 500
    assert Client.of(llm).chosen_output_tokens(config) == 500
