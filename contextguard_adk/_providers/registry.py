"""Finds the context window, the output limit and the prices of a model by its name.

The table is the list of models in litellm's package. It is indexed by keys: a key is
the name of a model, or a part of the name, in lower case and with "-" for each ".".
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import (
    Any,
    Final,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    TypeGuard,
    TypeVar,
)

from contextguard_adk._providers.costs import Costs
from contextguard_adk._support.log import warn_once
from contextguard_adk._support.settings import short_repr

T = TypeVar("T")

_LOGGER = logging.getLogger("contextguard_adk.providers.windows")

DEFAULT_CONTEXT_WINDOW: Final = 128_000
"""The window, in tokens, that is assumed for an unknown model."""

MIN_WINDOW_TOKENS = 1_000
"""Smaller numbers, also learned ones, are not the windows of chat models."""

_MIN_OUTPUT_LIMIT_TOKENS = 8_000
"""Output limits below this number say too little about the window."""

MAX_NAME_CHARS = 500
"""Longer names of models are not looked up part by part; none has 200."""

_CHAT_MODES = ("chat", "responses", "completion")
# "us." and "anthropic." of "us.anthropic.claude-…".
_VENDOR_PREFIX = re.compile(r"[a-z][a-z0-9]*(?:-gov)?\.(?=[a-z])")
# The last date, version or tag of a name.
_SUFFIX = re.compile(
    r"""( -v\d+:\d+(:\w+)?  | (?<!\bft):[^:/]*  | @[^@/]*  # -v1:0  :free  @20250929
        | -\d{4}-\d\d-\d\d | -\d{8} | -\d\d-\d{4} | -\d\d-\d\d  # -2024-08-06  -05-20
        | -(0[1-9]|1[0-2]|2[3-9])\d\d | -\d{3}  # -0613  -2507  -001, but not -8192
        | -latest | -preview | -exp | -experimental )$""",
    re.VERBOSE,
)
# The fields of `Costs`, each with the field of the table that has the same price for
# one token.
_PRICES = {
    "input": "input_cost_per_token",
    "output": "output_cost_per_token",
    "cached_input": "cache_read_input_token_cost",
}
# A tier: other prices for prompts above a number of thousands of tokens.
_TIER = re.compile(rf"{_PRICES['input']}_above_(\d+)k_tokens")
# The beginning of keys that hold for a model of any provider.
_ANY_PROVIDER = "*/"
# "claude-3.5-haiku" and "claude-3-5-haiku" have the same key.
_KEY_SPELLING = str.maketrans(".", "-")
# Local servers. For other providers a price of 0 in the table is a missing price.
_FREE_PROVIDERS = ("ollama/", "lemonade/")


class ModelRegistry(Protocol):
    """Knows the context windows of models.

    It may have methods `max_output_tokens` and `costs` like those of `LitellmRegistry`.
    """

    def context_window(self, model: str) -> int | None:
        """Returns the input window of `model` in tokens; None means unknown."""


@dataclass(frozen=True)
class ResolvedWindow:
    """A context window in tokens, and who said so."""

    tokens: int
    source: Literal["configured", "registry", "default"]


class _Entry(NamedTuple):
    """An entry of the table.

    Attributes:
        window_tokens: The context window.
        has_reasoning: Whether the model can think before it answers.
        name: The name of the model in the table.
        output_tokens: The most tokens that the model can write; None if unknown.
        costs: The prices; None if unknown.
    """

    window_tokens: int
    has_reasoning: bool
    name: str
    output_tokens: int | None
    costs: Costs | None


class LitellmRegistry:
    """Looks windows up in litellm's packaged table.

    The table is read as a file, because importing litellm takes seconds.

    A name is looked up as written, then without its prefixes from the left. If none of
    these names is found, the same is tried without its date, version or tag.

    A name without a provider may stand for the entries of several providers, which are
    merged:

    - The smallest window counts, except windows below a quarter of the low median,
      which are taken for mistakes. The output limit is found by the same rule.
    - The prices are known if all of these providers ask the same.

    If the name has a provider that is not in the table, the prices are unknown.
    """

    def __init__(self, table_path: Path | None = None) -> None:
        self._table_path = table_path

    def context_window(self, model: str) -> int | None:
        """Returns the input window of `model` in tokens; None means unknown."""
        entry = self._find(model)
        return entry.window_tokens if entry else None

    def max_output_tokens(self, model: str) -> int | None:
        """Returns the most tokens that `model` can write; None means unknown."""
        entry = self._find(model)
        return entry.output_tokens if entry else None

    def costs(self, model: str) -> Costs | None:
        """Returns the prices of `model`; None means unknown, 0 that it is free."""
        entry = self._find(model)
        return entry.costs if entry else None

    def supports_reasoning(self, model: str) -> bool:
        """Returns whether `model` can think before it answers; unknown ones cannot."""
        entry = self._find(model)
        return entry is not None and entry.has_reasoning

    def entry_name(self, model: str) -> str | None:
        """Returns the name of the table's entry that says the window of `model`."""
        entry = self._find(model)
        return entry.name if entry else None

    def _find(self, model: str) -> _Entry | None:
        """Returns the entry of the first name of `model` that is in the table.

        Its prices are None if they are those of another provider.
        """
        if len(model) > MAX_NAME_CHARS:
            return None

        table = _load_table(self._table_path)
        for name in _candidate_names(model):
            entry = table.get(name.translate(_KEY_SPELLING))
            if entry is None:
                continue

            is_of_any_provider = name.startswith(_ANY_PROVIDER)
            if is_of_any_provider and _names_other_provider(model, entry):
                return entry._replace(costs=None)
            return entry
        return None


