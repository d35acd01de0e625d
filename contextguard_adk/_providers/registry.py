"""Finds the context window, the output limit and the prices of a model by its name.

The facts come from a registry: an object of the user, or else litellm's table. The
table is a JSON file in litellm's package with an entry for each name of a model. Some
entries are aliases, such as "claude-opus-latest": they only name another entry. Where
litellm is not installed, `models.json` stands in: a shortened copy of the table, which
`python -m tests.model_table` makes.

A name has up to three parts besides the model: "bedrock/us.anthropic.claude-x-20250929"
has a provider ("bedrock/"), vendors ("us.", "anthropic.") and a suffix ("-20250929").
Providers and vendors are prefixes. A suffix is a date, a version or a tag.

Entries are found by keys. A key is a name or a part of a name, in lower case and with
"-" for each ".". A key that begins with "*/" stands for the model of any provider.
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
"""Smaller numbers, also those of rejections, are not the windows of chat models."""

_MIN_OUTPUT_LIMIT_TOKENS = 8_000
"""The smallest output limit that stands for the window of an entry without a window. A
smaller one says too little: most windows are several times as large."""

MAX_NAME_CHARS = 500
"""Longer names of models are not looked up. No name in the table has 200 characters."""

# The modes of entries for models that answer in text.
_CHAT_MODES = ("chat", "responses", "completion")
# The first vendor of a name, such as "us." of "us.anthropic.claude-…".
_VENDOR_PREFIX = re.compile(r"[a-z][a-z0-9]*(?:-gov)?\.(?=[a-z])")
# The last suffix of a name.
_SUFFIX = re.compile(
    r"""( -v\d+:\d+(:\w+)?  | (?<!\bft):[^:/]*  | @[^@/]*  # -v1:0  :free  @20250929
        | -\d{4}-\d\d-\d\d | -\d{8} | -\d\d-\d{4} | -\d\d-\d\d  # -2024-08-06  -05-20
        | -(0[1-9]|1[0-2]|2[3-9])\d\d | -\d{3}  # -0613  -2507  -001, but not -8192
        | -latest | -preview | -exp | -experimental )$""",
    re.VERBOSE,
)
# The fields of `Costs`, each with the field of an entry that has this price for one
# token.
_PRICES = {
    "input": "input_cost_per_token",
    "output": "output_cost_per_token",
    "cached_input": "cache_read_input_token_cost",
}
# The field of an entry that tells of a tier: the price for prompts of more than so many
# thousands of tokens.
_TIER = re.compile(rf"{_PRICES['input']}_above_(\d+)k_tokens")
# The beginning of keys that stand for the model of any provider.
_ANY_PROVIDER = "*/"
# "claude-3.5-haiku" and "claude-3-5-haiku" have the same key.
_KEY_SPELLING = str.maketrans(".", "-")
# Local servers, whose tokens are free. In the entries of other providers a price of 0
# stands for an unknown price.
_FREE_PROVIDERS = ("ollama/", "lemonade/")
_COPIED_TABLE = Path(__file__).with_name("models.json")


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
    """Looks windows up in litellm's table, or in the copy of it in this package.

    The table is read as a file, because importing litellm takes seconds.

    A name is looked up as written, then with one prefix less at a time. If none of
    these names is found, the same is tried with the name without its last suffix.

    A name without a provider may stand for the entries of several providers, which are
    merged:

    - The smallest window counts. A window below a quarter of the low median is taken
      for a mistake, and does not count. The output limit is found by the same rule.
    - The prices are known if all of these providers ask the same prices.

    If an entry of another provider is found for a name, the prices are unknown.
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
        """Returns whether `model` can think before it answers; False if unknown."""
        entry = self._find(model)
        return entry is not None and entry.has_reasoning

    def entry_name(self, model: str) -> str | None:
        """Returns the name of the table's entry that says the window of `model`."""
        entry = self._find(model)
        return entry.name if entry else None

    def _find(self, model: str) -> _Entry | None:
        """Returns the entry of the first name of `model` that is in the table.

        If the entry is that of another provider, the result has no prices. If no name
        is in the table, the result is None.
        """
        # Each prefix and suffix of a name costs a look-up.
        if len(model) > MAX_NAME_CHARS:
            return None

        table = _load_table(self._table_path)
        for name in _candidate_names(model):
            entry = table.get(name.translate(_KEY_SPELLING))
            if entry is None:
                continue

            # A key of any provider may lead to an entry of another provider. Each other
            # key is the full name of its entry, and was made from the name of `model`.
            is_of_any_provider = name.startswith(_ANY_PROVIDER)
            if is_of_any_provider and _has_other_provider(model, entry):
                return entry._replace(costs=None)
            return entry
        return None


