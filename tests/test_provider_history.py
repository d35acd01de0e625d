"""What providers demand of a history holds: real clients, and strict fakes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.adk.apps.app import EventsCompactionConfig
from google.adk.models.base_llm import BaseLlm
from google.adk.models.google_llm import Gemini
from google.adk.models.llm_request import LlmRequest
from google.adk.tools.long_running_tool import LongRunningFunctionTool
from google.genai import types

from contextguard_adk import Threshold
from tests.builders import user
from tests.chats import Changing, slow, some_slow
from tests.fake_claude import FakeClaude
from tests.fake_gemini import FakeGemini
from tests.fake_openai import FakeOpenAI
from tests.fake_provider import REFUSALS, FakeProvider, RefusalError
from tests.players import Body, OtherModel, Serve, make_player
from tests.playing import (
    INSTRUCTION,
    TOOLS,
    Player,
    check_played,
    check_running_turns,
    check_thoughts_since_compaction,
    claude,
    lite,
    play_claude,
    sent_thoughts,
    strategies,
    streams_signatures,
    tool_names,
)

pytestmark = [
    pytest.mark.litellm,  # Its import takes seconds.
    # Those of the clients and of the database, none of which is ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


WINDOW = 4_000
NAMES = ("threshold", "sliding", "pipeline")
STRATEGIES = dict(zip(NAMES, strategies(WINDOW).values(), strict=True))
THRESHOLD = STRATEGIES["threshold"]
PIPELINE = STRATEGIES["pipeline"]


def check(player: Player, compactions: int = 2) -> None:
    """Sees to what holds for every guarded model."""
    check_played(player, compactions)
    fake = player.fake
    if not isinstance(fake, FakeClaude) or isinstance(fake, OtherModel):
        return
    if fake.kind != "bound":
        check_running_turns(fake)
        return
    check_thoughts_since_compaction(player)
    assert len({tool_names(body) for body in fake.of_agent}) == 1


@pytest.mark.quick("unsigned threshold", "gemini pipeline")
@pytest.mark.parametrize(
    "case",
    [
        "bound threshold redacts omits",
        "bound pipeline restarts",
        *slow("bound sliding streams", "adaptive threshold redacts streams"),
        "unsigned threshold",
        "gemini pipeline",
        "deepseek! threshold",
        "vllm-mistral sliding",
        *slow("enabled sliding redacts restarts", "signed pipeline", "openai pipeline"),
        *slow("kimi! sliding restarts", "mistral pipeline"),
    ],
)
async def test_a_compacted_history_is_accepted(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    """Thoughts are not simply left out; no compaction is called a change of others."""
    name, strategy, *ways = case.split()
    if "streams" in ways and not streams_signatures():
        pytest.skip("this ADK loses signatures of streamed thoughts")
    player = make_player(
        name,
        serve,
        {
            "redacts": "redacts" in ways,
            "display": "omitted" if "omits" in ways else "summarized",
        },
        strategy=STRATEGIES[strategy],
        database=str(tmp_path / "sessions.db") if "restarts" in ways else None,
        is_streaming="streams" in ways,
    )

    await player.play(turns=2, calls=3)
    names = ("look_up", "read_log", "weigh")
    await player.say([player.calls(*names), player.calls("look_up", "look_up")])
    await player.play(turns=2, calls=3)

    check(player)
    assert "cannot be sent again" not in caplog.text


@pytest.mark.quick("gemini threshold")
@pytest.mark.parametrize(
    "case",
    [
        "enabled threshold",
        "gemini threshold",
        "latest-of-bound threshold",
        *slow("alias-of-bound pipeline", "bound sliding", "adaptive pipeline"),
        *slow("signed threshold"),
        *slow("vllm-mistral pipeline", "deepseek! pipeline", "kimi! threshold"),
    ],
)
async def test_a_compaction_within_a_turn_is_accepted(serve: Serve, case: str) -> None:
    """Calls stay with thoughts and signatures; unknown names cost one refusal."""
    name, strategy = case.split()
    *alias, kind = name.split("-of-")
    player = make_player(kind, serve, strategy=STRATEGIES[strategy])
    if alias:
        model = {"alias": "my-alias", "latest": "claude-opus-latest"}[alias[0]]
        player.llm = lambda: claude(model)

    await player.play(turns=1, calls=3, log_turn=0)
    begin = len(player.compactions)
    await player.play(turns=1, calls=16)
    assert len(player.compactions) >= begin + 2
    await player.play(turns=1, calls=4)

    if name == "alias-of-bound":
        check_played(player, refusals=1)
    else:
        check(player)


async def test_the_template_of_gemma_accepts_a_compacted_history(serve: Serve) -> None:
    """User and assistant alternate, with nothing left out of account."""
    tools: dict[str, Any] = {"tools": []}
    player = make_player("vllm-gemma", serve, strategy=THRESHOLD, agent=tools)

    for number in range(8):
        await player.say(text=f"Request {number}: " + "count the crates, " * 250)

    check_played(player)


@pytest.mark.parametrize("name", ["bound", "interaction", *slow("unsigned", "signed")])
async def test_below_the_threshold_requests_leave_as_without_a_guard(
    serve: Serve, name: str
) -> None:
    """But for a tool that may be offered; so they do where the provider has them."""
    strategy = Threshold(context_window=200_000)
    settings = dict[str, Any]()
    if name == "interaction":
        name = "gemini"
        strategy = Threshold(context_window=WINDOW)
        chain = Changing(lambda r: setattr(r, "previous_interaction_id", "interaction"))
        settings["before"] = lambda: [chain]

    bodies = []
    for guard in (None, strategy):
        player = make_player(name, serve, strategy=guard, **settings)
        await player.play(turns=3, calls=3)
        check_played(player, compactions=0)
        assert not player.compactions
        bodies.append([{**e.body, "tools": None} for e in player.fake.of_agent])
        assert len({json.dumps(e.body.get("tools")) for e in player.fake.of_agent}) == 1

    assert bodies[0] == bodies[1]
    assert ("Thought 1:" in json.dumps(bodies[0][-1])) is (name != "gemini")


async def test_a_summary_at_the_beginning_of_a_turn_takes_the_thoughts_before_it(
    serve: Serve,
) -> None:
    """And no others, in this and every later summary."""
    fake = FakeClaude()
    serve(fake)
    player = play_claude(fake, strategy=Threshold(context_window=60_000))
    await player.play(turns=2, calls=3)

    for _ in range(2):
        await player.compact(calls=3)
        await player.play(turns=1, calls=3, log_turn=9)

    check(player, compactions=2)
    for begin in player.compacted_at:
        answers = [each.answer for each in fake.of_agent[:begin]]
        old = sent_thoughts({"messages": answers})
        assert old
        assert not any(old & sent_thoughts(e.body) for e in fake.of_agent[begin:])


def copied(request: LlmRequest) -> list[types.Part]:
    """The parts of a request, after copies of its contents were put in."""
    request.contents = [each.model_copy(deep=True) for each in request.contents]
    return [part for each in request.contents for part in each.parts or ()]


def signed_thoughts(request: LlmRequest) -> list[bytes]:
    """The signatures of the thoughts in a request."""
    parts = [part for each in request.contents for part in each.parts or ()]
    return [p.thought_signature for p in parts if p.thought and p.thought_signature]


def drop_thought(request: LlmRequest, signature: bytes) -> None:
    """Takes one thought out."""
    copied(request)
    for content in request.contents:
        parts = content.parts or []
        content.parts = [p for p in parts if p.thought_signature != signature]


def change_system(request: LlmRequest) -> None:
    """Adds to the instruction."""
    request.config.system_instruction = f"{request.config.system_instruction} Else."


def shorten_result(request: LlmRequest) -> None:
    """Shortens the first result."""
    results = [p.function_response for p in copied(request) if p.function_response]
    for result in results[:1]:
        result.response = {"result": "…"}


def describe_tool(request: LlmRequest) -> None:
    """Describes a function anew."""
    (tool,) = (each.model_copy(deep=True) for each in request.config.tools or ())  # type: ignore[union-attr]
    assert isinstance(tool, types.Tool)
    assert tool.function_declarations
    tool.function_declarations[0].description = "Else."
    request.config.tools = [tool]


def remove_tool(request: LlmRequest) -> None:
    """Declares a function less."""
    (tool,) = (each.model_copy(deep=True) for each in request.config.tools or ())  # type: ignore[union-attr]
    assert isinstance(tool, types.Tool)
    kept = [e for e in tool.function_declarations or () if e.name != "weigh"]
    tool.function_declarations = kept
    request.config.tools = [tool]


def insert_text(request: LlmRequest) -> None:
    """Puts a text before the first message."""
    request.contents = [user("Else."), *request.contents]


CHANGES = (change_system, shorten_result, describe_tool, remove_tool, insert_text)


@pytest.mark.quick("describe_tool")
@pytest.mark.parametrize("change", some_slow(CHANGES, shorten_result, remove_tool))
async def test_what_another_plugin_changes_costs_no_turn(
    serve: Serve, change: Callable[[LlmRequest], None]
) -> None:
    """Before the guard and from the middle of a turn on; thoughts are still sent."""
    number = CHANGES.index(change)
    for guard in (None, [*STRATEGIES.values()][number % 3]):
        counts = itertools.count()

        def alter(request: LlmRequest, counts: Any = counts) -> None:
            if next(counts) > 4:
                change(request)

        player = make_player(
            "bound",
            serve,
            {"redacts": number % 2 == 1},
            strategy=guard,
            before=lambda alter=alter: [Changing(alter)],
        )
        await player.play(turns=4 if guard else 2, calls=3)
        assert bool(player.lost) is not bool(guard)
    check_played(player, compactions=1)
    assert sum(bool(sent_thoughts(e.body)) for e in player.fake.of_agent) >= 8


async def test_a_thought_that_another_plugin_takes_costs_one_more_request(
    serve: Serve,
) -> None:
    """Behind the guard; before it none, and without a guard turns are lost."""
    for guard, place, refusals in (
        (PIPELINE, "after", 1),
        (PIPELINE, "before", 0),
        (None, "before", 0),
    ):
        taken: list[bytes] = []

        def take(request: LlmRequest, taken: list[bytes] = taken) -> None:
            signatures = signed_thoughts(request)
            if len(signatures) > 3 and not taken:
                taken.append(signatures[1])
            for signature in taken:
                drop_thought(request, signature)

        change: Body = {place: lambda take=take: [Changing(take)]}
        player = make_player("bound", serve, strategy=guard, **change)
        await player.play(turns=4 if guard else 2, calls=4)
        if guard:
            check_played(player, refusals=refusals)
        else:
            assert player.lost


numbers = itertools.count()


def instruct(_: object) -> str:
    """An instruction that no call repeats."""
    return f"{INSTRUCTION} Call {next(numbers)}."


FEATURES: dict[str, Body] = {
    "static": {
        "agent": {"static_instruction": INSTRUCTION, "instruction": "Count crates."}
    },
    "state": {"agent": {"instruction": f"{INSTRUCTION} Shelves: {{shelves?}}."}},
    "instruction": {"agent": {"instruction": instruct}},
    "compaction": {
        "app": {
            "events_compaction_config": EventsCompactionConfig(
                compaction_interval=2, overlap_size=0
            )
        }
    },
}


async def play_feature(player: Player, turns: int) -> None:
    """Plays turns that each change session state."""
    for number in range(turns):
        await player.set_state({"shelves": number})
        await player.say(player.steps(4, has_log=number == 2))


@pytest.mark.parametrize(
    "feature", ["static", "state", *slow("instruction", "compaction")]
)
async def test_features_of_adk_cost_no_turn_with_a_guard(
    serve: Serve, feature: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without one turns are lost; what changes on every call is warned of once."""
    player = make_player("bound", serve, **FEATURES[feature])
    await play_feature(player, turns=3)
    assert player.lost
    words = {each.partition(":")[2] for each in player.fake.refused}
    expected = (REFUSALS["claude bound"], REFUSALS["claude first role"])
    assert words <= {each.partition(":")[2] for each in expected}

    player = make_player("bound", serve, strategy=PIPELINE, **FEATURES[feature])
    await play_feature(player, turns=4)

    check_played(player, compactions=0 if feature == "compaction" else 2)
    logged = [r for r in caplog.records if r.name.startswith("contextguard_adk")]
    warned = [r for r in logged if r.levelname == "WARNING" and "thought" in r.message]
    assert len(warned) <= 1
    assert warned or feature not in ("instruction", "static")


