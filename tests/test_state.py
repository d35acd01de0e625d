"""The guard's keys in session state, which anybody may have written."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.sessions.state import State
from google.adk.tools.agent_tool import AgentTool
from google.adk.workflow import Workflow, node
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from contextguard_adk.history import state as state_module
from contextguard_adk.history.state import (
    COMPACT_NOW_KEY,
    MAX_COUNT,
    GuardState,
    declares_state_schema,
    request_compaction,
)
from contextguard_adk.history.stored_summary import SummaryMark

PLAIN, SPACED = "__context_guard_summary_agent", "context_guard:summary:agent"


class CountingDict(dict[str, Any]):
    """A dict that remembers which keys were set."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.writes: list[str] = []

    def __setitem__(self, key: str, value: Any) -> None:
        self.writes.append(key)
        super().__setitem__(key, value)


@pytest.fixture(autouse=True)
def _fresh_warnings() -> Iterator[None]:
    """Forgets which values were warned about."""
    state_module._warn_once.cache_clear()
    yield
    state_module._warn_once.cache_clear()


# --- keys ---


@pytest.mark.parametrize(
    ("is_namespaced", "key"), [(False, PLAIN), (True, SPACED)], ids=["plain", "colons"]
)
def test_both_forms_are_read_and_one_is_written(is_namespaced: bool, key: str) -> None:
    """Values are found under either form of the key; the agent's app decides which."""
    for stored in (PLAIN, SPACED):
        guard = GuardState({stored: "text"}, "agent", is_namespaced)
        assert guard.read("summary") == guard.read_text("summary") == "text"
    values = CountingDict()
    GuardState(values, "agent", is_namespaced).write("summary", "new")
    assert values == {key: "new"}


@pytest.mark.parametrize("is_namespaced", [False, True], ids=["plain", "colons"])
def test_own_form_is_read_first(is_namespaced: bool) -> None:
    """Where both forms exist the one that is written counts."""
    guard = GuardState({PLAIN: "plain", SPACED: "colons"}, "agent", is_namespaced)
    assert guard.read_text("summary") == ("colons" if is_namespaced else "plain")


def test_agents_do_not_share_values() -> None:
    """Each agent has its own keys."""
    values: dict[str, Any] = {}
    GuardState(values, "agent").write("summary", "text")
    assert GuardState(values, "other").read("summary") is None


# --- writing ---


def test_values_are_written_only_when_they_change() -> None:
    """An unchanged value costs no state delta."""
    values = CountingDict({PLAIN: "text"})
    guard = GuardState(values, "agent")
    guard.write("summary", "text")
    assert values.writes == []
    guard.write("summary", "new")
    assert values.writes == [PLAIN]


def test_none_only_overwrites() -> None:
    """State has no delete: None is written where there is something, once."""
    values = CountingDict()
    guard = GuardState(values, "agent")
    guard.write("summary", None)
    assert values == {}
    guard.write("summary", "text")
    guard.write("summary", None)
    guard.write("summary", None)
    assert values.writes == [PLAIN, PLAIN]
    assert values == {PLAIN: None}


@pytest.mark.parametrize("is_namespaced", [False, True], ids=["plain", "colons"])
def test_reset_leaves_the_other_form_alone(is_namespaced: bool) -> None:
    """A schema may forbid the other key: its value is hidden, not overwritten."""
    own, other = (SPACED, PLAIN) if is_namespaced else (PLAIN, SPACED)
    values = CountingDict({other: 7})
    guard = GuardState(values, "agent", is_namespaced)
    assert guard.read_count("summary") == 7
    guard.write("summary", None)
    guard.write("summary", None)
    assert values.writes == [own]
    assert values[other] == 7
    assert guard.read_count("summary") is None
    assert guard.read_text("summary") == ""


def test_works_on_adks_state() -> None:
    """ADK's own state takes the same reads and writes, with their delta."""
    values = State({PLAIN: "text"}, {})
    guard = GuardState(values, "agent")
    assert guard.read_text("summary") == "text"
    guard.write("summary", "new")
    request_compaction(values)
    assert values.to_dict() == {PLAIN: "new", COMPACT_NOW_KEY: True}


# --- reading what others may have written ---


