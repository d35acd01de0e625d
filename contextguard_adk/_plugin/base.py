"""The attributes by which the files of this folder know the plugin."""

from __future__ import annotations

from google.adk.plugins.base_plugin import BasePlugin

from contextguard_adk._plugin.sources import SettingsFile
from contextguard_adk._runtime.runs import Guard
from contextguard_adk.config import PluginSettings


class GuardPlugin(BasePlugin):
    """A plugin with a guard.

    Attributes:
        settings: All settings of the plugin, as they hold now.
        is_shared: Whether the settings come from the file that the environment names,
            which other apps may use as well.
        _file: The file that the settings come from; None if there is none.
        _guard: The memory of the plugin.
    """

    settings: PluginSettings
    is_shared: bool
    _file: SettingsFile | None
    _guard: Guard
