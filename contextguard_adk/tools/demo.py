"""`contextguard demo`: the same work by the same agent, without and with the guard.

A real `Runner` drives a real `LlmAgent` with real file tools. Only the model may be
simulated: offline it is `SimulatedLlm`, which refuses what exceeds its window.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
from collections.abc import Iterable
from contextlib import aclosing
from itertools import cycle, islice
from pathlib import Path

from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.events import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.registry import LLMRegistry
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService, Session
from google.genai import types
from rich.console import Console
from rich.table import Table

from contextguard_adk.measuring.budgets import threshold_tokens
from contextguard_adk.plugin import ContextGuardPlugin
from contextguard_adk.providers.overflow import parse_overflow
from contextguard_adk.providers.windows import LitellmRegistry
from contextguard_adk.strategies import SlidingWindow, Threshold
from contextguard_adk.telemetry import CallRecord
from contextguard_adk.testing import SimulatedLlm, SimulatedProviderError
from contextguard_adk.tools.demo_agent import FileTools, OfflineAgent, Turn, plan_turns
from contextguard_adk.tools.terminal import CommandError, print_line, quiet_logs

DEFAULT_WINDOW_TOKENS = 32_000
MAX_REFUSED_TURNS = 10
"""After so many refused turns in a row the user gives up."""

INSTRUCTION = """\
You study the source files of a project with your tools and answer questions about it.
Read the files that matter one after another, note in a sentence what you found in
each, and then answer. Paths are relative to the project's top folder."""

_MAX_REASON_CHARS = 200


def run_demo(arguments: argparse.Namespace) -> int:
    """Runs the work without and with the guard, and prints the outcome.

    Returns:
        0 when the guarded run was finished and the provider refused none of its
        requests, else 1.

    Raises:
        CommandError: There is nothing to work on, or the model cannot be used.
    """
    root: Path = arguments.path or _find_adk_folder()
    turns = plan_turns(root, arguments.steps)
    if not turns:
        raise CommandError(f"there is no source file in {root}")
    console = Console(highlight=False)
    with quiet_logs(console):
        window_tokens = _find_window_tokens(arguments.model, arguments.window)
        _create_model(arguments.model, window_tokens, OfflineAgent())  # May fail.
        print_line(console, f"{arguments.steps:,} steps through {root}")
        print_line(
            console,
            f"{arguments.model or 'offline model'}, window {window_tokens:,} tokens, "
            f"compaction from {threshold_tokens(window_tokens):,}",
        )
        runs = [
            DemoRun(name, arguments.steps, FileTools(root), console)
            for name in ("no guard", "with guard")
        ]
        for run in runs:
            kind = Threshold if arguments.strategy == "threshold" else SlidingWindow
            strategy = kind(context_window=window_tokens)
            guard = ContextGuardPlugin(default=strategy, on_call=run.note_call)
            plugins: list[BasePlugin] = [guard] if run is runs[1] else []
            script = OfflineAgent()
            llm = _create_model(arguments.model, window_tokens, script)
            # A real model may answer at once: it gets as many questions as steps.
            asked = islice(cycle(turns), arguments.steps) if arguments.model else turns
            asyncio.run(run.play(asked, llm, script, plugins))
            if run.failure and not run.steps:
                raise CommandError(f"the model cannot be used: {run.failure}")
    bare, guarded = runs
    _print_table(console, runs)
    if arguments.model:
        print_line(console, "The summaries that the guard asked for are not counted.")
    print_line(console, describe_outcome(bare, guarded), "bold")
    return 1 if guarded.rejections or guarded.failure else 0


