"""Finds classes of strategies and reducers that a settings file names."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import TypeVar

from contextguard_adk._support.settings import suggest

T = TypeVar("T")


def import_subclass(path: object, base: type[T]) -> type[T]:
    """Imports a class by its dotted path.

    Raises:
        ValueError: The path has no dot, its module cannot be imported, or the module
            has no such class. Or the class is no subclass of `base`, or is abstract.
    """
    module, _, name = str(path).rpartition(".")
    if not module:
        # The path may be the bare name of a class of this package: suggest its path.
        package, _, _ = __name__.rpartition(".")
        class_names = [each for each in vars(sys.modules[package]) if each[0].isupper()]
        own_paths = [f"{package}.{each}" for each in class_names]
        hint = suggest(f"{package}.{path}", own_paths)
        raise ValueError(f"{path!r} is no dotted path.{hint}")

    try:
        found = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:  # A module may do anything on import.
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path!r} cannot be imported: {reason}") from error

    if found is None:
        hint = suggest(name, dir(sys.modules[module]))
        raise ValueError(f"{module!r} has no {name!r}.{hint}")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{path!r} is no subclass of {base.__name__}")
    if inspect.isabstract(found):
        raise ValueError(f"{path!r} is abstract")
    return found
