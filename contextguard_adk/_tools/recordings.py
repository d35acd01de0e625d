"""Reads recorded ADK sessions; never writes to where they are stored.

A source of sessions, as a user gives it, is one of these:

- the path of a JSON export, which has one session
- the path of an SQLite file, in which `adk web` keeps its sessions
- the URL of a database of ADK's `DatabaseSessionService`
- the URL of an SQLite file of `adk web`: "sqlite:///…"
- the URL of Agent Engine: "agentengine://…"
"""

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

MAX_REASON_CHARS = 200

_Query = Callable[[str, dict[str, str]], Awaitable[Sequence[Sequence[Any]]]]
"""Runs a query in SQL, given the values of its `:name` places; returns the rows."""


@dataclass(frozen=True)
class SessionKey:
    """The names that sessions of a source must have; None allows any name."""

    app: str | None = None
    user: str | None = None
    session: str | None = None

    @property
    def given(self) -> dict[str, str]:
        """The names that are not None, each by the name of its field."""
        return {field: name for field, name in vars(self).items() if name}


@dataclass(frozen=True)
class ListedSession:
    """The names of a session, the time of its last update, and its number of events.

    The time is in UTC. The number of events is None if the source does not tell the
    number. Agent Engine is such a source.
    """

    app: str
    user: str
    session: str
    updated: datetime
    events: int | None

    def __str__(self) -> str:
        """Describes a session whose number of events is known, in one line."""
        names = f"{self.session!r} of user {self.user!r}, app {self.app!r}"
        return f"Session {names}: {self.events:,} events, {self.updated:%F %T} UTC"


@dataclass(frozen=True)
class RecordedCall:
    """One model call of a recording, found at the event of its response.

    Attributes:
        index: The index of the event of the response, among the session's events.
        event: The event of the response.
        prompt_tokens: The provider's count of the request.
        is_guarded: Whether a guard had cut the request. Then `prompt_tokens` is not the
            count of the whole history.
        heuristic_tokens: A guard's estimate of the request that was sent, in heuristic
            tokens of 4 bytes; None if no guard has stored one.
    """

    index: int
    event: Event
    prompt_tokens: int
    is_guarded: bool
    heuristic_tokens: int | None

    @property
    def ratio(self) -> float | None:
        """Prompt tokens per heuristic token; None if the latter are not known."""
        if not self.heuristic_tokens:
            return None
        return self.prompt_tokens / self.heuristic_tokens


async def list_sessions(source: str, key: SessionKey) -> list[ListedSession]:
    """Lists the sessions that have the names of `key`, the newest first."""
    async with _open_source(source) as opened:
        return await opened.list(key)


async def load_session(source: str, key: SessionKey) -> Session:
    """Loads the newest session that has the names of `key`.

    An empty session, one without events, is loaded only if there are no others.

    Raises:
        CommandError: No session has the names.
    """
    async with _open_source(source) as opened:
        listed = await opened.list(key)  # The newest session is the first.
        if listed:
            # If the number of events is unknown, it is None. The session may have some.
            not_empty = [each for each in listed if each.events != 0]
            candidates = not_empty or listed
            return await opened.load(candidates[0])

    given = ", ".join(f"{field} {name!r}" for field, name in key.given.items())
    raise CommandError(
        f"no session of {given or 'anybody'}: `contextguard replay SESSION --list` "
        "shows all there are"
    )


def describe_session(session: Session) -> ListedSession:
    """Returns a loaded session's names, time and number of events."""
    # An export may lack the time of the last update.
    last_event_time = max((event.timestamp for event in session.events), default=0.0)
    return ListedSession(
        app=session.app_name,
        user=session.user_id,
        session=session.id,
        updated=read_time(session.last_update_time or last_event_time),
        events=len(session.events),
    )


@dataclass(frozen=True)
class _Export:
    """A JSON export. It has one session, which is used whatever names the user gave."""

    session: Session

    async def list(self, key: SessionKey) -> list[ListedSession]:
        return [describe_session(self.session)]

    async def load(self, listed: ListedSession) -> Session:
        return self.session


