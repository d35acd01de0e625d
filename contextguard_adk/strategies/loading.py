"""Finds classes of strategies and reducers that a settings file names."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import TypeVar

from contextguard_adk._support.settings import suggest

T = TypeVar("T")


def import_subclass(path: object, base: type[T]) -> type[T]:
    """Imports a class by its dotted path, such as "my_app.reducers.DropImages".

    Args:
        path: The value in the file. Only a text can be right, but it may be anything.
        base: The class of which the result must be a subclass.

    Raises:
        ValueError: The path has no dot, the module cannot be imported, or the module
            has no such class; the class is no subclass of `base`, or is abstract.
    """
    module_name, _, class_name = str(path).rpartition(".")
    if not module_name:
        raise ValueError(f"{path!r} is no dotted path.{_suggest_path(path)}")

    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except (Exception, SystemExit) as error:  # A module may do anything on import.
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path!r} cannot be imported: {reason}") from error

    if found is None:
        hint = suggest(class_name, dir(sys.modules[module_name]))
        raise ValueError(f"{module_name!r} has no {class_name!r}.{hint}")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{path!r} is no subclass of {base.__name__}")
    if inspect.isabstract(found):
        raise ValueError(f"{path!r} is abstract")
    return found


def _suggest_path(name: object) -> str:
    """Returns a question with the path of a public class of this package.

    "TokenWindow" -> " Did you mean 'contextguard_adk.strategies.TokenWindow'?"

    Returns "" if no class has a similar name.
    """
    package, _, _ = __name__.rpartition(".")
    public_names = vars(sys.modules[package])
    class_names = [each for each in public_names if each[0].isupper()]
    paths = [f"{package}.{each}" for each in class_names]
    return suggest(f"{package}.{name}", paths)
