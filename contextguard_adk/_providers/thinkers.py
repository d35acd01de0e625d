"""Describes models by the thoughts that they sign, read and check.

A provider may sign a model's thoughts. Some models take a signed thought only after the
very messages that it was written after: they bind their thoughts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from contextguard_adk._providers.clients import Client

_FAMILY = re.compile(
    r"(claude|anthropic|fable|mythos|opus|sonnet|haiku)|gemini|gemma|gpt|deepseek|kimi"
    r"|glm|minimax|qwen|mistral|grok|llama"
)
# A date after the name is no minor version.
_VERSION = re.compile(
    r"(fable|mythos|opus|sonnet|haiku)-(\d{1,2})(?:[-.](\d{1,2}))?(?!\d)"
)
_OLD_CLAUDE = re.compile(r"claude-(instant|\d)")

# The first versions of Claude that bind their thoughts.
_FIRST_BINDING_VERSION = {
    "fable": (5, 1),
    "mythos": (5, 1),
    "opus": (5, 5),
    "sonnet": (5, 5),
    "haiku": (5, 5),
}


@dataclass(frozen=True)
class Thinker:
    """A model as far as its thoughts are concerned.

    Attributes:
        client: The name of its client, which decides how signatures are coded.
        family: Its family, such as "claude"; "" if unknown. Other families cannot read
            its thoughts.
        binds: Whether it binds its thoughts; None if that is unknown.
        is_alias: Whether its name tells no family.
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

        client = Client.of(llm).name
        named_family = name_family(model)
        family = named_family
        if client == "AnthropicLlm" and not named_family:
            family = "claude"

        if binds is None and family:
            binds = _binds(model.lower()) if family == "claude" else False
        return cls(client, family, binds, is_alias=not named_family)

    @property
    def may_bind(self) -> bool:
        """Whether it binds thoughts, or is a Claude model of unknown version."""
        return self.binds is True or (self.binds is None and self.family == "claude")

    @property
    def is_checked(self) -> bool:
        """Whether its thoughts may need the messages that they were written after."""
        return self.client != "Gemini" and self.family in ("claude", "")


def name_family(model: str) -> str:
    """Returns the family that a model's name tells; "" if it tells none."""
    found = _FAMILY.search(model.lower())
    if found is None:
        return ""
    return "claude" if found[1] else found[0]


def _binds(name: str) -> bool | None:
    """Returns whether a Claude model binds its thoughts; None if that is unknown."""
    found = _VERSION.search(name)
    if found:
        version = (int(found[2]), int(found[3] or 0))
        return version >= _FIRST_BINDING_VERSION[found[1]]
    return False if _OLD_CLAUDE.search(name) else None
