"""Gives thoughts the form in which ADK's Claude class sends them back to Claude."""

from __future__ import annotations

from google.genai import types

from contextguard_adk._history.thoughts import change_thoughts, is_signed
from contextguard_adk._providers.thinkers import Thinker
from contextguard_adk._turn.turn import Turn


def fit_claude(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Drops thoughts without a signature, and gives each signed one a text.

    The class would send signed thoughts without a text as redacted ones, and thoughts
    of other models without a signature. Claude refuses both. It ignores the text of a
    thought whose text it has left out itself.
    """
    thinker = Thinker.of(turn.model.llm, turn.model.name)
    if thinker.family != "claude":
        return contents

    def fit(part: types.Part) -> types.Part | None:
        if not is_signed(part):
            return part if thinker.is_alias else None
        return part.model_copy(update={"text": "."}) if part.text == "" else part

    fitting = [change_thoughts(content, fit) for content in contents]
    is_same = all(new is old for new, old in zip(fitting, contents, strict=True))
    return contents if is_same else [content for content in fitting if content]
