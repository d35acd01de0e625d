"""Settings in files and in code: what is read, and the line that tells a mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.apps.app import EventsCompactionConfig
from google.adk.runners import InMemoryRunner
from pydantic import ValidationError

import contextguard_adk
from contextguard_adk import (
    ConfigError,
    ContextGuardPlugin,
    Costs,
    Pipeline,
    SlidingWindow,
    SummaryBudget,
    Threshold,
    strategies,
)
from contextguard_adk.config import CONFIG_VARIABLE, PluginSettings, load_settings
from contextguard_adk.strategies import (
    MessageWindow,
    Strategy,
    SummaryCompaction,
    TokenWindow,
    ToolOutputTruncation,
)
from contextguard_adk.testing import SimulatedLlm
from tests.builders import Chat
from tests.lines import tells

SAMPLE = Path(__file__).parent.parent / "samples" / "contextguard.toml"
REDUCERS = (MessageWindow, TokenWindow, ToolOutputTruncation, SummaryCompaction)
PIPELINE = "[default]\nstrategy = 'pipeline'\n"
REDUCER = f"{PIPELINE}[[default.reducers]]\nreducer = "
TOKENS = f"{REDUCER}'contextguard_adk.strategies.TokenWindow'"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The present folder, which `sys.path` has, without a file in the environment."""
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


def write(text: str | bytes, name: str = "guard.toml") -> Path:
    """Writes a settings file."""
    path = Path(name)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def with_default(default: Strategy | None) -> PluginSettings:
    """Settings with that default."""
    return PluginSettings(default=default)


SHORT = ToolOutputTruncation(max_length=5_000)
SAID: dict[str, PluginSettings] = {
    "observe = true": PluginSettings(observe=True),
    "\ufeffobserve = true": PluginSettings(observe=True),
    "default = false": with_default(None),
    "default = 'pipeline'": with_default(Pipeline()),
    "[default]\nmax_tokens = 8000": with_default(Threshold(context_window=8_000)),
    "[prices.'gpt-6.1-sol']\ninput = 2\noutput = 8.5": PluginSettings(
        prices={"gpt-6.1-sol": Costs(input=2, output=8.5)}
    ),
    "[agents]\nb = 'none'\na = {strategy = 'sliding_window', max_turns = 9}": (
        PluginSettings(agents={"a": SlidingWindow(max_messages=9), "b": None})
    ),
    f"{PIPELINE}window = false\nsummary = false\ntool_output = {{max_length = 5000}}": (
        with_default(Pipeline(window=None, summary=None, tool_output=SHORT))
    ),
    "default = {strategy = 'contextguard_adk.SlidingWindow', max_messages = 9}": (
        with_default(SlidingWindow(max_messages=9))
    ),
    f"{TOKENS}\nbudget_tokens = 500": with_default(
        Pipeline(reducers=(TokenWindow(budget_tokens=500),))
    ),
}


@pytest.mark.parametrize(
    ("text", "wanted"), SAID.items(), ids=(ascii(text) for text in SAID)
)
def test_what_files_say(text: str, wanted: PluginSettings) -> None:
    """A default, tables per agent, short names, dotted paths."""
    for name in ("guard.toml", "GUARD.TOML"):
        assert load_settings(write(text, name)) == wanted


@pytest.mark.parametrize("name", ["guard.yaml", "guard.yml"])
def test_yaml_says_the_same(name: str) -> None:
    """With the same keys; what an anchor merges may be set again."""
    text = (
        "default: none\nagents:\n  a: &base {strategy: pipeline, window: false}\n"
        "  b: none\n  c: *base\n  d: {<<: *base, window: {window_size: 9}}\n"
    )

    assert load_settings(write(text, name)) == PluginSettings(
        default=None,
        agents={
            **dict.fromkeys("ac", Pipeline(window=None)),
            "b": None,
            "d": Pipeline(window=MessageWindow(window_size=9)),
        },
    )
    assert load_settings(write("", name)) == PluginSettings()


