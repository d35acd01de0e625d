"""The conversations that `compare` plays: real material, with facts planted in it.

A fact is a random identifier in a short sentence, put at a random place of a user's
message or of a tool's result. Nothing but the random generator knows which words of
a conversation are facts.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pydantic_core import to_json

from benchmarks import _common
from contextguard_adk.testing import provider as _simulated

_SAYINGS = (
    "Incident {0}: {1} quarantined, shard {2} reassigned to {4} at {3}.",
    "Rollback {0} failed: {1} exhausted {2} retries against {4}.",
    "Decision {0}: migrate {1} onto volume {4} before {3}.",
    "Ticket {0}: disk {4} behind {1} replaced, {2} sectors unreadable.",
    "Signing key {0} supersedes {4}, {1} rotated at {3}.",
    "Voucher {0} refunds customer {1}: {2} EUR, invoice {4}.",
    "Escalation {0}: owner {1}, extension {2}, deputy {4}.",
    "Schema {0} approved, yet {1} still runs {4} after {2} warnings.",
    "Canary {0} promoted: {1} absorbs {2} percent, {4} drained at {3}.",
    "Audit {0}: auditor {1} found {2} stale grants inside bucket {4}.",
    "Contract {0} renewed, supplier {1}, annexe {4}, penalty {2} EUR.",
    "Outage {0}: breaker {1} tripped, generator {4} started at {3}.",
    "License {0} expired; {2} seats moved from {1} to {4}.",
    "Shipment {0} lost: courier {1}, pallet {4}, {2} kilograms.",
    "Firewall rule {0} blocks {1}, exemption {4} ends at {3}.",
    "Backup {0} corrupt: restored {2} tables from {1} through {4}.",
    "Dataset {0} relabelled: annotator {1} disputed {2} rows of {4}.",
    "Certificate {0} pinned by {1}, fallback issuer {4}, valid {2} days.",
    "Patient zero {0}: worm {1} reached {2} laptops via printer {4}.",
    "Hotfix {0} cherry-picked: author {1}, reviewer {4}, build {2}.",
    "Embargo {0} lifted: press officer {1} publishes {4} at {3}.",
    "Sensor {0} drifts: calibrate {1} against probe {4}, offset {2}.",
    "Lease {0} terminated: landlord {1}, deposit {2} EUR, unit {4}.",
    "Quota {0} raised: tenant {1} gets {2} vCPUs, cluster {4}.",
)
_PLAIN_SAYINGS = (
    "By the way, what they call {0} did not work out for us last week.",
    "we keep the spare one behind {0} until somebody asks for it",
    "The person to ask about this is the one who signed {0}.",
    "somebody should tell the others that {0} is no longer the right one to use",
    "It turned out later that {0} had been the reason all along.",
    "Nobody remembers why, but {0} has to be started before anything else.",
    "they only ever speak of {0} when the big boss is out of the room",
    "If in doubt, look at how it was done for {0} and do the same here.",
)
WORDINGS = {"reports": _SAYINGS, "plain": _PLAIN_SAYINGS}
"""How facts are worded: as in a log of incidents, or in passing."""

_WORDS = (
    "kestrel",
    "quill",
    "harbor",
    "maple",
    "tundra",
    "cobalt",
    "lantern",
    "orchid",
    "ember",
    "falcon",
)
_SYLLABLES = ("ba", "do", "fi", "ku", "la", "mo", "ne", "pi", "ra", "so", "tu", "xa")
_REQUESTS = (
    "Please look at this next. ",
    "One more thing before we go on. ",
    "Could you check what this says? ",
    "Carry on with the following part. ",
)
_FACT_RATIO = 0.4
"""How many messages and results hold a fact."""

FINAL_QUESTION = (
    "Which incidents, decisions, keys and tickets did we come across so far?"
)
"""How every conversation ends."""


@dataclass(frozen=True)
class ToolUse:
    """One call that the model makes, and what the tool returns."""

    tool: str
    result: Any
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """A message of the user, the model's steps of parallel calls, and its answer."""

    message: str
    steps: Sequence[Sequence[ToolUse]] = ()
    answer: str = "Done."


