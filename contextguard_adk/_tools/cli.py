"""The command line: `contextguard demo`, `check`, `replay`, `report`, `why`, …

The docstring of each command is its help text. Click joins the lines of a paragraph and
wraps them anew. The work is in other modules of this folder: `contextguard why` calls
`run_why` in `why.py`, with the command's options as arguments.
"""

from __future__ import annotations

import errno
import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from contextguard_adk._support.log import one_line
from contextguard_adk._support.settings import suggest
from contextguard_adk._tools.terminal import CommandError
from contextguard_adk.config import CONFIG_VARIABLE, STRATEGIES
from contextguard_adk.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code.

    `argv` are the words after "contextguard"; None for the words that the process was
    started with.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        exit_code = _run(words)
        if sys.stdout is not None:  # It is None if the process began without one.
            sys.stdout.flush()
        return exit_code
    except KeyboardInterrupt:
        print("contextguard: interrupted", file=sys.stderr)
        return 130  # Shells use this code after Ctrl-C.
    except BrokenPipeError:
        # The reader of the output has ended, as `head` does in `contextguard … | head`.
        _discard_output()
        return 1
    except OSError as error:
        is_disk_full = error.errno == errno.ENOSPC
        if not is_disk_full:
            raise  # The commands explain the errors that they expect.
        print(f"contextguard: error: {error}", file=sys.stderr)
        _discard_output()
        return 1


def _discard_output() -> None:
    """Connects stdout to nowhere.

    At exit Python writes the rest of the output. Without this function the write would
    fail, and Python would print an error.
    """
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _run(words: list[str]) -> int:
    """Runs the command that the words name; returns the exit code of the command.

    A mistake of the user is printed as one line, without click's usage text. The exit
    code is then 2.
    """
    try:
        with contextguard.make_context("contextguard", words) as context:
            return contextguard.invoke(context) or 0  # A command may return None.
    except click.exceptions.Exit as end:  # Click raises it after --help and --version.
        return end.exit_code
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "contextguard"
        # The message may quote YAML or a database, so it may have line breaks and
        # control characters.
        with_single_blanks = " ".join(error.format_message().split())
        print(f"{command}: error: {one_line(with_single_blanks)}", file=sys.stderr)
        return 2


def _call(module_name: str, **options: Any) -> int | None:
    """Calls `run_<module_name>` in a module of this folder with a command's options.

    Returns the exit code; None stands for 0.

    Raises:
        click.UsageError: The command cannot do its work. `_run` prints the message.
    """
    # A settings file may name classes of modules in the current folder. `adk web` finds
    # such modules, too.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())

    # A command's module takes seconds to import, and --help should be quick.
    module = importlib.import_module(f"contextguard_adk._tools.{module_name}")
    run: Callable[..., int | None] = getattr(module, f"run_{module_name}")
    try:
        return run(**options)
    except (CommandError, ConfigError, UnicodeEncodeError) as error:
        # A word of the command line, or a text of a session, may have characters that
        # cannot be encoded.
        raise click.UsageError(str(error), click.get_current_context()) from error


def _call_on_session(
    module_name: str,
    app: str | None,
    user: str | None,
    session: str | None,
    **options: Any,
) -> int | None:
    """Calls `_call` with the three names of a session as one option, `key`.

    A name that the user did not give is None.
    """
    # The import takes long, and --help should be quick.
    from contextguard_adk._tools.recordings import SessionKey

    return _call(module_name, key=SessionKey(app, user, session), **options)


def _parse_strategy(text: str) -> str:
    """Returns the name of a strategy, spelled as in settings.

    "sliding-window" -> "sliding_window"

    Raises:
        click.BadParameter: There is no such strategy.
    """
    name = text.replace("-", "_")
    if name not in STRATEGIES:
        known = f"{', '.join(STRATEGIES)}.{suggest(name, STRATEGIES)}"
        raise click.BadParameter(f"{text!r} is not one of {known}")
    return name


def _parse_name(
    context: click.Context, option: click.Parameter, name: str | None
) -> str | None:
    """Returns a name that the user has typed; None if none was.

    A name without a character is one that a script has lost: it must not stand for all
    names.
    """
    if name is not None and not name.strip():
        raise click.BadParameter("the name is empty", context, option)
    return name


