"""The fake providers refuse what the real ones refuse, and nothing else."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable
from typing import Any

import pytest
from google.adk.agents.context_cache_config import ContextCacheConfig

from tests.fake_claude import FakeClaude
from tests.fake_gemini import FakeGemini
from tests.fake_provider import FakeProvider, RefusalError
from tests.playing import CLAUDES, play_gemini
from tests.test_provider_history import Serve, make_player

Body = dict[str, Any]
Change = Callable[[Body], None]

pytestmark = [
    # Those of the clients, none of which is ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def find(body: Any, path: str) -> Any:
    """What stands at a path such as "messages 2 content 0"."""
    for key in path.split():
        body = body[int(key) if key.isdigit() else key]
    return body


def put(path: str, **values: Any) -> Change:
    """Changes fields of what stands at a path."""
    return lambda body: find(body, path).update(values)


def gone(*paths: str) -> Change:
    """Leaves out what stands at some paths."""

    def change(body: Body) -> None:
        for place, _, key in reversed([path.rpartition(" ") for path in paths]):
            del find(body, place)[int(key) if key.isdigit() else key]

    return change


def add(index: int, message: Body) -> Change:
    """Puts a message in."""
    return lambda body: body["messages"].insert(index, message)


def said(number: int) -> Change:
    """Puts a text in the place of what a message holds."""
    return put(f"messages {number}", content=TEXT)


def alone(body: Body) -> None:
    """Leaves a message with its thought alone, and what answered it without calls."""
    gone("messages 1 content 1")(body)
    said(2)(body)


def thoughts(*numbers: int) -> Change:
    """Takes the thoughts out of these messages, which they begin."""
    return gone(*(f"messages {number} content 0" for number in numbers))


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


def swap_signatures(body: Body) -> None:
    """Puts the signature of an older call on a newer one."""
    older, newer = (body["contents"][n]["parts"][0] for n in (1, 7))
    newer["thoughtSignature"] = older["thoughtSignature"]


def split_answers(body: Body) -> None:
    """Gives the answers to two calls in two contents."""
    second = body["contents"][8]["parts"].pop()
    body["contents"].insert(9, {"role": "user", "parts": [second]})


TEXT = [{"type": "text", "text": "Go on."}]
OTHER_TOOL = put("tools 0", description="Else.")
OTHER_SYSTEM = put("", system="Else.")
UNKNOWN = put("messages 1 content 0", signature="")
SHORTENED = put("messages 2 content 0", content="…")
BUDGET = put("", thinking={"type": "enabled", "budget_tokens": 2_000})
OTHER_THOUGHT = put("messages 9 content 0", thinking="Else.")
ANSWER = {"role": "assistant", "content": "Done."}
DUMMY = base64.b64encode(b"skip_thought_signature_validator").decode()
NO_RESULT = gone("messages 8 content 1")
BLOCKS = {"role": "user", "content": [{"text": "And?"}]}
AND = {"role": "user", "content": "And?"}


def reasoning(number: int, text: str | None) -> Change:
    """Changes what was thought before an answer."""
    return put(f"messages {number}", reasoning_content=text)


def signed(number: int, signature: str) -> Change:
    """Gives a call another signature, or none."""
    return put(f"contents {number} parts 0", thoughtSignature=signature)


CHANGES: dict[str, tuple[Any, ...]] = {
    "bound: system": (OTHER_SYSTEM, "claude bound", 1, 0),
    "bound: tool gone": (gone("tools 2"), "claude bound", 1, 0),
    "bound: tool described anew": (OTHER_TOOL, "claude bound", 1, 0),
    "bound: tools in another order": (lambda body: body["tools"].reverse(), ""),
    "bound: marks": (mark_all, ""),
    "bound: text": (said(0), "claude bound", 1, 0),
    "bound: result shortened": (SHORTENED, "claude bound", 3, 0),
    "bound: middle thought gone": (thoughts(3), "claude bound", 5, 0),
    "bound: newest thoughts gone": (thoughts(5, 7, 9), ""),
    "bound: signature": (UNKNOWN, "claude signature", 1, 0),
    "bound: thought changed": (OTHER_THOUGHT, "claude signature", 9, 0),
    "bound: thought as a redacted one": (as_redacted, "claude data", 1, 0),
    "bound: begins with an answer": (gone("messages 0"), "claude first role"),
    "bound: ends with an answer": (gone("messages 10"), "claude last role"),
    "bound: no tools": (put("", tools=[]), "claude no tools"),
    "bound: no answer": (said(2), "claude unanswered", 1, "toolu_1_0"),
    "bound: no call": (said(1), "claude orphan", 2, 0, "toolu_1_0"),
    "bound: empty text": (put("messages 0 content 0", text=""), "claude empty text"),
    "bound: empty message": (put("messages 0", content=[]), "claude empty message", 0),
    "bound: thought alone": (alone, "claude final thought", 1),
    "bound: a budget": (BUDGET, "claude no budgets"),
    "enabled: result shortened": (SHORTENED, ""),
    "enabled: last thought gone": (thoughts(9), "claude expected", 9, "tool_use"),
    "enabled: thought changed": (OTHER_THOUGHT, "claude modified", 9, 0),
    "adaptive: result shortened": (SHORTENED, ""),
    "adaptive: thought of the turn gone": (thoughts(7), "claude modified", 7, 0),
    "adaptive: thought changed": (OTHER_THOUGHT, "claude modified", 9, 0),
    "gemini: older signature gone": (signed(1, ""), ""),
    "gemini: older signature wrong": (signed(1, "xxxx"), ""),
    "gemini: signature gone": (signed(7, ""), "gemini no signature", "look_up", 8),
    "gemini: later one gone": (
        signed(9, ""),
        "gemini no signature",
        "look_up",
        10,
    ),
    "gemini: dummy": (signed(7, DUMMY), ""),
    "gemini: signature wrong": (signed(7, "xxxx"), "gemini wrong signature"),
    "gemini: signature of another call": (swap_signatures, "gemini moved signature"),
    "gemini: call behind an answer": (gone("contents 6"), "gemini call order"),
    "gemini: answer gone": (gone("contents 10"), "gemini answer count"),
    "gemini: call gone": (gone("contents 7"), "gemini answer order"),
    "gemini: answers apart": (split_answers, "gemini answer count"),
    "gemini: begins with an answer": (gone("contents 0"), "gemini first role"),
    "gemini: no parts": (put("contents 0", parts=[]), "gemini no parts"),
    "gemini: nothing": (put("", contents=[]), "gemini no contents"),
    "gemini: cache": (put("", cachedContent="c"), "gemini not with cache"),
    "openai: answer gone": (gone("messages 10"), "openai unanswered", "c00000401"),
    "openai: call gone": (gone("messages 8"), "openai orphan"),
    "openai: two users": (add(1, AND), ""),
    "deepseek: no reasoning": (reasoning(2, None), "deepseek reasoning"),
    "deepseek: empty": (reasoning(8, ""), "deepseek reasoning"),
    "deepseek: none in an answer": (reasoning(6, None), ""),
    "deepseek!: none in an answer": (reasoning(6, None), "deepseek reasoning"),
    "kimi: no reasoning": (reasoning(8, None), "kimi reasoning", 8),
    "kimi: other reasoning": (reasoning(8, "Else."), ""),
    "kimi!: other reasoning": (reasoning(2, "Else."), "kimi reasoning", 2),
    "mistral: end": (add(99, ANSWER), "mistral last", "assistant"),
    "mistral: user behind a tool": (gone("messages 6"), "mistral order"),
    "mistral: answer gone": (gone("messages 10"), "mistral count"),
    "mistral: other field": (reasoning(6, "Hm."), "mistral extra"),
    "vllm-mistral: two users": (add(1, AND), "vllm alternate"),
    "vllm-mistral: answer gone": (gone("messages 6"), "vllm alternate"),
    "vllm-gemma: tools": (lambda body: None, "vllm alternate"),
    "converse: unchanged": (lambda body: None, ""),
    "converse: no tools": (gone("toolConfig"), "converse tools"),
    "converse: begin": (gone("messages 0"), "converse first"),
    "converse: users": (add(0, BLOCKS), "converse order"),
    "converse: answer": (
        gone("messages 8 content 1"),
        "converse results",
        8,
        "toolu_4_1",
    ),
    "converse: call gone": (gone("messages 7 content 1"), "converse orphan", 8),
}
"""What is changed, and the rule that it breaks, with the places that are named."""

_played: dict[str, FakeProvider] = {}


async def played(name: str, serve: Serve) -> FakeProvider:
    """A fake after two turns of two calls, of which the second may be parallel."""
    if name in _played:
        return copy.deepcopy(_played[name])
    player = make_player(name, serve)
    first = player.calls("look_up")
    await player.say([first, player.calls("look_up")])
    pair = () if name in CLAUDES else ("weigh",)
    await player.say([player.calls("look_up", *pair), player.calls("look_up")])
    assert not player.lost or name == "vllm-gemma"
    _played[name] = player.fake
    return copy.deepcopy(player.fake)


@pytest.mark.parametrize("key", CHANGES)
async def test_a_history_that_was_changed_is_refused(serve: Serve, key: str) -> None:
    """Where it may not be changed; some name the first block that is wrong."""
    change, rule, *places = CHANGES[key]
    fake = await played(key.partition(":")[0], serve)
    last = fake.exchanges[-1]
    change(body := copy.deepcopy(last.body))

    status, _ = fake.receive(last.path, body)

    refused = 422 if rule == "mistral extra" else 400
    assert status == (refused if rule else 200)
    assert fake.exchanges[-1].refused == RefusalError(rule, *places).words


async def test_claude_refuses_a_thought_that_is_put_back(serve: Serve) -> None:
    """What was written without it is bound to its absence."""
    fake = await played("bound", serve)
    whole = fake.exchanges[-1].body
    thoughts(7)(fewer := copy.deepcopy(whole))
    thoughts(9)(fewer)
    fake.receive("/messages", fewer)
    said = {"role": "assistant", "content": fake.exchanges[-1].answer["content"]}

    for body in (fewer, whole):
        again = copy.deepcopy(body)
        again["messages"] += [said, {"role": "user", "content": TEXT}]
        fake.receive("/messages", again)

    assert fake.refused == [RefusalError("claude bound", 11, 0).words]


async def test_claude_drops_what_is_bound_elsewhere_if_it_is_told_to(
    serve: Serve,
) -> None:
    """Then nothing is refused; nor where the account is not yet held to it."""
    fake = await played("bound", serve)
    assert isinstance(fake, FakeClaude)
    OTHER_SYSTEM(body := copy.deepcopy(fake.exchanges[-1].body))
    binding = {"prefix_mismatch_behavior": "drop_block"}
    told = {"thinking": {"type": "adaptive", "block_binding": binding}}
    assert fake.receive("/messages", body | told)[0] == 200
    assert fake.receive("/messages", body)[0] == 400
    fake.is_enforced = False
    assert fake.receive("/messages", body)[0] == 200


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
    assert [e for e in fake.of_agent if e.body.get("cachedContent")]
    assert (len(fake.caches), fake.deleted) == (1, [])

    said.append("crates")
    await player.play(turns=1, calls=3)

    assert not player.lost
    assert [*fake.caches] == ["cachedContents/1", "cachedContents/2"]
    assert fake.deleted == ["cachedContents/1"]
