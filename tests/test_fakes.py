"""The fake providers refuse what the real ones refuse, and nothing else."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.fake_provider import FakeProvider, RefusalError
from tests.players import Serve, make_player
from tests.playing import CLAUDES

Body = dict[str, Any]
Change = Callable[[Body], None]

pytestmark = [
    pytest.mark.litellm,  # Its import takes seconds.
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
            del find(body, place)[int(key)]

    return change


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


def as_redacted(body: Body) -> None:
    """Sends a thought as a redacted one, as ADK does with one that has no text."""
    blocks = body["messages"][1]["content"]
    blocks[0] = {"type": "redacted_thinking", "data": blocks[0]["signature"]}


def swap_signatures(body: Body) -> None:
    """Puts the signature of an older call on a newer one."""
    older, newer = (body["contents"][n]["parts"][0] for n in (1, 7))
    newer["thoughtSignature"] = older["thoughtSignature"]


def reasoning(number: int, text: str | None) -> Change:
    """Changes what was thought before an answer."""
    return put(f"messages {number}", reasoning_content=text)


def signed(number: int, signature: str) -> Change:
    """Gives a call another signature, or none."""
    return put(f"contents {number} parts 0", thoughtSignature=signature)


TEXT = [{"type": "text", "text": "Go on."}]
SHORTENED = put("messages 2 content 0", content="…")
OTHER_THOUGHT = put("messages 9 content 0", thinking="Else.")
AND = {"role": "user", "content": "And?"}
DUMMY = base64.b64encode(b"skip_thought_signature_validator").decode()

CHANGES: dict[str, tuple[Any, ...]] = {
    "bound: system": (put("", system="Else."), "claude bound", 1, 0),
    "bound: result shortened": (SHORTENED, "claude bound", 3, 0),
    "bound: middle thought gone": (thoughts(3), "claude bound", 5, 0),
    "bound: newest thoughts gone": (thoughts(5, 7, 9), ""),
    "bound: thought changed": (OTHER_THOUGHT, "claude signature", 9, 0),
    "bound: thought as a redacted one": (as_redacted, "claude data", 1, 0),
    "bound: no tools": (put("", tools=[]), "claude no tools"),
    "bound: no answer": (said(2), "claude unanswered", 1, "toolu_1_0"),
    "bound: no call": (said(1), "claude orphan", 2, 0, "toolu_1_0"),
    "bound: empty text": (put("messages 0 content 0", text=""), "claude empty text"),
    "bound: thought alone": (alone, "claude final thought", 1),
    "enabled: result shortened": (SHORTENED, ""),
    "enabled: last thought gone": (thoughts(9), "claude expected", 9, "tool_use"),
    "adaptive: thought of the turn gone": (thoughts(7), "claude modified", 7, 0),
    "gemini: signature gone": (signed(7, ""), "gemini no signature", "look_up", 8),
    "gemini: dummy": (signed(7, DUMMY), ""),
    "gemini: signature wrong": (signed(7, "xxxx"), "gemini wrong signature"),
    "gemini: signature of another call": (swap_signatures, "gemini moved signature"),
    "gemini: call behind an answer": (gone("contents 6"), "gemini call order"),
    "gemini: answer gone": (gone("contents 10"), "gemini answer count"),
    "gemini: call gone": (gone("contents 7"), "gemini answer order"),
    "openai: answer gone": (gone("messages 10"), "openai unanswered", "c00000401"),
    "openai: call gone": (gone("messages 8"), "openai orphan"),
    "deepseek: none in a call": (reasoning(2, None), "deepseek reasoning"),
    "deepseek: none in an answer": (reasoning(6, None), ""),
    "deepseek!: none in an answer": (reasoning(6, None), "deepseek reasoning"),
    "kimi: no reasoning": (reasoning(8, None), "kimi reasoning", 8),
    "kimi!: other reasoning": (reasoning(2, "Else."), "kimi reasoning", 2),
    "mistral: user behind a tool": (gone("messages 6"), "mistral order"),
    "mistral: answer gone": (gone("messages 10"), "mistral count"),
    "mistral: other field": (reasoning(6, "Hm."), "mistral extra"),
    "vllm-mistral: two users": (
        lambda body: body["messages"].insert(1, AND),
        "vllm alternate",
    ),
    "vllm-gemma: tools": (lambda body: None, "vllm alternate"),
}
"""What is changed, and the rule that it breaks, with the places that are named."""

_played: dict[str, FakeProvider] = {}


async def played(name: str, serve: Serve) -> FakeProvider:
    """A fake after two turns of two calls, of which the second may be parallel."""
    if name not in _played:
        player = make_player(name, serve)
        await player.say([player.calls("look_up"), player.calls("look_up")])
        pair = () if name in CLAUDES else ("weigh",)
        await player.say([player.calls("look_up", *pair), player.calls("look_up")])
        assert not player.lost or name == "vllm-gemma"
        _played[name] = player.fake
    return copy.deepcopy(_played[name])


@pytest.mark.parametrize("key", CHANGES)
async def test_a_history_that_was_changed_is_refused(serve: Serve, key: str) -> None:
    """Where it may not be changed; some name the first block that is wrong."""
    change, rule, *places = CHANGES[key]
    fake = await played(key.partition(":")[0], serve)
    last = fake.exchanges[-1]
    body = copy.deepcopy(last.body)
    change(body)

    status, _ = fake.receive(last.path, body)

    refused = 422 if rule == "mistral extra" else 400
    assert status == (refused if rule else 200)
    assert fake.exchanges[-1].refused == RefusalError(rule, *places).words
