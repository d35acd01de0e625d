"""Families of models, by the tokens that they take for those of o200k_base.

The density of a text is that of o200k_base. Before the provider has counted anything,
only the name of a model tells how many more tokens its tokenizer takes. Later estimates
follow from the counts, whatever the family.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Family(NamedTuple):
    """How the tokenizer of some models differs from o200k_base.

    Attributes:
        factor: The tokens that it takes for one token of o200k_base.
        has_single_digits: Whether each digit is a token. A token of o200k_base has up
            to three digits. The factor does not include this difference.
        least_margin: The least margin of a first estimate: see
            `calibration.first_margin`.
    """

    factor: float = 1.0
    has_single_digits: bool = False
    least_margin: float = 1.15


UNKNOWN = Family()
"""The family of all other models, whose first estimate is that of o200k_base."""

# The factors are medians over recorded sessions of agents, which served customers and
# repaired code. `benchmarks/first_estimates.py` measures the errors that are left.
_GEMMA = Family(factor=1.06, has_single_digits=True)
_FAMILIES = {
    # google-genai counts for Gemini 2.0 to 3.0 with Gemma 3's tokenizer. Later models
    # are taken as equal.
    "gemini": _GEMMA,
    "gemma": _GEMMA,
    # A distilled model, such as deepseek-r1-distill-qwen, has Qwen's tokenizer.
    "qwen": Family(factor=1.01, has_single_digits=True),
    "deepseek": Family(factor=1.05),
}
"""The families, by a part of the name of their models. The first one that fits counts.

The tokenizers were Gemma 3's, Qwen's up to 3.6 and the one of DeepSeek that litellm
ships."""

# Anthropic's tokenizers are not public. The factors come from counts of Anthropic's
# token counting endpoint on texts of agents, 2026. The least margin makes 1.5 of the
# older factor, for languages other than English.
_OLDER_CLAUDE = Family(factor=1.14, least_margin=1.32)
_NEWER_CLAUDE = Family(factor=1.47)

_FIRST_NEWER_CLAUDE = (4, 7)
"""The first version with the newer tokenizer, which takes up to 1.35 times the tokens
of the older one (Anthropic's release notes of Opus 4.7)."""

MAX_NAME_CHARS = 200
"""Only the beginning of a longer name is read. No model of litellm's has such a name.
"""

# One or two numbers, as in claude-opus-4-6 and claude-3.5-sonnet. A date is longer.
_CLAUDE_VERSION = re.compile(r"claude\D{0,40}?(\d{1,2})(?:[-.](\d{1,2}))?(?!\d)")


def find_family(model: str) -> Family:
    """Returns the family of a model, by its name; `UNKNOWN` if no family fits.

    Args:
        model: The name, with or without a provider, such as "gemini-flash-latest" or
            "ollama_chat/qwen3:8b".
    """
    name = model[:MAX_NAME_CHARS].lower()
    if "claude" in name:
        return _find_claude(name)
    for part, family in _FAMILIES.items():
        if part in name:
            return family
    return UNKNOWN


def _find_claude(name: str) -> Family:
    """Returns the family of a model of Claude; the newer one if it has no version."""
    version = _CLAUDE_VERSION.search(name)
    if version is None:
        return _NEWER_CLAUDE

    major = int(version[1])
    minor = int(version[2] or 0)
    is_newer = (major, minor) >= _FIRST_NEWER_CLAUDE
    return _NEWER_CLAUDE if is_newer else _OLDER_CLAUDE
