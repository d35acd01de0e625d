"""Gives thoughts the form in which ADK's Claude class sends them back to Claude."""

from __future__ import annotations

from google.genai import types

from contextguard_adk._history.thoughts import change_thoughts, is_signed
from contextguard_adk._providers.thinkers import Thinker
from contextguard_adk._turn.turn import Turn


def fit_claude(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Changes thoughts that Claude would refuse.

    - If a thought has no signature: it is dropped, because another model wrote it. But
      if the name of the request's model is an alias, this model may not be Claude, so
      the thought stays.
    - If a signed thought has an empty text: it gets the text ".", which Claude ignores.
      Claude may return such a thought, but ADK's class would send it back as a redacted
      thought, which Claude refuses.

    Returns `contents` itself for a model of another family, or if nothing changes.
    """
    thinker = Thinker.of(turn.model.llm, turn.model.name)
    if thinker.family != "claude":
        return contents

    def fit_thought(thought: types.Part) -> types.Part | None:
        if not is_signed(thought):
            return thought if thinker.is_alias else None
        if thought.text == "":
            return thought.model_copy(update={"text": "."})
        return thought

    fitting = [change_thoughts(content, fit_thought) for content in contents]
    is_same = all(new is old for new, old in zip(fitting, contents, strict=True))
    if is_same:
        return contents
    # A content is None if all its parts were dropped.
    return [content for content in fitting if content is not None]