def test_the_sample_has_every_setting() -> None:
    """It is valid, and what it shows are the defaults."""
    name = re.compile(r"^\[*(?:[\w.]*\.)?(\w+)(?: =|\])", re.M)
    written = {*name.findall(SAMPLE.read_text("utf-8")), "agents", "prices"}
    kinds = (PluginSettings, SummaryBudget, Costs, SlidingWindow, Pipeline, *REDUCERS)
    assert {name for kind in kinds for name in kind.model_fields} <= written

    settings = load_settings(SAMPLE)
    said = settings.default
    assert isinstance(said, Strategy)
    assert said.summarizer == "gemini-flash-lite-latest"
    no_default = {name for name, value in Threshold() if value is None}
    given = said.model_dump(include=no_default)
    assert said == Threshold().model_copy(update=given)

    agents = {
        "researcher": SlidingWindow(),
        "operator": Pipeline(
            compression_threshold=0.75,
            window=MessageWindow(),
            tool_output=ToolOutputTruncation(),
        ),
        "writer": Pipeline(
            window=TokenWindow(budget_tokens=100_000),
            summary=None,
            reducers=(ToolOutputTruncation(max_length=1_000),),
        ),
        "greeter": None,
    }

    above = Costs(input=0.4, output=1.2, cached_input=0.04)
    own = Costs(input=0.2, output=0.8, cached_input=0.02, above=above)
    prices = {"my-own-model": own}
    budget = SummaryBudget(
        dollars_per_session=1.0,
        tokens_per_session=2_000_000,
        dollars_per_process=50.0,
        tokens_per_process=100_000_000,
    )
    assert settings == PluginSettings(
        default=said, agents=agents, prices=prices, summary_budget=budget
    )


OF_THRESHOLD = (
    "Known here: ahead, binds_thoughts, context_window, keep, keep_tools, "
    "max_compaction_attempts, preview_tokens, recall, recall_page_tokens, "
    "reuse_prompt_cache, summaries, summarizer, summarizer_context_window, "
    "summary_instruction, summary_timeout_seconds, tell_fullness, trigger, "
    "user_messages"
)
OF_PLUGIN = (
    "Known here: agents, default, listener_timeout_seconds, max_background_summaries, "
    "observe, prices, recent_events, reload_on_change, state_keys, summaries, "
    "summary_artifacts, summary_budget, usage_in_state, user_ids, warning_threshold."
)
OF_TOKENS = "Known here: budget_tokens, preserve_initial_task, preserve_system."
OF_STRATEGIES = (
    "one of threshold, sliding_window, pipeline, none, or the path of a "
    "Strategy is expected. Did you mean"
)
IN_TABLE = "It belongs in a table [default] or [agents.<name>] with strategy ="
KEEP = "tokens as an int, at least 0, a part of the window as a float, at least 0 "
PRICES = "prices.'gpt-6' = {input = 2, output = "


class Refusing(Threshold):
    """A strategy that is given something to hide."""

    api_key: str = ""

    def __init__(self, **settings: Any) -> None:
        """Fails."""
        raise RuntimeError("no such account")


def sizes(key: str, least: str, *values: object) -> dict[str, str]:
    """Values that are no size, and what is said of each."""
    wanted = f"tokens as an int, at least {least}, a part of the window as a float…"
    return {
        f"default = {{{key} = {json.dumps(value)}}}": f"….{key} = {value!r}: {wanted}"
        for value in values
    }


