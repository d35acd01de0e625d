"""`contextguard demo`: the same work by a real agent, without and with the guard.

An agent answers questions about source files. A turn is a question of the user with all
that the agent does for it. A step is one complete answer of the model, such as a call
of `read_file`. Each run makes the same number of steps, in turns.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import google.adk
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.events import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.registry import LLMRegistry
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import InMemoryRunner, Runner
from google.genai import types
from rich.table import Column, Table

from contextguard_adk._providers.clients import read_usage
from contextguard_adk._providers.costs import TYPICAL_COSTS, Costs, price_calls
from contextguard_adk._providers.overflow import parse_overflow
from contextguard_adk._providers.registry import LitellmRegistry, resolve_costs
from contextguard_adk._tools import terminal
from contextguard_adk._tools.terminal import CommandError, print_line
from contextguard_adk.config import STRATEGIES
from contextguard_adk.plugin import ContextGuardPlugin
from contextguard_adk.records import CallRecord, PressureRecord, Usage, format_cost
from contextguard_adk.testing import Reply, SimulatedLlm, VirtualTimeLoop, call

INSTRUCTION = """\
Study the source files of a project: read those that matter one after another with your
tools, then answer. Paths are relative to the project's top folder."""

SIMULATED_WINDOW_TOKENS = 32_000

# The names of the runs; the last one only with `--latency`.
BARE = "no guard"
GUARDED = "with guard"
AHEAD = "summaries ahead"

FILES_PER_QUESTION = 10
MAX_LISTED_FILES = 300
MAX_FILE_BYTES = 200_000
# A file with longer lines, on average, is generated.
MAX_AVERAGE_LINE_BYTES = 200
# After this number of refused turns in a row, a run is given up.
MAX_REFUSED_TURNS = 10


class Turn(NamedTuple):
    """A question of the user, and the replies of the offline model to it."""

    question: str
    replies: list[Reply]


@dataclass(frozen=True)
class DemoSettings:
    """The options of the command; None for an option that the user did not give.

    Attributes:
        path: The folder of the source files; None for the installed google-adk.
        window_tokens: The context window; None for that of the model.
        steps: The number of steps of each run.
        strategy: The name of the guard's strategy.
        model: The name of a real model; None for the offline model.
        latency: The simulated seconds of each answer and each summary.
    """

    path: Path | None
    window_tokens: int | None
    steps: int
    strategy: str
    model: str | None
    latency: float | None


def run_demo(**options: Any) -> int:
    """Does the work without and with the guard, and prints a comparison.

    `options` are the fields of `DemoSettings`. Returns the exit code: 1 if a request
    was refused or a model failed in a run with the guard, else 0.
    """
    settings = DemoSettings(**options)
    if settings.model and settings.latency:
        raise CommandError("--latency: a real model takes its own time")
    root = (settings.path or Path(google.adk.__path__[0])).resolve()
    turns = list(plan_turns(root, settings.steps))
    if not turns:
        raise CommandError(f"there is no source file in {root}")

    # The guard logs estimates of a request's size; the demo prints real counts.
    with terminal.quiet_logs(terminal.console):
        window_tokens = settings.window_tokens or _find_window(settings.model)
        runs = _play_runs(settings, root, turns, window_tokens)

    _print_comparison(runs, window_tokens, settings.latency)
    _print_assumptions(settings)

    bare, *guarded_runs = runs
    worst = _choose_worst(guarded_runs)
    done = f"{worst.steps:,} of {bare.planned_steps:,} steps were done"
    print_line(f"With the guard {done}, {_describe_end(bare, worst)}.", "bold")
    return 1 if worst.rejections or worst.failure else 0


def _find_window(model: str | None) -> int:
    if not model:
        return SIMULATED_WINDOW_TOKENS
    tokens = LitellmRegistry().context_window(model)
    if tokens is None:
        raise CommandError(f"the window of {model} is unknown: give --window")
    return tokens


