"""The fake providers refuse what the real ones refuse, and nothing else."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable
from typing import Any

import pytest
from google.adk.agents.context_cache_config import ContextCacheConfig
from google.adk.models.llm_request import LlmRequest

from tests import fake_claude, fake_gemini, fake_openai
from tests.chats import Changing
from tests.fake_claude import FakeClaude
from tests.fake_gemini import FakeGemini
from tests.fake_openai import CONVERSE_MODEL, FakeConverse, FakeOpenAI
from tests.fake_provider import FakeProvider
from tests.playing import (
    CHATS,
    CLAUDES,
    Player,
    lite,
    play_chat,
    play_claude,
    play_gemini,
    streams_signatures,
)

Serve = Callable[..., str]
Body = dict[str, Any]
Change = Callable[[Body], None]

pytestmark = [
    # Those of the clients, none of which is ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("redacts", [False, True], ids=["", "redacted"])
@pytest.mark.parametrize("kind", CLAUDES)
async def test_claude_accepts_what_is_unchanged(
    serve: Serve, kind: Any, redacts: bool, is_streaming: bool
) -> None:
    """All thoughts come back as they were, behind what they were written behind."""
    if is_streaming and not streams_signatures():
        pytest.skip("this ADK loses signatures of streamed thoughts")
    fake = FakeClaude(kind=kind, redacts=redacts)
    serve(fake)
    player = play_claude(fake, is_streaming=is_streaming)
    await player.play(turns=3, calls=3)
    await player.say([player.calls("look_up", "weigh")])

    assert not player.lost
    assert not fake.refused
    sent = [*fake_claude.list_thoughts(fake.exchanges[-1].body["messages"])]
    assert [block for *_, block in sent] == [
        issued.block for issued in fake.issued.values()
    ][: len(sent)]
    last = len(fake.exchanges[-1].answer["content"]) - 1  # Its thoughts.
    assert len(sent) == len(fake.issued) - last


def message(index: int, content: Any) -> Change:
    """Replaces what one message holds."""
    return lambda body: body["messages"][index].update(content=content)


def block(n: int, m: int, **values: Any) -> Change:
    """Changes fields of one block."""
    return lambda body: body["messages"][n]["content"][m].update(values)


def without_thoughts(begin: int, end: int) -> Change:
    """Takes the thoughts out of these messages."""

    def change(body: Body) -> None:
        for each in body["messages"][begin:end]:
            kept = [b for b in each["content"] if b["type"] not in fake_claude.THOUGHTS]
            each["content"] = kept

    return change


def mark_all(body: Body) -> None:
    """Says of everything that it is to be cached."""
    mark = {"cache_control": {"type": "ephemeral"}}
    body["tools"][-1].update(mark)
    body["system"] = [{"type": "text", "text": body["system"], **mark}]
    body["messages"][0]["content"][-1].update(mark)


def as_redacted(body: Body) -> None:
    """Sends a thought as a redacted one, as ADK does with one that has no text."""
    blocks = body["messages"][1]["content"]
    blocks[0] = {"type": "redacted_thinking", "data": blocks[0]["signature"]}


def begin_with_answer(body: Body) -> None:
    """Leaves the first message out."""
    del body["messages"][0]


def end_with_answer(body: Body) -> None:
    """Leaves the last message out."""
    del body["messages"][-1]


def keep_thought_only(body: Body) -> None:
    """Leaves a message with its thought alone, and what answered it without calls."""
    del body["messages"][1]["content"][1:]
    body["messages"][2]["content"] = [{"type": "text", "text": "Go on."}]


BOUND = fake_claude.BOUND_ELSEWHERE
TEXT = [{"type": "text", "text": "Go on."}]

CHANGES: dict[str, tuple[str, Change, str]] = {
    "system": ("bound", lambda body: body.update(system="Else."), BOUND.format(1, 0)),
    "tool gone": ("bound", lambda body: body["tools"].pop(), BOUND.format(1, 0)),
    "tool described anew": (
        "bound",
        lambda body: body["tools"][0].update(description="Else."),
        BOUND.format(1, 0),
    ),
    "tools in another order": ("bound", lambda body: body["tools"].reverse(), ""),
    "marks": ("bound", mark_all, ""),
    "first message": ("bound", message(0, TEXT), BOUND.format(1, 0)),
    "result shortened": ("bound", block(2, 0, content="…"), BOUND.format(3, 0)),
    "thought gone from the middle": (
        "bound",
        without_thoughts(3, 4),
        BOUND.format(5, 0),
    ),
    "oldest thoughts gone": ("bound", without_thoughts(0, 4), ""),
    "newest thoughts gone": ("bound", without_thoughts(4, 20), ""),
    "all thoughts gone": ("bound", without_thoughts(0, 20), ""),
    "unknown signature": (
        "bound",
        block(1, 0, signature="else"),
        fake_claude.INVALID_SIGNATURE.format(1, 0),
    ),
    "no signature": (
        "bound",
        block(3, 0, signature=""),
        fake_claude.INVALID_SIGNATURE.format(3, 0),
    ),
    "thought changed": (
        "bound",
        block(1, 0, thinking="Else."),
        fake_claude.INVALID_SIGNATURE.format(1, 0),
    ),
    "thought as a redacted one": (
        "bound",
        as_redacted,
        fake_claude.INVALID_DATA.format(1, 0),
    ),
    "begins with an answer": ("bound", begin_with_answer, fake_claude.FIRST_ROLE),
    "ends with an answer": ("bound", end_with_answer, fake_claude.LAST_ROLE),
    "no tools": ("bound", lambda body: body.update(tools=[]), fake_claude.NO_TOOLS),
    "call not answered": (
        "bound",
        message(2, TEXT),
        fake_claude.UNANSWERED.format(1, "toolu_1_0"),
    ),
    "answer without a call": (
        "bound",
        message(1, TEXT),
        fake_claude.ORPHAN.format(2, 0, "toolu_1_0"),
    ),
    "empty text": ("bound", block(0, 0, text=""), fake_claude.EMPTY_TEXT),
    "empty message": ("bound", message(0, []), fake_claude.EMPTY_MESSAGE.format(0)),
    "thought alone": ("bound", keep_thought_only, fake_claude.FINAL_THOUGHT.format(1)),
    "a budget": (
        "bound",
        lambda body: body.update(thinking={"type": "enabled", "budget_tokens": 2_000}),
        fake_claude.NO_BUDGETS,
    ),
    "enabled: system": ("enabled", lambda body: body.update(system="Else."), ""),
    "enabled: result shortened": ("enabled", block(2, 0, content="…"), ""),
    "enabled: older thoughts gone": ("enabled", without_thoughts(0, 8), ""),
    "enabled: last thought gone": (
        "enabled",
        without_thoughts(8, 20),
        fake_claude.EXPECTED_THINKING.format(9, "tool_use"),
    ),
    "enabled: thought changed": (
        "enabled",
        block(9, 0, thinking="Else."),
        fake_claude.MODIFIED.format(9, 0),
    ),
    "adaptive: system": ("adaptive", lambda body: body.update(system="Else."), ""),
    "adaptive: result shortened": ("adaptive", block(8, 0, content="…"), ""),
    "adaptive: older thoughts gone": ("adaptive", without_thoughts(0, 6), ""),
    "adaptive: thought of the turn gone": (
        "adaptive",
        without_thoughts(6, 8),
        fake_claude.MODIFIED.format(7, 0),
    ),
    "adaptive: thought changed": (
        "adaptive",
        block(9, 0, thinking="Else."),
        fake_claude.MODIFIED.format(9, 0),
    ),
}
"""To which model a change is sent, and what it says; "" where it answers."""

_played: dict[str, FakeProvider] = {}


async def played(key: str, player: Player) -> FakeProvider:
    """A fake after two turns of two calls, of which the second may be parallel."""
    if key not in _played:
        first = player.calls("look_up")
        await player.say([first, player.calls("look_up")])
        pair = () if isinstance(player.fake, FakeClaude) else ("weigh",)
        await player.say([player.calls("look_up", *pair), player.calls("look_up")])
        assert not player.lost
        _played[key] = player.fake
    return copy.deepcopy(_played[key])


def send(fake: FakeProvider, change: Change) -> tuple[int, str]:
    """Sends the last request but one again, changed; a status, and what was said."""
    exchange = fake.exchanges[-1]
    body = copy.deepcopy(exchange.body)
    change(body)
    status, _ = fake.receive(exchange.path, body)
    return status, fake.exchanges[-1].refused


@pytest.mark.parametrize(("kind", "change", "words"), CHANGES.values(), ids=[*CHANGES])
async def test_claude_refuses_a_history_that_was_changed(
    serve: Serve, kind: Any, change: Change, words: str
) -> None:
    """Where it may not be changed; it names the first block that is wrong."""
    fake = FakeClaude(kind=kind)
    serve(fake)
    fake_then = await played(kind, play_claude(fake))

    assert send(fake_then, change) == (400 if words else 200, words)


async def test_claude_refuses_a_thought_that_is_put_back(serve: Serve) -> None:
    """What was written without it is bound to its absence."""
    fake = FakeClaude()
    serve(fake)
    player = play_claude(fake)
    await player.play(turns=1, calls=2)
    whole = fake.exchanges[-1].body
    fewer = copy.deepcopy(whole)
    without_thoughts(3, 5)(fewer)
    fake.receive("/messages", fewer)

    for body in (fewer, whole):
        next_body = copy.deepcopy(body)
        said = fake.exchanges[3].answer["content"]
        next_body["messages"] += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": TEXT},
        ]
        fake.receive("/messages", next_body)

    assert fake.refused == [BOUND.format(5, 0)]


async def test_claude_drops_what_is_bound_elsewhere_if_it_is_told_to(
    serve: Serve,
) -> None:
    """Then nothing is refused; nor where the account is not yet held to it."""
    fake = FakeClaude()
    serve(fake)
    await play_claude(fake).play(turns=1, calls=2)
    body = copy.deepcopy(fake.exchanges[-1].body)
    body["system"] = "Else."
    binding = {"prefix_mismatch_behavior": "drop_block"}
    told = copy.deepcopy(body) | {
        "thinking": {"type": "adaptive", "block_binding": binding}
    }
    assert fake.receive("/messages", told)[0] == 200
    assert fake.receive("/messages", body)[0] == 400
    fake.is_enforced = False
    assert fake.receive("/messages", body)[0] == 200


def shorten_late(request: LlmRequest) -> None:
    """Shortens all results but the newest, as many agents do."""
    contents = [each.model_copy(deep=True) for each in request.contents]
    parts = [part for each in contents for part in each.parts or ()]
    for part in [part for part in parts if part.function_response][:-1]:
        assert part.function_response
        part.function_response.response = {"result": "…"}
    request.contents = contents


async def test_an_unguarded_agent_that_shortens_results_loses_its_turns(
    serve: Serve,
) -> None:
    """Through ADK's client, with a bound model; others take it."""
    for kind, lost in (("bound", 2), ("enabled", 0), ("adaptive", 0)):
        fake = FakeClaude(kind=kind)  # type: ignore[arg-type]
        serve(fake)
        player = play_claude(fake, before=lambda: [Changing(shorten_late)])
        await player.play(turns=2, calls=3)
        assert len(player.lost) == lost
        assert {*fake.refused} == ({BOUND.format(3, 0)} if lost else set())


