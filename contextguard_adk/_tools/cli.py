"""The command line: `contextguard demo`, `check` and `replay`."""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

_COMMANDS = {
    "demo": (
        "do the same work without and with the guard, and compare",
        "An agent works through a source tree, first without the guard, then with it; "
        "by default offline, with a simulated model.",
        "Exit code: 0 if no guarded run saw a refusal or failure, 1 otherwise, 2 for "
        "wrong arguments, 130 after Ctrl-C.",
    ),
    "check": (
        "validate a settings file and show what it means",
        "Reads a settings file as the plugin does and prints what it means for each "
        "agent and model.",
        "Exit code: 0 if all is well, 2 for wrong arguments or a wrong file.",
    ),
    "replay": (
        "show what the guard would have done in a recorded session",
        "Reads a recorded ADK session and shows, call by call, estimate, recorded "
        "count and what the guard would have compacted. No model is asked.",
        "Exit code: 0, or 2 for wrong arguments or what cannot be replayed.",
    ),
}

_HELP = {
    "demo path": "the folder to work through (default: the installed google-adk)",
    "demo --window": "context window (default: 32000; with --model, the model's)",
    "demo --steps": "model calls of each run (default: %(default)s)",
    "demo --strategy": "how the guard compacts (default: %(default)s)",
    "demo --model": "a real model, such as gemini-2.5-flash; both runs are billed",
    "demo --latency": "simulated seconds of every answer and summary; compares "
    "summaries ahead of time as well",
    "check config": "a settings file (default: $CONTEXTGUARD_CONFIG, else none)",
    "check --model": "models as agents name them, such as openai/gpt-4o",
    "check --json": "print JSON",
    "replay source": "a JSON export, adk web's SQLite file, or a database's URL",
    "replay --app": "of a database's session",
    "replay --user": "of a database's session",
    "replay --session": "of a database's session",
    "replay --config": "settings to try (default: $CONTEXTGUARD_CONFIG, else none)",
    "replay --agent": "only this agent's calls",
    "replay --model": "the model whose window counts (default: the recorded one)",
    "replay --window": "the window, whatever model and settings say",
    "replay --compare": "strategies and triggers in one table, and the cheapest",
    "replay --plot": "draw it, as .svg, .png or .pdf (needs the extra `plot`)",
    "replay --json": "print JSON",
    "replay --all": "print every call of a long session",
}


class _UsageError(Exception):
    """A wrong command line; its text is one line for the user."""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{self.prog}: error: {message}")

    def add(self, name: str, **settings: Any) -> None:
        command = self.prog.split()[-1]
        self.add_argument(name, help=_HELP[f"{command} {name}"], **settings)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        exit_code = _run(_build_parser().parse_args(argv))
        sys.stdout.flush()
        return exit_code
    except SystemExit as end:  # How argparse ends after --help and --version.
        return int(end.code or 0)
    except _UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("contextguard: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno == errno.ENOSPC:
            print(f"contextguard: error: {error}", file=sys.stderr)
        elif not isinstance(error, BrokenPipeError):
            raise
        # Nobody takes the output any more; Python must not flush to it at exit.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 1


def _run(arguments: argparse.Namespace) -> int:
    """Runs a command, which imports ADK only now: `--help` should be quick."""
    from contextguard_adk._tools.check import run_check
    from contextguard_adk._tools.demo import run_demo
    from contextguard_adk._tools.replay import run_replay
    from contextguard_adk._tools.terminal import CommandError
    from contextguard_adk.errors import ConfigError

    # A settings file may name classes in the present folder, as under `adk web`.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    runs = {"demo": run_demo, "check": run_check, "replay": run_replay}
    name = arguments.command
    try:
        return runs[name](arguments)
    except (CommandError, ConfigError) as error:
        text = " ".join(str(error).split())  # YAML reports take several lines.
        raise _UsageError(f"contextguard {name}: error: {text}") from error


def _build_parser() -> _Parser:
    purpose = "Keeps Google ADK agents inside their model's context window."
    parser = _Parser(prog="contextguard", description=purpose)
    try:
        version = importlib.metadata.version("contextguard-adk")
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed)"
    parser.add_argument("--version", action="version", version=f"%(prog)s {version}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    demo, check, replay = (
        commands.add_parser(name, help=text, description=description, epilog=epilog)
        for name, (text, description, epilog) in _COMMANDS.items()
    )
    strategies = ["threshold", "sliding-window"]
    parse_window = partial(_parse_count, minimum=1_000)
    demo.add("path", metavar="PATH", type=_parse_folder, nargs="?")
    demo.add("--window", metavar="TOKENS", type=parse_window)
    demo.add("--steps", metavar="N", type=_parse_count, default=150)
    demo.add("--strategy", choices=strategies, default="threshold")
    demo.add("--model", metavar="NAME")
    demo.add("--latency", metavar="SECONDS", type=_parse_seconds, default=0)
    check.add("config", metavar="CONFIG", nargs="?")
    check.add("--model", metavar="NAME", nargs="+", action="extend", default=[])
    check.add("--json", action="store_true")
    replay.add("source", metavar="SESSION")
    for name in ("--app", "--user", "--session", "--agent", "--model"):
        replay.add(name, metavar="NAME")
    replay.add("--config", metavar="FILE")
    replay.add("--window", metavar="TOKENS", type=parse_window)
    replay.add("--plot", metavar="FILE", type=Path)
    for name in ("--compare", "--json", "--all"):
        replay.add(name, action="store_true")
    return parser


def _parse_folder(text: str) -> Path:
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    return Path(text)


def _parse_count(text: str, minimum: int = 1) -> int:
    try:
        count = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if count < minimum:
        raise argparse.ArgumentTypeError(f"at least {minimum:,}, not {count:,}")
    return count


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text.replace(",", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < seconds <= 3_500:
        raise argparse.ArgumentTypeError(f"more than 0, at most 3,500, not {text}")
    return seconds
