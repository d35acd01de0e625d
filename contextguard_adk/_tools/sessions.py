"""`contextguard sessions`: shows and changes the state that a guard has stored."""

from __future__ import annotations

import asyncio
import functools
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import click
from google.adk.sessions import BaseSessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from rich.console import Console

from contextguard_adk import sessions
from contextguard_adk._tools import all_sessions
from contextguard_adk._tools.recordings import (
    SessionKey,
    is_by_database_service,
    list_sessions,
    load_session,
)
from contextguard_adk._tools.terminal import CommandError, print_line, quiet_logs


def run_sessions(
    action: str,
    source: str,
    key: SessionKey,
    is_all: bool,
    database: str | None,
    **options: Any,
) -> int:
    """Runs an action: prints the stored state, or lines that tell what was changed.

    Args:
        action: The name of a function of `contextguard_adk.sessions`: "show", "purge",
            "compact", "reset", "edit" or "leave".
        source: The file or the URL that has the session; for "purge", the URI of an
            artifact service.
        key: The names of the session.
        is_all: Whether all sessions of an app are changed.
        database: For "purge" of all sessions, the file or URL that has the sessions.
        options: The other options of the command, see `_run`. They have no effect on
            "purge".

    Returns:
        The exit code: 1 if `is_all` is set and a session was skipped, else 0.
    """
    if is_all and action not in all_sessions.ACTIONS:
        raise CommandError(f"--all is for {', '.join(all_sessions.ACTIONS)}")

    with quiet_logs(Console(stderr=True)):
        try:
            if action == "purge":
                listed_in = database if is_all else None
                return asyncio.run(_purge(source, key, is_all, listed_in))
            if is_all:
                return asyncio.run(_change_all(action, source, key, **options))
            return asyncio.run(_run(action, source, key, **options))
        except CommandError:
            raise
        except Exception as error:  # A database's client may raise anything.
            outcome = "stopped in the middle" if is_all else "nothing is changed"
            raise CommandError(f"{outcome}: {error}") from error


async def _run(
    action: str, source: str, key: SessionKey, is_full: bool, **options: Any
) -> int:
    """Shows or changes a stored session; returns the exit code.

    Args:
        action: "show", or a function of `contextguard_adk.sessions` that changes a
            session.
        source: The file or the URL that has the session.
        key: The names of the session.
        is_full: Whether "show" prints the texts of the summaries as well.
        options: The other options of the command:

            - "agent": the name of an agent, or "" for all agents
            - "force": whether to change a session in which a run seems to be under way
            - "focus": for the action "compact", what the summary keeps above all
            - "text": for the action "edit", a file with the new text; None to let the
              user write the text
    """
    # This reads the session without opening its source for writing. "show" needs no
    # more. For all other actions, an invalid file is refused here, before it is opened
    # for writing.
    read_session = await load_session(source, key)
    if action == "show":
        lines = sessions.show(read_session, options["agent"], is_full)
        for line in lines or [f"Session {read_session.id!r}: nothing is stored."]:
            print_line(line)
        return 0

    if len(await list_sessions(source, key)) > 1:
        raise CommandError(
            "which session? Give its --app, --user and --session, or --all"
        )

    agent = options["agent"]
    change: sessions.SessionChange
    if action == "edit":
        text = _edit(sessions.read(read_session, agent), options["text"])
        change = functools.partial(sessions.edit, agent=agent, text=text)
    else:
        change = _choose_change(action, **options)

    async with _open(source) as service:
        session = await service.get_session(
            app_name=read_session.app_name,
            user_id=read_session.user_id,
            session_id=read_session.id,
        )
        if session is None:
            raise CommandError(f"session {read_session.id!r} was deleted meanwhile")
        print_line(await change(service, session, force=options["force"]))
    return 0


async def _change_all(
    action: str, source: str, key: SessionKey, force: bool, **options: Any
) -> int:
    """Changes all sessions of an app; returns the exit code.

    The arguments are those of `_run`. `key` may name the app and a user.
    """
    listed = await all_sessions.find_sessions(source, key)
    change = _choose_change(action, **options)
    async with _open(source) as service:
        return await all_sessions.change_stored(service, listed, change, force)


def _choose_change(
    action: str, agent: str, focus: str, **_: object
) -> sessions.SessionChange:
    """Returns the function of `contextguard_adk.sessions` for an action.

    The names of the agent, and the focus of "compact", are its arguments already.
    """
    if action == "compact":
        return functools.partial(sessions.compact, agent=agent, focus=focus)
    return functools.partial(getattr(sessions, action), agent=agent)


def _edit(text: str, text_file: Path | None) -> str:
    """Returns the text of a file; without a file, the text that the user writes.

    The user changes `text` in an editor. Returns "" if the user closes the editor
    without saving.
    """
    if text_file:
        return text_file.read_text("utf-8")
    return click.edit(text) or ""


@asynccontextmanager
async def _open(source: str) -> AsyncIterator[BaseSessionService]:
    """Opens a database, or an SQLite file, with the service that has written it.

    An SQLite file is given as a path, or as `adk web` takes it: "sqlite:///path". Two
    services of ADK write such files, each with tables of its own.
    """
    service = _make_service(source)
    try:
        yield service
    finally:
        close = getattr(service, "close", None)  # Some services have no connection.
        if close:
            await close()


def _make_service(source: str) -> BaseSessionService:
    """Makes the service that `_open` opens."""
    url = source
    path = source.removeprefix("sqlite:///")
    is_file = "://" not in path
    if is_file:
        with closing(sqlite3.connect(path)) as connection:
            is_of_database_service = is_by_database_service(connection)
        if not is_of_database_service:
            return SqliteSessionService(path)
        url = f"sqlite+aiosqlite:///{path}"

    # The import needs SQLAlchemy, an extra of ADK.
    from google.adk.sessions import DatabaseSessionService

    return DatabaseSessionService(url)


async def _purge(
    artifact_uri: str, key: SessionKey, is_all: bool, database: str | None
) -> int:
    """Deletes the summaries that a guard has saved as artifacts; returns the exit code.

    All other artifacts stay. Prints a line for each session, with the number of deleted
    artifacts.

    Args:
        artifact_uri: The URI of an artifact service.
        key: The names of the session, all three of them. If `is_all` is set, the names
            of the app and of a user; None for all users.
        is_all: Whether the artifacts of several sessions are deleted.
        database: The file or the URL that has these sessions, because an artifact
            service does not list sessions.
    """
    # Only this action needs ADK's command line, to which the registry belongs.
    from google.adk.cli.service_registry import get_service_registry

    registry = get_service_registry()
    # The service is None for a URI of an unknown kind.
    service = registry.create_artifact_service(artifact_uri, agents_dir=".")
    if is_all:
        if service is None or database is None:
            raise CommandError(
                "give an artifact service as SESSION, and with --database the database "
                "that has the sessions"
            )
        listed = await all_sessions.find_sessions(database, key)
        return await all_sessions.purge_artifacts(service, listed)

    if service is None or not (key.app and key.user and key.session):
        raise CommandError(
            "give an artifact service as SESSION, and --app, --user, --session"
        )
    count = await sessions.purge(
        service, app_name=key.app, user_id=key.user, session_id=key.session
    )
    print_line(f"Session {key.session!r}: {all_sessions.describe_deleted(count)}.")
    return 0
