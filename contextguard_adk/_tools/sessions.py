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
        action: "purge", "show", or the name of another function of `sessions`.
        source: The file or the URL that has the session; for "purge", the URI of an
            artifact service.
        key: The names of the session.
        options: The other options of the command. "purge" needs none of them.
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
        action: "show", or the name of the function of `sessions` that changes it.
        source: The file or the URL that has the session.
        key: The names of the session.
        is_full: Whether "show" prints the summaries.
        options: "agent", "force", "text" and "focus". The last two are options of
            "edit" and "compact" alone.
    """
    # A file is read from a copy, so nothing is changed if it is not valid.
    found = await load_session(source, key)
    if action == "show":
        lines = sessions.show(found, options["agent"], is_full)
        return lines or [f"Session {found.id!r}: nothing is stored."]

    if len(await list_sessions(source, key)) > 1:
        raise CommandError("which session? Give its --app, --user and --session")

    text_file = options.pop("text")
    if action != "compact":
        del options["focus"]
    service = _open(source)
    try:
        session = await service.get_session(
            app_name=found.app_name, user_id=found.user_id, session_id=found.id
        )
        if action == "edit":
            stored_text = sessions.read(found, options["agent"])
            options["text"] = _edit(stored_text, text_file)
        change = getattr(sessions, action)
        return [await change(service, session, **options)]
    finally:
        close = getattr(service, "close", None)  # Some services have no connection.
        if close:
            await close()


def _edit(text: str, text_file: Path | None) -> str:
    """Returns the text of a file; without one, what the user makes of `text`.

    The user writes in an editor. "" if the editor is closed without saving.
    """
    if text_file:
        return text_file.read_text("utf-8")
    return click.edit(text) or ""


def _open(source: str) -> BaseSessionService:
    """Opens a database, or an SQLite file, with the service that has written it.

    An SQLite file is given as a path, or as `adk web` takes it: "sqlite:///path". Both
    services of ADK write such files, in different forms.
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

    # ADK needs SQLAlchemy for this service, which is an extra.
    from google.adk.sessions import DatabaseSessionService

    return DatabaseSessionService(url)


async def _purge(artifact_uri: str, key: SessionKey) -> str:
    """Deletes the artifacts of a session; returns the line to print."""
    # The registry belongs to ADK's command line, which no other action needs.
    from google.adk.cli.service_registry import get_service_registry

    registry = get_service_registry()
    service = registry.create_artifact_service(artifact_uri, agents_dir=".")
    if service is None or not (key.app and key.user and key.session):
        raise CommandError(
            "give an artifact service as SESSION, and --app, --user, --session"
        )

    count = await sessions.purge(
        service, app_name=key.app, user_id=key.user, session_id=key.session
    )
    return f"Session {key.session!r}: {count} artifacts are deleted."