@pytest.mark.parametrize(
    ("stored", "text", "is_warned"),
    [
        pytest.param("text", "text", False, id="text"),
        pytest.param("", "", False, id="empty"),
        pytest.param(None, "", False, id="none"),
        pytest.param(0, "", False, id="hidden"),
        pytest.param(7, "", True, id="number"),
        pytest.param(["text"], "", True, id="list"),
        pytest.param({}, "", True, id="dict"),
        pytest.param(b"text", "", True, id="bytes"),
    ],
)
def test_text_of_any_type(
    stored: object, text: str, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What is no text counts as absent, with one warning that hides the value."""
    guard = GuardState({PLAIN: stored}, "agent")
    with caplog.at_level(logging.WARNING, "contextguard_adk.history.state"):
        assert [guard.read_text("summary") for _ in range(3)] == [text] * 3
    assert len(caplog.records) == is_warned
    if is_warned:
        assert PLAIN in caplog.text
        assert type(stored).__name__ in caplog.text


@pytest.mark.parametrize(
    ("stored", "count", "is_warned"),
    [
        pytest.param(7, 7, False, id="int"),
        pytest.param(7.0, 7, False, id="float-from-a-database"),
        pytest.param(7.9, 7, False, id="fraction"),
        pytest.param(1, 1, False, id="one"),
        pytest.param(MAX_COUNT, MAX_COUNT, False, id="largest"),
        pytest.param(None, None, False, id="none"),
        pytest.param(0, None, False, id="zero"),
        pytest.param(0.5, None, True, id="less-than-one"),
        pytest.param(-7, None, True, id="negative"),
        pytest.param(math.nan, None, True, id="nan"),
        pytest.param(math.inf, None, True, id="infinity"),
        pytest.param(10**400, None, True, id="longer-than-a-float"),
        pytest.param(True, None, True, id="true"),
        pytest.param("7", None, True, id="text"),
        pytest.param([7], None, True, id="list"),
    ],
)
def test_count_of_any_type(
    stored: object,
    count: int | None,
    is_warned: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is no positive number counts as absent, with one warning."""
    guard = GuardState({PLAIN: stored}, "agent")
    with caplog.at_level(logging.WARNING, "contextguard_adk.history.state"):
        assert [guard.read_count("summary") for _ in range(3)] == [count] * 3
    assert len(caplog.records) == is_warned


# --- the mark ---

MARKS = st.builds(
    SummaryMark,
    scope=st.text(),
    invocation=st.text(),
    request=st.text(),
    request_chars=st.integers(-1, 10**9),
    has_continuation=st.booleans(),
    model_summary_chars=st.integers(0, 10**9),
    model_covered_count=st.integers(0, 10**9),
)


@given(MARKS)
def test_mark_is_read_back(mark: SummaryMark) -> None:
    """A mark survives its storage as one flat string."""
    assert SummaryMark.from_json(mark.to_json()) == mark
    assert (
        GuardState({"__context_guard_mark_a": mark.to_json()}, "a").read_mark() == mark
    )


def test_mark_of_another_release() -> None:
    """Fields that are missing have their defaults, and unknown ones are ignored."""
    stored = json.dumps({"scope": "s", "added_later": [1]})
    assert SummaryMark.from_json(stored) == SummaryMark(scope="s")


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param("no json", id="no-json"),
        pytest.param("[1]", id="list"),
        pytest.param("null", id="null"),
        pytest.param('"text"', id="text"),
        pytest.param('{"scope": 1}', id="scope-number"),
        pytest.param('{"scope": null}', id="scope-null"),
        pytest.param('{"request_chars": "7"}', id="chars-text"),
        pytest.param('{"request_chars": 7.0}', id="chars-float"),
        pytest.param('{"request_chars": true}', id="chars-bool"),
        pytest.param('{"has_continuation": 1}', id="bool-number"),
        pytest.param("[" * 100_000, id="deep"),
        pytest.param('{"request_chars": ' + "9" * 5_000 + "}", id="long-number"),
    ],
)
def test_broken_mark_is_absent(stored: str, caplog: pytest.LogCaptureFixture) -> None:
    """A mark that is none is ignored, with one warning."""
    guard = GuardState({"__context_guard_mark_agent": stored}, "agent")
    with caplog.at_level(logging.WARNING, "contextguard_adk.history.state"):
        assert guard.read_mark() is guard.read_mark() is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize("stored", [None, "", 0], ids=["none", "empty", "hidden"])
