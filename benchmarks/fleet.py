"""Measures `replay` and `report` over all sessions of a database.

    python benchmarks/fleet.py [--url URL] [--sessions N] [--events N] [--json FILE]

It writes sessions of as many events on average (tool calls with results of 1 KB, with
the counts that a provider reports) into a new SQLite file, or a database that is empty,
runs both commands, and prints the time and the CPU time of all their processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from google.adk.events.event import Event
from google.adk.sessions import Session
from google.genai import types

from benchmarks import _common

SESSIONS = 1_000
EVENTS = 100
MODELS = ("gemini-2.5-flash", "gpt-4o", "claude-sonnet-4-5")
TOOLS = ("lookup", "search", "update")
FIXED_TOKENS = 900
CHARS_PER_TOKEN = 4


def write_events(agent: str, model: str, count: int, seed: object) -> Iterator[Event]:
    """Yields the events of a session, the same for the same seed."""
    rng = random.Random(str(seed))
    tokens = FIXED_TOKENS
    now = 1_700_000_000.0 + rng.random() * 1e6
    turn = 0

    def event(author: str, part: types.Part, output_tokens: int = 0) -> Event:
        nonlocal tokens, now
        now += 0.1 + rng.random()
        usage = None
        if output_tokens:
            usage = types.GenerateContentResponseUsageMetadata(
                prompt_token_count=tokens,
                candidates_token_count=output_tokens,
                total_token_count=tokens + output_tokens,
            )
        tokens += len(part.model_dump_json(exclude_none=True)) // CHARS_PER_TOKEN
        is_ours = bool(part.function_response) or author == "user"
        return Event(
            author=author,
            invocation_id=f"turn-{turn}",
            timestamp=now,
            content=types.Content(role="user" if is_ours else "model", parts=[part]),
            usage_metadata=usage,
            model_version=model if usage else None,
        )

    def prose(chars: int) -> str:
        return _common.cut_text("prose", chars, rng)

    made = 0
    while made < count:
        turn += 1
        made += 2
        yield event("user", types.Part(text=prose(200)))
        for _ in range(min(rng.randrange(2, 6), (count - made) // 2)):
            made += 2
            name = rng.choice(TOOLS)
            number = f"call-{made}"
            args = {"id": f"ORD-{rng.randrange(10**6)}", "query": prose(60)}
            call = types.FunctionCall(id=number, name=name, args=args)
            yield event(agent, types.Part(function_call=call), 40)
            rows = [{"id": rng.randrange(10**6), "state": "open"} for _ in range(4)]
            answer = types.FunctionResponse(
                id=number, name=name, response={"text": prose(850), "rows": rows}
            )
            yield event(agent, types.Part(function_response=answer))
        yield event(agent, types.Part(text=prose(300)), 80)


async def fill(url: str, sessions: int, events: int) -> None:
    """Writes sessions of five agents in four apps; lengths differ as in real life."""
    # SQLAlchemy takes half a second, and some need `write_events` alone.
    from google.adk.sessions import DatabaseSessionService
    from google.adk.sessions.schemas.v1 import StorageEvent

    service = DatabaseSessionService(url)
    rng = random.Random("lengths")
    for number in range(sessions):
        agent = f"agent_{number % 5}"
        model = MODELS[number % len(MODELS)]
        session: Session = await service.create_session(
            app_name=f"app_{number % 4}", user_id=f"user_{number % 50}"
        )
        length = max(8, round(events * rng.lognormvariate(-0.32, 0.8)))
        async with service.database_session_factory() as database:
            for event in write_events(agent, model, length, number):
                database.add(StorageEvent.from_event(session, event))
            await database.commit()
    await service.close()


def measure(command: str, url: str, folder: Path) -> dict[str, Any]:
    """Runs a command on all sessions; returns its seconds, and those of CPU."""
    output = ["--output", str(folder / "report.html")] if command == "report" else []
    run = [sys.executable, "-m", "contextguard_adk", command, url, "--all-sessions"]
    before = os.times()
    start = time.perf_counter()
    subprocess.run([*run, *output], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    after = os.times()
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    return {"seconds": seconds, "cpu_seconds": cpu}


def main() -> None:
    """Prints the table, and writes it as JSON where asked."""
    parser = _common.build_parser(__doc__)
    parser.add_argument("--url", help="of an empty database; else an SQLite file")
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--events", type=int, default=EVENTS, help="on average")
    arguments: argparse.Namespace = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url = arguments.url or f"sqlite+aiosqlite:///{folder / 'sessions.db'}"
        asyncio.run(fill(url, arguments.sessions, arguments.events))
        found = {each: measure(each, url, folder) for each in ("replay", "report")}

    title = f"{arguments.sessions:,} sessions of {arguments.events:,} events on average"
    rows = [[each, *figures.values()] for each, figures in found.items()]
    _common.print_table(title, ("", "seconds", "seconds of CPU"), rows)
    _common.write_json(arguments.json, found)


if __name__ == "__main__":
    main()
