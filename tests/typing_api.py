# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""The public API as a user's strict mypy and pyright see it: never run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, assert_type

from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.apps import App
from google.adk.artifacts import InMemoryArtifactService
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import BaseSessionService, Session
from google.adk.tools.tool_context import ToolContext
from google.genai import types

import contextguard_adk as cg
from contextguard_adk import sessions, strategies
from contextguard_adk.records import Usage
from contextguard_adk.testing import RecordedRequest, SimulatedLlm, call


class OwnRegistry:
    """A registry of the user's own."""

    def context_window(self, model: str) -> int | None:
        """Knows one model."""
        return 8_000 if model == "mine" else None

    async def told(self, record: cg.CompactionRecord) -> None:
        """Is told of a compaction."""
        assert_type(record.cost, float | None)


class OwnStrategy(strategies.Strategy):
    """A strategy of the user's own."""

    keep_count: int = 3

    def fullness(self, turn: strategies.Turn) -> float:
        """Says how near it is."""
        assert_type(turn.fullness, float)
        return turn.fullness

    async def compact(
        self, turn: strategies.Turn, ask: strategies.Ask
    ) -> strategies.Draft | None:
        """Covers what is old."""
        assert_type(turn.budgets.window_tokens, int)
        assert_type(turn.tokens, int)
        assert_type(turn.limit_tokens, int)
        assert_type(turn.is_due, bool)
        covered = turn.older_than(self.keep_count)
        assert_type(covered, frozenset[int])
        draft = await ask.summarize(turn, covered, 500)
        assert_type(draft, strategies.Draft)
        assert_type(ask.outcome(turn, draft).tokens, int)
        return draft if ask.attempts else turn.draft


class OwnReducer(strategies.Reducer):
    """A reducer of the user's own."""

    async def reduce(
        self, reduction: strategies.Reduction
    ) -> strategies.StrategyResult:
        """Does nothing."""
        assert_type(reduction.turn, strategies.Turn)
        return strategies.StrategyResult.NO_CHANGE


def on_pressure(record: cg.PressureRecord) -> None:
    """A listener that waits for nothing."""
    assert_type(record.pressure, float)


async def on_compaction(record: cg.CompactionRecord) -> None:
    """A listener that may wait."""
    assert_type(record.tokens_before, int)
    assert_type(record.is_mechanical, bool)
    assert_type(record.is_recovery, bool)


def before_compaction(planned: cg.PlannedCompaction) -> str | None:
    """Is asked before a compaction."""
    assert_type(planned.messages, tuple[types.Content, ...])
    return "names" if planned.tokens > planned.threshold_tokens else None


def after_summary(planned: cg.PlannedSummary) -> str | None:
    """Is shown a summary."""
    assert_type(planned.messages, tuple[types.Content, ...])
    return planned.text.upper() if planned.model else None


async def refuse(planned: cg.PlannedSummary) -> Literal[False]:
    """Refuses every summary."""
    return False


async def put_off(planned: cg.PlannedCompaction) -> Literal[False]:
    """Puts every compaction off."""
    return False


def choose(context: CallbackContext) -> cg.Threshold | None:
    """Chooses a strategy for a call."""
    return cg.Threshold() if context.state.get("plan") else None


def on_call(record: cg.CallRecord) -> None:
    """A listener for every call."""
    assert_type(record.real_tokens, int | None)
    assert_type(record.compaction, cg.CompactionRecord | None)
    assert_type(record.usage + record.summary_usage, Usage)
    assert_type(record.summary_cost, float | None)


records: list[cg.CompactionRecord] = []


def make_strategies(model: BaseLlm) -> dict[str, strategies.Strategy]:
    """Every setting of every strategy, by each of its names and types."""
    threshold = cg.Threshold(
        context_window=1_000_000,
        trigger=0.5,
        preview_tokens=4_000,
        ahead=True,
        keep=2_000,
        max_compaction_attempts=2,
        recall=False,
        recall_page_tokens=1_000,
        binds_thoughts=True,
        summarizer=model,
        summarizer_context_window=200_000,
        summary_timeout_seconds=30,
        summary_instruction="Summarize in {max_words} words.",
        reuse_prompt_cache=False,
        keep_tools=["get_rules", "load_plan"],
    )
    assert_type(threshold.keep_tools, Sequence[str])
    assert_type(threshold.context_window, int | None)
    assert_type(threshold.max_tokens, int | None)
    assert_type(threshold.trigger_tokens(8_000), int | None)

    sliding = cg.SlidingWindow(max_turns=30, max_tokens=8_000, trigger=4_000)
    assert_type(sliding.max_messages + sliding.max_turns, int)

    pipeline = cg.Pipeline(
        max_tokens=None,
        trigger="auto",
        preview_tokens=None,
        ahead=0.95,
        keep=0.1,
        recall="auto",
        reuse_prompt_cache="auto",
        summarizer="gemini-flash-latest",
        window=strategies.MessageWindow(
            window_size=20,
            min_messages_before_windowing=10,
            strict_window_size=True,
            preserve_system=False,
            preserve_initial_task=False,
        ),
        tool_output=strategies.ToolOutputTruncation(
            max_length=2_000,
            show_truncation_notice=False,
            smart_truncate=True,
            head_length=1_000,
            tail_length=500,
            preserve_last_tool_result=False,
        ),
        summary=strategies.SummaryCompaction(
            trigger_threshold=0.8,
            target_token_ratio=0.4,
            min_messages_for_summary=10,
            preserve_recent_count=4,
        ),
        reducers=[OwnReducer(), strategies.TokenWindow(budget_tokens=4_000)],
        keep_tools=("get_rules",),
        compression_threshold=0.7,
    )

    bare = cg.Pipeline(
        window=strategies.TokenWindow(budget_tokens=0.4, preserve_system=False),
        tool_output=None,
        summary=None,
        reducers=(strategies.ClearToolResults(exclude_tools=["get_rules"]),),
    )
    own = OwnStrategy(keep_count=5, max_tokens=8_000, summarizer="gemini-flash-latest")
    plain = cg.SlidingWindow(max_messages=30, ahead=None)

    return {
        "a": threshold,
        "b": sliding,
        "c": pipeline,
        "d": bare,
        "e": own,
        "f": plain,
    }


