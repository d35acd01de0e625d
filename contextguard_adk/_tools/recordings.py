"""Reads recorded ADK sessions, from an export or a database; never writes to one."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from google.adk.events.event import Event
from google.adk.sessions import BaseSessionService, Session
from pydantic import ValidationError

from contextguard_adk._tools.terminal import CommandError
from contextguard_adk.records import METADATA_KEY

_Query = Callable[[str, dict[str, str]], Awaitable[Sequence[Sequence[Any]]]]


@dataclass(frozen=True)
class SessionKey:
    """Which session of a database to read; None where the user did not say."""

    app: str | None = None
    user: str | None = None
    session: str | None = None


@dataclass(frozen=True)
class ListedSession:
    """A session of a database, with the time of its last update in UTC."""

    app: str
    user: str
    session: str
    updated: datetime
    events: int | None  # Agent Engine does not say how many.

    def __str__(self) -> str:
        names = f"{self.session!r} of user {self.user!r}, app {self.app!r}"
        return f"Session {names}: {self.events:,} events, {self.updated:%F %T} UTC"


@dataclass(frozen=True)
class RecordedCall:
    """One model call of a recording, found at the event of its response."""

    index: int
    event: Event
    prompt_tokens: int
    is_guarded: bool  # The request was changed, so not the whole history counted.
    heuristic_tokens: int | None  # What a guard has measured of it as it was sent.

    @property
    def ratio(self) -> float | None:
        """Real tokens per heuristic token of what was sent."""
        sent = self.heuristic_tokens
        return self.prompt_tokens / sent if sent else None


async def list_sessions(source: str, key: SessionKey) -> list[ListedSession]:
    """Lists the sessions that have the given names, the newest first."""
    async with open_source(source) as found:
        return await found.list(key)


async def load_session(source: str, key: SessionKey) -> Session:
    """Reads a session; where a name is missing, the newest one that has events."""
    async with open_source(source) as found:
        if listed := await found.list(key):
            newest = next((s for s in listed if s.events != 0), listed[0])
            return await found.load(newest)
    named = ", ".join(f"{name} {value!r}" for name, value in vars(key).items() if value)
    text = f"no session of {named or 'anybody'}: --list shows all there are"
    raise CommandError(text)


def describe_session(session: Session) -> ListedSession:
    last = max((event.timestamp for event in session.events), default=0.0)
    updated = read_time(session.last_update_time or last)
    names = session.app_name, session.user_id, session.id
    return ListedSession(*names, updated, len(session.events))


@dataclass(frozen=True)
class _Export:
    """A session by itself, whatever it is called."""

    session: Session

    async def list(self, key: SessionKey) -> list[ListedSession]:
        return [describe_session(self.session)]

    async def load(self, listed: ListedSession) -> Session:
        return self.session


@dataclass(frozen=True)
class _Service:
    """The sessions that one of ADK's services keeps; it can list those of an app."""

    service: BaseSessionService
    query: _Query | None = None  # Of its tables, if it has any: they list all.

    async def list(self, key: SessionKey) -> list[ListedSession]:
        if self.query:
            given = {name: value for name, value in vars(key).items() if value}
            wanted = "".join(f" AND {_COLUMNS[name]} = :{name}" for name in given)
            rows = await self.query(_LISTING.format(wanted), given)
        else:
            app = key.app or "app"
            found = await self.service.list_sessions(app_name=app, user_id=key.user)
            sessions = [s for s in found.sessions if key.session in (None, s.id)]
            rows = [(app, s.user_id, s.id, s.last_update_time, None) for s in sessions]
        listed = [
            ListedSession(app, user, session, read_time(updated), events)
            for app, user, session, updated, events in rows
        ]
        return sorted(listed, key=lambda each: each.updated, reverse=True)

    async def load(self, listed: ListedSession) -> Session:
        session = await self.service.get_session(
            app_name=listed.app, user_id=listed.user, session_id=listed.session
        )
        if session is None:  # It has been deleted since.
            raise CommandError(f"there is no session {listed.session!r}")
        return session


# The names of tables and columns are the same in all of ADK's schemas.
_LISTING = """
SELECT app_name, user_id, id, update_time, (
  SELECT COUNT(*) FROM events
  WHERE app_name = s.app_name AND user_id = s.user_id AND session_id = s.id
) FROM sessions AS s WHERE 1 = 1{} ORDER BY id
"""
_COLUMNS = {"app": "app_name", "user": "user_id", "session": "id"}


def read_time(value: float | str | datetime) -> datetime:
    """Reads a time, which is in UTC where it names no zone; 1970 for what is none."""
    try:
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, UTC)
        time = datetime.fromisoformat(value) if isinstance(value, str) else value
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0, UTC)


@asynccontextmanager
async def open_source(source: str) -> AsyncIterator[_Export | _Service]:
    """Opens a JSON export, an SQLite file, a database, or Agent Engine's sessions."""
    is_engine = source.startswith("agentengine://")
    try:
        if is_engine:
            from google.adk.cli.service_registry import get_service_registry

            create: Any = get_service_registry().create_session_service
            yield _Service(create(source, agents_dir=os.getcwd()))
        elif "://" in source:
            async with _open_url(source) as database:
                yield database
        elif (data := Path(source).read_bytes()).startswith(b"SQLite format 3\0"):
            async with _open_sqlite_file(Path(source)) as database:
                yield database
        else:
            yield _Export(_read_export(source, data))
    except CommandError:
        raise
    except ImportError as error:
        need = "databases need SQLAlchemy"
        extra = "db"
        if is_engine:
            need = "Agent Engine needs Google's client"
            extra = "gcp"
        raise CommandError(f"{need}: pip install 'google-adk[{extra}]'") from error
    except Exception as error:
        # A URL may have a password.
        name = "the database" if "://" in source and not is_engine else source
        cause = getattr(error, "orig", None) or error.__cause__ or error
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())[:200]
        reason = getattr(cause, "strerror", None) or reason
        raise CommandError(f"{name} cannot be read: {reason}") from error


