"""The attributes by which the files of this folder know the plugin."""

from __future__ import annotations

from google.adk.plugins.base_plugin import BasePlugin

from contextguard_adk._runtime.runs import Guard
from contextguard_adk.config import PluginSettings


class GuardPlugin(BasePlugin):
    """A plugin with a guard.

    Attributes:
        settings: All settings of the plugin.
        is_shared: Whether the settings come from the file that the environment names,
            which other apps may use as well.
        _guard: The memory of the plugin.
    """

    settings: PluginSettings
    is_shared: bool
    _guard: Guard