def _play_runs(
    settings: DemoSettings, root: Path, turns: list[Turn], window_tokens: int
) -> list[DemoRun]:
    """Does the work once for each run: first without the guard, then with it."""
    names = [BARE, GUARDED]
    if settings.latency:
        names.append(AHEAD)
    # Each run has a model of its own. A model that cannot be used is an error before
    # anything is printed.
    llms = [_create_model(settings, window_tokens, turns) for _ in names]

    print_line(f"An agent works {settings.steps:,} steps through {root}", "bold")
    model = f"{settings.model or 'simulated offline'}, context window {window_tokens:,}"
    print_line(f"Model: {model} tokens, strategy {settings.strategy}", "dim")

    costs: Costs | None = TYPICAL_COSTS
    if settings.model:
        costs = resolve_costs(settings.model, {}, None)
    runs = [DemoRun(name, settings.steps, window_tokens, costs) for name in names]
    # On the virtual clock a simulated latency passes at once.
    loop_factory = VirtualTimeLoop if settings.latency else None
    for run, llm in zip(runs, llms, strict=True):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(run.play(turns, llm, root, settings.strategy))
    return runs


def _print_comparison(
    runs: list[DemoRun], window_tokens: int, latency: float | None
) -> None:
    """Draws the prompt tokens of each run, and prints the figures side by side."""
    print_line("")
    print_line(f"Prompt tokens of each call; ✕ is over {window_tokens:,}:")
    for run in runs:
        terminal.print_sparkline(f"{run.name:18}", run.request_tokens, window_tokens)

    columns = [Column(run.name, justify="right") for run in runs]
    table = Table("", *columns, show_edge=False, pad_edge=False)
    figures_by_run = [run.describe(latency) for run in runs]
    for row_name in figures_by_run[0]:
        table.add_row(row_name, *(figures[row_name] for figures in figures_by_run))
    terminal.console.print("", table, "", sep="\n")


def _print_assumptions(settings: DemoSettings) -> None:
    """Prints the prices and times that an offline model is given."""
    if not settings.model:
        prices = "$1 for a million input tokens, $0.10 for cached ones, $8 for output"
        print_line(f"Prices: {prices}.")
    if settings.latency:
        times = f"{settings.latency:g} s for every answer and every summary"
        print_line(f"Times are simulated: {times}.")


def _choose_worst(guarded_runs: list[DemoRun]) -> DemoRun:
    """Returns the run with the most rejections; a failure is worse than any number."""
    failed_runs = [run for run in guarded_runs if run.failure]
    return max(failed_runs or guarded_runs, key=lambda run: run.rejections)


def _describe_end(bare: DemoRun, worst: DemoRun) -> str:
    """Returns the end of a sentence, "With the guard 9 of 10 steps were done, …".

    Args:
        bare: The run without the guard.
        worst: The worst run with it.
    """
    if worst.failure:
        return f"then the model failed: {worst.failure}"
    if worst.rejections:
        return f"{worst.rejections:,} of its requests were refused"
    if bare.rejections:
        return f"no request refused; without it only {bare.steps:,}"
    return "the work fits into the window without it as well: try a smaller --window"


def plan_turns(root: Path, most_files: int) -> Iterator[Turn]:
    """Yields turns about the first source files, at most `most_files` in all.

    The files of a turn are in one folder, and at most `FILES_PER_QUESTION`.
    """
    sources = (file for file in walk_files(root) if read_source(file))
    paths_by_folder: dict[Path, list[Path]] = {}
    for file in islice(sources, most_files):
        path = file.relative_to(root)
        paths_by_folder.setdefault(path.parent, []).append(path)

    for folder, paths in paths_by_folder.items():
        for start in range(0, len(paths), FILES_PER_QUESTION):
            yield _plan_turn(folder, paths[start : start + FILES_PER_QUESTION])