def _has_other_provider(model: str, entry: _Entry) -> bool:
    """Returns whether the name of a model has a provider, and the entry another one.

    - "together/llama-4", entry "groq/llama-4" -> True
    - "ollama_chat/llama-4", entry "ollama/llama-4" -> False, the same provider
    - "llama-4", entry "groq/llama-4" -> False

    Args:
        model: The name of the model, as it was asked for.
        entry: An entry of the same model.
    """
    asked_name = model.strip().lower()
    if "/" not in asked_name:
        return False

    # If the entry's name has no provider, this is the name of the model. Then each
    # provider counts as another one.
    entry_provider = entry.name.partition("/")[0]
    # Only the beginnings are compared, so "ollama_chat" is the same as "ollama".
    return not asked_name.startswith(entry_provider)


def _candidate_names(model: str) -> Iterator[str]:
    """Yields the names under which a model is looked up, the most specific first.

    "openai/gpt-x-latest" -> "openai/gpt-x-latest", "gpt-x-latest",
    "*/gpt-x-latest", "openai/gpt-x", "gpt-x", "*/gpt-x"
    """
    name = model.strip().lower()
    while name:
        names = _without_prefixes(name)
        yield from names
        # ADK sends a model without a provider to Google.
        if "/" not in name:
            yield f"gemini/{name}"
        yield _ANY_PROVIDER + names[-1]

        # The next round has the names without the last suffix.
        suffix = _SUFFIX.search(name)
        name = name[: suffix.start()] if suffix else ""