def _number(
    number_type: type[float], least: float, most: float = math.inf
) -> Callable[[object], float]:
    """Returns a function that parses an option whose value is a number.

    The user may type commas for thousands: "32,000" -> 32000.

    Args:
        number_type: int or float.
        least: The smallest accepted number.
        most: The largest accepted number.
    """
    expected = f"at least {least:,}"
    if most < math.inf:
        expected = f"{expected}, at most {most:,}"

    def parse(value: object) -> float:
        """Returns the number that the user has typed as text, or the default."""
        try:
            number = number_type(str(value).replace(",", ""))
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a number") from None
        if not least <= number <= most:
            raise click.BadParameter(f"{expected}, not {value}")
        return number

    return parse


class _Check(click.Command):
    """The command `check`, which takes several names after one `--model`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the words after "check"; returns the words that nothing has taken.

        Click reads only one name after an option. So the option is put before each
        further name: "--model a b" -> "--model a --model b".
        """
        last_option = ""
        words: list[str] = []
        for word in args:
            if word.startswith("-"):
                last_option = word
            elif last_option == "--model" and words[-1] != "--model":
                words.append("--model")  # The word is a further name.
            words.append(word)

        return super().parse_args(ctx, words)


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(package_name="contextguard-adk", message="%(prog)s %(version)s")
@click.pass_context
def contextguard(context: click.Context) -> None:
    """Keeps Google ADK agents inside their model's context window.

    Exit code: 0 if all is well, 1 if a guarded run of the demo saw a refusal or a
    failure, an agent in a checked folder is wrong, or `sessions --all` has skipped a
    session, 2 for wrong arguments and what cannot be read, 130 after Ctrl-C.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


# Types and options of several commands.
_file = click.Path(path_type=Path)
_folder = click.Path(exists=True, file_okay=False, path_type=Path)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_window = click.option(
    "--context-window",
    "--window",
    "window_tokens",
    type=_number(int, 1_000),
    metavar="TOKENS",
    help="The window, whatever model and settings say.",
)

_SESSION_OPTIONS = (
    click.argument("source", metavar="SESSION"),
    click.option(
        "--app", callback=_parse_name, help="The app of a database's session."
    ),
    click.option(
        "--user", callback=_parse_name, help="The user of a database's session."
    ),
    click.option(
        "--session", callback=_parse_name, help="The id of a database's session."
    ),
)
_RECORDING_OPTIONS = (
    *_SESSION_OPTIONS,
    click.option(
        "--list", "is_list", is_flag=True, help="List sessions, newest first."
    ),
    click.option("--agent", help="Only this agent's calls."),
    click.option("--model", help="Take its window, not the recorded model's."),
    click.option(
        "--config", envvar=CONFIG_VARIABLE, show_envvar=True, help="Settings to try."
    ),
    _window,
)


def _session_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the argument and the options that name a recorded session."""
    return _decorate(command, _SESSION_OPTIONS)


