"""From a model's name to its window, what it can write at most, and its prices."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeGuard, TypeVar

from contextguard_adk._providers.costs import Costs
from contextguard_adk._support.log import warn_once
from contextguard_adk._support.settings import short_repr

T = TypeVar("T")

_LOGGER = logging.getLogger("contextguard_adk.providers.windows")

DEFAULT_CONTEXT_WINDOW: Final = 128_000
"""The window, in tokens, that is assumed for an unknown model."""

MIN_WINDOW_TOKENS = 1_000  # Smaller values, also learned ones, are no chat windows.
MAX_NAME_CHARS = 500  # Of a model, whose parts are looked up; none has 200.
_VENDOR_PREFIX = re.compile(r"[a-z][a-z0-9]*(?:-gov)?\.(?=[a-z])")  # us. anthropic.
_SUFFIX = re.compile(
    r"""( -v\d+:\d+(:\w+)?  | (?<!\bft):[^:/]*  | @[^@/]*  # -v1:0  :free  @20250929
        | -\d{4}-\d\d-\d\d | -\d{8} | -\d\d-\d{4} | -\d\d-\d\d  # -2024-08-06  -05-20
        | -(0[1-9]|1[0-2]|2[3-9])\d\d | -\d{3}  # -0613  -2507  -001, but not -8192
        | -latest | -preview | -exp | -experimental )$""",
    re.VERBOSE,
)
_PRICES = {
    "input": "input_cost_per_token",
    "output": "output_cost_per_token",
    "cached_input": "cache_read_input_token_cost",
}
_TIER = re.compile(rf"{_PRICES['input']}_above_(\d+)k_tokens")
_ANY_PROVIDER = "*/"
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
    window_tokens: int
    has_reasoning: bool
    name: str  # in the table
    output_tokens: int | None
    costs: Costs | None


class LitellmRegistry:
    """Looks windows up in litellm's packaged table; importing litellm takes seconds.

    A name is looked up as written, then without its prefixes from the left, then the
    same without its date, version or tag. Of several providers, none of them named, the
    smallest window counts that is at least a quarter of the low median, and so does the
    smallest output limit; prices are known where all of them ask the same, and none are
    to a provider that is named but not in the table. Only local servers are free: other
    zeros in the table are missing prices.
    """

    def __init__(self, table_path: Path | None = None) -> None:
        self._table_path = table_path

    def context_window(self, model: str) -> int | None:
        return entry.window_tokens if (entry := self._find(model)) else None

    def max_output_tokens(self, model: str) -> int | None:
        return entry.output_tokens if (entry := self._find(model)) else None

    def costs(self, model: str) -> Costs | None:
        """Returns the prices of `model`; None means unknown, 0 that it is free."""
        return entry.costs if (entry := self._find(model)) else None

    def supports_reasoning(self, model: str) -> bool:
        """Returns whether `model` can think before it answers; unknown ones cannot."""
        return bool((entry := self._find(model)) and entry.has_reasoning)

    def entry_name(self, model: str) -> str | None:
        """Returns which entry of the table says the window of `model`."""
        return entry.name if (entry := self._find(model)) else None

    def _find(self, model: str) -> _Entry | None:
        if len(model) > MAX_NAME_CHARS:
            return None
        table = _load_table(self._table_path)
        keys = (name.replace(".", "-") for name in _candidate_names(model))
        if not (key := next((key for key in keys if key in table), None)):
            return None
        entry = table[key]
        named = model.strip().lower()
        # `ollama_chat` begins as `ollama` does.
        is_other = "/" in named and not named.startswith(entry.name.partition("/")[0])
        is_foreign = is_other and key.startswith(_ANY_PROVIDER)
        return entry._replace(costs=None) if is_foreign else entry


def _candidate_names(model: str) -> Iterator[str]:
    """Yields the names to look up, the most specific first."""
    name = model.strip().lower()
    while name:
        yield from (names := _without_prefixes(name))
        if "/" not in name:  # what ADK itself sends to Google
            yield f"gemini/{name}"
        yield _ANY_PROVIDER + names[-1]
        name = _without_suffix(name)


def _without_prefixes(name: str) -> list[str]:
    names = [name]
    while "/" in names[-1]:
        names.append(names[-1].partition("/")[2])
    while prefix := _VENDOR_PREFIX.match(names[-1]):
        names.append(names[-1][prefix.end() :])
    return names


def _without_suffix(name: str) -> str:
    """Returns the name without its last date, version or tag; "" if it has none."""
    return name[: suffix.start()] if (suffix := _SUFFIX.search(name)) else ""


@lru_cache(maxsize=16)
def _load_table(path: Path | None) -> dict[str, _Entry]:
    """Reads and indexes a table once per process; empty if even litellm has none."""
    try:
        if path is None:
            spec = importlib.util.find_spec("litellm")
            packaged = Path((spec and spec.origin) or "no litellm package")
            path = packaged.with_name("model_prices_and_context_window_backup.json")
        raw = json.loads(path.read_bytes())
        if table := _index(raw if isinstance(raw, dict) else {}):
            return table
        reason: object = "no chat models in it"
    except (OSError, ValueError) as error:
        reason = error
    _LOGGER.warning("Cannot use litellm's model table (%s); importing litellm", reason)
    try:
        # Not litellm.get_model_info: it prints to stdout and asks servers over HTTP.
        return _index(importlib.import_module("litellm").model_cost)
    except Exception:  # noqa: BLE001 - whatever importing it may raise
        return {}


def _index(raw: Mapping[str, object]) -> dict[str, _Entry]:
    """Maps full names and, for any provider, last parts and undated last parts."""
    full, last, undated = (defaultdict[str, list[_Entry]](list) for _ in range(3))
    for name, value in raw.items():
        if entry := _parse_entry(name, value):
            *_, stem = _without_prefixes(name.lower())
            full[name.lower().replace(".", "-")].append(entry)
            last[_ANY_PROVIDER + stem.replace(".", "-")].append(entry)
            while shorter := _without_suffix(stem):
                stem = shorter
            if "-" in stem:  # else a family: `gemini` of `gemini-exp-1206`
                undated[_ANY_PROVIDER + stem.replace(".", "-")].append(entry)
    return {key: _merge(found) for key, found in (undated | last | full).items()}


def _parse_entry(name: str, value: object) -> _Entry | None:
    """Reads one entry of the table; None for what is no chat model with a window."""
    modes = ("chat", "responses", "completion")
    if not isinstance(value, Mapping) or value.get("mode") not in modes:
        return None
    window = value.get("max_input_tokens")
    minimum = MIN_WINDOW_TOKENS
    if window is None and value["mode"] == "chat":
        # litellm means an output limit by it; no window is smaller.
        window = value.get("max_tokens")
        minimum = 8_000
    if not _is_tokens(window) or window < minimum:
        return None
    # Where litellm knows no output limit, `max_tokens` is one or the window again.
    output = value.get("max_output_tokens") or value.get("max_tokens")
    limit = min(output, window) if _is_tokens(output) else None
    has_reasoning = value.get("supports_reasoning") is True
    return _Entry(window, has_reasoning, name, limit, _read_costs(name, value))


def _read_costs(name: str, value: Mapping[str, Any]) -> Costs | None:
    """Reads prices per token; None where the table does not name both directions."""
    tiers = sorted(int(key[1]) for key in map(_TIER.fullmatch, value) if key)
    try:
        costs = _read_tiers(value, tiers)
    except (TypeError, ValueError):
        return None
    is_known = name.startswith(_FREE_PROVIDERS) or min(costs.input, costs.output) > 0
    return costs if is_known else None


def _read_tiers(
    value: Mapping[str, Any], tiers: list[int], end: str = "", **below: float
) -> Costs:
    """Reads the prices of a tier and of those above; what lacks is as below."""
    fields = {key: f"{field}{end}" for key, field in _PRICES.items()}
    given = {key: value[field] for key, field in fields.items() if field in value}
    prices = below | {key: round(1e6 * price, 6) for key, price in given.items()}
    if not tiers:
        return Costs(**prices)
    above = _read_tiers(value, tiers[1:], f"_above_{tiers[0]}k_tokens", **prices)
    return Costs(**prices, above=above, above_tokens=1_000 * tiers[0])


def _merge(entries: Iterable[_Entry]) -> _Entry:
    """Joins the entries of several providers, as `LitellmRegistry` explains."""
    known = sorted(entries, key=lambda entry: entry[:3])
    window_tokens = _find_smallest([entry.window_tokens for entry in known])
    smallest = next(e for e in known if e.window_tokens >= window_tokens)
    outputs = [e.output_tokens for e in known if e.output_tokens]
    return smallest._replace(
        has_reasoning=any(entry.has_reasoning for entry in known),
        output_tokens=_find_smallest(outputs) if outputs else None,
        costs=smallest.costs if len({entry.costs for entry in known}) == 1 else None,
    )


def _find_smallest(tokens: list[int]) -> int:
    """Returns the smallest number that is not far below the others."""
    return min(n for n in tokens if n >= statistics.median_low(tokens) / 4)


def resolve_output_limit(model: str, registry: ModelRegistry | None) -> int | None:
    """Returns what `model` can write at most in tokens; None means unknown."""
    return _ask(registry, "max_output_tokens", "output limit", model, _is_tokens)


def resolve_costs(
    model: str, prices: Mapping[str, Costs], registry: ModelRegistry | None
) -> Costs | None:
    """Returns what `model` costs: by `prices` of the user's own, else by a registry.

    None means unknown; it never raises.
    """
    return prices.get(model) or _ask(registry, "costs", "prices", model, _is_costs)


def resolve_context_window(
    model: str,
    *,
    configured: int | None = None,
    registry: ModelRegistry | None = None,
    agent: str = "",
    is_quiet: bool = False,
) -> ResolvedWindow:
    """Returns the context window of `model` and who said so; never raises."""
    if configured is not None:
        return ResolvedWindow(configured, "configured")
    if tokens := _ask(registry, "context_window", "token count", model, _is_window):
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
    registry: ModelRegistry | None,
    question: str,
    named: str,
    model: str,
    is_answer: Callable[[object], TypeGuard[T]],
) -> T | None:
    """Asks a registry of the user's own, or the table what that need not know."""
    ask = getattr(registry, question, getattr(LitellmRegistry(), question))
    try:
        answer: object = ask(model)
    except Exception as error:  # noqa: BLE001 - anyone's code, and no turn ends here
        answer = error
    if is_answer(answer):
        return answer
    if answer is not None:
        message = f"The model registry gave no {named} for %r but %s"
        warn_once(_LOGGER, message, model, short_repr(answer))
    return None


def _is_tokens(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_window(value: object) -> TypeGuard[int]:
    return _is_tokens(value) and value >= MIN_WINDOW_TOKENS


def _is_costs(value: object) -> TypeGuard[Costs]:
    return isinstance(value, Costs)
