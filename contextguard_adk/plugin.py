"""The ADK plugin: its callbacks, none of which lets a failure of the guard through."""

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

from contextguard_adk._core.after_call import record_answer, warn_of_silence
from contextguard_adk._core.after_error import FailedCall, answer_error
from contextguard_adk._plugin.arguments import check_arguments, check_functions
from contextguard_adk._plugin.base import GuardPlugin
from contextguard_adk._plugin.first_run import look_at_app
from contextguard_adk._plugin.reloading import reload_if_changed, reload_settings
from contextguard_adk._plugin.requests import (
    find_strategy,
    guard_request,
    is_recorded_test,
    warn_of_lost_compaction,
    warn_of_switch,
)
from contextguard_adk._plugin.sources import (
    GUARD_ALL,
    SettingsFile,
    choose_settings,
    read_file,
)
from contextguard_adk._providers.costs import Costs
from contextguard_adk._providers.registry import ModelRegistry
from contextguard_adk._runtime.adk_objects import make_plugin_manager
from contextguard_adk._runtime.observers import (
    AfterSummary,
    BeforeCompaction,
    Listener,
    Listeners,
    Observers,
)
from contextguard_adk._runtime.runs import Guard, call_key
from contextguard_adk._runtime.settings import SummaryBudget
from contextguard_adk._support.log import REDACTORS, log_failures
from contextguard_adk._support.redaction import Redactor
from contextguard_adk._support.settings import Summaries
from contextguard_adk.config import Chooser, PluginSettings, StateKeys
from contextguard_adk.records import CallRecord, CompactionRecord, PressureRecord
from contextguard_adk.strategies.base import Strategy

logger = logging.getLogger("contextguard_adk.plugin")
_log_failures = functools.partial(log_failures, logger)


