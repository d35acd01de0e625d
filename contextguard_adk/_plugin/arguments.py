"""Checks that the arguments of the plugin are objects of the expected kinds."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from contextguard_adk._runtime.observers import is_coroutine_function
from contextguard_adk._support.settings import short_repr
from contextguard_adk.config import STRATEGIES
from contextguard_adk.strategies.base import Strategy, Threshold

_ARGUMENTS = {
    "on_pressure": "a PressureRecord",
    "on_compaction": "a CompactionRecord",
    "on_call": "a CallRecord",
    "before_compaction": "a PlannedCompaction",
    "after_summary": "a PlannedSummary",
    "redact": "a text",
}
"""What each function of the user is called with."""


def check_functions(functions: Mapping[str, object]) -> None:
    """Raises a TypeError for a value that cannot be called as the guard would call it.

    A function whose parameters Python does not know, such as some that are written in
    C, is accepted.

    Args:
        functions: The values by the names of the plugin's arguments, which are those of
            `_ARGUMENTS`; None for no function.
    """
    for name, function in functions.items():
        if function is None:
            continue
        is_async = is_coroutine_function(function)
        is_wrong_kind = name == "redact" and is_async

        if is_wrong_kind or not _takes_one_argument(function):
            kind = "a sync function" if name == "redact" else "a function"
            raise TypeError(
                f"{name} must be {kind} of one argument, {_ARGUMENTS[name]}, not "
                f"{_describe_function(function, is_async)}"
            )


def _takes_one_argument(function: object) -> bool:
    """Whether a value can be called with one positional argument.

    The result is True for a function whose parameters are unknown.
    """
    if not callable(function):
        return False

    try:
        # The parameters of a decorator's own function count, and not those of the
        # function that it decorates.
        signature = inspect.signature(function, follow_wrapped=False)
    except Exception:  # noqa: BLE001 - anyone's code may raise anything
        return True

    try:
        signature.bind(None)
    except TypeError:
        return False
    return True


def _describe_function(function: object, is_async: bool) -> str:
    """Describes a wrong value: "tell(record, log)", or "str: 'tell'"."""
    if not callable(function):
        return f"{type(function).__name__}: {short_repr(function)}"

    name = getattr(function, "__name__", type(function).__name__)
    prefix = "async " if is_async else ""
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters
    except Exception:  # noqa: BLE001 - anyone's code may raise anything
        return f"{prefix}{name}"
    return f"{prefix}{name}({', '.join(parameters)})"


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
    is_async = is_coroutine_function(value)
    if is_function and not is_async and _takes_one_argument(value):
        return

    if is_function:
        wrong = _describe_function(value, is_async)
    else:
        wrong = _describe_wrong(value)
    raise TypeError(
        f"{place} must be a Strategy, a sync function of the callback context, or "
        f"None, not {wrong}"
    )


def _describe_wrong(value: object) -> str:
    """Describes an object that is no strategy and no function; suggests a strategy.

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
