"""`adk test`, which records conversations and replays them, with a guarded agent."""

from __future__ import annotations

import json
import os
import subprocess
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
root_agent = LlmAgent(name="agent", model="gemini-2.5-flash", tools=[look])
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
    server = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def adk_test(folder: Path, *options: str, **environment: str) -> str:
    """Runs `adk test` in a process of its own; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "google.adk.cli", "test", str(folder), *options],
        env={**os.environ, "GOOGLE_API_KEY": "key", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_test(folder: Path, messages: list[str]) -> Path:
    """Writes a test that says these messages, still without the answers."""
    path = folder / "guarded" / "tests" / f"{len(messages)}.json"
    events = [
        {"author": "user", "content": {"role": "user", "parts": [{"text": text}]}}
        for text in messages
    ]
    path.write_text(json.dumps({"events": events}))
    return path


def test_what_adk_test_records_passes_its_replay(
    tmp_path: Path, provider_url: str
) -> None:
    """A short conversation and one above the threshold; nothing of the guard's is in
    the record."""
    (tmp_path / "guarded" / "tests").mkdir(parents=True)
    (tmp_path / "guarded" / "__init__.py").write_text("from . import agent\n")
    (tmp_path / "guarded" / "agent.py").write_text(AGENT)
    short = write_test(tmp_path, ["What is in the hall?", "And now?"])
    long = write_test(tmp_path, [f"Look again: {n}. " * 60 for n in range(12)])

    adk_test(tmp_path, "--rebuild", GOOGLE_GEMINI_BASE_URL=provider_url)

    for path, turns in ((short, 2), (long, 12)):
        assert path.read_text().count('"functionResponse"') == turns
        assert "context_guard" not in path.read_text()
    assert "2 passed" in adk_test(tmp_path)