async def test_a_message_that_was_nothing_but_a_thought_goes_with_it(
    serve: Serve,
) -> None:
    """No content is left without parts; the user speaks twice, which is accepted."""
    fake = FakeClaude(takes_thoughts_alone=True)
    serve(fake)
    seen: list[types.Content] = []
    player = play_claude(
        fake,
        strategy=PIPELINE,
        after=lambda: [Changing(lambda request: seen.extend(request.contents))],
        **FEATURES["instruction"],
    )
    await player.say([""])
    assert player.turns.pop().is_lost

    await player.play(turns=4, calls=4)

    check_played(player)
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
    "gemini": lambda address: Gemini(model="gemini-flash-latest", base_url=address),
    "deepseek": lambda address: lite("deepseek/deepseek-v4-pro", address),
}


@pytest.mark.parametrize(
    "case",
    [
        "claude to gemini",
        *slow("claude to other claude", "claude to deepseek"),
        *slow("gemini to claude, litellm"),
    ],
)
async def test_another_model_goes_on_in_the_same_session(
    serve: Serve, case: str
) -> None:
    """There and back again; each gets thoughts that it can read."""
    fakes: dict[str, FakeProvider] = {
        "claude": FakeClaude(),
        "gemini": FakeGemini(),
        "deepseek": FakeOpenAI(kind="deepseek"),
    }
    address = serve(*fakes.values())
    player = play_claude(FakeClaude(), strategy=PIPELINE)

    for name in case.split(" to ") * 2:
        fake = fakes["claude" if "claude" in name else name]
        await player.change(fake=fake, llm=lambda name=name: MODELS[name](address))
        await player.play(turns=2, calls=3)

    assert not player.lost
    assert not [words for fake in fakes.values() for words in fake.refused]
    assert len(player.compactions) >= 2