class DemoRun:
    """The work of the demo, done once from beginning to end, and its figures.

    Args:
        name: What the table calls the run.
        planned_steps: After how many answered model calls the run ends.
        tools: The agent's tools.
        console: Where progress is shown.

    Attributes:
        steps: Answered model calls, summaries not counted.
        rejections: Requests that the provider refused.
        compactions: How often history was replaced by a summary.
        billed_tokens: Prompt and output tokens of the model calls.
        largest_request_tokens: The largest prompt, accepted or refused.
        failure: Why the run ended early, other than by a refusal; "" otherwise.
    """

    def __init__(
        self, name: str, planned_steps: int, tools: FileTools, console: Console
    ) -> None:
        self.name = name
        self.planned_steps = planned_steps
        self.steps = 0
        self.rejections = 0
        self.compactions = 0
        self.billed_tokens = 0
        self.largest_request_tokens = 0
        self.failure = ""
        self._tools = [tools.list_files, tools.read_file, tools.search]
        self._console = console
        self._refused_turns = 0  # in a row

    async def play(
        self,
        turns: Iterable[Turn],
        llm: BaseLlm,
        script: OfflineAgent,
        plugins: list[BasePlugin],
    ) -> None:
        """Plays the turns, whatever happens to each."""
        # Errors of a task that was interrupted are not for the user.
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        print_line(self._console, self.name, "bold")
        agent = LlmAgent(
            name="explorer",
            model=llm,
            instruction=INSTRUCTION,
            tools=[*self._tools],
        )
        app = App(name="contextguard_demo", root_agent=agent, plugins=plugins)
        runner = Runner(app=app, session_service=InMemorySessionService())
        try:
            session = await runner.session_service.create_session(
                app_name=app.name, user_id="user"
            )
            for number, turn in enumerate(turns, 1):
                print_line(self._console, f"  turn {number}: {turn.question}")
                script.begin(turn)
                await self._play_turn(runner, session, turn)
                if self._is_over():
                    break
        finally:
            await runner.close()
        if isinstance(llm, SimulatedLlm):  # It knows what summaries cost.
            self.billed_tokens = llm.billed_tokens
            self.largest_request_tokens = llm.largest_request_tokens

    async def _play_turn(self, runner: Runner, session: Session, turn: Turn) -> None:
        """Plays one turn; it ends early when the provider refuses a request."""
        steps_before = self.steps
        message = types.Content(role="user", parts=[types.Part(text=turn.question)])
        events = runner.run_async(
            user_id=session.user_id, session_id=session.id, new_message=message
        )
        prompt_tokens = 0
        try:
            async with aclosing(events):
                async for event in events:
                    prompt_tokens = self._bill(event) or prompt_tokens
                    if self.steps >= self.planned_steps:
                        break
            self._refused_turns = 0
        except Exception as error:  # noqa: BLE001 - whatever a provider's SDK raises
            self._note_error(error)
        if self.steps > steps_before:
            done = f"step {self.steps}/{self.planned_steps}"
            print_line(self._console, f"    {done}: {prompt_tokens:,} tokens", "dim")

    def _bill(self, event: Event) -> int:
        """Counts a model's answer; returns its prompt tokens, 0 where unknown."""
        is_answer = event.content is not None and event.content.role == "model"
        if event.partial or not is_answer:
            return 0
        self.steps += 1
        usage = event.usage_metadata or types.GenerateContentResponseUsageMetadata()
        prompt_tokens = usage.prompt_token_count or 0
        output_tokens = usage.candidates_token_count or 0
        self.billed_tokens += usage.total_token_count or prompt_tokens + output_tokens
        self.largest_request_tokens = max(self.largest_request_tokens, prompt_tokens)
        return prompt_tokens

    def note_call(self, record: CallRecord) -> None:
        """Shows what the guard did before a model call."""
        if record.is_recovered:
            self._note_rejection(None)
        if record.compaction:
            self.compactions += 1
            before, after = record.compaction.tokens_before, record.real_tokens or 0
            text = f"compaction {self.compactions}: {before:,} → {after:,} tokens"
            print_line(self._console, f"    {text}", "cyan")

    def _note_error(self, error: Exception) -> None:
        overflow = parse_overflow(error)
        if overflow or isinstance(error, SimulatedProviderError):
            self._refused_turns += 1
            self._note_rejection(overflow.prompt_tokens if overflow else None)
        else:
            self.failure = _describe_error(error)
            print_line(self._console, f"    stopped: {self.failure}", "bold red")

    def _note_rejection(self, prompt_tokens: int | None) -> None:
        self.rejections += 1
        self.largest_request_tokens = max(
            self.largest_request_tokens, prompt_tokens or 0
        )
        size = f"{prompt_tokens:,} tokens" if prompt_tokens else "too many tokens"
        print_line(self._console, f"    rejected by the provider: {size}", "bold red")

    def _is_over(self) -> bool:
        if self._refused_turns >= MAX_REFUSED_TURNS:
            text = f"    given up after {MAX_REFUSED_TURNS} refused turns"
            print_line(self._console, text)
            return True
        return bool(self.failure) or self.steps >= self.planned_steps


def _print_table(console: Console, runs: list[DemoRun]) -> None:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    rows = {
        "steps done": [f"{run.steps:,} of {run.planned_steps:,}" for run in runs],
        "requests rejected": [f"{run.rejections:,}" for run in runs],
        "compactions": [f"{run.compactions:,}" for run in runs],
        "tokens billed": [f"{run.billed_tokens:,}" for run in runs],
        "largest request": [f"{run.largest_request_tokens:,}" for run in runs],
    }
    for name, values in rows.items():
        table.add_row(name, *values)
    console.print("", table, "", sep="\n")


def describe_outcome(bare: DemoRun, guarded: DemoRun) -> str:
    """Says in one sentence how the two runs compare."""
    planned = f"{guarded.planned_steps:,} steps were done"
    is_complete = guarded.steps >= guarded.planned_steps
    done = f"all {planned}" if is_complete else f"{guarded.steps:,} of {planned}"
    if guarded.failure:
        return f"With the guard {done}; then the model failed: {guarded.failure}"
    if guarded.rejections:
        refused = f"{guarded.rejections:,} of its requests"
        return f"With the guard {done}, but the provider refused {refused}."
    if not bare.rejections:
        return (
            f"With the guard {done}; the work fits into the window without it as well, "
            "so try a smaller --window or more --steps."
        )
    return (
        f"Without the guard the agent was stuck after {bare.steps:,} of "
        f"{bare.planned_steps:,} steps; with it {done} and no request was refused."
    )


def _create_model(
    name: str | None, window_tokens: int, script: OfflineAgent
) -> BaseLlm:
    if name is None:
        return SimulatedLlm(
            context_window=window_tokens, script=script, keep_requests=0
        )
    try:
        llm = LLMRegistry.new_llm(name)
        if type(llm).__name__ == "LiteLlm":
            import litellm

            litellm.suppress_debug_info = True  # Or it prints where to report bugs.
    except Exception as error:
        reason = _describe_error(error)
        raise CommandError(f"the model cannot be used: {reason}") from error
    return llm


def _describe_error(error: Exception) -> str:
    """Returns the reason of a failure in one line."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[:_MAX_REASON_CHARS]} ..."


def _find_window_tokens(model: str | None, window_tokens: int | None) -> int:
    if window_tokens is None and model is not None:
        window_tokens = LitellmRegistry().context_window(model)
        if window_tokens is None:
            raise CommandError(f"the window of {model} is unknown: give --window")
    return window_tokens or DEFAULT_WINDOW_TOKENS


def _find_adk_folder() -> Path:
    spec = importlib.util.find_spec("google.adk")
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        raise CommandError("google-adk has no source folder; name one: PATH")
    return Path(folders[0])
