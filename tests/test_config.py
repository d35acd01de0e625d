"""Settings from files: what is read, and what a mistake says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from contextguard_adk import (
    ConfigError,
    ContextGuardPlugin,
    Costs,
    MessageWindow,
    Pipeline,
    SlidingWindow,
    Strategy,
    SummaryCompaction,
    Threshold,
    TokenWindow,
    ToolOutputTruncation,
)
from contextguard_adk.config import (
    CONFIG_VARIABLE,
    PluginSettings,
    load_settings,
    settings_from_environment,
)

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "samples" / "contextguard.toml"
REDUCERS = (MessageWindow, TokenWindow, ToolOutputTruncation, SummaryCompaction)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)


def write(folder: Path, text: str, name: str = "guard.toml") -> Path:
    """Writes a settings file."""
    path = folder / name
    path.write_text(text, "utf-8")
    return path


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


def test_recommended_tables(tmp_path: Path) -> None:
    """The tables that the documentation recommends are what they say."""
    pages = (ROOT / "README.md", *ROOT.glob("docs/*.md"))
    text = "".join(page.read_text("utf-8") for page in pages)
    blocks = re.findall(r"```toml\n(.*?)```", text, re.S)
    loaded = [load_settings(write(tmp_path, block)).default for block in blocks]
    assert all(strategy in loaded for strategy in RECOMMENDED)


def with_default(default: Strategy | None) -> PluginSettings:
    """Settings with that default."""
    return PluginSettings(default=default)


SHORT = ToolOutputTruncation(max_length=5_000)
SAID: dict[str, tuple[str, PluginSettings]] = {
    "observe": ("observe = true", PluginSettings(observe=True)),
    "byte-order mark": ("\ufeffobserve = true", PluginSettings(observe=True)),
    "false is none": ("default = false", with_default(None)),
    "name": ("default = 'pipeline'", with_default(Pipeline())),
    "threshold unless said otherwise": (
        "[default]\nmax_tokens = 8000",
        with_default(Threshold(context_window=8_000)),
    ),
    "prices": (
        "[prices.'gpt-4.1']\ninput = 2\noutput = 8.5",
        PluginSettings(prices={"gpt-4.1": Costs(input=2, output=8.5)}),
    ),
    "agents": (
        "[agents]\nb = 'none'\n[agents.a]\nstrategy = 'sliding_window'\nmax_turns = 9",
        PluginSettings(agents={"a": SlidingWindow(max_messages=9), "b": None}),
    ),
    "reducers": (
        "[default]\nstrategy = 'pipeline'\nwindow = false\nsummary = false\n"
        "[default.tool_output]\nmax_length = 5000",
        with_default(Pipeline(window=None, summary=None, tool_output=SHORT)),
    ),
    "dotted path": (
        "[default]\nstrategy = 'contextguard_adk.SlidingWindow'\nmax_messages = 9",
        with_default(SlidingWindow(max_messages=9)),
    ),
    "reducer by dotted path": (
        "[default]\nstrategy = 'pipeline'\n[[default.reducers]]\n"
        "reducer = 'contextguard_adk.TokenWindow'\nbudget_tokens = 500",
        with_default(Pipeline(reducers=(TokenWindow(budget_tokens=500),))),
    ),
}


@pytest.mark.parametrize(("text", "wanted"), SAID.values(), ids=SAID)
def test_what_files_say(tmp_path: Path, text: str, wanted: PluginSettings) -> None:
    """A default, tables per agent, short names, dotted paths."""
    for name in ("guard.toml", "GUARD.TOML"):
        assert load_settings(write(tmp_path, text, name)) == wanted


@pytest.mark.parametrize("name", ["guard.yaml", "guard.yml"])
def test_yaml_says_the_same(tmp_path: Path, name: str) -> None:
    """YAML has the same keys."""
    text = (
        "default: none\nagents:\n  a: {strategy: pipeline, window: false}\n  b: none\n"
    )
    assert load_settings(write(tmp_path, text, name)) == PluginSettings(
        default=None, agents={"a": Pipeline(window=None), "b": None}
    )
    assert load_settings(write(tmp_path, "", name)) == PluginSettings()


DEFAULT = "[default]\n"
PIPELINE = "[default]\nstrategy = 'pipeline'\n"
REDUCER = f"{PIPELINE}[[default.reducers]]\n"
TOKENS = "reducer = 'contextguard_adk.TokenWindow'"
OF_TOKENS = (
    "unknown key. Known here: budget_tokens, preserve_initial_task, preserve_system."
)
PRICES = "[prices.'gpt-4o']\ninput = 2\n"
OF_COSTS = "unknown key. Did you mean 'cached_input'? Known here: cached_input, "


def no_sizes(key: str, least: str, *values: object) -> list[tuple[str, str]]:
    """Values that are no size, and what is said of each."""
    wanted = f"tokens as an int, at least {least}, a part of the window as a float"
    return [
        (f"[default]\n{key} = {json.dumps(value)}", f".{key} = {value!r}: {wanted}")
        for value in values
    ]


MISTAKES = [
    ("obserf = true", "obserf = True: unknown key. Did you mean 'observe'? "),
    ("agents = 7", "agents = 7: a table of agents is expected"),
    ("[[agents]]", "agents = [{}]: a table of agents is expected"),
    ("default = 7", "default = 7: a table, the name of a strategy"),
    ("default.strategy = ['pipeline']", "strategy = ['pipeline']: one of threshold"),
    ("agents.a = {strategy = 'none', x = 8}", 'agents.a.x = 8: strategy "none" has no'),
    (
        f"{PIPELINE}window.size = 3",
        "size = 3: unknown key. Did you mean 'window_size'?",
    ),
    (f"{DEFAULT}context_window = '8k'", "context_window = '8k': Input should"),
    (f"{DEFAULT}keep = 'x'", "default.keep = 'x': tokens as an int, at least 0, or a"),
    (f"{DEFAULT}keep = 1.0", "default.keep = 1.0: tokens as an int, at least 0, or a"),
    (f"{DEFAULT}keep = -1", "default.keep = -1: tokens as an int, at least 0, or a"),
    (f"{DEFAULT}keep = true", "default.keep = True: tokens as an int, at least 0"),
    *no_sizes("trigger", "1,000", 999, 0, 0.0, 1.01, -0.5, True, False, "often"),
    *no_sizes("preview_tokens", "100", 99, 0, 0.0, 1.0, -0.1, True, "auto"),
    (f"{DEFAULT}max_tokens = 8000\ncontext_window = 9000", "max_tokens mean the same"),
    (f"{DEFAULT}summary_timeout_seconds = 60_000", "= 60000: Input should be less"),
    (f"{DEFAULT}summarizer = 'my-own'", "default.summarizer = 'my-own': a name"),
    ("warning_threshold = 70", "warning_threshold = 70"),
    ("state_keys = 'x'", "state_keys = 'x'"),
    (f"{PIPELINE}tool_output = {{smart_truncate = true, max_length = 35}}", "is 4000"),
    (f"{PIPELINE}summary.trigger_threshold = 0.4", "trigger_threshold (0.4)"),
    (f"{PIPELINE}window = true", "default.window = True: a reducer, a table of"),
    (f"{REDUCER}reducer = 'a.B'", "default.reducers.0: 'a.B' cannot be imported"),
    (f"{REDUCER}x = 1", "default.reducers.0: a Reducer, or a table"),
    (f"{REDUCER}{TOKENS}", "budget_tokens: Field"),
    (f"{REDUCER}{TOKENS}\nbudget_tokens = 500\nx = 1", f"0.x = 1: {OF_TOKENS}"),
    (f"{PIPELINE}window = {{budget_tokens = 500, window_size = 3}}", OF_TOKENS),
    ("default = 'contextguard_adk.Strategy'", "is abstract"),
    ("default = 'contextguard_adk.request_compaction'", "no subclass of Strategy"),
    ("prices = 7", "prices = 7: Input should be a valid dict"),
    ("prices.'gpt-4o' = 7", "prices.gpt-4o = 7: Input should be a valid dictionary"),
    (f"{PRICES}output = -1", "prices.gpt-4o.output = -1: Input should be greater"),
    (f"{PRICES}output = '8'", "prices.gpt-4o.output = '8': Input should be a valid"),
    (PRICES, "prices.gpt-4o.output: Field required"),
    (f"{PRICES}output = 1\ncached = 1", f"gpt-4o.cached = 1: {OF_COSTS}"),
    ("default = 'treshold'", "default.strategy = 'treshold': one of threshold"),
    (f"observe = '{'x' * 9_000}'", "observe = 'xxx"),
    (f"a = {'[' * 9_000}", "too deeply"),
    ("default = ", "Invalid value"),
]


@pytest.mark.parametrize(("text", "complaint"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_names_file_key_value_and_what_is_accepted(
    tmp_path: Path, text: str, complaint: str
) -> None:
    """A bad file fails when the plugin is made, and says what that means."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        ContextGuardPlugin.from_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert complaint in message
    assert len(message) < 700
    assert "\n" not in message


