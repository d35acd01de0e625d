"""A wrong settings file, and what the guard says of itself at the first run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.workflow import START, Workflow

from contextguard_adk import (
    ConfigError,
    ContextGuardPlugin,
    Pipeline,
    SlidingWindow,
    Threshold,
)
from contextguard_adk.config import CONFIG_VARIABLE, STRICT_VARIABLE
from contextguard_adk.testing import SimulatedLlm
from tests.builders import Chat, answer_text, model, user
from tests.chats import Registry, seed, words
from tests.guarded import is_compacted
from tests.lines import tells

Log = pytest.LogCaptureFixture
FULL_NAME = "contextguard_adk.ContextGuardPlugin"
"""The name that ADK gives under `--extra_plugins`."""


@pytest.fixture
def wrong_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a misspelt key that the environment names."""
    path = tmp_path / "guard.toml"
    path.write_text("default = 'none'\nobserv = true", "utf-8")
    monkeypatch.setenv(CONFIG_VARIABLE, str(path))
    monkeypatch.delenv(STRICT_VARIABLE, raising=False)
    return path


def lines(caplog: Log, level: int) -> list[str]:
    """What the guard has logged at a level."""
    records = [r for r in caplog.records if r.name.startswith("contextguard")]
    return [record.getMessage() for record in records if record.levelno == level]


def named(name: str, of: str = "simulated", **settings: Any) -> LlmAgent:
    """An agent with a model of a name."""
    return LlmAgent(name=name, model=SimulatedLlm(model=of), **settings)


async def test_a_wrong_file_guards_every_agent_with_the_defaults(
    wrong_file: Path, caplog: Log
) -> None:
    """Nobody is left without a guard, and one line says so, however many apps."""
    for _ in range(2):
        plugin = ContextGuardPlugin(registry=Registry(4_000), name=FULL_NAME)
    llm = SimulatedLlm(context_window=1_000_000, token_ratio=1.0)
    chat = Chat(LlmAgent(name="agent", model=llm), [plugin])
    await seed(chat, user("The task."), model(words(5_000)))
    assert answer_text(await chat.say("Go on.")).startswith("Acknowledged")
    assert is_compacted(llm.requests[-1])

    [line] = lines(caplog, logging.ERROR)
    said = (
        "observ = True: unknown key. Did you mean 'observe'? Known here:… Every agent "
        "is guarded with the defaults until the file is mended and read again, "
        "by a restart or `reload`."
    )
    assert tells(f"{wrong_file}: {said}", line)


