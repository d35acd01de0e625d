"""The attributes by which the files of this folder know the plugin."""

from __future__ import annotations

from google.adk.plugins.base_plugin import BasePlugin

from contextguard_adk._runtime.runs import Guard
from contextguard_adk.config import PluginSettings


class GuardPlugin(BasePlugin):
    """A plugin with a guard.

    Attributes:
        settings: All settings; `_guard` has the same.
        is_shared: Whether they are those of the file that the environment names, and
            may therefore be meant for other apps as well.
    """

    settings: PluginSettings
    is_shared: bool
    _guard: Guard
