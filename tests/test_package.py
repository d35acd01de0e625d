"""The package as a whole: what it exports, what importing it costs, its layers."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
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
        name: {nearest(each, modules) for each in imported_names(path)} - {""}
        for path, name in names.items()
    }
    *_, last = TopologicalSorter(imports).static_order()  # Raises for a circle.
    assert last in modules


def name_module(path: Path) -> str:
    """The dotted name of a module."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def nearest(name: str, modules: set[str]) -> str:
    """The module that an imported name is of; "" for those of others."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


UNIT = re.compile(r"(_sections|_shapes|_listeners|_recall)\.(?![A-Z_]+\b)\w+")
"""A unit: a file in one of these folders, with an entry in one of the folder's tuples.
Other modules should use these alone, `SECTIONS` for one."""

KNOWN: dict[str, str] = {
    "_listeners/__init__.py uses _shapes.sealed_thoughts": "seals are also a listener",
    "_recall/tool.py uses _shapes.recalled_files": "a file is attached to the request",
}
"""The places outside its folder that know a unit all the same, and why."""


def test_only_its_folder_knows_a_unit() -> None:
    """To take a unit out, delete its file and its entry: nothing else names it."""
    section_names = read_section_names()
    assert len(section_names) >= 3
    found = set[str]()

    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).as_posix()
        if place == "__init__.py":
            continue  # What users import from units stands there.
        folder = place.partition("/")[0]
        found |= {f"{place} uses {unit}" for unit in find_units_used(path, folder)}
        if folder != "_sections":
            said = find_strings(path) & section_names
            found |= {f"{place} says {name!r}" for name in said}

    new = sorted(found - {*KNOWN})
    assert not new, f"a unit is known elsewhere: {'; '.join(new)}"
    gone = sorted({*KNOWN} - found)
    assert not gone, f"to be taken off KNOWN: {'; '.join(gone)}"


def read_section_names() -> set[str]:
    """The names of sections, as in session state, and those of their files."""
    paths = [*(PACKAGE / "_sections").glob("[!_]*.py")]
    said = [
        re.findall(r'^    name = "(.+)"$', path.read_text(), re.M) for path in paths
    ]
    return {path.stem for path in paths}.union(*said)


def find_units_used(path: Path, own_folder: str) -> Iterator[str]:
    """The units of other folders that a file imports, or reaches through the folder."""
    names = [name.removeprefix(f"{PACKAGE.name}.") for name in imported_names(path)]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.append(f"{node.value.id}.{node.attr}")

    for name in names:
        found = UNIT.match(name)
        if found and found[1] != own_folder:
            yield found[0]


def find_strings(path: Path) -> set[object]:
    """The constants in a file, strings among them."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.value for node in nodes if isinstance(node, ast.Constant)}


def test_the_simulated_provider_does_not_know_the_guard() -> None:
    """What judges the guard's requests must not share its mistakes."""
    for path in (PACKAGE / "testing").glob("*.py"):
        assert imported_folders(path) <= {"testing"}


PUBLIC = """
CallRecord CompactTool CompactionRecord ConfigError ContextGuardError ContextGuardPlugin
Costs ModelRegistry PinTool Pipeline PlannedCompaction PlannedSummary PressureRecord
SlidingWindow SummaryBudget Threshold TodosTool
pin request_compaction unpin
"""


def test_public_names() -> None:
    """What is public stays public, and type checkers of users read its annotations."""
    assert contextguard_adk.__all__ == PUBLIC.split()
    assert (PACKAGE / "py.typed").is_file()


REPORT = """
import json, sys
import pytest_contextguard_adk

fixtures_need = sorted(sys.modules)
import google.adk.apps, google.adk.models, google.adk.plugins.base_plugin
import google.adk.agents.callback_context, google.adk.sessions, google.adk.runners

events = []
sys.addaudithook(lambda name, args: events.append(name))
before = set(sys.modules)
import contextguard_adk
ours = sorted(set(sys.modules) - before)
import contextguard_adk.testing
names = sorted(set(sys.modules) - before)

sys.modules["litellm"] = None  # As if it were not installed.
from contextguard_adk._providers.registry import LitellmRegistry
window_tokens = LitellmRegistry().context_window("gemini-flash-latest")
network = [e for e in events if e.startswith(("socket.", "urllib.", "subprocess."))]
print(json.dumps([ours, names, network, window_tokens, fixtures_need]))
"""


def test_importing_is_cheap_and_offline() -> None:
    """Nothing heavy, nothing for demos, and no socket; fixtures are free."""
    command = [sys.executable, "-W", "ignore", "-c", REPORT]
    cwd = PACKAGE.parent
    report = subprocess.run(command, capture_output=True, check=True, cwd=cwd).stdout
    facts = json.loads(report.splitlines()[-1])
    ours, names, network, window_tokens, fixtures_need = facts
    heavy = {"jinja2", "litellm", "matplotlib", "rich", "tiktoken"}
    heavy |= {"click", "openai", "numpy", "pandas", "yaml"}

    assert not heavy & {name.partition(".")[0] for name in names}
    assert "contextguard_adk.testing" not in ours
    assert not {"contextguard_adk._tools", "contextguard_adk.__main__"} & {*names}
    assert not {"contextguard_adk", "google", "pydantic"} & {*fixtures_need}
    assert network == []
    assert window_tokens == 1_048_576