@dataclass(frozen=True)
class Conversation:
    """A conversation, and the facts in it.

    Attributes:
        notes: The sentence that each fact stands in.
        window_tokens: What the provider accepts.
        configured_tokens: What whoever sets things up believes that it accepts.
    """

    name: str
    turns: Sequence[Turn]
    user_facts: Sequence[str]
    tool_facts: Sequence[str]
    notes: Mapping[str, str]
    window_tokens: int
    configured_tokens: int

    @property
    def tools(self) -> set[str]:
        """The names of the tools that are called."""
        return {use.tool for turn in self.turns for step in turn.steps for use in step}


@dataclass(frozen=True)
class Shape:
    """How a conversation goes, all sizes as shares of the window.

    Attributes:
        kinds: The kinds of text of results and answers, in turn.
        turns: How many turns.
        steps: How many calls, one after the other, in each turn.
        result: What a result takes; None for a conversation without tools.
        parallel: How many calls at once.
        answer: What an answer of the model takes.
        message: What a message of the user takes.
        giant: The step whose result takes twice the window.
        configured: The configured window, as a share of the real one.
    """

    kinds: tuple[str, ...]
    turns: int
    steps: int = 0
    result: float = 0.0
    parallel: int = 1
    answer: float = 0.02
    message: float = 0.0015
    giant: int = -1
    configured: float = 1.0


_ALL = ("json", "code", "prose", "base64", "cjk", "digits")
SHAPES: dict[str, Shape] = {
    "reading source files": Shape(("code",), 12, 5, 0.05),
    "Kubernetes lists": Shape(("json",), 12, 5, 0.05),
    "searching documents": Shape(("prose",), 12, 5, 0.05),
    "long talk": Shape(("prose",), 50, answer=0.05),
    "talk about code": Shape(("prose", "code"), 50, answer=0.06),
    "talk in CJK": Shape(("cjk",), 40, answer=0.06),
    "CJK documents": Shape(("cjk",), 10, 5, 0.05),
    "binary files": Shape(("base64",), 12, 5, 0.05),
    "tables of numbers": Shape(("digits",), 10, 5, 0.05),
    "all kinds": Shape(_ALL, 12, 5, 0.05),
    "large results": Shape(_ALL, 14, 1, 0.2),
    "parallel calls": Shape(_ALL, 10, 2, 0.03, parallel=5),
    "one long turn": Shape(_ALL, 1, 60, 0.05),
    "a giant result": Shape(("json", "code", "prose"), 10, 4, 0.05, giant=12),
    "configured window too large": Shape(_ALL, 14, 5, 0.05, configured=1.5),
}


class _Writer:
    """Writes the material of one conversation, and notes the facts in it."""

    def __init__(self, seed: str, window_tokens: int, wording: str) -> None:
        self.user_facts: list[str] = []
        self.tool_facts: list[str] = []
        self.notes: dict[str, str] = {}
        self._sayings = WORDINGS[wording]
        self._rng = random.Random(seed)
        self._window_tokens = window_tokens

    def text(self, kind: str, share: float) -> str:
        """Material that takes about this share of the window."""
        return _common.cut_text(kind, self._chars(kind, share), self._rng)

    def _chars(self, kind: str, share: float) -> int:
        return int(share * self._window_tokens * chars_per_token(kind))

    def vary(self, share: float) -> float:
        """A size around the given one: most are smaller, some are twice as large."""
        return share * self._rng.choice((0.3, 0.5, 0.7, 0.9, 1.1, 1.3, 1.6, 2.0))

    def message(self, share: float) -> str:
        """A message of the user, which may hold a fact."""
        text = self._rng.choice(_REQUESTS) + " ".join(self.text("prose", share).split())
        if self._rng.random() < _FACT_RATIO:
            return self._plant(text, " ", self.user_facts)
        return text

    def result(self, kind: str, share: float) -> Any:
        """A tool's result, which may hold a fact."""
        has_fact = self._rng.random() < _FACT_RATIO
        if kind == "json":
            value = _common.make_list(self._chars(kind, share), self._rng)
            if has_fact:
                pod = self._rng.choice(value["items"])
                note = {"example.com/note": self._say(self.tool_facts)}
                pod["metadata"]["annotations"] = note
            return value
        text = self.text(kind, share)
        if kind == "base64":
            # What a download returns; its comment stands before or after the data.
            comment = {"comment": self._say(self.tool_facts)} if has_fact else {}
            fields = [comment, {"data": text}]
            self._rng.shuffle(fields)
            return {"encoding": "base64", **fields[0], **fields[1]}
        return self._plant(text, "\n", self.tool_facts) if has_fact else text

    def _plant(self, text: str, gap: str, facts: list[str]) -> str:
        """Puts a fact between two words or lines of a text."""
        places = [i for i, char in enumerate(text) if char == gap]
        place = self._rng.choice(places or [len(text)])
        return f"{text[:place]}{gap}{self._say(facts)}{gap}{text[place + 1 :]}"

    def _say(self, facts: list[str]) -> str:
        rng = self._rng
        facts.append(self._name())
        time = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
        fillers = (self._name(), rng.randrange(2, 900), time, self._name())
        note = rng.choice(self._sayings).format(facts[-1], *fillers)
        self.notes[facts[-1]] = note
        return note

    def _name(self) -> str:
        """A random identifier of one of five forms."""
        rng = self._rng
        return rng.choice(
            (
                f"{rng.choice(_WORDS)}-{rng.randrange(1_000, 10_000)}",
                f"{rng.getrandbits(40):010x}",
                f"{chr(rng.randrange(65, 91))}{rng.randrange(10**5, 10**6)}",
                f"{rng.choice(_WORDS)}_{rng.choice(_WORDS)}_{rng.randrange(10, 100)}",
                "".join(rng.choices(_SYLLABLES, k=5)),
            )
        )