async def test_a_request_that_was_too_long_stays_as_it_was_accepted(
    serve: Serve,
) -> None:
    """What was sent again is the beginning of the next request."""
    fake = FakeClaude(window_tokens=WINDOW)
    serve(fake)
    player = play_claude(fake, strategy=Threshold(context_window=5 * WINDOW))

    await player.play(turns=3, calls=4)

    assert not player.lost
    assert 1 <= len(fake.refused) <= 2
    assert all("too long" in words for words in fake.refused)
    number = [bool(each.refused) for each in fake.of_agent].index(True)
    again, after = (e.body["messages"] for e in fake.of_agent[number + 1 : number + 3])
    assert after[: len(again)] == again


NEEDS: list[tuple[Any, ...]] = [
    ("bound", "claude bound", 1, 0),
    ("enabled", "claude expected", 7, "tool_use"),
    ("gemini", "gemini no signature", "look_up", 7),
    *slow(
        ("bound", "claude signature", 1, 0),
        ("bound", "claude data", 1, 0),
        ("bound", "claude unanswered", 7, "toolu_1_0"),
        ("bound", "claude orphan", 7, 0, "toolu_1_0"),
        ("adaptive", "claude modified", 7, 0),
        ("gemini", "gemini unsigned call"),
        ("gemini", "gemini wrong signature"),
        ("gemini", "gemini moved signature"),
        ("gemini", "gemini call order"),
        ("gemini", "gemini answer count"),
        ("deepseek", "deepseek reasoning"),
        ("deepseek", "deepseek index", 3),
        ("kimi", "kimi reasoning", 3),
        ("vllm-mistral", "vllm alternate"),
        ("openai", "openai unanswered", "c00000100"),
    ),
]


