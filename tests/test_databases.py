"""Sessions in memory, SQLite and PostgreSQL: a guarded session survives any reload.

The PostgreSQL tests need `CONTEXTGUARD_TEST_POSTGRES_URL`, for instance
`postgresql+asyncpg://postgres@127.0.0.1:5432/postgres`: a server on which they may
create a database of their own.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import operator
import os
import re
import uuid
import warnings
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from google.adk.sessions import (
    BaseSessionService,
    DatabaseSessionService,
    InMemorySessionService,
)
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from google.genai import types
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from contextguard_adk import ContextGuardPlugin, SlidingWindow, Strategy, Threshold
from contextguard_adk.strategies import Pipeline, SummaryCompaction
from contextguard_adk.testing import RecordedRequest, SimulatedLlm
from tests.builders import (
    SUMMARY_BEGIN,
    Chat,
    Conversation,
    ToolUse,
    Turn,
    answer_text,
    guarded_agent,
    script_conversation,
)
from tests.chats import take_apart

POSTGRES_URL = "CONTEXTGUARD_TEST_POSTGRES_URL"

STORES = ("memory", "sqlite", "file", "postgres")


def store_marks(kind: str, is_slow: bool = False) -> list[pytest.MarkDecorator]:
    """What a test with this kind of store needs."""
    slow = [pytest.mark.slow] if is_slow else []
    return [*slow, pytest.mark.postgres] if kind == "postgres" else slow


def on_every_store(names: Iterable[str], *default: str) -> pytest.MarkDecorator:
    """Each name on each store; all cells but `default`, as "store-name", are slow."""
    cells = []
    for kind, name in itertools.product(STORES, names):
        cell = f"{kind}-{name}"
        marks = store_marks(kind, is_slow=cell not in default)
        cells.append(pytest.param(kind, name, id=cell, marks=marks))
    return pytest.mark.parametrize(("store", "name"), cells, indirect=["store"])


WINDOW = 4_000
MAX_STATE_BYTES = 16 * 1024


def open_file(path: str) -> SqliteSessionService:
    """Opens a file of sessions; ADK's check of it leaves an open connection behind."""
    with warnings.catch_warnings():
        message = "unclosed database in <sqlite3.Connection"
        warnings.filterwarnings("ignore", message, ResourceWarning)
        service = SqliteSessionService(path)
        gc.collect()
    return service


@dataclass
class Store:
    """Where sessions are kept; every `open` gives a new service object."""

    kind: str
    url: str
    _memory: InMemorySessionService = field(default_factory=InMemorySessionService)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[BaseSessionService]:
        """Opens the sessions as a process that has just started does."""
        if self.kind == "memory":
            yield self._memory  # It hands out copies.
        elif self.kind == "file":
            yield open_file(self.url)
        else:
            service = DatabaseSessionService(self.url)
            try:
                yield service
            finally:
                await service.close()


@contextlib.asynccontextmanager
async def own_database(kind: str, folder: Path) -> AsyncIterator[Store]:
    """Makes an empty database and takes it away again."""
    if kind != "postgres":
        prefix = "sqlite+aiosqlite:///" if kind == "sqlite" else ""
        yield Store(kind, f"{prefix}{folder / 'sessions.db'}")
        return
    server = os.environ.get(POSTGRES_URL)
    if not server:
        pytest.skip(f"{POSTGRES_URL} is not set")
    name = f"contextguard_{uuid.uuid4().hex}"
    await _execute(server, f"CREATE DATABASE {name}")
    try:
        url = make_url(server).set(database=name)
        yield Store(kind, url.render_as_string(hide_password=False))
    finally:
        await _execute(server, f"DROP DATABASE {name} WITH (FORCE)")