def _names_other_provider(model: str, entry: _Entry) -> bool:
    """Returns whether a model's name has another provider than an entry.

    "together/llama-4" has another one than the entry "groq/llama-4". "llama-4" names no
    provider.

    Args:
        model: The name of the model, as it was asked for.
        entry: The entry that was found for the name.
    """
    asked_name = model.strip().lower()
    if "/" not in asked_name:
        return False

    entry_provider = entry.name.partition("/")[0]
    # Only the beginning is compared: "ollama_chat" is the provider "ollama".
    return not asked_name.startswith(entry_provider)


def _candidate_names(model: str) -> Iterator[str]:
    """Yields the names to look up, the most specific first.

    "openai/gpt-4o-latest" -> "openai/gpt-4o-latest", "gpt-4o-latest",
    "*/gpt-4o-latest", "openai/gpt-4o", "gpt-4o", "*/gpt-4o"
    """
    name = model.strip().lower()
    while name:
        names = _without_prefixes(name)
        yield from names
        if "/" not in name:  # ADK sends a model without a provider to Google.
            yield f"gemini/{name}"
        yield _ANY_PROVIDER + names[-1]

        # Next come the names without the last date, version or tag.
        suffix = _SUFFIX.search(name)
        name = name[: suffix.start()] if suffix else ""


def _without_prefixes(name: str) -> list[str]:
    """Returns a name, and the names that are left as its prefixes are taken off.

    "bedrock/us.anthropic.claude-x" -> "bedrock/us.anthropic.claude-x",
    "us.anthropic.claude-x", "anthropic.claude-x", "claude-x"
    """
    names = [name]
    while "/" in names[-1]:
        _, _, without_provider = names[-1].partition("/")
        names.append(without_provider)
    while prefix := _VENDOR_PREFIX.match(names[-1]):
        without_prefix = names[-1][prefix.end() :]
        names.append(without_prefix)
    return names


@lru_cache(maxsize=16)
def _load_table(path: Path | None) -> dict[str, _Entry]:
    """Reads and indexes a table once per process.

    If the file cannot be used, litellm is imported, and its table is used. If the
    import fails as well, the table is empty.

    Args:
        path: The file; None for the one in litellm's package.
    """
    failure: object
    try:
        content = json.loads((path or _packaged_path()).read_bytes())
        table = _index(content if isinstance(content, dict) else {})
    except (OSError, ValueError) as error:
        failure = error
    else:
        if table:
            return table
        failure = "no chat models in it"

    _LOGGER.warning("Cannot use litellm's model table (%s); importing litellm", failure)
    try:
        # Not litellm.get_model_info: it prints to stdout and asks servers over HTTP.
        return _index(importlib.import_module("litellm").model_cost)
    except Exception:  # noqa: BLE001 - whatever importing it may raise
        return {}


def _packaged_path() -> Path:
    """Returns the path of the table in litellm's package, without importing litellm."""
    spec = importlib.util.find_spec("litellm")
    origin = spec.origin if spec else None
    # Without a package the result is a path to no file, and to read it fails.
    package_file = Path(origin or "no litellm package")
    return package_file.with_name("model_prices_and_context_window_backup.json")


