"""Everything that can be copied from the READMEs is run."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from google.adk.apps import App
from google.adk.cli.cli_tools_click import main as adk_command
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.sessions.database_session_service import DatabaseSessionService

from contextguard_adk import ContextGuardPlugin, SlidingWindow, Threshold
from contextguard_adk.config import CONFIG_VARIABLE, load_settings
from contextguard_adk.testing import SimulatedLlm, call
from contextguard_adk.tools.cli import main
from tests.builders import Chat, answer_text, guarded_agent, user

ROOT = Path(__file__).parent.parent


class Block(NamedTuple):
    """A fenced block of a README."""

    file: str
    line: int
    language: str
    text: str


def read_blocks() -> Iterator[Block]:
    """All fenced blocks of the READMEs."""
    for name in ("README.md", "samples/README.md"):
        text = (ROOT / name).read_text("utf-8")
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
            line = text.count("\n", 0, match.start()) + 1
            yield Block(name, line, match[1], match[2])


BLOCKS = list(read_blocks())


def of(language: str) -> list[Any]:
    """The blocks of a language, as parameters."""
    return [
        pytest.param(block, id=f"{block.file}:{block.line}")
        for block in BLOCKS
        if block.language == language
    ]


def run_python(block: Block) -> dict[str, Any]:
    """Runs a block; returns the names that it leaves."""
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(block.text, block.file, "exec", dont_inherit=True), names)
    return names


def test_every_block_is_of_a_kind_that_is_run() -> None:
    """A block without a language is a picture or what a command prints."""
    assert {block.language for block in BLOCKS} == {
        *("python", "toml", "json", "console", "")
    }
    for block in BLOCKS:
        if not block.language:
            assert not re.search(r"^\$ |^(pip|adk|contextguard) ", block.text, re.M)


# --- Python -----------------------------------------------------------------------


@pytest.mark.parametrize("block", of("python"))
def test_python_runs(block: Block) -> None:
    """It can be pasted as it stands: nothing has to be imported beside it."""
    assert run_python(block)


def find_python(word: str) -> dict[str, Any]:
    """Runs the first block in which a word stands."""
    blocks = (b for b in BLOCKS if b.language == "python" and word in b.text)
    return run_python(next(blocks))


async def test_the_quick_start_guards_an_app() -> None:
    """Its app talks on beyond the window of a model that is strict about it."""
    app: App = find_python("root_agent = ")["app"]
    llm = SimulatedLlm(context_window=128_000)
    app.root_agent.model = llm  # type: ignore[union-attr]
    runner = Runner(app=app, session_service=InMemorySessionService())
    await runner.session_service.create_session(
        app_name=app.name, user_id="user", session_id="id"
    )
    for turn in range(8):
        events = [
            event
            async for event in runner.run_async(
                user_id="user",
                session_id="id",
                new_message=user(f"Part {turn}. " + "And so on and on. " * 6_000),
            )
        ]
        assert answer_text(events)
    assert llm.summaries > 0
    assert (llm.rejections, llm.violations) == (0, 0)


def test_the_example_of_several_agents_means_what_it_says() -> None:
    """A strategy for each, one of them exempt, and a default for the others."""
    plugin: ContextGuardPlugin = find_python("SlidingWindow(max_turns=30)")["plugin"]
    assert plugin._settings.agents == {
        "researcher": SlidingWindow(max_turns=30),
        "writer": Threshold(context_window=1_000_000, summarizer="gemini-2.5-flash"),
        "router": None,
    }
    assert plugin._settings.default == Threshold()


async def test_the_example_of_a_demand_compacts() -> None:
    """The tool asks for a compaction, and the next call has it."""
    tool = find_python("request_compaction")["finish_chapter"]
    llm = SimulatedLlm(
        context_window=32_000,
        script=["Hello. " * 300, call("finish_chapter"), "Closed."],
    )
    chat = Chat(guarded_agent(llm, [tool]), [ContextGuardPlugin()])
    await chat.say("Hello. " * 300)
    await chat.say("Close the chapter.")
    assert llm.summaries == 1
    assert "[Previous conversation summary]" in llm.requests[-1].text


# --- Settings and records ---------------------------------------------------------


@pytest.mark.parametrize("block", of("toml"))
def test_settings_are_loaded(block: Block, tmp_path: Path) -> None:
    """As `from_file` reads them."""
    path = tmp_path / "guard.toml"
    path.write_text(block.text)
    assert ContextGuardPlugin.from_file(path)._settings == load_settings(path)


@pytest.mark.parametrize("block", of("json"))
async def test_the_record_of_a_call_looks_so(block: Block) -> None:
    """The fields and their types are those of a real event."""
    shown = json.loads(block.text)
    chat = Chat(
        guarded_agent(SimulatedLlm(context_window=8_000)),
        [ContextGuardPlugin(default=Threshold(context_window=8_000))],
    )
    found: list[dict[str, Any]] = []
    for turn in range(12):
        for event in await chat.say(f"Turn {turn}. " + "More and more. " * 300):
            found.append((event.custom_metadata or {})["context_guard"])
    (compacted, *_) = (one for one in found if "compaction" in one)
    assert describe(compacted) == describe(shown)


def describe(value: Any) -> Any:
    """The names and types of a JSON value."""
    if isinstance(value, dict):
        return {key: describe(item) for key, item in value.items()}
    return type(value)


# --- Commands ---------------------------------------------------------------------


def read_commands() -> list[Any]:
    """Each command after a `$`, `&&` apart."""
    return [
        pytest.param(command.strip(), id=command.strip())
        for block in BLOCKS
        if block.language == "console"
        for line in re.findall(r"^\$ (.*)$", block.text, re.M)
        for command in line.split("&&")
    ]


@pytest.fixture(name="folder")
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the commands name."""
    settings = next(b.text for b in BLOCKS if b.language == "toml")
    (tmp_path / "guard.toml").write_text(settings)
    (tmp_path / "agents").mkdir()
    (tmp_path / "samples").mkdir()
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "code.py").write_text("def run() -> int:\n    return 1\n" * 40)
    url = f"sqlite+aiosqlite:///{tmp_path / 'sessions.db'}"
    asyncio.run(record(tmp_path / "session.json", url))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    return tmp_path


