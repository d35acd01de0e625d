"""The only reader and writer of the guard's keys in session state.

Session state is untrusted: a tool, another plugin or an old release may have put
anything under these keys. A value of the wrong type counts as absent.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import MutableMapping
from typing import Any, Protocol

from contextguard_adk.history.stored_summary import SummaryMark

logger = logging.getLogger("contextguard_adk.history.state")

COMPACT_NOW_KEY = "context_guard:compact"
"""Set to True in session state, it forces a compaction on the next model call."""

MAX_COUNT = 2**53
"""Above it a stored number counts as broken: not every database keeps it exactly."""


class StateLike(Protocol):
    """What the guard needs of `google.adk.sessions.State`."""

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key, or `default`."""

    def __setitem__(self, key: str, value: Any) -> None:
        """Sets the value of a key."""


def request_compaction(
    state: StateLike | MutableMapping[str, Any], agent: str | None = None
) -> None:
    """Asks for a compaction before the next model call, whatever the token count.

    Works with the state of a tool context, of a callback context, or a plain dict
    that is sent as a `state_delta`.

    Args:
        state: Where to set the flag.
        agent: The agent whose history to compact; None takes whichever guarded
            agent of the session calls its model next.
    """
    state[f"{COMPACT_NOW_KEY}:{agent}" if agent else COMPACT_NOW_KEY] = True


class GuardState:
    """Reads and writes one agent's values.

    Args:
        state: The session state, as a callback sees it.
        agent: The agent's name.
        is_namespaced: Whether to write keys with a colon, which pass where a
            `state_schema` is declared. Both forms are read.
    """

    def __init__(self, state: StateLike, agent: str, is_namespaced: bool = False):
        self._state = state
        self._agent = agent
        self._is_namespaced = is_namespaced

    def key(self, name: str) -> str:
        """Returns the key under which `name` is written."""
        return _key(name, self._agent, self._is_namespaced)

    def _other_key(self, name: str) -> str:
        return _key(name, self._agent, not self._is_namespaced)

    def read(self, name: str) -> Any:
        """Returns a stored value, or None."""
        value = self._state.get(self.key(name))
        return self._state.get(self._other_key(name)) if value is None else value

    def read_text(self, name: str) -> str:
        """Returns a stored text; "" when absent or of another type."""
        value = self.read(name)
        if isinstance(value, str):
            return value
        if value is None or value == 0:
            return ""
        _warn_once(self.key(name), type(value).__name__, "a text")
        return ""

    def read_count(self, name: str) -> int | None:
        """Returns a stored count, at least 1; None when absent or no number."""
        value = self.read(name)
        if value is None or value == 0:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and 1 <= value <= MAX_COUNT:
            return int(value)
        _warn_once(self.key(name), type(value).__name__, "a positive number")
        return None

    def read_mark(self) -> SummaryMark | None:
        """Returns the mark of the stored summary, or None."""
        text = self.read_text("mark")
        if not text:
            return None
        try:
            return SummaryMark.from_json(text)
        except (ValueError, RecursionError):
            _warn_once(self.key("mark"), "str", "a summary mark")
            return None

    def write(self, name: str, value: str | int | None) -> None:
        """Stores a value where it differs from what is stored.

        State has no delete: None is written in its place, and only where there is
        something to overwrite. A value under the other form of the key, which a
        `state_schema` may forbid to touch, is hidden by a 0.
        """
        if value is None and self._state.get(self._other_key(name)) is not None:
            value = 0
        if self._state.get(self.key(name)) != value:
            self._state[self.key(name)] = value

    def is_compaction_requested(self) -> bool:
        """Tells whether `request_compaction` was called for this agent."""
        return any(self._state.get(key) is True for key in self._request_keys())

    def clear_compaction_request(self) -> None:
        """Takes the request back, once it was served."""
        for key in self._request_keys():
            if self._state.get(key):
                self._state[key] = False

    def _request_keys(self) -> tuple[str, str]:
        return COMPACT_NOW_KEY, f"{COMPACT_NOW_KEY}:{self._agent}"


def _key(name: str, agent: str, is_namespaced: bool) -> str:
    if is_namespaced:
        return f"context_guard:{name}:{agent}"
    return f"__context_guard_{name}_{agent}"


@functools.lru_cache(maxsize=256)
def _warn_once(key: str, found: str, wanted: str) -> None:
    logger.warning(
        "Session state %r holds a value of type %s where %s is expected; it is "
        "ignored.",
        key,
        found,
        wanted,
    )


def declares_state_schema(root: object) -> bool:
    """Tells whether anything in an agent tree declares a `state_schema`.

    Sub-agents, workflow nodes, also those that run in parallel, and the agents and
    nodes behind tools are searched.
    """
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if getattr(node, "state_schema", None) is not None:
            return True
        for name in ("graph", "agent", "node", "_node", "_inner_node"):
            waiting.append(getattr(node, name, None))
        for name in ("sub_agents", "nodes", "tools"):
            children = getattr(node, name, None)
            waiting.extend(children if isinstance(children, list | tuple) else ())
    return False