async def test_adk_sends_thoughts_without_a_text_as_redacted_ones(serve: Serve) -> None:
    """Which is refused: without a config a model does not say what it thinks."""
    fake = FakeClaude(display="omitted")
    serve(fake)
    player = play_claude(fake, agent={"generate_content_config": None})
    await player.play(turns=1, calls=2)
    assert fake.refused == [fake_claude.INVALID_DATA.format(1, 0)]


async def test_a_fake_refuses_with_the_words_that_a_test_wants(serve: Serve) -> None:
    """Once for each of them; the user's turn ends with these words."""
    fake = FakeClaude()
    serve(fake)
    player = play_claude(fake)
    fake.refuse_next("Else.")
    assert "Else." in (await player.say()).error
    assert not (await player.say()).is_lost


async def test_claude_is_the_same_behind_litellm(serve: Serve) -> None:
    """It gets the thoughts as it gave them."""
    fake = FakeClaude()
    address = serve(fake)
    asked = {"type": "adaptive", "display": "summarized"}
    model = lite("anthropic/claude-opus-5-5", address, thinking=asked)
    agent = {"generate_content_config": None}
    player = play_claude(fake, llm=lambda: model, agent=agent)
    await player.play(turns=2, calls=2)
    assert not player.lost
    assert len([*fake_claude.list_thoughts(fake.exchanges[-1].body["messages"])]) == 5