def _plan_turn(folder: Path, paths: list[Path]) -> Turn:
    """Returns a turn in which the model lists a folder and reads some files in it.

    All paths are relative to the top folder of the project.
    """
    place = "the top folder" if folder == Path() else f"the folder {folder}"
    question = f"How does {place} work? Begin with {paths[0].name}."

    names = [path.as_posix() for path in paths]
    listing = call("list_files", directory=folder.as_posix())
    readings = [call("read_file", path=name) for name in names]
    answer = f"I have read {', '.join(names)}."
    return Turn(question, [listing, *readings, answer])


class FileTools:
    """Read-only tools for the source files of one folder; no path leads out of it."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def list_files(self, directory: str = ".") -> dict[str, Any]:
        """Lists the files in a folder, by default the top, and its subfolders."""
        folder = self._find(directory)
        if folder is None:
            return {"error": f"the project has no folder {directory!r}"}
        files = islice(walk_files(folder), MAX_LISTED_FILES)
        return {"files": [file.relative_to(self._root).as_posix() for file in files]}

    def read_file(self, path: str) -> dict[str, Any]:
        """Returns the text of a file, named by its path from the top folder."""
        file = self._find(path)
        text = read_source(file) if file else ""
        if not text:
            return {"error": f"the project has no source file {path!r}"}
        return {"path": path, "content": text}

    def _find(self, path: str) -> Path | None:
        """Resolves a path; returns None if it is missing or leads out of the folder."""
        try:
            found = (self._root / path).resolve(strict=True)
        except (OSError, RuntimeError, TypeError, ValueError):
            return None
        return found if found.is_relative_to(self._root) else None


def walk_files(folder: Path) -> Iterator[Path]:
    """Yields the files under a folder, without hidden files, caches, symbolic links."""
    for directory, folder_names, file_names in os.walk(folder):
        # `os.walk` enters only the folders that are left in this list of its own.
        folder_names[:] = _list_shown(folder_names)
        for name in _list_shown(file_names):
            file = Path(directory, name)
            if not file.is_symlink():
                yield file


def _list_shown(names: list[str]) -> list[str]:
    """Returns the names of files or folders that an agent may see, in order."""
    hidden_starts = (".", "__pycache__", "node_modules")
    shown = [name for name in names if not name.startswith(hidden_starts)]
    return sorted(name for name in shown if name.isprintable())


def read_source(file: Path) -> str:
    """Returns the start of a file's text, or "" if it is no source file.

    A file is none if it is binary, generated, empty or unreadable.
    """
    try:
        if not file.is_file():  # To read a pipe would take forever.
            return ""
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES)
    except OSError:
        return ""

    is_empty = not data.strip()
    is_binary = b"\0" in data
    line_count = data.count(b"\n") + 1
    is_generated = len(data) / line_count > MAX_AVERAGE_LINE_BYTES
    if is_empty or is_binary or is_generated:
        return ""
    return data.decode("utf-8", "replace")


def _create_model(
    settings: DemoSettings, window_tokens: int, turns: list[Turn]
) -> BaseLlm:
    """Makes the real model that the user has named, or else the offline model."""
    if settings.model is not None:
        return _create_real_model(settings.model)

    # After the replies of the last turn, those of the first one come again.
    replies = cycle([reply for turn in turns for reply in turn.replies])
    return SimulatedLlm(
        context_window=window_tokens,
        script=lambda _: next(replies),
        prompt_cache=True,
        keep_requests=0,
        latency_seconds=settings.latency or 0,
    )


def _create_real_model(name: str) -> BaseLlm:
    """Makes a model by its name; raises a `CommandError` if it cannot be used."""
    try:
        llm = LLMRegistry.new_llm(name)
        if type(llm).__name__ == "LiteLlm":
            import litellm

            # Otherwise litellm prints, at an error, where to report bugs.
            litellm.suppress_debug_info = True
    except Exception as error:
        text = f"the model cannot be used: {_describe_error(error)}"
        raise CommandError(text) from error
    return llm


@dataclass
class DemoRun:
    """The work of the demo, done once from beginning to end, and its figures.

    Attributes:
        name: `BARE`, `GUARDED` or `AHEAD`, which people see too.
        planned_steps: The number of steps to make.
        window_tokens: The context window of the model.
        costs: The prices of the model; None if they are unknown.
        steps: The number of steps made.
        rejections: The number of requests that the provider refused.
        compactions: The number of compactions.
        usage: The tokens of all answers and summaries.
        request_tokens: The prompt tokens of each request, as far as they are known.
        pressures: The guard's warnings before the running call.
        largest_tokens: The prompt tokens of the largest request.
        answer_seconds: The time of the last answer, on the clock of the event loop.
        waited_seconds: The time that the agent waited for summaries.
        failure: An error other than a refusal, which ended the run; "" for none.
    """

    name: str
    planned_steps: int
    window_tokens: int
    costs: Costs | None
    steps: int = 0
    rejections: int = 0
    compactions: int = 0
    usage: Usage = field(default_factory=Usage)
    request_tokens: list[int] = field(default_factory=list)
    pressures: list[PressureRecord] = field(default_factory=list)
    largest_tokens: int = 0
    answer_seconds: float = 0.0
    waited_seconds: float = 0.0
    failure: str = ""

    def describe(self, latency: float | None) -> dict[str, str]:
        """Returns the figures to compare, by the names of their rows.

        Two rows tell the simulated time if there is a `latency`, in seconds.
        """
        divisor = self.steps or 1  # The first step may have failed.
        usage = self.usage
        uncached_tokens = usage.prompt_tokens - usage.cached_tokens
        cost = price_calls([usage], self.costs)
        step_cost = None if cost is None else cost / divisor

        figures = {
            "steps done": f"{self.steps:,} of {self.planned_steps:,}",
            "requests rejected": f"{self.rejections:,}",
            "compactions": f"{self.compactions:,}",
            "largest request": f"{self.largest_tokens:,}",
            "of the window": f"{self.largest_tokens / self.window_tokens:.0%}",
            "uncached input / step": f"{uncached_tokens / divisor:,.0f}",
            "cached input / step": f"{usage.cached_tokens / divisor:,.0f}",
            "output / step": f"{usage.output_tokens / divisor:,.0f}",
            "cost / step": format_cost(step_cost),
            "cost of the steps done": format_cost(cost),
        }
        if latency:
            figures["time to the last answer"] = _format_seconds(self.answer_seconds)
            figures["waited for summaries"] = _format_seconds(self.waited_seconds)
        return figures

    async def play(
        self, turns: list[Turn], llm: BaseLlm, root: Path, strategy_name: str
    ) -> None:
        """Asks about the files, round and round, until all steps are done."""
        # Errors of a task that was interrupted are not for the user.
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        print_line(self.name, "bold")

        app = self._create_app(llm, root, strategy_name)
        runner = InMemoryRunner(app=app)
        endless_questions = cycle(turn.question for turn in turns)
        # A run never needs more questions than steps.
        await self._ask(runner, islice(endless_questions, self.planned_steps))
        await runner.close()
        if self.failure and not self.steps:
            raise CommandError(f"the model cannot be used: {self.failure}")

        # A simulated model knows the size of requests for summaries as well.
        if isinstance(llm, SimulatedLlm):
            self.largest_tokens = llm.largest_request_tokens
        else:
            self.largest_tokens = max(self.request_tokens, default=0)

    def _create_app(self, llm: BaseLlm, root: Path, strategy_name: str) -> App:
        """Makes an app whose agent reads files; only the run `BARE` has no guard."""
        tools = FileTools(root)
        agent = LlmAgent(
            name="explorer",
            model=llm,
            instruction=INSTRUCTION,
            tools=[tools.list_files, tools.read_file],
        )
        plugins: list[BasePlugin] = []
        if self.name != BARE:
            plugins.append(self._create_guard(llm, strategy_name))
        return App(name="contextguard_demo", root_agent=agent, plugins=plugins)

    def _create_guard(self, llm: BaseLlm, strategy_name: str) -> ContextGuardPlugin:
        """Makes the guard, which records its work in this run."""
        # The default timeout is extended by the time that a simulated summary takes. A
        # real model has no `latency_seconds`.
        timeout_seconds = 60 + getattr(llm, "latency_seconds", 0)
        strategy = STRATEGIES[strategy_name](
            context_window=self.window_tokens,
            summary_timeout_seconds=timeout_seconds,
            ahead=self.name == AHEAD,
        )
        return ContextGuardPlugin(
            default=strategy,
            on_call=self._record_call,
            on_pressure=self.pressures.append,
        )

    async def _ask(self, runner: Runner, questions: Iterator[str]) -> None:
        """Asks one question after the other until the steps are done.

        A refused request ends its turn. Ten refused turns in a row end the run. Any
        error but a refusal ends it as well.
        """
        await runner.session_service.create_session(
            app_name=runner.app_name, user_id="user", session_id="session"
        )
        refused_in_a_row = 0
        for turn_number, question in enumerate(questions, 1):
            progress = f"{self.steps:,}/{self.planned_steps:,}"
            print_line(f"  turn {turn_number}, step {progress}: {question}")
            try:
                await self._play_turn(runner, question)
                refused_in_a_row = 0
            except Exception as error:  # noqa: BLE001 - whatever a provider's SDK raises
                overflow = parse_overflow(error)
                if overflow is None:
                    self.failure = _describe_error(error)
                    print_line(f"    stopped: {self.failure}", "bold red")
                    return
                refused_in_a_row += 1
                self._record_rejection(overflow.prompt_tokens or 0)

            if self.steps >= self.planned_steps:
                return
            if refused_in_a_row == MAX_REFUSED_TURNS:
                print_line(f"    given up after {MAX_REFUSED_TURNS} refused turns")
                return

    async def _play_turn(self, runner: Runner, question: str) -> None:
        """Has the agent answer a question; stops it once all steps are done."""
        events = runner.run_async(
            user_id="user",
            session_id="session",
            new_message=types.UserContent(question),
        )
        async with aclosing(events):
            async for event in events:
                self._count_answer(event)
                if self.steps >= self.planned_steps:
                    return

    def _count_answer(self, event: Event) -> None:
        """Counts a step if an event is a complete answer of the model."""
        has_answer = event.content and event.content.role == "model"
        if event.partial or not has_answer:
            return

        self.steps += 1
        self.answer_seconds = asyncio.get_running_loop().time()
        usage = read_usage(event.usage_metadata)
        self.usage += usage
        self.request_tokens.append(usage.prompt_tokens)

    def _record_call(self, record: CallRecord) -> None:
        """Counts and prints what the guard has done in one model call.

        It may have resent a refused request, compacted the history, and warned.
        """
        self.usage += record.summary_usage
        if record.is_recovered:
            self._record_rejection(0)

        if record.compaction:
            self.compactions += 1
            self.waited_seconds += record.compaction.waited_seconds
            before = record.compaction.tokens_before
            after = record.real_tokens or 0
            print_line(
                f"    compaction {self.compactions}: {before:,} → {after:,} tokens",
                "cyan",
            )

        # A warning has the estimate before the call; the provider's count is printed.
        if self.pressures and record.real_tokens:
            share = record.real_tokens / self.window_tokens
            print_line(
                f"    warning: a request fills {share:.0%} of the context window",
                "yellow",
            )
        self.pressures.clear()

    def _record_rejection(self, prompt_tokens: int) -> None:
        """Counts and prints a refused request.

        `prompt_tokens` is its size by the provider's count; 0 if that is unknown.
        """
        self.rejections += 1
        size = "too many tokens"
        if prompt_tokens:
            self.request_tokens.append(prompt_tokens)
            size = f"{prompt_tokens:,} tokens"
        print_line(f"    rejected by the provider: {size}", "bold red")


def _format_seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{minutes:,.0f} min {rest:g} s" if minutes else f"{rest:g} s"


def _describe_error(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
