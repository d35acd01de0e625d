"""`agentengine://` as a source of `replay` and `report`."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from google.adk.cli.service_registry import get_service_registry
from google.adk.events.event import Event
from google.adk.sessions import InMemorySessionService, VertexAiSessionService
from google.genai import types

from benchmarks import fleet
from contextguard_adk._tools.cli import main

ENGINE = "projects/project/locations/us-central1/reasoningEngines/7"
SOURCE = f"agentengine://{ENGINE}"
EVENTS: list[Event] = [*fleet.write_events("agent_1", "gpt-4o", 12, "engine")]
FACTORIES = get_service_registry()._session_factories
MODEL_CALLS = sum(event.usage_metadata is not None for event in EVENTS)


def check(capsys: Any) -> None:
    """What both commands say of the one session there is."""
    assert main(["replay", SOURCE, "--list", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["user"], row["session"], row["events"]) == ("ann", "s1", None)
    assert main(["replay", SOURCE, "--json", "--user", "ann"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["session"], len(found["calls"])) == ("s1", MODEL_CALLS)


async def test_the_service_of_adk_reads_the_sessions(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `adk web` makes it of that URL; the newest is taken."""
    service = InMemorySessionService()
    made = list[str]()
    session = await service.create_session(
        app_name="app", user_id="ann", session_id="s1"
    )
    for event in EVENTS:
        await service.append_event(session, event)

    def create(uri: str, **_: Any) -> InMemorySessionService:
        made.append(uri)
        return service

    monkeypatch.setitem(FACTORIES, "agentengine", create)
    await asyncio.to_thread(check, capsys)
    assert made == [SOURCE, SOURCE]


def test_without_the_extra_it_says_what_to_install(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, as for a URL that is none of Agent Engine."""
    for name in ("agentplatform", "vertexai"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["replay", SOURCE]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "Agent Engine needs Google's client: pip install" in line
    assert main(["report", "agentengine://a/b"]) == 2
    assert "mal-formatted" in capsys.readouterr().err


class _Engine(BaseHTTPRequestHandler):
    """Agent Engine's answers about one session, over HTTP."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        session = {
            "name": f"{ENGINE}/sessions/s1",
            "userId": "ann",
            "createTime": "2026-01-01T00:00:00Z",
            "updateTime": "2026-01-01T00:00:00Z",
        }
        answer: dict[str, Any] = session
        if path.endswith("/events"):
            answer = {"sessionEvents": [_api_event(event) for event in EVENTS]}
        elif path.endswith("/sessions"):
            answer = {"sessions": [session]}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


def _api_event(event: Event) -> dict[str, Any]:
    return {
        "name": f"{ENGINE}/sessions/s1/events/{event.id}",
        "author": event.author,
        "invocationId": event.invocation_id,
        "timestamp": "2026-01-01T00:00:00Z",
        "rawEvent": event.model_dump(mode="json", exclude_none=True),
    }


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serves one session on loopback; the real client asks for it."""
    pytest.importorskip("agentplatform")
    import google.auth
    from google.oauth2.credentials import Credentials

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Engine)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    options = types.HttpOptions(base_url=f"http://127.0.0.1:{server.server_port}")

    class Service(VertexAiSessionService):
        """Asks the server on loopback."""

        def _api_client_http_options_override(self) -> types.HttpOptions:
            return options

    def create(uri: str, **_: Any) -> Service:
        return Service("project", "us-central1", uri.rpartition("/")[2])

    monkeypatch.setitem(FACTORIES, "agentengine", create)
    nobody = Credentials(token="none"), "project"  # type: ignore[no-untyped-call]
    monkeypatch.setattr(google.auth, "default", lambda **_: nobody)
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.vertex
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("engine")
def test_sessions_come_over_http(capsys: Any) -> None:
    """With the client that ADK's service uses."""
    check(capsys)
