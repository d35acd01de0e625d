"""A wrong settings file, and what the guard says of itself at the first run."""

from __future__ import annotations

import logging
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.runners import InMemoryRunner
from google.adk.workflow import START, Workflow

from contextguard_adk import (
    Compaction,
    CompactionContext,
    ConfigError,
    ContextGuardPlugin,
    Pipeline,
    Reducer,
    Reduction,
    SlidingWindow,
    Strategy,
    StrategyResult,
    Threshold,
)
from contextguard_adk.config import CONFIG_VARIABLE, STRICT_VARIABLE
from contextguard_adk.testing import ContextOverflowError, SimulatedLlm
from tests.builders import Chat, answer_text, model, user
from tests.chats import Registry, seed, words
from tests.guarded import is_compacted

LOGGER = "contextguard_adk.plugin"


@pytest.fixture
def wrong_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a misspelt key that the environment names."""
    path = tmp_path / "guard.toml"
    path.write_text("default = 'none'\nobserv = true", "utf-8")
    monkeypatch.setenv(CONFIG_VARIABLE, str(path))
    monkeypatch.delenv(STRICT_VARIABLE, raising=False)
    return path


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """What the guard has logged at a level."""
    records = [r for r in caplog.records if r.name.startswith("contextguard")]
    return [record.getMessage() for record in records if record.levelno == level]


async def test_a_wrong_file_guards_every_agent_with_the_defaults(
    wrong_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is left without a guard, and one line says so, however many apps."""
    for _ in range(2):
        plugin = ContextGuardPlugin(
            registry=Registry(4_000), name="contextguard_adk.ContextGuardPlugin"
        )
    llm = SimulatedLlm(context_window=1_000_000, token_ratio=1.0)
    chat = Chat(LlmAgent(name="agent", model=llm), [plugin])
    await seed(chat, user("The task."), model(words(5_000)))
    assert answer_text(await chat.say("Go on.")).startswith("Acknowledged")
    assert is_compacted(llm.requests[-1])
    [line] = lines(caplog, logging.ERROR)
    assert line.startswith(
        f"{wrong_file}: observ = True: unknown key. Did you mean 'observe'? Known here:"
    )
    assert line.endswith(
        " Every agent is guarded with the defaults until this is mended."
    )
    assert "\n" not in line


