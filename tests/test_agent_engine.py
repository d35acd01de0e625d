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

from contextguard_adk._tools.cli import main
from tests.builders import call, event, model, response, user

ENGINE = "projects/project/locations/us-central1/reasoningEngines/7"
SOURCE = f"agentengine://{ENGINE}"
FACTORIES = get_service_registry()._session_factories


def answer(content: types.Content, prompt_tokens: int) -> Event:
    """An answer of the agent, with the count of its request."""
    made = event(content, "agent_1")
    made.model_version = "gpt-5.4-mini"
    made.usage_metadata = types.GenerateContentResponseUsageMetadata(
        prompt_token_count=prompt_tokens
    )
    return made


EVENTS = [
    event(user("Where is part 7?"), "user"),
    answer(call("search", "call-1"), 200),
    event(response("search", "Hall B.", "call-1"), "agent_1"),
    answer(model("In hall B."), 250),
]
MODEL_CALLS = 2


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
    for each in EVENTS:
        await service.append_event(session, each)

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
            answer = {"sessionEvents": [_api_event(each) for each in EVENTS]}
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


def _api_event(sent: Event) -> dict[str, Any]:
    return {
        "name": f"{ENGINE}/sessions/s1/events/{sent.id}",
        "author": sent.author,
        "invocationId": sent.invocation_id,
        "timestamp": "2026-01-01T00:00:00Z",
        "rawEvent": sent.model_dump(mode="json", exclude_none=True),
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
