"""`contextguard demo`: the same work by a real agent, without and with the guard."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import chain, cycle, groupby, islice
from pathlib import Path
from typing import Any, TypeAlias

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

BARE = "no guard"
AHEAD = "summaries ahead"

FILES_PER_QUESTION = 10
MAX_LISTED_FILES = 300
MAX_FILE_BYTES = 200_000
# A file with longer lines, on average, is generated.
MAX_AVERAGE_LINE_BYTES = 200
# After this number of refused turns in a row, a run is given up.
MAX_REFUSED_TURNS = 10

# A question of the user, and the offline model's replies to it.
Turn: TypeAlias = tuple[str, list[Reply]]


@dataclass(frozen=True)
class DemoSettings:
    """The options of the command; None for one that the user did not give.

    `latency` is the simulated time of an answer or a summary, in seconds.
    """

    path: Path | None
    window_tokens: int | None
    steps: int
    strategy: str
    model: str | None
    latency: float | None


def run_demo(**options: Any) -> int:
    """Compares the work without and with the guard; returns 1 if the guard failed."""
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
    if not settings.model:
        prices = "$1 for a million input tokens, $0.10 for cached ones, $8 for output"
        print_line(f"Prices: {prices}.")
    if settings.latency:
        each = f"{settings.latency:g} s for every answer and every summary"
        print_line(f"Times are simulated: {each}.")

    # A failure is worse than any number of rejections.
    bare, *guarded_runs = runs
    worst = max(guarded_runs, key=lambda run: (bool(run.failure), run.rejections))
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
    """Does the work without the guard, then with it, each time with a new model."""
    model = settings.model
    latency = settings.latency
    names = [BARE, "with guard"]
    if latency:
        names.append(AHEAD)
    # A model that cannot be used is an error before anything is printed.
    llms = [_create_model(model, latency, window_tokens, turns) for _ in names]

    print_line(f"An agent works {settings.steps:,} steps through {root}", "bold")
    setup = f"{model or 'simulated offline'}, context window {window_tokens:,}"
    print_line(f"Model: {setup} tokens, strategy {settings.strategy}", "dim")

    costs = resolve_costs(model, {}, None) if model else TYPICAL_COSTS
    runs = [DemoRun(name, settings.steps, window_tokens, costs) for name in names]
    loop_factory = VirtualTimeLoop if latency else None
    for run, llm in zip(runs, llms, strict=True):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(run.play(turns, llm, root, settings.strategy))
    return runs


def _describe_end(bare: DemoRun, worst: DemoRun) -> str:
    """Describes the end of the worst guarded run, beside the run without a guard."""
    if worst.failure:
        return f"then the model failed: {worst.failure}"
    if worst.rejections:
        return f"{worst.rejections:,} of its requests were refused"
    if bare.rejections:
        return f"no request refused; without it only {bare.steps:,}"
    return "the work fits into the window without it as well: try a smaller --window"


def _print_comparison(
    runs: list[DemoRun], window_tokens: int, latency: float | None
) -> None:
    """Draws the prompt tokens of each run, and prints the figures side by side."""
    print_line("")
    print_line(f"Prompt tokens of each call; ✕ is over {window_tokens:,}:")
    for run in runs:
        terminal.print_sparkline(f"{run.name:18}", run.sizes, window_tokens)

    columns = [Column(run.name, justify="right") for run in runs]
    table = Table("", *columns, show_edge=False, pad_edge=False)
    figures = [run.describe(latency) for run in runs]
    for name in figures[0]:
        table.add_row(name, *(each[name] for each in figures))
    terminal.console.print("", table, "", sep="\n")


def plan_turns(root: Path, max_files: int) -> Iterator[Turn]:
    """Yields questions about the first source files, ten of one folder at a time."""
    sources = (file for file in walk_files(root) if read_source(file))
    paths = (file.relative_to(root) for file in islice(sources, max_files))
    for folder, folder_paths in groupby(paths, lambda path: path.parent):
        place = "the top folder" if folder == Path() else f"the folder {folder}"
        listing = call("list_files", directory=folder.as_posix())

        while asked_paths := list(islice(folder_paths, FILES_PER_QUESTION)):
            question = f"How does {place} work? Begin with {asked_paths[0].name}."
            names = [path.as_posix() for path in asked_paths]
            readings = [call("read_file", path=name) for name in names]
            answer = f"I have read {', '.join(names)}."
            yield question, [listing, *readings, answer]


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
        # `os.walk` goes on with the folders that are left in its own list.
        folder_names[:] = _list_shown(folder_names)
        for name in _list_shown(file_names):
            file = Path(directory, name)
            if not file.is_symlink():
                yield file


def _list_shown(names: list[str]) -> list[str]:
    hidden = (".", "__pycache__", "node_modules")
    return sorted(n for n in names if n.isprintable() and not n.startswith(hidden))


def read_source(file: Path) -> str:
    """Returns the start of a file's text.

    Returns "" if the file is binary, generated, empty or unreadable.
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
    average_line_bytes = len(data) / (data.count(b"\n") + 1)
    if is_empty or is_binary or average_line_bytes > MAX_AVERAGE_LINE_BYTES:
        return ""
    return data.decode("utf-8", "replace")


