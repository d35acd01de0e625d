"""Settings from files: what is read, and what a mistake says."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.adk.artifacts import InMemoryArtifactService
from google.adk.auth.credential_service.in_memory_credential_service import (
    InMemoryCredentialService,
)
from google.adk.cli.api_server import ApiServer
from google.adk.cli.utils.agent_loader import AgentLoader
from google.adk.evaluation.in_memory_eval_sets_manager import InMemoryEvalSetsManager
from google.adk.evaluation.local_eval_set_results_manager import (
    LocalEvalSetResultsManager,
)
from google.adk.memory import InMemoryMemoryService
from google.adk.sessions import InMemorySessionService
from pydantic import BaseModel

from contextguard_adk import (
    ConfigError,
    ContextGuardPlugin,
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

README = Path(__file__).parent.parent / "README.md"
SAMPLE = Path(__file__).parent.parent / "samples" / "contextguard.toml"

HITTING_LIMITS = """
[default]
strategy = "pipeline"

[default.tool_output]
preserve_last_tool_result = false  # Shorten the newest result as well.

[default.window]
strict_window_size = true  # What is preserved counts against the window.
"""
AUTOMATIC_SUMMARIES = """
[default]
strategy = "pipeline"

[default.summary]
trigger_threshold = 0.90     # Of the context window.
target_token_ratio = 0.50    # Of the context window.
preserve_recent_count = 10   # Messages that stay word for word.
"""
TOKEN_WINDOW = """
[default]
strategy = "pipeline"

