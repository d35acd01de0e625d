"""Databases of sessions that a test makes and takes away again."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from google.adk.sessions import BaseSessionService, InMemorySessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService

POSTGRES_URL = "CONTEXTGUARD_TEST_POSTGRES_URL"


def store_marks(kind: str, is_slow: bool = False) -> list[pytest.MarkDecorator]:
    """What a test with this kind of store needs."""
    slow = [pytest.mark.slow] if is_slow else []
    return [*slow, pytest.mark.postgres] if kind == "postgres" else slow


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
            yield SqliteSessionService(self.url)
        else:
            from google.adk.sessions import DatabaseSessionService

            # A run that was cancelled may hold a lock for as long as a slow disk takes.
            patient = "?timeout=60" if self.kind == "sqlite" else ""
            service = DatabaseSessionService(self.url + patient)
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
    from sqlalchemy import make_url

    name = f"contextguard_{uuid.uuid4().hex}"
    await _execute(server, f"CREATE DATABASE {name}")
    try:
        url = make_url(server).set(database=name)
        yield Store(kind, url.render_as_string(hide_password=False))
    finally:
        await _execute(server, f"DROP DATABASE {name} WITH (FORCE)")


async def _execute(url: str, statement: str) -> None:
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(url, isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        await connection.execute(text(statement))
    await engine.dispose()