def part(n: int, m: int, **values: Any) -> Change:
    """Changes fields of one part; None leaves a field out."""

    def change(body: Body) -> None:
        found = body["contents"][n]["parts"][m]
        found.update(values)
        for name in [name for name, value in values.items() if value is None]:
            del found[name]

    return change


def without(key: str, *numbers: int) -> Change:
    """Leaves contents or messages out."""

    def change(body: Body) -> None:
        body[key] = [each for n, each in enumerate(body[key]) if n not in numbers]

    return change


def swap_signatures(body: Body) -> None:
    """Puts the signature of an older call on a newer one."""
    older, newer = (body["contents"][n]["parts"][0] for n in (1, 7))
    newer["thoughtSignature"] = older["thoughtSignature"]


def split_answers(body: Body) -> None:
    """Gives the answers to two calls in two contents."""
    first, second = body["contents"][8]["parts"]
    body["contents"][8]["parts"] = [first]
    body["contents"].insert(9, {"role": "user", "parts": [second]})


DUMMY = base64.b64encode(b"skip_thought_signature_validator").decode()

GEMINI_CHANGES: dict[str, tuple[Change, str]] = {
    "older signature gone": (part(1, 0, thoughtSignature=None), ""),
    "older signature wrong": (part(1, 0, thoughtSignature="xxxx"), ""),
    "signature gone": (
        part(7, 0, thoughtSignature=None),
        fake_gemini.NO_SIGNATURE.format("look_up", 8),
    ),
    "signature of a later step gone": (
        part(9, 0, thoughtSignature=None),
        fake_gemini.NO_SIGNATURE.format("look_up", 10),
    ),
    "dummy": (part(7, 0, thoughtSignature=DUMMY), ""),
    "signature wrong": (
        part(7, 0, thoughtSignature="xxxx"),
        fake_gemini.WRONG_SIGNATURE,
    ),
    "signature of another call": (swap_signatures, fake_gemini.MOVED_SIGNATURE),
    "turn gone": (without("contents", *range(6)), ""),
    "result shortened": (part(8, 0, functionResponse={"name": "look_up"}), ""),
    "call behind an answer": (without("contents", 6), fake_gemini.CALL_ORDER),
    "answer gone": (without("contents", 10), fake_gemini.ANSWER_COUNT),
    "call gone": (without("contents", 7), fake_gemini.ANSWER_ORDER),
    "answers apart": (split_answers, fake_gemini.ANSWER_COUNT),
    "begins with an answer": (without("contents", 0), fake_gemini.FIRST_ROLE),
    "no parts": (
        lambda body: body["contents"][0].update(parts=[]),
        fake_gemini.NO_PARTS,
    ),
    "nothing": (lambda body: body.update(contents=[]), fake_gemini.NO_CONTENTS),
    "cache with tools": (
        lambda body: body.update(cachedContent="cachedContents/1"),
        fake_gemini.NOT_WITH_CACHE,
    ),
}


