"""Measures what it saves to load the events alone that agents still need.

    python benchmarks/recent_events.py [--events N] [--url URL ...] [--json FILE]

A session of many events goes on in two copies, one loaded whole at each turn, one by
`load_recent`, until the guard has compacted both three times more. It prints the CPU
time of a turn, ADK's own included, and exits with 1 where the copies' requests differ
or the second one takes more than a tenth. URL is that of an SQLAlchemy database with
an async driver, by default a new SQLite file.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig
from google.adk.apps import App
from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.runners import Runner
from google.adk.sessions.database_session_service import DatabaseSessionService
from google.genai import types
from sqlalchemy import inspect, text

from benchmarks import _common
from contextguard_adk import CompactionRecord, ContextGuardPlugin, Threshold
from contextguard_adk.sessions import load_recent
from contextguard_adk.testing import Reply, SimulatedLlm, call

WINDOW_TOKENS = 32_000
COMPACTIONS = 4  # The first one rescues the session.
MOST_RATIO = 0.1


def read_file(path: str) -> dict[str, str]:
    """Returns a file of 4 KB."""
    return {"path": path, "text": f"{path} holds a line. " * 200}


def list_events(count: int) -> Iterator[Event]:
    """Yields turns of four events: message, call, result, answer."""
    for number in range(count // 4):
        path = f"src/module_{number}.py"
        called = types.FunctionCall(
            id=f"c{number}", name="read_file", args={"path": path}
        )
        result = types.FunctionResponse(
            id=f"c{number}",
            name="read_file",
            response={"text": f"{path} is good. " * 20},
        )
        asked = f"Look at {path}. Never touch module_{number - 1}!"
        parts = (
            ("user", types.Part(text=asked)),
            ("agent", types.Part(function_call=called)),
            ("agent", types.Part(function_response=result)),
            ("agent", types.Part(text=f"{path} is good, as the one before it.")),
        )

        for author, part in parts:
            role = "user" if author == "user" or part.function_response else "model"
            content = types.Content(role=role, parts=[part])
            yield Event(author=author, invocation_id=f"old-{number}", content=content)


class SessionCopy:
    """One copy of the session, with its agent and its guard."""

    def __init__(self, service: DatabaseSessionService, name: str) -> None:
        steps = itertools.count()

        def script(request: LlmRequest) -> Reply:
            *_, part = request.contents[-1].parts or []
            if part.function_response:
                return "Done."
            return call("read_file", path=f"new_{next(steps)}.py")

        self.compactions: list[CompactionRecord] = []
        self.llm = SimulatedLlm(script=script, context_window=WINDOW_TOKENS)
        self.llm.summary_replies = [f"Summary {number}." for number in range(1_000)]
        guard = ContextGuardPlugin(
            default=Threshold(context_window=WINDOW_TOKENS),
            recent_events=True,
            on_compaction=self.compactions.append,
        )
        agent = LlmAgent(name="agent", model=self.llm, tools=[read_file])
        self.app = App(name="app", root_agent=agent, plugins=[guard])
        self.runner = Runner(app=self.app, session_service=service)
        self.place = {"user_id": "user", "session_id": name}

    async def say(self, message: str, loads_part: bool) -> float:
        """Plays a turn; returns its CPU seconds."""
        started = time.process_time()
        config = None
        if loads_part:
            service = self.runner.session_service
            config = await load_recent(service, self.app, **self.place)
        content = types.Content(role="user", parts=[types.Part(text=message)])
        run_config = RunConfig(get_session_config=config)
        run = self.runner.run_async(
            user_id=self.place["user_id"],
            session_id=self.place["session_id"],
            new_message=content,
            run_config=run_config,
        )
        async for _ in run:
            pass
        return time.process_time() - started

    def sent(self) -> list[str]:
        """What models were sent."""
        dump = [
            [c.model_dump(exclude_none=True) for c in r.contents]
            for r in self.llm.requests
        ]
        return [str(entry) for entry in dump]


async def make_copies(service: DatabaseSessionService, count: int) -> list[SessionCopy]:
    """Fills a session, and copies its rows."""
    session = await service.create_session(
        app_name="app", user_id="user", session_id="whole"
    )
    for event in list_events(count):
        await service.append_event(session, event)

    async with service.db_engine.begin() as connection:
        for table, key in (("sessions", "id"), ("events", "session_id")):
            columns = await connection.run_sync(_list_columns, table)
            names = ", ".join(columns)
            values = ", ".join("'part'" if name == key else name for name in columns)
            await connection.execute(
                text(f"INSERT INTO {table} ({names}) SELECT {values} FROM {table}")
            )

    return [SessionCopy(service, "whole"), SessionCopy(service, "part")]


def _list_columns(connection: Any, table: str) -> list[str]:
    return [column["name"] for column in inspect(connection).get_columns(table)]


async def measure(url: str, count: int) -> dict[str, Any]:
    """Plays both copies."""
    service = DatabaseSessionService(url)
    whole, part = await make_copies(service, count)
    whole_seconds: list[float] = []
    part_seconds: list[float] = []

    for number in itertools.count():
        message = f"Read more, number {number}."
        whole_taken = await whole.say(message, loads_part=False)
        part_taken = await part.say(message, loads_part=True)
        if number:  # The first turn loads all in both.
            whole_seconds.append(whole_taken)
            part_seconds.append(part_taken)
        if min(len(whole.compactions), len(part.compactions)) >= COMPACTIONS:
            break
    await service.close()

    whole_median = statistics.median(whole_seconds)
    part_median = statistics.median(part_seconds)
    return {
        "database": url.partition("+")[0],
        "events": count,
        "turns": len(part_seconds),
        "compactions": len(part.compactions),
        "whole_seconds": whole_median,
        "part_seconds": part_median,
        "ratio": part_median / whole_median,
        "is_same": whole.sent() == part.sent(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = _common.build_parser(__doc__)
    parser.add_argument("--events", type=int, default=20_000, help="of the session")
    parser.add_argument("--url", action="append", default=[], help="a database")
    options = parser.parse_args(argv)
    _common.quiet()

    with tempfile.TemporaryDirectory() as folder:
        urls = options.url or [f"sqlite+aiosqlite:///{folder}/sessions.db"]
        rows = [asyncio.run(measure(url, options.events)) for url in urls]

    for row in rows:
        print(
            f"{row['database']}: {row['events']:,} events, {row['turns']} turns, "
            f"{row['compactions']} compactions; CPU of a turn: "
            f"{row['whole_seconds']:.3f} s whole, {row['part_seconds']:.3f} s in part "
            f"({row['ratio']:.3f}); requests {'alike' if row['is_same'] else 'DIFFER'}"
        )

    _common.write_json(options.json, {"rows": rows})
    return int(any(row["ratio"] > MOST_RATIO or not row["is_same"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