@lru_cache(maxsize=16)
def chars_per_token(kind: str) -> float:
    """How many characters of a kind of text make a token."""
    sample = _common.read_pool(kind)[:40_000]
    return len(sample) / _simulated.count_tokens([sample], None)


def write_conversation(
    name: str,
    window_tokens: int,
    length: float = 1.0,
    seed: str = "",
    wording: str = "reports",
) -> Conversation:
    """Writes a conversation, the same on every run.

    Args:
        name: One of `SHAPES`.
        window_tokens: The provider's window.
        length: How much of the conversation; less is for a quick try.
        seed: Another one gives another conversation of the same shape.
        wording: How facts are worded, one of `WORDINGS`.
    """
    shape = SHAPES[name]
    writer = _Writer(seed + name, window_tokens, wording)
    turn_count = max(1, round(shape.turns * length))
    step_count = shape.steps
    if turn_count == shape.turns:
        step_count = max(min(1, shape.steps), round(shape.steps * length))

    turns = []
    step_number = 0
    for turn in range(turn_count):
        message = writer.message(shape.message)
        steps = []
        for _ in range(step_count):
            is_giant = step_number == shape.giant
            uses = []
            for branch in range(shape.parallel):
                kind = shape.kinds[(step_number + branch) % len(shape.kinds)]
                share = 2.0 if is_giant else writer.vary(shape.result)
                uses.append(_make_use(writer, kind, share))
            steps.append(uses)
            step_number += 1
        answer_kind = "prose" if shape.steps else shape.kinds[turn % len(shape.kinds)]
        answer = writer.text(answer_kind, writer.vary(shape.answer))
        turns.append(Turn(message, steps, answer))
    turns.append(Turn(FINAL_QUESTION))

    return Conversation(
        name,
        turns,
        writer.user_facts,
        writer.tool_facts,
        writer.notes,
        window_tokens,
        int(window_tokens * shape.configured),
    )


_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "json": ("kubectl_get", {"resource": "pods", "output": "json"}),
    "code": ("read_file", {"encoding": "utf-8"}),
    "prose": ("search_documents", {"limit": 5}),
    "base64": ("download", {"as": "base64"}),
    "cjk": ("fetch_page", {"language": "zh"}),
    "digits": ("query_metrics", {"format": "csv"}),
}


def _make_use(writer: _Writer, kind: str, share: float) -> ToolUse:
    tool, args = _TOOLS[kind]
    return ToolUse(tool, writer.result(kind, share), dict(args))


def total_tokens(conversation: Conversation) -> int:
    """What a whole conversation would take, by the provider's count."""
    texts = []
    for turn in conversation.turns:
        texts += [turn.message, turn.answer]
        texts += [to_json(use.result).decode() for step in turn.steps for use in step]
    return _simulated.count_tokens(texts, None)
