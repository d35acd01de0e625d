"""What providers demand of a history holds, whatever becomes of it.

Compactions, plugins, features of ADK, other models in mid session and refusals: real
clients, with fake providers behind them that refuse as the real ones do.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.context_cache_config import ContextCacheConfig
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

from contextguard_adk import Threshold, request_compaction
from tests import fake_claude
from tests.builders import event, model, user
from tests.chats import Changing, slow
from tests.fake_claude import FakeClaude
from tests.fake_gemini import FakeGemini
from tests.fake_openai import CONVERSE_MODEL, FakeConverse, FakeOpenAI
from tests.fake_provider import REFUSALS, FakeProvider, RefusalError
from tests.playing import (
    CLAUDES,
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
    streams_signatures,
    thinking,
    tool_names,
)
from tests.protocols import Reply

pytestmark = [
    # Those of the clients and of the database, none of which is ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

Serve = Callable[..., str]
Body = dict[str, Any]

WINDOW = 6_000
NAMES = ("threshold", "sliding", "pipeline")
STRATEGIES = dict(zip(NAMES, strategies(WINDOW).values(), strict=True))
THRESHOLD, PIPELINE = STRATEGIES["threshold"], STRATEGIES["pipeline"]


class OtherModel(FakeClaude):
    """One behind Anthropic's API that wants its thoughts back, signed or not."""

    signature = ""

    def check(self, body: Body) -> None:
        """Refuses calls without the thought before them."""
        messages = fake_claude.read_messages(body)
        fake_claude.check_shape(messages, has_tools=bool(body.get("tools")))
        for message in messages:
            kinds = [each["type"] for each in message["content"]]
            if "tool_use" in kinds and kinds[0] != "thinking":
                raise RefusalError("deepseek reasoning")

    def answer(self, body: Body, reply: Reply) -> Any:
        """The body of an answer with a thought."""
        answer = super().answer(body, reply)
        signature = self.signature and f"{self.signature}{reply.number}"
        thought = {"type": "thinking", "thinking": reply.thought}
        kept = [e for e in answer["content"] if e["type"] != "thinking"]
        return answer | {"content": [thought | {"signature": signature}, *kept]}


def make_player(
    name: str, serve: Serve, rules: dict[str, Any] | None = None, **settings: Any
) -> Player:
    """A player of one of the providers; "!" has it follow its stricter rules."""
    kind: Any = name.rstrip("!")
    if kind in CLAUDES:
        serve(bound := FakeClaude(kind=kind, **(rules or {})))
        return play_claude(bound, **settings)
    if kind in ("signed", "unsigned"):
        serve(other := OtherModel(kind="adaptive"))
        other.signature = "signature-" if kind == "signed" else ""
        return play_claude(other, llm=lambda: claude("kimi-k2-thinking"), **settings)
    if kind == "gemini":
        return play_gemini(gemini := FakeGemini(), serve(gemini), **settings)
    if kind == "converse":
        address = serve(converse := FakeConverse())
        return Player(converse, lambda: lite(CONVERSE_MODEL, address), **settings)
    chat = FakeOpenAI(kind=kind, is_strict=kind != name)
    return play_chat(chat, serve(chat), **settings)


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
    assert len({*map(tool_names, fake.of_agent)}) == 1