def _read_export(source: str, data: bytes) -> Session:
    try:
        # Half of a surrogate pair, which no file can hold, becomes a question mark.
        text = json.dumps(json.loads(data), ensure_ascii=False)
        raw: object = json.loads(text.encode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{source}: not JSON: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("events"), list):
        raise CommandError(f"{source}: not an ADK session: it has no list of events")
    try:
        return Session(
            id=str(raw.get("id") or "session"),
            app_name=str(raw.get("appName") or raw.get("app_name") or "app"),
            user_id=str(raw.get("userId") or raw.get("user_id") or "user"),
            state=raw.get("state") or {},
            events=[Event.model_validate(item) for item in raw["events"]],
        )
    except ValidationError as error:
        problem = error.errors()[0]
        reason = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
        raise CommandError(f"{source}: not an ADK session: {reason}") from error


@asynccontextmanager
async def _open_url(url: str) -> AsyncIterator[_Service]:
    import sqlalchemy
    from google.adk.sessions import DatabaseSessionService

    parsed = sqlalchemy.make_url(url)
    path = Path(parsed.database or "")
    if parsed.get_backend_name() == "sqlite" and not path.is_file():
        raise CommandError(f"{path}: no such file")
    if parsed.drivername == "sqlite":  # The form that `adk web` takes.
        async with _open_sqlite_file(path) as database:
            yield database
        return
    service = DatabaseSessionService(url)
    engine = service.db_engine
    hook = "before_cursor_execute"
    sqlalchemy.event.listen(engine.sync_engine, hook, _replace_write, retval=True)

    async def query(text: str, values: dict[str, str]) -> Sequence[Sequence[Any]]:
        async with engine.connect() as connection:
            return (await connection.execute(sqlalchemy.text(text), values)).all()

    try:
        yield _Service(service, query)
    finally:
        await engine.dispose()


def _replace_write(
    connection: object, cursor: object, statement: str, parameters: Any, *_: object
) -> tuple[str, Any]:
    """Replaces a statement that writes: ADK makes missing tables before it reads."""
    reading = ("SELECT", "PRAGMA", "SHOW", "WITH", "SET", "DESCRIBE", "EXPLAIN")
    is_reading = statement.lstrip().upper().startswith(reading)
    return (statement, parameters) if is_reading else ("SELECT 1", ())


_PICKLED = (
    "{0} has events in the format of ADK before 1.22, pickles, which may run any code "
    "when they are read: if you trust the file, give it as sqlite+aiosqlite:///{0}"
)
_COMPUTED = "{}: {} is no plain table, as ADK writes it; what it holds may be anything"
# As SQLite itself spells it, however it was written.
_PLAIN = re.compile("CREATE (TABLE|(UNIQUE )?INDEX) ")
_READ = "sessions", "events", "app_states", "user_states", "adk_internal_metadata"
_OF_READ = f"WHERE lower(made.tbl_name) IN {_READ}"


def _check_tables(path: Path, copy: sqlite3.Connection) -> None:
    """Refuses a file in which what ADK reads is no plain table, or holds pickles."""
    made = copy.execute(
        f"SELECT tbl_name, sql FROM sqlite_master AS made {_OF_READ} AND sql NOT NULL"
    )
    odd = [name for name, sql in made if not _PLAIN.match(str(sql))]
    query = (
        "SELECT lower(made.name), lower(columns.name), columns.hidden FROM "
        "sqlite_master AS made, pragma_table_xinfo(made.name) AS columns "
    )
    columns = [] if odd else copy.execute(query + _OF_READ).fetchall()
    odd += [name for name, _, hidden in columns if hidden]
    if odd:
        raise CommandError(_COMPUTED.format(path, odd[0]))
    if ("events", "actions", 0) in columns:
        raise CommandError(_PICKLED.format(path))


@asynccontextmanager
async def _open_sqlite_file(path: Path) -> AsyncIterator[_Service]:
    """Opens a copy: ADK's service makes missing tables in what it opens."""
    from google.adk.sessions.sqlite_session_service import SqliteSessionService

    with tempfile.TemporaryDirectory() as folder:
        name = str(Path(folder) / "session.db")
        # Before there is a file: ADK leaves a connection to one that it checks.
        service = SqliteSessionService(name)
        with closing(sqlite3.connect(name)) as copy:
            address = f"{path.absolute().as_uri()}?mode=ro"
            with closing(sqlite3.connect(address, uri=True)) as file:
                file.backup(copy)
            _check_tables(path, copy)

            async def query(text: str, values: dict[str, str]) -> list[Sequence[Any]]:
                return copy.execute(text, values).fetchall()

            if is_by_database_service(copy):
                async with _open_url(f"sqlite+aiosqlite:///{name}") as database:
                    yield database
            else:
                yield _Service(service, query)


def is_by_database_service(file: sqlite3.Connection) -> bool:
    """Whether `DatabaseSessionService` has written a file, or ADK's other service."""
    query = "SELECT typeof(update_time) FROM sessions LIMIT 1"
    return file.execute(query).fetchall() == [("text",)]


def read_facts(event: Event) -> dict[str, Any]:
    """Reads what a guard has noted on an event."""
    said = (event.custom_metadata or {}).get(METADATA_KEY)
    return said if isinstance(said, dict) else {}


def read_number(value: object) -> float:
    """Reads a number, from 0 to 2^53; whatever else a session holds counts as 0."""
    return value if isinstance(value, int | float) and 0 <= value <= 2**53 else 0
