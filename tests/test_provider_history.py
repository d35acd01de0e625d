"""What providers demand of a history still holds after it was compacted.

Real clients, with fake providers behind them that refuse as the real ones do.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents.context_cache_config import ContextCacheConfig
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk import SlidingWindow, Strategy
from contextguard_adk._calls import outgoing
from tests import fake_claude, fake_openai
from tests.chats import Changing, slow
from tests.fake_claude import FakeClaude
from tests.fake_gemini import FakeGemini
from tests.fake_openai import CONVERSE_MODEL, FakeConverse, FakeOpenAI
from tests.fake_provider import RefusalError, Said
from tests.playing import (
    CLAUDES,
    Player,
    check_played,
    check_running_turns,
    check_thoughts_since_compaction,
    claude,
    lite,
    play_chat,
    play_claude,
    play_gemini,
    sent_thoughts,
    strategies,
    streams_signatures,
    tool_names,
)

pytestmark = [
    # Those of the clients and of the database, none of which is ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

Serve = Callable[..., str]

WINDOW = 6_000

STRATEGIES = strategies(WINDOW)

each_strategy = pytest.mark.parametrize(
    "strategy",
    [
        STRATEGIES["threshold"],
        *slow(STRATEGIES["sliding window"], STRATEGIES["pipeline"]),
    ],
    ids=STRATEGIES,
)


@pytest.fixture(
    params=[False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["", "restarts"],
)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """Where the session is: in memory, or in a file, and each turn starts anew."""
    return str(tmp_path / "sessions.db") if request.param else None


WAYS = {
    ("threshold", "bound", True, False),
    ("sliding window", "bound", False, True),
    ("pipeline", "bound", False, False),
    ("threshold", "adaptive", False, False),
}
"""Of the combinations that follow, those that every run takes."""


@pytest.mark.parametrize(
    ("strategy", "kind", "redacts", "is_streaming"),
    [
        pytest.param(
            STRATEGIES[name],
            *rest,
            id=f"{name}, {rest}",
            marks=[] if (name, *rest) in WAYS else pytest.mark.slow,
        )
        for name, *rest in itertools.product(
            STRATEGIES, CLAUDES, (False, True), (False, True)
        )
    ],
)
async def test_claude_accepts_a_compacted_history(
    serve: Serve,
    database: str | None,
    strategy: Strategy,
    kind: Any,
    redacts: bool,
    is_streaming: bool,
) -> None:
    """Turn after turn, with a large result; thoughts are not simply left out."""
    if is_streaming and not streams_signatures():
        pytest.skip("this ADK loses signatures of streamed thoughts")
    fake = FakeClaude(kind=kind, redacts=redacts)
    serve(fake)
    player = play_claude(
        fake, strategy=strategy, database=database, is_streaming=is_streaming
    )

    await player.play(turns=7, calls=4)

    check_claude(player)


def check_claude(player: Player, compactions: int = 2) -> None:
    """Sees to what holds for every guarded Claude."""
    check_played(player, compactions)
    assert isinstance(player.fake, FakeClaude)
    if player.fake.kind != "bound":
        check_running_turns(player.fake)
        return
    check_thoughts_since_compaction(player)
    assert len({*map(tool_names, player.fake.of_agent)}) == 1


@pytest.mark.parametrize("kind", ["enabled", *slow("bound", "adaptive")])
@each_strategy
async def test_claude_accepts_a_compaction_within_a_turn(
    serve: Serve, database: str | None, strategy: Strategy, kind: Any
) -> None:
    """Of what is left of the running turn, calls stay with their thoughts."""
    fake = FakeClaude(kind=kind)
    serve(fake)
    player = play_claude(fake, strategy=strategy, database=database)

    await player.play(turns=1, calls=3, log_turn=0)
    await player.play(turns=1, calls=30)
    await player.play(turns=1, calls=3)

    check_claude(player)


def make_player(name: str, serve: Serve, **settings: Any) -> Player:
    """A player of a provider that is no Claude."""
    kind: Any = name.rstrip("!")
    if kind == "gemini":
        gemini = FakeGemini()
        return play_gemini(gemini, serve(gemini), **settings)
    if kind == "converse":
        converse = FakeConverse()
        address = serve(converse)
        return Player(converse, lambda: lite(CONVERSE_MODEL, address), **settings)
    chat = FakeOpenAI(kind=kind, is_strict=kind != name)
    return play_chat(chat, serve(chat), **settings)


MORE = ("converse", "openai", "kimi", "kimi!", "mistral")


@pytest.mark.parametrize(
    "name", ["gemini", "deepseek!", "vllm-mistral", *slow("deepseek", *MORE)]
)
@each_strategy
async def test_others_accept_a_compacted_history(
    serve: Serve, database: str | None, strategy: Strategy, name: str
) -> None:
    """Turn after turn, with a large result and parallel calls."""
    player = make_player(name, serve, strategy=strategy, database=database)

    await player.play(turns=5, calls=4)
    for _ in range(2):
        await player.say([player.calls("look_up", "read_log", "weigh")])
    await player.play(turns=2, calls=4)

    check_played(player)


@pytest.mark.parametrize(
    "name", ["gemini", *slow("deepseek", "deepseek!", "vllm-mistral", *MORE)]
)
@each_strategy
async def test_others_accept_a_compaction_within_a_turn(
    serve: Serve, database: str | None, strategy: Strategy, name: str
) -> None:
    """What is left of the running turn keeps signatures and reasoning."""
    player = make_player(name, serve, strategy=strategy, database=database)

    await player.play(turns=1, calls=3, log_turn=0)
    await player.play(turns=1, calls=30)
    await player.play(turns=1, calls=3)

    check_played(player)


@each_strategy
async def test_without_sealing_all_else_works(
    serve: Serve, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a Claude that binds its thoughts then refuses requests."""
    monkeypatch.setattr(outgoing, "leave_out_thoughts", lambda request, *_: request)
    player = make_player("gemini", serve, strategy=strategy)
    await player.play(turns=6, calls=4)
    check_played(player)
    serve(fake := FakeClaude())
    bound = play_claude(fake, strategy=strategy)
    await bound.play(turns=6, calls=4)
    assert bound.compactions
    assert fake.refused


