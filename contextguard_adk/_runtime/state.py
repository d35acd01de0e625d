"""The only reader and writer of the guard's keys in session state.

Session state is untrusted: a tool, another plugin or another release may have put
anything under these keys. A value of the wrong type counts as absent."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

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
"""Before an agent's name: since when it needs events, in seconds since the epoch; None
means all of them."""

FOCUS_KEY = "context_guard:compact_focus"
REFUSED_KEY = "context_guard:compact_refused"

COMPACTED_KEY = "context_guard:compacted:"
"""Before an agent's name: one line on its last compaction, for people."""

USAGE_KEY = "context_guard:usage:"
"""Before an agent's name: one line on how full its window is, for people."""

PIN_KEY = "context_guard:pin:"
"""Before an owner, `:` and a name: a pinned text. The owner is an agent, an agent with
`@` and its scope, or "" for all agents."""

MAX_SCOPES = 16
"""Branches and isolation scopes of one agent that are kept; the oldest go, but none
in which the agent is at work."""

_FOR_PEOPLE = COMPACTED_KEY, USAGE_KEY, PIN_KEY

_VERSION = re.compile(r'\s*\{\s*"version"\s*:\s*([1-9]\d{0,8})\b')
SCOPED_NAMES = "summary", "summarized_at", "real_tokens", "last_heuristic", "record"

StateOrDict = State | MutableMapping[str, Any]