[default.window]
budget_tokens = 100_000  # The newest messages, by tokens and not by number.
"""


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)


def write(folder: Path, text: str, name: str = "guard.toml") -> Path:
    """Writes a settings file."""
    path = folder / name
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        pytest.param(
            HITTING_LIMITS,
            Pipeline(
                tool_output=ToolOutputTruncation(preserve_last_tool_result=False),
                window=MessageWindow(strict_window_size=True),
            ),
            id="hitting limits",
        ),
        pytest.param(
            AUTOMATIC_SUMMARIES,
            Pipeline(
                summary=SummaryCompaction(
                    trigger_threshold=0.9,
                    target_token_ratio=0.5,
                    preserve_recent_count=10,
                )
            ),
            id="automatic summaries",
        ),
        pytest.param(
            TOKEN_WINDOW,
            Pipeline(window=TokenWindow(budget_tokens=100_000)),
            id="token window",
        ),
    ],
)
def test_recommended_tables(tmp_path: Path, text: str, wanted: Pipeline) -> None:
    """The tables that the README recommends are what they say."""
    assert text in README.read_text("utf-8")
    assert load_settings(write(tmp_path, text)).default == wanted


def with_default(default: Strategy | None) -> PluginSettings:
    """Settings with that default."""
    return PluginSettings(default=default)


SAID: dict[str, tuple[str, PluginSettings]] = {
    "empty": ("", PluginSettings()),
    "observe": ("observe = true", PluginSettings(observe=True)),
    "none": ("default = 'none'", with_default(None)),
    "false is none": ("default = false", with_default(None)),
    "name": ("default = 'pipeline'", with_default(Pipeline())),
    "table": ("[default]\nstrategy = 'none'", with_default(None)),
    "threshold unless said otherwise": (
        "[default]\nmax_tokens = 8000",
        with_default(Threshold(context_window=8_000)),
    ),
    "agents": (
        "[agents.a]\nstrategy = 'sliding_window'\nmax_turns = 9\n"
        "summarizer = 'gemini-2.5-flash'\n[agents]\nb = 'none'",
        PluginSettings(
            agents={
                "a": SlidingWindow(max_turns=9, summarizer="gemini-2.5-flash"),
                "b": None,
            }
        ),
    ),
    "reducers": (
        "[default]\nstrategy = 'pipeline'\nwindow = false\nsummary = false\n"
        "[default.tool_output]\nmax_length = 5000",
        with_default(
            Pipeline(
                window=None,
                summary=None,
                tool_output=ToolOutputTruncation(max_length=5_000),
            )
        ),
    ),
    "dotted path": (
        "[default]\nstrategy = 'contextguard_adk.SlidingWindow'\nmax_turns = 9",
        with_default(SlidingWindow(max_turns=9)),
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
    assert load_settings(write(tmp_path, text)) == wanted


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


# Of each mistake what stands in the file, and what the message has to say about it.
PIPELINE = "[default]\nstrategy = 'pipeline'\n"
REDUCER = PIPELINE + "[[default.reducers]]\n"
MISTAKES: dict[str, tuple[str, ...]] = {
    "key": ("obserf = true", "obserf = True: unknown key; known here: agents, default"),
    "settings of none": (
        "[agents.a]\nstrategy = 'none'\nmax_tokens = 8000",
        'agents.a.max_tokens = 8000: strategy "none" has no settings',
    ),
    "key of another strategy": (
        "[agents.a]\nmax_turns = 9",
        "agents.a.max_turns = 9: unknown key; known here: context_window",
    ),
    "key of a reducer": (
        PIPELINE + "[default.window]\nsize = 3",
        "default.window.size = 3: unknown key; known here: ",
        "window_size",
    ),
    "unit": (
        "[default]\ncontext_window = '128k'",
        "default.context_window = '128k': Input should be a valid integer",
    ),
    "small window": (
        "[default]\nmax_tokens = 999",
        "default.max_tokens = 999: Input should be greater than or equal to 1000",
    ),
    "both names": (
        "[default]\nmax_tokens = 8000\ncontext_window = 9000",
        "default: context_window and max_tokens mean the same",
    ),
    "milliseconds": (
        "[default]\nsummary_timeout_seconds = 60_000",
        "default.summary_timeout_seconds = 60000: Input should be less than or",
    ),
    "truth as number": (
        PIPELINE + "[default.window]\nwindow_size = true",
        "default.window.window_size = True: Input should be a valid integer",
    ),
    "summarizer number": (
        "[default]\nsummarizer = 7",
        "default.summarizer = 7: Input should be an instance of BaseLlm or ",
    ),
    "summarizer unknown": (
        "[agents.a]\nsummarizer = 'my-own-model'",
        "agents.a.summarizer = 'my-own-model': a name that ADK's LLMRegistry",
        "not found",
    ),
    "percent": ("warning_threshold = 70", "warning_threshold = 70", "equal to 1"),
    "choice": ("state_keys = 'x'", "state_keys = 'x'", "'plain'"),
    "head and tail": (
        PIPELINE + "[default.tool_output]\nsmart_truncate = true\nmax_length = 3500",
        "default.tool_output: head_length + tail_length is 4000",
        "max_length (3500)",
    ),
    "trigger below target": (
        PIPELINE + "[default.summary]\ntrigger_threshold = 0.4",
        "default.summary: ",
        "trigger_threshold (0.4)",
        "target_token_ratio (0.5)",
    ),
    "run below target": (
        PIPELINE + "compression_threshold = 0.5",
        "default: compression_threshold (0.5)",
        "target_token_ratio of the summary (0.5)",
    ),
    "two kinds of window": (
        PIPELINE + "[default.window]\nbudget_tokens = 500\nwindow_size = 9",
        "default.window.window_size = 9: unknown key; known here: budget_tokens, pres",
    ),
    "window list": (
        PIPELINE + "window = [1]",
        "default.window = [1]: a table of settings, or false",
    ),
    "switch": (
        PIPELINE + "window = true",
        "default.window = True: a table of settings, or false",
    ),
    "reducers are no list": (
        PIPELINE + "reducers = 3",
        "default.reducers = 3",
        "tuple",
    ),
    "no such reducer": (
        REDUCER + "reducer = 'a.B'",
        "default.reducers.0: 'a.B' cannot be imported",
    ),
    "no reducer": (
        REDUCER + "reducer = 'contextguard_adk.Threshold'",
        "default.reducers.0: ",
        "is no subclass of Reducer",
    ),
    "abstract reducer": (
        REDUCER + "reducer = 'contextguard_adk.Reducer'",
        "default.reducers.0: 'contextguard_adk.Reducer' is abstract",
    ),
    "reducer without a class": (
        REDUCER + "x = 1",
        "default.reducers.0: `reducer`, the dotted path",
    ),
    "settings of a reducer": (
        REDUCER + "reducer = 'contextguard_adk.TokenWindow'\nx = 1",
        "default.reducers.0.budget_tokens: Field required",
        "default.reducers.0.x = 1: unknown key; known here: budget_tokens",
    ),
    "abstract strategy": (
        "default = 'contextguard_adk.Strategy'",
        "default.strategy = 'contextguard_adk.Strategy'",
        "is abstract",
    ),
    "function": (
        "default = 'contextguard_adk.request_compaction'",
        "is no subclass of Strategy",
    ),
    "class name": ("default = 'Pipeline'", "'Pipeline' is no dotted path"),
    "strategy": (
        "default = 'treshold'",
        "default.strategy = 'treshold': one of threshold, sliding_window",
    ),
    "strategy list": (
        "[default]\nstrategy = ['pipeline']",
        "default.strategy = ['pipeline']",
    ),
    "default number": ("default = 7", "default = 7: a table"),
    "agents number": ("agents = 7", "agents = 7: a table of agents"),
    "long value": (f"observe = '{'x' * 9_000}'", "observe = 'xxx", "boolean"),
    "deep nesting": (f"a = {'[' * 9_000}", "too deeply"),
    "no TOML": ("default = ", "Invalid value"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_names_file_key_value_and_what_is_accepted(
    tmp_path: Path, mistake: tuple[str, ...]
) -> None:
    """A bad file fails when the plugin is made, and says what that means."""
    text, *complaints = mistake
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        ContextGuardPlugin.from_file(path)
    message = str(caught.value)
    for complaint in (str(path), *complaints, "runs the app without the guard"):
        assert complaint in message
    assert len(message) < 700
    assert "\n" not in message


UNREADABLE: dict[str, tuple[str, bytes | None, str]] = {
    "suffix": ("guard.ini", b"", "must end in .toml"),
    "no YAML": ("guard.yaml", b"a: [", "guard.yaml"),
    "a list": ("guard.yaml", b"[1]", "a table of settings"),
    "twice": ("guard.yaml", b"default: none\ndefault: {}", "'default' stands twice"),
    "twice in a table": (
        "guard.yaml",
        b"default:\n  max_tokens: 8000\n  max_tokens: 9000",
        "again in line 3",
    ),
    "a tag": ("guard.yaml", b"a: !!python/object/apply:os.getcwd []", "tag"),
    "no number in a tag": ("guard.yaml", b"a: !!int ''", "tag"),
    "neither": ("guard.yaml", b"a: !!bool perhaps", "tag"),
    "no time": ("guard.yaml", b"a: !!timestamp now", "tag"),
    "name as truth": ("guard.yaml", b"agents: {no: none}", "a name in quotes"),
    "two documents": ("guard.yaml", b"a: 1\n---\nb: 1", "single"),
    "a list as key": ("guard.yaml", b"? [a]\n: 1", "unhashable"),
    "a number as key": ("guard.yaml", b"1: 2", "1 = 1: Keys"),
    "deep": ("guard.yaml", b"a: " + b"[" * 2_000, "too deeply"),
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


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    """It is named with what is wrong about it."""
    path = tmp_path / "folder.toml"
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_settings(path)


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        pytest.param("raise RuntimeError('no key')", "no key", id="raises"),
        pytest.param("import sys; sys.exit(3)", "SystemExit", id="exits"),
        pytest.param("def (", "SyntaxError", id="is no Python"),
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


@pytest.mark.parametrize("name", ["guard.toml", "guard.yaml", "GUARD.TOML"])
def test_a_byte_order_mark_is_ignored(tmp_path: Path, name: str) -> None:
    """Some editors begin every file with one."""
    text = "observe: true" if name.endswith("yaml") else "observe = true"
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_settings(path).observe is True


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


def test_a_bad_file_from_the_environment_fails_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ADK logs the error under --extra_plugins; the text says what follows."""
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "missing.toml"))
    with pytest.raises(ConfigError, match=r"missing\.toml.*Nothing is guarded"):
        ContextGuardPlugin(name="contextguard_adk.ContextGuardPlugin")