MISTAKES = {
    "obsereve = true": f"obsereve = True: unknown key. Did you mean 'observe'? "
    f"{OF_PLUGIN}",
    "[defaults]\nx = 1": f"defaults: unknown key. Did you mean 'default'? {OF_PLUGIN}",
    "context_window = 8_000": "context_window = 8000: unknown key. "
    f"{IN_TABLE} 'threshold'.",
    "default = {contxt_window = 8}": "default.contxt_window = 8: unknown key. "
    f"Did you mean 'context_window'? {OF_THRESHOLD}.",
    "default = {max_messages = 8}": "default.max_messages = 8: unknown key. "
    f"{IN_TABLE} 'sliding_window'.",
    f"{PIPELINE}window.size = 3": "default.window.size = 3: unknown key. Did you mean "
    "'window_size'? Known here: min_messages_before_windowing, preserve_initial_task, "
    "preserve_system, strict_window_size, window_size.",
    f"{PIPELINE}window = {{budget_tokens = 9, size = 3}}": f"…{OF_TOKENS}…",
    f"{PIPELINE}window = true": "default.window = True: a reducer, a table of…",
    f"{PRICES}8, outputs = 8}}": "prices.gpt-6.outputs = 8: unknown key. Did you mean "
    "'output'? Known here: above, above_tokens, cached_input, input, output.",
    f"{PRICES}-1}}": "prices.gpt-6.output = -1: …greater…0.",
    f"{PRICES}'8'}}": "prices.gpt-6.output = '8': …a valid number.",
    "prices.'gpt-6'.input = 2": "prices.gpt-6.output: …required.",
    "prices.'gpt-6' = 7": "prices.gpt-6 = 7: …instance of Costs.",
    "prices = 7": "prices = 7: …a valid dictionary.",
    "agents = 7": "agents = 7: …a valid dictionary.",
    "[[agents]]": "agents = [{}]: …a valid dictionary.",
    "agents.a = {strategy = 'none', x = 8}": 'agents.a.x = 8: strategy "none" has no…',
    "default = 7": "default = 7: a table, the name of a strategy…",
    "default.strategy = ['pipeline']": "…strategy = ['pipeline']: one of threshold…",
    "default = 'treshold'": "default.strategy = 'treshold': "
    f"{OF_STRATEGIES} 'threshold'?",
    "agents.a.strategy = 'SlidingWindow'": "agents.a.strategy = 'SlidingWindow': "
    f"{OF_STRATEGIES} 'sliding_window'?",
    "default = 'contextguard_adk.Treshold'": "default.strategy = "
    "'contextguard_adk.Treshold': 'contextguard_adk' has no 'Treshold'. Did you mean "
    "'Threshold'?",
    "default = 'my_own.Strategy'": "default.strategy = 'my_own.Strategy': "
    "'my_own.Strategy' cannot be imported: ModuleNotFoundError: No module named "
    "'my_own'.",
    "default = 'contextguard_adk.strategies.Strategy'": "…is abstract…",
    "default = 'contextguard_adk.request_compaction'": "…no subclass of Strategy…",
    f"default = {{strategy = '{__name__}.Refusing', api_key = 'hidden'}}": (
        "default: Refusing raised RuntimeError: no such account."
    ),
    f"{REDUCER}'TokenWindow'": "default.reducers.0: 'TokenWindow' is no dotted path. "
    "Did you mean 'contextguard_adk.strategies.TokenWindow'?",
    f"{REDUCER}'a.B'": "default.reducers.0: 'a.B' cannot be imported…",
    f"{PIPELINE}[[default.reducers]]\nx = 1": "default.reducers.0: a Reducer, or a t…",
    TOKENS: "default.reducers.0.budget_tokens: …required.",
    f"{TOKENS}\nbudget_tokens = 9\nx = 1": f"…0.x = 1: unknown key. {OF_TOKENS}",
    "default = {summarizer = 'gemni'}": "default.summarizer = 'gemni': a name that "
    "ADK's LLMRegistry resolves is expected (Model gemni not found.…",
    "default = {context_window = '8k'}": "default.context_window = '8k': "
    "…a valid integer.",
    "default = {keep = '10%'}": f"default.keep = '10%': {KEEP}and less than 1, or "
    '"auto" are expected.',
    "default = {keep = 1.0}": f"default.keep = 1.0: {KEEP}…",
    "default = {keep = -1}": f"default.keep = -1: {KEEP}…",
    "default = {keep = true}": f"default.keep = True: {KEEP}…",
    **sizes("trigger", "1,000", 999, 0, 0.0, 1.01, -0.5, True, False, "often"),
    **sizes("preview_tokens", "100", 99, 0, 0.0, 1.0, -0.1, True, "auto"),
    "default = {summary_timeout_seconds = 60_000}": "…= 60000: …less…3600.",
    "warning_threshold = 70": "warning_threshold = 70: …less…1.",
    "state_keys = 'x'": "state_keys = 'x'…",
    f"{PIPELINE}tool_output = {{smart_truncate = true, max_length = 35}}": "…is 4000…",
    f"{PIPELINE}summary.trigger_threshold = 0.4": "…trigger_threshold (0.4)…",
    "default = {max_tokens = 8_000, context_window = 8_000}": "default.max_tokens "
    "= 8000: this setting is given under another name as well: give one.",
    "[default]\nstrategy = 'sliding_window'\nmax_turns = 8\nmax_messages = 8": (
        "default.max_turns = 8: this setting is given under another name as well: "
        "give one."
    ),
    "default:\n  strategy: pipeline": "it holds YAML, so its name must end in .yaml or "
    ".yml.",
    f"observe = '{'x' * 9_000}'": "observe = 'xxx…",
    f"a = {'[' * 9_000}": "…too deeply…",
    "default = ": "Invalid value…",
}