@each_strategy
async def test_the_template_of_gemma_accepts_a_compacted_history(
    serve: Serve, database: str | None, strategy: Strategy
) -> None:
    """User and assistant alternate, with nothing left out of account."""
    fake = FakeOpenAI(kind="vllm-gemma")
    player = play_chat(
        fake, serve(fake), strategy=strategy, database=database, agent={"tools": []}
    )

    for number in range(12):
        await player.say(text=f"Request {number}: " + "count the crates, " * 250)

    check_played(player)


@pytest.mark.parametrize("kind", ["bound", *slow("enabled", "adaptive")])
@each_strategy
async def test_below_the_threshold_no_thought_is_left_out(
    serve: Serve, database: str | None, strategy: Strategy, kind: Any
) -> None:
    """40 calls leave as without a guard, but for a tool that it may offer."""
    bodies = []
    roomy = strategy.model_copy(update={"context_window": 200_000})
    if isinstance(roomy, SlidingWindow):
        roomy = roomy.model_copy(update={"max_messages": 1_000})
    for guard in (None, roomy):
        fake = FakeClaude(kind=kind)
        serve(fake)
        player = play_claude(fake, strategy=guard, database=database if guard else None)
        await player.play(turns=8, calls=4)
        check_played(player, compactions=0)
        bodies.append([{**e.body, "tools": None} for e in fake.of_agent])
        assert len({*map(tool_names, fake.of_agent)}) == 1
    assert bodies[0] == bodies[1]


class OtherModel(FakeClaude):
    """One behind Anthropic's API that wants its thoughts back, signed or not."""

    signature = ""

    def check(self, body: dict[str, Any]) -> None:
        """Refuses calls without the thought before them."""
        messages = fake_claude.read_messages(body)
        fake_claude.check_shape(messages, has_tools=bool(body.get("tools")))
        for message in messages:
            kinds = [each["type"] for each in message["content"]]
            if "tool_use" in kinds and kinds[0] != "thinking":
                raise RefusalError(fake_openai.DEEPSEEK)

    def answer(self, body: dict[str, Any], said: Said) -> Any:
        """The body of an answer with a thought."""
        answer = super().answer(body, said)
        thought = {"type": "thinking", "thinking": said.thought}
        thought["signature"] = self.signature and f"{self.signature}{said.number}"
        kept = [e for e in answer["content"] if e["type"] != "thinking"]
        return answer | {"content": [thought, *kept]}


