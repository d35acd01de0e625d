"""A newcomer's mistakes: what is typed, and the one line that says what is wrong."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.apps.app import EventsCompactionConfig
from google.adk.runners import InMemoryRunner
from pydantic import ValidationError

import contextguard_adk
from contextguard_adk import ConfigError
from contextguard_adk._tools.cli import main
from contextguard_adk.config import CONFIG_VARIABLE
from contextguard_adk.testing import SimulatedLlm
from tests.builders import Chat

NAMES = {
    **{name: getattr(contextguard_adk, name) for name in contextguard_adk.__all__},
    "App": App,
    "EventsCompactionConfig": EventsCompactionConfig,
    "InMemoryRunner": InMemoryRunner,
    "LlmAgent": LlmAgent,
    "SimulatedLlm": SimulatedLlm,
    "agent": LlmAgent(name="writer", model=SimulatedLlm(model="gemini-2.5-flash")),
}

STRATEGY = "[default]\n"
PIPELINE = "[default]\nstrategy = 'pipeline'\n"
REDUCER = f"{PIPELINE}[[default.reducers]]\n"
OF_THRESHOLD = (
    "Known here: ahead, binds_thoughts, context_window, keep, max_compaction_attempts, "
    "preview_tokens, recall, recall_page_tokens, reuse_prompt_cache, summarizer, "
    "summarizer_context_window, summary_instruction, summary_timeout_seconds, trigger"
)
OF_PLUGIN = (
    "Known here: agents, default, listener_timeout_seconds, max_background_summaries, "
    "observe, prices, state_keys, summary_artifacts, warning_threshold"
)
OF_MESSAGES = (
    "Known here: min_messages_before_windowing, preserve_initial_task, "
    "preserve_system, strict_window_size, window_size"
)
OF_STRATEGIES = (
    "one of threshold, sliding_window, pipeline, none, or the path of a Strategy is "
    "expected."
)
SAME = "mean the same: give one."


@dataclass(frozen=True)
class Mistake:
    """What is typed, and what is said; with … at the end that is the beginning."""

    typed: str
    said: str

    def is_told(self, text: str) -> bool:
        """Whether a text is that, in one line."""
        told = text.strip()
        beginning = self.said.removesuffix("…")
        is_it = (
            told.startswith(beginning) if beginning != self.said else told == beginning
        )
        return is_it and "\n" not in told


# What a file holds; its message begins with the name of the file.
FILES: dict[str, Mistake] = {
    "key": Mistake(
        "obsereve = true",
        f"obsereve = True: unknown key. Did you mean 'observe'? {OF_PLUGIN}.",
    ),
    "table": Mistake(
        "[defaults]\nstrategy = 'pipeline'",
        f"defaults: unknown key. Did you mean 'default'? {OF_PLUGIN}.",
    ),
    "key of a strategy at the top": Mistake(
        "context_window = 8_000",
        f"context_window = 8000: unknown key. {OF_PLUGIN}. It belongs in a table "
        "[default] or [agents.<name>] with strategy = 'threshold'.",
    ),
    "key of a strategy": Mistake(
        f"{STRATEGY}contxt_window = 8_000",
        "default.contxt_window = 8000: unknown key. Did you mean 'context_window'? "
        f"{OF_THRESHOLD}.",
    ),
    "key of another strategy": Mistake(
        f"{STRATEGY}max_messages = 8",
        f"default.max_messages = 8: unknown key. {OF_THRESHOLD}. It belongs in a table "
        "[default] or [agents.<name>] with strategy = 'sliding_window'.",
    ),
    "key of a window": Mistake(
        f"{PIPELINE}window.size = 3",
        "default.window.size = 3: unknown key. Did you mean 'window_size'? "
        f"{OF_MESSAGES}.",
    ),
    "key of prices": Mistake(
        "[prices.'gpt-4o']\ninput = 2\noutputs = 8",
        "prices.gpt-4o.outputs = 8: unknown key. Did you mean 'output'? Known here: "
        "cached_input, input, output.",
    ),
    "strategy": Mistake(
        "default = 'treshold'",
        f"default.strategy = 'treshold': {OF_STRATEGIES} Did you mean 'threshold'?",
    ),
    "class for a strategy": Mistake(
        "agents.a.strategy = 'SlidingWindow'",
        f"agents.a.strategy = 'SlidingWindow': {OF_STRATEGIES} Did you mean "
        "'sliding_window'?",
    ),
    "path of a strategy": Mistake(
        "default = 'contextguard_adk.Treshold'",
        "default.strategy = 'contextguard_adk.Treshold': 'contextguard_adk' has no "
        "'Treshold'. Did you mean 'Threshold'?",
    ),
    "module of a strategy": Mistake(
        "default = 'my_own.Strategy'",
        "default.strategy = 'my_own.Strategy': 'my_own.Strategy' cannot be imported: "
        "ModuleNotFoundError: No module named 'my_own'.",
    ),
    "reducer": Mistake(
        f"{REDUCER}reducer = 'TokenWindow'\nbudget_tokens = 500",
        "default.reducers.0: 'TokenWindow' is no dotted path. Did you mean "
        "'contextguard_adk.TokenWindow'?",
    ),
    "summarizer": Mistake(
        f"{STRATEGY}summarizer = 'gemni'",
        "default.summarizer = 'gemni': a name that ADK's LLMRegistry resolves is "
        "expected (Model gemni not found.…",
    ),
    "type": Mistake(
        f"{STRATEGY}context_window = '8k'",
        "default.context_window = '8k': Input should be a valid integer.",
    ),
    "percent": Mistake(
        f"{STRATEGY}keep = '10%'",
        "default.keep = '10%': tokens as an int, at least 0, or a part of the window "
        "as a float, at least 0 and less than 1, are expected.",
    ),
    "range": Mistake(
        "warning_threshold = 70",
        "warning_threshold = 70: Input should be less than or equal to 1.",
    ),
    "both names of the window": Mistake(
        f"{STRATEGY}max_tokens = 8_000\ncontext_window = 8_000",
        f"default: context_window and max_tokens {SAME}",
    ),
    "both names of the messages": Mistake(
        f"{STRATEGY}strategy = 'sliding_window'\nmax_turns = 8\nmax_messages = 8",
        f"default: max_messages and max_turns {SAME}",
    ),
    "YAML in .toml": Mistake(
        "default:\n  strategy: pipeline",
        "it holds YAML, so its name must end in .yaml or .yml.",
    ),
}


@pytest.mark.parametrize("mistake", FILES.values(), ids=FILES)
def test_mistakes_in_a_file(mistake: Mistake, tmp_path: Path) -> None:
    """The line names file, key and value, what is accepted, and what may be meant."""
    path = tmp_path / "guard.toml"
    path.write_text(mistake.typed, "utf-8")
    text = raised(f"ContextGuardPlugin.from_file({str(path)!r})")
    assert mistake.is_told(text.removeprefix(f"{path}: ")), text


def raised(typed: str) -> str:
    """The text of the error that some code raises: of pydantic's its message."""
    try:
        eval(typed, {**NAMES})
    except ValidationError as error:
        texts = {
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}"
            for each in error.errors()
        }
        return "; ".join(sorted(texts))
    except (ConfigError, TypeError, ValueError) as error:
        return str(error)
    raise AssertionError(f"{typed} is accepted")


