"""The command line: `contextguard demo`, `check` and `replay`."""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

MIN_WINDOW_TOKENS = 1_000

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class _UsageError(Exception):
    """A wrong command line; its text is one line for the user."""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{self.prog}: error: {message}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments; None takes those of the process.

    Returns:
        The exit code: 0 for success, 1 for a bad outcome, 2 for wrong arguments and
        130 after Ctrl-C.
    """
    try:
        arguments = _build_parser().parse_args(argv)
        exit_code = _run(arguments)
        sys.stdout.flush()
        return exit_code
    except SystemExit as end:  # How argparse ends after --help and --version.
        return int(end.code or 0)
    except _UsageError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("contextguard: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno == errno.ENOSPC:
            print(f"contextguard: error: {error}", file=sys.stderr)
        elif not isinstance(error, BrokenPipeError):
            raise
        # Nobody takes the output any more; Python must not flush to it at exit.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return EXIT_FAILED


def _run(arguments: argparse.Namespace) -> int:
    """Runs a command, which imports ADK only now: `--help` should be quick."""
    from contextguard_adk.errors import ConfigError
    from contextguard_adk.tools import check, demo, replay
    from contextguard_adk.tools.terminal import CommandError

    # A settings file may name classes in the present folder, as under `adk web`.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    run = {
        "demo": demo.run_demo,
        "check": check.run_check,
        "replay": replay.run_replay,
    }[arguments.command]
    try:
        return run(arguments)
    except (CommandError, ConfigError) as error:
        text = " ".join(str(error).split())  # YAML reports take several lines.
        name = arguments.command
        raise _UsageError(f"contextguard {name}: error: {text}") from error


def _build_parser() -> _Parser:
    parser = _Parser(
        prog="contextguard",
        description="Keeps Google ADK agents inside their model's context window.",
    )
    parser.add_argument(
        "--version", action="version", version=f"contextguard {_find_version()}"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    _add_demo(commands)
    _add_check(commands)
    _add_replay(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[_Parser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="do the same work without and with the guard, and compare",
        description=(
            "An agent works through a source tree, first without the guard, then with "
            "it. Offline by default: the model is simulated and refuses what exceeds "
            "its window."
        ),
        epilog=(
            "Exit code: 0 if no request of the guarded run was refused, 1 otherwise, 2 "
            "for wrong arguments, 130 after Ctrl-C."
        ),
    )
    demo.add_argument(
        "path",
        metavar="PATH",
        type=_parse_folder,
        nargs="?",
        help="the folder to work through (default: the installed google-adk package)",
    )
    demo.add_argument(
        "--window",
        metavar="TOKENS",
        type=_parse_window,
        help="context window (default: 32000; with --model, that of the model)",
    )
    demo.add_argument(
        "--steps",
        metavar="N",
        type=_parse_steps,
        default=150,
        help="model calls of each run (default: %(default)s)",
    )
    demo.add_argument(
        "--strategy",
        choices=["threshold", "sliding-window"],
        default="threshold",
        help="how the guard compacts (default: %(default)s)",
    )
    demo.add_argument(
        "--model",
        metavar="NAME",
        help="a real model, such as openai/gpt-4o-mini or gemini-2.5-flash; both runs "
        "are billed",
    )


def _add_check(commands: argparse._SubParsersAction[_Parser]) -> None:
    check = commands.add_parser(
        "check",
        help="validate a settings file and show what it means",
        description=(
            "Reads a settings file as the plugin does and prints, for each agent and "
            "model, the window and where it comes from, buffer, threshold, summary "
            "budget and summarizer."
        ),
        epilog="Exit code: 0 if all is well, 2 for wrong arguments or a wrong file.",
    )
    check.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        help="a .toml, .yaml or .yml file (default: the one that CONTEXTGUARD_CONFIG "
        "names, else the built-in settings)",
    )
    check.add_argument(
        "--model",
        metavar="NAME",
        nargs="+",
        action="extend",
        default=[],
        help="models as agents name them, such as gemini-2.5-flash or openai/gpt-4o",
    )
    check.add_argument("--json", action="store_true", help="print JSON")


def _add_replay(commands: argparse._SubParsersAction[_Parser]) -> None:
    replay = commands.add_parser(
        "replay",
        help="show what the guard would have done in a recorded session",
        description=(
            "Reads a recorded ADK session and shows, call by call, the guard's "
            "estimate beside the recorded count, and what the guard would have "
            "compacted. Offline: summaries are excerpts. Nothing is written to the "
            "recording."
        ),
        epilog="Exit code: 0, or 2 for wrong arguments or what cannot be replayed.",
    )
    replay.add_argument(
        "source",
        metavar="SESSION",
        help="a JSON export, an SQLite file as adk web writes it, or a URL that "
        "DatabaseSessionService takes",
    )
    for name in ("app", "user", "session"):
        replay.add_argument(f"--{name}", metavar="NAME", help="of a database's session")
    replay.add_argument(
        "--config",
        metavar="FILE",
        help="settings to try (default: the file that CONTEXTGUARD_CONFIG names, else "
        "the built-in settings)",
    )
    replay.add_argument("--agent", metavar="NAME", help="only this agent's calls")
    replay.add_argument(
        "--model",
        metavar="NAME",
        help="the model whose window counts (default: the recorded one)",
    )
    replay.add_argument(
        "--window",
        metavar="TOKENS",
        type=_parse_window,
        help="the window, whatever model and settings say",
    )
    replay.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        help="draw it, as .svg, .png or .pdf (needs the extra `plot`)",
    )
    replay.add_argument("--json", action="store_true", help="print JSON")
    replay.add_argument(
        "--all", action="store_true", help="print every call of a long session"
    )


def _parse_folder(text: str) -> Path:
    folder = Path(text)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    return folder


def _parse_window(text: str) -> int:
    return _parse_count(text, MIN_WINDOW_TOKENS, "tokens")


def _parse_steps(text: str) -> int:
    return _parse_count(text, 1, "steps")


def _parse_count(text: str, minimum: int, unit: str) -> int:
    try:
        count = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if count < minimum:
        raise argparse.ArgumentTypeError(f"at least {minimum:,} {unit}, not {count:,}")
    return count


def _find_version() -> str:
    try:
        return importlib.metadata.version("contextguard-adk")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