@pytest.mark.parametrize("need", NEEDS, ids=str)
async def test_what_is_refused_is_sent_once_more(
    serve: Serve, need: tuple[Any, ...]
) -> None:
    """In a form that is accepted, and the session goes on."""
    name, *rule = need
    words = RefusalError(*rule).words
    player = make_player(name, serve, strategy=PIPELINE)
    fake = player.fake
    await player.play(turns=1, calls=3, log_turn=9)
    fake.refuse_next(words, after=2)
    refused = len(fake.of_agent) + 2
    await player.play(turns=2, calls=4)

    check_played(player, compactions=1, refusals=1)
    assert fake.of_agent[refused].refused == words
    if isinstance(fake, FakeClaude) and "Invalid" in words:
        old, *sent = (sent_thoughts(e.body) for e in fake.of_agent[refused:])
        assert old
        assert not any(old & each for each in sent)

    player = make_player(name, serve, strategy=PIPELINE)
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


def approve(what: str) -> None:
    """Asks a human, who says nothing yet."""


@pytest.mark.quick("adaptive")
@pytest.mark.parametrize("name", ["adaptive", "gemini", *slow("openai")])
async def test_providers_that_want_a_result_get_one(serve: Serve, name: str) -> None:
    """From the first refusal on, through ADK's own classes, over compactions."""
    tools = [*TOOLS, LongRunningFunctionTool(approve)]
    strategy = Threshold(context_window=5_000)
    player = make_player(name, serve, strategy=strategy, agent={"tools": tools})
    for number in range(6):
        asked = ("approve", {"what": f"order-{number}"})
        steps = player.steps(3, has_log=number == 1)
        await player.say([[asked, *steps[0]], *steps[1:]])

    assert not player.lost
    assert player.compactions

    refused = [each for each in player.fake.of_agent if each.refused]
    assert len(refused) <= 1
