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

_ENGINE = "agentengine://"

_Query = Callable[[str, dict[str, str]], Awaitable[Sequence[Sequence[Any]]]]


@dataclass(frozen=True)
class SessionKey:
    """The session of a database to read; None for a name that the user did not give."""

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
    """One model call of a recording, found at the event of its response.

    Attributes:
        index: The index of the event of the response.
        event: The event of the response.
        prompt_tokens: The provider's count.
        is_guarded: Whether a guard had cut the request, so that the count is not that
            of the whole history.
        heuristic_tokens: A guard's bytes / 4 of the request that was sent; None if no
            guard has stored any.
    """

    index: int
    event: Event
    prompt_tokens: int
    is_guarded: bool
    heuristic_tokens: int | None

    @property
    def ratio(self) -> float | None:
        """Prompt tokens per heuristic token; None if no guard has stored any."""
        if not self.heuristic_tokens:
            return None
        return self.prompt_tokens / self.heuristic_tokens


async def list_sessions(source: str, key: SessionKey) -> list[ListedSession]:
    """Lists the sessions that have the given names, the newest first."""
    async with open_source(source) as found:
        return await found.list(key)


async def load_session(source: str, key: SessionKey) -> Session:
    """Reads the newest session that has the given names, if possible one with events.

    Raises a `CommandError` if no session has the names.
    """
    async with open_source(source) as opened:
        listed = await opened.list(key)
        if listed:
            # Agent Engine does not tell the number: it is None.
            with_events = [each for each in listed if each.events != 0]
            newest = with_events[0] if with_events else listed[0]
            return await opened.load(newest)

    given = [f"{name} {value!r}" for name, value in vars(key).items() if value]
    whose = ", ".join(given) or "anybody"
    raise CommandError(f"no session of {whose}: --list shows all there are")


def describe_session(session: Session) -> ListedSession:
    """Returns a loaded session's names, time and number of events."""
    newest = max((event.timestamp for event in session.events), default=0.0)
    return ListedSession(
        app=session.app_name,
        user=session.user_id,
        session=session.id,
        updated=read_time(session.last_update_time or newest),
        events=len(session.events),
    )


@dataclass(frozen=True)
class _Export:
    """The session of a JSON export, whatever names the user has given."""

    session: Session

    async def list(self, key: SessionKey) -> list[ListedSession]:
        return [describe_session(self.session)]

    async def load(self, listed: ListedSession) -> Session:
        return self.session


@dataclass(frozen=True)
class _Service:
    """The sessions of one of ADK's session services.

    A service lists the sessions of one app only. A query of its tables, where it has
    tables, lists those of all apps.
    """

    service: BaseSessionService
    query: _Query | None = None

    async def list(self, key: SessionKey) -> list[ListedSession]:
        """Lists the sessions that have the given names, the newest first."""
        rows = await self._list_rows(key)
        listed = [
            ListedSession(app, user, session, read_time(updated), events)
            for app, user, session, updated, events in rows
        ]
        return sorted(listed, key=lambda each: each.updated, reverse=True)

    async def _list_rows(self, key: SessionKey) -> Sequence[Sequence[Any]]:
        """Returns a row for each session: app, user, id, time, and number of events."""
        if self.query:
            given = {name: value for name, value in vars(key).items() if value}
            conditions = [f" AND {_COLUMNS[name]} = :{name}" for name in given]
            return await self.query(_LISTING.format("".join(conditions)), given)

        app = key.app or "app"
        found = await self.service.list_sessions(app_name=app, user_id=key.user)
        return [
            (app, each.user_id, each.id, each.last_update_time, None)
            for each in found.sessions
            if key.session in (None, each.id)
        ]

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
    """Reads a time: the seconds since 1970, a text in ISO format, or a datetime.

    A time without a zone is in UTC. An invalid one counts as the beginning of 1970.
    """
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
    try:
        if source.startswith(_ENGINE):
            yield _open_engine(source)
        elif "://" in source:
            async with _open_url(source) as database:
                yield database
        else:
            async with _open_file(source) as file:
                yield file

    except CommandError:
        raise
    except ImportError as error:
        raise CommandError(_explain_missing(source)) from error
    except Exception as error:
        raise CommandError(_explain_failure(source, error)) from error


@asynccontextmanager
async def _open_file(source: str) -> AsyncIterator[_Export | _Service]:
    """Opens an SQLite file or a JSON export, by its content."""
    path = Path(source)
    data = path.read_bytes()
    if data.startswith(b"SQLite format 3\0"):
        async with _open_sqlite_file(path) as database:
            yield database
    else:
        yield _Export(_read_export(source, data))


