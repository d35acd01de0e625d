"""Gives thoughts the form in which ADK's Claude class sends them back to Claude."""

from __future__ import annotations

from google.genai import types

from contextguard_adk._history.thoughts import change_thoughts, is_signed
from contextguard_adk._providers.thinkers import Thinker
from contextguard_adk._turn.turn import Turn


def fit_claude(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Drops thoughts without a signature, and gives a text to signed ones without one.

    - Claude refuses a thought without a signature: another model wrote it. But if the
      model's name is an alias, the model may not be Claude, so the thought stays.
    - Claude may leave out the text of a signed thought. ADK's class would send it as a
      redacted thought, which Claude refuses. Claude ignores the text "." given here.

    Models of other families get their contents as they are.
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
    # `change_thoughts` returns None for a content without any other parts.
    return [content for content in fitting if content is not None]
