"""Chooses where the settings of the plugin come from: arguments, or one of two files.

The files are the one that the user has given to `from_file`, and the one that the
environment names.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from contextguard_adk._runtime.settings import GuardSettings
from contextguard_adk._support.log import warn_once
from contextguard_adk.config import (
    CONFIG_VARIABLE,
    STRICT_VARIABLE,
    PluginSettings,
    load_settings,
)
from contextguard_adk.errors import ConfigError
from contextguard_adk.strategies.base import Threshold

logger = logging.getLogger("contextguard_adk.plugin")

GUARD_ALL = Threshold()
"""The strategy of each agent for which no argument and no file sets another one."""

_NOT_STRICT = ("", "0", "false", "no", "off")
"""The values of `STRICT_VARIABLE` that do not ask for an error."""


_UNSETTLED_NS = 2_000_000_000
"""A file that was written less than this many nanoseconds ago may not be whole."""

FileVersion = tuple[int, ...]
"""Tells versions of a file apart; () if the file cannot be found.

The first number is the time of the last change, in nanoseconds since the epoch.
"""


def read_version(path: str) -> FileVersion:
    """Returns the version of a file, or of the file that a link leads to."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev


def is_settled(version: FileVersion) -> bool:
    """Whether a file was written long enough ago to be whole: two seconds.

    The clock of a network drive may be ahead. A file of the future counts as whole.
    """
    if not version:
        return True
    written_ns = version[0]
    return not 0 <= time.time_ns() - written_ns < _UNSETTLED_NS


@dataclass
class SettingsFile:
    """The file of the settings, which can be read again.

    Attributes:
        path: The absolute path.
        version: The version that was read last; None if it is not known, as in a copy
            of a plugin.
        last_look_seconds: When a model call last looked for a change, on the clock of
            its event loop; None if none has.
        is_being_checked: Whether a thread looks for a change right now.
        is_watched: Whether the file has ever asked to be watched.
        read_count: How often the file was read again.
        lock: Held while the file is read again, and its settings are put in place. A
            signal handler may interrupt the thread that holds the lock, and get it too.
    """

    path: str
    version: FileVersion | None = None
    last_look_seconds: float | None = None
    is_being_checked: bool = False
    is_watched: bool = False
    read_count: int = 0
    lock: Any = field(default_factory=threading.RLock)


class FromFile(Threshold):
    """The settings of a file, in the form of a strategy that guards no agent.

    `ContextGuardPlugin.from_file` passes the settings to the constructor as the
    argument `default`, which accepts strategies.
    """

    settings: PluginSettings
    file: SettingsFile


def read_file(path: str | os.PathLike[str]) -> FromFile:
    """Reads a settings file that the user names.

    Raises:
        ConfigError: The file cannot be read, or a setting in it is wrong.
    """
    file = _open_file(path)
    return FromFile(settings=load_settings(path), file=file)


def _open_file(path: str | os.PathLike[str]) -> SettingsFile:
    """Notes the version of a file, which is to be read after that.

    If the file changes in between, a later look finds another version.
    """
    full_path = os.path.abspath(path)
    return SettingsFile(full_path, read_version(full_path))


class ChosenSettings(NamedTuple):
    """The settings of the plugin.

    Attributes:
        settings: All settings.
        is_shared: Whether the settings come from the file that the environment names,
            which other apps may use as well.
        file: The file that the settings come from, or would come from if it were not
            wrong; None if they were given in code.
    """

    settings: PluginSettings
    is_shared: bool = False
    file: SettingsFile | None = None


def choose_settings(
    arguments: PluginSettings, default: object, is_strict: bool
) -> ChosenSettings:
    """Chooses between arguments and files.

    The settings come from the first of these sources that there is:

    1. the file that `from_file` has read
    2. the arguments, if any of them was given
    3. the file that the environment names, unless the file is wrong
    4. the arguments, which all have their defaults then

    Args:
        arguments: The settings that were given as arguments.
        default: The argument `default`, as it was given: a `FromFile`, if `from_file`
            has read a file.
        is_strict: Whether a wrong file raises an error.

    Raises:
        ConfigError: The file that the environment names is wrong, and `is_strict` or
            the environment asks for an error.
    """
    if isinstance(default, FromFile):
        return ChosenSettings(default.settings, file=default.file)
    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        return ChosenSettings(arguments)

    changed = _list_changed(arguments, default)
    if changed:
        warn_once(
            logger,
            f"{CONFIG_VARIABLE} names %s, which is not read because ContextGuardPlugin "
            "was given %s in code. To read the file, give none of these, or use "
            "ContextGuardPlugin.from_file(%r).",
            path,
            ", ".join(changed),
            path,
        )
        return ChosenSettings(arguments)

    file = _open_file(path)
    try:
        return ChosenSettings(load_settings(path), is_shared=True, file=file)
    except ConfigError as error:
        strict_value = os.environ.get(STRICT_VARIABLE, "").lower()
        if is_strict or strict_value not in _NOT_STRICT:
            raise ConfigError(
                f"{error} Nothing is guarded: ADK only logs this under --extra_plugins."
            ) from error
        message = (
            "%s Every agent is guarded with the defaults until the file is mended and "
            "read again, by a restart or `reload`."
        )
        warn_once(logger, message, str(error), level=logging.ERROR)
        return ChosenSettings(arguments, is_shared=True, file=file)


def _list_changed(arguments: PluginSettings, default: object) -> list[str]:
    """Returns the names of the arguments that somebody has given.

    An argument that equals its default counts as not given, except for `default`.
    """
    usual_settings = PluginSettings()
    changed = [
        name
        for name in ("agents", "default", *GuardSettings.model_fields)
        if getattr(arguments, name) != getattr(usual_settings, name)
    ]
    # A given `Threshold()` is equal to the default of the argument, but another object.
    was_given = default is not GUARD_ALL
    if was_given and "default" not in changed:
        changed.append("default")
    return changed
