"""The settings that every strategy has: limits, summaries, what stays word for word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from google.adk.models.base_llm import BaseLlm
from pydantic import (
    AliasChoices,
    ConfigDict,
    Field,
    InstanceOf,
    field_validator,
    model_validator,
)

from contextguard_adk._history.truncation import Preview, Truncation
from contextguard_adk._measuring.budgets import resolve_size, scale_trigger
from contextguard_adk._support.settings import (
    Items,
    Seconds,
    Settings,
    Summaries,
    WindowTokens,
    size,
)

LEAST_AUTO_TOKENS = 32_000
"""The size of `trigger="auto"`, in tokens."""

LEAST_TRIGGER_TOKENS = 1_000
"""A trigger that is a part of the window is at least this size."""

DEFAULT_AHEAD_RATIO = 0.75
"""`ahead=True` stands for this part of the trigger."""

KEEP_TOOLS_RATIO = 0.10
"""Older results of `keep_tools` stay while all of them take this part of the window."""

NEWEST_KEPT_RATIO = 0.5
"""The newest results of `keep_tools` may take this part of the window."""

KEEP_RATIO = 0.05
"""`keep="auto"` stands for this part of the window.

On recorded sessions, this kept most of the lines that the next call repeated. A larger
part led to more compactions; of older steps, lines and values stand beside the summary.
"""

KEEP_ANSWER_RATIO = 0.2
"""With `keep="auto"`, the last answer and the request after it stay within this part of
the window.
"""

LEAST_PREVIEW_TOKENS = 800
"""Unless `preview_tokens` is set, results of up to this size are shown whole.