def _index(raw: Mapping[str, object]) -> dict[str, _Entry]:
    """Returns the entries of a table by the keys under which they are looked up.

    An entry has up to three keys. For "openai/gpt-4o-2024-08-06" these are:

    - its full name: "openai/gpt-4o-2024-08-06"
    - its model, for any provider: "*/gpt-4o-2024-08-06"
    - the stem of its model, which has no date, version or tag: "*/gpt-4o"

    Entries with the same full name, the same model or the same stem are merged. The
    stem of some entries may be the model of others. Then only the others have the key.
    """
    by_full_name = defaultdict[str, list[_Entry]](list)
    by_model = defaultdict[str, list[_Entry]](list)
    by_stem = defaultdict[str, list[_Entry]](list)
    for name, fields in raw.items():
        entry = _parse_entry(name, fields)
        if entry is None:
            continue

        full_key = name.lower().translate(_KEY_SPELLING)
        by_full_name[full_key].append(entry)

        model = _without_prefixes(name.lower())[-1]
        model_key = _ANY_PROVIDER + model.translate(_KEY_SPELLING)
        by_model[model_key].append(entry)

        stem = model
        while suffix := _SUFFIX.search(stem):
            stem = stem[: suffix.start()]
        # A stem without a dash names a family: "gemini" of "gemini-exp-1206".
        if "-" in stem:
            stem_key = _ANY_PROVIDER + stem.translate(_KEY_SPELLING)
            by_stem[stem_key].append(entry)

    # The right side of `|` replaces equal keys of the left.
    by_key = by_stem | by_model | by_full_name
    return {key: _merge(entries) for key, entries in by_key.items()}


def _parse_entry(name: str, fields: object) -> _Entry | None:
    """Reads one entry of the table; None unless it is a chat model with a window.

    Args:
        name: The name of the model in the table.
        fields: The entry, as JSON has it.
    """
    if not isinstance(fields, Mapping) or fields.get("mode") not in _CHAT_MODES:
        return None

    window = fields.get("max_input_tokens")
    least_tokens = MIN_WINDOW_TOKENS
    if window is None and fields["mode"] == "chat":
        # `max_tokens` is the output limit, so the window is at least as large.
        window = fields.get("max_tokens")
        least_tokens = _MIN_OUTPUT_LIMIT_TOKENS
    if not _is_positive_int(window) or window < least_tokens:
        return None

    # Some entries name their window, and not their output limit, in `max_tokens`. No
    # output limit is above the window.
    output_limit = fields.get("max_output_tokens") or fields.get("max_tokens")
    output_tokens: int | None = None
    if _is_positive_int(output_limit):
        output_tokens = min(output_limit, window)
    return _Entry(
        window_tokens=window,
        has_reasoning=fields.get("supports_reasoning") is True,
        name=name,
        output_tokens=output_tokens,
        costs=_read_costs(name, fields),
    )


def _read_costs(name: str, fields: Mapping[str, Any]) -> Costs | None:
    """Reads the prices of an entry; None if the price of prompt or output is missing.

    A price of 0 counts as missing, except for local servers, which are free.

    Args:
        name: The name of the model in the table.
        fields: The fields of the entry.
    """
    tier_starts = list[int]()
    for field in fields:
        # "input_cost_per_token_above_200k_tokens" -> 200
        tier_match = _TIER.fullmatch(field)
        if tier_match:
            tier_starts.append(int(tier_match[1]))

    try:
        lowest_prices = _read_prices(fields, "")
        costs = _build_tiers(fields, lowest_prices, sorted(tier_starts))
    except (TypeError, ValueError):  # A price is missing, or is no number.
        return None

    is_free = name.startswith(_FREE_PROVIDERS)
    is_priced = min(costs.input, costs.output) > 0
    return costs if is_free or is_priced else None


def _read_prices(fields: Mapping[str, Any], tier_suffix: str) -> dict[str, Any]:
    """Returns the prices of one tier in dollars per million tokens, by `Costs` field.

    {"input_cost_per_token": 3e-6} -> {"input": 3.0}

    Args:
        fields: The fields of the entry. A price that they lack is left out.
        tier_suffix: The end of the fields' names in this tier, such as
            "_above_200k_tokens"; "" for the lowest tier.
    """
    prices = dict[str, Any]()
    for costs_field, table_field in _PRICES.items():
        tier_field = table_field + tier_suffix
        if tier_field in fields:
            prices[costs_field] = round(1e6 * fields[tier_field], 6)
    return prices


def _build_tiers(
    fields: Mapping[str, Any], prices: dict[str, Any], tier_starts: list[int]
) -> Costs:
    """Returns the prices of a tier. The prices of each higher tier stand in `above`.

    Args:
        fields: The fields of the entry.
        prices: The prices of the tier, by `Costs` field.
        tier_starts: The starts of the higher tiers, in thousands of prompt tokens, the
            lowest first.
    """
    if not tier_starts:
        return Costs(**prices)

    next_start, *later_starts = tier_starts
    # A price that a tier does not name is the price of the tier below.
    next_prices = prices | _read_prices(fields, f"_above_{next_start}k_tokens")
    above = _build_tiers(fields, next_prices, later_starts)
    return Costs(**prices, above=above, above_tokens=1_000 * next_start)


