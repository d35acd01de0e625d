"""The guard between a real Runner and the real clients, which speak HTTP on loopback.

The provider counts what it is sent, by BPE, and refuses as the real ones do.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.models.base_llm import BaseLlm
from google.adk.models.google_llm import Gemini
from google.genai import types
from pydantic_core import to_json

from contextguard_adk import CompactionRecord, ContextGuardPlugin, Threshold
from contextguard_adk.telemetry import CallRecord
from tests.builders import Chat, answer_text, call_part, queued_tool
from tests.loopback import Loopback, Mood, Provider
from tests.scenarios import Writer

pytestmark = [
    # Those of the clients, none of which is ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

WINDOW = 20_000
LARGE = 64_000
CLIENTS = ("gemini", "openai", "anthropic", "claude")
INSTRUCTION = Writer("instruction", WINDOW, None).text("prose", 0.05)
SETTINGS = {
    "right": Threshold(context_window=WINDOW),
    "too large": Threshold(context_window=6 * WINDOW),
    "unknown": Threshold(),
}


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    """A provider, to which the clients find by themselves."""
    with Loopback(Provider(WINDOW)) as running:
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
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
    name = f"{client}/{'claude-' * (client == 'anthropic')}in-house"
    return LiteLlm(model=name, api_base=base, api_key="key", **settings)


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


FAST = {(client, name, name == "right") for client in CLIENTS for name in SETTINGS}
"""Of the cells that follow, those that every run takes; one in two."""


@pytest.mark.parametrize(
    ("client", "setting", "is_streaming"),
    [
        pytest.param(
            client,
            setting,
            is_streaming,
            id=f"{client}, {setting}, {'streamed' if is_streaming else 'whole'}",
            marks=[] if (client, setting, is_streaming) in FAST else pytest.mark.slow,
        )
        for client in CLIENTS
        for setting in SETTINGS
        for is_streaming in (False, True)
    ],
)
async def test_no_turn_is_lost(
    loopback: Loopback, client: str, setting: str, is_streaming: bool
) -> None:
    """A window that is wrong or unknown costs one rejection, a right one none."""
    results = pods(WINDOW, 0.2)
    strategy = SETTINGS[setting]
    talk = Talk(loopback, client, strategy, results, is_streaming=is_streaming)

    assert await talk.talk(turns=5, tool_calls=2) == 0

    talk.check(rejections=0 if setting == "right" else 1)


WORDS = {
    "russian rows": "склад заказ доставка клиент город улица сумма возврат накладная "
    "курьер оплата задержка поставщик договор отгрузка Казань Самара Тверь",
    "chinese rows": "仓库 订单 配送 客户 城市 街道 金额 退货 发货单 快递员 付款 延迟 "
    "供应商 合同 上海 广州 成都 杭州",
    "flat rows": "warehouse order delivery customer street amount refund invoice "
    "courier payment delay supplier contract shipment Lisbon Porto Faro",
}
KINDS = ("list of ints", "flat rows", "nested objects", "russian rows", "chinese rows")


def structured(kind: str, seed: int) -> dict[str, Any]:
    """A result of a tool, 20 KB beyond ASCII and 40 KB else."""
    chance = random.Random(f"{kind}-{seed}")
    if kind == "list of ints":
        return {"values": [chance.randrange(1_000_000) for _ in range(6_000)]}
    if kind == "nested objects":
        return {"seed": seed, **Writer(kind, 15_000, None).result("json", 1.0)}
    words, rows = WORDS[kind].split(), list[dict[str, Any]]()
    names = chance.sample(words, 5)
    while len(to_json(rows)) < (40_000 if kind == "flat rows" else 20_000):
        said = " ".join(chance.choices(words, k=4))
        values = [chance.randrange(10_000), said, chance.choice(words)]
        values += [chance.random() < 0.5, round(chance.random() * 100, 2)]
        rows.append(dict(zip(names, values, strict=True)))
    return {"rows": rows}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("client", CLIENTS)
async def test_new_structured_results_are_measured_as_they_are_sent(
    loopback: Loopback, client: str, kind: str
) -> None:
    """The estimate is near the count before the provider has counted anything."""
    loopback.provider.window_tokens = roomy = 4 * LARGE
    results = [structured(kind, seed) for seed in range(2)]
    talk = Talk(loopback, client, Threshold(context_window=roomy), results)

    assert await talk.talk(turns=2, tool_calls=1) == 0

    records = talk.calls[1::2]  # A result is new in every second call.
    ratios = [each.estimated_tokens / (each.real_tokens or 1) for each in records]
    assert all(0.95 <= ratio <= 1.4 for ratio in ratios), ratios


FAST_KINDS = {
    ("gemini", "russian rows"),
    ("openai", "list of ints"),
    ("anthropic", "nested objects"),
    ("claude", "chinese rows"),
}


@pytest.mark.parametrize(
    ("client", "kind"),
    [
        pytest.param(
            client,
            kind,
            id=f"{client}, {kind}",
            marks=[] if (client, kind) in FAST_KINDS else pytest.mark.slow,
        )
        for client in CLIENTS
        for kind in KINDS
    ],
)
async def test_a_result_larger_than_the_window_is_not_sent(
    loopback: Loopback, client: str, kind: str
) -> None:
    """A structured result makes the request too long by a twentieth."""
    provider = loopback.provider
    results = [structured(kind, seed) for seed in range(2)]
    provider.window_tokens = 1_000_000
    assert await Talk(loopback, client, None, results).talk(1, tool_calls=1) == 0
    loopback.provider = Provider(int(provider.requests[-1].prompt_tokens / 1.05))
    window = loopback.provider.window_tokens
    strategy = Threshold(context_window=window, preview_tokens=None)
    talk = Talk(loopback, client, strategy, results)

    assert await talk.talk(turns=2, tool_calls=1) == 0

    talk.check(rejections=0)


MOODS: dict[str, tuple[Mood, range]] = {
    "429": (429, range(2, 20)),
    "503": (503, range(2, 20)),
    "529": (529, range(2, 20)),
    "reset": ("reset", range(2, 3)),
    "cut": ("cut", range(2, 3)),
}


FAST_STREAMED = ("503", "cut")

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
    ("client", "mood", "is_streaming"),
    [
        pytest.param(
            client,
            mood,
            is_streaming,
            id=f"{client}, {mood}, {'streamed' if is_streaming else 'whole'}",
            marks=[] if is_streaming == (mood in FAST_STREAMED) else pytest.mark.slow,
        )
        for client in CLIENTS
        for mood in MOODS
        for is_streaming in (False, True)
        if mood != "529" or client in ("anthropic", "claude")
    ],
)
async def test_other_failures_are_the_providers_own(
    loopback: Loopback, client: str, mood: str, is_streaming: bool
) -> None:
    """They end the turn as without a guard, and the next one is answered."""
    ends = []
    for strategy in (None, SETTINGS["right"]):
        kind, numbers = MOODS[mood]
        loopback.provider = Provider(WINDOW, moods=dict.fromkeys(numbers, kind))
        talk = Talk(
            loopback,
            client,
            strategy,
            is_streaming=is_streaming,
            **NO_RETRIES[client],
        )
        assert await talk.say("Hello.") == "Answer to Hello."
        ends.append(await outcome(talk))
        loopback.provider.moods.clear()
        assert await talk.say("And now?") == "Answer to And now?"
        assert not talk.compactions
    assert ends[0] == ends[1]


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_failed_resend_shows_its_own_error(
    loopback: Loopback, client: str
) -> None:
    """After a rejection and a 503 the user sees the 503; the limit is learned."""
    provider = loopback.provider
    results = pods(WINDOW, 0.55)
    retries = NO_RETRIES[client]
    talk = Talk(loopback, client, SETTINGS["too large"], results, **retries)
    assert await talk.talk(turns=1, tool_calls=1) == 0
    provider.moods = dict.fromkeys(range(5, 30), 503)

    provider.replies.clear()
    provider.replies.append(call_part("look_up", step=9))
    *_, last = await talk.chat.say("Go on.")

    assert re.search("overloaded|temporarily unavailable", last.error_message or "")
    assert provider.count("overflow") == 1
    provider.moods.clear()
    assert await talk.talk(turns=3, tool_calls=1) == 0
    talk.check(rejections=1)


@pytest.mark.parametrize("client", ["gemini", "openai"])
async def test_a_model_with_little_output_writes_its_summaries(
    loopback: Loopback, client: str
) -> None:
    """Where the summary's own output is refused, no limit is asked for."""
    provider = loopback.provider
    provider.output_limit_tokens = 1_000
    talk = Talk(loopback, client, SETTINGS["right"], pods(WINDOW, 0.2))

    assert await talk.talk(turns=4, tool_calls=2) == 0

    assert provider.count("parameter") <= len(talk.compactions)
    provider.requests[:] = [r for r in provider.requests if r.refused != "parameter"]
    talk.check(rejections=0)