UNREADABLE: dict[str, tuple[str, bytes | None, str]] = {
    "suffix": ("guard.ini", b"", "must end in .toml"),
    "a list": ("guard.yaml", b"- 1", "a table of settings"),
    "twice": ("guard.yaml", b"default: none\ndefault: {}", "'default' stands twice"),
    "no number": ("guard.yaml", b"a: !!int ''", "does not fit its tag"),
    "no truth": ("guard.yaml", b"a: !!bool perhaps", "does not fit its tag"),
    "a tag": ("guard.yaml", b"a: !!python/object/apply:os.getcwd []", "tag"),
    "name as truth": ("guard.yaml", b"agents: {no: none}", "a name in quotes"),
    "a list as key": ("guard.yaml", b"? [a]\n: 1", "unhashable"),
    "UTF-16": ("guard.toml", "a = 1".encode("utf-16"), "utf-8"),
    "huge number": ("guard.toml", b"a = " + b"1" * 5_000, "digits"),
    "no file name": ("a\0b.toml", None, "null byte"),
    "missing": ("missing.toml", None, "No such file"),
}


@pytest.mark.parametrize(
    ("name", "data", "complaint"), UNREADABLE.values(), ids=UNREADABLE
)
def test_unreadable_files_are_named(
    tmp_path: Path, name: str, data: bytes | None, complaint: str
) -> None:
    """What cannot be read is an error with the path."""
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert complaint in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("raise RuntimeError('no key')", "no key"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("def (", "SyntaxError"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, complaint: str
) -> None:
    """Whatever a user's module does on import, the file is what is complained of."""
    (tmp_path / "broken_strategies.py").write_text(code, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    path = write(tmp_path, "default = 'broken_strategies.Mine'")
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_settings(path)
    assert "default.strategy = 'broken_strategies.Mine'" in str(caught.value)


def test_anchors_of_yaml_share_settings(tmp_path: Path) -> None:
    """What is merged into a table may be set again there."""
    text = (
        "default: &base {strategy: pipeline, window: false}\n"
        "agents: {a: *base, b: {<<: *base, window: {window_size: 9}}}\n"
    )
    assert load_settings(write(tmp_path, text, "guard.yaml")).agents == {
        "a": Pipeline(window=None),
        "b": Pipeline(window=MessageWindow(window_size=9)),
    }


def test_the_environment_names_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without arguments the named file is read, with arguments it is not."""
    assert settings_from_environment() is None
    path = write(tmp_path, "[default]\nmax_tokens = 9000")
    monkeypatch.setenv(CONFIG_VARIABLE, str(path))
    wanted = PluginSettings(default=Threshold(context_window=9_000))
    assert settings_from_environment() == wanted
    for made in (
        ContextGuardPlugin(),
        ContextGuardPlugin(name="contextguard_adk.ContextGuardPlugin"),
    ):
        assert made._settings == wanted
    assert ContextGuardPlugin(default=Pipeline())._settings.default == Pipeline()
    assert ContextGuardPlugin(default=None)._settings.default is None


def test_the_sample_has_every_setting() -> None:
    """Derived from the models: nothing is missing."""
    name = re.compile(r"^\[*(?:[\w.]*\.)?(\w+)(?: =|\])", re.M)
    written = {*name.findall(SAMPLE.read_text("utf-8")), "agents", "prices"}
    kinds = (PluginSettings, Costs, SlidingWindow, Pipeline, *REDUCERS)
    assert {name for kind in kinds for name in kind.model_fields} <= written


def test_the_sample_is_loaded() -> None:
    """It is valid, and what it shows are the defaults."""
    settings = load_settings(SAMPLE)
    said = settings.default
    assert said
    assert said.summarizer == "gemini-2.5-flash-lite"
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
    prices = {"my-own-model": Costs(input=0.2, output=0.8, cached_input=0.02)}
    assert settings == PluginSettings(default=said, agents=agents, prices=prices)
