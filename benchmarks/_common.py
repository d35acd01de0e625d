"""What the benchmarks share: real material, a quiet process, a table and a file."""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import google.adk
import pydantic_core
import tiktoken
from pydantic_core import to_json
from rich.console import Console
from rich.measure import Measurement
from rich.progress import track
from rich.table import Table

from contextguard_adk._providers.costs import TYPICAL_COSTS
from contextguard_adk.records import Usage

KINDS = ("prose", "code", "json", "digits", "base64", "cjk", "other languages")
"""The kinds of text that `write_text` knows."""

_READMES = ("pydantic", "google-genai", "httpx", "rich", "tqdm", "fastapi", "litellm")
_SOURCES = ("agents", "flows", "sessions", "tools", "models")
_CJK = ("zh", "ja", "ko")
_OTHERS = ("de", "es", "ru", "ar", "hi")
_LICENSE = Path(__file__).parent.parent / "LICENSE"


_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def quiet() -> None:
    """Keeps warnings, logs and ADK's message traces out of what is printed."""
    os.environ.setdefault("ADK_TELEMETRY_SCHEMA_VERSION_OPT_IN", "1")
    os.environ.setdefault("ADK_CAPTURE_MESSAGE_CONTENT_IN_SPANS", "false")
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def find_tokenizers() -> Path:
    """Returns litellm's folder of vocabularies, without importing litellm."""
    spec = importlib.util.find_spec("litellm")
    assert spec
    assert spec.origin
    return Path(spec.origin).parent / "litellm_core_utils" / "tokenizers"


def load_encoding(name: str) -> tiktoken.Encoding:
    """Loads a vocabulary such as "cl100k_base" from litellm's folder."""
    # Otherwise tiktoken would download the vocabulary.
    os.environ["TIKTOKEN_CACHE_DIR"] = str(find_tokenizers())
    return tiktoken.get_encoding(name)  # tiktoken loads each once.


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """Makes a parser with the argument that every benchmark takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser


def map_in_processes(
    function: Callable[[_Task], _Result], tasks: Sequence[_Task]
) -> list[_Result]:
    """Calls a function of a module with each task, on all cores, in order."""
    spawn = get_context("spawn")
    with ProcessPoolExecutor(mp_context=spawn, initializer=quiet) as pool:
        results = pool.map(function, tasks)
        is_hidden = not sys.stderr.isatty()
        return list(
            track(results, "playing", len(tasks), transient=True, disable=is_hidden)
        )


def print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[object]], notes: str = ""
) -> None:
    """Prints a table; the first column is text, the others are numbers.

    It is as wide as it has to be, whatever the terminal: no number is cut.
    """
    table = Table(title=title, title_justify="left", header_style="bold")
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(cell) for cell in row))
    console = Console()
    unbounded = console.options.update(max_width=10_000)
    width = Measurement.get(console, unbounded, table).maximum
    console = Console(width=max(console.width, width))
    console.print(table)
    if notes:
        console.print(notes, highlight=False, markup=False, soft_wrap=True)


def print_markdown(
    title: str, header: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    """Prints a table as the documentation has it, below its title."""
    cells = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    lines = (f"| {' | '.join(_cell(cell) for cell in row)} |" for row in cells)
    print(title, "", *lines, "", sep="\n")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def write_json(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Writes the figures, where asked."""
    if path:
        path.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")


