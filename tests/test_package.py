"""The package as a whole: what it exports, what importing it costs, its layers."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import contextguard_adk

PACKAGE = Path(contextguard_adk.__file__).parent

ORDER = (
    ("errors", "providers", "measuring", "telemetry"),
    ("history",),
    ("memory",),
    ("summarizing",),
    ("strategies",),
    ("recall",),
    ("guard",),
    ("answers", "recovery"),
    ("config", "config_problems", "_yaml"),
    ("plugin",),
    ("",),
    ("testing", "tools", "__main__"),
)
"""A folder may import those above it and those in its own line; "" is the package."""


def module_path(name: str) -> Path:
    """The file of a module."""
    path = PACKAGE.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def module_name(path: Path) -> str:
    """The name of a module below the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def own_module(name: str) -> str | None:
    """The part of a dotted name that is one of the package's modules."""
    top, _, below = name.partition(".")
    return below if top == PACKAGE.name and module_path(below).is_file() else None


def imported_names(path: Path) -> Iterator[str]:
    """The package's own modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [own_module(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name} has a relative import"
            parent = own_module(str(node.module))
            submodules = [own_module(f"{node.module}.{a.name}") for a in node.names]
            found = [parent if name is None else name for name in submodules]
        else:
            continue
        yield from (name for name in found if name is not None)


def folder_of(name: str) -> str:
    """The folder, or the module beside the folders, that a module belongs to."""
    return name.partition(".")[0]


def test_folders_import_only_what_stands_above_them() -> None:
    """A lower line may import upper ones, never the other way round."""
    height = {name: line for line, names in enumerate(ORDER) for name in names}
    wrong = [
        (module_name(path), name)
        for path in PACKAGE.rglob("*.py")
        for name in imported_names(path)
        if height[folder_of(name)] > height[folder_of(module_name(path))]
    ]
    assert not wrong


def test_the_simulated_provider_does_not_know_the_guard() -> None:
    """What judges the guard's requests must not share its mistakes."""
    for path in (PACKAGE / "testing").glob("*.py"):
        assert {folder_of(name) for name in imported_names(path)} <= {"testing"}


# --- Public names -----------------------------------------------------------------


def test_public_names() -> None:
    """What is public stays public."""
    assert contextguard_adk.__all__ == [
        "Budgets",
        "CallRecord",
        "Compaction",
        "CompactionContext",
        "CompactionRecord",
        "ConfigError",
        "ContextGuardError",
        "ContextGuardPlugin",
        "MessageWindow",
        "ModelRegistry",
        "Pipeline",
        "PressureRecord",
        "Reducer",
        "Reduction",
        "SlidingWindow",
        "Strategy",
        "StrategyResult",
        "SummaryCompaction",
        "SummaryError",
        "Threshold",
        "TodosTool",
        "TokenWindow",
        "ToolOutputTruncation",
        "request_compaction",
    ]


@pytest.mark.parametrize("name", contextguard_adk.__all__)
def test_public_names_are_documented(name: str) -> None:
    """Each says in its own docstring what it does, and so do its methods."""
    public = getattr(contextguard_adk, name)
    assert inspect.getdoc(public)
    for key, value in vars(public).items() if inspect.isclass(public) else ():
        is_method = inspect.isfunction(value) and value.__name__ == key
        if is_method and not key.startswith("_"):
            assert inspect.getdoc(value), f"{name}.{key}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=module_name)
def test_modules_are_documented(path: Path) -> None:
    """Every module begins with what it is for."""
    assert ast.get_docstring(ast.parse(path.read_text()))


def public_classes(module: ModuleType) -> list[type]:
    """The classes that a module defines for others."""
    return [
        value
        for key, value in vars(module).items()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and not key.startswith("_")
    ]


def test_errors_have_one_base() -> None:
    """Whoever catches the package's errors needs one name."""
    errors = importlib.import_module("contextguard_adk.errors")
    for error in public_classes(errors):
        assert issubclass(error, contextguard_adk.ContextGuardError)


def test_the_package_is_typed() -> None:
    """Type checkers of users read its annotations."""
    assert (PACKAGE / "py.typed").is_file()


# --- What importing costs ---------------------------------------------------------

REPORT = """
import json, sys
import google.adk.apps, google.adk.models, google.adk.plugins.base_plugin
import google.adk.agents.callback_context, google.adk.sessions, google.adk.runners

events = []
sys.addaudithook(lambda name, args: events.append(name))
before = set(sys.modules)
import {module}
names = sorted(set(sys.modules) - before)
network = [e for e in events if e.startswith(("socket.", "urllib.", "subprocess."))]
print(json.dumps([names, network]))
"""


@functools.cache
def import_report(module: str) -> tuple[set[str], list[str]]:
    """What importing a module loads beside ADK, and what it asks of the network."""
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REPORT.format(module=module)],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
    )
    names, network = json.loads(finished.stdout.splitlines()[-1])
    return set(names), network


@pytest.mark.parametrize("module", ["contextguard_adk", "contextguard_adk.testing"])
def test_importing_is_cheap_and_offline(module: str) -> None:
    """Nothing heavy is loaded, and no socket is opened, before it is needed."""
    names, network = import_report(module)
    assert module in names
    heavy = {"litellm", "matplotlib", "rich", "tiktoken", "openai", "numpy", "pandas"}
    assert not heavy & {name.partition(".")[0] for name in names}
    assert network == []


def test_the_guard_does_not_load_what_is_for_tests_and_demos() -> None:
    """An app in production loads the guard alone."""
    names, _ = import_report("contextguard_adk")
    for name in ("testing", "tools", "__main__"):
        assert f"contextguard_adk.{name}" not in names
