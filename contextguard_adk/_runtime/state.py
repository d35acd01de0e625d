"""The only reader and writer of the guard's keys in session state.

Session state is untrusted: a tool, another plugin or another release may have put
anything under these keys. A value of the wrong type counts as absent.

The key of a value is made of a name, such as "summary", and an owner. The owner is an
agent. In a branch the owner is the agent, `@` and the scope; the scope is a short name
of the branch, and "" outside all branches. A key has one of two forms, plain or
namespaced. Values are written in one form, and read in both forms.

The record is the value with the name "record". It is JSON with all facts that are
stored about an agent and have no key of their own (`AgentRecord`).
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from google.adk.sessions.state import State
from pydantic import ValidationError

from contextguard_adk._history.stored import (
    VERSION,
    AgentRecord,
    StateValues,
    StoredSummary,
)
from contextguard_adk._support.log import warn_once

logger = logging.getLogger("contextguard_adk.state")

COMPACT_NOW_KEY = "context_guard:compact"
"""The value True requests a compaction before the next model call of any agent.

If the request is for one agent, `:` and the name of the agent follow this key. The same
holds for `FOCUS_KEY` and `REFUSED_KEY`."""

OFF_KEY = "context_guard:off"
"""While the value is True, the guard leaves the session alone."""

SUMMARIES_KEY = "context_guard:summaries"
"""While the value is "stored", no summary is paid for in the session."""

EVENTS_SINCE_KEY = "context_guard:events_since:"
"""The beginning of a key; the name of an agent follows. The value is a time in seconds
since the epoch: the agent needs no events before this time. The value is None if the
agent needs all events."""

FOCUS_KEY = "context_guard:compact_focus"
"""The value says what the requested compaction should keep above all."""

REFUSED_KEY = "context_guard:compact_refused"
"""The value says why the last requested compaction was refused; "" if it was made."""

COMPACTED_KEY = "context_guard:compacted:"
"""The beginning of a key; the name of an agent follows. The value is one line for
people on the agent's last compaction."""

USAGE_KEY = "context_guard:usage:"
"""The beginning of a key; the name of an agent follows. The value is one line for
people on how full the agent's window is."""

PIN_KEY = "context_guard:pin:"
"""The beginning of a key; an owner, `:` and the name of a pin follow. The value is the
pinned text. The owner "" stands for all agents."""

MAX_FOCUS_CHARS = 1_000
"""The most characters that are read of one value of `FOCUS_KEY`."""

MAX_SCOPES = 16
"""The most scopes of one agent whose values are kept. The values of older scopes are
cleared, except in scopes in which the agent is at work."""

# The most scopes of one agent that are listed: the kept ones, and those in which the
# agent is at work.
_MAX_LISTED_SCOPES = 4 * MAX_SCOPES

# The beginnings of keys whose values are for people. `adk web` shows the values of an
# event in their order, so these values come first.
_FOR_PEOPLE = COMPACTED_KEY, USAGE_KEY, PIN_KEY

# The beginning of a record as JSON; the group is the version of the record.
_VERSION = re.compile(r'\s*\{\s*"version"\s*:\s*([1-9]\d{0,8})\b')

SCOPED_NAMES = "summary", "summarized_at", "real_tokens", "last_heuristic", "record"
"""The names of the values that each owner may have."""

# The two forms of a key. A `state_schema` accepts only namespaced keys.
_PLAIN_FORM = "__context_guard_{name}_{owner}"
_NAMESPACED_FORM = "context_guard:{name}:{owner}"

StateOrDict = State | MutableMapping[str, Any]


def request_compaction(
    state: StateOrDict, agent: str | None = None, focus: str = ""
) -> None:
    """Asks for a compaction before the next model call, whatever the token count.

    The request is refused if the last model call was compacted as well, or if a
    compaction would gain nothing. Then session state has the reason under the key
    `context_guard:compact_refused`. If `agent` is named, `:` and its name follow in the
    key.

    Args:
        state: Where the request is written: the state of a tool context or of a
            callback context, or a plain dict that is sent as a `state_delta`.
        agent: The agent whose history is to be compacted; None stands for the guarded
            agent of the session that calls its model next.
        focus: What the summary should keep above all, as the summarizer is told; ""
            for no focus.
    """
    suffix = f":{agent}" if agent else ""

    state[COMPACT_NOW_KEY + suffix] = True
    if focus:
        state[FOCUS_KEY + suffix] = focus


