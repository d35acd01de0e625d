"""Reads the settings file of a running plugin again: on demand, or after a change.

Only the settings are replaced. Sessions, and what the process remembers of them, stay
as they are. A model call that is under way keeps the strategy that it began with.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from contextguard_adk._plugin.base import GuardPlugin
from contextguard_adk._plugin.sources import (
    FileVersion,
    SettingsFile,
    is_settled,
    read_version,
)
from contextguard_adk._runtime.observers import DAEMON_THREADS
from contextguard_adk._support.log import log_failures, one_line
from contextguard_adk.config import PluginSettings, load_settings
from contextguard_adk.errors import ConfigError, ContextGuardError
from contextguard_adk.strategies.base import Strategy

logger = logging.getLogger("contextguard_adk.plugin")

_CHECK_EVERY_SECONDS = 30
"""A model call looks for a change of the file at most this often."""

_MAX_WAIT_SECONDS = 2
"""How long a model call waits for the file, which may be on a slow network drive.

So long `reload_settings` waits for another thread that reads the file.
"""

_STILL_READ = (
    "%s is being read by another thread, which has not come to an end. The settings "
    "stay as they are."
)


class _Reading(NamedTuple):
    """What came of reading the file, for a line of the log.

    The line is logged when the lock of the file is released. A signal handler may have
    interrupted a thread that is logging, so it must not wait for a thread that waits to
    log.

    Attributes:
        path: The path of the file.
        changed: The names of the changed settings.
        problem: Why the settings could not be read; "" if they could.
    """

    path: str
    changed: str
    problem: str

    @property
    def is_read(self) -> bool:
        """Whether the settings could be read."""
        return not self.problem

    def log(self) -> None:
        """Logs what has changed, or why the settings stay."""
        if self.is_read:
            message = "Settings read again from %s; changed: %s."
            logger.info(message, self.path, self.changed)
        else:
            logger.error("%s The settings stay as they are.", self.problem)


def reload_settings(plugin: GuardPlugin) -> bool:
    """Reads the settings file again, and uses the new settings from now on.

    Returns:
        Whether the settings could be read. If not, the log says why at ERROR, and the
        settings stay as they are.

    Raises:
        ContextGuardError: The plugin has no settings file.
    """
    file = plugin._file
    if file is None:
        raise ContextGuardError(
            "This guard has no settings file to read again. Make it with "
            "ContextGuardPlugin.from_file(path), or name a file in CONTEXTGUARD_CONFIG."
        )

    if not file.lock.acquire(timeout=_MAX_WAIT_SECONDS):
        logger.error(_STILL_READ, file.path)
        return False
    try:
        reading = _read_again(plugin, file, read_version(file.path))
    finally:
        file.lock.release()
    reading.log()
    return reading.is_read


async def reload_if_changed(plugin: GuardPlugin) -> None:
    """Reads the settings file again if the file wants it and has changed.

    Nothing is done within 30 seconds of the last look, or while that look goes on. A
    file that takes longer than two seconds is read in the background, and this call
    goes on with the old settings.
    """
    file = plugin._file
    if file is None or file.is_being_checked:
        return
    # A file that was watched once stays watched: the setting may be missing because
    # only a part of the file was written.
    file.is_watched = file.is_watched or plugin.settings.reload_on_change
    if not file.is_watched:
        return

    loop = asyncio.get_running_loop()
    now_seconds = loop.time()
    # The clock of another event loop may be behind.
    if file.last_look_seconds is not None:
        passed_seconds = now_seconds - file.last_look_seconds
        if 0 <= passed_seconds < _CHECK_EVERY_SECONDS:
            return

    file.last_look_seconds = now_seconds
    file.is_being_checked = True
    try:
        check = loop.run_in_executor(DAEMON_THREADS, _read_if_changed, plugin, file)
    except RuntimeError:  # No thread can be started now.
        file.is_being_checked = False
        raise
    await asyncio.wait([check], timeout=_MAX_WAIT_SECONDS)


def _read_if_changed(plugin: GuardPlugin, file: SettingsFile) -> None:
    """Reads the file again unless its version is that of the last reading.

    So each version of a file that is wrong is logged once. A file that was written just
    now may be written to still: the next call looks at it again.
    """
    reading: _Reading | None = None
    try:
        with log_failures(logger, "The settings file could not be read again"):
            with file.lock:
                version = read_version(file.path)
                if version != file.version and is_settled(version):
                    reading = _read_again(plugin, file, version)
                elif version != file.version:
                    file.last_look_seconds = None
            if reading is not None:
                reading.log()
    finally:
        file.is_being_checked = False


def _read_again(
    plugin: GuardPlugin, file: SettingsFile, version: FileVersion
) -> _Reading:
    """Reads the file and uses its settings; logs nothing.

    Args:
        plugin: The plugin.
        file: The file, whose lock is held.
        version: The version of the file just before.
    """
    file.version = version
    file.read_count += 1
    own_count = file.read_count
    try:
        settings = load_settings(file.path)
        if not settings.model_fields_set:
            raise ConfigError(f"{file.path}: there is no setting in it.")
    except ConfigError as error:
        return _Reading(file.path, "", problem=str(error))

    changes = list[str]()
    # A signal handler of this thread may have read a newer version in between.
    if file.read_count == own_count:
        changes = _list_changes(plugin.settings, settings)
        plugin.settings = settings
        plugin._guard.use(settings)
    changed = one_line(", ".join(changes)) or "nothing"
    return _Reading(file.path, changed, problem="")


def _list_changes(old: PluginSettings, new: PluginSettings) -> list[str]:
    """Names the settings that differ: "observe", "default.trigger", "agents.writer"."""
    changes = list[str]()
    for name in PluginSettings.model_fields:
        if name in ("agents", "default"):
            continue
        if getattr(old, name) != getattr(new, name):
            changes.append(name)

    changes += _list_strategy_changes("default", old.default, new.default)
    for agent in sorted({*old.agents, *new.agents}):
        place = f"agents.{agent}"
        is_named_in_both = agent in old.agents and agent in new.agents
        if is_named_in_both:
            old_strategy = old.agents[agent]
            changes += _list_strategy_changes(place, old_strategy, new.agents[agent])
        else:
            changes.append(place)
    return changes


def _list_strategy_changes(place: str, old: object, new: object) -> list[str]:
    """Names the settings in which two strategies differ; [] if they are equal.

    Two strategies of different classes are named as a whole, by their place.
    """
    if old == new:
        return []
    if not isinstance(old, Strategy) or type(old) is not type(new):
        return [place]
    changed_names = [
        name
        for name in type(old).model_fields
        if getattr(old, name) != getattr(new, name)
    ]
    return [f"{place}.{name}" for name in changed_names]
