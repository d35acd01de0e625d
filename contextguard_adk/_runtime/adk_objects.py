"""Makes objects of ADK whose classes may have another name in a later release.

Apps do not name these classes, so ADK may rename or move them. So they are not imported
by name: a field of a class that apps do name makes the object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.adk.agents.invocation_context import InvocationContext
from google.adk.agents.run_config import RunConfig

if TYPE_CHECKING:
    from google.adk.plugins.plugin_manager import PluginManager
    from google.adk.sessions.base_session_service import GetSessionConfig


def make_plugin_manager() -> PluginManager:
    """Makes a plugin manager without plugins."""
    field = InvocationContext.model_fields["plugin_manager"]
    manager: PluginManager = field.get_default(call_default_factory=True)
    return manager


def make_session_config(**settings: float) -> GetSessionConfig:
    """Makes the config by which a session service loads a session.

    Args:
        settings: Fields of the config, such as `num_recent_events`; without any, the
            whole session is loaded.
    """
    run_config = RunConfig.model_validate({"get_session_config": settings})
    config = run_config.get_session_config
    assert config is not None  # It was made of a dict.
    return config