@pytest.mark.parametrize(
    "case",
    [
        "bound threshold redacts",
        "bound sliding streams",
        "bound pipeline restarts",
        "adaptive threshold redacts streams",
        "unsigned threshold",
        "gemini pipeline",
        "deepseek! threshold",
        "vllm-mistral sliding",
        *slow("enabled sliding redacts restarts", "enabled pipeline streams"),
        *slow("adaptive sliding restarts", "signed pipeline", "gemini sliding"),
        *slow("converse threshold", "openai pipeline", "deepseek pipeline restarts"),
        *slow("kimi! sliding restarts", "kimi threshold", "mistral pipeline"),
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
        {"redacts": "redacts" in ways},
        strategy=STRATEGIES[strategy],
        database=str(tmp_path / "sessions.db") if "restarts" in ways else None,
        is_streaming="streams" in ways,
    )

    await player.play(turns=5, calls=4)
    for _ in range(2):
        names = ("look_up", "read_log", "weigh")
        await player.say([player.calls(*names), player.calls("look_up", "look_up")])
    await player.play(turns=2, calls=4)

    check(player)
    assert "cannot be sent again" not in caplog.text


@pytest.mark.parametrize(
    "case",
    [
        "enabled threshold",
        "alias-of-bound pipeline",
        "gemini threshold",
        *slow("bound sliding", "adaptive pipeline", "enabled sliding"),
        *slow("alias-of-enabled threshold", "alias-of-adaptive sliding"),
        *slow("signed threshold", "gemini sliding", "gemini pipeline"),
        *slow("converse sliding", "openai threshold", "vllm-mistral pipeline"),
        *slow("deepseek! pipeline", "kimi! threshold", "mistral sliding"),
    ],
)
async def test_a_compaction_within_a_turn_is_accepted(serve: Serve, case: str) -> None:
    """Calls stay with thoughts and signatures; unknown names cost one refusal."""
    name, strategy = case.split()
    *alias, kind = name.split("-of-")
    player = make_player(kind, serve, strategy=STRATEGIES[strategy])
    if alias:
        player.llm = lambda: claude("my-alias")

    await player.play(turns=1, calls=3, log_turn=0)
    await player.play(turns=1, calls=30)
    await player.play(turns=3, calls=4)

    if name == "alias-of-bound":
        check_played(player, refusals=1)
    else:
        check(player)


async def test_the_template_of_gemma_accepts_a_compacted_history(serve: Serve) -> None:
    """User and assistant alternate, with nothing left out of account."""
    tools: dict[str, Any] = {"tools": []}
    player = make_player("vllm-gemma", serve, strategy=THRESHOLD, agent=tools)

    for number in range(12):
        await player.say(text=f"Request {number}: " + "count the crates, " * 250)

    check_played(player)


def continue_interaction(request: LlmRequest) -> None:
    """Has the provider hold the history."""
    request.previous_interaction_id = "interaction"


@pytest.mark.parametrize(
    "name", ["bound", "unsigned", "signed", "interaction", *slow("enabled", "adaptive")]
)
async def test_below_the_threshold_requests_leave_as_without_a_guard(
    serve: Serve, name: str
) -> None:
    """But for a tool that may be offered; so they do where the provider has them."""
    strategy, settings = Threshold(context_window=200_000), dict[str, Any]()
    if name == "interaction":
        name, strategy = "gemini", Threshold(context_window=WINDOW)
        settings["before"] = lambda: [Changing(continue_interaction)]
    bodies = []
    for guard in (None, strategy):
        player = make_player(name, serve, strategy=guard, **settings)
        await player.play(turns=5, calls=4)
        check_played(player, compactions=0)
        assert not player.compactions
        bodies.append([{**e.body, "tools": None} for e in player.fake.of_agent])
        assert len({json.dumps(e.body.get("tools")) for e in player.fake.of_agent}) == 1
    assert bodies[0] == bodies[1]
    assert ("Thought 1:" in json.dumps(bodies[0][-1])) is (name != "gemini")


async def test_a_preview_costs_no_thought(serve: Serve) -> None:
    """A large result is shortened before the model has seen it."""
    serve(fake := FakeClaude())
    strategy = Threshold(context_window=30_000, preview_tokens=500)
    player = play_claude(fake, strategy=strategy)

    await player.play(turns=4, calls=4)

    check_played(player, compactions=0)
    bodies = [each.body for each in fake.of_agent]
    assert len(sent_thoughts(bodies[-1])) == len(fake.issued) - 1
    assert len(str(bodies[6])) - len(str(bodies[5])) < 3_000
    assert len({*map(tool_names, fake.of_agent)}) == 1
    for before, after in itertools.pairwise(each["messages"] for each in bodies):
        assert after[: len(before)] == before


@pytest.mark.parametrize("name", ["threshold", *slow("sliding", "pipeline")])
async def test_a_summary_at_the_beginning_of_a_turn_takes_the_thoughts_before_it(
    serve: Serve, name: str
) -> None:
    """And no others, in this and every later summary."""
    serve(fake := FakeClaude())
    update = {"context_window": 60_000}
    if name == "sliding":
        update["max_messages"] = 1_000
    player = play_claude(fake, strategy=STRATEGIES[name].model_copy(update=update))
    await player.play(turns=3, calls=4)

    for _ in range(3):
        await player.compact()
        await player.play(turns=1, calls=4, log_turn=9)

    check(player, compactions=3)
    for begin in player.compacted_at:
        answers = [each.answer for each in fake.of_agent[:begin]]
        old = sent_thoughts({"messages": answers})
        assert old
        assert not any(old & sent_thoughts(e.body) for e in fake.of_agent[begin:])


async def test_a_session_older_than_the_guard_gets_the_tool_with_its_first_summary(
    serve: Serve,
) -> None:
    """Until then its thoughts are sent; then the tool stays."""
    serve(fake := FakeClaude())
    player = play_claude(fake)
    await player.play(turns=2, calls=3, log_turn=9)
    old = tool_names(fake.of_agent[-1])

    await player.change(strategy=THRESHOLD)
    await player.play(turns=6, calls=4, log_turn=1)

    check_played(player)
    check_thoughts_since_compaction(player)
    names = [tool_names(each) for each in fake.of_agent]
    assert [key for key, _ in itertools.groupby(names)] == [old, names[-1]]
    assert names.index(names[-1]) == player.compacted_at[0]


def add_picture(request: LlmRequest) -> None:
    """Puts a picture beside what `weigh` says."""
    blob = types.FunctionResponseBlob(mime_type="image/png", data=b"picture")
    picture = types.FunctionResponsePart(inline_data=blob)
    for part in copied(request):
        if part.function_response and part.function_response.name == "weigh":
            part.function_response.parts = [picture]


@pytest.mark.parametrize("name", slow("bound", "openai", "mistral"))
async def test_a_picture_in_a_result_is_sent_as_without_a_guard(
    serve: Serve, name: str
) -> None:
    """No turn is lost that is not lost without one."""
    lost = []
    for guard in (None, THRESHOLD):
        settings: Body = {"strategy": guard, "before": lambda: [Changing(add_picture)]}
        player = make_player(name, serve, **settings)
        for _ in range(7):
            await player.say([player.calls("weigh"), *player.steps(3)])
        lost.append(len(player.lost))
        if name != "mistral":
            check_played(player, compactions=2 if guard else 0)
    assert lost[1] <= lost[0]


async def test_a_cache_of_gemini_is_made_anew_only_with_a_summary(serve: Serve) -> None:
    """Nothing that is cached changes in between."""
    cache = ContextCacheConfig(min_tokens=0, cache_intervals=100)
    player = play_gemini(
        fake := FakeGemini(),
        serve(fake),
        app={"context_cache_config": cache},
        agent={"instruction": "You count shelves. " * 1_000},
        strategy=Threshold(context_window=14_000),
    )

    await player.play(turns=8, calls=4)

    check_played(player)
    assert any("cachedContent" in each.body for each in fake.of_agent)
    assert len(fake.deleted) <= len(player.compactions)


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


def change_system(request: LlmRequest, _: int, mark: str) -> None:
    """Adds to the instruction."""
    request.config.system_instruction = f"{request.config.system_instruction} {mark}"


def shorten_result(request: LlmRequest, number: int, _: str = "") -> None:
    """Shortens one result."""
    results = [p.function_response for p in copied(request) if p.function_response]
    for result in results[number : number + 1]:
        result.response = {"result": "…"}


def change_tools(request: LlmRequest, number: int, mark: str) -> None:
    """Declares a function less or one more, or describes one anew."""
    (tool,) = (each.model_copy(deep=True) for each in request.config.tools or ())  # type: ignore[union-attr]
    assert isinstance(tool, types.Tool)
    found, name = tool.function_declarations or [], mark.replace(" ", "_")
    if number == 0:
        found = [each for each in found if each.name != "weigh"]
    elif number == 1:
        found.append(types.FunctionDeclaration(name=name, description="Does nothing."))
    else:
        found[0].description = mark
    tool.function_declarations = [*{each.name: each for each in found}.values()]
    request.config.tools = [tool]


def change_text(request: LlmRequest, number: int, mark: str) -> None:
    """Puts a text in the place of one of the user's messages, or before it."""
    contents, width = [*request.contents], len(mark) % 2
    users = [c.role == "user" and any(p.text for p in c.parts or ()) for c in contents]
    texts = [index for index, is_text in enumerate(users) if is_text]
    for index in texts[number : number + 1]:
        contents[index : index + width] = [user(mark)]
    request.contents = contents


class Drops:
    """Takes a thought out: the second one that it ever saw from every request, or the
    newest one from the fifth request alone."""

    def __init__(self, is_once: bool) -> None:
        self.is_once, self.count, self.signature = is_once, 0, b""

    def __call__(self, request: LlmRequest) -> None:
        self.count += 1
        signatures = signed_thoughts(request)
        if self.is_once and self.count == 5:
            drop_thought(request, signatures[-1])
        if not self.is_once and len(signatures) > 3:
            self.signature = self.signature or signatures[1]
        if self.signature:
            drop_thought(request, self.signature)


@pytest.mark.parametrize("is_once", [False, *slow(True)])
async def test_a_thought_that_another_plugin_takes_costs_one_more_request(
    serve: Serve, is_once: bool
) -> None:
    """Behind the guard; before it none, and without a guard turns are lost."""
    for guard, place, refusals in (
        (PIPELINE, "after", 1),
        (PIPELINE, "before", 0),
        (None, "before", 0),
    ):
        change = Changing(Drops(is_once))
        place_it: Body = {place: lambda change=change: [change]}
        player = make_player("bound", serve, strategy=guard, **place_it)
        await player.play(turns=7 if guard else 2, calls=4)
        if guard:
            check_played(player, refusals=refusals)
        else:
            assert player.lost


CHANGES: dict[str, tuple[Callable[[LlmRequest], None], int]] = {
    "a tool": (lambda request: change_tools(request, 2, "Else."), 0),
    "the fourth result": (lambda request: shorten_result(request, 3), 5),
}
"""A change, and how many thoughts stand before it."""


@pytest.mark.parametrize(("change", "kept"), CHANGES.values(), ids=CHANGES)
async def test_what_changes_late_costs_the_thoughts_behind_it_once(
    serve: Serve, change: Callable[[LlmRequest], None], kept: int
) -> None:
    """Those before it stay, and so do all that are written afterwards."""
    serve(fake := FakeClaude())
    plugins, roomy = list[BasePlugin](), Threshold(context_window=60_000)
    player = play_claude(fake, strategy=roomy, before=lambda: plugins)
    await player.play(turns=3, calls=3, log_turn=9)
    old = [*fake.issued]
    plugins.append(Changing(change))
    await player.change()
    await player.play(turns=2, calls=3, log_turn=9)

    check_played(player, compactions=0)
    last = sent_thoughts(fake.of_agent[-1].body)
    assert last == {*fake.issued} - {*old[kept:], [*fake.issued][-1]}


async def ship(shelf: int) -> Body:
    """Ships what is on a shelf, which takes days."""
    return {"status": "pending"}


def use_feature(feature: str) -> dict[str, Any]:
    """Settings of a player with a feature of ADK that changes histories."""
    counter = itertools.count()
    match feature:
        case "instruction":
            said = lambda _: f"{INSTRUCTION} Call {next(counter)}."  # noqa: E731
            return {"agent": {"instruction": said}}
        case "state":
            said_of = f"{INSTRUCTION} Shelves so far: {{shelves?}}."
            return {"agent": {"instruction": said_of}}
        case "static":
            dynamic = {"instruction": "Count crates as well."}
            return {"agent": {"static_instruction": INSTRUCTION, **dynamic}}
        case "memory":
            services: Body = {"memory_service": InMemoryMemoryService()}
            tools: list[Any] = [*TOOLS, PreloadMemoryTool()]
        case "artifacts":
            services = {"artifact_service": InMemoryArtifactService()}
            tools = [*TOOLS, LoadArtifactsTool()]
        case "long running":
            services, tools = {}, [*TOOLS, LongRunningFunctionTool(ship)]
        case "compaction":
            config = EventsCompactionConfig(compaction_interval=2, overlap_size=0)
            return {"app": {"events_compaction_config": config}}
        case _:
            return {}
    return {"agent": {"tools": tools}, "services": services}


async def play_feature(player: Player, feature: str, turns: int) -> None:
    """Plays turns in which the feature does its work."""
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
    for number in range(turns):
        steps = player.steps(4, has_log=number == 2)
        if feature == "state":
            await player.set_state({"shelves": number})
        if feature == "artifacts":
            steps.insert(1, [("load_artifacts", {"artifact_names": ["shelf.txt"]})])
        if feature != "long running":
            await player.say(steps)
            continue
        await player.say([*steps[:1], player.calls("ship"), *steps[1:]])
        events = await player.events()
        calls = [call for each in events for call in each.get_function_calls()]
        late: Body = {"name": "ship", "response": {"status": "shipped"}}
        late["id"] = [call.id for call in calls if call.name == "ship"][-1]
        answer = types.Part(function_response=types.FunctionResponse(**late))
        await player.say(text=types.Content(role="user", parts=[answer]))


@pytest.mark.parametrize(
    "feature",
    [
        *("static", "state"),
        *slow("instruction", "memory", "artifacts", "long running", "compaction"),
    ],
)
async def test_features_of_adk_cost_no_turn_with_a_guard(
    serve: Serve, feature: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without one turns are lost; what changes on every call is warned of once."""
    player = make_player("bound", serve, **use_feature(feature))
    await play_feature(player, feature, turns=3)
    assert player.lost
    words = {each.partition(":")[2] for each in player.fake.refused}
    expected = (REFUSALS["claude bound"], REFUSALS["claude first role"])
    assert words <= {each.partition(":")[2] for each in expected}

    player = make_player("bound", serve, strategy=PIPELINE, **use_feature(feature))
    await play_feature(player, feature, turns=6)

    check_played(player, compactions=0 if feature == "compaction" else 2)
    logged = [r for r in caplog.records if r.name.startswith("contextguard_adk")]
    warned = [r for r in logged if r.levelname == "WARNING" and "thought" in r.message]
    assert len(warned) <= 1
    assert warned or feature not in ("instruction", "static")


@pytest.mark.parametrize("kind", ["bound", *slow("adaptive")])
async def test_thoughts_without_a_text_are_sent_as_thoughts(
    serve: Serve, kind: Any
) -> None:
    """Redacted ones stay as they were, and all keep their order."""
    serve(fake := FakeClaude(kind=kind, redacts=True, display="omitted"))
    agent = {"generate_content_config": None}
    player = play_claude(fake, strategy=PIPELINE, agent=agent)

    await player.play(turns=7, calls=4)

    check(player)
    order = [*fake.issued]
    for exchange in fake.of_agent:
        messages = exchange.body["messages"]
        sent = [block for *_, block in fake_claude.list_thoughts(messages)]
        assert all(block.get("thinking", ".") for block in sent)
        keys = [order.index(fake_claude.signature_of(block)) for block in sent]
        assert keys == sorted(keys)


@pytest.mark.parametrize("feature", ["instruction", *slow("none")])
async def test_a_message_that_was_nothing_but_a_thought_goes_with_it(
    serve: Serve, feature: str
) -> None:
    """No content is left without parts; the user speaks twice, which is accepted."""
    serve(fake := FakeClaude(takes_thoughts_alone=True))
    seen: list[types.Content] = []
    player = play_claude(
        fake,
        strategy=PIPELINE,
        after=lambda: [Changing(lambda request: seen.extend(request.contents))],
        **use_feature(feature),
    )
    await player.say([""])
    assert player.turns.pop().is_lost

    await player.play(turns=7, calls=4)

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
    "gemini": lambda address: Gemini(model="gemini-3-pro-preview", base_url=address),
    "deepseek": lambda address: lite("deepseek/deepseek-reasoner", address),
}


@pytest.mark.parametrize(
    "case",
    [
        "claude to gemini",
        *slow("claude to other claude", "claude to claude, litellm"),
        *slow("claude to deepseek", "gemini to claude, litellm"),
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
        await player.play(turns=3, calls=3)

    assert not player.lost
    assert not [words for fake in fakes.values() for words in fake.refused]
    assert len(player.compactions) >= 2


def transferring(llm: BaseLlm) -> LlmAgent:
    """An agent that can hand over to another one."""
    shared: Body = {"model": llm, "tools": [*TOOLS], "instruction": INSTRUCTION}
    shared["generate_content_config"] = thinking(-1)
    other = LlmAgent(name="other", description="Counts crates.", **shared)
    return LlmAgent(name="agent", sub_agents=[other], **shared)


SETUPS: dict[str, dict[str, Any]] = {
    "transfer": {"root": transferring},
    "no contents": {"agent": {"include_contents": "none"}},
    "planner": {"agent": {"planner": PlanReActPlanner()}},
}


@pytest.mark.parametrize("setup", slow(*SETUPS))
async def test_other_ways_to_build_an_agent_are_refused_nothing(
    serve: Serve, setup: str
) -> None:
    """Agents that transfer, that see no history, and that plan in their answers."""
    player = make_player("bound", serve, strategy=PIPELINE, **SETUPS[setup])
    for number in range(6):
        steps = player.steps(4, has_log=number == 1)
        if setup == "transfer":
            name = "agent" if number % 2 else "other"
            steps.insert(2, [("transfer_to_agent", {"agent_name": name})])
        await player.say(steps)
    check_played(player, compactions=setup != "no contents")


@pytest.mark.parametrize("kind", ["bound", *slow("enabled", "adaptive")])
async def test_a_request_that_was_too_long_stays_as_it_was_accepted(
    serve: Serve, kind: Any
) -> None:
    """What was sent again is the beginning of the next request."""
    serve(fake := FakeClaude(kind=kind, window_tokens=WINDOW))
    player = play_claude(fake, strategy=Threshold(context_window=5 * WINDOW))

    await player.play(turns=5, calls=4)

    assert not player.lost
    assert 1 <= len(fake.refused) <= 2
    assert all("too long" in words for words in fake.refused)
    number = [bool(each.refused) for each in fake.of_agent].index(True)
    again, after = (e.body["messages"] for e in fake.of_agent[number + 1 : number + 3])
    assert after[: len(again)] == again


NEEDS: list[tuple[Any, ...]] = [
    ("bound", "claude bound", 1, 0),
    ("bound", "claude signature", 1, 0),
    ("bound", "claude data", 1, 0),
    ("bound", "claude unanswered", 7, "toolu_1_0"),
    ("bound", "claude orphan", 7, 0, "toolu_1_0"),
    ("adaptive", "claude modified", 7, 0),
    ("enabled", "claude modified", 7, 0),
    ("enabled", "claude expected", 7, "tool_use"),
    ("gemini", "gemini no signature", "look_up", 7),
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
]
FAST = ("claude bound", "claude expected", "gemini no signature")


@pytest.mark.parametrize(
    ("name", "rule", "places"),
    [
        pytest.param(
            *each[:2], each[2:], marks=[pytest.mark.slow] * (each[1] not in FAST)
        )
        for each in NEEDS
    ],
)
async def test_what_is_refused_is_sent_once_more(
    serve: Serve, name: str, rule: str, places: tuple[object, ...]
) -> None:
    """In a form that is accepted, and the session goes on; refused again, it ends the
    turn with the same words, and the next turn is answered."""
    words = RefusalError(rule, *places).words
    player = make_player(name, serve, strategy=PIPELINE)
    fake = player.fake
    await player.play(turns=1, calls=3, log_turn=9)
    fake.refuse_next(words, after=2)
    refused = len(fake.of_agent) + 2
    await player.play(turns=3, calls=4)

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


KINDS: list[Callable[[LlmRequest, int, str], None]]
KINDS = [change_system, shorten_result, change_tools, change_text]


class Edits(BasePlugin):
    """Edits histories before the guard sees them; what was edited stays so."""

    def __init__(self, seed: int) -> None:
        super().__init__(name="edits")
        self.chance = random.Random(seed)
        self.edits: list[Callable[[LlmRequest], None]] = []

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Makes all edits so far, and at times a new one, or has it compacted."""
        signatures = signed_thoughts(llm_request)
        is_fourth = len(signatures) == 3 and not self.edits
        if is_fourth or self.chance.random() < 0.25:
            self.edits.append(self.choose(signatures, is_fourth))
        if self.chance.random() < 0.08:
            request_compaction(callback_context.state)
        for edit in self.edits:
            edit(llm_request)

    def choose(
        self, signatures: Sequence[bytes], is_fourth: bool
    ) -> Callable[[LlmRequest], None]:
        """A new edit; the first one changes the instruction, which all can see."""
        chance = self.chance
        number, mark = chance.randrange(4), f"edit {chance.randrange(1_000)}"
        position = chance.randrange(len(KINDS) + (len(signatures) > 2))
        if position == len(KINDS) and not is_fourth:
            middle = signatures[chance.randrange(1, len(signatures) - 1)]
            return lambda request: drop_thought(request, middle)
        kind = change_system if is_fourth else KINDS[position]
        return lambda request: kind(request, number, mark)


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 16))])
async def test_random_edits_are_refused_nothing_with_a_guard(
    serve: Serve, tmp_path: Path, seed: int
) -> None:
    """Whatever is changed, taken or put in, and whenever; thoughts are still sent, and
    without a guard turns are lost."""
    database = str(tmp_path / "sessions.db") if seed % 5 == 2 else None
    guard = [*STRATEGIES.values()][seed % 3]
    for settings in ({}, {"strategy": guard, "database": database}):
        edits, rules = Edits(seed), {"redacts": seed % 2 == 1}
        player = make_player(
            "bound", serve, rules, before=lambda edits=edits: [edits], **settings
        )
        await player.play(turns=10, calls=2)
        assert bool(player.lost) is not bool(settings)

    check_played(player, compactions=0)
    assert sum(bool(sent_thoughts(e.body)) for e in player.fake.of_agent) >= 8
