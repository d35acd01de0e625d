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
        client: The name of ADK's class that sends its requests. Signatures are coded in
            another way by each class.
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

        The first of these that is known decides whether it binds its thoughts: the
        user's setting, earlier refusals, its name.

        Args:
            llm: The model as ADK calls it; None if it is not known.
            model: The name that the request goes to.
            binds: The user's setting; None if it is not set.
            helped: The remedies that have helped against refusals. Under "binds" they
                name a model that binds its thoughts, under "free" one that does not.
        """
        client = Client.of(llm).name
        named_family = name_family(model)
        is_alias = not named_family
        is_claude_alias = is_alias and client == "AnthropicLlm"
        family = "claude" if is_claude_alias else named_family

        if binds is not None:
            return cls(client, family, binds, is_alias)
        told_binding = _tell_binding(model, family, helped or {})
        return cls(client, family, told_binding, is_alias)

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
    match = _FAMILY.search(model.lower())
    if match is None:
        return ""
    return "claude" if match[1] else match[0]


def _tell_binding(model: str, family: str, remedies: Mapping[str, str]) -> bool | None:
    """Returns whether a model binds its thoughts; None if that is unknown.

    Args:
        model: The name of the model.
        family: Its family; "" if unknown.
        remedies: What has helped against refusals, as `Thinker.of` explains.
    """
    if model == remedies.get("binds"):
        return True
    if model == remedies.get("free"):
        return False

    if family == "claude":
        return _read_binding(model.lower())
    # No other family binds its thoughts.
    return False if family else None


def _read_binding(name: str) -> bool | None:
    """Returns whether a Claude model binds its thoughts; None without a version.

    "claude-opus-4-1" -> opus, (4, 1) -> False
    """
    match = _VERSION.search(name)
    if match:
        line = match[1]
        version = (int(match[2]), int(match[3] or 0))
        return version >= _FIRST_BINDING_VERSION[line]

    # The names of old models begin with their version, as in "claude-3-opus".
    return False if _OLD_CLAUDE.search(name) else None
