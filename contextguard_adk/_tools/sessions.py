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
    """Runs an action: prints the stored state, or one line that tells the change."""
    with quiet_logs(Console(stderr=True)):
        try:
            act = _purge if action == "purge" else _run
            lines = asyncio.run(act(action, source, key, **options))
        except CommandError:
            raise
        except Exception as error:  # A database's client may raise anything.
            raise CommandError(f"nothing is changed: {error}") from error

    for line in lines:
        print_line(line)


async def _run(
    action: str, source: str, key: SessionKey, is_full: bool, **options: Any
) -> list[str]:
    """Runs an action on a stored session; returns the lines to print.

    The options of the command are the arguments of the action's function, but for those
    that only some actions have.
    """
    found = await load_session(source, key)  # Checks the file, in a copy.
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
        act = getattr(sessions, action)
        return [await act(service, session, **options)]
    finally:
        close = getattr(service, "close", None)
        if close:
            await close()


def _edit(text: str, text_file: Path | None) -> str:
    """Returns the new text: that of a file, or what the user writes in an editor."""
    if text_file:
        return text_file.read_text("utf-8")
    return click.edit(text) or ""


def _open(source: str) -> BaseSessionService:
    """Opens a database, or an SQLite file, for the service that has written it.

    An SQLite file is given as a path, or as `adk web` takes it: "sqlite:///path".
    """
    url = source
    path = source.removeprefix("sqlite:///")
    if "://" not in path:
        with closing(sqlite3.connect(path)) as file:
            if not is_by_database_service(file):
                return SqliteSessionService(path)
        url = f"sqlite+aiosqlite:///{path}"

    from google.adk.sessions import DatabaseSessionService

    return DatabaseSessionService(url)


async def _purge(_: str, uri: str, key: SessionKey, **__: Any) -> list[str]:
    """Deletes the artifacts of a session; returns the line to print.

    `_` and `__` take the action and the options of other actions.
    """
    from google.adk.cli.service_registry import get_service_registry

    service = get_service_registry().create_artifact_service(uri, agents_dir=".")
    if service is None or not (key.app and key.user and key.session):
        raise CommandError(
            "give an artifact service as SESSION, and --app, --user, --session"
        )

    count = await sessions.purge(
        service, app_name=key.app, user_id=key.user, session_id=key.session
    )
    return [f"Session {key.session!r}: {count} artifacts are deleted."]