async def record(path: Path, url: str) -> None:
    """Has a conversation, and writes it to a file and to a database."""
    service = DatabaseSessionService(db_url=url)
    chat = Chat(guarded_agent(SimulatedLlm()), session_service=service, session_id="id")
    for turn in range(3):
        await chat.say(f"Turn {turn}. " + "More and more. " * 200)
    session = await service.get_session(app_name="app", user_id="user", session_id="id")
    assert session is not None
    path.write_text(session.model_dump_json())
    await service.db_engine.dispose()


@pytest.mark.parametrize("command", read_commands())
def test_commands_are_understood(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours are run; those of others are read by their own parsers."""
    words = shlex.split(command)
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        monkeypatch.setenv(name, value)
    program, *arguments = words
    check = {
        "contextguard": check_ours,
        "adk": check_adk,
        "pip": check_pip,
        "pytest": check_pytest,
    }[program]
    check(arguments, folder)


def check_ours(arguments: list[str], folder: Path) -> None:
    """Runs a command of this package; the demo on a small tree, a few steps."""
    url = f"sqlite+aiosqlite:///{folder / 'sessions.db'}"
    arguments = [re.sub(r"^postgresql\+asyncpg://.*", url, word) for word in arguments]
    if arguments == ["demo"]:
        arguments += ["tree", "--steps", "6"]
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    assert main(arguments) == 0


def check_adk(arguments: list[str], folder: Path) -> None:
    """ADK's own command line accepts the words, and the plugin can be made."""
    command = adk_command
    while isinstance(command, click.Group):
        name, *arguments = arguments
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found  # type: ignore[assignment]
    context = command.make_context("adk", list(arguments))
    assert Path(context.params["agents_dir"]).resolve().parent == folder
    assert ContextGuardPlugin(name="context_guard")


def check_pip(arguments: list[str], folder: Path) -> None:
    """What is installed is this package, with an extra that it has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert arguments.pop(0) == "install"
    for word in arguments:
        name, _, extra = word.rstrip("]").partition("[")
        assert name in ("-e", ".", project["name"])
        extras = filter(None, extra.split(","))
        assert set(extras) <= set(project["optional-dependencies"])


def check_pytest(arguments: list[str], folder: Path) -> None:
    """Tests are chosen by a marker that there is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    markers = project["tool"]["pytest"]["ini_options"]["markers"]
    known = {marker.partition(":")[0] for marker in markers}
    for option, value in zip(arguments[::2], arguments[1::2], strict=False):
        assert option == "-m"
        assert value in known


def test_inline_paths_exist() -> None:
    """Files that the READMEs name or link to are there."""
    for name in ("README.md", "samples/README.md"):
        text = (ROOT / name).read_text("utf-8")
        links = re.findall(r"\]\((?!http)([\w./-]+)\)", text)
        run = re.findall(r"`python ([\w/]+\.py)", text)
        assert links
        for link in links:
            assert ((ROOT / name).parent / link).exists(), link
        for path in run:
            assert (ROOT / path).exists(), path