@pytest.mark.parametrize(
    ("text", "said"), MISTAKES.items(), ids=[ascii(text[:40]) for text in MISTAKES]
)
def test_mistakes_in_a_file(text: str, said: str) -> None:
    """The line names file, key and value, what is accepted, and what may be meant."""
    with pytest.raises(ConfigError) as caught:
        ContextGuardPlugin.from_file(write(text))
    message = str(caught.value)
    assert tells(f"guard.toml: {said}", message), message
    assert len(message) < 700


UNREADABLE: dict[str, tuple[str, bytes | None, str]] = {
    "suffix": ("guard.ini", b"", "the name must end in .toml, .yaml or .yml."),
    "TOML": ("guard.yaml", b"[a]\nb = 'c'", "it holds TOML, so its name must end in …"),
    "a list": ("guard.yaml", b"- 1", "a table of settings…"),
    "twice": ("guard.yaml", b"default: none\ndefault: {}", "'default' stands twice…"),
    "no number": ("guard.yaml", b"a: !!int ''", "…does not fit its tag…"),
    "no truth": ("guard.yaml", b"a: !!bool perhaps", "…does not fit its tag…"),
    "a tag": ("guard.yaml", b"a: !!python/object/apply:os.getcwd []", "…tag…"),
    "name as truth": ("guard.yaml", b"agents: {no: none}", "agents.False…in quotes."),
    "a list as key": ("guard.yaml", b"? [a]\n: 1", "…unhashable…"),
    "UTF-16": ("guard.toml", "a = 1".encode("utf-16"), "…utf-8…"),
    "huge number": ("guard.toml", b"a = " + b"1" * 5_000, "…digits…"),
    "no file name": ("a\0b.toml", None, "…null byte…"),
    "missing": ("missing.toml", None, "cannot be read: No such file or directory."),
    "folder": ("folder.toml", None, "cannot be read: Is a directory."),
}