def api_server() -> ApiServer:
    """ADK's own server with the guard as an extra plugin."""
    sessions, memory = InMemorySessionService(), InMemoryMemoryService()
    return ApiServer(
        agent_loader=AgentLoader(str(SAMPLE.parent)),
        session_service=sessions,
        memory_service=memory,
        artifact_service=InMemoryArtifactService(),
        credential_service=InMemoryCredentialService(),
        eval_sets_manager=InMemoryEvalSetsManager(),
        eval_set_results_manager=LocalEvalSetResultsManager(str(SAMPLE.parent)),
        agents_dir=str(SAMPLE.parent),
        extra_plugins=["contextguard_adk.ContextGuardPlugin"],
    )


@pytest.mark.parametrize("is_bad", [False, True], ids=["good", "bad"])
def test_the_log_says_that_the_app_runs_unguarded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_bad: bool,
) -> None:
    """ADK swallows the error of an extra plugin; its log line is all there is."""
    path = write(tmp_path, "[default]\nmax_tokens = " + ("9" if is_bad else "9000"))
    monkeypatch.setenv(CONFIG_VARIABLE, str(path))
    plugins = api_server()._instantiate_extra_plugins()
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    if not is_bad:
        (plugin,) = plugins
        assert isinstance(plugin, ContextGuardPlugin)
        assert plugin.name == "contextguard_adk.ContextGuardPlugin"
        assert lines == []
        return
    assert plugins == []
    (line,) = lines
    assert f"{path}: default.max_tokens = 9: " in line
    assert "greater than or equal to 1000" in line
    assert "Nothing is guarded until this is mended" in line
    assert "runs the app without the guard" in line