@pytest.mark.parametrize("signature", ["", "signature-"])
async def test_other_models_behind_adks_claude_class_get_their_thoughts_back(
    serve: Serve, signature: str
) -> None:
    """Requests leave as without a guard, but for a tool that it may offer."""
    bodies = []
    for guard in (None, STRATEGIES["threshold"]):
        if guard:
            guard = guard.model_copy(update={"context_window": 100_000})
        fake = OtherModel(kind="adaptive")
        fake.signature = signature
        serve(fake)
        player = play_claude(
            fake, strategy=guard, llm=lambda: claude("kimi-k2-thinking")
        )
        await player.play(turns=3, calls=3, log_turn=9)
        check_played(player, compactions=0)
        bodies.append([{**e.body, "tools": None} for e in fake.of_agent])
    assert "Thought 1:" in json.dumps(bodies[0][-1])
    assert bodies[0] == bodies[1]

    await player.change(strategy=STRATEGIES["threshold"])
    await player.play(turns=3, calls=3)
    check_played(player, compactions=1)


@each_strategy
async def test_a_preview_costs_no_thought(
    serve: Serve, database: str | None, strategy: Strategy
) -> None:
    """A large result is shortened before the model has seen it."""
    fake = FakeClaude()
    serve(fake)
    large = {"context_window": 30_000, "preview_tokens": 500}
    if isinstance(strategy, SlidingWindow):
        large["max_messages"] = 1_000
    shortens = type(strategy)(**large)  # type: ignore[arg-type]
    player = play_claude(fake, strategy=shortens, database=database)

    await player.play(turns=4, calls=4)

    check_played(player, compactions=0)
    assert len(sent_thoughts(fake.of_agent[-1].body)) == len(fake.issued) - 1
    assert len(str(fake.of_agent[6].body)) - len(str(fake.of_agent[5].body)) < 3_000
    assert len({*map(tool_names, fake.of_agent)}) == 1
    for before, after in itertools.pairwise(fake.of_agent):
        said = before.body["messages"]
        assert after.body["messages"][: len(said)] == said


@each_strategy
async def test_a_summary_at_the_beginning_of_a_turn_takes_the_thoughts_before_it(
    serve: Serve, database: str | None, strategy: Strategy
) -> None:
    """And no others, in this and every later summary."""
    fake = FakeClaude()
    serve(fake)
    update: dict[str, Any] = {"context_window": 60_000}
    if isinstance(strategy, SlidingWindow):
        update["max_messages"] = 1_000
    roomy = strategy.model_copy(update=update)
    player = play_claude(fake, strategy=roomy, database=database)
    await player.play(turns=3, calls=4)

    for _ in range(3):
        await player.compact()
        await player.play(turns=1, calls=4, log_turn=9)

    check_claude(player, compactions=3)
    for begin in player.compacted_at:
        old = {
            signature
            for exchange in fake.of_agent[:begin]
            for signature in sent_thoughts({"messages": [exchange.answer]})
        }
        assert old
        for exchange in fake.of_agent[begin:]:
            assert not old & sent_thoughts(exchange.body)


@each_strategy
async def test_a_session_older_than_the_guard_gets_the_tool_with_its_first_summary(
    serve: Serve, database: str | None, strategy: Strategy
) -> None:
    """Until then its thoughts are sent; then the tool stays."""
    fake = FakeClaude()
    serve(fake)
    player = play_claude(fake, database=database)
    await player.play(turns=2, calls=3, log_turn=9)
    old = tool_names(fake.of_agent[-1])

    await player.change(strategy=strategy)
    await player.play(turns=6, calls=4, log_turn=1)

    check_played(player)
    check_thoughts_since_compaction(player)
    names = [tool_names(each) for each in fake.of_agent]
    assert [key for key, _ in itertools.groupby(names)] in ([old, names[-1]], [old])
    if names[-1] != old:
        assert names.index(names[-1]) == player.compacted_at[0]


