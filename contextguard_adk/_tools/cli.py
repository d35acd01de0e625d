"""The command line: `contextguard demo`, `check`, `replay` and `report`."""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
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
    "report": (
        "write an HTML page about a recorded session",
        "Writes one self-contained HTML page about a recorded ADK session: the context "
        "over time, tokens, money, and each compaction. No model is asked.",
        "Exit code: 0, or 2 for wrong arguments or what cannot be read.",
    ),
}

_STRATEGIES = ["threshold", "sliding_window", "pipeline"]

_HELP = {
    "demo path": "the folder to work through (default: the installed google-adk)",
    "demo --context-window": "in tokens (default: 32000; with --model, the model's)",
    "demo --steps": "model calls of each run (default: %(default)s)",
    "demo --strategy": "how the guard compacts (default: %(default)s)",
    "demo --model": "a real model, such as gemini-2.5-flash; both runs are billed",
    "demo --latency": "simulated seconds of every answer and summary; compares "
    "summaries ahead of time as well",
    "check config": "a settings file (default: $CONTEXTGUARD_CONFIG, else none)",
    "check --model": "models as agents name them, such as openai/gpt-4o",
    "check --json": "print JSON",
    "source": "a JSON export, adk web's SQLite file, or a database's URL",
    "--app": "of a database's session (default: of the newest)",
    "--user": "of a database's session (default: of the newest)",
    "--session": "the id of a database's session (default: of the newest)",
    "--list": "list the sessions instead, the newest first",
    "--config": "settings to try (default: $CONTEXTGUARD_CONFIG, else none)",
    "--agent": "only this agent's calls",
    "--model": "the model whose window counts (default: the recorded one)",
    "--context-window": "in tokens, whatever model and settings say",
    "--json": "print JSON",
    "report --output": "where to write the page (default: %(default)s)",
    "report --json": "with --list: print JSON",
    "replay --compare": "strategies and triggers in one table, and the cheapest",
    "replay --plot": "draw it, as .svg, .png or .pdf (needs the extra `plot`)",
    "replay --all": "print every call of a long session",
}


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)|arguments: (-[^\s=]+)", message)
        known = re.findall(r"--[a-z-]+", self.format_help())
        if wrong and wrong[2] is None:
            known = _STRATEGIES if "--strategy" in message else [*_COMMANDS]
        given = (wrong[1] or wrong[2]) if wrong else ""
        near = get_close_matches(given, known, 1, cutoff=0.7)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        self.exit(2, f"{self.prog}: error: {message}{hint}\n")

    def add(self, *names: str, **settings: Any) -> None:
        command = self.prog.split()[-1]
        text = _HELP.get(f"{command} {names[0]}") or _HELP[names[0]]
        self.add_argument(*names, help=text, **settings)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        arguments, unknown = _build_parser().parse_known_args(argv)
        if unknown:
            arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        if arguments.command is None:
            arguments.parser.print_help()
            return 0
        exit_code = _run(arguments)
        sys.stdout.flush()
        return exit_code
    except SystemExit as end:  # How argparse ends, also after --help and --version.
        return int(end.code or 0)
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
    from contextguard_adk._tools.terminal import CommandError, show_text
    from contextguard_adk.errors import ConfigError

    # A settings file may name classes in the present folder, as under `adk web`.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    name = arguments.command
    module = importlib.import_module(f"contextguard_adk._tools.{name}")
    run: Callable[[argparse.Namespace], int | None] = getattr(module, f"run_{name}")
    try:
        return run(arguments) or 0
    except (CommandError, ConfigError, UnicodeEncodeError) as error:
        # YAML reports take several lines; a database's names may hold any character.
        parser: _Parser = arguments.parser
        parser.error(show_text(" ".join(str(error).split())))


def _build_parser() -> _Parser:
    purpose = "Keeps Google ADK agents inside their model's context window."
    parser = _Parser(prog="contextguard", description=purpose)
    try:
        version = importlib.metadata.version("contextguard-adk")
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed)"
    parser.add_argument("--version", action="version", version=f"%(prog)s {version}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    demo, check, replay, report = (
        commands.add_parser(name, help=text, description=description, epilog=epilog)
        for name, (text, description, epilog) in _COMMANDS.items()
    )
    for each in (parser, demo, check, replay, report):
        each.set_defaults(parser=each)
    variable = os.environ.get("CONTEXTGUARD_CONFIG")
    count = partial(_parse, int, "at least 1", lambda number: number >= 1)
    tokens = partial(_parse, int, "at least 1,000", lambda number: number >= 1_000)
    rule = "more than 0, at most 3,500"
    seconds = partial(_parse, float, rule, lambda number: 0 < number <= 3_500)
    window: Any = {"metavar": "TOKENS", "type": tokens, "dest": "window"}
    demo.add("path", metavar="PATH", type=_parse_folder, nargs="?")
    demo.add("--context-window", "--window", **window)
    demo.add("--steps", metavar="N", type=count, default=150)
    demo.add(
        "--strategy",
        type=lambda name: name.replace("-", "_"),
        choices=_STRATEGIES,
        default="threshold",
    )
    demo.add("--model", metavar="NAME")
    demo.add("--latency", metavar="SECONDS", type=seconds, default=0)
    check.add("config", metavar="CONFIG", nargs="?", default=variable)
    check.add("--model", metavar="NAME", nargs="+", action="extend", default=[])
    check.add("--json", action="store_true")
    for command in (replay, report):
        command.add("source", metavar="SESSION")
        for name in ("--app", "--user", "--session", "--agent", "--model"):
            command.add(name, metavar="NAME")
        command.add("--list", action="store_true")
        command.add("--config", metavar="FILE", default=variable)
        command.add("--context-window", "--window", **window)
        command.add("--json", action="store_true")
    replay.add("--plot", metavar="FILE", type=Path)
    for name in ("--compare", "--all"):
        replay.add(name, action="store_true")
    file: Any = {"metavar": "FILE", "type": Path, "default": Path("report.html")}
    report.add("--output", "-o", **file)
    return parser


def _parse_folder(text: str) -> Path:
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    return Path(text)


def _parse(
    kind: type[float], rule: str, is_good: Callable[[float], bool], text: str
) -> float:
    try:
        number = kind(text.replace(",", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not is_good(number):
        raise argparse.ArgumentTypeError(f"{rule}, not {text}")
    return number
