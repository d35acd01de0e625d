"""Everything that can be copied from the documentation is run; links lead somewhere."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
import json
import logging
import re
import shlex
import sys
import tomllib
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import click
import pytest
import yaml
from google.adk.agents import LlmAgent
from google.adk.apps import App

import contextguard_adk.testing
from contextguard_adk import (
    ContextGuardPlugin,
    Costs,
    Pipeline,
    SlidingWindow,
    Threshold,
    strategies,
)
from contextguard_adk._tools.cli import main
from contextguard_adk.config import CONFIG_VARIABLE, PluginSettings, load_settings
from contextguard_adk.strategies import (
    ClearToolResults,
    MessageWindow,
    Reducer,
    Strategy,
    SummaryCompaction,
    TokenWindow,
    ToolOutputTruncation,
)
from contextguard_adk.testing import SimulatedLlm
from tests.builders import Chat, answer_text, guarded_agent, user
from tests.pages import BLOCKS, FENCE, PAGES, ROOT, Block, find_python, read, run_python

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_every_block_has_a_known_language() -> None:
    """So that a misspelled one is not left out of the tests."""
    run = {"python", "toml", "yaml", "json", "console"}
    assert {block.language for block in BLOCKS} <= {*run, "", "text", "bash"}


def of(language: str) -> list[Any]:
    """The blocks of a language, as parameters."""
    chosen = [block for block in BLOCKS if block.language == language]
    return [pytest.param(block.text, id=block.place) for block in chosen]


@cache
def print_once(text: str) -> str:
    """What a block prints; two tests need not run it twice."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert run_python(text)
    return printed.getvalue()


@pytest.mark.parametrize("text", of("python"))
def test_python_runs(text: str) -> None:
    """It can be pasted as it stands: nothing has to be imported beside it."""
    print_once(text)


async def test_the_quick_start_guards_an_app() -> None:
    """Its app talks on beyond the window of a model that is strict about it."""
    app: App = find_python("root_agent = ")["app"]
    llm = SimulatedLlm(context_window=128_000)
    app.root_agent.model = llm  # type: ignore[union-attr]
    chat = Chat(app.root_agent, app.plugins)
    part = "And so on. " * 10_500
    for turn in range(5):
        assert answer_text(await chat.say(f"Part {turn}. {part}"))

    assert 5 * len(part) / 4 > llm.context_window
    assert llm.summaries > 0
    assert (llm.rejections, llm.violations) == (0, 0)


