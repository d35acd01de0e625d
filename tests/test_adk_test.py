"""`adk test`, which records conversations and replays them, with a guarded agent."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

AGENT = '''
from google.adk.agents import LlmAgent
from google.adk.apps import App

from contextguard_adk import ContextGuardPlugin, Threshold


def look(place: str) -> str:
    """Looks at a place."""
    return f"Nothing is in the {place}."


guard = ContextGuardPlugin(default=Threshold(context_window=4_000))
root_agent = LlmAgent(name="agent", model="gemini-flash-latest", tools=[look])
app = App(name="guarded", root_agent=root_agent, plugins=[guard])
'''


class Provider(BaseHTTPRequestHandler):
    """Counts a prompt, and answers what was looked up or has it looked up."""

    def do_POST(self) -> None:
        """Answers one request, as the Gemini API does."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        newest = json.loads(body)["contents"][-1]["parts"][-1]
        part: dict[str, Any] = {"text": "Nothing is there. " * 60}
        if "functionResponse" not in newest:
            part = {"functionCall": {"name": "look", "args": {"place": "hall"}}}
        content = {"role": "model", "parts": [part]}
        answer = {
            "candidates": [{"content": content, "finishReason": "STOP"}],
            "usageMetadata": {"promptTokenCount": len(body) // 3},
        }
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps quiet."""


@pytest.fixture
def provider_url() -> Iterator[str]:
    """A provider on loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Provider) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.02])
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Of Google's client.
@pytest.mark.slow
def test_what_adk_test_records_passes_its_replay(
    tmp_path: Path,
    provider_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A short conversation and one above the threshold; nothing of the guard's is in
    the record. ADK records here, and replays in a process of its own."""
    from google.adk.cli.cli_tools_click import main

    folder = tmp_path / "guarded"
    (folder / "tests").mkdir(parents=True)
    (folder / "__init__.py").write_text("from . import agent\n")
    (folder / "agent.py").write_text(AGENT)
    talks = ["What is in the hall?"] * 2, [f"Look again: {n}. " * 60 for n in range(12)]
    for messages in talks:  # Still without the answers.
        said = [{"role": "user", "parts": [{"text": text}]} for text in messages]
        events = [{"author": "user", "content": content} for content in said]
        path = folder / "tests" / f"{len(messages)}.json"
        path.write_text(json.dumps({"events": events}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("GOOGLE_API_KEY", "key")
    for option, url in (["--rebuild"], provider_url), ([], "http://127.0.0.1:9"):
        monkeypatch.setenv("GOOGLE_GEMINI_BASE_URL", url)
        with pytest.raises(SystemExit) as ended:
            main(["test", str(tmp_path), *option])
        printed = capfd.readouterr()
        assert ended.value.code == 0, printed.out + printed.err
        for turns in (2, 12):
            recorded = (folder / "tests" / f"{turns}.json").read_text()
            assert recorded.count('"functionResponse"') == turns
            assert "context_guard" not in recorded
    assert "2 passed" in printed.out
