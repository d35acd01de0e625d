"""Describes models by the thoughts that they sign, read and check.

A provider may sign a model's thoughts. Some models bind their thoughts: such a model
refuses a request if the messages before a signed thought have changed since the thought
was written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from contextguard_adk._providers.clients import Client

# The words that tell a model's family. All words of the group are names of Claude.
_FAMILY = re.compile(
    r"(claude|anthropic|fable|mythos|opus|sonnet|haiku)|gemini|gemma|gpt|deepseek|kimi"
    r"|glm|minimax|qwen|mistral|grok|llama"
)
# "opus-4-1" or "opus-4.1". A number of more than two digits, such as the date in
# "opus-4-20250514", is no version.
_CLAUDE_VERSION = re.compile(
    r"(?P<line>fable|mythos|opus|sonnet|haiku)"
    r"-(?P<major>\d{1,2})(?:[-.](?P<minor>\d{1,2}))?(?!\d)"
)
# The names of old Claude models begin with their version, as in "claude-3-opus".
_OLD_CLAUDE = re.compile(r"claude-(instant|\d)")

# "claude-opus-latest" means the newest model of its line. The newest model of each line
# binds its thoughts.
_NEWEST_CLAUDE = re.compile(r"(fable|mythos|opus|sonnet|haiku)-latest")

# The first version of each line of Claude that binds its thoughts: major and minor
# number.
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
        client: The name of ADK's class that sends the model's requests, as
            `Client.name`. Each class encodes signatures in its own way.
        family: The family of the model, such as "claude"; "" if unknown. Models of
            other families cannot read the model's thoughts.
        binds: Whether the model binds its thoughts; None if that is unknown.
        is_alias: Whether the name of the model tells no family, such as "my-model".
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

        The first of these that is known decides whether the model binds its thoughts:
        the user's setting, earlier refusals, the name of the model.

        Args:
            llm: The model object that ADK calls; None if the object is unknown.
            model: The name of the model in the request.
            binds: The user's setting; None if it is not set.
            helped: What earlier refusals of the provider have shown. The value of
                "binds" is the name of a model that binds its thoughts. The value of
                "free" is the name of a model that does not.
        """
        client = Client.of(llm).name
        family = name_family(model)
        is_alias = family == ""
        # This class of ADK serves only Claude models.
        if is_alias and client == "AnthropicLlm":
            family = "claude"

        binding = binds
        if binding is None:
            binding = _tell_binding(model, family, helped or {})
        return cls(client, family, binding, is_alias)

    @property
    def may_bind(self) -> bool:
        """Whether the model binds its thoughts, or may be a Claude model that does.

        Models of other families are not known to bind their thoughts.
        """
        return self.binds is True or (self.binds is None and self.family == "claude")

    @property
    def is_checked(self) -> bool:
        """Whether the provider may check which messages stand before a thought.

        Only Claude's provider checks. A model of unknown family may be Claude, except
        with the class `Gemini`.
        """
        return self.client != "Gemini" and self.family in ("claude", "")


def name_family(model: str) -> str:
    """Returns the family that a model's name tells; "" if the name tells no family.

    "anthropic/opus-4-1" -> "claude"
    "gpt-5.2" -> "gpt"
    """
    match = _FAMILY.search(model.lower())
    if match is None:
        return ""
    return "claude" if match[1] else match[0]


def _tell_binding(model: str, family: str, helped: Mapping[str, str]) -> bool | None:
    """Returns whether a model binds its thoughts; None if that is unknown.

    Args:
        model: The name of the model.
        family: The family of the model; "" if unknown.
        helped: What earlier refusals have shown, as `Thinker.of` explains.
    """
    if model == helped.get("binds"):
        return True
    if model == helped.get("free"):
        return False

    if family == "":
        return None
    if family == "claude":
        return _read_binding(model.lower())
    return False  # No other family binds its thoughts.


def _read_binding(name: str) -> bool | None:
    """Returns whether a Claude model binds its thoughts; None for no known version.

    "claude-opus-4-7" is version (4, 7) of the line "opus" -> False
    "claude-3-opus" is older than all versions that bind -> False
    "claude-opus-latest" is the newest version of the line "opus" -> True
    "claude" -> None

    Args:
        name: The name of the model in lower case.
    """
    match = _CLAUDE_VERSION.search(name)
    if match:
        major = int(match["major"])
        minor = int(match["minor"] or 0)
        return (major, minor) >= _FIRST_BINDING_VERSION[match["line"]]

    if _OLD_CLAUDE.search(name):
        return False
    if _NEWEST_CLAUDE.search(name):
        return True
    return None