CODE: dict[str, Mistake] = {
    "missing file": Mistake(
        "ContextGuardPlugin.from_file('missing.toml')",
        "missing.toml: cannot be read: No such file or directory.",
    ),
    "folder": Mistake(
        "ContextGuardPlugin.from_file('folder.toml')",
        "folder.toml: cannot be read: Is a directory.",
    ),
    "suffix": Mistake(
        "ContextGuardPlugin.from_file('guard.json')",
        "guard.json: the name must end in .toml, .yaml or .yml.",
    ),
    "TOML in .yaml": Mistake(
        "ContextGuardPlugin.from_file('toml.yaml')",
        "toml.yaml: it holds TOML, so its name must end in .toml.",
    ),
    "agents as a list": Mistake(
        "ContextGuardPlugin(agents=['writer'])",
        "agents must be a mapping of agent names to strategies, such as {'writer': "
        "Threshold()}, not list: ['writer']",
    ),
    "agents as a name": Mistake(
        "ContextGuardPlugin(agents='writer')",
        "agents must be a mapping of agent names to strategies, such as {'writer': "
        "Threshold()}, not str: 'writer'",
    ),
    "strategy class": Mistake(
        "ContextGuardPlugin(default=Threshold)",
        "default must be a Strategy or None, not the class Threshold. Did you mean "
        "Threshold()?",
    ),
    "strategy class of an agent": Mistake(
        "ContextGuardPlugin(agents={'writer': SlidingWindow})",
        "agents['writer'] must be a Strategy or None, not the class SlidingWindow. Did "
        "you mean SlidingWindow()?",
    ),
    "strategy name": Mistake(
        "ContextGuardPlugin(default='pipeline')",
        "default must be a Strategy or None, not str: 'pipeline'. Did you mean "
        "Pipeline()? Names of strategies are for files",
    ),
    "dict for a strategy": Mistake(
        "ContextGuardPlugin(agents={'writer': {'context_window': 8_000}})",
        "agents['writer'] must be a Strategy or None, not dict: {'context_window': "
        "8000}. Did you mean Threshold(…) with these settings?",
    ),
    "registry": Mistake(
        "ContextGuardPlugin(registry={'gpt-4o': 128_000})",
        "registry must have a method context_window(model) that returns tokens or "
        "None, not dict: {'gpt-4o': 128000}",
    ),
    "keyword": Mistake(
        "Threshold(contxt_window=8_000)",
        f"contxt_window: unknown key. Did you mean 'context_window'? {OF_THRESHOLD}",
    ),
    "reducer class": Mistake(
        "Pipeline(window=MessageWindow)",
        "window: Value error, a reducer, a table of settings or false is expected. Did "
        "you mean MessageWindow(…)?",
    ),
    "agent as summarizer": Mistake(
        "Threshold(summarizer=agent)",
        "summarizer: Value error, a BaseLlm, or the name of a model, is expected",
    ),
    "plugin class": Mistake(
        "App(name='app', root_agent=agent, plugins=[ContextGuardPlugin])",
        "plugins.0: Input should be an instance of BasePlugin",
    ),
    "plugin twice": Mistake(
        "InMemoryRunner(app=App(name='app', root_agent=agent, plugins=["
        "ContextGuardPlugin(), ContextGuardPlugin()]))",
        "Plugin with name 'context_guard' already registered.",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, with what the mistakes name."""
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "toml.yaml").write_text("[default]\nstrategy = 'pipeline'", "utf-8")
    (tmp_path / "guard.toml").write_text("observe = true", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("mistake", CODE.values(), ids=CODE)
def test_mistakes_in_code(mistake: Mistake) -> None:
    """The line says which argument is wrong, and what is expected in its place."""
    assert mistake.is_told(text := raised(mistake.typed)), text


# Mistakes that stop nothing are one warning in the log.
LOGGED: dict[str, Mistake] = {
    "agent": Mistake(
        "App(name='app', root_agent=agent, plugins=["
        "ContextGuardPlugin(agents={'wirter': Threshold()})])",
        "`agents` names 'wirter', but app 'app' has no agent of that name. Did you "
        "mean 'writer'? Agents that `agents` does not name are guarded by Threshold.",
    ),
    "model": Mistake(
        "App(name='app', root_agent=LlmAgent(name='writer', "
        "model=SimulatedLlm(model='gpt-4oh')), plugins=[ContextGuardPlugin()])",
        "The context window of model 'gpt-4oh' is unknown; 128000 tokens are assumed. "
        "Set context_window= on the agent's strategy, as in "
        'ContextGuardPlugin(agents={"writer": Threshold(context_window=...)}).',
    ),
    "two guards": Mistake(
        "App(name='app', root_agent=agent, plugins=["
        "ContextGuardPlugin(), ContextGuardPlugin(name='second')])",
        "App 'app' has two guards for the same agents, perhaps one in the App and one "
        "on --extra_plugins: 'context_guard' does the work, 'second' is idle.",
    ),
    "two compactions": Mistake(
        "App(name='app', root_agent=agent, plugins=[ContextGuardPlugin()], "
        "events_compaction_config=EventsCompactionConfig("
        "compaction_interval=99, overlap_size=1))",
        "App 'app' also has an events_compaction_config: ADK's compaction and the "
        "guard both pay for summaries of the same history. Remove it from the App to "
        "leave the history to the guard.",
    ),
    "arguments beside a file": Mistake(
        "App(name='app', root_agent=agent, plugins=[ContextGuardPlugin(observe=True)])",
        f"{CONFIG_VARIABLE} names guard.toml, which is not read because "
        "ContextGuardPlugin was given observe in code. To read the file, give none of "
        "these, or use ContextGuardPlugin.from_file('guard.toml').",
    ),
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("name", "mistake"), LOGGED.items(), ids=LOGGED)
async def test_mistakes_that_stop_nothing(
    name: str,
    mistake: Mistake,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The app runs, and one line says what is wrong with it."""
    if name == "arguments beside a file":
        monkeypatch.setenv(CONFIG_VARIABLE, "guard.toml")
    app: App = eval(mistake.typed, {**NAMES})
    compaction = app.events_compaction_config
    chat = Chat(app.root_agent, app.plugins, events_compaction_config=compaction)
    assert await chat.say("Hello.")
    [text] = warnings(caplog)
    assert mistake.is_told(text), text


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the guard has warned of."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("contextguard") and record.levelno >= logging.WARNING
    ]


COMMANDS: dict[str, Mistake] = {
    "command": Mistake(
        "dmo", "contextguard: error: No such command 'dmo'. Did you mean 'demo'?"
    ),
    "check of a missing file": Mistake(
        "check missing.toml",
        "contextguard check: error: missing.toml: cannot be read: No such file or "
        "directory.",
    ),
    "option's value": Mistake(
        "demo --window 8k",
        "contextguard demo: error: Invalid value for '--context-window' / '--window': "
        "'8k' is not a number",
    ),
    "database without SQLAlchemy": Mistake(
        "replay sqlite:///sessions.db",
        "contextguard replay: error: databases need SQLAlchemy: pip install …",
    ),
    "plot without matplotlib": Mistake(
        "replay session.json --plot a.svg",
        "contextguard replay: error: --plot needs: pip install matplotlib",
    ),
}


@pytest.fixture
def _without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a plain install."""
    for name in ("matplotlib", "sqlalchemy"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("folder", "_without_extras")
@pytest.mark.parametrize("mistake", COMMANDS.values(), ids=COMMANDS)
def test_mistakes_on_the_command_line(
    mistake: Mistake, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 2, and one line says why."""
    assert main(mistake.typed.split()) == 2
    assert mistake.is_told(text := capsys.readouterr().err), text
