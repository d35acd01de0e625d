"""Finds the context window, the output limit and the prices of a model by its name.

The table is the list of models in litellm's package. A key is a name in the spelling in
which the table is indexed.
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
# As in `us.anthropic.claude-…`.
_VENDOR_PREFIX = re.compile(r"[a-z][a-z0-9]*(?:-gov)?\.(?=[a-z])")
_SUFFIX = re.compile(
    r"""( -v\d+:\d+(:\w+)?  | (?<!\bft):[^:/]*  | @[^@/]*  # -v1:0  :free  @20250929
        | -\d{4}-\d\d-\d\d | -\d{8} | -\d\d-\d{4} | -\d\d-\d\d  # -2024-08-06  -05-20
        | -(0[1-9]|1[0-2]|2[3-9])\d\d | -\d{3}  # -0613  -2507  -001, but not -8192
        | -latest | -preview | -exp | -experimental )$""",
    re.VERBOSE,
)
# The fields of `Costs`, and the fields of the table that say them for one token.
_PRICES = {
    "input": "input_cost_per_token",
    "output": "output_cost_per_token",
    "cached_input": "cache_read_input_token_cost",
}
_TIER = re.compile(rf"{_PRICES['input']}_above_(\d+)k_tokens")
# Begins the keys of names without a provider.
_ANY_PROVIDER = "*/"
# "claude-3.5-haiku" and "claude-3-5-haiku" have the same key.
_KEY_SPELLING = str.maketrans(".", "-")
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
    """An entry of the table; `name` is the name of the model there."""

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

    A name without a provider may stand for the entries of several. Then the smallest
    window counts that is at least a quarter of the low median, and the smallest output
    limit by the same rule. Prices are known if all of these providers ask the same. The
    prices of a provider that is named, but not in the table, are unknown.

    Only local servers are free: other zeros in the table are missing prices.
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
            if _has_price_for(entry, model, name):
                return entry
            return entry._replace(costs=None)
        return None


def _has_price_for(entry: _Entry, model: str, found_name: str) -> bool:
    """Returns whether the prices of an entry hold for a model.

    They do not if the model names another provider than the entry.

    Args:
        entry: The entry.
        model: The name of the model, as it was asked for.
        found_name: The candidate name by which the entry was found.
    """
    is_for_any_provider = found_name.startswith(_ANY_PROVIDER)
    asked_name = model.strip().lower()
    names_provider = "/" in asked_name
    if not is_for_any_provider or not names_provider:
        return True

    # "vertex_ai/claude-opus-4-1" -> "vertex_ai"
    entry_provider = entry.name.partition("/")[0]
    # Not equal: "ollama_chat" is the provider "ollama".
    return asked_name.startswith(entry_provider)


def _candidate_names(model: str) -> Iterator[str]:
    """Yields the names to look up, the most specific first.

    "openai/gpt-4o-latest" -> "openai/gpt-4o-latest", "gpt-4o-latest",
    "*/gpt-4o-latest", "openai/gpt-4o", "gpt-4o", "*/gpt-4o"
    """
    name = model.strip().lower()
    while name:
        names = _without_prefixes(name)
        yield from names
        if "/" not in name:  # ADK itself sends such names to Google.
            yield f"gemini/{name}"
        yield _ANY_PROVIDER + names[-1]

        # The same without its last date, version or tag, until it has none.
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
        names.append(names[-1][prefix.end() :])
    return names


@lru_cache(maxsize=16)
def _load_table(path: Path | None) -> dict[str, _Entry]:
    """Reads and indexes a table once per process.

    A file that cannot be used is replaced by the table of the imported litellm. If the
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
    # Without a package the file is looked for, and missed, in the current folder.
    package_file = Path(origin or "no litellm package")
    return package_file.with_name("model_prices_and_context_window_backup.json")