def _create_model(
    name: str | None, latency: float | None, window_tokens: int, turns: list[Turn]
) -> BaseLlm:
    """Makes the model of this name; without a name, one that plays the turns offline.

    The offline model begins again with the first turn after the last one.
    """
    if name is None:
        replies = cycle(chain.from_iterable(replies for _, replies in turns))
        return SimulatedLlm(
            context_window=window_tokens,
            script=lambda _: next(replies),
            prompt_cache=True,
            keep_requests=0,
            latency_seconds=latency or 0,
        )

    try:
        llm = LLMRegistry.new_llm(name)
        if type(llm).__name__ == "LiteLlm":
            import litellm

            litellm.suppress_debug_info = True  # Or it prints where to report bugs.
    except Exception as error:
        text = f"the model cannot be used: {_describe_error(error)}"
        raise CommandError(text) from error
    return llm


@dataclass
class DemoRun:
    """The work of the demo, done once from beginning to end, and its figures.

    Attributes:
        name: The name of the run for people: with or without a guard.
        planned_steps: The number of model calls to make.
        window_tokens: The context window of the model.
        costs: The prices of the model; None if they are unknown.
        steps: The number of complete answers of the model.
        rejections: The number of requests that the provider refused.
        compactions: The number of compactions.
        usage: The tokens of all answers and summaries.
        sizes: The prompt tokens of each request, as far as they are known.
        pressures: The warnings about the running call.
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
    sizes: list[int] = field(default_factory=list)
    pressures: list[PressureRecord] = field(default_factory=list)
    largest_tokens: int = 0
    answer_seconds: float = 0.0
    waited_seconds: float = 0.0
    failure: str = ""

    def describe(self, latency: float | None) -> dict[str, str]:
        """Returns the figures to compare, by the name of their row.

        If `latency` is set, time is simulated, and two rows tell it.
        """
        divisor = max(1, self.steps)
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

        tools = FileTools(root)
        agent = LlmAgent(
            name="explorer",
            model=llm,
            instruction=INSTRUCTION,
            tools=[tools.list_files, tools.read_file],
        )
        strategy = STRATEGIES[strategy_name](
            context_window=self.window_tokens,
            summary_timeout_seconds=60 + getattr(llm, "latency_seconds", 0),
            ahead=self.name == AHEAD,
        )
        guard = ContextGuardPlugin(
            default=strategy,
            on_call=self._note_call,
            on_pressure=self.pressures.append,
        )
        plugins: list[BasePlugin] = [] if self.name == BARE else [guard]
        app = App(name="contextguard_demo", root_agent=agent, plugins=plugins)

        runner = InMemoryRunner(app=app)
        questions = cycle(question for question, _ in turns)
        await self._ask(runner, islice(questions, self.planned_steps))
        await runner.close()
        if self.failure and not self.steps:
            raise CommandError(f"the model cannot be used: {self.failure}")

        # A simulated model knows the size of requests for summaries as well.
        if isinstance(llm, SimulatedLlm):
            self.largest_tokens = llm.largest_request_tokens
        else:
            self.largest_tokens = max(self.sizes, default=0)

    async def _ask(self, runner: Runner, questions: Iterator[str]) -> None:
        """Asks one question after the other until the steps are done.

        A refused request ends its turn. Ten refused turns in a row end the run, and so
        does any other error.
        """
        await runner.session_service.create_session(
            app_name=runner.app_name, user_id="user", session_id="session"
        )
        refused_in_a_row = 0
        for number, question in enumerate(questions, 1):
            done = f"{self.steps:,}/{self.planned_steps:,}"
            print_line(f"  turn {number}, step {done}: {question}")
            try:
                await self._play_turn(runner, question)
                refused_in_a_row = 0
            except Exception as error:  # noqa: BLE001 - whatever a provider's SDK raises
                overflow = parse_overflow(error)
                if not overflow:
                    self.failure = _describe_error(error)
                    print_line(f"    stopped: {self.failure}", "bold red")
                    return
                refused_in_a_row += 1
                self._note_rejection(overflow.prompt_tokens or 0)

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
                self._count(event)
                if self.steps >= self.planned_steps:
                    return

    def _count(self, event: Event) -> None:
        """Counts an event if it is a complete answer of the model."""
        if event.partial or not event.content or event.content.role != "model":
            return

        self.steps += 1
        self.answer_seconds = asyncio.get_running_loop().time()
        usage = read_usage(event.usage_metadata)
        self.usage += usage
        self.sizes.append(usage.prompt_tokens)

    def _note_call(self, record: CallRecord) -> None:
        """Counts and prints a rejection, a compaction and a warning of the guard."""
        self.usage += record.summary_usage
        if record.is_recovered:
            self._note_rejection(0)

        if record.compaction:
            self.compactions += 1
            self.waited_seconds += record.compaction.waited_seconds
            before = record.compaction.tokens_before
            after = record.real_tokens or 0
            print_line(
                f"    compaction {self.compactions}: {before:,} → {after:,} tokens",
                "cyan",
            )

        # A pressure record has the estimate; the answer has the provider's count.
        if self.pressures and record.real_tokens:
            share = record.real_tokens / self.window_tokens
            print_line(
                f"    warning: a request fills {share:.0%} of the context window",
                "yellow",
            )
        self.pressures.clear()

    def _note_rejection(self, prompt_tokens: int) -> None:
        """Counts and prints a refused request; 0 tokens mean an unknown size."""
        self.rejections += 1
        size = "too many tokens"
        if prompt_tokens:
            self.sizes.append(prompt_tokens)
            size = f"{prompt_tokens:,} tokens"
        print_line(f"    rejected by the provider: {size}", "bold red")


def _format_seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{minutes:,.0f} min {rest:g} s" if minutes else f"{rest:g} s"


def _describe_error(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