def make_app(model: BaseLlm) -> App:
    """Every way to make a guard, which is a plugin of an app."""
    registry: cg.ModelRegistry = OwnRegistry()
    plugin = cg.ContextGuardPlugin(
        agents=make_strategies(model),
        default=None,
        observe=True,
        registry=registry,
        state_keys="namespaced",
        warning_threshold=0.5,
        prices={"in-house": cg.Costs(input=0.2, output=0.8, cached_input=0.02)},
        max_background_summaries=2,
        summary_artifacts=True,
        usage_in_state=False,
        user_ids="plain",
        listener_timeout_seconds=2,
        on_pressure=on_pressure,
        on_compaction=on_compaction,
        on_call=on_call,
        before_compaction=before_compaction,
        after_summary=after_summary,
        name="guard",
    )

    windows = {"a": cg.SlidingWindow(), "b": cg.SlidingWindow(max_turns=9)}
    exempt: dict[str, cg.Threshold | None] = {"a": cg.Threshold(), "b": None}
    of_subclass = cg.ContextGuardPlugin(agents=windows, default=cg.Threshold())
    some = cg.ContextGuardPlugin(agents=exempt, on_compaction=records.append)

    from_file = cg.ContextGuardPlugin.from_file(
        Path("contextguard.toml"),
        registry=registry,
        on_pressure=lambda record: None,
        on_compaction=OwnRegistry().told,
        on_call=on_call,
        before_compaction=put_off,
        after_summary=refuse,
        name="guard",
    )

    chosen = cg.ContextGuardPlugin(agents={"a": choose, "b": None}, default=choose)
    plugins: list[BasePlugin] = [cg.ContextGuardPlugin(), plugin, of_subclass, some]
    plugins.append(chosen)
    return App(name="app", plugins=[*plugins, from_file])


def ask(tool_context: ToolContext, callback_context: CallbackContext) -> None:
    """A tool, a callback, or whoever sends a message may ask for a compaction."""
    cg.request_compaction(tool_context.state)
    cg.request_compaction(callback_context.state, "agent")
    cg.request_compaction({}, agent="agent", focus="file names")
    LlmAgent(name="agent", tools=[cg.CompactTool(), cg.CompactTool("file names")])


def keep_word_for_word(tool_context: ToolContext) -> None:
    """A tool, a callback, or whoever sends a message may pin a text."""
    assert_type(cg.pin(tool_context.state, "Ask first."), str)
    cg.unpin(tool_context.state, cg.pin({}, "Ask.", key="rule", agent="agent"), "agent")
    LlmAgent(name="agent", tools=[cg.PinTool()])


async def change_session(service: BaseSessionService, session: Session) -> None:
    """What is stored can be shown and changed."""
    assert_type(sessions.show(session, is_full=True), list[str])
    assert_type(await sessions.compact(service, session, "agent", "names"), str)
    assert_type(await sessions.reset(service, session, force=True), str)
    assert_type(await sessions.edit(service, session, "Text.", "agent"), str)
    assert_type(await sessions.leave(service, session), str)
    place = {"app_name": "app", "user_id": "user", "session_id": "session"}
    assert_type(await sessions.purge(InMemoryArtifactService(), **place), int)


def make_model() -> SimulatedLlm:
    """The offline provider is for users too."""

    async def answer(request: LlmRequest) -> str:
        return f"{len(request.contents)} contents"

    scripted = SimulatedLlm(script=[call("tidy_up"), "Done.", RuntimeError("down")])
    assert_type(scripted.requests, list[RecordedRequest])
    return SimulatedLlm(context_window=8_000, script=answer)


def wrong_types() -> list[type[cg.ContextGuardError]]:
    """What type checkers refuse, and the errors that can be caught."""
    cg.ContextGuardPlugin(agents={"a": 1})  # type: ignore[dict-item]
    cg.ContextGuardPlugin(default=cg.Threshold)  # type: ignore[arg-type]
    cg.ContextGuardPlugin(prices={"a": 1})  # type: ignore[dict-item]
    cg.ContextGuardPlugin(state_keys="flat")  # type: ignore[arg-type]
    cg.ContextGuardPlugin(default=before_compaction)  # type: ignore[arg-type]
    cg.ContextGuardPlugin(before_compaction=on_call)  # type: ignore[arg-type]
    cg.ContextGuardPlugin(after_summary=put_off)  # type: ignore[arg-type]
    cg.ContextGuardPlugin(on_pressure=on_compaction)  # type: ignore[arg-type]
    cg.Threshold(keep_tools=[1])  # type: ignore[list-item]
    cg.Threshold(keep_tools=5)  # type: ignore[arg-type]
    cg.Pipeline(reducers=["x"])  # type: ignore[list-item]
    cg.Threshold(context_window="8k")  # type: ignore[arg-type]
    cg.Threshold(window=8_000)  # type: ignore[call-arg]
    cg.SlidingWindow(max_turns="9")  # type: ignore[arg-type]
    cg.Threshold(max_tokens=8_000.5)  # type: ignore[arg-type]
    strategies.Strategy()  # type: ignore[abstract]
    return [cg.ConfigError, cg.ContextGuardError]