@pytest.mark.parametrize(
    ("name", "data", "said"), UNREADABLE.values(), ids=[*UNREADABLE]
)
def test_unreadable_files_are_named(name: str, data: bytes | None, said: str) -> None:
    """What cannot be read is an error of one line with the path."""
    Path("folder.toml").mkdir()
    if data is not None:
        write(data, name)
    with pytest.raises(ConfigError) as caught:
        load_settings(name)
    assert tells(f"{name}: {said}", str(caught.value)), caught.value


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise RuntimeError('no key')", "…no key…"),
        ("import sys; sys.exit(3)", "…SystemExit…"),
        ("def (", "…SyntaxError…"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(code: str, said: str) -> None:
    """Whatever a user's module does on import, the file is what is complained of."""
    write(code, "broken_strategies.py")
    with pytest.raises(ConfigError) as caught:
        load_settings(write("default = 'broken_strategies.Mine'"))
    place = "guard.toml: default.strategy = 'broken_strategies.Mine': "
    assert tells(place + said, str(caught.value)), caught.value


async def choose(_: object) -> None:
    """Chooses no strategy, but has to be awaited."""


NAMES = {
    **vars(strategies),
    "choose": choose,
    **{name: getattr(contextguard_adk, name) for name in contextguard_adk.__all__},
    "App": App,
    "EventsCompactionConfig": EventsCompactionConfig,
    "InMemoryRunner": InMemoryRunner,
    "agent": LlmAgent(name="writer", model=SimulatedLlm(model="gemini-flash-latest")),
    "odd": LlmAgent(name="writer", model=SimulatedLlm(model="gpt-6s")),
}
OF_AGENTS = "must be a mapping of agent names to strategies, such as {'writer': "
NO_STRATEGY = (
    "must be a Strategy, a sync function of the callback context, or None, not"
)
TYPED = {
    "ContextGuardPlugin(agents=['writer'])": f"agents {OF_AGENTS}Threshold()}}, not "
    "list: ['writer']",
    "ContextGuardPlugin(agents='writer')": f"agents {OF_AGENTS}Threshold()}}, not "
    "str: 'writer'",
    "ContextGuardPlugin(default=Threshold)": f"default {NO_STRATEGY} the class "
    "Threshold. Did you mean Threshold()?",
    "ContextGuardPlugin(agents={'writer': SlidingWindow})": f"agents['writer'] "
    f"{NO_STRATEGY} the class SlidingWindow. Did you mean SlidingWindow()?",
    "ContextGuardPlugin(default='pipeline')": f"default {NO_STRATEGY} str: 'pipeline'. "
    "Did you mean Pipeline()? Names of strategies are for files",
    "ContextGuardPlugin(agents={'a': {'keep': 8}})": f"agents['a'] {NO_STRATEGY} dict: "
    "{'keep': 8}. Did you mean Threshold(…) with these settings?",
    "ContextGuardPlugin(default=choose)": f"default {NO_STRATEGY} async choose(_)",
    "ContextGuardPlugin(registry={'gpt-6': 8})": "registry must have a method "
    "context_window(model) that returns tokens or None, not dict: {'gpt-6': 8}",
    "Threshold(contxt_window=8_000)": "Threshold: contxt_window = 8000: unknown "
    f"key. Did you mean 'context_window'? {OF_THRESHOLD}",
    "Pipeline(window=MessageWindow)": "Pipeline: window = <class …: a reducer, "
    "a table of settings or false is expected. Did you mean MessageWindow(…)?",
    "Threshold(summarizer=agent)": "Threshold: summarizer = LlmAgent…: a BaseLlm, "
    "or the name of a model, is expected…",
    "App(name='app', root_agent=agent, plugins=[ContextGuardPlugin])": "plugins.0: "
    "Input should be an instance of BasePlugin",
    "InMemoryRunner(app=App(name='app', root_agent=agent, plugins=["
    "ContextGuardPlugin(), ContextGuardPlugin()]))": "Plugin with name 'context_guard' "
    "already registered.",
}


@pytest.mark.parametrize(("typed", "said"), TYPED.items(), ids=[*TYPED])
def test_mistakes_in_code(typed: str, said: str) -> None:
    """The line says which argument is wrong, and what is expected in its place."""
    with pytest.raises((TypeError, ValueError, ConfigError)) as caught:
        eval(typed, {**NAMES})
    text = str(caught.value)
    if isinstance(caught.value, ValidationError):
        found = [
            (*(str(key) for key in each["loc"]), each["msg"])
            for each in caught.value.errors()
        ]
        texts = {f"{'.'.join(place)}: {message}" for *place, message in found}
        text = "; ".join(sorted(texts))

    assert tells(said, text), text


# Mistakes that stop nothing are one warning in the log.
LOGGED = {
    "agent, [ContextGuardPlugin(agents={'wirter': Threshold()})]": "`agents` names "
    "'wirter', but app 'app' has no agent of that name. Did you mean 'writer'? Agents "
    "that `agents` does not name are guarded by Threshold.",
    "odd, [ContextGuardPlugin()]": "The context window of model 'gpt-6s' is unknown; "
    "128000 tokens are assumed. Set context_window= on the agent's strategy, as in "
    'ContextGuardPlugin(agents={"writer": Threshold(context_window=...)}).',
    "agent, [ContextGuardPlugin(), ContextGuardPlugin(name='second')]": "App 'app' has "
    "two guards for the same agents, perhaps one in the App and one on "
    "--extra_plugins: 'context_guard' does the work, 'second' is idle.",
    "agent, [ContextGuardPlugin()], events_compaction_config=EventsCompactionConfig("
    "compaction_interval=99, overlap_size=1)": "App 'app' also has an "
    "events_compaction_config: ADK's compaction and the guard both pay for summaries "
    "of the same history. Remove it from the App to leave the history to the guard.",
}


@pytest.mark.parametrize(("typed", "said"), LOGGED.items(), ids=[*LOGGED])
async def test_mistakes_that_stop_nothing(
    typed: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The app runs, and one line says what is wrong with it."""
    chat: Chat = eval(f"Chat({typed})", {**NAMES, "Chat": Chat})
    assert await chat.say("Hello.")
    [text] = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("contextguard") and record.levelname == "WARNING"
    ]
    assert text == said
