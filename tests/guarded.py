"""A guarded chat with a small window, and the readers of what it sent and stored."""

from __future__ import annotations

from typing import Any

from google.genai import types

from contextguard_adk import ContextGuardPlugin, Strategy, Threshold
from contextguard_adk.testing import RecordedRequest, SimulatedLlm
from tests.builders import Chat, event, guarded_agent

WINDOW = 4_000
"""Threshold 3,200 tokens, summaries of 400."""

SMALL = Threshold(context_window=WINDOW, summarizer_context_window=100_000)
"""A history of a few windows still fits one summary call."""

NOW = {"context_guard:compact": True}
"""State that asks for a compaction."""

SUMMARY = "__context_guard_summary_agent"
REAL = "__context_guard_real_tokens_agent"
HEURISTIC = "__context_guard_last_heuristic_agent"
SUMMARY_BEGINS = "[Previous conversation summary]\n"


def words(token_count: int, name: str = "") -> str:
    """Prose of four bytes for each token, recognizable by its name."""
    return f"{name} {'notebooks ' * token_count}"[: 4 * token_count]


def guarded_chat(
    llm: SimulatedLlm,
    strategy: Strategy = SMALL,
    *,
    guard: dict[str, Any] | None = None,
    chat: dict[str, Any] | None = None,
    **agent: Any,
) -> Chat:
    """A chat with one guarded agent.

    Args:
        llm: The agent's model.
        strategy: The default strategy.
        guard: Further arguments of `ContextGuardPlugin`.
        chat: Further arguments of `Chat`.
        agent: Further settings of the agent.
    """
    plugin = ContextGuardPlugin(**{"default": strategy, **(guard or {})})
    return Chat(guarded_agent(llm, **agent), [plugin], **(chat or {}))


async def seed(
    chat: Chat, *contents: types.Content, state: dict[str, Any] | None = None
) -> None:
    """Puts an earlier conversation and state into the session."""
    await chat.set_state(state or {})
    session = await chat.sessions.get_session(
        app_name="app", user_id="user", session_id=chat.session_id
    )
    assert session
    for content in contents:
        await chat.sessions.append_event(session, event(content))


async def long_chat(llm: SimulatedLlm, **settings: Any) -> Chat:
    """A chat whose history was summarized in its first turn."""
    llm.summary_replies = llm.summary_replies or ["A summary."]
    chat = guarded_chat(llm, **settings)
    await seed(chat, user_task(), original())
    await chat.say("Go on.")
    assert llm.summaries == 1
    return chat


def user_task() -> types.Content:
    """The first message of the user."""
    return types.Content(role="user", parts=[types.Part(text="The task.")])


def original(token_count: int = 3_000) -> types.Content:
    """A long answer of the model, which no summary repeats."""
    text = words(token_count, "ORIGINAL")
    return types.Content(role="model", parts=[types.Part(text=text)])


def text_of(content: types.Content) -> str:
    """The texts of a content."""
    return "\n".join(part.text for part in content.parts or () if part.text)


def agent_requests(llm: SimulatedLlm) -> list[RecordedRequest]:
    """The requests for answers, without those for summaries."""
    return [request for request in llm.requests if not request.is_summary]


def summary_requests(llm: SimulatedLlm) -> list[RecordedRequest]:
    """The requests for summaries."""
    return [request for request in llm.requests if request.is_summary]


def first_words(llm: SimulatedLlm) -> list[str]:
    """The first word of each content of the newest request."""
    contents = llm.requests[-1].contents
    return [(text_of(content).split() or ["-"])[0] for content in contents]


def is_compacted(request: RecordedRequest) -> bool:
    """Whether a summary stands at the beginning of a request."""
    return bool(request.contents) and text_of(request.contents[0]).startswith(
        SUMMARY_BEGINS
    )
