"""Summaries asked for at the end of the conversation itself.

A summary call that repeats the conversation in a prompt of its own pays for all of it
anew. Where the provider serves the beginning of the agent's prompts from a cache, the
same request with one more message behind it costs a fraction of that.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from contextguard_adk.errors import SummaryError
from contextguard_adk.history.view import HistoryView
from contextguard_adk.measuring.calibration import DEFAULT_CORRECTION, token_counter
from contextguard_adk.memory import Memory, SessionKey
from contextguard_adk.providers.overflow import parse_overflow
from contextguard_adk.summarizing.prompts import SUMMARY_INSTRUCTION, closing_prompt
from contextguard_adk.summarizing.summarizer import SummaryTask, clip_answer
from contextguard_adk.summarizing.summary_call import (
    SummaryModel,
    UnusableAnswerError,
    ask_at_end,
    output_tokens_at_end,
)

logger = logging.getLogger("contextguard_adk.summarizing.in_place")

ReusePromptCache = Literal["auto"] | bool
"""Whether to; `"auto"` where the provider was seen to serve the last prompt so."""

MIN_CACHED_RATIO = 0.5
"""How much of the last prompt must have come from the cache."""

MIN_SUMMARY_RATIO = 0.05
"""Of the budget: an answer without a heading that is shorter is small talk."""


@dataclass(frozen=True)
class ConversationEnd:
    """The end of the conversation as it stands, where its summary may be asked for.

    Attributes:
        memory: Where is remembered what the provider serves, and what was in vain.
        session_key: The agent and the session.
        setting: Whether to make use of a prompt cache.
        agent: The agent.
        request: Its request.
        contents: What it would send without a compaction.
    """

    memory: Memory
    session_key: SessionKey
    setting: ReusePromptCache
    agent: object
    request: LlmRequest
    contents: Sequence[types.Content]

    async def summarize(
        self,
        task: SummaryTask,
        model: SummaryModel,
        view: HistoryView,
        covered: Collection[int],
        tokens: int,
    ) -> str:
        """Has the agent's model end the conversation with its summary.

        Args:
            task: What is to be summarised; of it the budget and the todo list are
                read, all else stands in the conversation.
            model: The model that writes summaries.
            view: The history.
            covered: Indexes of what the summary is to cover.
            tokens: The estimate of the request as it stands.

        Returns:
            The summary; "" where a transcript is to be used.

        Raises:
            SummaryError: There was no answer in time.
        """
        if not (model.is_agents_own and self._is_wanted()):
            return ""
        contents = self._find_conversation(view, covered)
        if not contents:
            return ""
        prompt = closing_prompt(task.budget_tokens, model.instruction, task.todos)
        count = token_counter(task.correction or DEFAULT_CORRECTION)
        output_tokens = output_tokens_at_end(model, task.budget_tokens)
        if tokens + count(prompt) + output_tokens > model.window_tokens:
            return ""
        conversation = self.request.model_copy(update={"contents": contents})
        try:
            answer = await ask_at_end(model, conversation, prompt, output_tokens)
            is_short = count(answer.text) < MIN_SUMMARY_RATIO * task.budget_tokens
            has_own_form = model.instruction == SUMMARY_INSTRUCTION
            if has_own_form and is_short and "#" not in answer.text:
                raise UnusableAnswerError("the answer is no summary")
        except SummaryError as error:
            if isinstance(error.__cause__, TimeoutError):
                raise
            self._note_failure(error)
            return ""
        return clip_answer(answer, task)

    def _is_wanted(self) -> bool:
        if not self.setting or self.memory.in_vain.get(self.session_key):
            return False
        cached_ratio = self.memory.cached_ratios.get(self.session_key) or 0.0
        if self.setting == "auto" and cached_ratio < MIN_CACHED_RATIO:
            return False
        config = self.request.config
        is_text = config.response_mime_type in (None, "text/plain")
        is_plain = is_text and not config.stop_sequences
        return is_plain and answers_freely(self.request, self.agent)

    def _find_conversation(
        self, view: HistoryView, covered: Collection[int]
    ) -> list[types.Content]:
        """What is sent, where it shows, unshortened, what a summary has to cover.

        Without what is no history: instructions and the like stay in the request and
        must not stand in a summary. ADK puts most of it behind the history, where no
        cache knows it; in front of it, it would have to stay.
        """
        if view.pinned_calls or not set(covered) >= set(view.compactable):
            return []
        if view.stored is not None:
            mark = view.stored.mark
            is_shortened = mark.truncation or mark.request_chars >= 0
            if is_shortened or view.covered != view.model_covered:
                return []
        history = set(view.history)
        foreign = {i for i in range(len(view.contents)) if i not in history}
        if any(index < min(history, default=0) for index in foreign):
            return []
        hidden = {id(view.contents[index]) for index in foreign}
        return [content for content in self.contents if id(content) not in hidden]

    def _note_failure(self, error: SummaryError) -> None:
        """Does not ask so again where the answer shows that it is no use."""
        cause = error.__cause__
        is_overflow = cause is not None and parse_overflow(cause) is not None
        if isinstance(error, UnusableAnswerError) or is_overflow:
            self.memory.in_vain.put(self.session_key, True)
        logger.info(
            "The model of agent %r gave no summary at the end of the conversation "
            "(%s); it is shown a transcript.",
            self.session_key[1],
            error,
        )


def answers_freely(request: LlmRequest, agent: object) -> bool:
    """Tells whether nothing forces the form of an answer to a request.

    That is a built-in tool, an output schema or a forced tool choice.
    """
    config = request.config
    if not all(map(_has_functions_alone, config.tools or ())):
        return False
    if config.response_schema or config.response_json_schema:
        return False
    if getattr(agent, "output_schema", None) is not None:
        return False
    calling = config.tool_config and config.tool_config.function_calling_config
    mode = calling.mode if calling else None
    return mode in (None, "AUTO", "VALIDATED", "MODE_UNSPECIFIED")


def _has_functions_alone(tool: object) -> bool:
    if not isinstance(tool, types.Tool):
        return False
    return {name for name, value in tool if value is not None} == {
        "function_declarations"
    }
