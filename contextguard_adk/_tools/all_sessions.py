"""`contextguard sessions ACTION … --all`: changes the sessions of an app, one by one.

Each session gets a line that says what was changed, or why nothing was. A session that
cannot be changed does not keep the others from being changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from google.adk.artifacts import BaseArtifactService
from google.adk.sessions import BaseSessionService

from contextguard_adk import sessions
from contextguard_adk._tools.recordings import ListedSession, SessionKey, list_sessions
from contextguard_adk._tools.terminal import CommandError, print_line
from contextguard_adk.sessions import NoSummaryError, SessionChange, SessionError

ACTIONS = ("compact", "leave", "purge", "reset")
"""The actions that `--all` is for."""

Outcome = Literal["changed", "skipped", "without a summary"]

_Change = Callable[[ListedSession], Awaitable[str]]
"""Changes a session; returns the line that names the change."""


async def find_sessions(source: str, key: SessionKey) -> list[ListedSession]:
    """Lists the sessions of one app, the one that has rested longest first.

    Raises:
        CommandError: There is no such session, or `key` names no app and there are
            sessions of several apps.
    """
    if key.session:
        raise CommandError(
            "--session names one session, and --all is for all: give one"
        )

    newest_first = await list_sessions(source, key)
    if not newest_first:
        given = ", ".join(f"{field} {name!r}" for field, name in key.given.items())
        raise CommandError(f"there is no session of {given or 'any app'}")

    apps = sorted({each.app for each in newest_first})
    if len(apps) > 1:
        raise CommandError(f"which app? Give --app, one of {', '.join(apps)}")
    return newest_first[::-1]


async def change_stored(
    service: BaseSessionService,
    listed: Sequence[ListedSession],
    change: SessionChange,
    force: bool,
) -> int:
    """Changes the state of sessions; returns the exit code of the command.

    Args:
        service: The session service.
        listed: The sessions.
        change: A function of `contextguard_adk.sessions` that takes a service, a
            session and `force`.
        force: Whether sessions are changed in which a run seems to be under way.
    """

    async def change_one(names: ListedSession) -> str:
        session = await service.get_session(
            app_name=names.app, user_id=names.user, session_id=names.session
        )
        if session is None:
            raise SessionError("it was deleted meanwhile")

        return await change(service, session, force=force)

    return await _change_each(listed, change_one)


async def purge_artifacts(
    service: BaseArtifactService, listed: Sequence[ListedSession]
) -> int:
    """Deletes the saved summaries of sessions; returns the exit code of the command."""

    async def purge_one(names: ListedSession) -> str:
        count = await sessions.purge(
            service,
            app_name=names.app,
            user_id=names.user,
            session_id=names.session,
        )
        if count == 0:
            raise NoSummaryError("there is no saved summary")
        return f"{_name(names)}: {describe_deleted(count)}."

    return await _change_each(listed, purge_one)


def describe_deleted(count: int) -> str:
    """Says how many artifacts were deleted: "1 artifact is deleted"."""
    return "1 artifact is deleted" if count == 1 else f"{count:,} artifacts are deleted"


async def _change_each(listed: Sequence[ListedSession], change: _Change) -> int:
    """Changes sessions and prints a line on each, and one on all of them.

    Returns:
        1 if a session was skipped, else 0.
    """
    outcomes = Counter[Outcome]()
    for names in listed:
        outcome, line = await _try_change(names, change)
        outcomes[outcome] += 1
        print_line(line)

    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.items())
    sessions_word = "session" if len(listed) == 1 else "sessions"
    print_line(f"{len(listed):,} {sessions_word} of app {listed[0].app!r}: {counts}.")
    if outcomes["skipped"]:
        print_line("Those that were skipped can be tried again.")
        return 1
    return 0


async def _try_change(names: ListedSession, change: _Change) -> tuple[Outcome, str]:
    """Changes a session; returns the outcome and the line on it."""
    try:
        return "changed", await change(names)
    except NoSummaryError as error:
        return "without a summary", f"{_name(names)}: {error}."
    except Exception as error:  # noqa: BLE001 - a service may raise anything.
        reason = str(error) if isinstance(error, SessionError) else _describe(error)
        return "skipped", f"{_name(names)}: skipped: {reason}."


def _name(names: ListedSession) -> str:
    return f"Session {names.session!r} of user {names.user!r}"


def _describe(error: Exception) -> str:
    """Describes an error of a session service in one line, such as "OSError: …"."""
    # Not every ADK 2 has this class to import.
    if type(error).__name__ == "StaleSessionError":
        return "a run has written to it meanwhile"

    # SQLAlchemy keeps the error of the database's client as `orig`. Its own message
    # has several lines, with the statement and its values.
    cause = getattr(error, "orig", None) or error
    lines = str(cause).splitlines()
    first_line = lines[0].strip().rstrip(".") if lines else ""
    return f"{type(cause).__name__}: {first_line[:200]}"
