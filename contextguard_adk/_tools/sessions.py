"""`contextguard sessions`: what is stored of a session, and changes to it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import click
from google.adk.sessions import BaseSessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from rich.console import Console

from contextguard_adk import sessions
from contextguard_adk._tools.recordings import SessionKey, load_session
from contextguard_adk._tools.terminal import CommandError, print_line, quiet_logs


def run_sessions(action: str, source: str, **options: Any) -> None:
    """Prints what is stored, or one line that says what was changed."""
    key = SessionKey(*(options.pop(name) for name in ("app", "user", "session")))
    with quiet_logs(Console(stderr=True)):
        try:
            change = _purge(source, key) if action == "purge" else None
            change = change or _run(action, source, key, **options)
            lines = asyncio.run(change)
        except (sessions.SessionError, ValueError, OSError, sqlite3.Error) as error:
            raise CommandError(f"nothing is changed: {error}") from error
    for line in lines:
        print_line(line)


async def _run(
    action: str,
    source: str,
    key: SessionKey,
    agent: str | None,
    is_full: bool,
    text: Path | None,
    focus: str,
    force: bool,
) -> list[str]:
    session = await load_session(source, key)  # It checks what it reads, in a copy.
    stored = sessions.show(session, agent)
    if action == "show":
        lines = [line for each in stored for line in _describe(each, is_full)]
        return lines or [f"Session {session.id!r}: nothing is stored."]
    more = {"focus": focus} if action == "compact" else {}
    if action == "edit":
        known = next((each.summary for each in stored if each.summary), "")
        written = text.read_text("utf-8") if text else click.edit(known)
        more["text"] = written or ""
    service = _open(source)
    place: dict[str, Any] = {"app_name": session.app_name, "user_id": session.user_id}
    try:
        found = await service.get_session(session_id=session.id, **place)
        change = getattr(sessions, action)
        return [await change(service, found, agent=agent, force=force, **more)]
    finally:
        if close := getattr(service, "close", None):
            await close()


def _describe(stored: sessions.StoredAgent, is_full: bool) -> Iterator[str]:
    summary = stored.summary
    said = f"{stored.summarized_count:,} messages summarized in "
    said = f"{said}{len(summary):,} characters" if summary is not None else "no summary"
    counts = f"{stored.pin_count} pins, {stored.todo_count} todos"
    yield f"{stored.agent}: {stored.usage or 'no count'}; {said}; {counts}"
    yield from (summary or "").splitlines() if is_full else ()


def _open(source: str) -> BaseSessionService:
    """Opens a database, or an SQLite file as `adk web` or a database's URL has it."""
    path = Path(source.removeprefix("sqlite:///"))
    if "://" not in str(path):
        with closing(sqlite3.connect(path)) as file:
            query = "SELECT typeof(update_time) FROM sessions LIMIT 1"
            if file.execute(query).fetchall() != [("text",)]:
                return SqliteSessionService(str(path))
        source = f"sqlite+aiosqlite:///{path}"
    from google.adk.sessions import DatabaseSessionService

    return DatabaseSessionService(source)


async def _purge(uri: str, key: SessionKey) -> list[str]:
    from google.adk.cli.service_registry import get_service_registry

    service = get_service_registry().create_artifact_service(uri, agents_dir=".")
    if service is None or not (key.app and key.user and key.session):
        raise CommandError("give an --artifact_service_uri, --app, --user, --session")
    count = await sessions.purge(
        service, app_name=key.app, user_id=key.user, session_id=key.session
    )
    return [f"Session {key.session!r}: {count} artifacts are deleted."]
