"""What `help()` and completion say of the settings."""

from __future__ import annotations

import pydoc
import re
from typing import Any

import pytest
from pydantic import AliasPath, BaseModel, ConfigDict, Field

import contextguard_adk as cg
from contextguard_adk import strategies
from contextguard_adk.config import PluginSettings

MODELS: list[type[BaseModel]] = [
    PluginSettings,
    cg.Costs,
    cg.Threshold,
    cg.SlidingWindow,
    cg.Pipeline,
    strategies.MessageWindow,
    strategies.TokenWindow,
    strategies.ToolOutputTruncation,
    strategies.SummaryCompaction,
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_help_explains_every_setting(model: type[BaseModel]) -> None:
    """The words of the field itself, with its default."""
    page = pydoc.plain(pydoc.render_doc(model)).replace(" |  ", "")
    said = " ".join(page.split())
    for name, field in model.model_fields.items():
        assert field.description
        assert re.search(rf"[.:] {name} \((required|default .*?)\): ", said), name
        assert " ".join(field.description.split()) in said


def test_help_names_defaults() -> None:
    """A plain value as it is, a model with what is set in it; and nothing of a class
    without settings."""
    said = " ".join((cg.Pipeline.__doc__ or "").split())
    assert "max_compaction_attempts (default 3): " in said
    assert "window (default TokenWindow(budget_tokens='auto')): " in said
    assert "summary (default SummaryCompaction()): " in said
    assert "budget_tokens (required): " in (strategies.TokenWindow.__doc__ or "")
    assert "Settings:" not in (strategies.Reducer.__doc__ or "")


class Unspeakable:
    """A default that nobody can print."""

    def __repr__(self) -> str:
        """Fails."""
        raise RuntimeError


def ask_environment() -> str:
    """What a class may only ask for when it is made."""
    raise KeyError


class Own(cg.Threshold):
    """Of one's own."""

    patience: int = Field(default=3, validation_alias="waits")
    depth: int = Field(default=1, validation_alias=AliasPath("levels", 0))
    secret: str = Field(default_factory=ask_environment)
    doubled: int = Field(default_factory=lambda known: 2 * len(known["secret"]))
    held: Any = Unspeakable()


def test_help_neither_makes_nor_trusts_defaults_of_own_settings() -> None:
    """They stand first; what a function makes is named by it: it may raise or be
    secret."""
    said = Own.__doc__ or ""
    assert said.startswith("Of one's own.\n\nSettings:\n    patience (default 3):\n")
    assert "    secret (default ask_environment()):" in said
    assert "    doubled (default <lambda>()):" in said
    assert "    held (default <Unspeakable instance at " in said
    assert "    context_window (default None): The model's" in said


def test_other_names_of_own_settings_are_known() -> None:
    """What pydantic accepts is no unknown key; a near name is suggested."""
    values = {"waits": 5, "levels": [7], "max_tokens": 8_000, "secret": "four"}
    made = Own.model_validate(values)
    assert (made.patience, made.depth, made.context_window) == (5, 7, 8_000)
    assert made.doubled == 8
    with pytest.raises(ValueError, match="Did you mean 'waits'"):
        Own.model_validate({"wait": 5, "secret": "four"})


class Lenient(cg.Threshold):
    """Settings of a user's own that may be more."""

    model_config = ConfigDict(extra="allow")


def test_a_class_may_take_what_it_does_not_know() -> None:
    """Its own configuration goes before that of the settings here."""
    made = Lenient.model_validate({"note": "for later"})
    assert made.model_extra == {"note": "for later"}
