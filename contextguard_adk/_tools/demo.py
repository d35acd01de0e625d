"""`contextguard demo`: the same work by a real agent, without and with the guard.

An agent answers questions about source files. A turn is a question of the user with all
that the agent does for it. A step is one complete answer of the model, such as a call
of `read_file`. A run does the whole work once, in turns. All runs have the same number
of steps to make.
"""

from __future__ import annotations

import asyncio
import importlib.util
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

# The names of the runs. The run `AHEAD` is made only with `--latency`: its guard writes
# summaries in the background, while the agent goes on.
BARE = "no guard"
GUARDED = "with guard"
AHEAD = "summaries ahead"

FILES_PER_QUESTION = 10
MAX_LISTED_FILES = 300
# Of a longer file the agent reads the beginning.
MAX_FILE_BYTES = 200_000
# A file whose lines are longer on average counts as generated: no person wrote it.
MAX_AVERAGE_LINE_BYTES = 200
# After this number of refused turns in a row, a run is given up.
MAX_REFUSED_TURNS = 10
MAX_ERROR_CHARS = 200


class Turn(NamedTuple):
    """A question of the user, and the offline model's replies in answer to it."""

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
        latency: The simulated seconds of each answer and each summary of the offline
            model; None for answers without a delay.
    """

    path: Path | None
    window_tokens: int | None
    steps: int
    strategy: str
    model: str | None
    latency: float | None


def run_demo(**options: Any) -> int:
    """Does the work without and with the guard, and prints a comparison.

    `options` are the fields of `DemoSettings`. Returns the exit code: 1 if, in a run
    with the guard, a request was refused or the model failed; else 0.
    """
    settings = DemoSettings(**options)
    if settings.model and settings.latency:
        raise CommandError("--latency: a real model takes its own time")
    root = (settings.path or Path(google.adk.__path__[0])).resolve()
    # A step reads at most one file, so no run reads more files than it has steps.
    turns = list(plan_turns(root, most_files=settings.steps))
    if not turns:
        raise CommandError(f"there is no source file in {root}")

    # The demo prints the provider's counts. The guard's log line for a compaction has
    # estimates in their place, so it is silenced.
    with terminal.quiet_logs(terminal.console):
        window_tokens = settings.window_tokens or _find_window(settings.model)
        runs = _play_runs(settings, root, turns, window_tokens)

    _print_comparison(runs, window_tokens, settings.latency)
    _print_assumptions(settings)

    bare, *guarded_runs = runs  # The run without the guard is always the first.
    worst = _choose_worst(guarded_runs)
    done = f"{worst.steps:,} of {bare.planned_steps:,} steps were done"
    print_line(f"With the guard {done}, {_describe_end(bare, worst)}.", "bold")
    return 1 if worst.rejections or worst.failure else 0


def _find_window(model: str | None) -> int:
    """Returns the window of a model in tokens; `model` is None for the offline one."""
    if not model:
        return SIMULATED_WINDOW_TOKENS
    tokens = LitellmRegistry().context_window(model)
    if tokens is None:
        raise CommandError(f"the window of {model} is unknown: give --window")
    return tokens


def _play_runs(
    settings: DemoSettings, root: Path, turns: list[Turn], window_tokens: int
) -> list[DemoRun]:
    """Makes all runs, and returns them: first the run without the guard."""
    names = [BARE, GUARDED]
    if settings.latency:
        names.append(AHEAD)
    # Each run has a model of its own, because an offline model goes through its replies
    # only once. All models are made before the first line is printed, because a model
    # that cannot be used raises an error.
    llms = [_create_model(settings, window_tokens, turns) for _ in names]

    print_line(f"An agent works {settings.steps:,} steps through {root}", "bold")
    model = f"{settings.model or 'simulated offline'}, context window {window_tokens:,}"
    print_line(f"Model: {model} tokens, strategy {settings.strategy}", "dim")

    costs: Costs | None = TYPICAL_COSTS
    if settings.model:
        costs = resolve_costs(settings.model, {}, None)
    runs = [DemoRun(name, settings.steps, window_tokens, costs) for name in names]
    # On this event loop a simulated latency passes at once. None stands for asyncio's
    # own event loop.
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
    row_names = figures_by_run[0]  # All runs have the same rows.
    for row_name in row_names:
        table.add_row(row_name, *(figures[row_name] for figures in figures_by_run))
    terminal.console.print("", table, "", sep="\n")


def _print_assumptions(settings: DemoSettings) -> None:
    """Prints the prices and times that are made up for the offline model."""
    if not settings.model:
        prices = "$1 for a million input tokens, $0.10 for cached ones, $8 for output"
        print_line(f"Prices: {prices}.")
    if settings.latency:
        times = f"{settings.latency:g} s for every answer and every summary"
        print_line(f"Times are simulated: {times}.")


def _choose_worst(guarded_runs: list[DemoRun]) -> DemoRun:
    """Returns the worst run with the guard: one that failed, if there are such runs.

    Among several candidates the run with the most rejections is the worst.
    """
    failed_runs = [run for run in guarded_runs if run.failure]
    return max(failed_runs or guarded_runs, key=lambda run: run.rejections)


def _describe_end(bare: DemoRun, worst: DemoRun) -> str:
    """Returns the end of the sentence "With the guard 9 of 10 steps were done, …".

    Args:
        bare: The run without the guard.
        worst: The worst run with the guard.
    """
    if worst.failure:
        return f"then the model failed: {worst.failure}"
    if worst.rejections:
        return f"{worst.rejections:,} of its requests were refused"
    if bare.rejections:
        return f"no request refused; without it only {bare.steps:,}"
    return "the work fits into the window without it as well: try a smaller --window"


def plan_turns(root: Path, most_files: int) -> Iterator[Turn]:
    """Yields turns about the first source files under a folder.

    A turn has at most `FILES_PER_QUESTION` files, all in the same folder.

    Args:
        root: The top folder of the project.
        most_files: The most files in all turns together.
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

    `folder` and `paths` are relative to the top folder of the project. `paths` has at
    least one path.
    """
    place = "the top folder" if folder == Path() else f"the folder {folder}"
    question = f"How does {place} work? Begin with {paths[0].name}."

    names = [path.as_posix() for path in paths]
    listing = call("list_files", directory=folder.as_posix())
    readings = [call("read_file", path=name) for name in names]
    answer = f"I have read {', '.join(names)}."
    return Turn(question, [listing, *readings, answer])


class FileTools:
    """Read-only tools for the source files of one folder; no path leads out of it.

    The docstrings of the tools are for the model, which reads them.
    """

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
        """Resolves a path from the top folder.

        Returns None if there is no such file or folder, or if the path leads out of the
        top folder.
        """
        try:
            found = (self._root / path).resolve(strict=True)
        except (OSError, RuntimeError, TypeError, ValueError):
            # A model may ask for anything: a loop of links, a zero byte, a number.
            return None
        return found if found.is_relative_to(self._root) else None


def walk_files(folder: Path) -> Iterator[Path]:
    """Yields the files under a folder, without hidden files, caches, symbolic links."""
    for directory, folder_names, file_names in os.walk(folder):
        # `os.walk` reads this list again and enters only the folders in it, so the list
        # itself is changed.
        folder_names[:] = _list_shown(folder_names)
        for name in _list_shown(file_names):
            file = Path(directory, name)
            if not file.is_symlink():
                yield file


def _list_shown(names: list[str]) -> list[str]:
    """Returns those names of files or folders that an agent may see, sorted."""
    hidden_starts = (".", "__pycache__", "node_modules")
    shown = [name for name in names if not name.startswith(hidden_starts)]
    return sorted(name for name in shown if name.isprintable())


def read_source(file: Path) -> str:
    """Returns the text of a source file, at most its first `MAX_FILE_BYTES`.

    Returns "" for a file that is binary, generated, empty or unreadable: such a file is
    no source file.
    """
    try:
        if not file.is_file():  # A read of a pipe might never end.
            return ""
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES)
    except OSError:
        return ""

    is_empty = not data.strip()
    is_binary = b"\0" in data  # A text file has no zero bytes.
    line_count = data.count(b"\n") + 1
    is_generated = len(data) / line_count > MAX_AVERAGE_LINE_BYTES
    if is_empty or is_binary or is_generated:
        return ""
    return data.decode("utf-8", "replace")


def _create_model(
    settings: DemoSettings, window_tokens: int, turns: list[Turn]
) -> BaseLlm:
    """Makes the real model that the user has named, or else the offline model.

    `window_tokens` and `turns` are the window and the replies of the offline model.
    """
    if settings.model is not None:
        return _create_real_model(settings.model)

    # After the last turn the first turn is played again: see `DemoRun.play`.
    replies = cycle([reply for turn in turns for reply in turn.replies])
    return SimulatedLlm(
        context_window=window_tokens,
        script=lambda _: next(replies),
        prompt_cache=True,
        keep_requests=0,  # Otherwise the model keeps all requests in memory.
        latency_seconds=settings.latency or 0,
    )


def _create_real_model(name: str) -> BaseLlm:
    """Makes a model by its name; raises a `CommandError` if it cannot be used."""
    try:
        llm = LLMRegistry.new_llm(name)
        # The class is compared by name: litellm need not be installed.
        if type(llm).__name__ == "LiteLlm":
            import litellm

            # Otherwise litellm prints where to report bugs whenever a call fails.
            litellm.suppress_debug_info = True
    except Exception as error:
        text = f"the model cannot be used: {_describe_error(error)}"
        if "/" in name and importlib.util.find_spec("litellm") is None:
            hint = 'for "provider/model": pip install "litellm[mcp]"'
            raise CommandError(f"{text} ({hint})") from error
        raise CommandError(text) from error
    return llm


@dataclass
class DemoRun:
    """The work of the demo, done once from beginning to end, and its figures.

    Attributes:
        name: `BARE`, `GUARDED` or `AHEAD`. The name is printed, too.
        planned_steps: The number of steps to make.
        window_tokens: The context window of the model.
        costs: The prices of the model; None if they are unknown.
        steps: The number of steps made.
        rejections: The number of requests that the provider refused as too long.
        compactions: The number of compactions.
        usage: The tokens of all answers and summaries.
        request_tokens: The prompt tokens of each answered request of the agent, and of
            each refused one whose size the provider has told.
        pressures: The guard's warnings about the model call that is under way.
        largest_tokens: The prompt tokens of the largest request.
        answer_seconds: The time of the last answer, on the clock of the event loop. The
            clock of `VirtualTimeLoop` starts at 0.
        waited_seconds: The time that the agent waited for summaries.
        failure: The error that ended the run, unless it was a refusal; "" for none.
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

        `latency` is that of `DemoSettings`. With a latency there are two more rows, for
        the simulated times.
        """
        divisor = self.steps or 1  # The very first request may have been refused.
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
        """Does the work of the run, and sets the figures of the run.

        Args:
            turns: The turns whose questions are asked. After the last question the
                first one is asked again.
            llm: The model that answers, and that writes the summaries.
            root: The top folder of the project.
            strategy_name: The name of the guard's strategy. The run `BARE` has no
                guard, so the name has no effect there.

        Raises:
            CommandError: The model failed before the first step.
        """
        # The run may end while a task, such as a summary in the background, is under
        # way. By default asyncio prints the errors of such a task; here it does not.
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        print_line(self.name, "bold")

        app = self._create_app(llm, root, strategy_name)
        runner = InMemoryRunner(app=app)
        endless_questions = cycle(turn.question for turn in turns)
        # Nearly every turn makes several steps, so this number of questions is enough.
        # It also ends the run of a model that makes no steps.
        questions = islice(endless_questions, self.planned_steps)
        await self._ask(runner, questions)  # Counts the steps, and sets `failure`.
        await runner.close()
        if self.failure and not self.steps:
            raise CommandError(f"the model cannot be used: {self.failure}")

        # The offline model measures all requests, also those for summaries. A real
        # model measures nothing, and the run knows only the requests of the agent.
        if isinstance(llm, SimulatedLlm):
            self.largest_tokens = llm.largest_request_tokens
        else:
            self.largest_tokens = max(self.request_tokens, default=0)

    def _create_app(self, llm: BaseLlm, root: Path, strategy_name: str) -> App:
        """Makes the app of the run. Its agent reads files, and has a guard or not.

        `root` is the top folder of the files. Only the run `BARE` has no guard.
        """
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
        """Makes the guard, which reports its work to this run."""
        # A summary of the offline model takes `latency_seconds`, and this time must not
        # use up the default timeout of 60 seconds. A real model has no such attribute.
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
        """Asks one question after the other, each in a turn of one session.

        A refused request ends its turn. The run ends

        - when all steps are done, or all questions are asked
        - after `MAX_REFUSED_TURNS` refused turns in a row
        - at any error but a refusal, which becomes the `failure` of the run
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
                if overflow is None:  # The error is no refusal.
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
        """Has the agent answer a question.

        Once all steps of the run are done, the agent is stopped in the middle of the
        turn: closing its events ends its work.
        """
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
        """Counts a step, its tokens and its time if an event is an answer of the model.

        A partial event is only a piece of an answer that is still streamed.
        """
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

        The guard may have resent a refused request, compacted the history, and warned
        of a nearly full window. It reports the model call after the answer.
        """
        self.usage += record.summary_usage
        if record.is_recovered:
            # A first request was refused. The record does not have its size.
            self._record_rejection(prompt_tokens=0)

        if record.compaction:
            self.compactions += 1
            self.waited_seconds += record.compaction.waited_seconds
            tokens_before = record.compaction.tokens_before
            tokens_after = record.real_tokens or 0
            sizes = f"{tokens_before:,} → {tokens_after:,} tokens"
            print_line(f"    compaction {self.compactions}: {sizes}", "cyan")

        # A warning comes before the answer, with an estimate of the request. It is
        # printed here, after the answer, with the provider's count in its place.
        if self.pressures and record.real_tokens:
            share = record.real_tokens / self.window_tokens
            print_line(
                f"    warning: a request fills {share:.0%} of the context window",
                "yellow",
            )
        self.pressures.clear()

    def _record_rejection(self, prompt_tokens: int) -> None:
        """Counts and prints a refused request.

        `prompt_tokens` is the provider's count of the request; 0 if it is unknown.
        """
        self.rejections += 1
        size = "too many tokens"
        if prompt_tokens:
            self.request_tokens.append(prompt_tokens)
            size = f"{prompt_tokens:,} tokens"
        print_line(f"    rejected by the provider: {size}", "bold red")


def _format_seconds(seconds: float) -> str:
    """Returns a time in words: "1 min 2.5 s"."""
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{minutes:,.0f} min {rest:g} s" if minutes else f"{rest:g} s"


def _describe_error(error: Exception) -> str:
    """Returns the first line of an error's message, or its type if it has none."""
    text = str(error).strip() or type(error).__name__
    first_line = text.splitlines()[0]
    return first_line[:MAX_ERROR_CHARS]
