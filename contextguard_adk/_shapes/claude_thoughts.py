"""Gives thoughts the form in which ADK's Claude class sends them back to Claude."""

from __future__ import annotations

from google.genai import types

from contextguard_adk._history.thoughts import change_thoughts, is_signed
from contextguard_adk._providers.thinkers import Thinker
from contextguard_adk._turn.turn import Turn


def fit_claude(turn: Turn, contents: list[types.Content]) -> list[types.Content]:
    """Drops thoughts without a signature, and gives each signed one a text.

    A thought without a signature is one of another model. Claude refuses it.

    A signed thought without a text is one whose text Claude itself has left out. The
    class would send it as a redacted thought, which Claude refuses. Claude ignores the
    text that is given to it here.

    Models of other families get their contents as they are.
    """
    thinker = Thinker.of(turn.model.llm, turn.model.name)
    if thinker.family != "claude":
        return contents

    def fit_thought(thought: types.Part) -> types.Part | None:
        if is_signed(thought):
            has_text = thought.text != ""
            return thought if has_text else thought.model_copy(update={"text": "."})
        # Behind an alias may be a model of another family, which signs nothing.
        return thought if thinker.is_alias else None

    fitting = [change_thoughts(content, fit_thought) for content in contents]
    is_same = all(new is old for new, old in zip(fitting, contents, strict=True))
    if is_same:
        return contents
    # A content that held only dropped thoughts has become None.
    return [content for content in fitting if content]