@pytest.mark.parametrize(
    ("change", "words"), GEMINI_CHANGES.values(), ids=GEMINI_CHANGES
)
async def test_gemini_refuses_a_history_that_was_changed(
    serve: Serve, change: Change, words: str
) -> None:
    """Calls of the running turn have their signatures, and pairs are whole."""
    fake = FakeGemini()
    fake_then = await played("gemini", play_gemini(fake, serve(fake)))

    assert send(fake_then, change) == (400 if words else 200, words)


async def test_an_older_gemini_wants_no_signatures(serve: Serve) -> None:
    """From Gemini 3 on they are needed."""
    fake = FakeGemini(is_signed=False)
    player = play_gemini(fake, serve(fake))
    await player.play(turns=2, calls=2)
    assert not player.lost


async def test_gemini_keeps_caches(serve: Serve) -> None:
    """What is cached stands before what is sent; a change costs the cache."""
    fake, said = FakeGemini(), ["shelves"]
    player = play_gemini(
        fake,
        serve(fake),
        app={"context_cache_config": ContextCacheConfig(min_tokens=0)},
        agent={"instruction": lambda _: f"You count {said[-1]}. " * 1_000},
    )
    await player.play(turns=3, calls=3)
    assert len(fake.caches) == 1
    assert [e for e in fake.of_agent if e.body.get("cachedContent")]
    assert not fake.deleted

    said.append("crates")
    await player.play(turns=1, calls=3)

    assert not player.lost
    assert [*fake.caches] == ["cachedContents/1", "cachedContents/2"]
    assert fake.deleted == ["cachedContents/1"]


def reasoning(n: int, text: str | None) -> Change:
    """Changes what was thought before an answer."""
    return lambda body: body["messages"][n].update(reasoning_content=text)


def add(index: int, **message: Any) -> Change:
    """Puts a message in."""
    return lambda body: body["messages"].insert(index, message)