async def test_the_example_of_several_agents_means_what_it_says(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A strategy for each, one of them exempt, and a default for the others."""
    plugin: ContextGuardPlugin = find_python("SlidingWindow(max_messages=30)")["plugin"]
    caplog.set_level(logging.INFO, "contextguard_adk.plugin")
    named = ("researcher", "writer", "router", "other")
    agents = [LlmAgent(name=name, model="gemini-flash-latest") for name in named]
    root = LlmAgent(name="root", model=SimulatedLlm(), sub_agents=[*agents])
    await Chat(root, [plugin]).say("Hello.")
    for said in (
        "researcher: SlidingWindow",
        "router: not guarded",
        "other: Threshold",
    ):
        assert said in caplog.text

    assert "writer: Threshold, window 200,000 tokens (configured)" in caplog.text


def test_the_table_of_models_says_where_the_guard_acts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The window and the threshold of each are what `check` prints."""
    row = re.compile(r"(?m)^\| `(.+?)` \| ([\d,]+) \| ([\d,]+) \|")
    models = {model: sizes for model, *sizes in row.findall(read(ROOT / "README.md"))}
    assert main(["check", "--json", "--model", *models]) == 0

    [agent] = json.loads(capsys.readouterr().out)["agents"]
    found = {
        each["model"]: [
            f"{each[f'{name}_tokens']:,}" for name in ("window", "threshold")
        ]
        for each in agent["budgets"]
    }
    assert len(found) == 5
    assert found == models


@pytest.mark.parametrize("name", ["README.md", "docs/getting-started.md"])
def test_a_program_prints_what_the_page_says(name: str) -> None:
    """The first program of a newcomer; sizes may move by a twentieth."""
    texts = [match[3] for match in FENCE.finditer(read(ROOT / name))]
    program = next(i for i, text in enumerate(texts) if "asyncio.run" in text)
    said = texts[program + 1]
    printed = print_once(texts[program])
    number = re.compile(r"\d[\d,]*")
    assert number.sub("#", said) == number.sub("#", printed)

    expected = [int(each.replace(",", "")) for each in number.findall(said)]
    found = [int(each.replace(",", "")) for each in number.findall(printed)]
    assert expected == pytest.approx(found, rel=0.05)


def read_rows(text: str) -> dict[str, list[str]]:
    """The values of printed tables, by the names of their rows."""
    rows = [re.split(" *│ *", line) for line in text.splitlines() if "│" in line]
    return {name: values for name, *values in rows}


def test_the_demo_prints_what_the_page_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both tables, and the last line. Figures may move by a fifth, because the agent of
    the demo reads the files of the google-adk that is installed."""
    page = read(ROOT / "docs" / "command-line.md")
    section = page.partition("## demo")[2].partition("\n## ")[0]
    [command] = re.findall(r"(?m)^\$ contextguard (demo .+)$", section)
    assert main([*shlex.split(command), "--latency", "3"]) == 0
    printed = capsys.readouterr().out

    [last] = re.findall(r"(?m)^With the guard .*$", section)
    assert last in printed
    said = read_rows(section)
    found = read_rows(printed)
    assert len(said) == 12
    assert said.keys() == found.keys()

    number = re.compile(r"\d[\d,.]*")
    for name, values in said.items():
        shown = found[name][: len(values)]  # The first table lacks the last run.
        assert [number.sub("#", v) for v in values] == [
            number.sub("#", v) for v in shown
        ]
        texts = [number.findall(" ".join(each)) for each in (values, shown)]
        expected, real = ([float(t.replace(",", "")) for t in each] for each in texts)
        assert real == pytest.approx(expected, rel=0.2), name


RECOMMENDED = [
    Pipeline(
        tool_output=ToolOutputTruncation(preserve_last_tool_result=False),
        window=MessageWindow(strict_window_size=True),
    ),
    Pipeline(
        summary=SummaryCompaction(
            trigger_threshold=0.9, target_token_ratio=0.5, preserve_recent_count=10
        )
    ),
    Pipeline(window=TokenWindow(budget_tokens=100_000)),
]


def test_settings_are_loaded(tmp_path: Path) -> None:
    """They can be pasted into a file, and say what the text recommends."""
    loaded: dict[str, list[Any]] = {"toml": [], "yaml": []}
    for suffix, found in loaded.items():
        path = tmp_path / f"guard.{suffix}"
        for text in [block.text for block in BLOCKS if block.language == suffix]:
            path.write_text(text)
            found.append(load_settings(path).default)
    assert all(loaded.values())
    assert all(strategy in loaded["toml"] for strategy in RECOMMENDED)


@pytest.mark.parametrize("text", of("json"))
async def test_the_record_of_a_call_looks_so(text: str) -> None:
    """The fields and their types are those of a real event."""
    llm = SimulatedLlm(context_window=4_000)
    guard = Threshold(context_window=4_000)
    prices = {"simulated": Costs(input=1, output=8)}
    plugin = ContextGuardPlugin(default=guard, prices=prices)
    chat = Chat(guarded_agent(llm), [plugin])
    for turn in range(5):
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


CATALOG_PAGE = ROOT / "docs" / "integrations" / "contextguard.md"


def list_lines(block: Block) -> list[str]:
    """The commands of a block; those for ADK's catalog have no `$` before them."""
    if block.language == "console":
        return re.findall(r"^\$ (.*)$", block.text, re.M)
    if block.language == "bash" and block.place.startswith("docs/integrations/"):
        return block.text.splitlines()
    return []


COMMANDS = {
    command.strip()
    for block in BLOCKS
    for line in list_lines(block)
    for command in line.split("&&")
}
OTHERS = {"cd", "complexipy", "docker", "git", "mkdocs", "mypy", "ruff", "uvicorn"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the commands name, and a recorded conversation."""
    made = tmp_path_factory.mktemp("commands")
    settings = next(block.text for block in BLOCKS if block.language == "toml")
    (made / "guard.toml").write_text(settings)
    for name in ("agents", "samples", "tree"):
        (made / name).mkdir()
    (made / "agents" / "documented").mkdir()
    source = (
        "from google.adk.agents import LlmAgent\n"
        'root_agent = LlmAgent(name="root", model="gemini-flash-latest")\n'
    )
    (made / "agents" / "documented" / "agent.py").write_text(source)
    (made / "tree" / "code.py").write_text("def run() -> int:\n    return 1\n" * 40)

    async def record() -> None:
        from google.adk.sessions import DatabaseSessionService

        service = DatabaseSessionService(db_url=database_url(made))
        agent = guarded_agent(SimulatedLlm())
        chat = Chat(agent, session_service=service, session_id="id")
        for turn in range(3):
            await chat.say(f"Turn {turn}. " + "More and more. " * 200)
        session = await chat.session()
        (made / "session.json").write_text(session.model_dump_json())
        await service.db_engine.dispose()

    asyncio.run(record())
    return made


def database_url(folder: Path) -> str:
    """The database with the recorded conversation."""
    return f"sqlite+aiosqlite:///{folder / 'sessions.db'}"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_commands_are_understood(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours are run; those of others are read by their own parsers."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    words = shlex.split(command)
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        monkeypatch.setenv(name, value)

    program, *arguments = words
    checks = {"contextguard": check_ours, "adk": check_adk, "pip": check_pip}
    checks["pytest"] = check_pytest
    assert program in {*checks, *OTHERS}

    check = checks.get(program)
    if check:
        check(arguments, folder)


def check_ours(arguments: list[str], folder: Path) -> None:
    """Runs a command of this package; the demo on a small tree, a few steps."""
    url = database_url(folder)
    path = str(folder / "sessions.db")
    arguments = [re.sub(r"^postgresql\+asyncpg://.*", url, word) for word in arguments]
    arguments = [re.sub(r"^.*session\.db$", path, word) for word in arguments]
    arguments = ["id" if word == "s-17" else word for word in arguments]
    if arguments[0] == "demo":  # Of options that are given twice the last one counts.
        arguments += ["tree", "--steps", "6"]
    assert main(arguments) == 0


def check_adk(arguments: list[str], folder: Path) -> None:
    """ADK's own command line accepts the words, and the plugin can be made."""
    from google.adk.cli.cli_tools_click import main as adk_command

    name, *arguments = arguments
    command = adk_command.get_command(click.Context(adk_command), name)
    assert command is not None
    context = command.make_context("adk", list(arguments))
    if "agents_dir" in context.params:
        assert Path(context.params["agents_dir"]).resolve().parent == folder
    assert ContextGuardPlugin(name="context_guard")


def check_pip(arguments: list[str], folder: Path) -> None:
    """pip knows the options; what is installed is this package or LiteLLM."""
    from pip._internal.commands import create_command

    name, *arguments = arguments
    options, words = create_command(name).parse_args(list(arguments))
    for word in (*words, *getattr(options, "editables", ())):
        package, _, extra = word.rstrip("]").partition("[")
        assert package in (".", PROJECT["project"]["name"], "litellm")
        if package != "litellm":
            extras = set(filter(None, extra.split(",")))
            assert extras <= set(PROJECT["project"]["optional-dependencies"])


def check_pytest(arguments: list[str], folder: Path) -> None:
    """Tests are chosen by a marker that there is, or by their file."""
    markers = PROJECT["tool"]["pytest"]["ini_options"]["markers"]
    for word in arguments:
        is_marker = any(marker.startswith(f"{word}:") for marker in markers)
        is_known = word in ("-m", "-s") or word.startswith("--cpu-times=")
        assert is_known or is_marker or (ROOT / word).is_file()


LINK = re.compile(r"\]\(([^)\s]+)\)|(?:href|src|srcset)=\"([^\"\s]+)\"")
ADDRESSES = PROJECT["project"]["urls"]
SITE = ADDRESSES["Documentation"]
SOURCE = re.compile(  # Of pages, and of pictures that other sites show.
    r"https://(?:raw\.githubusercontent|github)\.com/"
    + ADDRESSES["Source"].partition(".com/")[2]
    + r"/(?:(?:blob|raw|tree)/)?main/"
)


def anchors(page: Path) -> set[str]:
    """The places in a page that a link can name."""
    text = FENCE.sub("", read(page))
    titles = re.findall(r"(?m)^#+ (.*?)(?: \{ #([\w-]+) \})?$", text)
    return {
        anchor or re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-")
        for title, anchor in titles
    }


def find_target(page: Path, address: str) -> Path | None:
    """The file that a link means; None where it leads out of the project."""
    found = SOURCE.match(address)
    if found:
        return ROOT / address[found.end() :]
    if address.startswith(SITE):
        name = address.removeprefix(SITE).strip("/") or "index"
        return ROOT / "docs" / f"{name}.md"
    if re.match(r"\w+:", address):
        return None
    return page.parent / address if address else page


def test_links_lead_somewhere() -> None:
    """To files that are there, and headings in them; `mkdocs` checks docs/ as well."""
    for page in PAGES:
        text = FENCE.sub("", read(page))
        for link in ("".join(groups) for groups in LINK.findall(text)):
            address, _, anchor = link.partition("#")
            target = find_target(page, address)
            if target:
                assert target.exists(), (page, link)
                assert not anchor or anchor in anchors(target), (page, link)
        for path in re.findall(r"`(?:python )?((?:benchmarks|tests)/\w+\.\w+)", text):
            assert (ROOT / path).exists(), (page, path)


def test_every_page_and_public_name_is_listed() -> None:
    """In the navigation, which names no other, and in the reference; the README is
    short, all else is in docs/."""
    docs = ROOT / "docs"
    named = set(re.findall(r"([\w/-]+\.md)", read(ROOT / "mkdocs.yml")))
    assert named == {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}

    reference = "".join(read(page) for page in (docs / "api").glob("*.md"))
    for package in (contextguard_adk, contextguard_adk.testing):
        for name in package.__all__:
            assert f"::: {package.__name__}.{name}\n" in reference

    for name in (name for name in vars(strategies) if name[0].isupper()):
        place = rf"(?m)^::: contextguard_adk(\.strategies)?\.{name}$"
        assert re.search(place, reference), name

    assert read(ROOT / "README.md").count("\n") <= 150


def load_script(name: str) -> Any:
    """A script of the documentation, such as the one that writes the settings."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODELS = (
    PluginSettings,
    Costs,
    Strategy,
    Threshold,
    SlidingWindow,
    Pipeline,
    MessageWindow,
    TokenWindow,
    ToolOutputTruncation,
    ClearToolResults,
    SummaryCompaction,
)


def test_every_setting_is_in_the_tables() -> None:
    """Each with its default and a description, as they are today."""
    page = read(ROOT / "docs" / "configuration.md")
    assert load_script("tables").update(page) == page, "run: python docs/tables.py"
    rows = dict(re.findall(r"(?m)^\| `(\w+)`[^|]*\| (.*) \|$", page))
    for model in MODELS:
        for name, field in model.model_fields.items():
            default, _, text = rows[name].partition(" | ")
            assert default
            assert " ".join((field.description or "").split())[:40] in text


def test_every_line_of_the_log_is_explained() -> None:
    """Each at WARNING and above, as the source has them today, and what to do."""
    log_lines = load_script("log_lines")
    page = read(ROOT / "docs" / "on-call.md")
    assert log_lines.update(page) == page, "run: python docs/log_lines.py"

    rows = dict(log_lines.ROW.findall(page))
    assert [line for line, meaning in rows.items() if not meaning.strip()] == []
    assert len(rows) > 50
    assert "recall_history failed: …." in rows


def test_a_new_line_of_the_log_has_to_be_explained(tmp_path: Path) -> None:
    """Whatever way the source writes it; what is not understood is an error."""
    log_lines = load_script("log_lines")
    log_lines.PACKAGE = tmp_path
    source = tmp_path / "source.py"
    source.write_text(
        """
_SHARED = "Shared, about %s."

def first(error):
    logger.warning("Written %d times; %.1f %%.", 1, 2.0)
    message = f"Named by {error}."
    warn_once(logger, message, "x")
    message = "Not a warning."
    logger.info(message)
    with log_failures(logger, "It could not " + "end"):
        warn_once(logger, _SHARED, "x", level=logging.ERROR)
"""
    )
    assert log_lines.list_lines() == [
        ("ERROR", "It could not end"),
        ("ERROR", "Shared, about …."),
        ("WARNING", "Named by …."),
        ("WARNING", "Written … times; … %."),
    ]
    page = log_lines.update("<!-- log lines -->\n<!-- end -->")
    assert "| ERROR | `` Shared, about …. `` |  |" in page
    source.write_text("logger.error(choose())")
    with pytest.raises(ValueError, match="is no message"):
        log_lines.list_lines()


def test_a_setting_without_a_description_is_an_error() -> None:
    """So are names of models that there are not."""
    tables = load_script("tables")

    class Lacking(Reducer):
        size: int = 3

    with pytest.raises(ValueError, match=r"Lacking\.size has no description"):
        tables.write_table(Lacking)
    with pytest.raises(ValueError, match="Treshold"):
        tables.update("<!-- settings: Treshold -->\n<!-- end -->")


AGENT = """
from google.adk.agents import LlmAgent
from google.adk.apps import App

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.testing import SimulatedLlm

llm = SimulatedLlm(context_window=4_000, summary_replies=lambda _: "A summary.")
strategy = Threshold(context_window=4_000)
plugin = ContextGuardPlugin(default=strategy, recent_events=True)
app = App(
    name="shelves", root_agent=LlmAgent(name="agent", model=llm), plugins=[plugin]
)
"""


@pytest.mark.slow  # The server sets the tracer of its process under older ADK.
async def test_the_web_server_loads_runs_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the class and the middleware of the page on deployment; lists are whole."""
    import httpx
    from google.adk.cli.fast_api import get_fast_api_app
    from google.adk.cli.service_registry import get_service_registry

    folder = tmp_path / "agents" / "shelves"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "agent.py").write_text(AGENT)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "agents"), *sys.path])
    page = find_python("class RecentSessions")
    loaded = list[int]()
    services = list[Any]()
    base = page["RecentSessions"]

    class Counted(base):  # type: ignore[misc,valid-type]
        async def get_session(self, **place: Any) -> Any:
            """Counts what is loaded for others than `load_recent`."""
            session = await super().get_session(**place)
            if session and place.get("config") is None:
                loaded.append(len(session.events))
            return session

    def make(uri: str, **_: Any) -> Any:
        services.append(Counted(uri.removeprefix("recent+")))
        return services[-1]

    registry = get_service_registry()
    registry.register_session_service("recent+sqlite+aiosqlite", make)
    server = get_fast_api_app(
        agents_dir=str(tmp_path / "agents"),
        session_service_uri=f"recent+sqlite+aiosqlite:///{tmp_path / 'sessions.db'}",
        web=False,
    )
    page["mark_runs"](server)
    page["apps"]["shelves"] = importlib.import_module("shelves.agent").app
    place = {"app_name": "shelves", "user_id": "u", "session_id": "s"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=server), base_url="http://test", timeout=60
    ) as client:
        session = "/apps/shelves/users/u/sessions/s"
        await services[-1].create_session(**place)
        for number in range(28):
            said = user(f"Shelf {number}: {'crate ' * 600}").model_dump(mode="json")
            path = "/run" if number % 2 else "/run_sse"
            answer = await client.post(path, json={**place, "new_message": said})
            assert answer.status_code == 200
        assert len((await client.get(session)).json()["events"]) == 56
    assert loaded[-1] == 56
    assert max(loaded[-5:-1]) < 45
    await services[-1].close()