@pytest.mark.parametrize("value", ["", "0", "False"])
def test_a_strict_plugin_raises(
    wrong_file: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """By its argument or by the environment, unless that says 0."""
    monkeypatch.setenv(STRICT_VARIABLE, value)
    assert ContextGuardPlugin()
    with pytest.raises(ConfigError, match="Did you mean 'observe'"):
        ContextGuardPlugin(strict=True)
    monkeypatch.setenv(STRICT_VARIABLE, "1")
    with pytest.raises(ConfigError, match=r"'observe'\?.* Nothing is guarded: ADK"):
        ContextGuardPlugin(name="guard")


class Refusing(Threshold):
    """A strategy that is given something to hide."""

    api_key: str = ""

    def __init__(self, **settings: Any) -> None:
        """Fails."""
        raise RuntimeError("no such account")


def test_the_settings_of_a_class_that_fails_are_not_quoted(tmp_path: Path) -> None:
    """What it says is told; what it was given may be a secret."""
    path = tmp_path / "guard.toml"
    kind = f"{__name__}.{Refusing.__name__}"
    path.write_text(f"[default]\nstrategy = {kind!r}\napi_key = 'hidden'", "utf-8")
    with pytest.raises(ConfigError) as caught:
        ContextGuardPlugin.from_file(path)
    said = "default: Refusing raised RuntimeError: no such account."
    assert str(caught.value) == f"{path}: {said}"


def test_what_is_said_of_a_file_is_of_a_bounded_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A few bytes of YAML can hold a million values."""
    names = "abcdefgh"
    rows = [f"{a}: &{a} [{f'*{b}, ' * 9}]" for b, a in pairwise(names)]
    path = tmp_path / "guard.yaml"
    path.write_text("\n".join([f"a: &a [{'x, ' * 9}]", *rows]), "utf-8")
    monkeypatch.setenv(CONFIG_VARIABLE, str(path))
    assert ContextGuardPlugin()
    [line] = lines(caplog, logging.ERROR)
    assert len(line) < 3_000
    assert line.startswith(f"{path}: a = ['x', ")
    assert " … Every agent is guarded with the defaults" in line


def test_a_file_named_in_code_raises(wrong_file: Path) -> None:
    """Whoever writes the code sees the mistake at once."""
    with pytest.raises(ConfigError, match="Did you mean 'observe'"):
        ContextGuardPlugin.from_file(wrong_file)


def test_arguments_beside_a_file_are_reported(
    wrong_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is not read; one line names it and the arguments."""
    for _ in range(2):
        ContextGuardPlugin(observe=True, default=Threshold(), name="guard")
    [line] = lines(caplog, logging.WARNING)
    assert line == (
        f"{CONFIG_VARIABLE} names {wrong_file}, which is not read because "
        "ContextGuardPlugin was given observe, default in code. To read the file, give "
        f"none of these, or use ContextGuardPlugin.from_file({str(wrong_file)!r})."
    )


def test_a_file_in_code_goes_before_the_environment(
    wrong_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file that the environment names is neither read nor reported."""
    good = tmp_path / "good.toml"
    good.write_text("observe = true", "utf-8")
    assert ContextGuardPlugin.from_file(good)
    assert not caplog.records


async def say_guarded(
    caplog: pytest.LogCaptureFixture, chat: Chat, times: int = 2
) -> str:
    """The one line that the guard says of itself in some turns."""
    caplog.set_level(logging.INFO, logger=LOGGER)
    for _ in range(times):
        assert await chat.say("Hello.")
    [line] = lines(caplog, logging.INFO)
    return line


async def test_the_first_run_says_what_is_guarded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Agents with strategy, window and who said it, in one line."""
    agents = [
        LlmAgent(name=name, model=SimulatedLlm(model=of))
        for name, of in (("writer", "gemini-2.5-flash"), ("helper", "in-house"))
    ]
    root = LlmAgent(name="router", model=SimulatedLlm(), sub_agents=[*agents])
    named: dict[str, Strategy | None] = {
        "router": None,
        "writer": SlidingWindow(),
        "operator": Threshold(context_window=8_000),
    }
    operator = LlmAgent(name="operator", model=SimulatedLlm(), sub_agents=[root])
    line = await say_guarded(caplog, Chat(operator, [ContextGuardPlugin(agents=named)]))
    assert line == (
        "Guarding app 'app': operator: Threshold, window 8,000 tokens (configured); "
        "router: not guarded; "
        "writer: SlidingWindow, window 1,048,576 tokens (model registry); "
        "helper: Threshold, window 128,000 tokens "
        "(assumed: nobody knows model 'in-house')."
    )


async def test_every_app_of_a_plugin_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each in a line of its own, at its first run."""
    caplog.set_level(logging.INFO, logger=LOGGER)
    plugin = ContextGuardPlugin(agents={"first": SlidingWindow(), "secnd": None})
    for name in ("first", "second", "first"):
        agent = LlmAgent(name=name, model=SimulatedLlm(model="gemini-2.5-flash"))
        app = App(name=f"{name}_app", root_agent=agent, plugins=[plugin])
        await InMemoryRunner(app=app).run_debug("Hello.", quiet=True)
    known = "window 1,048,576 tokens (model registry)"
    assert lines(caplog, logging.INFO) == [
        f"Guarding app 'first_app': first: SlidingWindow, {known}.",
        f"Guarding app 'second_app': second: Threshold, {known}.",
    ]
    assert [line.partition(".")[0] for line in lines(caplog, logging.WARNING)] == [
        "`agents` names 'secnd', but app 'first_app' has no agent of that name",
        "`agents` names 'first', but app 'second_app' has no agent of that name",
    ]


async def test_of_a_large_app_the_first_agents_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those with settings of their own come first, then the others up to a dozen."""
    agents = [LlmAgent(name=f"a{n:02}", model=SimulatedLlm()) for n in range(30)]
    root = LlmAgent(name="root", model=SimulatedLlm(), sub_agents=[*agents])
    plugin = ContextGuardPlugin(
        agents={"a29": Pipeline()}, default=Threshold(context_window=2_000)
    )
    line = await say_guarded(caplog, Chat(root, [plugin]))
    assert line.startswith("Guarding app 'app': a29: Pipeline, window ")
    assert "; a10: Threshold, window 2,000 tokens (configured); and 19 more." in line
    assert "a11" not in line


async def test_under_a_workflow_the_default_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """ADK shows no plugin a workflow at the root."""
    node = LlmAgent(name="writer", model=SimulatedLlm())
    flow = Workflow(name="root", edges=[(START, node)])
    plugin = ContextGuardPlugin(agents={"writer": Pipeline()}, observe=True)
    line = await say_guarded(caplog, Chat(flow, [plugin]))
    assert line == (
        "Observing app 'app': writer: Pipeline; "
        "every other agent of the workflow: Threshold."
    )


async def test_an_agent_without_a_model_has_its_parents(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No model is made for the line: that could take seconds, or fail."""
    heir, lost = LlmAgent(name="heir"), LlmAgent(name="lost", model="unheard-of")
    llm = SimulatedLlm(model="gemini-2.5-flash")
    root = LlmAgent(name="root", model=llm, sub_agents=[heir, lost])
    line = await say_guarded(caplog, Chat(root, [ContextGuardPlugin()]))
    assert "heir: Threshold, window 1,048,576 tokens (model registry); " in line
    assert "(assumed: nobody knows model 'unheard-of'); " in line


WRONG_WINDOWS: dict[str, tuple[dict[str, Any], str]] = {
    "configured": (
        {"default": Threshold(context_window=16_000)},
        "not 16,000, as configured. ",
    ),
    "registry": (
        {"registry": Registry(16_000)},
        "not 16,000, as the model registry says. ",
    ),
    "assumed": ({}, "not 128,000, as assumed for an unknown model. "),
}


@pytest.mark.parametrize(
    ("guard", "said"), WRONG_WINDOWS.values(), ids=[*WRONG_WINDOWS]
)
async def test_a_window_that_is_wrong_is_one_warning(
    guard: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It names both numbers, who said the wrong one, and the remedy."""
    llm = SimulatedLlm(model=f"wrong-{said}", context_window=8_000, token_ratio=1.0)
    for _ in range(2):
        chat = Chat(LlmAgent(name="agent", model=llm), [ContextGuardPlugin(**guard)])
        await seed(chat, user("The task."), model(words(8_200)))
        assert await chat.say("Go on.")
    assert llm.rejections == 2
    warnings = [each for each in lines(caplog, logging.WARNING) if "provider" in each]
    assert warnings == [
        f"Agent 'agent', model {llm.model!r}: the context window is 8,000 tokens, as "
        f"the provider says, {said}Set context_window=8000 on the agent's strategy."
    ]


async def test_a_window_that_a_rejection_shows_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where the provider names no limit, what it rejected is said, and no other one."""
    error = ContextOverflowError("The prompt is too long.")
    llm = SimulatedLlm(
        model="silent", context_window=1_000_000, script=[error, "Fine."]
    )
    guard = ContextGuardPlugin(default=Threshold(context_window=50_000))
    chat = Chat(LlmAgent(name="agent", model=llm), [guard])
    await seed(chat, user("The task."), model(words(20_000)))
    assert await chat.say("Go on.")
    [line] = [each for each in lines(caplog, logging.WARNING) if "provider" in each]
    assert re.search(
        r"rejected a request of about 3\d,\d{3} tokens as too long, although the "
        r"context window is 50,000, as configured\. ",
        line,
    )
    assert "context_window=" not in line  # Nobody knows it yet.


class Failing(Threshold):
    """A strategy with a mistake."""

    async def compact(self, context: CompactionContext) -> Compaction | None:
        """Fails one call deeper."""
        return divide(context)


def divide(context: CompactionContext) -> Compaction:
    """Fails with a text that quotes the conversation."""
    raise ZeroDivisionError(f"What the user said: {context.contents}")


class FailingReducer(Reducer):
    """A reducer with a mistake."""

    async def reduce(self, reduction: Reduction) -> StrategyResult:
        """Fails one call deeper."""
        divide(reduction.context)
        return StrategyResult.NO_CHANGE


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        (Failing(context_window=4_000), "compact"),
        (Pipeline(context_window=4_000, reducers=(FailingReducer(),)), "reduce"),
    ],
    ids=["strategy", "reducer"],
)
async def test_a_failure_says_where_it_was(
    strategy: Strategy, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With the frames, and without the text, which stands at DEBUG."""
    caplog.set_level(logging.DEBUG, logger="contextguard_adk")
    llm = SimulatedLlm(context_window=1_000_000, token_ratio=1.0)
    plugin = ContextGuardPlugin(default=strategy)
    chat = Chat(LlmAgent(name="agent", model=llm), [plugin])
    await seed(chat, user("The task."), model(words(5_000)), user("Secret."))
    assert await chat.say(words(9_000))
    [line] = lines(caplog, logging.ERROR)
    here = r"tests/test_failsafe\.py:\d+ in "
    assert re.search(rf"ZeroDivisionError at .*{here}{name} > {here}divide\. ", line)
    assert line.endswith(" Its text may quote messages: it is logged at DEBUG.")
    assert "Secret" not in line
    [record] = [r for r in caplog.records if r.exc_info and r.name == LOGGER]
    assert record.levelno == logging.DEBUG
