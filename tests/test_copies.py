"""Copies of a plugin and of an app: the same settings, no memory, and they work."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.runners import Runner

from contextguard_adk import (
    CallRecord,
    CompactionRecord,
    ContextGuardPlugin,
    Costs,
    Pipeline,
    PlannedCompaction,
    SlidingWindow,
    Threshold,
    TodosTool,
)
from contextguard_adk.testing import SimulatedLlm
from tests.builders import Chat, answer_text
from tests.chats import Registry, words
from tests.guarded import NOW, WINDOW, is_compacted

heard: list[CallRecord | CompactionRecord | PlannedCompaction] = []


def listen(record: CallRecord | CompactionRecord) -> None:
    """A listener that copies share, as all functions of a module are."""
    heard.append(record)


def say_nothing(planned: PlannedCompaction) -> None:
    """What is asked before a compaction, and shared as well."""
    heard.append(planned)


def through_pickle(value: Any) -> Any:
    """Writes an object and reads it."""
    return pickle.loads(pickle.dumps(value))


def through_cloudpickle(value: Any) -> Any:
    """Writes an object as Agent Engine does, and reads it."""
    return pickle.loads(cloudpickle.dumps(value))


COPIERS = (copy.deepcopy, copy.copy, through_pickle, through_cloudpickle)
copying = pytest.mark.parametrize("duplicate", COPIERS, ids=lambda f: f.__name__)
Copier = Callable[[Any], Any]


def make_guard(**settings: Any) -> ContextGuardPlugin:
    """A plugin of which no setting is the default."""
    own: dict[str, Any] = {
        "agents": {"other": Pipeline(), "exempt": None},
        "default": Threshold(summarizer_context_window=100_000),
        "registry": Registry(WINDOW),
        "prices": {"simulated": Costs(input=1, output=2)},
        "on_call": listen,
        "before_compaction": say_nothing,
        "on_compaction": listen,
        "name": "own_name",
    }
    return ContextGuardPlugin(**(own | settings))


def make_chat(guard: ContextGuardPlugin) -> Chat:
    """A chat with tools of the guard."""
    llm = SimulatedLlm(context_window=100_000)
    return Chat(LlmAgent(name="agent", model=llm, tools=[TodosTool()]), [guard])


def go_on(chat: Chat, app: App) -> None:
    """Has a copy of the app take over the sessions of a chat."""
    chat.app = app
    chat.runner = Runner(app=app, session_service=chat.sessions)


async def fill(chat: Chat, count: int = 3, tokens: int = 1_500) -> None:
    """Says long things, of which three are too much for the window."""
    for number in range(count):
        assert answer_text(await chat.say(words(tokens, f"part {number}")))


def last_request(app: App) -> Any:
    """What the model of a copy was sent last, but for a summary."""
    agent: Any = app.root_agent
    return [each for each in agent.model.requests if not each.is_summary][-1]


@copying
async def test_a_copy_guards_as_its_original_does(duplicate: Copier) -> None:
    """In mid session a summary stays in place, and none is paid for again."""
    chat = make_chat(make_guard())
    await fill(chat)
    heard.clear()
    plugin = duplicate(chat.app.plugins[0])
    assert plugin is not chat.app.plugins[0]
    go_on(chat, App(name="app", root_agent=chat.app.root_agent, plugins=[plugin]))
    await chat.say("And now?")
    assert is_compacted(last_request(chat.app))
    assert not [r for r in heard if isinstance(r, CompactionRecord)]

    fresh = make_chat(make_guard())
    app = duplicate(chat.app)
    go_on(fresh, app)
    assert app.plugins[0].name == "own_name"
    heard.clear()
    await fill(fresh)
    assert is_compacted(last_request(app))
    assert [r for r in heard if isinstance(r, CompactionRecord)]
    assert [r for r in heard if isinstance(r, PlannedCompaction)]
    calls = [r for r in heard if isinstance(r, CallRecord)]
    assert {r.window_tokens for r in calls} == {WINDOW}
    assert all(r.cost for r in calls)


@copying
async def test_a_copy_has_the_settings_of_a_file(
    duplicate: Copier, tmp_path: Path
) -> None:
    """Whatever the environment names where the copy is read."""
    path = tmp_path / "guard.toml"
    path.write_text(f"[default]\ncontext_window = {WINDOW}\n")
    chat = make_chat(ContextGuardPlugin.from_file(path))
    path.unlink()
    go_on(chat, duplicate(chat.app))
    await fill(chat)
    assert is_compacted(last_request(chat.app))


class Named(ContextGuardPlugin):
    """A plugin of the user's own, with an attribute."""

    def __init__(self, owner: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.owner = owner


@copying
def test_a_subclass_keeps_what_it_has(duplicate: Copier) -> None:
    """The class and its attributes are those of the original."""
    made = duplicate(Named("team", default=SlidingWindow()))
    assert type(made) is Named
    assert made.owner == "team"


@pytest.mark.vertex
@pytest.mark.filterwarnings("ignore::DeprecationWarning:google.*")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:vertexai.*")
async def test_agent_engine_can_clone_an_app() -> None:
    """The clone and its pickle answer, and compact; credentials are not needed."""
    engines = pytest.importorskip("vertexai.agent_engines")
    credentials = pytest.importorskip("google.auth.credentials")
    vertexai = pytest.importorskip("vertexai")
    anonymous = credentials.AnonymousCredentials()
    vertexai.init(project="project", location="us-central1", credentials=anonymous)
    chat = make_chat(make_guard())
    await chat.say(words(1_000, "first"))
    clone = engines.AdkApp(app=chat.app).clone()
    app = through_cloudpickle(clone)._tmpl_attrs["app"]
    go_on(chat, app)
    await chat.set_state(NOW)

    assert answer_text(await chat.say(words(1_000, "second")))
    assert is_compacted(last_request(app))