@each_strategy
async def test_a_tool_described_anew_costs_the_thoughts_once(
    serve: Serve, database: str | None, strategy: Strategy
) -> None:
    """Those that are written afterwards stay."""
    fake = FakeClaude()
    serve(fake)
    said = ["Weighs a shelf."]

    def describe(request: LlmRequest) -> None:
        tools = request.config.tools or []
        request.config.tools = [each.model_copy(deep=True) for each in tools]  # type: ignore[union-attr]
        for tool in request.config.tools:
            assert isinstance(tool, types.Tool)
            for declaration in tool.function_declarations or ():
                if declaration.name == "weigh":
                    declaration.description = said[-1]

    player = play_claude(
        fake,
        strategy=strategy.model_copy(update={"context_window": 60_000}),
        database=database,
        before=lambda: [Changing(describe)],
    )
    await player.play(turns=1, calls=3, log_turn=9)
    before = {*fake.issued}
    said.append("Weighs a shelf in kilograms.")
    await player.play(turns=1, calls=3, log_turn=9)

    check_played(player, compactions=0)
    last = sent_thoughts(fake.of_agent[-1].body)
    assert last == {*fake.issued} - before - {[*fake.issued][-1]}


@pytest.mark.parametrize("kind", slow("bound", "enabled", "adaptive"))
@each_strategy
async def test_parallel_calls_with_a_large_result_stay_together(
    serve: Serve, database: str | None, strategy: Strategy, kind: Any
) -> None:
    """Their results come in one message, as many as there are calls."""
    fake = FakeClaude(kind=kind)
    serve(fake)
    player = play_claude(fake, strategy=strategy, database=database)

    for _ in range(5):
        names = ("look_up", "read_log", "weigh")
        await player.say([player.calls(*names), player.calls("look_up", "look_up")])

    check_claude(player)


def add_picture(request: LlmRequest) -> None:
    """Puts a picture beside what `weigh` says."""
    blob = types.FunctionResponseBlob(mime_type="image/png", data=b"picture")
    picture = types.FunctionResponsePart(inline_data=blob)
    request.contents = [each.model_copy(deep=True) for each in request.contents]
    for part in [part for each in request.contents for part in each.parts or ()]:
        if part.function_response and part.function_response.name == "weigh":
            part.function_response.parts = [picture]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["claude", "openai", "mistral"])
@each_strategy
async def test_a_picture_in_a_result_is_sent_as_without_a_guard(
    serve: Serve, database: str | None, strategy: Strategy, name: str
) -> None:
    """No turn is lost that is not lost without one."""
    lost = []
    for guard in (None, strategy):
        settings: dict[str, Any] = {
            "strategy": guard,
            "database": database if guard else None,
            "before": lambda: [Changing(add_picture)],
        }
        if name == "claude":
            claude = FakeClaude()
            serve(claude)
            player = play_claude(claude, **settings)
        else:
            player = make_player(name, serve, **settings)
        for _ in range(7):
            await player.say([player.calls("weigh"), *player.steps(3)])
        lost.append(len(player.lost))
        if name != "mistral":
            check_played(player, compactions=2 if guard else 0)
    assert lost[1] <= lost[0]


@each_strategy
async def test_a_cache_of_gemini_is_made_anew_only_with_a_summary(
    serve: Serve, database: str | None, strategy: Strategy
) -> None:
    """Nothing that is cached changes in between."""
    fake = FakeGemini()
    player = play_gemini(
        fake,
        serve(fake),
        app={
            "context_cache_config": ContextCacheConfig(
                min_tokens=0, cache_intervals=100
            )
        },
        agent={"instruction": "You count shelves. " * 1_000},
        strategy=strategy.model_copy(update={"context_window": 14_000}),
        database=database,
    )

    await player.play(turns=8, calls=4)

    check_played(player)
    assert any("cachedContent" in each.body for each in fake.of_agent)
    assert len(fake.deleted) <= len(player.compactions)


@each_strategy
async def test_a_history_that_the_provider_holds_is_left_alone(
    serve: Serve, strategy: Strategy
) -> None:
    """With `previous_interaction_id` a request leaves as it came."""
    bodies = []

    def go_on(request: LlmRequest) -> None:
        request.previous_interaction_id = "interaction"

    for guard in (None, strategy):
        fake = FakeGemini()
        player = play_gemini(
            fake, serve(fake), strategy=guard, before=lambda: [Changing(go_on)]
        )
        await player.play(turns=5, calls=4)
        check_played(player, compactions=0)
        bodies.append([each.body for each in fake.exchanges])
    assert bodies[0] == bodies[1]