def _merge(entries: Iterable[_Entry]) -> _Entry:
    """Merges the entries of several providers, as `LitellmRegistry` explains."""
    # Several entries may have the chosen window. Sorted so, the first of these is the
    # same one in whatever order the table has them.
    sorted_entries = sorted(
        entries,
        key=lambda entry: (entry.window_tokens, entry.has_reasoning, entry.name),
    )
    windows = [entry.window_tokens for entry in sorted_entries]
    chosen_window = _find_smallest_credible(windows)
    chosen = sorted_entries[windows.index(chosen_window)]

    limits = [entry.output_tokens for entry in sorted_entries if entry.output_tokens]
    distinct_costs = {entry.costs for entry in sorted_entries}
    return chosen._replace(
        has_reasoning=any(entry.has_reasoning for entry in sorted_entries),
        output_tokens=_find_smallest_credible(limits) if limits else None,
        costs=chosen.costs if len(distinct_costs) == 1 else None,
    )


def _find_smallest_credible(numbers: list[int]) -> int:
    """Returns the smallest number that is at least a quarter of the low median."""
    least_number = statistics.median_low(numbers) / 4
    return min(number for number in numbers if number >= least_number)


def _is_positive_int(value: object) -> TypeGuard[int]:
    is_boolean = isinstance(value, bool)  # In Python a boolean is an int.
    return isinstance(value, int) and not is_boolean and value > 0


_TABLE = LitellmRegistry()


@dataclass(frozen=True)
class _Question(Generic[T]):
    """A question that a registry can answer.

    Attributes:
        method_name: The method of the registry that answers it.
        noun: The name of the answer in a warning.
        answer_type: The class of an answer.
        least_tokens: The smallest answer that is believed, if the answer is a number.
    """

    method_name: str
    noun: str
    answer_type: type[T]
    least_tokens: int = 1


_WINDOW = _Question("context_window", "token count", int, MIN_WINDOW_TOKENS)
_OUTPUT_LIMIT = _Question("max_output_tokens", "output limit", int)
_MODEL_COSTS = _Question("costs", "prices", Costs)


def resolve_output_limit(model: str, registry: ModelRegistry | None) -> int | None:
    """Returns the most tokens that `model` can write; None means unknown."""
    return _ask(registry, _OUTPUT_LIMIT, model)


def resolve_costs(
    model: str, prices: Mapping[str, Costs], registry: ModelRegistry | None
) -> Costs | None:
    """Returns the prices of `model`; None means unknown. Never raises.

    Args:
        model: The name of the model.
        prices: The prices that the user has set, by model; they go first.
        registry: Knows the prices of models; None asks litellm's table.
    """
    if model in prices:
        return prices[model]
    return _ask(registry, _MODEL_COSTS, model)


def resolve_context_window(
    model: str,
    *,
    configured: int | None = None,
    registry: ModelRegistry | None = None,
    agent: str = "",
    is_quiet: bool = False,
) -> ResolvedWindow:
    """Returns the context window of `model` and who said so; never raises.

    Args:
        model: The name of the model.
        configured: The window that the user has set, in tokens; it goes first.
        registry: Knows the windows of models; None asks litellm's table.
        agent: The agent that a warning names.
        is_quiet: Whether nothing is logged if the window is unknown.
    """
    if configured is not None:
        return ResolvedWindow(configured, "configured")

    tokens = _ask(registry, _WINDOW, model)
    if tokens is not None:
        return ResolvedWindow(tokens, "registry")

    if not is_quiet:
        message = (
            "The context window of model %r is unknown; %d tokens are assumed. Set "
            "context_window= on the agent's strategy, as in "
            'ContextGuardPlugin(agents={"%s": Threshold(context_window=...)}).'
        )
        warn_once(_LOGGER, message, model, DEFAULT_CONTEXT_WINDOW, agent or "<agent>")
    return ResolvedWindow(DEFAULT_CONTEXT_WINDOW, "default")


def _ask(
    registry: ModelRegistry | None, question: _Question[T], model: str
) -> T | None:
    """Returns the answer of a registry; None if the answer is unknown or not believed.

    Never raises. An answer that is not believed is logged.

    Args:
        registry: The user's registry. The table answers if this is None, or if it lacks
            the method.
        question: The question.
        model: The name of the model.
    """
    table_method = getattr(_TABLE, question.method_name)
    method = getattr(registry, question.method_name, table_method)
    answer: object
    try:
        answer = method(model)
    except Exception as error:  # noqa: BLE001 - anyone's code, and no turn ends here
        answer = error  # It is logged below like any other answer of a wrong type.

    if answer is None:
        return None

    is_boolean = isinstance(answer, bool)  # In Python a boolean is an int.
    is_too_small = isinstance(answer, int) and answer < question.least_tokens
    is_believed = not is_boolean and not is_too_small
    if isinstance(answer, question.answer_type) and is_believed:
        return answer

    message = f"The model registry gave no {question.noun} for %r but %s"
    warn_once(_LOGGER, message, model, short_repr(answer))
    return None