async def test_a_thinking_budget_leaves_room_for_a_summary(loopback: Loopback) -> None:
    """A summary call asks for more than the thoughts may take."""
    thinking = {"type": "enabled", "budget_tokens": 3_000}
    allowed: Any = {"allowed_openai_params": ["thinking"]}
    strategy, results = SETTINGS["right"], pods(WINDOW, 0.2)
    talk = Talk(loopback, "anthropic", strategy, results, thinking=thinking, **allowed)

    assert await talk.talk(turns=4, tool_calls=2) == 0

    assert all(each.sent.thinking_tokens for each in loopback.provider.of_agent)
    talk.check(rejections=0)


@pytest.mark.parametrize(
    ("client", "max_tokens"),
    [("openai", 6_000), ("openai", 11_000), ("claude", 8_192)],
)
async def test_reserved_output_counts(
    loopback: Loopback, client: str, max_tokens: int
) -> None:
    """Where input and output share the window, what the model reserves is seen."""
    loopback.provider.counts_output = True
    strategy, results = SETTINGS["right"], pods(WINDOW, 0.1)
    talk = Talk(loopback, client, strategy, results, max_tokens=max_tokens)

    assert await talk.talk(turns=6, tool_calls=2) == 0

    talk.check(rejections=1)


async def test_a_silent_truncation_teaches_the_window(
    loopback: Loopback, caplog: pytest.LogCaptureFixture
) -> None:
    """Counts that fall behind twice running say what the window is."""
    loopback.provider.truncates = True
    talk = Talk(loopback, "openai", SETTINGS["unknown"], pods(WINDOW, 0.2))

    assert await talk.talk(turns=6, tool_calls=2) == 0

    sizes = [each.prompt_tokens for each in loopback.provider.of_agent]
    assert sum(size > WINDOW for size in sizes) <= 3, sizes
    assert sizes[-1] <= WINDOW
    assert "context_window" in caplog.text
    talk.check(rejections=0)