@dataclass
class RunWrites:
    """The values that the guard has written in one run, until an event carries them.

    ADK itself puts the values that a callback writes on the events of the model call.
    This has two faults. ADK puts the values on every partial event of a streamed
    answer. And if a code executor replaces the model's event by events of its own, the
    values are lost with the model's event. So the guard writes values to the run's copy
    of the state, and adds the values to the next event of the same scope itself.

    Attributes:
        state: The run's own copy of session state, which all callbacks of the run read.
        pending: The values that no event has carried yet, by scope and key.
        given: The keys of pending values that `give_once` has returned already.
        owners: The owners that are at work in a branch: they have written a value, and
            have not given their final response.
    """

    state: dict[str, Any] = field(default_factory=dict)
    pending: dict[str, dict[str, Any]] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    owners: set[str] = field(default_factory=set)

    def write(self, scope: str, key: str, value: object) -> None:
        """Writes a value to the run's copy of the state, and keeps the value pending.

        Args:
            scope: The scope of the agent that writes; "" outside all branches.
            key: The key of session state.
            value: The value; None stands for no value.
        """
        self.state[key] = value
        self.pending.setdefault(scope, {})[key] = value
        self.given.discard(key)

    def pop_pending(self, scope: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values that an event of a scope is to carry.

        Afterwards no value of the scope is pending any more. A value that somebody else
        has replaced in the state is dropped: it is not returned.

        Args:
            scope: The scope of the event; "" outside all branches.
            state: The session state of the run.
        """
        # An event outside all branches comes after all branches have ended. So it also
        # carries the values of branches that had no event for them.
        scopes = [scope] if scope else list(self.pending)

        popped = dict[str, Any]()
        for each_scope in scopes:
            values = self.pending.pop(each_scope, {})
            for key, value in values.items():
                if state.get(key) == value:
                    popped[key] = value
        return _put_lines_first(popped)

    def give_once(self, scope: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the pending values of a scope that no earlier call has returned.

        The values stay pending, because ADK may drop the event that carries them. A
        value that somebody else has replaced in the state is not returned.

        Args:
            scope: The scope of a model call; "" outside all branches.
            state: The session state of the run.
        """
        new_values = dict[str, Any]()
        for key, value in self.pending.get(scope, {}).items():
            if state.get(key) == value and key not in self.given:
                new_values[key] = value
        self.given.update(new_values)
        return _put_lines_first(new_values)


class _Entry(NamedTuple):
    """A key of session state with its value; the value is None if the key has none."""

    key: str
    value: Any


class AgentState:
    """Reads and writes the values of one owner.

    Attributes:
        agent: The name of the agent.
        owner: The owner: the agent's name; in a branch followed by `@` and the scope.
    """

    def __init__(
        self,
        state: StateOrDict,
        agent: str,
        is_namespaced: bool = False,
        scope: str = "",
        run: RunWrites | None = None,
    ) -> None:
        """Finds the keys of an owner.

        Args:
            state: The session state.
            agent: The name of the agent.
            is_namespaced: Whether keys are written in the namespaced form.
            scope: The scope of the agent; "" outside all branches.
            run: The writes of the run; None outside of runs.
        """
        self.agent = agent
        self.owner = f"{agent}@{scope}" if scope else agent

        self._state = state
        self._scope = scope
        self._run = run or RunWrites()
        self._is_namespaced = is_namespaced
        self._form = _NAMESPACED_FORM if is_namespaced else _PLAIN_FORM
        self._other_form = _PLAIN_FORM if is_namespaced else _NAMESPACED_FORM

    def key(self, name: str) -> str:
        """Returns the key under which the value with a name is written."""
        return self._form.format(name=name, owner=self.owner)

    def find(self, prefix: str) -> dict[str, Any]:
        """Returns the values under all keys with a prefix, by the rest of the key.

        If "context_guard:pin:agent:city" has the value "Rome":
        "context_guard:pin:" -> {"agent:city": "Rome"}

        A value of None counts as absent.
        """
        return {
            key.removeprefix(prefix): value
            for key, value in self._values.items()
            if value is not None and key.startswith(prefix)
        }

    @property
    def _values(self) -> Mapping[str, Any]:
        # ADK's `State.get` copies each list and dict that it returns.
        state = self._state
        return state.to_dict() if isinstance(state, State) else state

    def _find_entry(self, name: str) -> _Entry:
        """Returns the key and the value of a name, in the form that has a value.

        The form in which values are written goes first. The other form may have an old
        value, from before the app has changed the form. If neither form has a value,
        the result has the other key and None.
        """
        values = self._values
        key = self._form.format(name=name, owner=self.owner)
        value = values.get(key)
        if value is not None:
            return _Entry(key, value)

        other_key = self._other_form.format(name=name, owner=self.owner)
        return _Entry(other_key, values.get(other_key))

    def read(self, name: str) -> Any:
        """Returns the value of a name under either form of its key.

        The result is None if there is no value, or if the value is not valid.

        Args:
            name: One of the fields of `StateValues`.
        """
        key, value = self._find_entry(name)
        return None if value is None else _validate(key, name, value)

    def read_at(self, key: str, name: str) -> Any:
        """Returns the value under a key.

        The result is None if there is no value, or if the value is not valid.

        Args:
            key: The whole key.
            name: The field of `StateValues` for which the value must be valid.
        """
        value = self._values.get(key)
        return None if value is None else _validate(key, name, value)

    @functools.cached_property
    def record(self) -> AgentRecord:
        """The record; an empty one if none is stored, or the stored one cannot be read.

        If a record of a later release cannot be read, the empty one has the version of
        that release. So `set` sees that nothing may be written.
        """
        key, stored = self._find_entry("record")
        if stored is None:
            return AgentRecord(version=VERSION)

        stored_record = _parse_record(key, stored)
        if stored_record is not None:
            record = stored_record
            use = "its summary is used"
        else:
            record = AgentRecord(version=_read_version(stored))
            use = "its summary cannot be read"

        if record.is_newer:
            message = (
                "Session state %r is of version %d, from a later release, and %s. It "
                "stays as it is; requests are cut where they do not fit."
            )
            warn_once(logger, message, key, record.version, use)
        return record

    def note_recall(self) -> None:
        """Stores that the agent's requests declare the recall tool."""
        self._write_record(self.record.model_copy(update={"has_recall": True}))

    def note_help(self, remedies: Mapping[str, str]) -> None:
        """Stores the remedies against refusals, in place of all earlier remedies.

        A remedy changes contents, so that a provider accepts contents that it has
        refused before.

        Args:
            remedies: The value of each remedy, by the name of the remedy; {} for none.
                The function that applies a remedy reads its value.
        """
        update = {"helped": dict(remedies) or None}
        self._write_record(self.record.model_copy(update=update))

    def edit_summary(self, summary: StoredSummary | None) -> None:
        """Stores the summary that a user has edited, and counts the edit.

        Args:
            summary: The edited summary; None removes the stored one.
        """
        update = {"summary": summary, "edits": self.record.edits + 1}
        self._write_record(self.record.model_copy(update=update))

    def load_summary(self, valid_scope: str) -> StoredSummary | None:
        """Returns the stored summary with its text.

        The result is None in three cases:

        - No summary is stored.
        - The stored summary is not valid in `valid_scope`.
        - The text of the stored summary is lost.

        Args:
            valid_scope: The name from `summary_scope` for the model call. It differs
                from the scope in the keys, as it also tells sessions apart, and the
                runs of an agent that does not see its earlier runs.
        """
        summary = self.record.summary
        text = self.read("summary")
        if summary is None or summary.scope != valid_scope:
            return None

        # The text has a key of its own, so the text may be lost although the record is
        # not. "" is no lost text: contents were left out without a summary.
        if text is None:
            return None
        return summary.model_copy(update={"text": text})

    def save_summary(self, summary: StoredSummary, tokens: int) -> None:
        """Stores a summary, and removes the counts of the request before it.

        Args:
            summary: The summary.
            tokens: The size of the request before the compaction, in tokens.
        """
        self.write("summary", summary.text)
        self._write_record(self.record.model_copy(update={"summary": summary}))
        self.write("summarized_at", tokens)
        self.write("real_tokens", None)
        self.write("last_heuristic", None)

    def set(self, key: str, value: object) -> None:
        """Writes a value under a key; the next event carries it to the session.

        Nothing is written if the record is from a later release, because that release
        may give the keys another meaning.

        Args:
            key: The whole key.
            value: The value; None stands for no value, as session state cannot delete.
        """
        if self.record.is_newer:
            return

        self._run.write(self._scope, key, value)
        # `_state` may still have an old value, for two reasons. In a callback, `_state`
        # prefers values that the callback has set itself. Outside of runs, `_run` has
        # written the value to a dict of its own.
        if self._values.get(key) != value:
            self._state[key] = value

    def _write_record(self, record: AgentRecord) -> None:
        """Puts a record in place of the stored one."""
        self.record = record
        # Earlier releases have stored limits of models, which nobody reads any more.
        text = record.model_dump_json(exclude_none=True, exclude={"learned"})
        self.write("record", text)

    def write(self, name: str, value: str | int | None) -> None:
        """Writes the value of a name, unless the key has this value already.

        In a branch the write also begins the work of the agent in this scope, unless
        the agent is at work there already or the value is removed (`_note_scope`).

        Args:
            name: One of the fields of `StateValues`.
            value: The value; None removes the value of the name.
        """
        key = self.key(name)
        written_value = value
        other_key = self._other_form.format(name=name, owner=self.owner)
        if value is None and self._values.get(other_key) is not None:
            # `read` would now find the value in the other form of the key. That value
            # cannot be removed, because a `state_schema` may refuse its key. A 0 in
            # this form hides the other value, and counts as no value.
            written_value = 0

        if self._values.get(key) == written_value:
            return
        self.set(key, written_value)

        is_at_work = self.owner in self._run.owners
        if self._scope and written_value is not None and not is_at_work:
            self._note_scope()

    def _note_scope(self) -> None:
        """Notes that the agent is at work in this scope, and clears old scopes.

        This scope, which is not "", becomes the newest. All scopes but the newest
        `MAX_SCOPES` are cleared, except those in which the agent is at work.
        """
        self._run.owners.add(self.owner)
        key = self._form.format(name="scopes", owner=self.agent)
        scopes = self._list_scopes(key)

        oldest_scopes = scopes[:-MAX_SCOPES]
        for scope in oldest_scopes:
            old = AgentState(self._state, self.agent, self._is_namespaced, scope)
            is_at_work = old.owner in self._run.owners
            # The values of a later release are not changed, as in `set`.
            if not is_at_work and not old.record.is_newer:
                scopes.remove(scope)
                self._clear(old)
        self.set(key, scopes)

    def _list_scopes(self, key: str) -> list[str]:
        """Returns the scopes in which the agent has values, the oldest first.

        This scope is the last. Only the newest `_MAX_LISTED_SCOPES` are returned.

        Args:
            key: The key whose value is the list of the scopes.
        """
        listed = self.read_at(key, "scopes") or []
        other_listed = [scope for scope in listed if scope != self._scope]

        # If parallel branches write the list at once, one list replaces the others, so
        # it may lack scopes. Nearly every scope has a value "last_heuristic". So the
        # missing scopes are found by the keys of this value, which end with the scope:
        # "__context_guard_last_heuristic_agent@SCOPE" -> SCOPE
        count_prefix = self.key("last_heuristic").removesuffix(self._scope)
        scopes_with_count = self.find(count_prefix)
        known = {*listed, self._scope}
        unlisted = [scope for scope in scopes_with_count if scope not in known]

        # Nobody knows the age of unlisted scopes, so they count as the oldest.
        oldest_first = [*unlisted, *other_listed, self._scope]
        return oldest_first[-_MAX_LISTED_SCOPES:]

    def _clear(self, old: AgentState) -> None:
        """Removes the values and pins of the agent in an old scope.

        Args:
            old: The state of the agent in the old scope. It only names the keys: this
                object writes, so that the next event of this scope carries the values.
        """
        pin_prefix = f"{PIN_KEY}{old.owner}:"
        pin_keys = [pin_prefix + name for name in self.find(pin_prefix)]
        value_keys = [old.key(name) for name in SCOPED_NAMES]
        for key in value_keys + pin_keys:
            if self._values.get(key) is not None:
                self.set(key, None)

    @property
    def _request_suffixes(self) -> list[str]:
        """What follows `COMPACT_NOW_KEY` in the keys of open requests to this agent.

        A request to any agent has the suffix ""; a request to this agent has the suffix
        ":AGENT". The result is [] if no compaction is requested.
        """
        values = self._values
        suffixes = ("", f":{self.agent}")
        return [each for each in suffixes if values.get(COMPACT_NOW_KEY + each) is True]

    @property
    def requested_focus(self) -> str | None:
        """The focus of the requested compaction; None if no compaction is requested.

        The focus says what the summary should keep above all. The result is "" for
        requests without a focus, and the texts of both if two requests have a focus.
        """
        suffixes = self._request_suffixes
        if not suffixes:
            return None

        values = self._values
        texts = list[str]()
        for suffix in suffixes:
            text = values.get(FOCUS_KEY + suffix)
            if isinstance(text, str):
                texts.append(text[:MAX_FOCUS_CHARS])
        return "\n".join(texts)

    def answer_request(self, refusal: str = "") -> None:
        """Clears the open requests for a compaction, and stores the answer to them.

        Args:
            refusal: Why the compaction is refused; "" if the compaction was made.
        """
        if refusal:
            message = "The compaction that was asked for is refused for agent %r: %s."
            logger.info(message, self.agent, refusal)

        for suffix in self._request_suffixes:
            self.set(COMPACT_NOW_KEY + suffix, False)
            self._replace_text(FOCUS_KEY + suffix, "")
            self._replace_text(REFUSED_KEY + suffix, refusal)

    def _replace_text(self, key: str, text: str) -> None:
        """Writes a text under a key, unless the key has this text already.

        A key without a value counts as a key with "".
        """
        if (self._values.get(key) or "") != text:
            self.set(key, text)


def _validate(key: str, name: str, value: object) -> Any:
    """Returns a value if the value is valid for a name, else None.

    A value that is not valid is logged once for its key, unless the value is 0 or
    False.

    Args:
        key: The key of the value.
        name: The field of `StateValues` for which the value must be valid.
        value: The value.
    """
    try:
        return getattr(StateValues.model_validate({name: value}), name)
    except (ValidationError, RecursionError):
        # `AgentState.write` writes a 0 to remove some values. False equals 0.
        is_removed = isinstance(value, int) and value == 0
        if not is_removed:
            # A value of the right type is not valid if it is too large.
            _warn(key, value, expected="another one, or a smaller one,")
        return None


def _parse_record(key: str, stored: object) -> AgentRecord | None:
    """Returns a stored record; None if the record cannot be read.

    A record of this version that cannot be read is logged once for its key. A record of
    a later release is logged by `AgentState.record`.

    Args:
        key: The key of the record.
        stored: The value under the key.
    """
    text = _validate(key, "record", stored)
    if not text:
        return None

    try:
        return AgentRecord.model_validate_json(text)
    except (ValidationError, RecursionError):
        if _read_version(stored) == VERSION:
            _warn(key, stored, expected="a record of this version")
        return None


def _read_version(stored: object) -> int:
    """Returns the version that a record names, even if the record cannot be read.

    '{"version": 3, …' -> 3

    The result is `VERSION` if the record names no version or a lower version.
    """
    match = _VERSION.match(stored) if isinstance(stored, str) else None
    return max(VERSION, int(match[1])) if match else VERSION


def _put_lines_first(values: dict[str, Any]) -> dict[str, Any]:
    """Returns values of session state by key, those for people first."""
    lines = {key: line for key, line in values.items() if key.startswith(_FOR_PEOPLE)}
    return lines | values


def _warn(key: str, value: object, expected: str) -> None:
    """Logs that a value of session state is ignored, once for its key.

    Args:
        key: The key of the value.
        value: The value, of which only the type is logged.
        expected: What is expected in place of the value, as words of the message.
    """
    message = "Session state %r holds a value of type %s where %s is expected; ignored."
    warn_once(logger, message, key, type(value).__name__, expected)