def request_compaction(
    state: StateOrDict, agent: str | None = None, focus: str = ""
) -> None:
    """Asks for a compaction before the next model call, whatever the token count.

    Works with the state of a tool context, of a callback context, or a plain dict
    that is sent as a `state_delta`. The request is refused where the last call was
    compacted as well or where nothing would be gained; then `state` says why under
    `context_guard:compact_refused`, followed by `:` and the agent where one is named.

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
    """What the guard has written to session state in one run, and no event has brought.

    ADK puts what a callback writes on every partial event of a streamed answer, and
    drops some events with it: code executors replace that of the model. So it is
    written to the run's own copy of the state, and waits here by scope.
    """

    state: dict[str, Any] = field(default_factory=dict)
    pending: dict[str, dict[str, Any]] = field(default_factory=dict)
    # To ADK with an answer; still pending.
    given: set[str] = field(default_factory=set)
    owners: set[str] = field(default_factory=set)  # Agents at work, with their scopes.

    def write(self, scope: str, key: str, value: object) -> None:
        """Shows a value to all that read it in this run; an event is to bring it."""
        self.state[key] = self.pending.setdefault(scope, {})[key] = value
        self.given.discard(key)

    def take(self, scope: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Takes what the next event of a scope brings, unless it is out of date.

        In one scope agents work one after another. Where there is no branch any more,
        all are done: what is left has had no event.
        """
        scopes = [scope] if scope else [*self.pending]
        taken = [self.pending.pop(each, {}) for each in scopes]
        items = [item for written in taken for item in written.items()]
        # Else somebody has written to it since.
        return _order((k, v) for k, v in items if state.get(k) == v)

    def give(self, scope: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Gives ADK what is pending, once; it stays so, as ADK drops some events."""
        items = self.pending.get(scope, {}).items()
        new = {k: v for k, v in items if state.get(k) == v and k not in self.given}
        self.given.update(new)
        return _order(new.items())


class AgentState:
    """Reads one agent's values under both forms of keys, and writes one of them."""

    def __init__(
        self,
        state: StateOrDict,
        agent: str,
        is_namespaced: bool = False,
        scope: str = "",
        run: RunWrites | None = None,
    ) -> None:
        self._state = state
        self.agent = agent
        self.owner = f"{agent}@{scope}" if scope else agent
        self._is_namespaced = is_namespaced
        self._scope = scope
        self._run = run or RunWrites()

    def key(self, name: str) -> str:
        return _key(name, self.owner, self._is_namespaced)

    def find(self, prefix: str) -> dict[str, Any]:
        """Returns what is not None under keys with a prefix, by the rest of the key."""
        items = self._values.items()
        own = [(n, v) for n, v in items if v is not None and n.startswith(prefix)]
        return {name.removeprefix(prefix): value for name, value in own}

    @property
    def _values(self) -> Mapping[str, Any]:
        # ADK's `State.get` copies each list and dict that it returns.
        state = self._state
        return state.to_dict() if isinstance(state, State) else state

    def _place(self, name: str) -> str:
        keys = self.key(name), _key(name, self.owner, not self._is_namespaced)
        return keys[self._values.get(keys[0]) is None]

    def read(self, name: str) -> Any:
        """Returns a value of this agent, under either form of its key, or None."""
        return self.read_at(self._place(name), name)

    def read_at(self, key: str, name: str) -> Any:
        """Returns what stands under a key, if it is a `name` within its bounds."""
        if (value := self._values.get(key)) is None:
            return None
        try:
            return getattr(StateValues.model_validate({name: value}), name)
        except (ValidationError, RecursionError):
            if not isinstance(value, int) or value:
                _warn(key, value, "another one, or a smaller one,")
            return None

    @functools.cached_property
    def record(self) -> AgentRecord:
        """What is stored beside the documented keys; empty where it is unusable."""
        key = self._place("record")
        stored = self._values.get(key)
        use = "cannot be read"
        found = _VERSION.match(stored) if isinstance(stored, str) else None
        record = AgentRecord(version=max(int(found[1]) if found else 0, VERSION))
        try:
            if text := self.read_at(key, "record"):
                record = AgentRecord.model_validate_json(text)
                use = "is used"
        except (ValidationError, RecursionError):
            if not record.is_newer:
                _warn(key, stored, "a record of this version")
        if record.is_newer:
            message = "Session state %r is of version %d, from a later release, and %s."
            message += " It stays as it is; requests are cut where they do not fit."
            warn_once(logger, message, key, record.version, use)
        return record

    def learn(self, model: str, shown: Learned) -> None:
        """Remembers what a model has shown, in place of what is stored of it."""
        learned = with_newest(self.record.learned, model, shown)
        self._write_record(self.record.model_copy(update={"learned": learned}))

    def note_recall(self) -> None:
        """Remembers that the agent's requests declare the recall tool."""
        self._write_record(self.record.model_copy(update={"has_recall": True}))

    def note_help(self, helped: Mapping[str, str]) -> None:
        """Remembers what helped where the provider refused the form of a history."""
        update = {"helped": dict(helped) or None}
        self._write_record(self.record.model_copy(update=update))

    def edit_summary(self, summary: StoredSummary | None) -> None:
        """Puts another summary, or none, in place of the stored one by hand."""
        update = {"summary": summary, "edits": self.record.edits + 1}
        self._write_record(self.record.model_copy(update=update))

    def load_summary(self, scope: str) -> StoredSummary | None:
        """Returns the stored summary, if it was made in this very scope."""
        summary = self.record.summary
        text = self.read("summary")
        # "" says that messages were dropped; None that the text is lost or broken.
        if summary is None or summary.scope != scope or text is None:
            return None
        return summary.model_copy(update={"text": text})

    def save_summary(self, summary: StoredSummary, tokens: int) -> None:
        """Stores a summary, made at so many tokens; calibration starts anew."""
        self.write("summary", summary.text)
        self._write_record(self.record.model_copy(update={"summary": summary}))
        self.write("summarized_at", tokens)
        self.write("real_tokens", None)
        self.write("last_heuristic", None)

    def set(self, key: str, value: object) -> None:
        """Writes a key as it is; the event of the call brings it to the session."""
        if self.record.is_newer:
            return
        self._run.write(self._scope, key, value)
        if self._values.get(key) != value:  # The event may hold another value.
            self._state[key] = value

    def _write_record(self, record: AgentRecord) -> None:
        self.record = record
        self.write("record", record.model_dump_json(exclude_none=True))

    def write(self, name: str, value: str | int | None) -> None:
        """Stores a value if it differs; state has no delete, so None is written."""
        # A `state_schema` may forbid to touch the other form of the key; a 0 hides it.
        other_key = _key(name, self.owner, not self._is_namespaced)
        if value is None and self._values.get(other_key) is not None:
            value = 0
        if self._values.get(self.key(name)) != value:
            self.set(self.key(name), value)
            is_new = self.owner not in self._run.owners
            if self._scope and value is not None and is_new:
                self._note_scope()

    def _note_scope(self) -> None:
        """Makes this scope the newest, and clears the oldest beyond `MAX_SCOPES`."""
        self._run.owners.add(self.owner)
        key = _key("scopes", self.agent, self._is_namespaced)
        noted = self.read_at(key, "scopes") or []
        # Of parallel branches that wrote at once only one is noted.
        first = self.key("last_heuristic").removesuffix(self._scope)
        seen = {*noted, self._scope}
        scopes = [scope for scope in self.find(first) if scope not in seen]
        scopes += [*(scope for scope in noted if scope != self._scope), self._scope]
        del scopes[: -4 * MAX_SCOPES]
        for scope in scopes[:-MAX_SCOPES]:
            owner = f"{self.agent}@{scope}"
            old = AgentState(self._state, self.agent, self._is_namespaced, scope)
            if owner not in self._run.owners and not old.record.is_newer:
                scopes.remove(scope)
                keys = [_key(name, owner, self._is_namespaced) for name in SCOPED_NAMES]
                pins = f"{PIN_KEY}{owner}:"
                keys += [pins + name for name in self.find(pins)]
                for each in (k for k in keys if self._values.get(k) is not None):
                    self.set(each, None)
        self.set(key, scopes)

    @property
    def _requests(self) -> list[str]:
        """Suffixes of the keys with a request that is open: for any agent, for this."""
        suffixes = "", f":{self.agent}"
        return [s for s in suffixes if self._values.get(COMPACT_NOW_KEY + s) is True]

    @property
    def requested_focus(self) -> str | None:
        """What a compaction that was asked for should keep; None where none was."""
        if not (requests := self._requests):
            return None
        named = (self._values.get(FOCUS_KEY + suffix) for suffix in requests)
        return "\n".join(text[:1_000] for text in named if isinstance(text, str))

    def answer_request(self, refusal: str = "") -> None:
        """Takes the request back, once it was served or is refused for a reason."""
        if refusal:
            message = "The compaction that was asked for is refused for agent %r: %s."
            logger.info(message, self.agent, refusal)
        for suffix in self._requests:
            self.set(COMPACT_NOW_KEY + suffix, False)
            for key, value in ((FOCUS_KEY, ""), (REFUSED_KEY, refusal)):
                if (self._values.get(key + suffix) or "") != value:
                    self.set(key + suffix, value)


def _order(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Puts what people read first: `adk web` shows keys in the order they came."""
    return dict(sorted(items, key=lambda item: not item[0].startswith(_FOR_PEOPLE)))


def _key(name: str, owner: str, is_namespaced: bool) -> str:
    form = "context_guard:{}:{}" if is_namespaced else "__context_guard_{}_{}"
    return form.format(name, owner)


def _warn(key: str, value: object, wanted: str) -> None:
    message = "Session state %r holds a value of type %s where %s is expected; ignored."
    warn_once(logger, message, key, type(value).__name__, wanted)
