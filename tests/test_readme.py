"""Everything that can be copied from the READMEs is run."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from google.adk.apps import App
from google.adk.cli.cli_tools_click import main as adk_command
from google.adk.sessions.database_session_service import DatabaseSessionService

from contextguard_adk import ContextGuardPlugin, Costs, SlidingWindow, Threshold
from contextguard_adk._tools.cli import main
from contextguard_adk.config import CONFIG_VARIABLE, load_settings
from contextguard_adk.testing import SimulatedLlm
from tests.builders import Chat, answer_text, guarded_agent

ROOT = Path(__file__).parent.parent
FILES = ("README.md", "samples/README.md")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


class Block(NamedTuple):
    """A fenced block of a README."""

    place: str
    language: str
    text: str


BLOCKS = [
    Block(f"{name}:{number}", match[1], match[2])
    for name in FILES
    for number, match in enumerate(
        re.finditer(r"(?ms)^```(\w*)\n(.*?)^```$", (ROOT / name).read_text("utf-8"))
    )
]


def of(language: str) -> list[Any]:
    """The blocks of a language, as parameters."""
    chosen = [block for block in BLOCKS if block.language == language]
    return [pytest.param(block.text, id=block.place) for block in chosen]


def run_python(text: str) -> dict[str, Any]:
    """Runs a block; returns the names that it leaves."""
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(text, "README", "exec", dont_inherit=True), names)
    return names


def find_python(word: str) -> dict[str, Any]:
    """Runs the first block in which a word stands."""
    texts = (block.text for block in BLOCKS if block.language == "python")
    return run_python(next(text for text in texts if word in text))


@pytest.mark.parametrize("text", of("python"))
def test_python_runs(text: str) -> None:
    """It can be pasted as it stands: nothing has to be imported beside it."""
    assert run_python(text)


async def test_the_quick_start_guards_an_app() -> None:
    """Its app talks on beyond the window of a model that is strict about it."""
    app: App = find_python("root_agent = ")["app"]
    llm = SimulatedLlm(context_window=128_000)
    app.root_agent.model = llm  # type: ignore[union-attr]
    chat = Chat(app.root_agent, app.plugins)
    for turn in range(8):
        assert answer_text(await chat.say(f"Part {turn}. " + "And so on. " * 9_000))
    assert llm.summaries > 0
    assert (llm.rejections, llm.violations) == (0, 0)


def test_the_example_of_several_agents_means_what_it_says() -> None:
    """A strategy for each, one of them exempt, and a default for the others."""
    plugin: ContextGuardPlugin = find_python("SlidingWindow(max_messages=30)")["plugin"]
    assert plugin._settings.agents == {
        "researcher": SlidingWindow(max_messages=30),
        "writer": Threshold(context_window=1_000_000, summarizer="gemini-2.5-flash"),
        "router": None,
    }
    assert plugin._settings.default == Threshold()


@pytest.mark.parametrize("text", of("toml"))
def test_settings_are_loaded(text: str, tmp_path: Path) -> None:
    """They can be pasted into a file."""
    path = tmp_path / "guard.toml"
    path.write_text(text)
    assert load_settings(path)


@pytest.mark.parametrize("text", of("json"))
async def test_the_record_of_a_call_looks_so(text: str) -> None:
    """The fields and their types are those of a real event."""
    llm, guard = SimulatedLlm(context_window=8_000), Threshold(context_window=8_000)
    prices = {"simulated": Costs(input=1, output=8)}
    plugin = ContextGuardPlugin(default=guard, prices=prices)
    chat = Chat(guarded_agent(llm), [plugin])
    for turn in range(12):
        await chat.say(f"Turn {turn}. " + "More and more. " * 300)
    notes = [event.custom_metadata or {} for event in await chat.events()]
    records = [note.get("context_guard", {}) for note in notes]
    compacted = next(record for record in records if "compaction" in record)
    assert describe(compacted) == describe(json.loads(text))


def describe(value: Any) -> Any:
    """The names and types of a JSON value."""
    if isinstance(value, dict):
        return {key: describe(item) for key, item in value.items()}
    return type(value)


COMMANDS = [
    command.strip()
    for block in BLOCKS
    if block.language == "console"
    for line in re.findall(r"^\$ (.*)$", block.text, re.M)
    for command in line.split("&&")
]


@pytest.fixture(name="folder")
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the commands name."""
    settings = next(block.text for block in BLOCKS if block.language == "toml")
    (tmp_path / "guard.toml").write_text(settings)
    for name in ("agents", "samples", "tree"):
        (tmp_path / name).mkdir()
    (tmp_path / "tree" / "code.py").write_text("def run() -> int:\n    return 1\n" * 40)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    return tmp_path


async def record(folder: Path, url: str) -> None:
    """Has a conversation, and writes it to a file and to a database."""
    service = DatabaseSessionService(db_url=url)
    chat = Chat(guarded_agent(SimulatedLlm()), session_service=service, session_id="id")
    for turn in range(3):
        await chat.say(f"Turn {turn}. " + "More and more. " * 200)
    session = await chat.session()
    (folder / "session.json").write_text(session.model_dump_json())
    await service.db_engine.dispose()


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours are run; those of others are read by their own parsers."""
    words = shlex.split(command)
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        monkeypatch.setenv(name, value)
    program, *arguments = words
    checks = {"contextguard": check_ours, "adk": check_adk, "pip": check_pip}
    checks.get(program, check_pytest)(arguments, folder)


def check_ours(arguments: list[str], folder: Path) -> None:
    """Runs a command of this package; the demo on a small tree, a few steps."""
    url = f"sqlite+aiosqlite:///{folder / 'sessions.db'}"
    if "replay" in arguments:
        asyncio.run(record(folder, url))
    arguments = [re.sub(r"^postgresql\+asyncpg://.*", url, word) for word in arguments]
    if arguments == ["demo"]:
        arguments += ["tree", "--steps", "6"]
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    assert main(arguments) == 0


def check_adk(arguments: list[str], folder: Path) -> None:
    """ADK's own command line accepts the words, and the plugin can be made."""
    name, *arguments = arguments
    command = adk_command.get_command(click.Context(adk_command), name)
    assert command is not None
    context = command.make_context("adk", list(arguments))
    assert Path(context.params["agents_dir"]).resolve().parent == folder
    assert ContextGuardPlugin(name="context_guard")


def check_pip(arguments: list[str], folder: Path) -> None:
    """What is installed is this package, with an extra that it has."""
    project = PROJECT["project"]
    assert arguments.pop(0) == "install"
    for word in arguments:
        name, _, extra = word.rstrip("]").partition("[")
        assert name in ("-e", ".", project["name"])
        extras = set(filter(None, extra.split(",")))
        assert extras <= set(project["optional-dependencies"])


def check_pytest(arguments: list[str], folder: Path) -> None:
    """Tests are chosen by a marker that there is."""
    markers = PROJECT["tool"]["pytest"]["ini_options"]["markers"]
    for word in arguments:
        assert word in ("-m", "-s") or any(m.startswith(f"{word}:") for m in markers)


def test_inline_paths_exist() -> None:
    """Files that the READMEs name or link to are there."""
    for name in FILES:
        text = (ROOT / name).read_text("utf-8")
        links = re.findall(r"\]\((?!http)([\w./-]+)\)", text)
        assert links
        for link in links:
            assert ((ROOT / name).parent / link).exists(), link
        for path in re.findall(r"`python ([\w/]+\.py)", text):
            assert (ROOT / path).exists(), path
