"""The fake providers refuse what the real ones refuse, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from google.adk.models.llm_request import LlmRequest

from tests import fake_claude
from tests.chats import Changing
from tests.fake_claude import FakeClaude
from tests.playing import CLAUDES, play_claude

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


@pytest.mark.parametrize(("kind", "change", "words"), CHANGES.values(), ids=[*CHANGES])
async def test_claude_refuses_a_history_that_was_changed(
    serve: Serve, kind: Any, change: Change, words: str
) -> None:
    """Where it may not be changed; it names the first block that is wrong."""
    fake = FakeClaude(kind=kind)
    serve(fake)
    player = play_claude(fake)
    await player.play(turns=1, calls=2)
    await player.play(turns=1, calls=2)
    body = copy.deepcopy(fake.exchanges[-1].body)
    assert len(body["messages"]) == 11
    change(body)

    status, _ = fake.receive("/messages", body)

    assert fake.exchanges[-1].refused == words
    assert status == (400 if words else 200)


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
    fake = FakeClaude()
    serve(fake)
    player = play_claude(fake, agent={"generate_content_config": None})
    await player.play(turns=1, calls=2)
    assert fake.refused == [fake_claude.INVALID_DATA.format(1, 0)]


async def test_a_fake_refuses_with_the_words_that_a_test_wants(serve: Serve) -> None:
    """Once for each of them; the user's turn ends with these words."""
    fake = FakeClaude()
    serve(fake)
    player = play_claude(fake)
    fake.refusals.append("Else.")
    assert "Else." in (await player.say()).error
    assert not (await player.say()).is_lost