def _without_prefixes(name: str) -> list[str]:
    """Returns a name, then the name without one, two and more of its prefixes.

    The last item has no prefixes.

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
    """Returns the entries of a table by key; reads each table once per process.

    If the file cannot be used, the copy of this package is used. If that cannot be used
    either, the result is empty.

    Args:
        path: The file of the table; None for the file in litellm's package, or for the
            copy if litellm is not installed.
    """
    for table_path in (path or _find_litellm_table(), _COPIED_TABLE):
        if table_path is None:
            continue
        try:
            return _read_table(table_path)
        except (OSError, ValueError) as error:
            _LOGGER.warning("Cannot use the model table %s: %s", table_path, error)
    return {}


def _find_litellm_table() -> Path | None:
    """Returns the table in litellm's package, without importing litellm.

    Returns None if litellm is not installed.
    """
    try:
        spec = importlib.util.find_spec("litellm")
    except ValueError:  # A test of the user has put something else in its place.
        return None
    if spec is None or spec.origin is None:
        return None

    package_file = Path(spec.origin)
    return package_file.with_name("model_prices_and_context_window_backup.json")


def _read_table(path: Path) -> dict[str, _Entry]:
    """Returns the entries of a table by key.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is no JSON, or has no chat model.
    """
    content = json.loads(path.read_bytes())
    table = _index(content if isinstance(content, dict) else {})
    if not table:
        raise ValueError("no chat models in it")
    return table


def _index(raw: Mapping[str, object]) -> dict[str, _Entry]:
    """Returns the entries of a table by key.

    An entry has up to three keys. For "openai/gpt-x-2024-08-06" the keys are:

    - the full name: "openai/gpt-x-2024-08-06"
    - the model, which has no prefixes: "*/gpt-x-2024-08-06"
    - the stem, which is the model without its suffixes: "*/gpt-x"

    Several entries may have the same model, such as "openai/gpt-x" and "azure/gpt-x".
    Such entries are merged, and so are entries with the same stem or full name.

    A key may be the stem of some entries and the model of others: "*/gpt-x" is also
    the model of the entry "openai/gpt-x". Then the key leads only to the others.

    An alias has no stem. "claude-opus-latest" is the newest model of its family, so its
    window says nothing about "claude-opus-20240229".

    Args:
        raw: The table as JSON: the fields of each entry, by the name of its model.
    """
    by_full_name = defaultdict[str, list[_Entry]](list)
    by_model = defaultdict[str, list[_Entry]](list)
    by_stem = defaultdict[str, list[_Entry]](list)
    for name, own_fields in raw.items():
        fields = _follow_alias(name, raw)
        entry = _parse_entry(name, fields)
        if entry is None:
            continue

        full_key = name.lower().translate(_KEY_SPELLING)
        by_full_name[full_key].append(entry)

        # The last item has no prefixes.
        model = _without_prefixes(name.lower())[-1]
        model_key = _ANY_PROVIDER + model.translate(_KEY_SPELLING)
        by_model[model_key].append(entry)

        is_alias = fields is not own_fields
        if is_alias:
            continue

        stem = model
        while suffix := _SUFFIX.search(stem):
            stem = stem[: suffix.start()]
        # A stem without a dash names a family, and no model. "gemini-exp-1206" has the
        # stem "gemini", which would stand for all models of Gemini.
        if "-" in stem:
            stem_key = _ANY_PROVIDER + stem.translate(_KEY_SPELLING)
            by_stem[stem_key].append(entry)

    # If a key is a stem and a model, the model replaces the stem: `|` takes the value
    # of the right side.
    by_key = by_stem | by_model | by_full_name
    return {key: _merge(entries) for key, entries in by_key.items()}


def _follow_alias(name: str, raw: Mapping[str, object]) -> object:
    """Returns the fields of the entry that a name of the table stands for.

    An alias has the name of another entry as `alias_of`, which may be an alias itself.
    As in litellm, all other fields of an alias are without effect. If the aliases lead
    to no entry, or back to one of them, the fields of the last alias are returned.

    Args:
        name: The name of the model in the table.
        raw: The table as JSON.
    """
    fields = raw[name]
    seen_names = {name}
    while isinstance(fields, Mapping):
        target = fields.get("alias_of")
        if not isinstance(target, str) or target not in raw or target in seen_names:
            break
        seen_names.add(target)
        fields = raw[target]
    return fields


def _parse_entry(name: str, fields: object) -> _Entry | None:
    """Reads one entry of the table.

    Args:
        name: The name of the model in the table.
        fields: The fields of the entry. JSON may hold any value in this place.

    Returns:
        The entry; None if the model is no chat model, or if its window is unknown.
    """
    if not isinstance(fields, Mapping) or fields.get("mode") not in _CHAT_MODES:
        return None

    window = fields.get("max_input_tokens")
    least_tokens = MIN_WINDOW_TOKENS
    if window is None and fields["mode"] == "chat":
        # The entry names no window. In the mode "chat" `max_tokens` is the output
        # limit, and no window is smaller than the output limit. So a large output limit
        # stands for the window.
        window = fields.get("max_tokens")
        least_tokens = _MIN_OUTPUT_LIMIT_TOKENS
    if not _is_positive_int(window) or window < least_tokens:
        return None

    # In some entries `max_tokens` is the window, and not the output limit. `min` keeps
    # the output limit within the window.
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
    """Returns the prices of an entry; None if the price of prompt or output is unknown.

    A price of 0 counts as unknown, except for local servers, which are free.

    Prices may have tiers: the longer the prompt, the higher the tier. The lowest tier
    holds for all prompts that have no higher tier.

    Args:
        name: The name of the model in the table.
        fields: The fields of the entry.
    """
    tier_starts = list[int]()  # In thousands of prompt tokens.
    for field in fields:
        # "input_cost_per_token_above_200k_tokens" -> 200
        tier_match = _TIER.fullmatch(field)
        if tier_match:
            tier_starts.append(int(tier_match[1]))

    try:
        lowest_prices = _read_prices(fields, "")
        costs = _build_tiers(fields, lowest_prices, sorted(tier_starts))
    except (TypeError, ValueError):
        # `input` or `output` is missing, or a price is no number.
        return None

    is_free = name.startswith(_FREE_PROVIDERS)
    is_priced = min(costs.input, costs.output) > 0
    return costs if is_free or is_priced else None


def _read_prices(fields: Mapping[str, Any], tier_suffix: str) -> dict[str, Any]:
    """Returns the prices of one tier in dollars per million tokens, by `Costs` field.

    {"input_cost_per_token": 3e-6} -> {"input": 3.0}

    Args:
        fields: The fields of the entry. A price without a field is left out.
        tier_suffix: How the names of the tier's fields end, such as
            "_above_200k_tokens"; "" for the lowest tier.

    Raises:
        TypeError: A price is no number.
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
    """Returns the prices of a tier, with the prices of all higher tiers.

    The next higher tier stands in `above`, the one after it in `above.above`.

    Args:
        fields: The fields of the entry.
        prices: The prices of the tier, by `Costs` field.
        tier_starts: The starts of the higher tiers, in thousands of prompt tokens, the
            lowest first; empty for the highest tier.

    Raises:
        TypeError, ValueError: A price is no price, or `input` or `output` is missing.
    """
    if not tier_starts:
        return Costs(**prices)

    next_start, *later_starts = tier_starts
    # A price that the next tier does not name is the same as in this tier.
    next_prices = prices | _read_prices(fields, f"_above_{next_start}k_tokens")
    above = _build_tiers(fields, next_prices, later_starts)
    return Costs(**prices, above=above, above_tokens=1_000 * next_start)