@dataclass(frozen=True)
class _Service:
    """The sessions of one of ADK's session services.

    Attributes:
        service: The service. It can list only the sessions of one app.
        query: Queries the tables of the service. The tables have the sessions of all
            apps. None for a service without tables, which is Agent Engine.
    """

    service: BaseSessionService
    query: _Query | None = None

    async def list(self, key: SessionKey) -> list[ListedSession]:
        """Lists the sessions that have the names of `key`, the newest first."""
        listed: Sequence[ListedSession]
        if self.query:
            listed = await _query_sessions(self.query, key)
        else:
            listed = await self._ask_service(key)
        return sorted(listed, key=lambda each: each.updated, reverse=True)

    async def _ask_service(self, key: SessionKey) -> Sequence[ListedSession]:
        """Has the service list the sessions that have the names of `key`, in any order.

        The number of events is unknown.
        """
        # ADK's method needs the name of an app. Agent Engine does not read the name,
        # because its URL tells the app.
        app = key.app or "app"
        found = await self.service.list_sessions(app_name=app, user_id=key.user)
        return [
            ListedSession(
                app=app,
                user=each.user_id,
                session=each.id,
                updated=read_time(each.last_update_time),
                events=None,
            )
            for each in found.sessions
            if key.session in (None, each.id)
        ]

    async def load(self, listed: ListedSession) -> Session:
        session = await self.service.get_session(
            app_name=listed.app, user_id=listed.user, session_id=listed.session
        )
        if session is None:  # It has been deleted since it was listed.
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


async def _query_sessions(query: _Query, key: SessionKey) -> list[ListedSession]:
    """Lists the sessions that have the names of `key`, in any order."""
    conditions = [f" AND {_COLUMNS[field]} = :{field}" for field in key.given]
    rows = await query(_LISTING.format("".join(conditions)), key.given)
    return [
        ListedSession(app, user, session, read_time(updated), event_count)
        for app, user, session, updated, event_count in rows
    ]


def read_time(value: float | str | datetime) -> datetime:
    """Returns a time in UTC, from seconds since 1970, an ISO text, or a datetime.

    A time without a zone counts as UTC. An invalid value gives the beginning of 1970.
    """
    try:
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, UTC)

        time = datetime.fromisoformat(value) if isinstance(value, str) else value
        if time.tzinfo is None:
            return time.replace(tzinfo=UTC)
        return time.astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0, UTC)


@asynccontextmanager
async def _open_source(source: str) -> AsyncIterator[_Export | _Service]:
    """Opens a source of sessions; see the head of this file for the forms of `source`.

    Reading may fail while the source is open. So an error in the caller's `with` block
    becomes a `CommandError`, as an error of the opening does.
    """
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
    """Opens an SQLite file or a JSON export. The first bytes tell an SQLite file."""
    path = Path(source)
    data = path.read_bytes()
    if data.startswith(b"SQLite format 3\0"):
        async with _open_sqlite_file(path) as database:
            yield database
    else:
        yield _Export(_read_export(source, data))


def _explain_missing(source: str) -> str:
    """Says which extra of ADK a source needs."""
    if source.startswith(_ENGINE):
        return "Agent Engine needs Google's client: pip install 'google-adk[gcp]'"
    return "databases need SQLAlchemy: pip install 'google-adk[db]'"


def _explain_failure(source: str, error: Exception) -> str:
    """Says in one line why a source cannot be read."""
    name = source
    is_database_url = "://" in source and not source.startswith(_ENGINE)
    if is_database_url:
        name = "the database"  # The URL of a database may have a password.

    # SQLAlchemy keeps the error of the database's client as `orig`.
    cause = getattr(error, "orig", None) or error.__cause__ or error
    described = f"{type(cause).__name__}: {cause}"
    text_in_one_line = " ".join(described.split())
    # Only an error of the operating system has `strerror`, such as "Permission denied".
    reason = getattr(cause, "strerror", None) or text_in_one_line[:MAX_REASON_CHARS]
    return f"{name} cannot be read: {reason}"


def _open_engine(source: str) -> _Service:
    """Makes ADK's service for the URL of Agent Engine."""
    from google.adk.cli.service_registry import get_service_registry

    create: Any = get_service_registry().create_session_service
    return _Service(create(source, agents_dir=os.getcwd()))


