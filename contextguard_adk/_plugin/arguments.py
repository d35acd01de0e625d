"""Checks that the arguments of the plugin are objects of the expected kinds."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from contextguard_adk._support.settings import short_repr
from contextguard_adk.config import STRATEGIES
from contextguard_adk.strategies.base import Strategy, Threshold


def check_arguments(agents: object, default: object, registry: object) -> None:
    """Raises a TypeError if an argument is an object of a wrong kind.

    The error names the expected kind. `PluginSettings` checks the values.
    """
    if not isinstance(agents, Mapping | None):
        raise TypeError(
            "agents must be a mapping of agent names to strategies, such as "
            f"{{'writer': Threshold()}}, not {type(agents).__name__}: "
            f"{short_repr(agents)}"
        )

    for name, strategy in (agents or {}).items():
        _check_strategy(f"agents[{name!r}]", strategy)
    _check_strategy("default", default)

    if registry is not None and not hasattr(registry, "context_window"):
        raise TypeError(
            "registry must have a method context_window(model) that returns tokens or "
            f"None, not {type(registry).__name__}: {short_repr(registry)}"
        )


def _check_strategy(place: str, value: object) -> None:
    """Raises a TypeError unless a value is a strategy, a sync function or None.

    `place` is the argument for the message, such as "agents['writer']".
    """
    if isinstance(value, Strategy | None):
        return
    # A class can be called, too, but `Threshold` is a slip for `Threshold()`.
    is_function = callable(value) and not isinstance(value, type)
    if is_function and not inspect.iscoroutinefunction(value):
        return

    raise TypeError(
        f"{place} must be a Strategy, a sync function of the callback context, or "
        f"None, not {_describe_wrong(value)}"
    )


def _describe_wrong(value: object) -> str:
    """Describes an object that is no strategy; suggests a strategy in its place.

    "str: 'pipeline'. Did you mean Pipeline()? Names of strategies are for files"

    Only a class of strategies, a text and a dict have a suggestion.
    """
    if isinstance(value, type):
        name = value.__name__
        hint = f". Did you mean {name}()?" if issubclass(value, Strategy) else ""
        return f"the class {name}{hint}"

    description = f"{type(value).__name__}: {short_repr(value)}"
    if isinstance(value, str):
        suggested = STRATEGIES.get(value, Threshold)  # Unknown names get the default.
        hint = f". Did you mean {suggested.__name__}()?"
        return f"{description}{hint} Names of strategies are for files"
    if isinstance(value, dict):
        return f"{description}. Did you mean Threshold(…) with these settings?"
    return description
