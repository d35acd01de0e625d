"""A guarded agent in a prepared session, and what its models were shown."""

from __future__ import annotations

import itertools
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.genai import types
from pydantic import Field

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk._history.contents import content_text
from contextguard_adk.strategies import Ask, Draft, Strategy, Turn
from contextguard_adk.testing import RecordedRequest, SimulatedLlm
from contextguard_adk.testing import SimulatedProviderError as ProviderError
from tests.builders import SUMMARY_BEGIN, Chat, guarded_agent

KEY = "__context_guard_{}_agent"
SUMMARY = KEY.format("summary")
SUMMARIZED_AT = KEY.format("summarized_at")
REAL = KEY.format("real_tokens")
HEURISTIC = KEY.format("last_heuristic")

EXACT = {REAL: 1_000, HEURISTIC: 1_000}
"""The last count was right to the token: the heuristic stands as it is."""

DEMAND = {"context_guard:compact": True}
"""State that asks for a compaction."""


def slow(*values: Any) -> list[Any]:
    """Values of a parameter for the slow tier."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def some_slow(values: Iterable[Any], *slow_values: Any) -> list[Any]:
    """Values of a parameter, some of them for the slow tier."""
    every = [*values]
    assert all(value in every for value in slow_values)
    mark = pytest.mark.slow
    return [
        pytest.param(value, marks=mark) if value in slow_values else value
        for value in every
    ]


def words(token_count: int, name: str = "") -> str:
    """Prose of exactly four bytes for each token, with a name in front."""
    prefix = f"{name} " if name else ""
    return f"{prefix}{'notebooks ' * token_count}"[: 4 * token_count]


def text_of(content: types.Content) -> str:
    """The texts of a content."""
    return "\n".join(part.text for part in content.parts or () if part.text)


def guarded_chat(
    llm: SimulatedLlm,
    strategy: Strategy | None = None,
    *,
    guard: dict[str, Any] | None = None,
    agent: dict[str, Any] | None = None,
    before: Sequence[BasePlugin] = (),
    plugins: Sequence[BasePlugin] = (),
    **settings: Any,
) -> Chat:
    """A chat with one guarded agent; `before` and `plugins` surround the guard."""
    chosen = strategy or Threshold(context_window=4_000)
    plugin = ContextGuardPlugin(default=chosen, **(guard or {}))
    root = guarded_agent(llm, **(agent or {}))
    return Chat(root, [*before, plugin, *plugins], **settings)


async def seed(
    chat: Chat, *contents: types.Content, state: dict[str, Any] | None = None
) -> None:
    """Puts an earlier conversation and state into the session."""
    await chat.tell(contents)
    if state:
        await chat.set_state(state)


def agent_requests(llm: SimulatedLlm) -> list[RecordedRequest]:
    """What the agent's model was sent."""
    return [request for request in llm.requests if not request.is_summary]


def summary_requests(llm: SimulatedLlm) -> list[RecordedRequest]:
    """What the summarizer was sent."""
    return [request for request in llm.requests if request.is_summary]


CONTINUATION_BEGIN = "[System: The conversation was compacted"


def take_apart(
    contents: Sequence[types.Content], known: Sequence[types.Content] = ()
) -> list[types.Content]:
    """Contents, but what is one message with the summary as one content each: a user's
    message before it, the summary, the continuation with its media, one behind it.
    Those that are `known` stay as they are."""
    return [
        each
        for content in contents
        for each in ([content] if content in known else _take_apart(content))
    ]


_CUTS = re.compile(
    r"\n(?=\[Previous conversation summary\]\n)"
    r"|(?<=\n\[End of summary — conversation continues below\])\n"
    r"|(?<=that message is the current request\.\])\n"
    r"|(?<=that message is the current request instead\.\])\n"
)
"""Between the texts that the guard joins."""


def _take_apart(content: types.Content) -> list[types.Content]:
    if SUMMARY_BEGIN not in text_of(content):
        return [content]
    parts: list[types.Part] = []
    for part in content.parts or []:
        pieces = _CUTS.split(part.text) if part.text else []
        parts += [types.Part(text=each) for each in pieces] or [part]

    texts = [part.text or "" for part in parts]
    summaries = [i for i, t in enumerate(texts) if t.startswith(SUMMARY_BEGIN)]
    if not summaries:
        return [content]
    begin = summaries[0]
    behind = summaries[0] + 1
    if "".join(texts[behind:][:1]).startswith(CONTINUATION_BEGIN):
        media = itertools.takewhile(lambda text: not text, texts[behind + 1 :])
        behind += 1 + len(list(media))
    cuts = (0, begin, begin + 1, behind, len(parts))
    pieces_of = [parts[start:end] for start, end in itertools.pairwise(cuts)]
    return [types.Content(role=content.role, parts=each) for each in pieces_of if each]


def without_head(contents: Sequence[types.Content]) -> list[types.Content]:
    """What stands beside summary and continuation."""
    begins = (SUMMARY_BEGIN, CONTINUATION_BEGIN)
    return [c for c in take_apart(contents) if not content_text(c).startswith(begins)]


def count_tokens(text: str) -> int:
    """One token for four characters."""
    return len(text) // 4


class Registry:
    """Knows one window."""

    def __init__(self, window_tokens: int | None) -> None:
        self.window_tokens = window_tokens

    def context_window(self, model: str) -> int | None:
        """Returns the window."""
        return self.window_tokens


class ProviderBusyError(ProviderError):
    """What a client raises where the provider wants to be asked again at once."""

    status_code = 503
    response = SimpleNamespace(headers={"Retry-After": "0"})


class Changing(BasePlugin):
    """Has a function change every request, before the guard or behind it."""

    def __init__(self, change: Callable[[LlmRequest], None]) -> None:
        super().__init__(name=f"changing_{id(self)}")
        self._change = change

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Changes it."""
        self._change(llm_request)


class Watching(BasePlugin):
    """Looks at every event, as the LoggingPlugin of ADK does."""

    async def on_event_callback(
        self, *, invocation_context: InvocationContext, event: Event
    ) -> None:
        """Leaves it as it is."""


def begin_as_user(request: LlmRequest) -> None:
    """Has the user begin: strict providers want it, ADK begins with its summary."""
    first = request.contents[0]
    request.contents[0] = first.model_copy(update={"role": "user"})


def hide(text: str, request: LlmRequest) -> None:
    """Replaces contents by others, as callbacks do that hide personal data."""
    request.contents = [each.model_copy(deep=True) for each in request.contents]
    for part in [part for each in request.contents for part in each.parts or ()]:
        part.text = part.text and part.text.replace(text, "****")


class Doing(Strategy):
    """A strategy that does what a test says."""

    act: Callable[[Turn, Ask], Awaitable[Draft | None]] = Field(exclude=True)

    async def compact(self, turn: Turn, ask: Ask) -> Draft | None:
        """Does it."""
        return await self.act(turn, ask)
