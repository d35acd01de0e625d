"""`contextguard replay`: what the guard would have done in a recorded session."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from contextguard_adk import telemetry
from contextguard_adk.config import CONFIG_VARIABLE, PluginSettings, load_settings
from contextguard_adk.tools.recordings import SessionKey, load_session
from contextguard_adk.tools.replay_plot import require_plotting, save_plot
from contextguard_adk.tools.replay_run import replay_session
from contextguard_adk.tools.replay_settings import ReplaySettings
from contextguard_adk.tools.replay_view import print_replayed, show_progress
from contextguard_adk.tools.replayed import Replayed
from contextguard_adk.tools.terminal import quiet_logs


@dataclass(frozen=True)
class ReplayCommand:
    """What the command line asks for.

    Attributes:
        source: A JSON export, an SQLite file, or a database's URL.
        key: Which session of a database.
        config: A settings file; None takes the one that `CONTEXTGUARD_CONFIG` names,
            else the built-in settings.
        agent: Only this agent's calls.
        model: The model whose window counts.
        window_tokens: The window, whatever model and settings say.
        plot: Where to write a drawing.
        is_json: Whether to print JSON.
        is_complete: Whether to print every call of a long session.
    """

    source: str
    key: SessionKey
    config: str | None = None
    agent: str | None = None
    model: str | None = None
    window_tokens: int | None = None
    plot: Path | None = None
    is_json: bool = False
    is_complete: bool = False


def run_replay(command: ReplayCommand) -> int:
    """Replays a recorded session and prints what came of it.

    Raises:
        RecordingError: There is nothing to replay, or nowhere to draw.
        ConfigError: The settings file is wrong.
    """
    if command.plot:
        require_plotting(command.plot)
    # The table shows what is logged of calls and compactions.
    with quiet_logs(Console(stderr=True), [telemetry.logger]):
        config = command.config or os.environ.get(CONFIG_VARIABLE)
        guard = load_settings(config) if config else PluginSettings()
        settings = ReplaySettings(
            guard, command.agent, command.model, command.window_tokens
        )
        replayed = asyncio.run(_replay(command, settings))
        if command.plot:
            save_plot(replayed, command.plot)
    if command.is_json:
        print(json.dumps(replayed.to_json(), indent=2))
    else:
        print_replayed(replayed, command.is_complete)
    return 0


async def _replay(command: ReplayCommand, settings: ReplaySettings) -> Replayed:
    session = await load_session(command.source, command.key)
    with show_progress() as advance:
        return await replay_session(session, settings, advance)
