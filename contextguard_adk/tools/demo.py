"""The same work by the same agent, first without the guard, then with it.

A real `Runner` drives a real `LlmAgent` with real file tools. Only the model may be
simulated: offline it is `SimulatedLlm`, which refuses what exceeds its window.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Literal

from google.adk.models.base_llm import BaseLlm
from google.adk.models.registry import LLMRegistry
from google.adk.plugins.base_plugin import BasePlugin
from rich.console import Console

from contextguard_adk.measuring.budgets import threshold_tokens
from contextguard_adk.plugin import ContextGuardPlugin
from contextguard_adk.providers.windows import LitellmRegistry
from contextguard_adk.strategies import SlidingWindow, Strategy, Threshold
from contextguard_adk.testing.llm import SimulatedLlm
from contextguard_adk.tools.demo_plan import OfflineAgent, Turn, plan_turns
from contextguard_adk.tools.demo_run import AGENT, Phase, describe_error
from contextguard_adk.tools.demo_view import DemoView, PhaseResult
from contextguard_adk.tools.file_tools import FileTools
from contextguard_adk.tools.terminal import quiet_logs

StrategyName = Literal["threshold", "sliding-window"]

DEFAULT_WINDOW_TOKENS = 32_000
DEFAULT_STEPS = 150

STRATEGIES: dict[StrategyName, type[Strategy]] = {
    "threshold": Threshold,
    "sliding-window": SlidingWindow,
}


class DemoError(Exception):
    """Why the demo cannot run; its text is one line for the user."""


@dataclass(frozen=True)
class DemoSettings:
    """What the demo is asked to do.

    Attributes:
        root: The folder to work through; None is the installed google-adk package.
        model: A model name that ADK knows; None is the offline model.
        window_tokens: The window of the offline model, or what the guard assumes of a
            real one. None is 32,000 offline, else what the registry knows.
        max_steps: After how many answered model calls a run ends.
        strategy: How the guard compacts.
    """

    root: Path | None = None
    model: str | None = None
    window_tokens: int | None = None
    max_steps: int = DEFAULT_STEPS
    strategy: StrategyName = "threshold"


def run_demo(settings: DemoSettings) -> int:
    """Runs the work without and with the guard, and prints what came of it.

    Returns:
        0 when the guarded run was finished and the provider refused none of its
        requests, else 1.

    Raises:
        DemoError: There is nothing to work on, or the model cannot be used.
    """
    root = settings.root or _find_adk_folder()
    if not root.is_dir():
        raise DemoError(f"{root} is not a folder")
    turns = plan_turns(root, settings.max_steps)
    if not turns:
        raise DemoError(f"there is no source file in {root}")
    console = Console(highlight=False)
    with quiet_logs(console):
        _create_model(settings, OfflineAgent())  # Fails before anything is printed.
        window_tokens = _resolve_window_tokens(settings)
        threshold = threshold_tokens(window_tokens)
        view = DemoView(console, window_tokens, threshold, settings.max_steps)
        view.line(f"{settings.max_steps:,} steps through {root}")
        view.line(
            f"{settings.model or 'offline model'}, window {window_tokens:,} tokens, "
            f"compaction from {threshold:,}"
        )
        strategy = STRATEGIES[settings.strategy](context_window=window_tokens)
        guard = ContextGuardPlugin(agents={AGENT: strategy})
        bare, guarded = asyncio.run(_run_both(settings, root, turns, guard, view))
    view.table([bare, guarded])
    view.line(describe_outcome(bare, guarded), "bold")
    return 1 if guarded.rejections or guarded.failure else 0


async def _run_both(
    settings: DemoSettings,
    root: Path,
    turns: Sequence[Turn],
    guard: ContextGuardPlugin,
    view: DemoView,
) -> tuple[PhaseResult, PhaseResult]:
    """Runs the work twice, each time with a new model and a new session."""
    # What an interrupted task leaves behind is no news to the user.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    runs: list[tuple[str, list[BasePlugin]]]
    runs = [("no guard", []), ("with guard", [guard])]
    results = []
    for name, plugins in runs:
        script = OfflineAgent()
        phase = Phase(
            name=name,
            llm=_create_model(settings, script),
            script=script,
            tools=FileTools(root),
            plugins=plugins,
            view=view,
            max_steps=settings.max_steps,
        )
        with view.phase(name):
            # A real model may answer at once: it gets as many questions as steps.
            more = islice(cycle(turns), settings.max_steps)
            result = await phase.run(more if settings.model else turns)
        if result.failure and not result.steps:
            raise DemoError(f"the model cannot be used: {result.failure}")
        results.append(result)
    return results[0], results[1]


def describe_outcome(bare: PhaseResult, guarded: PhaseResult) -> str:
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
        f"Without the guard the agent was over after {bare.steps:,} of "
        f"{bare.planned_steps:,} steps; with it {done} and no request was refused."
    )


def _create_model(settings: DemoSettings, script: OfflineAgent) -> BaseLlm:
    if settings.model is None:
        window_tokens = settings.window_tokens or DEFAULT_WINDOW_TOKENS
        return SimulatedLlm(
            context_window=window_tokens, script=script, keep_requests=0
        )
    try:
        llm = LLMRegistry.new_llm(settings.model)
        if type(llm).__name__ == "LiteLlm":
            _silence_litellm()
    except Exception as error:
        raise DemoError(f"the model cannot be used: {describe_error(error)}") from error
    return llm


def _silence_litellm() -> None:
    """Keeps litellm from printing where to report bugs whenever a call fails."""
    import litellm

    litellm.suppress_debug_info = True


def _resolve_window_tokens(settings: DemoSettings) -> int:
    if settings.window_tokens is not None:
        return settings.window_tokens
    if settings.model is None:
        return DEFAULT_WINDOW_TOKENS
    window_tokens = LitellmRegistry().context_window(settings.model)
    if window_tokens is None:
        raise DemoError(f"the window of {settings.model} is unknown: give --window")
    return window_tokens


def _find_adk_folder() -> Path:
    spec = importlib.util.find_spec("google.adk")
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        raise DemoError("google-adk has no source folder; name one: PATH")
    return Path(folders[0])