CHAT_CHANGES: dict[str, tuple[str, Change, str]] = {
    "openai: answer gone": (
        "openai",
        without("messages", 10),
        fake_openai.UNANSWERED.format("c00000401"),
    ),
    "openai: call gone": ("openai", without("messages", 8), fake_openai.ORPHAN),
    "openai: two users": ("openai", add(1, role="user", content="And?"), ""),
    "deepseek: no reasoning": ("deepseek", reasoning(2, None), fake_openai.DEEPSEEK),
    "deepseek: empty": ("deepseek", reasoning(8, ""), fake_openai.DEEPSEEK),
    "deepseek: a space": ("deepseek", reasoning(8, " "), ""),
    "deepseek: none in an answer": ("deepseek", reasoning(6, None), ""),
    "deepseek, strict: none in an answer": (
        "deepseek!",
        reasoning(6, None),
        fake_openai.DEEPSEEK,
    ),
    "kimi: no reasoning": ("kimi", reasoning(8, None), fake_openai.KIMI.format(8)),
    "kimi: other reasoning": ("kimi", reasoning(8, "Else."), ""),
    "kimi: none in an answer": ("kimi", reasoning(6, None), ""),
    "kimi, strict: other reasoning": (
        "kimi!",
        reasoning(2, "Else."),
        fake_openai.KIMI.format(2),
    ),
    "mistral: ends with an answer": (
        "mistral",
        add(99, role="assistant", content="Done."),
        fake_openai.MISTRAL_LAST.format("assistant"),
    ),
    "mistral: user behind a tool": (
        "mistral",
        without("messages", 6),
        fake_openai.MISTRAL_ORDER,
    ),
    "mistral: answer gone": (
        "mistral",
        without("messages", 10),
        fake_openai.MISTRAL_COUNT,
    ),
    "mistral: other field": (
        "mistral",
        reasoning(6, "Hm."),
        fake_openai.MISTRAL_EXTRA,
    ),
    "vllm-mistral: two users": (
        "vllm-mistral",
        add(1, role="user", content="And?"),
        fake_openai.ALTERNATE,
    ),
    "vllm-mistral: no instruction": ("vllm-mistral", without("messages", 0), ""),
    "vllm-mistral: answer gone": (
        "vllm-mistral",
        without("messages", 6),
        fake_openai.ALTERNATE,
    ),
}


@pytest.mark.parametrize(
    ("kind", "change", "words"), CHAT_CHANGES.values(), ids=CHAT_CHANGES
)
async def test_chats_refuse_a_history_that_was_changed(
    serve: Serve, kind: str, change: Change, words: str
) -> None:
    """Each what its provider refuses."""
    name: Any = kind.rstrip("!")
    fake = FakeOpenAI(kind=name, is_strict=kind != name)
    fake_then = await played(kind, play_chat(fake, serve(fake)))

    status = 422 if words == fake_openai.MISTRAL_EXTRA else 400 if words else 200
    assert send(fake_then, change) == (status, words)


@pytest.mark.parametrize("kind", CHATS)
async def test_chats_accept_what_is_unchanged(serve: Serve, kind: Any) -> None:
    """Gemma's template knows no tools."""
    fake = FakeOpenAI(kind=kind, is_strict=True)
    player = play_chat(fake, serve(fake))
    if kind == "vllm-gemma":
        player.agent = {"tools": []}
    await player.play(turns=2, calls=0 if player.agent else 2)
    assert not player.lost


async def test_the_template_of_gemma_refuses_tools(serve: Serve) -> None:
    """And two messages of the user one after the other."""
    fake = FakeOpenAI(kind="vllm-gemma")
    player = play_chat(fake, serve(fake))
    await player.play(turns=1, calls=1)
    assert fake.refused == [fake_openai.ALTERNATE]


CONVERSE_CHANGES: dict[str, tuple[Change, str]] = {
    "nothing": (lambda body: None, ""),
    "no tools": (lambda body: body.pop("toolConfig"), fake_openai.CONVERSE_TOOLS),
    "begins with an answer": (without("messages", 0), fake_openai.CONVERSE_FIRST),
    "two users": (
        add(0, role="user", content=[{"text": "And?"}]),
        fake_openai.CONVERSE_ORDER,
    ),
    "answer gone": (
        lambda body: body["messages"][8]["content"].pop(),
        fake_openai.CONVERSE_RESULTS.format(8, "toolu_4_1"),
    ),
    "call gone": (
        lambda body: body["messages"][7]["content"].pop(),
        fake_openai.CONVERSE_ORPHAN.format(8),
    ),
}


@pytest.mark.parametrize(
    ("change", "words"), CONVERSE_CHANGES.values(), ids=CONVERSE_CHANGES
)
async def test_bedrock_refuses_a_history_that_was_changed(
    serve: Serve, change: Change, words: str
) -> None:
    """Roles alternate, pairs are whole, and tools are there."""
    fake = FakeConverse()
    address = serve(fake)
    player = Player(fake, lambda: lite(CONVERSE_MODEL, address))

    assert send(await played("converse", player), change) == (
        400 if words else 200,
        words,
    )