async def _execute(url: str, statement: str) -> None:
    engine = create_async_engine(url, isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        await connection.execute(text(statement))
    await engine.dispose()


@pytest.fixture
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """A database of the kind that the test is parametrized with."""
    async with own_database(request.param, tmp_path) as made:
        yield made


ODD_VALUES: dict[str, Any] = {
    "key order": {"b": 1, "a": {"z": 1, "aa": 2, "": 3}, "aaa": [], "B": None},
    "number keys": {9: "nine", 10: "ten", -1: "minus one", 101: {2: {30: 1, 4: 2}}},
    "large floats": [1e16, 1e22, 1.2345678901234568e20, 1.5e300, -1e17],
    "floats": [0.1 + 0.2, 1e-7, 2.5e-300, 1.0, 100.0, 1 / 3, 5e-324],
    "zeros": [0, 0.0, -0.0, {"zero": -0.0}],
    "integers": [2**53 + 1, -(2**53) - 1, 2**63 - 1, 10**15],
    "text that looks like numbers": ["1e+22", "-0.0", '{"9": 1e+16}', "Infinity"],
    "unicode": "żółć 漢字 🙂 e\u0301 é \u2028 \u200b \x7f \ufeff",
    "escapes": "\"quoted\" 'single' back\\slash \\u0041 \t\r\n",
    "empty": {"": {"": [[], [[]], {"": ""}]}, "none": None},
    "booleans": [True, False, {"true": True}],
}


def write_turns(count: int) -> list[Turn]:
    """Turns with a call, two parallel calls and an answer, all recognizable."""
    turns = []
    for number in range(count):
        request = f"Question {number}. {'please ' * 60}ask-{number} {'go on ' * 60}"
        rows = [{"value": row / 7, "id": row, "name": "row"} for row in range(12)]
        found = [{"rows": rows, "fact": f"fact-{number}{letter}"} for letter in "ab"]
        words = f"fact-{number}c ünïcode {'words ' * 40}"
        first = ToolUse("search", {**ODD_VALUES, **found[0]})
        second = [ToolUse("read", {**found[1], **ODD_VALUES}), ToolUse("read", words)]
        turns.append(Turn(request, [[first], second], f"Answer: answer-{number}."))
    return turns


def facts(record: RecordedRequest) -> set[str]:
    """The markers of tool results and answers that stand in a request."""
    return set(re.findall(r"(?:fact|answer)-\w+", record.text))


def rounds(llm: SimulatedLlm) -> Iterator[tuple[set[str], list[RecordedRequest]]]:
    """What summaries have covered, and the agent's requests until the next one."""
    covered: set[str] = set()
    for is_summary, records in itertools.groupby(llm.requests, lambda r: r.is_summary):
        if is_summary:
            covered = covered.union(*map(facts, records))
        else:
            yield covered, [*records]


def check_prefixes(requests: Sequence[RecordedRequest]) -> None:
    """Every request of a round begins with the one before; the head to the byte."""
    for before, after in itertools.pairwise(requests):
        count = len(before.contents)
        # A JSON column may have reordered the keys of results since.
        assert canonical(after.contents[:count]) == canonical(before.contents)
        heads = (request.contents[0].model_dump_json() for request in (before, after))
        assert operator.eq(*heads)


def canonical(contents: Sequence[types.Content]) -> list[dict[str, Any]]:
    """Contents as JSON values, call ids left out.

    PostgreSQL gives large floats back as integers, digit for digit.
    """
    texts = (content.model_dump_json(exclude_none=True) for content in contents)
    dumped: list[dict[str, Any]] = [json.loads(item, parse_int=float) for item in texts]
    for content in dumped:
        for part in content.get("parts", ()):
            for kind in ("function_call", "function_response"):
                part.get(kind, {}).pop("id", None)
    return dumped


def check_state(state: dict[str, Any]) -> None:
    """What the guard keeps of a summary is plain JSON, and small."""
    ours = {key: value for key, value in state.items() if "context_guard" in key}
    assert json.loads(json.dumps(ours)) == ours
    assert ours.pop("__context_guard_summary_agent")
    assert isinstance(ours["__context_guard_summarized_at_agent"], int)
    assert sum(len(str(value).encode()) for value in ours.values()) <= MAX_STATE_BYTES


async def talk(
    store: Store, llm: SimulatedLlm, turns: Sequence[Turn], strategy: Strategy
) -> list[tuple[set[str], list[RecordedRequest]]]:
    """Plays turns, each with a new service, plugin and runner, and judges the state;
    returns the rounds."""
    llm.script, tools = script_conversation(Conversation(turns))
    for turn in turns:
        async with store.open() as service:
            plugins = [ContextGuardPlugin(default=strategy)]
            agent = guarded_agent(llm, tools)
            chat = Chat(agent, plugins, session_service=service)
            assert answer_text(await chat.say(turn.request)) == turn.answer
            state = await chat.state()
    assert (llm.rejections, llm.violations) == (0, 0)
    check_state(state)
    return list(rounds(llm))


STRATEGIES = {
    "threshold": Threshold(context_window=WINDOW),
    "sliding": SlidingWindow(context_window=8_000, max_messages=16),
    "pipeline": Pipeline(
        context_window=6_000,
        window=None,
        summary=SummaryCompaction(min_messages_for_summary=4),
    ),
}


@on_every_store(STRATEGIES, "memory-pipeline", "sqlite-threshold", "file-sliding")
async def test_sessions_survive_a_reload_every_turn(store: Store, name: str) -> None:
    """Nothing is rejected, what is summarized stays away, and prefixes are stable."""
    strategy = STRATEGIES[name]
    llm = SimulatedLlm(
        context_window=strategy.context_window or WINDOW,
        summary_replies=lambda _: "The user asked, the assistant looked it up.",
    )
    turn_count = 20 if name == "pipeline" else 12  # It summarizes less often.
    first, *played = await talk(store, llm, write_turns(turn_count), strategy)
    assert len(played) >= 3, "fewer than three compactions"
    for covered, requests in (first, *played):
        assert not any(covered & facts(request) for request in requests)
        if name != "pipeline":  # It may shorten results between summaries.
            check_prefixes(requests)
    for request in itertools.chain.from_iterable(requests for _, requests in played):
        head = (request.contents[0].parts or [types.Part()])[0].text or ""
        assert head.startswith(SUMMARY_BEGIN)


SUMMARIES = {
    "nul": "Nothing \x00 at all \x00",
    "surrogate": "Half an emoji: \ud83d",
    "controls": "\u2028\u2029\x01\x7f\ufeff 'quoted' \"twice\" \\",
}


@on_every_store(
    SUMMARIES,
    *("sqlite-nul", "sqlite-surrogate", "file-controls"),
    *("postgres-nul", "postgres-surrogate"),
)
async def test_any_summary_can_be_stored(store: Store, name: str) -> None:
    """What a model may write as a summary ends no turn and stays in place."""
    written = f"WRITTEN {SUMMARIES[name]}"
    llm = SimulatedLlm(context_window=WINDOW, summary_replies=lambda _: written)
    *_, (covered, requests) = await talk(
        store, llm, write_turns(5), STRATEGIES["threshold"]
    )
    assert covered
    check_prefixes(requests)
    assert "WRITTEN" in take_apart(requests[-1].contents)[0].model_dump_json()
