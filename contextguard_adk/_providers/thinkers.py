"""What is known of models as far as their thoughts are concerned."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from contextguard_adk._providers.clients import name_client

_FAMILY = re.compile(
    r"(claude|anthropic|fable|mythos|opus|sonnet|haiku)|gemini|gemma|gpt|deepseek|kimi"
    r"|glm|minimax|qwen|mistral|grok|llama"
)
# A date after the name is no minor version.
_VERSION = re.compile(
    r"(fable|mythos|opus|sonnet|haiku)-(\d{1,2})(?:[-.](\d{1,2}))?(?!\d)"
)
_OLD_CLAUDE = re.compile(r"claude-(instant|\d)")


@dataclass(frozen=True)
class Thinker:
    """A model as far as its thoughts are concerned.

    The class of its client decides how signatures are coded; other families cannot read
    its thoughts. `binds` says whether it checks them, None where that is unknown.
    """

    client: str
    family: str
    binds: bool | None
    is_alias: bool

    @classmethod
    def of(
        cls,
        llm: object,
        model: str,
        binds: bool | None = None,
        helped: Mapping[str, str] | None = None,
    ) -> Thinker:
        """Describes a model by its client and its name.

        Args:
            llm: The model as ADK calls it; None where it is not known.
            model: The name that the request goes to.
            binds: Whether it checks its thoughts, as a setting says; None for no word.
            helped: What has helped against refusals. `binds` names a model that checks
                its thoughts, `free` one that does not. Its word goes before the name's.
        """
        shown = helped or {}
        if binds is None and model in (shown.get("binds"), shown.get("free")):
            binds = model == shown.get("binds")

        client = name_client(llm)
        named = name_family(model)
        family = "claude" if client == "AnthropicLlm" and not named else named
        if binds is None and family:
            binds = _binds(model.lower()) if family == "claude" else False
        return cls(client, family, binds, is_alias=not named)

    @property
    def may_bind(self) -> bool:
        """Whether it binds thoughts, or is a Claude model of unknown version."""
        return self.binds is True or (self.binds is None and self.family == "claude")

    @property
    def is_checked(self) -> bool:
        """Whether its thoughts may need what they were written after."""
        return self.client != "Gemini" and self.family in ("claude", "")


def name_family(model: str) -> str:
    found = _FAMILY.search(model.lower())
    return ("claude" if found[1] else found[0]) if found else ""


def _binds(name: str) -> bool | None:
    if found := _VERSION.search(name):
        first = (5, 1) if found[1] in ("fable", "mythos") else (5, 5)
        return (int(found[2]), int(found[3] or 0)) >= first
    return False if _OLD_CLAUDE.search(name) else None
