"""`contextguard sessions`: what is stored of a session, and changes to it."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
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
    """Prints what is stored, or one line that says what was changed."""
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
    found = await load_session(source, key)  # It checks what it reads, in a copy.
    if action == "show":
        lines = sessions.show(found, options["agent"], is_full)
        return lines or [f"Session {found.id!r}: nothing is stored."]
    if len(await list_sessions(source, key)) > 1:
        raise CommandError("which session? Give its --app, --user and --session")
    service = _open(source)
    path = options.pop("text")
    place: dict[str, Any] = {"app_name": found.app_name, "user_id": found.user_id}
    try:
        session = await service.get_session(session_id=found.id, **place)
        if action != "compact":
            del options["focus"]
        if action == "edit":
            known = sessions.read(found, options["agent"])
            written = path.read_text("utf-8") if path else click.edit(known)
            options["text"] = written or ""
        return [await getattr(sessions, action)(service, session, **options)]
    finally:
        if close := getattr(service, "close", None):
            await close()


def _open(source: str) -> BaseSessionService:
    """Opens a database, or an SQLite file as `adk web` or a database's URL has it."""
    path = source.removeprefix("sqlite:///")
    if "://" not in path:
        with closing(sqlite3.connect(path)) as file:
            if not is_by_database_service(file):
                return SqliteSessionService(path)
        source = f"sqlite+aiosqlite:///{path}"
    from google.adk.sessions import DatabaseSessionService

    return DatabaseSessionService(source)


async def _purge(_: str, uri: str, key: SessionKey, **__: Any) -> list[str]:
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
