"""Fixtures for tests of agents with the guard; pytest finds them by itself.

Every pytest run of an environment with the package imports this module, so nothing else
is imported before a fixture is used.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from google.adk.sessions import InMemorySessionService, Session

    from contextguard_adk.testing import SimulatedLlm


@pytest.fixture
def contextguard_llm() -> type[SimulatedLlm]:
    """A model that runs offline, such as `contextguard_llm(context_window=8_000)`."""
    from contextguard_adk.testing import SimulatedLlm

    return SimulatedLlm


@pytest.fixture
def contextguard_strict_llm() -> Iterator[Callable[..., SimulatedLlm]]:
    """The same model; the test fails at its end if a request was refused.

    A request is refused if it is longer than the context window, or breaks the order of
    tool calls and results.
    """
    from contextguard_adk.testing import SimulatedLlm

    made: list[SimulatedLlm] = []

    def make(**settings: object) -> SimulatedLlm:
        llm = SimulatedLlm.model_validate(settings)
        made.append(llm)
        return llm

    yield make
    requests = sum(llm.calls for llm in made)
    refused = sum(llm.rejections + llm.violations for llm in made)
    assert not refused, f"{refused} of {requests} requests refused"


@pytest.fixture
def contextguard_recording() -> Callable[
    [str], Awaitable[tuple[InMemorySessionService, Session]]
]:
    """Loads a recorded session into a service of its own, to go on with it.

    `service, session = await contextguard_recording("session.json")`: a JSON export, an
    SQLite file, or a database's URL, of which the newest session is taken.
    """
    from google.adk.sessions import InMemorySessionService

    from contextguard_adk._tools.recordings import SessionKey, load_session

    async def load(source: str) -> tuple[InMemorySessionService, Session]:
        recorded = await load_session(source, SessionKey())
        service = InMemorySessionService()
        session = await service.create_session(
            app_name=recorded.app_name,
            user_id=recorded.user_id,
            session_id=recorded.id,
        )
        for event in recorded.events:
            await service.append_event(session, event)
        return service, session

    return load
