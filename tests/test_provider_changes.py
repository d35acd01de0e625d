"""What others change in a history, and what a provider refuses, costs no turn.

Plugins, features of ADK, another model in mid session, and refusals of every kind:
real clients, with fake providers behind them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.apps.app import EventsCompactionConfig
from google.adk.artifacts import InMemoryArtifactService
from google.adk.memory import InMemoryMemoryService
from google.adk.models.base_llm import BaseLlm
from google.adk.models.google_llm import Gemini
from google.adk.models.llm_request import LlmRequest
from google.adk.planners import PlanReActPlanner
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import Session
from google.adk.tools.load_artifacts_tool import LoadArtifactsTool
from google.adk.tools.long_running_tool import LongRunningFunctionTool
from google.adk.tools.preload_memory_tool import PreloadMemoryTool
from google.genai import types

from contextguard_adk import Strategy, request_compaction
from tests import fake_claude, fake_gemini, fake_openai
from tests.builders import event, model, user
from tests.chats import Changing, slow
from tests.fake_claude import FakeClaude
from tests.fake_gemini import FakeGemini
from tests.fake_openai import FakeOpenAI
from tests.fake_provider import FakeProvider
from tests.playing import (
    INSTRUCTION,
    TOOLS,
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
)

pytestmark = [
    # Those of the clients and of the database, none of which is ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

Serve = Callable[..., str]
Change = Callable[[LlmRequest], None]

WINDOW = 6_000
STRATEGIES = strategies(WINDOW)

each_strategy = pytest.mark.parametrize(
    "strategy",
    [
        *slow(STRATEGIES["threshold"], STRATEGIES["sliding window"]),
        STRATEGIES["pipeline"],
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


def copied(request: LlmRequest) -> list[types.Part]:
    """The parts of a request, after copies of its contents were put in."""
    request.contents = [each.model_copy(deep=True) for each in request.contents]
    return [part for each in request.contents for part in each.parts or ()]


def is_signed(part: types.Part) -> bool:
    """Whether a part is a signed thought."""
    return bool(part.thought and part.thought_signature)


def drop_thought(request: LlmRequest, signature: bytes) -> None:
    """Takes one thought out."""
    copied(request)
    for content in request.contents:
        parts = content.parts or []
        content.parts = [p for p in parts if p.thought_signature != signature]


class DropsSecond:
    """Takes the second thought that it ever saw out of every request."""

    signature: bytes | None = None

    def __call__(self, request: LlmRequest) -> None:
        signatures = [p.thought_signature for p in copied(request) if is_signed(p)]
        if self.signature is None and len(signatures) > 3:
            self.signature = signatures[1]
        if self.signature:
            drop_thought(request, self.signature)


class DropsOnce:
    """Takes the newest thought out of the fifth request, and of no other."""

    count = 0

    def __call__(self, request: LlmRequest) -> None:
        self.count += 1
        signatures = [p.thought_signature for p in copied(request) if is_signed(p)]
        if self.count == 5 and signatures[-1]:
            drop_thought(request, signatures[-1])


@pytest.mark.parametrize("kind", [DropsSecond, *slow(DropsOnce)])
@each_strategy
async def test_a_thought_that_another_plugin_takes_costs_one_more_request(
    serve: Serve,
    database: str | None,
    strategy: Strategy,
    kind: type[DropsSecond] | type[DropsOnce],
) -> None:
    """Behind the guard; the same before the guard costs none."""
    for is_before, refusals in ((False, 1), (True, 0)):
        fake, change = FakeClaude(), kind()
        serve(fake)
        place = "before" if is_before else "after"
        file = f"{database}{is_before}" if database else None
        player = play_claude(
            fake,
            strategy=strategy,
            database=file,
            **{place: lambda change=change: [Changing(change)]},
        )
        await player.play(turns=7, calls=4)
        check_played(player, refusals=refusals)


@pytest.mark.parametrize("kind", [DropsSecond, DropsOnce])
async def test_a_thought_that_a_plugin_takes_is_refused_without_a_guard(
    serve: Serve, kind: type[DropsSecond] | type[DropsOnce]
) -> None:
    """The control."""
    fake, change = FakeClaude(), kind()
    serve(fake)
    player = play_claude(fake, before=lambda: [Changing(change)])
    await player.play(turns=2, calls=4)
    assert player.lost


class Shortens:
    """Shortens the first result of the second turn, once it is told to."""

    is_on = False

    def __call__(self, request: LlmRequest) -> None:
        results = [p.function_response for p in copied(request) if p.function_response]
        if self.is_on:
            assert results[3]
            results[3].response = {"result": "…"}


@each_strategy
async def test_a_result_that_is_shortened_late_costs_the_thoughts_behind_it(
    serve: Serve, database: str | None, strategy: Strategy
) -> None:
    """Those before it stay, and so do all that are written afterwards."""
    fake, shortens = FakeClaude(), Shortens()
    serve(fake)
    update = {"context_window": 60_000, "max_messages": 1_000}
    roomy = strategy.model_copy(
        update={key: value for key, value in update.items() if hasattr(strategy, key)}
    )
    player = play_claude(
        fake,
        strategy=roomy,
        database=database,
        before=lambda: [Changing(shortens)],
    )
    await player.play(turns=3, calls=3, log_turn=9)
    issued = [*fake.issued]
    shortens.is_on = True
    await player.play(turns=2, calls=3, log_turn=9)

    check_played(player, compactions=0)
    behind = issued[5:]  # What was written over the result, and later.
    last = sent_thoughts(fake.of_agent[-1].body)
    assert last == {*fake.issued} - {*behind, [*fake.issued][-1]}


async def ship(shelf: int) -> dict[str, Any]:
    """Ships what is on a shelf, which takes days."""
    return {"status": "pending"}


def feature_player(fake: FakeClaude, feature: str, **settings: Any) -> Player:
    """A player of an agent that uses a feature of ADK which changes histories."""
    agent: dict[str, Any] = {}
    counter = itertools.count()
    match feature:
        case "instruction":
            agent["instruction"] = lambda _: f"{INSTRUCTION} Call {next(counter)}."
        case "state":
            agent["instruction"] = f"{INSTRUCTION} Shelves so far: {{shelves?}}."
        case "static":
            agent["static_instruction"] = INSTRUCTION
            agent["instruction"] = "Count crates as well."
        case "memory":
            agent["tools"] = [*TOOLS, PreloadMemoryTool()]
            settings["services"] = {"memory_service": InMemoryMemoryService()}
        case "artifacts":
            agent["tools"] = [*TOOLS, LoadArtifactsTool()]
            settings["services"] = {"artifact_service": InMemoryArtifactService()}
        case "long running":
            agent["tools"] = [*TOOLS, LongRunningFunctionTool(ship)]
        case "compaction":
            config = EventsCompactionConfig(compaction_interval=2, overlap_size=0)
            settings["app"] = {"events_compaction_config": config}
    return play_claude(fake, agent=agent, **settings)


async def prepare(player: Player, feature: str) -> None:
    """Fills the services that a feature reads."""
    if feature == "memory":
        said = [event(user("I count shelves on Mondays.")), event(model("Noted."))]
        session = Session(id="old", app_name="app", user_id="user", events=said)
        await player.services["memory_service"].add_session_to_memory(session)
    if feature == "artifacts":
        await player.services["artifact_service"].save_artifact(
            app_name="app",
            user_id="user",
            session_id="session",
            filename="shelf.txt",
            artifact=types.Part(text="The shelf is full."),
        )


async def play_feature(player: Player, feature: str, turns: int) -> None:
    """Plays turns in which the feature does its work."""
    await prepare(player, feature)
    for number in range(turns):
        steps = player.steps(4, has_log=number == 2)
        if feature == "state":
            await player.set_state({"shelves": number})
        if feature == "artifacts":
            call = ("load_artifacts", {"artifact_names": ["shelf.txt"]})
            steps.insert(1, [call])
        if feature == "long running":
            steps.insert(1, player.calls("ship"))
        await player.say(steps)
        if feature == "long running":
            await player.say(text=await late_answer(player))


async def late_answer(player: Player) -> types.Content:
    """The user's message with what the newest long-running call has come to."""
    calls = [
        call
        for each in await player.events()
        for call in each.get_function_calls()
        if call.name == "ship"
    ]
    answer = types.FunctionResponse(
        id=calls[-1].id, name="ship", response={"status": "shipped"}
    )
    return types.Content(role="user", parts=[types.Part(function_response=answer)])


