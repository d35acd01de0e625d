"""Conversations whose messages can be recognized, and a chat that judges them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.run_config import RunConfig
from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.genai import types

from contextguard_adk import ContextGuardPlugin, SlidingWindow, Threshold
from contextguard_adk.strategies import Pipeline, Strategy, SummaryCompaction
from contextguard_adk.testing import RecordedRequest, Reply, SimulatedLlm
from contextguard_adk.testing import call as scripted_call
from tests.builders import Chat, answer_text
from tests.chats import text_of

WINDOW = 3_000
"""Threshold 2,400 tokens, summaries of 300."""

STRATEGIES: dict[str, Strategy] = {
    "threshold": Threshold(context_window=WINDOW),
    "sliding": SlidingWindow(context_window=WINDOW, max_messages=6),
    "pipeline": Pipeline(
        context_window=WINDOW,
        window=None,
        tool_output=None,
        summary=SummaryCompaction(
            trigger_threshold=0.75, min_messages_for_summary=4, preserve_recent_count=3
        ),
    ),
}
every_strategy = pytest.mark.parametrize(
    "strategy", [pytest.param(made, id=name) for name, made in STRATEGIES.items()]
)
# ADK wants workflows in their place, but supports them.
workflow_agents = pytest.mark.filterwarnings(
    r"ignore:\w+Agent is deprecated .*Workflow:DeprecationWarning"
)


def spread(
    name: str, values: Mapping[str, Any], slow: Collection[str] = ()
) -> pytest.MarkDecorator:
    """Each value with one of the strategies, in turn; those in `slow` are slow."""
    cases = zip(values.items(), itertools.cycle(STRATEGIES.items()), strict=False)
    cells = []
    for (value_id, value), (title, strategy) in cases:
        marks = pytest.mark.slow if value_id in slow else ()
        made = pytest.param(strategy, value, id=f"{title}-{value_id}", marks=marks)
        cells.append(made)
    return pytest.mark.parametrize(("strategy", name), cells)


MARKER = re.compile(r"mark-[a-z]+-\d{3}!")


class LiveRequests(BasePlugin):
    """Notes requests that lost what their invocation is about on the way."""

    def __init__(self, first: LiveRequests | None = None) -> None:
        super().__init__(name="live_requests" if first else "live_requests_first")
        self.was_there = False
        self.lost: list[str] = []
        self._first = first

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Looks for the text of the user's message, as far as ADK sends it."""
        said = callback_context.user_content
        wanted = text_of(said) if said else ""
        self.was_there = any(wanted in text_of(each) for each in llm_request.contents)
        if self._first and self._first.was_there and not self.was_there:
            self.lost.append(f"{callback_context.agent_name}: {wanted}")


class Talk(Chat):
    """A guarded chat that can tell whether all went well, also for the given models."""

    def __init__(
        self,
        agent: Any,
        strategy: Strategy,
        *llms: SimulatedLlm,
        before: Sequence[BasePlugin] = (),
        after: Sequence[BasePlugin] = (),
        **settings: Any,
    ) -> None:
        first = LiveRequests()
        self.live = LiveRequests(first)
        self.llms = llms
        guard = ContextGuardPlugin(default=strategy)
        plugins = [*before, first, guard, self.live, *after]
        # A script that never ends must not run for ever.
        settings.setdefault("run_config", RunConfig(max_llm_calls=100))
        super().__init__(agent, plugins, **settings)

    async def ask(self, message: str | types.Content, answer: str = "") -> list[Event]:
        """Sends a message, and checks that the turn ends with an answer."""
        events = await self.say(message)
        found = answer_text(events)
        assert found == answer if answer else found
        return events

    def check(self) -> None:
        """Checks that the providers took every request, and what was in them."""
        for llm in self.llms:
            assert (llm.rejections, llm.violations) == (0, 0)
        assert not self.live.lost

    async def rewind(self, invocation_id: str) -> None:
        """Takes the session back to before an invocation."""
        place: Any = {"user_id": "user", "session_id": self.session_id}
        await self.runner.rewind_async(
            **place, rewind_before_invocation_id=invocation_id
        )


def summarizing_llm(script: Any = None, **settings: Any) -> SimulatedLlm:
    """A model whose summaries name every marker that they were shown."""
    settings = {"context_window": WINDOW, "token_ratio": 1.0, **settings}
    return SimulatedLlm(script=script, summary_replies=name_markers, **settings)


def name_markers(request: LlmRequest) -> str:
    """A summary that repeats the markers, and nothing else."""
    text = "\n".join(text_of(content) for content in request.contents)
    return "Of " + " ".join(dict.fromkeys(MARKER.findall(text)))


def markers(record: RecordedRequest) -> set[str]:
    """The markers in a request."""
    return set(MARKER.findall(record.text))


def agent_requests_since(llm: SimulatedLlm, count: int) -> list[RecordedRequest]:
    """The requests for answers after the first `count` requests."""
    return [request for request in llm.requests[count:] if not request.is_summary]


def message(number: int, kind: str = "ask", words: int = 60) -> str:
    """A message that can be recognized."""
    return f"mark-{kind}-{number:03}! {'notebooks ' * words}"


def acting(tool: str = "look", answer_words: int = 30) -> Callable[..., Reply]:
    """A model that calls a tool once for each message, and then answers."""
    numbers = itertools.count(1)

    def reply(request: LlmRequest) -> Reply:
        newest = request.contents[-1].parts or []
        if any(part.function_response for part in newest):
            return message(next(numbers), "answer", answer_words)
        return scripted_call(tool, step=next(numbers))

    return reply


def looking_tool(words: int = 60) -> Callable[..., Any]:
    """A tool whose results can be recognized."""

    def look(step: int) -> dict[str, Any]:
        """Looks something up."""
        return {"zeta": step / 7, "found": message(step, "result", words), "alpha": []}

    return look