def _read_export(source: str, data: bytes) -> Session:
    """Reads a session from JSON. Only its events are required.

    Names of fields are those of ADK's web server, as "appName", or of Python, as
    "app_name".

    Args:
        source: The path of the export, which an error names.
        data: The bytes of the export.
    """
    raw = _parse_json(source, data)
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
        first_problem = error.errors()[0]
        field = ".".join(str(key) for key in first_problem["loc"])
        reason = f"{field}: {first_problem['msg']}"
        raise CommandError(f"{source}: not an ADK session: {reason}") from error


def _parse_json(source: str, data: bytes) -> object:
    """Returns the value of a JSON text. UTF-8 can encode all strings of the value."""
    try:
        value = json.loads(data)
        # An escape in JSON may stand for half of a surrogate pair. UTF-8 cannot encode
        # such a half, so `encode` puts a question mark in its place.
        encoded = json.dumps(value, ensure_ascii=False).encode(errors="replace")
        cleaned: object = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{source}: not JSON: {error}") from error
    return cleaned


@asynccontextmanager
async def _open_url(url: str) -> AsyncIterator[_Service]:
    """Opens the database of a URL for reading only."""
    import sqlalchemy

    parsed = sqlalchemy.make_url(url)
    # Only for SQLite is the name of the database a path. SQLite would create a file
    # that does not exist.
    path = Path(parsed.database or "")
    if parsed.get_backend_name() == "sqlite" and not path.is_file():
        raise CommandError(f"{path}: no such file")

    # `adk web` takes a URL without a driver, as "sqlite:///file", and
    # `DatabaseSessionService` a URL with a driver, as "sqlite+aiosqlite:///file".
    is_of_adk_web = parsed.drivername == "sqlite"
    opened = _open_sqlite_file(path) if is_of_adk_web else _open_database(url)
    async with opened as database:
        yield database


@asynccontextmanager
async def _open_database(url: str) -> AsyncIterator[_Service]:
    """Opens a database by ADK's `DatabaseSessionService`, for reading only."""
    import sqlalchemy
    from google.adk.sessions import DatabaseSessionService

    service = DatabaseSessionService(url)
    engine = service.db_engine
    hook = "before_cursor_execute"
    # With `retval`, SQLAlchemy runs the statement that `_replace_write` returns.
    sqlalchemy.event.listen(engine.sync_engine, hook, _replace_write, retval=True)

    async def query(text: str, values: dict[str, str]) -> Sequence[Sequence[Any]]:
        async with engine.connect() as connection:
            result = await connection.execute(sqlalchemy.text(text), values)
            return result.all()

    try:
        yield _Service(service, query)
    finally:
        await engine.dispose()


# The first words of statements that read, and words by which a statement writes.
_READING = ("SELECT", "PRAGMA", "SHOW", "WITH", "SET", "DESCRIBE")
_WRITING = re.compile(r"\b(INSERT|UPDATE|DELETE|MERGE)\b")


def _replace_write(
    connection: object, cursor: object, statement: str, parameters: Any, *_: object
) -> tuple[str, Any]:
    """Returns the SQL to run in place of a statement, and the parameters of that SQL.

    SQLAlchemy calls this function before it runs a statement. A statement that reads is
    returned unchanged. Any other statement, such as ADK's CREATE TABLE for a missing
    table, is replaced by "SELECT 1", which has no effect. SQLAlchemy also gives a
    connection, a cursor and other arguments, which this function does not read.
    """
    text = statement.lstrip().upper()
    is_reading = text.startswith(_READING)
    # "WITH … SELECT" reads, but "WITH … INSERT" writes.
    if text.startswith("WITH") and _WRITING.search(text):
        is_reading = False

    if not is_reading:
        return "SELECT 1", ()
    return statement, parameters