def _recording_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the argument and the options that `replay` and `report` share."""
    return _decorate(command, _RECORDING_OPTIONS)


def _decorate(
    command: Callable[..., Any], decorators: Sequence[Callable[..., Any]]
) -> Callable[..., Any]:
    """Returns a command with decorators, as if they stood above it with `@`.

    The last decorator is applied first, so help lists the options in the given order.
    """
    decorated = command
    for decorator in reversed(decorators):
        decorated = decorator(decorated)
    return decorated


@contextguard.command()
@click.argument("path", required=False, type=_folder)
@_window
@click.option(
    "--steps", default=150, type=_number(int, 1), metavar="N", help="Calls of each run."
)
@click.option(
    "--strategy",
    default="threshold",
    type=_parse_strategy,
    metavar="NAME",
    help=f"How the guard compacts: {', '.join(STRATEGIES)}.",
)
@click.option("--model", help="A real model; both runs are billed.")
@click.option(
    "--latency",
    type=_number(float, 0.001, 3_500),
    metavar="SECONDS",
    help="Simulated time of each answer and summary; adds summaries ahead of time.",
)
def demo(**options: Any) -> int | None:
    """Do the same work without and with the guard, and compare.

    An agent works through the source tree in PATH, by default the installed google-adk,
    first without the guard, then with it; by default offline, with a simulated model
    and a window of 32,000 tokens.
    """
    return _call("demo", **options)  # `options` are the fields of `DemoSettings`.


@contextguard.command(cls=_Check)
@click.argument("config", required=False, envvar=CONFIG_VARIABLE)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME...",
    help="Models as agents name them, such as openai/gpt-5.4-mini.",
)
@_json
def check(**options: Any) -> int | None:
    """Validate a settings file or a folder of agents, and show what it means.

    Reads the settings file CONFIG, by default what $CONTEXTGUARD_CONFIG names, as the
    plugin does and prints what it means for each agent and model. If CONFIG is a
    folder, it loads the agents in it as `adk web` does and says what is wrong.
    """
    return _call("check", **options)


@contextguard.command()
@_recording_options
@_json
@click.option("--compare", is_flag=True, help="Compare strategies and triggers.")
@click.option("--all", "is_complete", is_flag=True, help="Print all of many calls.")
def replay(**options: Any) -> int | None:
    """Show what the guard would have done in a recorded session.

    SESSION is a JSON export, adk web's SQLite file, or the URL of a database or Agent
    Engine, of which the newest session is taken where no name is given. Call by call
    you see the estimate, the recorded count and what the guard would have compacted. No
    model is asked.
    """
    return _call_on_session("replay", **options)


@contextguard.command()
@_recording_options
@click.option("--json", "as_json", is_flag=True, help="With --list: print JSON.")
@click.option("--output", "-o", type=_file, default="report.html", help="The page.")
def report(**options: Any) -> int | None:
    """Write an HTML page about a recorded session.

    SESSION is a JSON export, adk web's SQLite file, or the URL of a database or Agent
    Engine, of which the newest session is taken where no name is given. The page shows
    the context over time, tokens, money, and each compaction. No model is asked.
    """
    return _call_on_session("report", **options)


@contextguard.command()
@_session_options
@click.argument("words")
@click.option("--agent", help="Only this agent's requests.")
@click.option(
    "--config", envvar=CONFIG_VARIABLE, show_envvar=True, help="The agent's settings."
)
@_window
@_json
def why(**options: Any) -> int | None:
    """Say why an agent forgot something.

    Says where WORDS stood in a session, which requests had them, which compaction took
    them out, and whether the summary, or what stands beside it, still has them. SESSION
    is as for `report`. No model is asked.
    """
    # `why` replays like `report`, with the recorded model: it has no option --model.
    return _call_on_session("why", model=None, **options)


@contextguard.command()
@click.argument(
    "action",
    type=click.Choice(["show", "compact", "reset", "edit", "leave", "purge"]),
    metavar="ACTION",
)
@_session_options
@click.option("--agent", default="", help="The agent, as `show` names it.")
@click.option("--full", "is_full", is_flag=True, help="Of `show`: print summaries.")
@click.option("--focus", default="", help="Of `compact`: what to keep above all.")
@click.option("--text", type=_file, help="Of `edit`: a file in place of $EDITOR.")
@click.option(
    "--force", is_flag=True, help="Change it even if a run seems to be under way."
)
@click.option("--all", "is_all", is_flag=True, help="Change all sessions of an app.")
@click.option("--database", help="Of `purge --all`: the database of the sessions.")
def sessions(**options: Any) -> int | None:
    """Show or change what the guard keeps of a session.

    ACTION is show, compact (at the next model call), reset (remove the summary), edit,
    leave (make it a compaction of ADK, for an app without the guard) or purge (delete
    saved artifacts: SESSION is an --artifact_service_uri). SESSION is adk web's SQLite
    file, or a database's URL. `show` takes the newest session where no name is given,
    the other actions take the only one, or with --all each one of an app.
    """
    # The guard keeps a summary and other values for each agent of a session.
    #
    # - show: prints these values.
    # - compact: has the guard compact the history at the next model call.
    # - reset: removes summaries, so agents have their whole history again.
    # - edit: replaces a summary by what the user writes.
    # - leave: turns summaries into ADK's own compaction. ADK shows its compaction in
    #   place of older events, so an app without the guard goes on with the summaries.
    # - purge: deletes the artifacts in which the guard has saved the session's
    #   summaries. Only for this action, SESSION names a service for artifacts.
    #
    # The option `agent` is "" for all agents.
    return _call_on_session("sessions", **options)
