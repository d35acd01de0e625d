"""The package as a whole: what it exports, what importing it costs, its layers."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import contextguard_adk

PACKAGE = Path(contextguard_adk.__file__).parent

ORDER = """
errors
records
_support
_measuring
_providers
_history
_runtime
_turn
_sections
_shapes
_summaries
strategies
_recall
_listeners
_core
config
_plugin
plugin
sessions
__init__
testing
_tools
__main__
"""
"""A folder may import those of the lines above it, and so may a module that stands
beside the folders."""


@cache
def imported_names(path: Path) -> tuple[str, ...]:
    """The dotted names that a file imports, wherever in it."""
    return tuple(read_imports(path))


def read_imports(path: Path) -> Iterator[str]:
    """Reads them one after another."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_folders(path: Path) -> set[str]:
    """What a file imports of the package, each by the first name below it."""
    names = (name.split(".") for name in imported_names(path))
    found = {name[1] for name in names if name[0] == PACKAGE.name}
    public = found & {*contextguard_adk.__all__}
    return found - public | ({"__init__"} if public else set())


def test_folders_import_only_what_stands_above_them() -> None:
    """A lower line may import upper ones, never the other way round."""
    height = {name: number for number, name in enumerate(ORDER.split())}
    paths = {path: path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")}
    own = {path: name.removesuffix(".py") for path, name in paths.items()}
    assert {*own.values()} == {*height}, "ORDER names another set of modules"
    wrong = [
        (str(path), name)
        for path in paths
        for name in imported_folders(path)
        if height[name] > height[own[path]]
    ]
    assert not wrong


def test_no_modules_import_each_other() -> None:
    """There is no circle, not even of imports for types or within functions."""
    names = {path: name_module(path) for path in PACKAGE.rglob("*.py")}
    modules = {*names.values()}
    imports = {
        name: {each for each in map(nearest(modules), imported_names(path)) if each}
        for path, name in names.items()
    }
    *_, last = TopologicalSorter(imports).static_order()  # Raises for a circle.
    assert last in modules


def name_module(path: Path) -> str:
    """The dotted name of a module."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def nearest(modules: set[str]) -> Callable[[str], str]:
    """Finds the module that an imported name is of; "" for those of others."""

    def find(name: str) -> str:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    return find


def test_the_simulated_provider_does_not_know_the_guard() -> None:
    """What judges the guard's requests must not share its mistakes."""
    for path in (PACKAGE / "testing").glob("*.py"):
        assert imported_folders(path) <= {"testing"}


PUBLIC = """
CallRecord CompactTool CompactionRecord ConfigError ContextGuardError ContextGuardPlugin
Costs ModelRegistry PinTool Pipeline PlannedCompaction PressureRecord SlidingWindow
Threshold TodosTool
pin request_compaction unpin
"""


def test_public_names() -> None:
    """What is public stays public, and type checkers of users read its annotations."""
    assert contextguard_adk.__all__ == PUBLIC.split()
    assert (PACKAGE / "py.typed").is_file()


REPORT = """
import json, sys
import google.adk.apps, google.adk.models, google.adk.plugins.base_plugin
import google.adk.agents.callback_context, google.adk.sessions, google.adk.runners

events = []
sys.addaudithook(lambda name, args: events.append(name))
before = set(sys.modules)
import contextguard_adk
ours = sorted(set(sys.modules) - before)
import contextguard_adk.testing
names = sorted(set(sys.modules) - before)
network = [e for e in events if e.startswith(("socket.", "urllib.", "subprocess."))]
print(json.dumps([ours, names, network]))
"""


def test_importing_is_cheap_and_offline() -> None:
    """Nothing heavy, nothing for demos, and no socket before it is needed."""
    command = [sys.executable, "-W", "ignore", "-c", REPORT]
    cwd = PACKAGE.parent
    report = subprocess.run(command, capture_output=True, check=True, cwd=cwd).stdout
    ours, names, network = json.loads(report.splitlines()[-1])
    heavy = {"jinja2", "litellm", "matplotlib", "rich", "tiktoken"}
    heavy |= {"openai", "numpy", "pandas"}
    assert not heavy & {name.partition(".")[0] for name in names}
    assert "contextguard_adk.testing" not in ours
    assert not {"contextguard_adk._tools", "contextguard_adk.__main__"} & {*names}
    assert network == []