class ContextGuardPlugin(GuardPlugin):
    """Keeps every guarded agent's requests inside its model's context window.

    Each request is measured before it is sent. When the window is nearly full, the
    agent's strategy replaces history by a summary, which stays in place on later
    calls. Without arguments every LLM agent is guarded with `Threshold()`. Register
    the plugin last, so that it sees requests as the model will see them.

    Args:
        agents: A strategy per agent name; None exempts an agent. A function of the
            callback context that returns one of these is asked before each model call.
        default: The strategy of agents that are not named, or such a function; None
            guards only the named ones.
        observe: Measures and reports, but changes no request and stores no summary.
        registry: Looks up windows and prices of models; None reads litellm's table, or
            the copy of it in this package if litellm is not installed.
        summaries: "stored" stops paying at once: stored summaries stay in place, no new
            one is asked for, and a request that is too large is cut to excerpts without
            a model. "write" leaves it to each strategy, and to the session's state
            (`context_guard:summaries`).
        summary_budget: The most that summaries may cost, for each session or for the
            process; beyond it they are excerpts. None: no limit.
        state_keys: The form of the session-state keys that are written. "plain" is
            `__context_guard_summary_{agent}`, "namespaced" is
            `context_guard:summary:{agent}`; "auto" takes the latter where anything
            in the app declares a `state_schema`.
        warning_threshold: A request that is still above this part of the context window
            after compaction is reported; more than 0 and at most 1.
        prices: The prices of models, by the model name that the agent's request
            carries; they go before those of the registry.
        max_background_summaries: How many summaries are written ahead of time (see
            `ahead` of the strategies) at once, at least 1; others wait.
        summary_artifacts: Whether each compaction saves its summary as the artifact
            `compaction-{agent}.md`, which ADK does not delete with the session.
        usage_in_state: Whether session state has one line about how full the window is.
        recent_events: Whether sessions may be loaded in part, by `load_recent`.
        user_ids: How records, traces and log lines name a user: "hashed" or "plain".
        listener_timeout_seconds: How long a model call waits for a listener, more than
            0 and at most 3,600.
        on_pressure: A function, sync or async, told of a request that is above
            `warning_threshold`.
        on_compaction: A function, sync or async, told of every compaction.
        on_call: A function, sync or async, told of every answered model call.
        before_compaction: A function, sync or async, asked before a compaction is paid
            for. It returns None, a focus for the summarizer, or False to put it off.
        after_summary: A function, sync or async, shown each summary before it is used.
            It returns None, a text in its place, or False, which has excerpts take its
            place.
        redact: A sync function that takes a text and returns it without the secrets
            that must not reach a summarizer, session state, an artifact or a result of
            recall.
        name: The plugin's name; ADK passes one under `--extra_plugins`.
        strict: Decides what happens if the file in the environment (see below) is
            wrong. False logs one line at ERROR and guards every agent with the
            defaults. True, or the environment variable `CONTEXTGUARD_STRICT=1`, raises
            a `ConfigError`, which ADK only logs under `--extra_plugins`: the app then
            runs unguarded.

    If the environment variable `CONTEXTGUARD_CONFIG` names a file, all settings are
    read from this file. `registry`, the listeners, `redact`, `name` and `strict` may be
    given as well. With any other argument, the file is not read.

    Raises:
        TypeError: An argument is an object of a wrong kind, or a function that cannot
            be called with its one argument.
        ConfigError: A value is not accepted, or the file in the environment is wrong
            and `strict` is set.
    """

    def __init__(
        self,
        *,
        agents: Mapping[str, Strategy | Chooser | None] | None = None,
        default: Strategy | Chooser | None = GUARD_ALL,
        observe: bool = False,
        summaries: Summaries = "write",
        summary_budget: SummaryBudget | None = None,
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
        after_summary: AfterSummary | None = None,
        redact: Callable[[str], str] | None = None,
        name: str = "context_guard",
        strict: bool = False,
    ) -> None:
        super().__init__(name=name)
        check_arguments(agents, default, registry)
        arguments = PluginSettings(
            agents=agents or {},
            default=default,
            observe=observe,
            summaries=summaries,
            summary_budget=summary_budget,
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

        chosen = choose_settings(arguments, default, strict)
        self.settings = chosen.settings
        self.is_shared = chosen.is_shared
        self._file = chosen.file
        self.registry = registry
        self._listeners = Listeners(
            on_pressure=on_pressure,
            on_compaction=on_compaction,
            on_call=on_call,
            before_compaction=before_compaction,
            after_summary=after_summary,
        )
        check_functions({**vars(self._listeners), "redact": redact})
        self._redactor = Redactor(redact)
        self._start()

    def _start(self) -> None:
        """Makes `_guard`, the memory of the plugin, which is empty at first.

        A copy of the plugin starts with an empty memory of its own.
        """
        self._guard = Guard(
            settings=self.settings,
            registry=self.registry,
            redactor=self._redactor,
            observers=Observers(self._listeners),
        )
        if self._redactor:
            # The text of an error may quote messages. The log has such texts only at
            # DEBUG, after each of `REDACTORS` has changed the text.
            REDACTORS.add(self._redactor)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes that a copy gets: all but the guard's memory.

        Of the settings file a copy gets the path. Nobody knows whether the file still
        has the copied settings when the copy is put to use.
        """
        file = None if self._file is None else self._file.path
        return {**vars(self), "_guard": None, "_file": file}

    def __setstate__(self, state: dict[str, Any]) -> None:
        path = state["_file"]
        file = None if path is None else SettingsFile(path)
        vars(self).update(state, _file=file)
        self._start()

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
        after_summary: AfterSummary | None = None,
        redact: Callable[[str], str] | None = None,
        name: str = "context_guard",
    ) -> Self:
        """Makes a guard with the settings of a TOML or YAML file.

        All arguments but `path` are as for the class.

        Args:
            path: The file, whose name ends in `.toml`, `.yaml` or `.yml`.

        Raises:
            ConfigError: The file cannot be read, or a setting in it is wrong.
        """
        return cls(
            default=read_file(path),
            registry=registry,
            on_pressure=on_pressure,
            on_compaction=on_compaction,
            on_call=on_call,
            before_compaction=before_compaction,
            after_summary=after_summary,
            redact=redact,
            name=name,
        )

    def reload(self) -> bool:
        """Reads the settings file again, and uses its settings from now on.

        The file is the one of `from_file`, or the one that `CONTEXTGUARD_CONFIG` named
        when the plugin was made. Sessions keep their summaries, and the guard remembers
        what it has learned; a model call that is under way keeps its strategy.
        Listeners, `redact` and the registry stay, and so do imported classes. The log
        names the changed settings at INFO. It may be called from any thread and from a
        signal handler, and blocks while the file is read.

        Returns:
            True if the file was read, also if nothing has changed. False if it is
            missing or wrong: the log has one line at ERROR with file, key, value and
            what is accepted, and the settings stay as they are.

        Raises:
            ContextGuardError: The plugin has no settings file.
        """
        return reload_settings(self)

    async def before_run_callback(
        self, *, invocation_context: InvocationContext
    ) -> None:
        """Chooses the form of state keys that this app needs; logs who is guarded."""
        with _log_failures("The guard could not look at the app"):
            look_at_app(self, invocation_context)

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Puts the stored summary into the request; compacts if a compaction is due.

        The request of an agent that is not guarded stays as it is.
        """
        with _log_failures("The guard could not look for new settings"):
            await reload_if_changed(self)

        with _log_failures(
            "The guard could not tell whether a request is its own, or could not cut it"
        ):
            # The run may still remember an earlier call of the agent. The answer to
            # this request must not count as the answer to that earlier call.
            run = self._guard.run(callback_context.get_invocation_context())
            run.calls.pop(call_key(callback_context), None)

            strategy = find_strategy(self, callback_context, llm_request)
            may_change = strategy is not None and not self.settings.observe
            if strategy is not None:
                await guard_request(
                    self._guard, callback_context, llm_request, strategy
                )

            if not may_change:
                # An unchanged request lacks the stored summary. So if the session was
                # compacted before, the request may have the whole history.
                warn_of_switch(self, callback_context, llm_request)

            warn_of_lost_compaction(callback_context, llm_request)

    async def after_model_callback(
        self, *, callback_context: CallbackContext, llm_response: LlmResponse
    ) -> None:
        """Stores the prompt tokens that the provider counted, and reports the call."""
        with _log_failures("The guard could not store the provider's token count"):
            await record_answer(
                self._guard, callback_context, llm_response, plugin=self
            )

    async def on_model_error_callback(
        self,
        *,
        callback_context: CallbackContext,
        llm_request: LlmRequest,
        error: Exception,
    ) -> LlmResponse | None:
        """Sends a smaller request if the provider found a request too long.

        Returns the answer, or None, which leaves the error to ADK.
        """
        with _log_failures(
            f"The recovery failed for agent {callback_context.agent_name!r}"
        ):
            usual_strategy = find_strategy(self, callback_context, llm_request)
            may_send_again = not (self.settings.observe or is_recorded_test())
            # Without a strategy, `answer_error` sends nothing.
            strategy = usual_strategy if may_send_again else None
            failed = FailedCall(self, callback_context, llm_request, error)
            return await answer_error(self._guard, failed, strategy)

        # The recovery itself has failed. Its failure was logged, and is not raised.
        return None

    async def on_event_callback(
        self, *, invocation_context: InvocationContext, event: Event
    ) -> None:
        """Adds the guard's state, metadata and artifacts to an event."""
        with _log_failures("The guard could not have an event carry its state"):
            self._guard.hand_over(event, invocation_context)

    async def after_run_callback(
        self, *, invocation_context: InvocationContext
    ) -> None:
        """Forgets the model calls of a finished run."""
        with _log_failures("The guard could not end a run"):
            warn_of_silence(self._guard.pop_run(invocation_context))

    async def close(self) -> None:
        """Waits up to one second for summaries under way, then cancels them.

        Nothing is done in an ADK without `set_skip_closing_plugins`. Such an ADK also
        closes the plugins when the run of an `AgentTool` ends, and the app goes on.
        """
        with _log_failures("The guard could not end its summaries under way"):
            closes_only_at_end_of_app = hasattr(
                make_plugin_manager(), "set_skip_closing_plugins"
            )
            if closes_only_at_end_of_app:
                await self._guard.tasks.close()