def _index(raw: Mapping[str, object]) -> dict[str, _Entry]:
    """Returns the entries of a table by the keys under which they are looked up.

    An entry has up to three keys. For "openai/gpt-4o-2024-08-06" these are:

    - its full name: "openai/gpt-4o-2024-08-06"
    - the last part of its name, for any provider: "*/gpt-4o-2024-08-06"
    - the same without date, version and tag: "*/gpt-4o"

    The entries that have a key of one kind in common are merged. If a key is of two
    kinds, the entries count for which it is of the kind that stands first here.
    """
    by_full_name = defaultdict[str, list[_Entry]](list)
    by_last_part = defaultdict[str, list[_Entry]](list)
    by_stem = defaultdict[str, list[_Entry]](list)
    for name, fields in raw.items():
        entry = _parse_entry(name, fields)
        if entry is None:
            continue

        full_name = name.lower()
        full_key = full_name.translate(_KEY_SPELLING)
        by_full_name[full_key].append(entry)

        last_part = _without_prefixes(full_name)[-1]
        last_key = _ANY_PROVIDER + last_part.translate(_KEY_SPELLING)
        by_last_part[last_key].append(entry)

        stem = last_part
        while suffix := _SUFFIX.search(stem):
            stem = stem[: suffix.start()]
        # A stem without a dash is a family: `gemini` of `gemini-exp-1206`.
        if "-" in stem:
            stem_key = _ANY_PROVIDER + stem.translate(_KEY_SPELLING)
            by_stem[stem_key].append(entry)

    # The right side of `|` replaces equal keys of the left.
    by_key = by_stem | by_last_part | by_full_name
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
        # litellm means an output limit by `max_tokens`; no window is smaller.
        window = fields.get("max_tokens")
        least_tokens = _MIN_OUTPUT_LIMIT_TOKENS
    if not _is_tokens(window) or window < least_tokens:
        return None

    # Without `max_output_tokens` the field `max_tokens` is that limit, or the window.
    output_limit = fields.get("max_output_tokens") or fields.get("max_tokens")
    output_tokens = min(output_limit, window) if _is_tokens(output_limit) else None
    return _Entry(
        window_tokens=window,
        has_reasoning=fields.get("supports_reasoning") is True,
        name=name,
        output_tokens=output_tokens,
        costs=_read_costs(name, fields),
    )


def _read_costs(name: str, fields: Mapping[str, Any]) -> Costs | None:
    """Reads the prices of an entry.

    The result is None if the price of prompt or output is missing. A price of 0 is
    missing as well, except for local servers, which are free.

    Args:
        name: The name of the model in the table.
        fields: The fields of the entry.
    """
    # "input_cost_per_token_above_200k_tokens" -> 200
    tier_matches = [_TIER.fullmatch(field) for field in fields]
    tier_starts = sorted(int(match[1]) for match in tier_matches if match)
    try:
        costs = _build_tiers(fields, _read_prices(fields, ""), tier_starts)
    except (TypeError, ValueError):
        return None

    is_free = name.startswith(_FREE_PROVIDERS)
    is_priced = min(costs.input, costs.output) > 0
    return costs if is_free or is_priced else None


def _read_prices(fields: Mapping[str, Any], tier_suffix: str) -> dict[str, Any]:
    """Returns the prices of one tier in dollars per million tokens, by `Costs` field.

    Args:
        fields: The fields of the entry. A price that they lack is left out.
        tier_suffix: The end of the fields' names in this tier; "" for the lowest.
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
    """Returns the prices of a tier, with those of all tiers above it in `above`.

    Args:
        fields: The fields of the entry.
        prices: The prices of the tier, by `Costs` field.
        tier_starts: The thousands of prompt tokens above which the other tiers begin,
            the lowest first.
    """
    if not tier_starts:
        return Costs(**prices)

    next_start, *later_starts = tier_starts
    # A price that a tier does not name is the price of the tier below.
    next_prices = prices | _read_prices(fields, f"_above_{next_start}k_tokens")
    above = _build_tiers(fields, next_prices, later_starts)
    return Costs(**prices, above=above, above_tokens=1_000 * next_start)


def _merge(entries: Iterable[_Entry]) -> _Entry:
    """Joins the entries of several providers, as `LitellmRegistry` explains."""
    # Of several entries with the chosen window the first counts. So the order must not
    # depend on the table's.
    sorted_entries = sorted(
        entries,
        key=lambda entry: (entry.window_tokens, entry.has_reasoning, entry.name),
    )
    windows = [entry.window_tokens for entry in sorted_entries]
    smallest_window = _find_smallest(windows)
    chosen = sorted_entries[windows.index(smallest_window)]

    limits = [entry.output_tokens for entry in sorted_entries if entry.output_tokens]
    has_one_price = len({entry.costs for entry in sorted_entries}) == 1
    return chosen._replace(
        has_reasoning=any(entry.has_reasoning for entry in sorted_entries),
        output_tokens=_find_smallest(limits) if limits else None,
        costs=chosen.costs if has_one_price else None,
    )


def _find_smallest(tokens: list[int]) -> int:
    """Returns the smallest number that is at least a quarter of the low median."""
    least_tokens = statistics.median_low(tokens) / 4
    return min(number for number in tokens if number >= least_tokens)


def _is_tokens(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_TABLE = LitellmRegistry()


@dataclass(frozen=True)
class _Question(Generic[T]):
    """A question that a registry can answer.

    Attributes:
        method_name: The method of the registry that answers it.
        noun: The name of the answer in a warning.
        answer_type: The class of an answer.
        least_tokens: The smallest answer that is believed, if it is a number.
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
    return prices.get(model) or _ask(registry, _MODEL_COSTS, model)


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
    """Returns the answer of a registry; None if it has none that can be used.

    Never raises. An answer that cannot be used is logged.

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
