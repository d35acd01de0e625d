"""What providers demand of a history still holds after it was compacted.

Real clients, with fake providers behind them that refuse as the real ones do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contextguard_adk import Pipeline, SlidingWindow, Strategy, Threshold
from tests.fake_claude import FakeClaude, begin_of_turn, list_thoughts, signature_of
from tests.playing import CLAUDES, Player, play_claude

pytestmark = [
    # Those of the clients and of the database, none of which is ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Serve = Callable[..., str]

WINDOW = 6_000
STRATEGIES: dict[str, Strategy] = {
    "threshold": Threshold(context_window=WINDOW),
    "sliding window": SlidingWindow(context_window=WINDOW),
    "pipeline": Pipeline(context_window=WINDOW),
}

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """Where the session is: in memory, or in a file, and each turn starts anew."""
    return str(tmp_path / "sessions.db") if request.param else None


def check(player: Player, compactions: int = 2, refusals: int = 0) -> None:
    """Sees to it that no turn was lost, and nothing refused but what was meant to."""
    assert not player.lost
    assert len(player.fake.refused) == refusals, player.fake.refused
    assert len(player.compactions) >= compactions


def thoughts_kept(player: Player) -> Iterator[tuple[int, int]]:
    """How many thoughts the last request before each compaction has, and might have.

    It might have those that were written since the compaction before; the last pair is
    that of the last request.
    """
    exchanges = player.fake.of_agent
    begins = [0, *player.compacted_at]
    for begin, end in zip(begins, [*player.compacted_at, len(exchanges)], strict=True):
        answered = [each for each in exchanges[begin:end] if not each.refused]
        if len(answered) < 2:
            continue
        answers = [{"content": each.answer["content"]} for each in answered[:-1]]
        written = {signature_of(block) for *_, block in list_thoughts(answers)}
        yield len(written & sent_thoughts(answered[-1].body)), len(written)


def sent_thoughts(body: dict[str, Any]) -> set[str]:
    """The thoughts that a request has."""
    return {signature_of(block) for *_, block in list_thoughts(body["messages"])}


def check_thoughts_since_compaction(player: Player) -> None:
    """Sees to it that at least half of the thoughts are sent again."""
    kept = [*thoughts_kept(player)]
    assert kept
    assert all(sent >= written / 2 for sent, written in kept), kept


def check_running_turns(fake: FakeClaude) -> None:
    """Sees to it that calls of running turns are sent with their thoughts."""
    for exchange in fake.accepted:
        messages = exchange.body["messages"]
        sent = sent_thoughts(exchange.body)
        for message in messages[begin_of_turn(messages) :]:
            for block in message["content"]:
                of_call = fake.of_call.get(block.get("id", ""), [])
                assert sent.issuperset(map(signature_of, of_call))


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("redacts", [False, True], ids=["", "redacted"])
@pytest.mark.parametrize("kind", CLAUDES)
@each_strategy
async def test_claude_accepts_a_compacted_history(
    serve: Serve,
    database: str | None,
    strategy: Strategy,
    kind: Any,
    redacts: bool,
    is_streaming: bool,
) -> None:
    """Turn after turn, with a large result; thoughts are not simply left out."""
    fake = FakeClaude(kind=kind, redacts=redacts)
    serve(fake)
    player = play_claude(
        fake, strategy=strategy, database=database, is_streaming=is_streaming
    )

    await player.play(turns=7, calls=4)

    check(player)
    if kind == "bound":
        check_thoughts_since_compaction(player)
    else:
        check_running_turns(fake)


@pytest.mark.parametrize("kind", CLAUDES)
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

    check(player)
    if kind == "bound":
        check_thoughts_since_compaction(player)
    else:
        check_running_turns(fake)