FEATURES = (
    "instruction",
    "state",
    "static",
    "memory",
    "artifacts",
    "long running",
    "compaction",
)
CHANGING = ("instruction", "static")
"""Features that change something before every call."""


@pytest.mark.parametrize("feature", [*FEATURES[:3], *slow(*FEATURES[3:])])
async def test_features_of_adk_break_the_thoughts_of_a_bound_model(
    serve: Serve, feature: str
) -> None:
    """Without a guard."""
    fake = FakeClaude()
    serve(fake)
    player = feature_player(fake, feature)
    await play_feature(player, feature, turns=4)
    assert player.lost
    words = {each.partition(":")[2] for each in fake.refused}
    first = fake_claude.FIRST_ROLE.partition(":")[2]
    assert words <= {fake_claude.BOUND_ELSEWHERE.partition(":")[2], first}


@pytest.mark.parametrize(
    "feature",
    [
        "static",
        *slow(
            "long running", "instruction", "state", "memory", "artifacts", "compaction"
        ),
    ],
)
@each_strategy
async def test_features_of_adk_cost_no_turn_with_a_guard(
    serve: Serve,
    database: str | None,
    strategy: Strategy,
    feature: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What changes on every call is named in one warning."""
    fake = FakeClaude()
    serve(fake)
    player = feature_player(fake, feature, strategy=strategy, database=database)
    # What was warned of once is not said again of an agent of the same name.
    player.agent["name"] = f"{feature}_{type(strategy).__name__}".replace(" ", "_")
    await play_feature(player, feature, turns=7)

    check_played(player, compactions=0 if feature == "compaction" else 2)
    if database is None:
        warned = [
            each.getMessage()
            for each in caplog.records
            if each.name.startswith("contextguard_adk")
            and each.levelname == "WARNING"
            and "thought" in each.getMessage()
        ]
        assert len(warned) <= 1
        assert warned or feature not in CHANGING


async def test_compactions_are_not_called_changes_of_others(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """A session in which nothing else changes is warned of nothing."""
    fake = FakeClaude()
    serve(fake)
    agent = {"name": "compacting"}  # What was warned of once is not said again.
    player = play_claude(fake, strategy=STRATEGIES["threshold"], agent=agent)

    await player.play(turns=6, calls=4)

    check_played(player)
    assert "cannot be sent again" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "redacts"),
    [
        ("bound", True),
        *[
            pytest.param(kind, redacts, marks=pytest.mark.slow)
            for kind, redacts in (
                ("bound", False),
                ("adaptive", False),
                ("adaptive", True),
            )
        ],
    ],
)
@each_strategy
async def test_thoughts_without_a_text_are_sent_as_thoughts(
    serve: Serve, database: str | None, strategy: Strategy, kind: Any, redacts: bool
) -> None:
    """Redacted ones stay as they were, and all keep their order."""
    fake = FakeClaude(kind=kind, redacts=redacts, display="omitted")
    serve(fake)
    player = play_claude(
        fake,
        strategy=strategy,
        database=database,
        agent={"generate_content_config": None},
    )

    await player.play(turns=7, calls=4)

    check_played(player)
    order = [*fake.issued]
    for exchange in fake.of_agent:
        messages = exchange.body["messages"]
        sent = [block for *_, block in fake_claude.list_thoughts(messages)]
        assert all(block.get("thinking", ".") for block in sent)
        keys = [order.index(fake_claude.signature_of(block)) for block in sent]
        assert keys == sorted(keys)
    if kind == "bound":
        check_thoughts_since_compaction(player)
    else:
        check_running_turns(fake)


@each_strategy
async def test_a_message_that_was_nothing_but_a_thought_goes_with_it(
    serve: Serve, database: str | None, strategy: Strategy
) -> None:
    """The user spoke twice then, which is accepted."""
    fake = FakeClaude(takes_thoughts_alone=True)
    serve(fake)
    player = play_claude(fake, strategy=strategy, database=database)
    await player.play(turns=1, calls=2)
    await player.say([""])
    assert player.turns.pop().is_lost

    await player.play(turns=7, calls=4)

    check_played(player)


async def test_no_content_is_left_without_parts(serve: Serve) -> None:
    """An answer of nothing but a thought is left out as a whole after a change."""
    fake, counter = FakeClaude(takes_thoughts_alone=True), itertools.count()
    serve(fake)
    seen: list[types.Content] = []
    player = play_claude(
        fake,
        strategy=STRATEGIES["threshold"],
        agent={"instruction": lambda _: f"{INSTRUCTION} Call {next(counter)}."},
        after=lambda: [Changing(lambda request: seen.extend(request.contents))],
    )
    await player.say([""])

    await player.play(turns=2, calls=2, log_turn=9)

    (alone,) = fake.of_agent[0].answer["content"]
    assert alone["type"] == "thinking"
    assert alone["signature"] not in sent_thoughts(fake.of_agent[-1].body)
    assert all(content.parts for content in seen)


MODELS: dict[str, Callable[[str], BaseLlm]] = {
    "claude": lambda _: claude("claude-opus-5-5"),
    "other claude": lambda _: claude("claude-fable-5-2"),
    "claude, litellm": lambda address: lite(
        "anthropic/claude-opus-5-5",
        address,
        thinking={"type": "adaptive", "display": "summarized"},
    ),
    "gemini": lambda address: Gemini(model="gemini-3-pro-preview", base_url=address),
    "deepseek": lambda address: lite("deepseek/deepseek-reasoner", address),
}
SWITCHES = {
    "claude": ("gemini", "other claude", "claude, litellm", "deepseek"),
    "claude, litellm": ("claude", "gemini"),
    "gemini": ("claude", "claude, litellm"),
    "deepseek": ("claude",),
}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(
            first,
            second,
            marks=[] if (first, second) == ("claude", "gemini") else pytest.mark.slow,
        )
        for first, others in SWITCHES.items()
        for second in others
    ],
)
@each_strategy
async def test_another_model_goes_on_in_the_same_session(
    serve: Serve, database: str | None, strategy: Strategy, first: str, second: str
) -> None:
    """There and back again; each gets thoughts that it can read."""
    fakes: dict[str, FakeProvider] = {
        "claude": FakeClaude(),
        "gemini": FakeGemini(),
        "deepseek": FakeOpenAI(kind="deepseek"),
    }
    address = serve(*fakes.values())
    player = play_claude(
        FakeClaude(), llm=lambda: MODELS[first](address), strategy=strategy
    )
    player.database = database

    for name in (first, second, first, second):
        fake = fakes["claude" if "claude" in name else name]
        await player.change(fake=fake, llm=lambda name=name: MODELS[name](address))
        await player.play(turns=3, calls=3)

    assert not player.lost
    assert not [words for fake in fakes.values() for words in fake.refused]
    assert len(player.compactions) >= 2


@pytest.mark.parametrize("kind", ["bound", *slow("enabled", "adaptive")])
@each_strategy
async def test_a_model_of_an_unknown_name_is_known_after_one_refusal(
    serve: Serve, database: str | None, strategy: Strategy, kind: Any
) -> None:
    """One that binds no thoughts is never refused."""
    fake = FakeClaude(kind=kind)
    serve(fake)
    player = play_claude(
        fake, llm=lambda: claude("my-alias"), strategy=strategy, database=database
    )

    await player.play(turns=1, calls=3, log_turn=0)
    await player.play(turns=1, calls=30)
    await player.play(turns=5, calls=4)

    assert not player.lost
    assert len(player.compactions) >= 2
    assert len(fake.refused) <= (1 if kind == "bound" else 0)
    if kind != "bound":
        check_running_turns(fake)


def transferring(llm: BaseLlm) -> LlmAgent:
    """An agent that can hand over to another one."""
    config = types.GenerateContentConfig(
        thinking_config=types.ThinkingConfig(thinking_budget=-1)
    )
    shared: dict[str, Any] = {
        "model": llm,
        "tools": [*TOOLS],
        "instruction": INSTRUCTION,
        "generate_content_config": config,
    }
    other = LlmAgent(name="other", description="Counts crates.", **shared)
    return LlmAgent(name="agent", sub_agents=[other], **shared)


SETUPS: dict[str, dict[str, Any]] = {
    "transfer": {"root": transferring},
    "no contents": {"agent": {"include_contents": "none"}},
    "planner": {"agent": {"planner": PlanReActPlanner()}},
}


@pytest.mark.parametrize("setup", slow("transfer", "no contents", "planner"))
@each_strategy
async def test_other_ways_to_build_an_agent_are_refused_nothing(
    serve: Serve, database: str | None, strategy: Strategy, setup: str
) -> None:
    """With a guard as without one."""
    for guard in (None, strategy):
        fake = FakeClaude()
        serve(fake)
        player = play_claude(
            fake,
            strategy=guard,
            database=database if guard else None,
            **SETUPS[setup],
        )
        for number in range(8):
            steps = player.steps(4, has_log=number == 1)
            if setup == "transfer":
                name = "agent" if number % 2 else "other"
                steps.insert(2, [("transfer_to_agent", {"agent_name": name})])
            await player.say(steps)
        check_played(player, compactions=0)
        if guard and setup != "no contents":
            assert player.compactions


@pytest.mark.parametrize("kind", ["bound", *slow("enabled", "adaptive")])
@each_strategy
async def test_a_request_that_was_too_long_stays_as_it_was_accepted(
    serve: Serve, database: str | None, strategy: Strategy, kind: Any
) -> None:
    """What was sent again is the beginning of the next request."""
    fake = FakeClaude(kind=kind, window_tokens=WINDOW)
    serve(fake)
    larger = strategy.model_copy(update={"context_window": 5 * WINDOW})
    player = play_claude(fake, strategy=larger, database=database)

    await player.play(turns=8, calls=4)

    assert not player.lost
    assert fake.refused
    assert all("too long" in words for words in fake.refused)
    assert len(fake.refused) <= 2
    refused = next(e for e in fake.of_agent if e.refused)
    number = fake.of_agent.index(refused)
    again, after = fake.of_agent[number + 1 : number + 3]
    said = again.body["messages"]
    assert after.body["messages"][: len(said)] == said


WORDS: dict[str, tuple[str, str]] = {
    "bound": ("claude bound", fake_claude.BOUND_ELSEWHERE.format(1, 0)),
    "signature": ("claude bound", fake_claude.INVALID_SIGNATURE.format(1, 0)),
    "data": ("claude bound", fake_claude.INVALID_DATA.format(1, 0)),
    "modified": ("claude adaptive", fake_claude.MODIFIED.format(7, 0)),
    "modified, enabled": ("claude enabled", fake_claude.MODIFIED.format(7, 0)),
    "expected": (
        "claude enabled",
        fake_claude.EXPECTED_THINKING.format(7, "tool_use"),
    ),
    "call not answered": (
        "claude bound",
        fake_claude.UNANSWERED.format(7, "toolu_1_0"),
    ),
    "answer without a call": (
        "claude bound",
        fake_claude.ORPHAN.format(7, 0, "toolu_1_0"),
    ),
    "no signature": ("gemini", fake_gemini.NO_SIGNATURE.format("look_up", 7)),
    "no signature, older words": (
        "gemini",
        "Function call is missing a thought_signature in functionCall parts.",
    ),
    "wrong signature": ("gemini", fake_gemini.WRONG_SIGNATURE),
    "moved signature": ("gemini", fake_gemini.MOVED_SIGNATURE),
    "order of calls": ("gemini", fake_gemini.CALL_ORDER),
    "count of answers": ("gemini", fake_gemini.ANSWER_COUNT),
    "deepseek": ("deepseek", fake_openai.DEEPSEEK),
    "deepseek, older words": (
        "deepseek",
        "Missing `reasoning_content` field in the assistant message at message index 3",
    ),
    "kimi": ("kimi", fake_openai.KIMI.format(3)),
    "alternate": ("vllm-mistral", fake_openai.ALTERNATE),
    "openai": ("openai", fake_openai.UNANSWERED.format("c00000100")),
}
FAST_WORDS = ("bound", "expected", "no signature")

each_refusal = pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param(*each, id=key, marks=[pytest.mark.slow] * (key not in FAST_WORDS))
        for key, each in WORDS.items()
    ],
)


def make_player(name: str, serve: Serve, **settings: Any) -> Player:
    """A player of one of the providers."""
    if name == "gemini":
        gemini = FakeGemini()
        return play_gemini(gemini, serve(gemini), **settings)
    kind: Any
    if name.startswith("claude"):
        kind = name.partition(" ")[2]
        anthropic = FakeClaude(kind=kind)
        serve(anthropic)
        return play_claude(anthropic, **settings)
    kind = name
    chat = FakeOpenAI(kind=kind)
    return play_chat(chat, serve(chat), **settings)


@each_refusal
@each_strategy
async def test_what_is_refused_is_sent_once_more(
    serve: Serve, database: str | None, strategy: Strategy, name: str, words: str
) -> None:
    """In a form that is accepted, and the turn goes on; so does the session."""
    player = make_player(name, serve, strategy=strategy, database=database)
    fake = player.fake
    await player.play(turns=1, calls=3, log_turn=9)
    fake.refuse_next(words, after=2)
    refused = len(fake.of_agent) + 2
    await player.play(turns=7, calls=4)

    check_played(player, refusals=1)
    assert fake.of_agent[refused].refused == words
    if isinstance(fake, FakeClaude) and "Invalid" in words:
        old = sent_thoughts(fake.of_agent[refused].body)
        assert old
        for exchange in fake.of_agent[refused + 1 :]:
            assert not old & sent_thoughts(exchange.body)


@each_refusal
async def test_what_is_refused_again_ends_the_turn_with_the_same_words(
    serve: Serve, name: str, words: str
) -> None:
    """It is sent once more for each kind, at most; the next turn is answered."""
    player = make_player(name, serve, strategy=STRATEGIES["pipeline"])
    fake = player.fake
    await player.play(turns=1, calls=3, log_turn=9)
    fake.refuse_next(*[words] * 9, after=2)
    await player.say(player.steps(4))

    assert words[:60] in player.turns.pop().error.replace("\\", "")
    assert {*fake.refused} == {words}
    assert 2 <= len(fake.refused) <= 3
    assert fake.of_agent[-1].refused == words
    fake.refusals.clear()
    await player.play(turns=1, calls=2, log_turn=9)
    check_played(player, compactions=0, refusals=len(fake.refused))


class Edits(BasePlugin):
    """Edits histories before the guard sees them; what was edited stays so."""

    def __init__(self, chance: random.Random, edits: list[Change]) -> None:
        super().__init__(name="edits")
        self._chance, self._edits = chance, edits

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Makes all edits so far, and at times a new one, or has it compacted."""
        signatures = [p.thought_signature for p in copied(llm_request) if is_signed(p)]
        is_fourth = len(signatures) == 3 and not self._edits
        if is_fourth or self._chance.random() < 0.25:
            self._edits.append(self._choose(signatures, is_fourth))
        if self._chance.random() < 0.08:
            request_compaction(callback_context.state)
        for edit in self._edits:
            edit(llm_request)

    def _choose(self, signatures: Sequence[bytes | None], is_fourth: bool) -> Change:
        chance = self._chance
        position, mark = chance.randrange(4), f"edit {chance.randrange(1_000)}"
        kinds: list[Change] = [
            lambda request: change_system(request, mark),
            lambda request: shorten_result(request, 2 * position),
            lambda request: add_tool(request, mark),
            lambda request: drop_tool(request, "weigh"),
            lambda request: describe_tool(request, mark),
            lambda request: insert_text(request, position, mark),
            lambda request: change_text(request, position, mark),
        ]
        if len(signatures) > 2:
            middle = signatures[chance.randrange(1, len(signatures) - 1)]
            kinds.append(lambda request: drop_thought(request, middle or b""))
        return kinds[0] if is_fourth else chance.choice(kinds)


def change_system(request: LlmRequest, mark: str) -> None:
    """Adds to the instruction."""
    request.config.system_instruction = f"{request.config.system_instruction} {mark}"


def shorten_result(request: LlmRequest, number: int) -> None:
    """Shortens one result."""
    results = [part for part in copied(request) if part.function_response]
    for part in results[number : number + 1]:
        assert part.function_response
        part.function_response.response = {"result": "…"}


def declarations(request: LlmRequest) -> list[types.FunctionDeclaration]:
    """The declared functions, after copies of them were put in."""
    tools = [each.model_copy(deep=True) for each in request.config.tools or ()]  # type: ignore[union-attr]
    request.config.tools = [*tools]
    assert isinstance(tools[0], types.Tool)
    found = tools[0].function_declarations
    assert found is not None
    return found


def add_tool(request: LlmRequest, mark: str) -> None:
    """Declares one more function."""
    name = mark.replace(" ", "_")
    if all(each.name != name for each in declarations(request)):
        declarations(request).append(
            types.FunctionDeclaration(name=name, description="Does nothing.")
        )


def drop_tool(request: LlmRequest, name: str) -> None:
    """Declares one function less."""
    found = declarations(request)
    found[:] = [each for each in found if each.name != name]


def describe_tool(request: LlmRequest, mark: str) -> None:
    """Describes a function anew."""
    declarations(request)[0].description = mark


def texts_of_user(request: LlmRequest) -> list[int]:
    """Where the user says something."""
    return [
        index
        for index, content in enumerate(request.contents)
        if content.role == "user" and any(part.text for part in content.parts or ())
    ]


def insert_text(request: LlmRequest, number: int, mark: str) -> None:
    """Puts a content before one of the user's messages."""
    for index in texts_of_user(request)[number : number + 1]:
        request.contents = [*request.contents]
        request.contents.insert(index, user(mark))


def change_text(request: LlmRequest, number: int, mark: str) -> None:
    """Changes what the user said."""
    copied(request)
    for index in texts_of_user(request)[number : number + 1]:
        request.contents[index] = user(mark)


async def play_edits(
    serve: Serve, seed: int, guard: Strategy | None, database: str | None = None
) -> Player:
    """30 calls with random edits."""
    fake, edits = FakeClaude(redacts=seed % 2 == 1), list[Change]()
    serve(fake)
    chance = random.Random(seed)
    player = play_claude(
        fake,
        strategy=guard,
        database=database,
        before=lambda: [Edits(chance, edits)],
    )
    await player.play(turns=10, calls=2)
    return player


ALL_SEEDS = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.parametrize(
    "seed",
    [
        0,
        *slow(*range(1, 16)),
        *(pytest.param(seed, marks=ALL_SEEDS) for seed in range(16, 60)),
    ],
)
async def test_random_edits_are_refused_nothing_with_a_guard(
    serve: Serve, tmp_path: Path, seed: int
) -> None:
    """Whatever is changed, taken or put in, and whenever; thoughts are still sent."""
    guard = [*STRATEGIES.values()][seed % 3]
    database = str(tmp_path / "sessions.db") if seed % 5 == 4 else None

    player = await play_edits(serve, seed, guard, database)

    check_played(player, compactions=0)
    assert sum(bool(sent_thoughts(e.body)) for e in player.fake.of_agent) >= 8


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 60, 6))])
async def test_random_edits_are_refused_without_a_guard(
    serve: Serve, seed: int
) -> None:
    """The control: turns are lost."""
    player = await play_edits(serve, seed, None)
    assert player.lost
    assert player.fake.refused