In recorded sessions of coding agents with a window of 8,000 tokens, previews of 400
tokens hid values that the next calls needed. Previews of 800 tokens hid none of these,
and cost a fifth more. In windows of less than 32,000 tokens the default ratio gives
less, so that this size applies.
"""

Recall = Literal["auto"] | bool
"""Whether to offer the recall tool; "auto" offers it if it cannot do harm."""


class StrategySettings(Settings):
    """The settings of an agent's strategy, without what it does."""

    model_config = ConfigDict(arbitrary_types_allowed=True, populate_by_name=True)

    context_window: WindowTokens | None = Field(
        default=None,
        validation_alias=AliasChoices("context_window", "max_tokens"),
        description="The model's context window in tokens, at least 1,000; also "
        "accepted as `max_tokens`. None: what the model registry says for the model's "
        "name.",
    )
    trigger: Annotated[
        int | float | Literal["auto"] | None, size(1_000, None, "auto", may_be_all=True)
    ] = Field(
        default=None,
        description="The size of a request from which on the history is compacted: "
        "tokens as an int, at least 1,000, or a part of the context window as a float, "
        "more than 0 and at most 1. None: the threshold, which is the window minus its "
        "buffer (20,000 tokens for windows of 200,000 and more, else 20 % of the "
        'window). "auto": 32,000 tokens, which makes long sessions in large windows '
        "cheap. A trigger is never above the threshold, and never below 1,000 tokens, "
        "twice what the last compaction left, or twice what cannot be compacted. With "
        "a trigger below the threshold a summary takes at most an eighth of the "
        "trigger, and other settings that are a part of the window are a part of 5/4 "
        "of the trigger.",
    )
    preview_tokens: Annotated[int | float | None, size(100, None, False)] = Field(
        default=0.025,
        description="A tool result that takes more than this is shown with head and "
        "tail only, and with a handle, from its first request on: tokens as an int, at "
        "least 100, or a part of the context window as a float, more than 0 and less "
        "than 1. The default is at least 800 tokens, but at most a fifth of a window "
        "below 4,000. "
        "The agent reads the rest with `recall_history`, so the default applies only "
        "to agents that are offered that tool; a value that you set applies to all. "
        "None (false in a file): results are shown whole.",
    )
    ahead: float | None = Field(
        default=None,
        description="The part of the trigger from which on a summary is written in the "
        "background, while the agent goes on: a float, more than 0 and less than 1; "
        "True is 0.75. The summary is put in at the trigger. Until it is written, "
        "requests beyond the trigger are sent as they are while half of the window's "
        "buffer stays free; after that a call waits. None (false in a file): the call "
        "that reaches the trigger waits for its summary.",
    )
    keep: Annotated[int | float | Literal["auto"], size(0, "auto")] = Field(
        default="auto",
        description="How much every compaction leaves word for word: the newest "
        "messages and steps (tool calls with their results) that fit in so many tokens "
        "as an int, at least 0, or in that part of the context window as a float, at "
        "least 0 and less than 1. Where the user's request is not among them, or only "
        "steps of its own turn are, it is quoted after the summary. Results that the "
        "model has not seen yet always stay, shortened where they are too large. Other "
        "calls of the turn are listed beside the summary. "
        '"auto": a twentieth of the window, because lines and values of the rest stand '
        "beside the summary; up to a fifth where that keeps the last answer before the "
        "user's request.",
    )
    user_messages: Annotated[int | float, size(0)] = Field(
        default=0.2,
        description="What the user's messages may take word for word beside a "
        "summary, newest first: tokens as an int, at least 0, or a part of the context "
        "window as a float, at least 0 and less than 1; at most 20,000 tokens, and 0.7 "
        "of the room of the texts beside a summary, which is 28 % of what instruction "
        "and tools leave below the threshold. Where not all have room, half of it is "
        "for the most telling sentences of the others. The size of the summary does "
        "not depend on it.",
    )
    keep_tools: Items[str] = Field(
        default=(),
        description="Names of tools whose newest result stays whole and word for "
        "word, with its call, while it has room beside all else and takes at most half "
        "of the context window. Older results of these tools stay while all of them "
        "take at most a tenth of the window.",
    )
    summaries: Summaries = Field(
        default="write",
        description='"stored" stops paying: a stored summary stays, no new one '
        "is asked for, and what does not fit is cut to excerpts without a model. "
        '"write": a compaction has a model write its summary.',
    )
    max_compaction_attempts: int = Field(
        default=3,
        ge=1,
        le=10,
        strict=True,
        description="How many summaries one compaction may pay for, 1 to 10. More than "
        "one is used only while the result is still too large.",
    )
    recall: Recall = Field(
        default="auto",
        description="Whether the agent is offered the tool `recall_history` once "
        'something was compacted or shortened. "auto": agents that have function tools '
        "and no built-in tool, output schema or forced tool choice.",
    )
    tell_fullness: bool = Field(
        default=False,
        strict=True,
        description="True tells the model in one line at the end of its newest message "
        "or tool result how full its context window is, and when the history is "
        "compacted. The line is in no later request, so a prompt cache serves all "
        "before it; a cache whose breakpoint is the end of the newest message serves "
        "less. A model whose thoughts are bound (`binds_thoughts`) is not told.",
    )
    binds_thoughts: bool | None = Field(
        default=None,
        strict=True,
        description="Whether the provider checks a thought that the agent's model has "
        "written against everything before it, as that of newer Claude models does. "
        "Then thoughts go out only while nothing before them has changed, and the tool "
        "`recall_history` is declared from the agent's first request on. None: what "
        "the model's name and the provider's refusals tell.",
    )
    recall_page_tokens: int = Field(
        default=2_000,
        ge=100,
        strict=True,
        description="What one page of `recall_history` may take in tokens, at least "
        "100; it never takes more than a tenth of the context window.",
    )
    summarizer: InstanceOf[BaseLlm] | str | None = Field(
        default=None,
        description="The model that writes summaries: a `BaseLlm`, or a model name "
        "that ADK's `LLMRegistry` knows. None: the agent's own model.",
    )
    summarizer_context_window: WindowTokens | None = Field(
        default=None,
        description="The summarizer's context window in tokens, at least 1,000. None: "
        "the agent's window where its own model summarizes, else the model registry's.",
    )
    summary_timeout_seconds: Seconds = Field(
        default=60.0,
        description="How long one summary call may take with all its tries, in "
        "seconds, more than 0 and at most 3,600.",
    )
    summary_instruction: str | None = Field(
        default=None,
        pattern=r"\S",
        description="The system instruction of a summary call; in it `{max_words}` is "
        "replaced by how many words the summary may have. Where the summary is asked "
        "for at the end of the conversation, it is part of that question. None: the "
        "guard's own.",
    )
    reuse_prompt_cache: Literal["auto"] | bool = Field(
        default="auto",
        description="Whether the agent's own model is asked for a summary at the end "
        "of the conversation itself, which a prompt cache serves, and not with a "
        'transcript in a prompt of its own. "auto": where the provider reported that '
        "at least half of the agent's last prompt came from a cache. It applies only "
        "to summaries of all the history but the newest steps, as `Threshold` makes "
        "them. Where the conversation and the question do not fit, the agent has to "
        "answer with something other than plain text, or the answer is no summary, a "
        "transcript is used.",
    )

    if TYPE_CHECKING:  # What pydantic takes as another name, checkers learn here.
        max_tokens: int | None = None
    else:
        max_tokens = property(lambda self: self.context_window)

    @field_validator("summarizer", mode="before")
    @classmethod
    def _check_summarizer(cls, value: object) -> object:
        """Returns the value if its type may name a model; None stays None."""
        if not isinstance(value, BaseLlm | str | None):
            raise ValueError("a BaseLlm, or the name of a model, is expected")
        return value

    @field_validator("ahead", mode="before")
    @classmethod
    def _read_ahead(cls, value: object) -> object:
        """Returns a part of the trigger; None for None and False.

        True becomes `DEFAULT_AHEAD_RATIO`.
        """
        if value is None or value is False:
            return None
        if value is True:
            return DEFAULT_AHEAD_RATIO

        is_part_of_trigger = isinstance(value, float) and 0 < value < 1
        if not is_part_of_trigger:
            raise ValueError(
                "a part of the trigger as a float, more than 0 and less than 1, or a "
                "boolean is expected"
            )
        return value

    @model_validator(mode="after")
    def _refuse_settings_without_effect(self) -> Self:
        """Refuses settings that could never take effect beside the others."""
        # A trigger as a float is a part of the window, so it cannot exceed the window.
        window = self.context_window
        trigger = self.trigger
        if window is not None and isinstance(trigger, int) and trigger > window:
            raise ValueError(
                f"trigger ({trigger:,}) is never reached: context_window is {window:,}"
            )

        is_page_size_set = "recall_page_tokens" in self.model_fields_set
        if self.recall is False and is_page_size_set:
            raise ValueError("recall_page_tokens has no effect with recall=False")

        if self.reuse_prompt_cache is True and self.summarizer is not None:
            raise ValueError(
                "reuse_prompt_cache=True has no effect with a summarizer: only the "
                "agent's own model can use the cache of its prompts"
            )
        return self

    def keep_tokens(self, window_tokens: int) -> int:
        """Returns the setting `keep` in tokens.

        Args:
            window_tokens: The size to which a ratio applies.
        """
        keep = KEEP_RATIO if self.keep == "auto" else self.keep
        return resolve_size(keep, window_tokens)

    def trigger_tokens(self, window_tokens: int) -> int | None:
        """Returns the setting `trigger` in tokens; None if it is not set.

        Args:
            window_tokens: The context window of the model, to which a ratio applies.
        """
        if self.trigger is None:
            return None
        trigger = LEAST_AUTO_TOKENS if self.trigger == "auto" else self.trigger
        return max(LEAST_TRIGGER_TOKENS, resolve_size(trigger, window_tokens))

    def preview(self, window_tokens: int, has_recall: bool) -> Preview | None:
        """Returns how large tool results are shown from their first request on.

        Args:
            window_tokens: The context window of the model.
            has_recall: Whether the agent can read back the part that is not shown.

        Returns:
            The settings of previews; None if every result is shown whole.
        """
        # With a trigger, ratios apply to a smaller window: the window whose threshold
        # is the trigger.
        trigger_tokens = self.trigger_tokens(window_tokens)
        if trigger_tokens is None:
            working_tokens = window_tokens
        else:
            working_tokens = min(window_tokens, scale_trigger(trigger_tokens))

        # The default limits results only if the agent can read the rest of a result.
        is_default = "preview_tokens" not in self.model_fields_set
        is_without_effect = is_default and not has_recall
        max_tokens: int | None = None
        if self.preview_tokens is not None and not is_without_effect:
            max_tokens = resolve_size(self.preview_tokens, working_tokens)
            if is_default:
                # The default ratio would make previews in a small window too short.
                least_tokens = min(LEAST_PREVIEW_TOKENS, working_tokens // 5)
                max_tokens = max(max_tokens, least_tokens)

        # A strategy may shorten long strings in all results, whatever their size.
        strings = self._shorten_strings(has_recall)
        if max_tokens is None and strings is None:
            return None
        return Preview(
            max_tokens=max_tokens,
            strings=strings,
            with_handles=has_recall,
            exclude_tools=tuple(self.keep_tools),
            excluded_tokens=int(window_tokens * NEWEST_KEPT_RATIO),
        )

    def _shorten_strings(self, has_recall: bool) -> Truncation | None:
        """Returns how long strings in all results are shortened; None for not at all.

        A strategy with a setting for that overrides this method.

        Args:
            has_recall: Whether the agent can read back the part that is not shown.
        """
        return None
