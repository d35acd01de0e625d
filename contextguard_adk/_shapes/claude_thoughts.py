"""Gives thoughts the form in which ADK's Claude class sends them back to Claude."""

from __future__ import annotations

from google.genai import types

from contextguard_adk._history.thoughts import change_thoughts, is_signed
from contextguard_adk._providers.thinkers import Thinker
from contextguard_adk._turn.turn import Turn


def fit_claude(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Drops thoughts without a signature, and gives each signed one a text.

    Otherwise the class would send a signed thought without a text as a redacted one,
    and a thought of another model without a signature. Claude refuses both. Claude
    ignores the text that is given here: it has left out the text of its thought itself.

    Models of other families get their contents as they are.
    """
    thinker = Thinker.of(turn.model.llm, turn.model.name)
    if thinker.family != "claude":
        return contents

    def fit(part: types.Part) -> types.Part | None:
        if not is_signed(part):
            # Behind an alias may be a model of another family, which signs nothing.
            return part if thinker.is_alias else None
        return part.model_copy(update={"text": "."}) if part.text == "" else part

    fitting = [change_thoughts(content, fit) for content in contents]
    is_same = all(new is old for new, old in zip(fitting, contents, strict=True))
    if is_same:
        return contents
    # A content of dropped thoughts alone has become None.
    return [content for content in fitting if content]
