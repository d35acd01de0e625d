"""Says what is wrong with the arguments of the plugin."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from contextguard_adk._support.settings import short_repr
from contextguard_adk.config import STRATEGIES
from contextguard_adk.strategies.base import Strategy, Threshold


def check_arguments(agents: object, default: object, registry: object) -> None:
    """Raises a TypeError that says what is expected in place of a wrong object."""
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
    """Raises a TypeError for what is no strategy, no sync function and not None."""
    if isinstance(value, Strategy | None):
        return
    is_function = callable(value) and not isinstance(value, type)
    if is_function and not inspect.iscoroutinefunction(value):
        return

    raise TypeError(
        f"{place} must be a Strategy, a sync function of the callback context, or "
        f"None, not {_describe_wrong(value)}"
    )


def _describe_wrong(value: object) -> str:
    """Names an object that is no strategy, and the strategy that was perhaps meant."""
    if isinstance(value, type):
        name = value.__name__
        hint = f". Did you mean {name}()?" if issubclass(value, Strategy) else ""
        return f"the class {name}{hint}"

    given = f"{type(value).__name__}: {short_repr(value)}"
    if isinstance(value, str):
        kind = STRATEGIES.get(value, Threshold).__name__
        return f"{given}. Did you mean {kind}()? Names of strategies are for files"
    if isinstance(value, dict):
        return f"{given}. Did you mean Threshold(…) with these settings?"
    return given
