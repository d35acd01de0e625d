"""`contextguard sessions`: shows and changes the state that a guard has stored."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import click
from google.adk.sessions import BaseSessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from rich.console import Console

from contextguard_adk import sessions
from contextguard_adk._tools.recordings import (
    SessionKey,
    is_by_database_service,
    list_sessions,
    load_session,
)
from contextguard_adk._tools.terminal import CommandError, print_line, quiet_logs


def run_sessions(action: str, source: str, key: SessionKey, **options: Any) -> None:
    """Runs an action: prints the stored state, or one line that tells the change.

    Args:
        action: The name of a function of `contextguard_adk.sessions`: "show", "purge",
            "compact", "reset", "edit" or "leave".
        source: The file or the URL that has the session; for "purge", the URI of an
            artifact service.
        key: The names of the session.
        options: The other options of the command, see `_run`. They have no effect on
            "purge".
    """
    with quiet_logs(Console(stderr=True)):
        try:
            if action == "purge":
                lines = [asyncio.run(_purge(source, key))]
            else:
                lines = asyncio.run(_run(action, source, key, **options))
        except CommandError:
            raise
        except Exception as error:  # A database's client may raise anything.
            raise CommandError(f"nothing is changed: {error}") from error

    for line in lines:
        print_line(line)


async def _run(
    action: str, source: str, key: SessionKey, is_full: bool, **options: Any
) -> list[str]:
    """Shows or changes a stored session; returns the lines to print.

    Args:
        action: "show", or a function of `contextguard_adk.sessions` that changes a
            session.
        source: The file or the URL that has the session.
        key: The names of the session.
        is_full: Whether "show" returns the texts of the summaries as well.
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
        return lines or [f"Session {read_session.id!r}: nothing is stored."]

    if len(await list_sessions(source, key)) > 1:
        raise CommandError("which session? Give its --app, --user and --session")

    service = _open(source)
    try:
        session = await service.get_session(
            app_name=read_session.app_name,
            user_id=read_session.user_id,
            session_id=read_session.id,
        )
        arguments = {"agent": options["agent"], "force": options["force"]}
        if action == "compact":
            arguments["focus"] = options["focus"]
        elif action == "edit":
            stored_text = sessions.read(read_session, options["agent"])
            arguments["text"] = _edit(stored_text, options["text"])
        change = getattr(sessions, action)
        return [await change(service, session, **arguments)]
    finally:
        close = getattr(service, "close", None)  # Some services have no connection.
        if close:
            await close()


def _edit(text: str, text_file: Path | None) -> str:
    """Returns the text of a file; without a file, the text that the user writes.

    The user changes `text` in an editor. Returns "" if the user closes the editor
    without saving.
    """
    if text_file:
        return text_file.read_text("utf-8")
    return click.edit(text) or ""


def _open(source: str) -> BaseSessionService:
    """Opens a database, or an SQLite file, with the service that has written it.

    An SQLite file is given as a path, or as `adk web` takes it: "sqlite:///path". Two
    services of ADK write such files, each with tables of its own.
    """
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


async def _purge(artifact_uri: str, key: SessionKey) -> str:
    """Deletes the summaries of a session that a guard has saved as artifacts.

    All other artifacts of the session stay. Returns the line to print, with the number
    of deleted artifacts. All three names of the session must be given.
    """
    # Only this action needs ADK's command line, to which the registry belongs.
    from google.adk.cli.service_registry import get_service_registry

    registry = get_service_registry()
    # The service is None for a URI of an unknown kind.
    service = registry.create_artifact_service(artifact_uri, agents_dir=".")
    if service is None or not (key.app and key.user and key.session):
        raise CommandError(
            "give an artifact service as SESSION, and --app, --user, --session"
        )

    count = await sessions.purge(
        service, app_name=key.app, user_id=key.user, session_id=key.session
    )
    return f"Session {key.session!r}: {count} artifacts are deleted."