# --- The sample -------------------------------------------------------------------


def list_tables(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every table of a TOML document with its path."""
    if isinstance(value, dict):
        yield path, value
        for name, inner in value.items():
            yield from list_tables(inner, f"{path}.{name}".strip("."))
    if isinstance(value, list):
        for inner in value:
            yield from list_tables(inner, path)


@pytest.mark.parametrize(
    "model",
    [
        PluginSettings,
        Threshold,
        SlidingWindow,
        Pipeline,
        MessageWindow,
        TokenWindow,
        ToolOutputTruncation,
        SummaryCompaction,
    ],
)
def test_the_sample_has_every_setting(model: type[BaseModel]) -> None:
    """Derived from the models: nothing is missing."""
    tables = list(list_tables(tomllib.loads(SAMPLE.read_text("utf-8"))))
    written = {name for _, table in tables for name in table}
    assert set(model.model_fields) <= written


def test_the_sample_explains_every_setting() -> None:
    """Each setting has a comment above it, where it stands for the first time."""
    lines = SAMPLE.read_text("utf-8").splitlines()
    seen: set[str] = set()
    for before, line in zip(["", *lines], lines, strict=False):
        name, equals, _ = line.partition(" = ")
        if equals and not line.startswith("#") and name not in seen:
            seen.add(name)
            assert before.startswith("#"), f"{name} has no comment"


def test_the_sample_is_loaded() -> None:
    """It is valid, and what it shows are the defaults."""
    settings = load_settings(SAMPLE)
    assert settings.default
    assert settings.default == Threshold(
        context_window=128_000,
        summarizer="gemini-2.5-flash-lite",
        summarizer_context_window=1_000_000,
        summary_instruction=settings.default.summary_instruction,
    )
    assert "{max_words} words" in str(settings.default.summary_instruction)
    assert settings.agents == {
        "researcher": SlidingWindow(),
        "operator": Pipeline(compression_threshold=0.75),
        "writer": Pipeline(
            window=TokenWindow(budget_tokens=100_000),
            summary=None,
            reducers=(ToolOutputTruncation(max_length=1_000),),
        ),
        "greeter": None,
    }
    plain = PluginSettings()
    assert settings.observe == plain.observe
    assert settings.state_keys == plain.state_keys
    assert settings.warning_threshold == plain.warning_threshold
