"""Where the settings come from: from arguments, or from one of two files."""

from __future__ import annotations

import logging
import os

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
"""The strategy of every agent where nothing else is said."""

_OFF = ("", "0", "false", "no", "off")


class FromFile(Threshold):
    """Stands as the argument `default` for all the settings of a file."""

    settings: PluginSettings


def choose_settings(
    given: PluginSettings, default: object, is_strict: bool
) -> tuple[PluginSettings, bool]:
    """Chooses between arguments and files.

    Args:
        given: The settings as they were given as arguments.
        default: The strategy of agents that are not named, as it was given.
        is_strict: Whether a wrong file raises an error.

    Returns:
        The settings, and whether they are those of the file that the environment names.

    Raises:
        ConfigError: That file is wrong, and argument or environment say to raise.
    """
    if isinstance(default, FromFile):
        return default.settings, False
    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        return given, False

    changed = _list_changed(given, default)
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
        return given, False

    try:
        return load_settings(path), True
    except ConfigError as error:
        if is_strict or os.environ.get(STRICT_VARIABLE, "").lower() not in _OFF:
            raise ConfigError(
                f"{error} Nothing is guarded: ADK only logs this under --extra_plugins."
            ) from error
        message = "%s Every agent is guarded with the defaults until this is mended."
        warn_once(logger, message, str(error), level=logging.ERROR)
        return given, False


def _list_changed(given: PluginSettings, default: object) -> list[str]:
    """Names the arguments that are not as they are where nothing is given."""
    usual = PluginSettings()
    changed = [
        name
        for name in ("agents", "default", *GuardSettings.model_fields)
        if getattr(given, name) != getattr(usual, name)
    ]
    # A strategy that equals the usual one was given as well.
    if default is not GUARD_ALL and "default" not in changed:
        changed.append("default")
    return changed
