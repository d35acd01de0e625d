"""Reads recorded ADK sessions, from an export or a database; never writes to one."""

from __future__ import annotations

import json
import sqlite3
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from google.adk.events.event import Event
from google.adk.sessions import BaseSessionService, Session
from pydantic import ValidationError

from contextguard_adk._memory import branch_scope
from contextguard_adk._tools.terminal import CommandError
from contextguard_adk.telemetry import METADATA_KEY


@dataclass(frozen=True)
class SessionKey:
    """Which session of a database to read; None where the user did not say."""

    app: str | None = None
    user: str | None = None
    session: str | None = None


@dataclass(frozen=True)
class RecordedCall:
    """One model call of a recording, found at the event of its response."""

    index: int
    event: Event
    prompt_tokens: int
    is_guarded: bool  # The request was changed, so not the whole history counted.


async def load_session(source: str, key: SessionKey) -> Session:
    """Reads a JSON export, an SQLite file as `adk web` writes it, or a database."""
    if "://" in source:
        return await _load_from_url(source, key)
    path = Path(source)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _explain(source, error) from error
    if data.startswith(b"SQLite format 3\0"):
        return await _load_from_sqlite_file(path, key)
    try:
        raw: object = json.loads(data)
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


async def _load_from_url(url: str, key: SessionKey) -> Session:
    try:
        import sqlalchemy
        from google.adk.sessions import DatabaseSessionService
    except ImportError as error:
        hint = "pip install 'google-adk[db]'"
        raise CommandError(f"databases need SQLAlchemy: {hint}") from error
    try:
        parsed = sqlalchemy.make_url(url)
        database = Path(parsed.database or "")
        if parsed.get_backend_name() == "sqlite" and not database.is_file():
            raise CommandError(f"{database}: no such file")
        if parsed.drivername == "sqlite":  # The form that `adk web` takes.
            return await _load_from_sqlite_file(database, key)
        service = DatabaseSessionService(url)
        engine, hook = service.db_engine.sync_engine, "before_cursor_execute"
        sqlalchemy.event.listen(engine, hook, _replace_write, retval=True)
        try:
            return await _read_session(service, key)
        finally:
            await service.db_engine.dispose()
    except CommandError:
        raise
    except Exception as error:
        raise _explain("the database", error) from error


def _replace_write(
    connection: object, cursor: object, statement: str, parameters: Any, *_: object
) -> tuple[str, Any]:
    """Replaces a statement that writes: ADK makes missing tables before it reads."""
    reading = ("SELECT", "PRAGMA", "SHOW", "WITH", "SET", "DESCRIBE", "EXPLAIN")
    is_reading = statement.lstrip().upper().startswith(reading)
    return (statement, parameters) if is_reading else ("SELECT 1", ())


async def _load_from_sqlite_file(path: Path, key: SessionKey) -> Session:
    """Reads a copy: ADK's service makes missing tables in what it opens."""
    from google.adk.sessions.sqlite_session_service import SqliteSessionService

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "session.db"
        address = f"{path.absolute().as_uri()}?mode=ro"
        try:
            with (
                closing(sqlite3.connect(address, uri=True)) as source,
                closing(sqlite3.connect(copy)) as target,
            ):
                source.backup(target)
            return await _read_session(SqliteSessionService(str(copy)), key)
        except (sqlite3.Error, RuntimeError, ValueError, KeyError) as error:
            raise _explain(str(path), error) from error


async def _read_session(service: BaseSessionService, key: SessionKey) -> Session:
    if not (key.app and key.user and key.session):
        missing = [f"--{name}" for name, value in vars(key).items() if not value]
        raise CommandError(f"a database needs {', '.join(missing)} as well")
    session = await service.get_session(
        app_name=key.app, user_id=key.user, session_id=key.session
    )
    if session is None:
        owner = f"user {key.user!r} and app {key.app!r}"
        raise CommandError(f"there is no session {key.session!r} of {owner}")
    return session


def _explain(source: str, error: Exception) -> CommandError:
    cause = getattr(error, "orig", None) or error.__cause__ or error
    reason = " ".join(str(cause).split())[:200]
    return CommandError(f"{source} cannot be read: {type(cause).__name__}: {reason}")


def list_calls(session: Session, agent: str | None = None) -> Iterator[RecordedCall]:
    """Lists the model calls with a recorded prompt count, of one agent or of all."""
    state: dict[str, Any] = {}
    previous: tuple[object, ...] = ()
    for index, event in enumerate(session.events):
        state.update(event.actions.state_delta)
        if event.partial:
            continue
        usage = event.usage_metadata
        prompt_tokens = usage.prompt_token_count if usage else None
        # Text and calls of a stream may be two events of one response.
        origin = (prompt_tokens, event.author, event.invocation_id)
        is_new, previous = origin != previous, origin
        is_wanted = event.author != "user" and agent in (None, event.author)
        if not (is_wanted and prompt_tokens and is_new):
            continue
        # A request of that size will be made up.
        if not 0 < prompt_tokens <= 20_000_000:
            found = f"event {index}: prompt_token_count is {prompt_tokens:,}"
            raise CommandError(f"{found}; 0 to 20,000,000 tokens are accepted")
        said = (event.custom_metadata or {}).get(METADATA_KEY)
        is_guarded = isinstance(said, dict) and bool(said.get("recovered"))
        keys = ("__context_guard_summary_", "context_guard:summary:")
        owner = f"{event.author}@{branch_scope(event)}".removesuffix("@")
        is_guarded |= any(state.get(key + owner) is not None for key in keys)
        yield RecordedCall(index, event, prompt_tokens, is_guarded)


def fit_counts(pairs: Sequence[tuple[int, int]]) -> tuple[int, float]:
    """Infers what requests have beside their contents, by bytes / 4, and the error."""
    if not pairs:
        return 0, 0.0
    slopes = [
        (real_b - real_a) / (bytes_b - bytes_a)
        for (bytes_a, real_a), (bytes_b, real_b) in combinations(pairs, 2)
        # Requests of nearly the same size say nothing of the slope.
        if abs(bytes_b - bytes_a) > 0.1 * max(bytes_a, bytes_b)
    ]
    weight = min(max(statistics.median(slopes), 0.5), 5.0) if slopes else 1.0
    intercept = statistics.median(real - weight * tokens for tokens, real in pairs)
    fixed_tokens = max(0, round(intercept / weight))
    errors = [abs(weight * (n + fixed_tokens) - real) / real for n, real in pairs]
    return fixed_tokens, statistics.median(errors)
