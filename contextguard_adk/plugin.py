"""The ADK plugin: callbacks in, one boundary around everything that is ours."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.plugins.plugin_manager import PluginManager

from contextguard_adk._announce import (
    FROM_FILE,
    GUARD_ALL,
    TWO_COMPACTIONS,
    TWO_GUARDS,
    announce_app,
    check_arguments,
    choose_settings,
    choose_strategy,
    tell_callbacks,
)
from contextguard_adk._core.after_call import end_run, take_answer
from contextguard_adk._core.after_error import answer_error
from contextguard_adk._core.call import Call
from contextguard_adk._core.fit import cut_request
from contextguard_adk._core.loop import guard_call
from contextguard_adk._core.unguarded import warn_of_whole_history
from contextguard_adk._measuring.budgets import threshold_tokens
from contextguard_adk._providers.clients import find_llm
from contextguard_adk._providers.costs import Costs
from contextguard_adk._providers.registry import ModelRegistry, resolve_context_window
from contextguard_adk._runtime.adk_tree import declares_state_schema
from contextguard_adk._runtime.runs import Guard, call_key
from contextguard_adk._runtime.state import OFF_KEY, SUMMARIES_KEY
from contextguard_adk._support.log import REDACTORS, log_failures, warn_once
from contextguard_adk._support.observers import BeforeCompaction, Listener, Observers
from contextguard_adk._support.redaction import Redactor
from contextguard_adk._turn.settings import Summaries
from contextguard_adk.config import (
    Chooser,
    PluginSettings,
    StateKeys,
    is_recorded_test,
    load_settings,
)
from contextguard_adk.records import CallRecord, CompactionRecord, PressureRecord
from contextguard_adk.strategies.base import Strategy

logger = logging.getLogger("contextguard_adk.plugin")
_log_failures = functools.partial(log_failures, logger)


class ContextGuardPlugin(BasePlugin):
    """Keeps every guarded agent's requests inside its model's context window.

    Each request is measured before it is sent. When the window is nearly full, the
    agent's strategy replaces history by a summary, which stays in place on later
    calls. Without arguments every LLM agent is guarded with `Threshold()`. Register
    it last, so that it sees what the model will see.

    Args:
        agents: A strategy per agent name; None exempts an agent. A function of the
            callback context that returns one of these is asked before each model call.
        default: The strategy of agents that are not named, or such a function; None
            guards only the named ones.
        observe: Measures and reports, but changes no request and stores no summary.
        registry: Where windows and prices of models are looked up; None reads the
            table that litellm ships.
        summaries: "stored" stops paying at once: what was compacted stays compacted,
            no new summary is asked for, and what does not fit is cut to excerpts
            without a model. "write" leaves it to each strategy, and to the session's
            state (`context_guard:summaries`).
        state_keys: Which form of session-state keys to write. "plain" is
            `__context_guard_summary_{agent}`, "namespaced" is
            `context_guard:summary:{agent}`; "auto" takes the latter where anything
            in the app declares a `state_schema`.
        warning_threshold: Of the context window, more than 0 and at most 1; a request
            that is still above it after compaction is reported.
        prices: What models cost, by the name that the agent's request carries; they go
            before those of the registry.
        max_background_summaries: How many summaries are written ahead of time (see
            `ahead` of the strategies) at once, at least 1; others wait.
        summary_artifacts: Whether each compaction saves its summary as the artifact
            `compaction-{agent}.md`, which ADK does not delete with the session.
        usage_in_state: Whether session state has one line about how full the window is.
        recent_events: Whether sessions may be loaded in part, by `load_recent`.
        user_ids: How records, traces and log lines name a user: "hashed" or "plain".
        listener_timeout_seconds: How long a model call waits for a listener, more than
            0 and at most 3,600.
        on_pressure: A function, sync or async, told of such a request.
        on_compaction: A function, sync or async, told of every compaction.
        on_call: A function, sync or async, told of every answered model call.
        before_compaction: A function, sync or async, asked before a compaction is paid
            for. It returns None, a focus for the summarizer, or False to put it off.
        redact: A sync function that takes a text and returns it without what must not
            reach a summarizer, session state, an artifact or a result of recall.
        name: The plugin's name; ADK passes one under `--extra_plugins`.
        strict: What happens if the file in the environment is wrong (see below). False
            logs one line at ERROR and guards every agent with the defaults; True, or
            the environment variable `CONTEXTGUARD_STRICT=1`, raises a `ConfigError`,
            which ADK only logs under `--extra_plugins`: the app then runs unguarded.

    With nothing but `registry`, listeners, `name` and `strict` given, the file is read
    that the environment variable `CONTEXTGUARD_CONFIG` names.

    Raises:
        TypeError: An argument is another kind of object than is expected.
        ValueError: A value is not accepted.
        ConfigError: The file is wrong, and `strict` is set.
    """

    def __init__(
        self,
        *,
        agents: Mapping[str, Strategy | Chooser | None] | None = None,
        default: Strategy | Chooser | None = GUARD_ALL,
        observe: bool = False,
        summaries: Summaries = "write",
        registry: ModelRegistry | None = None,
        state_keys: StateKeys = "auto",
        warning_threshold: float = 0.70,
        prices: Mapping[str, Costs] | None = None,
        max_background_summaries: int = 4,
        summary_artifacts: bool = False,
        usage_in_state: bool = True,
        recent_events: bool = False,
        user_ids: Literal["hashed", "plain"] = "hashed",
        listener_timeout_seconds: float = 5.0,
        on_pressure: Listener[PressureRecord] | None = None,
        on_compaction: Listener[CompactionRecord] | None = None,
        on_call: Listener[CallRecord] | None = None,
        before_compaction: BeforeCompaction | None = None,
        redact: Callable[[str], str] | None = None,
        name: str = "context_guard",
        strict: bool = False,
    ) -> None:
        super().__init__(name=name)
        check_arguments(agents, default, registry)
        settings = PluginSettings(
            agents=agents or {},
            default=default,
            observe=observe,
            summaries=summaries,
            state_keys=state_keys,
            warning_threshold=warning_threshold,
            prices=prices or {},
            max_background_summaries=max_background_summaries,
            summary_artifacts=summary_artifacts,
            usage_in_state=usage_in_state,
            recent_events=recent_events,
            user_ids=user_ids,
            listener_timeout_seconds=listener_timeout_seconds,
        )
        given = settings
        settings = choose_settings(settings, default, strict)
        self._redactor = Redactor(redact)
        self.is_shared = settings is not given  # One variable serves all apps.
        self._listeners = (on_pressure, on_compaction, on_call, before_compaction)
        self._start(registry, settings)

    def _start(self, registry: ModelRegistry | None, settings: PluginSettings) -> None:
        self._guard = Guard(registry)
        self._seen_apps = set[str]()
        self.settings = settings
        self.registry = registry
        self._guard.prices = settings.prices
        self._guard.tasks.most = settings.max_background_summaries
        self._guard.has_artifacts = settings.summary_artifacts
        self._guard.has_usage = settings.usage_in_state
        self._guard.loads_recent = settings.recent_events
        self._guard.has_plain_users = settings.user_ids == "plain"
        self._guard.has_namespaced_keys = settings.state_keys == "namespaced"
        self._guard.redactor = self._redactor
        if self._redactor:
            REDACTORS.add(self._redactor)
        ratio = settings.warning_threshold
        seconds = settings.listener_timeout_seconds
        self._guard.observers = Observers(ratio, seconds, *self._listeners)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy gets: the settings, and no memory."""
        return {**vars(self), "_guard": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start(self.registry, self.settings)

    @property
    def has_namespaced_keys(self) -> bool:
        """Whether session-state keys have the form `context_guard:<name>:{agent}`."""
        return self._guard.has_namespaced_keys

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        registry: ModelRegistry | None = None,
        on_pressure: Listener[PressureRecord] | None = None,
        on_compaction: Listener[CompactionRecord] | None = None,
        on_call: Listener[CallRecord] | None = None,
        before_compaction: BeforeCompaction | None = None,
        redact: Callable[[str], str] | None = None,
        name: str = "context_guard",
    ) -> Self:
        """Makes a guard with the settings of a TOML or YAML file.

        Args:
            path: The file; its name ends in `.toml`, `.yaml` or `.yml`. All other
                arguments are as for the class.

        Raises:
            ConfigError: The file cannot be read, or a setting in it is wrong.
        """
        plugin = cls(default=FROM_FILE, registry=registry, redact=redact, name=name)
        plugin._listeners = (on_pressure, on_compaction, on_call, before_compaction)
        plugin._start(registry, load_settings(path))
        return plugin

    async def before_run_callback(
        self, *, invocation_context: InvocationContext
    ) -> None:
        """Decides which form of state keys this app needs; says what is guarded."""
        with _log_failures("The guard could not look at the app"):
            root = getattr(invocation_context.agent, "root_agent", None)
            guard = self._guard
            # Once chosen it stays: the delta of an AgentTool's run goes to the parent.
            if self.settings.state_keys == "auto" and not guard.has_namespaced_keys:
                # If the search fails, such keys pass in any case.
                guard.has_namespaced_keys = True
                # ADK shows no plugin the workflow at the root; it may declare a schema.
                guard.has_namespaced_keys = root is None or declares_state_schema(root)
            app = invocation_context.session.app_name
            # An app's first run alone shows all of it, an AgentTool's only its own.
            if app not in self._seen_apps:
                self._seen_apps.add(app)
                announce_app(app, root, self.settings, guard.registry, self.is_shared)
                if not guard.redactor:
                    tell_callbacks(app, root)

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Compacts the request where it has to; otherwise leaves it as it came."""
        with _log_failures(
            "The guard could not tell whether a request is its own, or could not cut it"
        ):
            # What is remembered of an earlier call does not describe this one.
            run = self._guard.run(callback_context.get_invocation_context())
            run.calls.pop(call_key(callback_context), None)
            strategy = self._strategy_for(callback_context, llm_request)
            if strategy is not None:
                await self._fit(callback_context, llm_request, strategy)
            if strategy is None or self.settings.observe:
                self._warn_of_whole_history(callback_context, llm_request)

    async def after_model_callback(
        self, *, callback_context: CallbackContext, llm_response: LlmResponse
    ) -> None:
        """Stores the prompt tokens that the provider counted, and reports the call."""
        with _log_failures("The guard could not store the provider's token count"):
            await take_answer(self._guard, callback_context, llm_response, self)

    async def on_model_error_callback(
        self,
        *,
        callback_context: CallbackContext,
        llm_request: LlmRequest,
        error: Exception,
    ) -> LlmResponse | None:
        """Sends a request that the provider found too long again, smaller."""
        with _log_failures(
            f"The recovery failed for agent {callback_context.agent_name!r}"
        ):
            strategy = self._strategy_for(callback_context, llm_request)
            if self.settings.observe or is_recorded_test():
                strategy = None
            return await answer_error(
                self._guard, callback_context, llm_request, error, strategy, self
            )
        return None

    async def on_event_callback(
        self, *, invocation_context: InvocationContext, event: Event
    ) -> None:
        """Lets the event carry the state that was written, and tell what was done."""
        with _log_failures("The guard could not have an event carry its state"):
            self._guard.hand_over(event, invocation_context)

    async def after_run_callback(
        self, *, invocation_context: InvocationContext
    ) -> None:
        """Forgets the model calls of a finished run."""
        with _log_failures("The guard could not end a run"):
            end_run(self._guard.pop_run(invocation_context))

    async def close(self) -> None:
        """Waits up to one second for summaries under way, then cancels them."""
        # ADK 2.0 closes all plugins when the run of an AgentTool ends.
        if hasattr(PluginManager, "set_skip_closing_plugins"):
            await self._guard.tasks.close()

    def _warn_of_whole_history(
        self, context: CallbackContext, request: LlmRequest
    ) -> None:
        switch = self._name_switch(context, request)
        if switch:
            warn_of_whole_history(self._guard, context, request, switch)

    def _name_switch(self, context: CallbackContext, request: LlmRequest) -> str:
        """Says what has the guard change no request of its own; "" for nothing."""
        if self.settings.observe:
            return "where the guard only observes"
        if context.session.state.get(OFF_KEY) is True:
            return f"where {OFF_KEY} is set"
        is_ours = self._is_ours(context, request)
        return "where the agent is not guarded" if is_ours else ""

    def _strategy_for(
        self, context: CallbackContext, request: LlmRequest
    ) -> Strategy | None:
        """The strategy to apply; None where the request is not ours to change."""
        strategy = self._strategy_of(context.agent_name)
        if strategy is None or not self._is_ours(context, request):
            return None
        chosen = choose_strategy(strategy, context)
        if chosen is None or not self._is_unpaid(context):
            return chosen
        return chosen.model_copy(update={"summaries": "stored"})

    def _is_unpaid(self, context: CallbackContext) -> bool:
        """Whether plugin or session say that no summary is to be paid for."""
        said = context.session.state.get(SUMMARIES_KEY)
        if said not in (None, "stored", "write"):
            message = 'Session state %r is neither "stored" nor "write": ignored.'
            warn_once(logger, message, SUMMARIES_KEY)
        return self.settings.summaries == "stored" or said == "stored"

    def _strategy_of(self, agent: str) -> Strategy | Chooser | None:
        return self.settings.agents.get(agent, self.settings.default)

    async def _fit(
        self, context: CallbackContext, request: LlmRequest, strategy: Strategy
    ) -> None:
        """Compacts a request, or cuts it with nothing but its contents."""
        observe = self.settings.observe
        guard = self._guard
        then = "" if observe else ", whose history is cut to fit"
        with _log_failures(f"The guard failed for agent {context.agent_name!r}{then}"):
            if not is_recorded_test():
                await guard_call(Call(guard, context, request, strategy, observe))
                return
        if observe:
            return
        window = resolve_context_window(
            request.model or "",
            configured=strategy.context_window,
            registry=guard.registry,
        )
        llm = find_llm(context.get_invocation_context().agent)
        cut_request(request, threshold_tokens(window.tokens), llm)

    def _is_ours(self, context: CallbackContext, request: LlmRequest) -> bool:
        """Whether the request carries a history that is ours to change."""
        invocation = context.get_invocation_context()
        is_held = getattr(request, "previous_interaction_id", None)  # By the provider.
        is_off = invocation.session.state.get(OFF_KEY) is True
        if is_off or is_held or invocation.live_request_queue is not None:
            return False
        app = invocation.session.app_name
        guards = (
            plugin
            for plugin in invocation.plugin_manager.plugins
            if isinstance(plugin, ContextGuardPlugin)
            and plugin._strategy_of(context.agent_name) is not None
        )
        if (first := next(guards, self)) is not self:
            warn_once(logger, TWO_GUARDS, app, first.name, self.name)
            return False
        adk_compaction = getattr(invocation, "events_compaction_config", None)
        if adk_compaction and not self.settings.observe:
            warn_once(logger, TWO_COMPACTIONS, app)
        return True