def test_no_mark(stored: object, caplog: pytest.LogCaptureFixture) -> None:
    """Where there is no mark nobody is warned."""
    assert (
        GuardState({"__context_guard_mark_agent": stored}, "agent").read_mark() is None
    )
    assert caplog.records == []


# --- asking for a compaction ---


@pytest.mark.parametrize(
    ("agent", "asked"),
    [
        pytest.param(None, {"agent", "other"}, id="any-agent"),
        pytest.param("", {"agent", "other"}, id="no-name"),
        pytest.param("agent", {"agent"}, id="one-agent"),
    ],
)
def test_requested_compaction(agent: str | None, asked: set[str]) -> None:
    """A request reaches its agent, or whoever comes first, and is served once."""
    values = CountingDict()
    request_compaction(values, agent)
    found = {
        name
        for name in ("agent", "other")
        if GuardState(values, name).is_compaction_requested()
    }
    assert found == asked
    guard = GuardState(values, "agent")
    guard.clear_compaction_request()
    assert not guard.is_compaction_requested()
    writes = len(values.writes)
    guard.clear_compaction_request()
    assert len(values.writes) == writes


@pytest.mark.parametrize("stored", [None, False, 0, 1, "yes", ["x"]])
def test_only_true_requests_a_compaction(stored: object) -> None:
    """Another value under the key requests nothing."""
    assert not GuardState({COMPACT_NOW_KEY: stored}, "agent").is_compaction_requested()


def test_keys_pass_where_a_schema_is_declared() -> None:
    """A schema checks undeclared keys unless they have a colon."""
    values = CountingDict()
    request_compaction(values)
    request_compaction(values, "agent")
    GuardState(values, "agent", is_namespaced=True).write("summary", "text")
    assert all(":" in key for key in values)


# --- state schemas in an agent tree ---


class Schema(BaseModel):
    """Declares one key."""

    topic: str = ""


def agent(
    name: str = "agent", *, has_schema: bool = False, **settings: Any
) -> LlmAgent:
    """An agent, with or without a schema."""
    if has_schema:
        settings["state_schema"] = Schema
    return LlmAgent(name=name, model="m", **settings)


def nested(inner: LlmAgent) -> LlmAgent:
    """An agent two levels above another."""
    return agent("root", sub_agents=[agent("first"), agent("mid", sub_agents=[inner])])


def workflow(*nodes: Any, **settings: Any) -> Workflow:
    """A workflow that runs these nodes one after the other."""
    return Workflow(name="flow", edges=[("START", *nodes)], **settings)


@pytest.mark.parametrize("has_schema", [True, False], ids=["schema", "no-schema"])
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda inner: inner, id="root"),
        pytest.param(nested, id="sub-agent"),
        pytest.param(lambda inner: agent(tools=[AgentTool(inner)]), id="agent-tool"),
        pytest.param(
            lambda inner: agent(tools=[len, AgentTool(nested(inner))]),
            id="below-an-agent-tool",
        ),
        pytest.param(lambda inner: workflow(agent("first"), inner), id="workflow"),
        pytest.param(
            lambda inner: workflow(node(inner, parallel_worker=True)),
            id="parallel-node",
        ),
        pytest.param(
            lambda inner: workflow(agent("first", tools=[AgentTool(inner)])),
            id="tool-in-a-workflow",
        ),
    ],
)
def test_schema_is_found(wrap: Any, has_schema: bool) -> None:
    """A schema is found wherever in the tree an agent declares it."""
    assert (
        declares_state_schema(wrap(agent("inner", has_schema=has_schema))) is has_schema
    )


def test_schema_of_a_workflow() -> None:
    """A workflow may declare a schema itself."""
    assert declares_state_schema(workflow(agent(), state_schema=Schema))
    assert not declares_state_schema(workflow(agent()))


class Tree:
    """Something with children, as another ADK may build it."""

    def __init__(self, **children: Any) -> None:
        vars(self).update(children)


def test_odd_trees_end() -> None:
    """Cycles, missing nodes and attributes of other types are survived."""
    tree = Tree(sub_agents=None, tools=len, graph=Tree(nodes={}))
    tree.agent = tree  # type: ignore[attr-defined]
    assert not declares_state_schema(tree)
    assert not declares_state_schema(None)
    assert declares_state_schema(Tree(tools=[Tree(node=Tree(state_schema=Schema))]))