def _explain_missing(source: str) -> str:
    """Says which extra of ADK a source needs."""
    need = "databases need SQLAlchemy"
    extra = "db"
    if source.startswith(_ENGINE):
        need = "Agent Engine needs Google's client"
        extra = "gcp"
    return f"{need}: pip install 'google-adk[{extra}]'"


def _explain_failure(source: str, error: Exception) -> str:
    """Says in one line why a source cannot be read."""
    name = source
    if "://" in source and not source.startswith(_ENGINE):
        name = "the database"  # Its URL may have a password.

    cause = getattr(error, "orig", None) or error.__cause__ or error
    text = " ".join(f"{type(cause).__name__}: {cause}".split())[:200]
    reason = getattr(cause, "strerror", None) or text
    return f"{name} cannot be read: {reason}"


def _open_engine(source: str) -> _Service:
    from google.adk.cli.service_registry import get_service_registry

    create: Any = get_service_registry().create_session_service
    return _Service(create(source, agents_dir=os.getcwd()))


def _read_export(source: str, data: bytes) -> Session:
    """Reads a session from JSON, with field names of ADK's web server or of Python."""
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
        field = ".".join(str(step) for step in problem["loc"])
        reason = f"{field}: {problem['msg']}"
        raise CommandError(f"{source}: not an ADK session: {reason}") from error


@asynccontextmanager
async def _open_url(url: str) -> AsyncIterator[_Service]:
    """Opens a database for reading only."""
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


_READING = ("SELECT", "PRAGMA", "SHOW", "WITH", "SET", "DESCRIBE")
_WRITING = re.compile(r"\b(INSERT|UPDATE|DELETE|MERGE)\b")


def _replace_write(
    connection: object, cursor: object, statement: str, parameters: Any, *_: object
) -> tuple[str, Any]:
    """Returns a statement that reads with its parameters, "SELECT 1" for another one.

    ADK makes missing tables before it reads. A statement is judged by its first word. A
    WITH, which may begin a reading or a writing statement, is judged by all its words.
    """
    text = statement.lstrip().upper()
    is_reading = text.startswith(_READING)
    if text.startswith("WITH") and _WRITING.search(text):
        is_reading = False
    return (statement, parameters) if is_reading else ("SELECT 1", ())


_PICKLED = (
    "{0} has events in the format of ADK before 1.22, pickles, which may run any code "
    "when they are read: if you trust the file, give it as sqlite+aiosqlite:///{0}"
)
_COMPUTED = "{}: {} is no plain table, as ADK writes it; what it holds may be anything"
# SQLite stores the start of a definition in this spelling, however it was written.
_PLAIN = re.compile("CREATE (TABLE|(UNIQUE )?INDEX) ")
_READ = ("sessions", "events", "app_states", "user_states", "adk_internal_metadata")
_OF_READ = f"WHERE lower(made.tbl_name) IN {_READ}"


def _check_tables(path: Path, copy: sqlite3.Connection) -> None:
    """Refuses a file with tables that compute their values or hold pickles.

    Computed tables are views and virtual tables, and those with generated columns.
    """
    definitions = copy.execute(
        f"SELECT tbl_name, sql FROM sqlite_master AS made {_OF_READ} AND sql NOT NULL"
    )
    for table, sql in definitions:
        if not _PLAIN.match(str(sql)):
            raise CommandError(_COMPUTED.format(path, table))

    columns = copy.execute(
        "SELECT lower(made.name), lower(columns.name), columns.hidden FROM "
        f"sqlite_master AS made, pragma_table_xinfo(made.name) AS columns {_OF_READ}"
    ).fetchall()
    for table, _, hidden in columns:
        if hidden:  # SQLite hides generated columns, and those of virtual tables.
            raise CommandError(_COMPUTED.format(path, table))
    # Only ADK before 1.22 has the column `actions`.
    if ("events", "actions", 0) in columns:
        raise CommandError(_PICKLED.format(path))


@asynccontextmanager
async def _open_sqlite_file(path: Path) -> AsyncIterator[_Service]:
    """Opens a copy of an SQLite file: ADK's service makes missing tables in a file."""
    from google.adk.sessions.sqlite_session_service import SqliteSessionService

    with tempfile.TemporaryDirectory() as folder:
        name = str(Path(folder) / "session.db")
        # The service is made before the file is there: ADK checks a file that exists,
        # and leaves the connection open.
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
    """Reads a guard's notes on an event; {} where there are none."""
    noted = (event.custom_metadata or {}).get(METADATA_KEY)
    return noted if isinstance(noted, dict) else {}


def read_number(value: object) -> float:
    """Reads a number from 0 to 2^53; any other value of a session counts as 0."""
    if isinstance(value, int | float) and 0 <= value <= 2**53:
        return value
    return 0