def test_the_page_for_adks_catalog_stands_alone() -> None:
    """It can be sent as it is: the header of a card, its icon, and whole links."""
    _, header, text = read(CATALOG_PAGE).split("---\n", 2)
    card = yaml.safe_load(header)
    assert {*card} == {
        f"catalog_{name}" for name in ("title", "description", "icon", "tags")
    }
    folder, _, icon = card["catalog_icon"].rpartition("/")
    assert folder == "/integrations/assets"
    assert (CATALOG_PAGE.parent / "assets" / icon).is_file()

    links = re.findall(r"\]\((.*?)\)", text)
    assert links
    assert all(link.startswith("https://") for link in links)


def list_members() -> list[tuple[str, str]]:
    """What the reference names, and the members of it that the reference lists."""
    found = []
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for section in page.read_text(encoding="utf-8").split("::: ")[1:]:
            listed = re.search(r"members: \[(.*?)\]", section)
            if listed:
                name = section.split()[0]
                found += [(name, member) for member in listed[1].split(", ")]
    return found


@pytest.mark.parametrize(("name", "member"), list_members())
def test_members_in_the_reference_exist(name: str, member: str) -> None:
    """Who writes a strategy calls what the reference lists."""
    owner = resolve_name(name)
    fields = getattr(owner, "__dataclass_fields__", {})
    assert hasattr(owner, member) or member in fields