def price(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
    """What calls cost, in uncached prompt tokens.

    Args:
        prompt_tokens: Of the requests, cached ones included.
        cached_tokens: How many of these a prompt cache served.
        output_tokens: Of the answers.
    """
    usage = Usage(prompt_tokens, cached_tokens, output_tokens)
    return round(TYPICAL_COSTS.price(usage) * 1_000_000)


@lru_cache(maxsize=16)
def read_pool(kind: str) -> str:
    """A hundred kilobytes or more of one kind of real text.

    Always the same with the same versions of Python and of the packages read here.
    """
    if kind == "code":
        return _read_sources()
    if kind == "prose":
        return _read_prose()
    if kind == "base64":
        data = Path(pydantic_core._pydantic_core.__file__).read_bytes()
        return base64.b64encode(data[400_000:700_000]).decode()
    if kind == "cjk":
        return _read_declarations(_CJK)
    if kind == "other languages":
        return _read_declarations(_OTHERS)
    rng = random.Random(kind)
    if kind == "digits":
        return "\n".join(_measure(rng, row) for row in range(4_000))
    return "\n".join(to_json(make_pod(rng)).decode() for _ in range(200))


def _read_sources() -> str:
    """The source of ADK: it is installed wherever this runs."""
    root = Path(google.adk.__file__).parent
    files = [path for name in _SOURCES for path in sorted((root / name).glob("*.py"))]
    texts = (path.read_text("utf-8") for path in files)
    # The licence at the top of each file would repeat itself.
    return "\n".join(text.partition("from __future__")[2] or text for text in texts)


def _read_prose() -> str:
    """The descriptions of installed packages, and licences."""
    texts = [_LICENSE.read_text("utf-8")] if _LICENSE.is_file() else []
    for name in _READMES:
        try:
            found = metadata(name).json
        except PackageNotFoundError:
            continue
        texts.append(str(found.get("description") or ""))
    from pydoc_data.topics import topics

    texts += [topics[name] for name in sorted(topics)[:40]]
    return "\n".join(" ".join(line.split()) for line in "\n".join(texts).splitlines())


def _read_declarations(languages: Sequence[str]) -> str:
    folder = Path(__file__).parent / "udhr"
    return "\n".join((folder / f"{name}.txt").read_text("utf-8") for name in languages)


def _measure(rng: random.Random, row: int) -> str:
    values = (f"{rng.gauss(240, 80):.3f}" for _ in range(5))
    return f"{1_700_000_000 + 37 * row},{','.join(values)}"


def cut_text(kind: str, chars: int, rng: random.Random) -> str:
    """A piece of a pool from a random place, from one line's beginning where it can."""
    pool = read_pool(kind)
    start = rng.randrange(max(1, len(pool) - chars))
    newline = pool.find("\n", start, start + 400)
    start = newline + 1 if newline >= 0 else start
    text = pool[start : start + chars]
    while len(text) < chars:
        text += "\n" + pool[: chars - len(text)]
    return text


def make_list(chars: int, rng: random.Random) -> dict[str, Any]:
    """What `kubectl get pods -o json` returns, about so many characters."""
    items: list[dict[str, Any]] = []
    while chars > 0:
        items.append(make_pod(rng))
        chars -= len(to_json(items[-1]))
    return {"apiVersion": "v1", "kind": "List", "items": items}


def make_pod(rng: random.Random) -> dict[str, Any]:
    """One pod in the shape in which Kubernetes lists it."""
    app = rng.choice(("checkout", "ledger", "search", "ingest", "mailer", "frontend"))
    name = f"{app}-{rng.getrandbits(40):010x}-{rng.getrandbits(20):05x}"
    image = f"registry.example.com/shop/{app}:1.{rng.randrange(40)}.{rng.randrange(9)}"
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}
    running = {"running": {"startedAt": "2026-02-11T06:12:44Z"}}

    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": rng.choice(("default", "prod", "staging")),
            "uid": f"{rng.getrandbits(128):032x}",
            "resourceVersion": str(rng.randrange(10**8)),
            "labels": {"app": app, "pod-template-hash": name.split("-")[1]},
            "ownerReferences": [
                {"kind": "ReplicaSet", "name": name.rpartition("-")[0]},
            ],
        },
        "spec": {
            "nodeName": f"ip-10-0-{rng.randrange(256)}-{rng.randrange(256)}.internal",
            "containers": [
                {
                    "name": app,
                    "image": image,
                    "ports": [{"containerPort": 8080, "protocol": "TCP"}],
                    "resources": {"limits": {"cpu": "500m", "memory": "512Mi"}},
                }
            ],
        },
        "status": {
            "phase": rng.choice(("Running", "Running", "Pending", "Failed")),
            "conditions": [
                {"type": kind, "status": rng.choice(("True", "True", "False"))}
                for kind in ("PodScheduled", "Ready", "ContainersReady")
            ],
            "podIP": f"10.42.{rng.randrange(256)}.{rng.randrange(256)}",
            "containerStatuses": [
                {
                    "name": app,
                    "restartCount": rng.randrange(40),
                    "state": rng.choice((running, waiting)),
                    "imageID": f"{image}@sha256:{rng.getrandbits(256):064x}",
                }
            ],
        },
    }