@pytest.mark.usefixtures("wrong_file")
@pytest.mark.parametrize("value", ["", "0", "False"])
def test_a_strict_plugin_raises(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its argument or by the environment, unless that says 0."""
    monkeypatch.setenv(STRICT_VARIABLE, value)
    assert ContextGuardPlugin()
    with pytest.raises(ConfigError, match="Did you mean 'observe'"):
        ContextGuardPlugin(strict=True)
    monkeypatch.setenv(STRICT_VARIABLE, "1")
    with pytest.raises(ConfigError, match=r"'observe'\?.* Nothing is guarded: ADK"):
        ContextGuardPlugin(name="guard")


def test_arguments_beside_a_file_are_reported(wrong_file: Path, caplog: Log) -> None:
    """The file is not read; one line names it and the arguments."""
    for _ in range(2):
        ContextGuardPlugin(observe=True, default=Threshold(), name="guard")
    assert lines(caplog, logging.WARNING) == [
        f"{CONFIG_VARIABLE} names {wrong_file}, which is not read because "
        "ContextGuardPlugin was given observe, default in code. To read the file, give "
        f"none of these, or use ContextGuardPlugin.from_file({str(wrong_file)!r})."
    ]


async def say_guarded(caplog: Log, root: Any, plugin: ContextGuardPlugin) -> str:
    """The one line that the guard says of itself in two turns."""
    caplog.clear()
    caplog.set_level(logging.INFO, "contextguard_adk.plugin")
    chat = Chat(root, [plugin])
    for _ in range(2):
        assert await chat.say("Hello.")
    [line] = lines(caplog, logging.INFO)
    return line


async def test_the_environment_names_a_file(
    wrong_file: Path, tmp_path: Path, caplog: Log
) -> None:
    """Read where nothing is given in code; a file in code goes before it."""
    good = tmp_path / "good.toml"
    good.write_text("default = 'pipeline'\nobserve = true", "utf-8")
    from_file = ContextGuardPlugin.from_file(good)
    assert not caplog.records
    wrong_file.write_text("observe = true\n[default]\nmax_tokens = 9000", "utf-8")

    root = named("a")
    of_file = "Observing app 'app': a: Threshold, window 9,000 …"
    for plugin, said in (
        (ContextGuardPlugin(), of_file),
        (ContextGuardPlugin(name=FULL_NAME), of_file),
        (
            ContextGuardPlugin(default=Pipeline()),
            "Guarding app 'app': a: Pipeline, …",
        ),
        (ContextGuardPlugin(default=None), "Guarding app 'app': a: not guarded."),
        (from_file, "Observing app 'app': a: Pipeline, …"),
    ):
        assert tells(said, await say_guarded(caplog, root, plugin))


KNOWN = "window 1,048,576 tokens (model registry)"
FLASH = "gemini-flash-latest"
STRATEGIES = {
    "router": None,
    "writer": SlidingWindow(),
    "operator": Threshold(context_window=8_000),
}
ROUTER = named("router", sub_agents=[named("writer", FLASH), named("helper", "house")])
LATE = (
    "window 1,048,576 tokens (configured), compacts at 1,028,576 tokens, a prompt of "
    "that size costs"
)
OTHERS = [named("early", "gemini-pro-latest"), named("house", "house")]
FIRST_RUNS: dict[str, tuple[Any, ContextGuardPlugin, str]] = {
    "strategy, window and who said it": (
        named("operator", sub_agents=[ROUTER]),
        ContextGuardPlugin(agents=STRATEGIES),
        "Guarding app 'app': operator: Threshold, window 8,000 tokens (configured); "
        f"router: not guarded; writer: SlidingWindow, {KNOWN}, compacts at 1,028,576 "
        "tokens, a prompt of that size costs $0.77; helper: Threshold, "
        "window 128,000 tokens (assumed: unknown model 'house').",
    ),
    "a long prompt, an early trigger, an unknown price": (
        named("operator", "gemini-pro-latest", sub_agents=OTHERS),
        ContextGuardPlugin(
            agents={"early": Threshold(trigger="auto")},
            default=Threshold(context_window=1_048_576),
        ),
        "Guarding app 'app': early: Threshold, window 1,048,576 tokens (model "
        "registry), compacts at 32,000 tokens, a prompt of that size costs $0.06; "
        f"house: Threshold, {LATE} an unknown amount; operator: Threshold, {LATE} "
        "$4.11.",
    ),
    "ADK shows no workflow": (
        Workflow(name="root", edges=[(START, named("writer"))]),
        ContextGuardPlugin(agents={"writer": Pipeline()}, observe=True),
        "Observing app 'app': writer: Pipeline; "
        "every other agent of the workflow: Threshold.",
    ),
}


@pytest.mark.parametrize(
    ("root", "plugin", "said"), FIRST_RUNS.values(), ids=[*FIRST_RUNS]
)
async def test_the_first_run_says_what_is_guarded(
    root: Any, plugin: ContextGuardPlugin, said: str, caplog: Log
) -> None:
    """In one line."""
    assert tells(said, await say_guarded(caplog, root, plugin))


async def test_a_window_that_is_wrong_is_one_warning(caplog: Log) -> None:
    """It names both numbers, who said the wrong one, and the remedy."""
    llm = SimulatedLlm(model="wrong", context_window=8_000, token_ratio=1.0)
    for _ in range(2):
        guard = ContextGuardPlugin(registry=Registry(16_000))
        chat = Chat(LlmAgent(name="agent", model=llm), [guard])
        await seed(chat, user("The task."), model(words(8_200)))
        assert await chat.say("Go on.")

    assert llm.rejections == 2

    warnings = [each for each in lines(caplog, logging.WARNING) if "provider" in each]
    assert warnings == [
        "Agent 'agent', model 'wrong': the context window is 8,000 tokens, as the "
        "provider says, not 16,000, as the model registry says. Set "
        "context_window=8000 on the agent's strategy."
    ]