_PICKLED = (
    "{0} has events in the format of ADK before 1.22, pickles, which may run any code "
    "when they are read: if you trust the file, give it as sqlite+aiosqlite:///{0}"
)
_COMPUTED = "{}: {} is no plain table, as ADK writes it; what it holds may be anything"
# The start of the definition of a plain table or index. SQLite stores this start in
# capitals with single blanks, however it was written.
_PLAIN = re.compile("CREATE (TABLE|(UNIQUE )?INDEX) ")
# The tables that ADK reads. Python writes a tuple of strings as SQL writes a list.
_READ = ("sessions", "events", "app_states", "user_states", "adk_internal_metadata")
# The definitions of these tables, or of views by the same names, and of their indexes
# and triggers. An index that SQLite has made by itself has no definition.
_DEFINITIONS = f"""
SELECT tbl_name, sql FROM sqlite_master
WHERE lower(tbl_name) IN {_READ} AND sql NOT NULL
"""
# The columns of these tables. `hidden` is 0 for a plain column. It is more than 0 for a
# generated column and for a hidden column of a virtual table.
_TABLE_COLUMNS = f"""
SELECT lower(items.name), lower(columns.name), columns.hidden
FROM sqlite_master AS items, pragma_table_xinfo(items.name) AS columns
WHERE lower(items.tbl_name) IN {_READ}
"""


def _check_tables(path: Path, copy: sqlite3.Connection) -> None:
    """Refuses a file whose tables compute their values or hold pickles.

    Tables that compute their values are views, virtual tables, and tables with
    generated columns. A table with a trigger is refused, too.

    Args:
        path: The path of the file, which an error names.
        copy: A connection to a copy of the file.

    Raises:
        CommandError: The file is refused.
    """
    for table, definition in copy.execute(_DEFINITIONS):
        if not _PLAIN.match(str(definition)):
            raise CommandError(_COMPUTED.format(path, table))

    columns = copy.execute(_TABLE_COLUMNS).fetchall()
    for table, _, hidden in columns:
        if hidden:
            raise CommandError(_COMPUTED.format(path, table))

    # Only ADK before 1.22 wrote the column `actions`, which holds pickles. Each row has
    # the name of a table, the name of a column, and 0 for a plain column.
    plain_actions_column = ("events", "actions", 0)
    if plain_actions_column in columns:
        raise CommandError(_PICKLED.format(path))


@asynccontextmanager
async def _open_sqlite_file(path: Path) -> AsyncIterator[_Service]:
    """Opens an SQLite file by the ADK service that has written it.

    The service reads a temporary copy, because the service creates tables that a file
    lacks, and the file itself must not change.

    Raises:
        CommandError: `_check_tables` refuses the file.
    """
    from google.adk.sessions.sqlite_session_service import SqliteSessionService

    with tempfile.TemporaryDirectory() as folder:
        copy_path = str(Path(folder) / "session.db")
        # If the file of a new service exists, ADK opens it for a check and never closes
        # it. So this service is made before the copy, even if it is not needed.
        adk_web_service = SqliteSessionService(copy_path)

        with closing(sqlite3.connect(copy_path)) as copy:
            read_only_uri = f"{path.absolute().as_uri()}?mode=ro"
            with closing(sqlite3.connect(read_only_uri, uri=True)) as original:
                original.backup(copy)
            # ADK must not read a file that is not checked: pickles may run any code.
            _check_tables(path, copy)

            async def query(text: str, values: dict[str, str]) -> list[Sequence[Any]]:
                return copy.execute(text, values).fetchall()

            if is_by_database_service(copy):
                url = f"sqlite+aiosqlite:///{copy_path}"
                async with _open_database(url) as database:
                    yield database
            else:
                yield _Service(adk_web_service, query)


def is_by_database_service(file: sqlite3.Connection) -> bool:
    """Whether `DatabaseSessionService` has written an SQLite file of sessions.

    `DatabaseSessionService` stores times as texts. `SqliteSessionService`, which
    `adk web` uses, stores times as numbers. A file without sessions counts as written
    by `SqliteSessionService`.
    """
    query = "SELECT typeof(update_time) FROM sessions LIMIT 1"
    rows = file.execute(query).fetchall()
    return rows == [("text",)]


def read_facts(event: Event) -> dict[str, Any]:
    """Reads a guard's notes on an event; {} if there are none."""
    noted = (event.custom_metadata or {}).get(METADATA_KEY)
    return noted if isinstance(noted, dict) else {}


def read_number(value: object) -> float:
    """Reads a number from 0 to 2^53 in a session; any other value counts as 0.

    A session is untrusted, so the value may be anything. Up to 2^53 a float can have
    each whole number.
    """
    if isinstance(value, int | float) and 0 <= value <= 2**53:
        return value
    return 0
