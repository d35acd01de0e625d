"""The sample of two apps behind one server, run as its image runs it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contextguard_adk._tools.cli import main

TEAM = Path(__file__).parent.parent / "samples" / "team"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Where the server listens; sessions are in PostgreSQL if there is one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    folder = tmp_path / "team"
    shutil.copytree(TEAM, folder)
    file = f"sqlite+aiosqlite:///{tmp_path / 'sessions.db'}"
    database = os.environ.get("CONTEXTGUARD_TEST_POSTGRES_URL") or file
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "CONTEXTGUARD_CONFIG": str(folder / "guard.toml"),
        "SESSION_SERVICE_URI": database,
    }
    environment.pop("MODEL", None)

    command = [sys.executable, "-m", "uvicorn", "server:app", f"--port={port}"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    address = f"http://127.0.0.1:{port}"

    try:
        for _ in range(300):
            try:
                assert json.loads(ask(f"{address}/healthz")) == {"status": "ok"}
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.wait(20)


def ask(url: str, body: Any = None) -> str:
    """Sends a request; returns the answer's text."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.slow
def test_both_apps_are_guarded_by_one_file(address: str) -> None:
    """Each by its own strategy, and each with figures of its own."""
    session = f"team-{os.getpid()}-{time.monotonic_ns()}"
    for app, count in ("support", 9), ("billing", 5):
        place = f"apps/{app}/users/u/sessions"
        ask(f"{address}/{place}", {"sessionId": session})
        for turn in range(count):
            text = f"Question {turn} of {app}. " + "And so on. " * 60
            message = {"role": "user", "parts": [{"text": text}]}
            body = {"appName": app, "userId": "u", "sessionId": session}
            events = json.loads(ask(f"{address}/run", {**body, "newMessage": message}))
            assert not [event for event in events if event.get("errorCode")]
        request = urllib.request.Request(f"{address}/{place}/{session}")
        state = json.loads(ask(request.full_url))["state"]
        assert "tokens" in state[f"context_guard:compacted:{app}"]
        request.method = "DELETE"
        urllib.request.urlopen(request, timeout=30).close()

    lines = ask(f"{address}/metrics/").splitlines()
    for app, strategy in ("support", "SlidingWindow"), ("billing", "Threshold"):
        [line] = [
            line
            for line in lines
            if line.startswith("context_guard_compactions_total{")
            and f'context_guard_app="{app}"' in line
        ]
        assert f'context_guard_strategy="{strategy}"' in line


def test_the_settings_and_the_agents_pass_their_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the image checks them; each table names an agent of one of the apps."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["check", str(TEAM / "guard.toml")]) == 0

    capsys.readouterr()
    tables = tomllib.loads((TEAM / "guard.toml").read_text("utf-8"))
    assert all(
        (TEAM / "agents" / name / "agent.py").exists() for name in tables["agents"]
    )

    copied = (TEAM / "Dockerfile").read_text("utf-8")
    for name in ("guard.toml", "server.py", "agents/", "requirements.txt"):
        assert name in copied
        assert (TEAM / name).exists()
