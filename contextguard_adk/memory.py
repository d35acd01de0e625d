"""What the guard remembers in process between two callbacks; all of it bounded.

Nothing here is needed for correctness: a process that starts anew loses at most one
summary, and pays for it again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from google.genai import types

from contextguard_adk.kept_measures import KeptMeasures
from contextguard_adk.run_cache import RunCache
from contextguard_adk.telemetry import CompactionRecord

MAX_REMEMBERED = 1_024
"""Model calls, sessions or models remembered at once; the oldest go first."""

MAX_CACHES = 64
"""Runs whose measures are kept; an ADK that does not tell when a run ends fills it."""

MAX_KEPT = 32
"""Sessions whose measures are kept from run to run."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedDict(Generic[K, V]):
    """A dict that forgets its oldest entry when it is full."""

    def __init__(self, max_count: int = MAX_REMEMBERED) -> None:
        self._items: OrderedDict[K, V] = OrderedDict()
        self._max_count = max_count

    def get(self, key: K) -> V | None:
        """Returns the value of a key, or None."""
        return self._items.get(key)

    def put(self, key: K, value: V) -> None:
        """Sets a value and makes it the newest."""
        self._items[key] = value
        self._items.move_to_end(key)
        while len(self._items) > self._max_count:
            self._items.popitem(last=False)

    def pop(self, key: K) -> V | None:
        """Removes a key and returns its value, or None."""
        return self._items.pop(key, None)

    def pop_where(self, is_wanted: Callable[[K], bool]) -> list[tuple[K, V]]:
        """Removes and returns every entry whose key is wanted."""
        keys = [key for key in self._items if is_wanted(key)]
        return [(key, self._items.pop(key)) for key in keys]

    def __len__(self) -> int:
        return len(self._items)


CallKey = tuple[str, str, str, str]
"""Session, invocation, agent, branch."""

SessionKey = tuple[str, str, str]
"""Session, agent, scope."""


@dataclass
class CallInFlight:
    """A model call between `before_model` and its answer.

    Attributes:
        heuristic_tokens: Of the request that was sent.
        estimated_tokens: What it was expected to take.
        window_tokens: The context window that it was measured against.
        threshold_tokens: From where on a compaction was due.
        original_contents: The contents before the guard changed them.
        sent_contents: The contents that the guard sent.
        sent_config: The configuration that they went with.
        is_answered: Whether an answer with content or usage came.
        is_reported: Whether its record was handed out.
        is_recovered: Whether the provider had rejected a larger request before.
        compaction: The compaction that ran for it.
        session_key: The agent and the session.
    """

    heuristic_tokens: int
    estimated_tokens: int
    window_tokens: int
    original_contents: Sequence[types.Content] = ()
    sent_contents: Sequence[types.Content] = ()
    sent_config: types.GenerateContentConfig | None = None
    threshold_tokens: int = 0
    is_answered: bool = False
    is_reported: bool = False
    is_recovered: bool = False
    compaction: CompactionRecord | None = None
    session_key: SessionKey | None = None


@dataclass
class Memory:
    """All that one plugin instance remembers.

    Attributes:
        calls: Model calls in flight.
        unsaved: Paid summaries whose state write has not been seen yet, each with the
            mark of the summary that it replaced.
        compacted: Where the last model call was compacted.
        dropped: Where a compaction gained nothing, and the estimate at that time.
        reported: Where a fixed part that is too large was reported.
        pressed: Where the last request was under pressure.
        noticed: What was said of an app, and of which.
        caches: What the runs under way have measured.
        kept: What the last runs have measured, by session.
        cached_ratios: How much of the last prompt the provider served from a cache.
        in_vain: Where a summary was asked for at the end of the conversation in vain.
        failures: Summariser failures in a row, by model name; negative while the
            summariser is spared.
    """

    calls: BoundedDict[CallKey, CallInFlight] = field(default_factory=BoundedDict)
    unsaved: BoundedDict[SessionKey, tuple[str, dict[str, str | int | None]]] = field(
        default_factory=BoundedDict
    )
    compacted: BoundedDict[SessionKey, bool] = field(default_factory=BoundedDict)
    dropped: BoundedDict[SessionKey, int] = field(default_factory=BoundedDict)
    reported: BoundedDict[SessionKey, bool] = field(default_factory=BoundedDict)
    pressed: BoundedDict[SessionKey, bool] = field(default_factory=BoundedDict)
    noticed: BoundedDict[tuple[str, str], bool] = field(default_factory=BoundedDict)
    caches: BoundedDict[CallKey, RunCache] = field(
        default_factory=lambda: BoundedDict(MAX_CACHES)
    )
    kept: BoundedDict[str, KeptMeasures] = field(
        default_factory=lambda: BoundedDict(MAX_KEPT)
    )
    cached_ratios: BoundedDict[SessionKey, float] = field(default_factory=BoundedDict)
    in_vain: BoundedDict[SessionKey, bool] = field(default_factory=BoundedDict)
    failures: BoundedDict[str, int] = field(default_factory=BoundedDict)
