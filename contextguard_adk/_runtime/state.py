"""The only reader and writer of the guard's keys in session state.

Session state is untrusted: a tool, another plugin or another release may have put
anything under these keys. A value of the wrong type counts as absent.

The key of a value is made of a name, such as "summary", and an owner. The owner is an
agent; in a branch it is the agent, `@` and the scope, which is a short name of the
branch. A key has one of two forms, plain or namespaced. Values are read under both.
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
    Learned,
    StateValues,
    StoredSummary,
    with_newest,
)
from contextguard_adk._support.log import warn_once

logger = logging.getLogger("contextguard_adk.state")

COMPACT_NOW_KEY = "context_guard:compact"
"""Set to True in session state, it forces a compaction on the next model call."""

OFF_KEY = "context_guard:off"
"""Set to True in session state, it has the guard leave the session alone."""

SUMMARIES_KEY = "context_guard:summaries"
"""Set to "stored" in session state, no summary is paid for in the session."""

EVENTS_SINCE_KEY = "context_guard:events_since:"
"""A prefix of an agent's name. The value is the time since when the agent needs events,
in seconds since the epoch; None if it needs all of them."""

FOCUS_KEY = "context_guard:compact_focus"
REFUSED_KEY = "context_guard:compact_refused"

COMPACTED_KEY = "context_guard:compacted:"
"""A prefix of an agent's name. The value is one line on the agent's last compaction,
for people."""

USAGE_KEY = "context_guard:usage:"
"""A prefix of an agent's name. The value is one line on how full the agent's window is,
for people."""

PIN_KEY = "context_guard:pin:"
"""A prefix of an owner, `:` and the name of a pin. The value is the pinned text. The
owner is an agent, an agent with `@` and its scope, or "" for all agents."""

MAX_FOCUS_CHARS = 1_000
"""The most characters of one text that says what a summary should keep above all."""

MAX_SCOPES = 16
"""The most scopes of one agent that are kept. The values in the oldest scopes are
cleared, except in scopes in which the agent is at work."""

# The most scopes of one agent that are listed, with those in which it is at work.
_MAX_LISTED_SCOPES = 4 * MAX_SCOPES

# `adk web` shows the values of an event in their order, so these come first.
_FOR_PEOPLE = COMPACTED_KEY, USAGE_KEY, PIN_KEY

_VERSION = re.compile(r'\s*\{\s*"version"\s*:\s*([1-9]\d{0,8})\b')

SCOPED_NAMES = "summary", "summarized_at", "real_tokens", "last_heuristic", "record"
"""The names of the values that an owner has."""

_PLAIN_FORM = "__context_guard_{name}_{owner}"
_NAMESPACED_FORM = "context_guard:{name}:{owner}"
"""The two forms of a key of one agent; a `state_schema` accepts the second one only."""

StateOrDict = State | MutableMapping[str, Any]


def request_compaction(
    state: StateOrDict, agent: str | None = None, focus: str = ""
) -> None:
    """Asks for a compaction before the next model call, whatever the token count.

    Works with the state of a tool context, of a callback context, or a plain dict
    that is sent as a `state_delta`. The request is refused if the last call was
    compacted as well, or if a compaction would gain nothing. Then `state` has the
    reason under `context_guard:compact_refused`, followed by `:` and the agent if one
    is named.

    Args:
        state: Where to set the flag.
        agent: The agent whose history to compact; None takes whichever guarded
            agent of the session calls its model next.
        focus: What the summary should keep above all, told to the summarizer.
    """
    suffix = f":{agent}" if agent else ""
    state[COMPACT_NOW_KEY + suffix] = True
    if focus:
        state[FOCUS_KEY + suffix] = focus


@dataclass
class RunWrites:
    """The values that the guard has written in one run, until an event carries them.

    ADK's own way has two faults: it puts the values that a callback writes on every
    partial event of a streamed answer, and it drops some events with their values,
    since code executors replace the model's event by their own. So the guard writes to
    the run's copy of the state, and the next event of the same scope gets the values.

    Attributes:
        state: The run's own copy of session state, which all its callbacks read.
        pending: The values that no event has carried yet, by scope and key.
        given: The keys of pending values that `give_once` has returned already.
        owners: The owners that are at work in a branch.
    """

    state: dict[str, Any] = field(default_factory=dict)
    pending: dict[str, dict[str, Any]] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    owners: set[str] = field(default_factory=set)

    def write(self, scope: str, key: str, value: object) -> None:
        """Shows a value to all who read the state in this run, and keeps it pending."""
        self.state[key] = value
        self.pending.setdefault(scope, {})[key] = value
        self.given.discard(key)

    def pop_pending(self, scope: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values that an event of a scope is to carry, and forgets them.

        A value that somebody else has replaced in the state is left out.

        Args:
            scope: The scope of the event; "" outside all branches.
            state: The session state of the run.
        """
        # Outside all branches agents work only after every branch has ended. So an
        # event there also carries the values of branches that had no event.
        scopes = [scope] if scope else list(self.pending)
        popped = dict[str, Any]()
        for each_scope in scopes:
            values = self.pending.pop(each_scope, {})
            for key, value in values.items():
                if state.get(key) == value:
                    popped[key] = value
        return _put_lines_first(popped)

    def give_once(self, scope: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the pending values of a scope that it has not returned before.

        They stay pending, because ADK may drop the event that carries them. A value
        that somebody else has replaced in the state is left out.

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
    """A key of session state, and its value; None if the key has none."""

    key: str
    value: Any


class AgentState:
    """Reads one agent's values under both forms of keys, and writes under one of them.

    Attributes:
        agent: The agent's name.
        owner: The agent's name; in a branch followed by `@` and the scope.
    """

    def __init__(
        self,
        state: StateOrDict,
        agent: str,
        is_namespaced: bool = False,
        scope: str = "",
        run: RunWrites | None = None,
    ) -> None:
        self.agent = agent
        self.owner = f"{agent}@{scope}" if scope else agent
        self._state = state
        self._scope = scope
        self._run = run or RunWrites()
        self._is_namespaced = is_namespaced
        self._form = _NAMESPACED_FORM if is_namespaced else _PLAIN_FORM
        self._other_form = _PLAIN_FORM if is_namespaced else _NAMESPACED_FORM

    def key(self, name: str) -> str:
        """Returns the key under which a value of this agent is written."""
        return self._form.format(name=name, owner=self.owner)

    def find(self, prefix: str) -> dict[str, Any]:
        """Returns the values under all keys with a prefix, by the rest of the key.

        "context_guard:pin:" -> {"agent:city": "Rome"}. A value of None counts as
        absent.
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
        """Returns the key of a name with its value, in the form that has a value.

        If neither form has a value, the result is an entry with None.
        """
        values = self._values
        key = self._form.format(name=name, owner=self.owner)
        value = values.get(key)
        if value is not None:
            return _Entry(key, value)

        other_key = self._other_form.format(name=name, owner=self.owner)
        return _Entry(other_key, values.get(other_key))

    def read(self, name: str) -> Any:
        """Returns a value of this owner, under either form of its key, or None."""
        key, value = self._find_entry(name)
        return None if value is None else _validate(key, name, value)

    def read_at(self, key: str, name: str) -> Any:
        """Returns the value under a key if it is a valid `name`, or None."""
        value = self._values.get(key)
        return None if value is None else _validate(key, name, value)

    @functools.cached_property
    def record(self) -> AgentRecord:
        """The record, which holds everything beside the documented keys.

        The record is empty if none is stored, or if the stored one cannot be read.
        """
        key, stored = self._find_entry("record")
        if stored is None:
            return AgentRecord(version=VERSION)

        stored_record = _parse_record(key, stored)
        if stored_record is not None:
            record = stored_record
            use = "is used"
        else:
            # With the version of a later release it is not written (`is_newer`).
            record = AgentRecord(version=_read_version(stored))
            use = "cannot be read"

        if record.is_newer:
            message = (
                "Session state %r is of version %d, from a later release, and %s. It "
                "stays as it is; requests are cut where they do not fit."
            )
            warn_once(logger, message, key, record.version, use)
        return record

    def learn(self, model: str, shown: Learned) -> None:
        """Remembers the limits of a model, in place of the ones stored before."""
        learned = with_newest(self.record.learned, model, shown)
        self._write_record(self.record.model_copy(update={"learned": learned}))

    def note_recall(self) -> None:
        """Remembers that the agent's requests declare the recall tool."""
        self._write_record(self.record.model_copy(update={"has_recall": True}))

    def note_help(self, helped: Mapping[str, str]) -> None:
        """Remembers the forms that helped after the provider refused a request.

        Args:
            helped: The forms, in the format of `AgentRecord.helped`; {} for none.
        """
        update = {"helped": dict(helped) or None}
        self._write_record(self.record.model_copy(update=update))

    def edit_summary(self, summary: StoredSummary | None) -> None:
        """Puts another summary, or none, in place of the stored one by hand."""
        update = {"summary": summary, "edits": self.record.edits + 1}
        self._write_record(self.record.model_copy(update=update))

    def load_summary(self, scope: str) -> StoredSummary | None:
        """Returns the stored summary with its text; None if there is none.

        Args:
            scope: The scope of the call, see `summary_scope`. A summary of another
                scope counts as none.
        """
        summary = self.record.summary
        text = self.read("summary")
        if summary is None or summary.scope != scope:
            return None

        # A text of "" is no lost text: messages were dropped without a summary.
        if text is None:
            return None
        return summary.model_copy(update={"text": text})

    def save_summary(self, summary: StoredSummary, tokens: int) -> None:
        """Stores a summary and the size at which it was made; counts start anew."""
        self.write("summary", summary.text)
        self._write_record(self.record.model_copy(update={"summary": summary}))
        self.write("summarized_at", tokens)
        self.write("real_tokens", None)
        self.write("last_heuristic", None)

    def set(self, key: str, value: object) -> None:
        """Writes a value under a key; the next event carries it to the session.

        Nothing is written if a later release has written the record, because it may
        give the keys another meaning.
        """
        if self.record.is_newer:
            return

        self._run.write(self._scope, key, value)
        # In a callback the values of its own event hide those of the run. Elsewhere the
        # run has another dict than this state.
        if self._values.get(key) != value:
            self._state[key] = value

    def _write_record(self, record: AgentRecord) -> None:
        """Puts a record in place of the stored one."""
        self.record = record
        self.write("record", record.model_dump_json(exclude_none=True))

    def write(self, name: str, value: str | int | None) -> None:
        """Stores a value under a name, if it is not stored yet.

        Args:
            name: The name, one of `StateValues`.
            value: The value; None removes the stored one.
        """
        stored = value
        other_key = self._other_form.format(name=name, owner=self.owner)
        # `read` would find a value in the other form, which a `state_schema` may forbid
        # to change. A 0 in this form is no valid value, and hides the other one.
        if value is None and self._values.get(other_key) is not None:
            stored = 0

        key = self.key(name)
        if self._values.get(key) == stored:
            return
        self.set(key, stored)  # A None stays there: session state has no deletion.

        begins_work = self.owner not in self._run.owners
        if self._scope and stored is not None and begins_work:
            self._note_scope()

    def _note_scope(self) -> None:
        """Makes this scope the newest, and clears the oldest beyond `MAX_SCOPES`."""
        self._run.owners.add(self.owner)
        key = self._form.format(name="scopes", owner=self.agent)
        scopes = self._list_scopes(key)

        oldest_scopes = scopes[:-MAX_SCOPES]
        for scope in oldest_scopes:
            old = AgentState(self._state, self.agent, self._is_namespaced, scope)
            is_at_work = old.owner in self._run.owners
            # A record of a later release is not cleared.
            if not is_at_work and not old.record.is_newer:
                scopes.remove(scope)
                self._clear(old)
        self.set(key, scopes)

    def _list_scopes(self, key: str) -> list[str]:
        """Returns the scopes with values of this agent, oldest first, this one last.

        Args:
            key: The key under which they are listed.
        """
        listed = self.read_at(key, "scopes") or []
        other_listed = [scope for scope in listed if scope != self._scope]

        # If parallel branches write the list at once, only one of them gets into it. So
        # the others are found by a value, as in
        # "__context_guard_last_heuristic_agent@SCOPE".
        count_prefix = self.key("last_heuristic").removesuffix(self._scope)
        scopes_with_count = self.find(count_prefix)
        known = {*listed, self._scope}
        unlisted = [scope for scope in scopes_with_count if scope not in known]

        oldest_first = [*unlisted, *other_listed, self._scope]
        return oldest_first[-_MAX_LISTED_SCOPES:]

    def _clear(self, old: AgentState) -> None:
        """Clears the values and pins of the agent in an old scope."""
        pin_prefix = f"{PIN_KEY}{old.owner}:"
        pin_keys = [pin_prefix + name for name in self.find(pin_prefix)]
        value_keys = [old.key(name) for name in SCOPED_NAMES]
        for key in value_keys + pin_keys:
            if self._values.get(key) is not None:
                self.set(key, None)

    @property
    def _request_suffixes(self) -> list[str]:
        """The suffixes of the keys of the open requests for a compaction.

        A request to any agent has the suffix "", one to this agent ":AGENT".
        """
        values = self._values
        suffixes = ("", f":{self.agent}")
        return [each for each in suffixes if values.get(COMPACT_NOW_KEY + each) is True]

    @property
    def requested_focus(self) -> str | None:
        """The focus of a compaction that was asked for; None if none was asked for.

        The focus says what the summary should keep above all. It is "" if the request
        has no focus.
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
        """Clears the requests for a compaction, because it was made or is refused.

        Args:
            refusal: The reason of the refusal; "" if the compaction was made.
        """
        if refusal:
            message = "The compaction that was asked for is refused for agent %r: %s."
            logger.info(message, self.agent, refusal)

        for suffix in self._request_suffixes:
            self.set(COMPACT_NOW_KEY + suffix, False)
            self._replace_text(FOCUS_KEY + suffix, "")
            self._replace_text(REFUSED_KEY + suffix, refusal)

    def _replace_text(self, key: str, text: str) -> None:
        """Writes a text if the key has another one; no value is the same as ""."""
        if (self._values.get(key) or "") != text:
            self.set(key, text)


def _validate(key: str, name: str, value: object) -> Any:
    """Returns a value if it is a valid `name`, else None; warns once about the key."""
    try:
        return getattr(StateValues.model_validate({name: value}), name)
    except (ValidationError, RecursionError):
        # `AgentState.write` puts a 0 in place of some values that it removes.
        is_removed = isinstance(value, int) and value == 0
        if not is_removed:
            _warn(key, value, "another one, or a smaller one,")
        return None


def _parse_record(key: str, stored: object) -> AgentRecord | None:
    """Returns a stored record; None if it cannot be read.

    It warns about the key, unless the record is from a later release.

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
            _warn(key, stored, "a record of this version")
        return None


def _read_version(stored: object) -> int:
    """Returns the version of a record that cannot be read; `VERSION` if it is lower.

    '{"version": 3, …' -> 3
    """
    match = _VERSION.match(stored) if isinstance(stored, str) else None
    return max(VERSION, int(match[1])) if match else VERSION


def _put_lines_first(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values with those for people first."""
    lines = {key: line for key, line in values.items() if key.startswith(_FOR_PEOPLE)}
    return lines | values


def _warn(key: str, value: object, wanted: str) -> None:
    message = "Session state %r holds a value of type %s where %s is expected; ignored."
    warn_once(logger, message, key, type(value).__name__, wanted)