def _merge(entries: Iterable[_Entry]) -> _Entry:
    """Merges the entries of one key as `LitellmRegistry` explains.

    Args:
        entries: The entries, at least one.

    Returns:
        The entry with the chosen window, changed in three fields. The output limit is
        chosen among those of all entries. The model can think if one entry says so. The
        prices are None unless all entries have the same prices.
    """
    # Several entries may have the chosen window. The order makes the choice among these
    # independent of the order of the table.
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
    """Returns the smallest number that is at least a quarter of the low median.

    Smaller numbers are taken for mistakes of the table.

    Args:
        numbers: The numbers, at least one.
    """
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
        method_name: The method of the registry that answers the question.
        noun: The name of the answer in a warning.
        answer_type: The class of the answer.
        least_tokens: The smallest number of tokens that is believed as an answer.
            Without effect if the answer is no number.
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
        registry: Knows the prices of models; None asks LiteLLM's table.
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
    """Returns the context window of `model` and its source. Never raises.

    The first of these is taken: `configured`, the window that the registry knows,
    `DEFAULT_CONTEXT_WINDOW`.

    Args:
        model: The name of the model.
        configured: The window that the user has set, in tokens; None if not set.
        registry: Knows the windows of models; None asks LiteLLM's table.
        agent: The agent that the warning about an unknown window names; "" if unknown.
        is_quiet: Whether the warning is left out.
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
    """Asks a registry; never raises.

    Args:
        registry: The user's registry. If this is None, or lacks the method of the
            question, LiteLLM's table is asked instead.
        question: The question.
        model: The name of the model.

    Returns:
        The answer; None if the registry does not know it, or if the answer is not
        believed. An answer that is not believed is logged.
    """
    table_method = getattr(_TABLE, question.method_name)
    method = getattr(registry, question.method_name, table_method)
    answer: object
    try:
        answer = method(model)
    except Exception as error:  # noqa: BLE001 - anyone's code, and no turn ends here
        answer = error  # An error is logged below as an answer of a wrong type.

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
