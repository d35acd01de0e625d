"""The command line: `contextguard demo` and `check`, wrong arguments, exit codes."""

from __future__ import annotations

import gc
import importlib.util
import io
import json
import logging
import os
import re
import subprocess
import sys
import types as python_types
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.models.registry import LLMRegistry
from google.genai import types

from contextguard_adk._tools.cli import main
from contextguard_adk._tools.demo import FileTools
from contextguard_adk.config import CONFIG_VARIABLE
from contextguard_adk.testing import SimulatedLlm
from tests.builders import call, model
from tests.chats import slow
from tests.lines import tells

Output = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
WINDOW_TOKENS = 4_000
STEPS = 18


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: Patch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small project: three folders of source files, each of 1,000 tokens or so."""
    root = tmp_path / "project"
    body = "\n".join(f"    value_{line} = {line * 7919}" for line in range(140))
    for package in ("billing", "mail", "caf\u00e9"):
        (root / package).mkdir(parents=True)
        for number in range(4):
            (root / package / f"service_{number}.py").write_text(f"class A:\n{body}\n")
    (root / "README.md").write_text("# A project\n\nIt has three folders.\n")
    return root


def run_demo(tree: Path, *arguments: str) -> int:
    """Runs the demo on a tree with a small window."""
    window = str(WINDOW_TOKENS)
    steps = str(STEPS)
    return main(["demo", str(tree), "--window", window, "--steps", steps, *arguments])


def read_table(output: str) -> dict[str, list[str]]:
    """Reads the table of an output: its values by the name of their row."""
    rows = [line.split("|") for line in output.replace("│", "|").splitlines()]
    return {row[0].strip(): [v.strip() for v in row[1:]] for row in rows if row[2:]}


def numbers(values: list[str]) -> list[int]:
    """The number at the beginning of each value."""
    return [int(value.split()[0].replace(",", "")) for value in values]


@pytest.mark.parametrize("strategy", ["threshold", *slow("sliding-window", "pipeline")])
def test_demo_finishes_only_with_the_guard(
    tree: Path, monkeypatch: Patch, strategy: str
) -> None:
    """Without the guard every turn is refused, with it none; ASCII is enough."""
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert run_demo(tree, "--strategy", strategy) == 0
        output = raw.getvalue().decode("ascii")
    for event in ("the folder caf?", "rejected by the provider: ", "compaction 1: "):
        assert event in output

    table = read_table(output)
    assert numbers(table["steps done"])[0] < 10
    assert table["steps done"][1] == f"{STEPS} of {STEPS}"
    assert table["requests rejected"] == ["10", "0"]
    assert "time to the last answer" not in table
    assert table["compactions"][0] == "0"
    assert int(table["compactions"][1]) >= 3

    largest = numbers(table["largest request"])
    assert largest[0] > WINDOW_TOKENS >= largest[1]
    for name in ("uncached input", "cached input", "output"):
        assert 0 < max(numbers(table[f"{name} / step"])) <= WINDOW_TOKENS
    for name in ("cost / step", "cost of the steps done"):
        assert [value[:3] for value in table[name]] == ["$0."] * 2

    bars = [line.split()[-1] for line in output.splitlines() if "_" in line[:22]]
    assert bars[0].endswith("x" * 10)
    assert "x" not in bars[1]
    assert "Prices: $1 for a million input tokens, " in output
    done = f"{STEPS} of {STEPS} steps were done"
    assert f"{done}, no request refused; without it only " in output


def test_latency_shows_what_summaries_ahead_save(tree: Path, capsys: Output) -> None:
    """Without them a call waits for every summary, however slow; with them, for few."""
    # So large that a summary is written before the window is full.
    assert run_demo(tree, "--latency", "90", "--window", "8000", "--steps", "30") == 0
    output = capsys.readouterr().out
    assert "Times are simulated: 90 s for every answer and every summary." in output
    assert "30 of 30 steps were done, no request refused" in output
    assert "mechanical" not in output

    table = read_table(output)
    compactions = numbers(table["compactions"])
    steps = numbers(table["steps done"])
    assert compactions[0] == 0 < min(compactions[1:])
    assert steps[1:] == [30, 30]

    waits = [read_seconds(value) for value in table["waited for summaries"]]
    assert waits[:2] == [0, 90 * compactions[1]]
    assert waits[2] < 0.6 * waits[1]

    ends = [read_seconds(value) for value in table["time to the last answer"]]
    assert ends == [90 * done + wait for done, wait in zip(steps, waits, strict=True)]


def read_seconds(text: str) -> float:
    """Reads a time such as `7 min 42 s`."""
    minutes, _, seconds = text.rpartition(" min ")
    return 60 * float(minutes or 0) + float(seconds.removesuffix(" s"))


def test_warnings_measure_as_the_table_does(tree: Path, capsys: Output) -> None:
    """By the provider's count, where the log has an estimate."""
    assert run_demo(tree, "--window=2000", "--strategy=sliding-window") == 0
    output = capsys.readouterr().out
    warned = re.findall(r"warning: a request fills (\d+)% of the context", output)
    table = read_table(output)
    share = table["of the window"][1]
    assert warned
    assert share == f"{numbers(table['largest request'])[1] / 2_000:.0%}"
    assert max(int(percent) for percent in warned) <= int(share.rstrip("%"))


def test_a_failure_with_summaries_ahead_is_one(
    tree: Path, monkeypatch: Patch, capsys: Output
) -> None:
    """Exit code and last line tell of the guarded run that fared worse."""
    answer = SimulatedLlm.generate_content_async
    calls: Counter[int] = Counter()

    def fail_in_third_run(llm: SimulatedLlm, *args: Any, **options: Any) -> Any:
        calls[id(llm)] += 1
        if len(calls) == 3 and calls[id(llm)] == 2:
            raise ValueError("overloaded")
        return answer(llm, *args, **options)

    monkeypatch.setattr(SimulatedLlm, "generate_content_async", fail_in_third_run)
    assert run_demo(tree, "--latency", "0.5") == 1
    output = capsys.readouterr().out
    steps = [f"{done} of {STEPS}" for done in (STEPS, 1)]
    assert read_table(output)["steps done"][1:] == steps
    assert read_table(output)["time to the last answer"][2] == "0.5 s"
    assert f"1 of {STEPS} steps were done, then the model failed" in output
    assert "failed: overloaded." in output


WRONG = """
demo /no/such/folder | …'/no/such/folder' does not exist…
demo --window 999 | …'--window': at least 1,000, not 999
demo --window 8k | demo: error: Invalid value for '--context-window' …is not a number
demo --steps 0 | …'--steps': at least 1, not 0
demo --latency 0 | …at least 0.001, at most 3,500, not 0
demo --latency 3501 | …at most 3,500, not 3501
demo --latency nan | …at most 3,500, not nan
demo --latency slow | …'--latency': 'slow' is not a number
demo --latency 1 --model x | …a real model takes its own time…
demo --strategy luck | …'luck' is not one of threshold, …
demo --strategy pipelin | … Did you mean 'pipeline'?
demo --context-windo=1 | …--context-window…
demo . | …there is no source file in /…
dmo | …No such command 'dmo'. Did you mean 'demo'?
replay x --widow=3 | …--window…
report x.json --plot=y | …No such option…
--versio2 | …Did you mean…
check --model gpt-5.4-mini guard.toml | …name the file before --model…
check unknown.toml | …unknown.toml: …
check unknown.yaml | …unknown.yaml: …
check missing.toml | …missing.toml: cannot be read: No such file or directory.
check guard.json | ….toml, .yaml or .yml.
replay sqlite:///sessions.db | …databases need SQLAlchemy: pip install …
sessions drop x.db | sessions: error: Invalid value for 'ACTION': 'drop' is not one…
"""
WRONG_ROWS = [line.split(" | ") for line in WRONG.strip().splitlines()]


@pytest.mark.parametrize(("typed", "said"), WRONG_ROWS, ids=[r[0] for r in WRONG_ROWS])
def test_wrong_arguments_are_one_line(
    tmp_path: Path, monkeypatch: Patch, capsys: Output, typed: str, said: str
) -> None:
    """On stderr, also of a plain install without extras; the exit code is 2."""
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    monkeypatch.chdir(tmp_path)
    if typed == "demo .":
        Path("binary.py").write_bytes(b"x = 1\0")
        Path("bundle.js").write_bytes(b"a" * 9_000)
    else:
        Path("unknown.toml").write_text("[default]\nmax_turn = 3")
        Path("unknown.yaml").write_text("default: [\nagents: {")
    assert main(typed.split()) == 2

    output = capsys.readouterr()
    assert output.out == ""
    assert tells(f"contextguard…{said}", output.err), output.err


def test_every_command_explains_itself(capsys: Output) -> None:
    """With `--help` each prints how it is used."""
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("Usage: contextguard [OPTIONS]")
    for command in ([], ["demo"], ["check"], ["replay"], ["report"], ["sessions"]):
        assert main([*command, "--help"]) == 0
        usage = " ".join(["Usage: contextguard", *command, "[OPTIONS]"])
        assert capsys.readouterr().out.startswith(usage)


@pytest.mark.slow  # Rich keeps what it could not write: it takes processes of its own.
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_output_that_takes_nothing_is_no_traceback() -> None:
    """A full disk is one line, a reader that leaves is none."""
    full = "contextguard: error: [Errno 28] No space left on device\n"
    for redirect, error in (("> /dev/full", full), ("| head -c 0", "")):
        command = f"{sys.executable} -W ignore -m contextguard_adk check {redirect}"
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        assert done.stderr == error


class LiteLlm(BaseLlm):
    """Bears the name of ADK's class; its model's name says what it does."""

    answered: int = 0

    @classmethod
    def supported_models(cls) -> list[str]:
        """The names that ADK's registry gives to this class."""
        return ["fake/.*"]

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Reads a file forever; "answers" calls no tool, others fail in time."""
        kind = self.model.partition("/")[2]
        if kind == "keyless" or (kind == "flaky" and self.answered == 3):
            raise ValueError("No API key was provided.\nGet one.")
        if kind == "interrupted" and self.answered == 3:
            raise KeyboardInterrupt
        if kind == "tiny" and self.answered:
            raise ValueError("prompt is too long: 5000 tokens > 10 maximum")
        self.answered += 1
        reading = call("read_file", path="README.md")
        usage = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=100, total_token_count=105
        )
        yield LlmResponse(
            content=model("Done.") if kind == "answers" else reading,
            usage_metadata=None if kind == "unmetered" else usage,
        )


@pytest.fixture
def fake_litellm(monkeypatch: Patch) -> None:
    """Registers the fake models, and a litellm that need not be imported."""
    litellm = python_types.ModuleType("litellm")
    # What is installed beside it, as the table of windows, is found as before.
    litellm.__spec__ = importlib.util.find_spec("litellm")
    monkeypatch.setitem(sys.modules, "litellm", litellm)
    LLMRegistry.register(LiteLlm)


@pytest.mark.usefixtures("fake_litellm")
@pytest.mark.parametrize(
    ("kind", "code", "said", "row"),
    [
        ("reader", 0, "", {"output / step": ["5"] * 2, "cost / step": ["unknown"] * 2}),
        (
            "answers",
            0,
            f"turn {STEPS}, step ",
            {"steps done": [f"{STEPS} of {STEPS}"] * 2},
        ),
        ("unmetered", 0, "", {"uncached input / step": ["0", "0"]}),
        ("flaky", 1, "No API key was provided.", {"steps done": [f"3 of {STEPS}"] * 2}),
        ("tiny", 1, "after 10 refused turns", {"largest request": ["5,000"] * 2}),
    ],
)
def test_what_a_real_model_does_is_reported(
    tree: Path, capsys: Output, kind: str, code: int, said: str, row: dict[str, Any]
) -> None:
    """Steps until then count, a failure or refusals of the guarded run end with 1."""
    assert run_demo(tree, "--model", f"fake/{kind}") == code
    output = capsys.readouterr().out
    assert said in output
    assert row.items() <= read_table(output).items()


@pytest.mark.usefixtures("fake_litellm")
def test_ctrl_c_ends_the_demo(
    tree: Path, capsys: Output, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C ends it with exit code 130 and one line, and logs as before."""
    assert run_demo(tree, "--model", "fake/interrupted") == 130
    gc.collect()  # Tasks speak of lost exceptions when they are collected.
    assert capsys.readouterr().err == "contextguard: interrupted\n"
    assert not caplog.records
    assert logging.getLogger("contextguard_adk").propagate


@pytest.mark.usefixtures("fake_litellm")
def test_model_that_cannot_be_used_is_one_line(tree: Path, capsys: Output) -> None:
    """A wrong name, a missing key or an unknown window is told in one line."""
    for name, reason in (
        ("fake/keyless", "No API key was provided.\n"),
        ("nobody-knows", "nobody-knows not found.\n"),
    ):
        assert run_demo(tree, "--model", name) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert reason in error
        assert main(["demo", str(tree), "--model", name]) == 2
        assert f"window of {name} is unknown: give" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["nobody-knows", "nobody/knows"])
def test_a_missing_litellm_is_named(
    tree: Path, capsys: Output, monkeypatch: Patch, model: str
) -> None:
    """Where it is not installed, and the name has a provider."""
    monkeypatch.setitem(sys.modules, "litellm", None)
    assert run_demo(tree, "--model", model) == 2
    has_provider = "/" in model
    assert ('pip install "litellm[mcp]"' in capsys.readouterr().err) == has_provider


def test_what_cannot_be_read_is_an_answer(tree: Path) -> None:
    """No tool raises, leaves the folder, or says where it is."""
    (tree.parent / "secret.txt").write_text("the password")
    (tree / "link.txt").symlink_to(tree.parent / "secret.txt")
    (tree / "out").symlink_to(tree.parent)
    (tree / "loop").symlink_to(tree / "loop")
    os.mkfifo(tree / "pipe")
    outside = "mail/../../secret.txt", "/etc/passwd", "link.txt", "out/secret.txt"
    odd: Any = "loop", "gone.py", "billing", "pipe", "a\0b", 7, "x" * 5_000
    for path in (*outside, *odd):
        answer = FileTools(tree).read_file(path)
        assert answer == {"error": f"the project has no source file {path!r}"}

    assert "error" in FileTools(tree).list_files("..")


SETTINGS = """
warning_threshold = 0.8
default = {strategy = "sliding_window", max_messages = 30}
prices.own-model = {input = 0, output = 0.5}

[agents.writer]
strategy = "pipeline"
context_window = 50_000
summarizer = "gemini-flash-latest"
summary = false

[agents.router]
strategy = "none"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A settings file with three kinds of agents."""
    path = tmp_path / "guard.toml"
    path.write_text(SETTINGS)
    return path


def check_json(capsys: Output, *arguments: str) -> dict[str, Any]:
    """What `contextguard check` prints as JSON."""
    main(["check", *arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_each_agent_and_model_has_its_budgets(config: Path, capsys: Output) -> None:
    """A configured window wins, the table is asked, and the unknown is assumed."""
    models = ["openrouter/cohere/command-r-08-2024", "nobody-knows-it"]
    found = check_json(capsys, str(config), "--model", *models)
    default, writer, router = found.pop("agents")
    assert (found["config"], found["warning_threshold"]) == (str(config), 0.8)

    known, unknown = default.pop("budgets")
    assert default == {
        "agent": "(default)",
        "strategy": "SlidingWindow",
        "settings": {"max_messages": 30},
        "summarizer": None,
    }
    assert known == {
        "model": models[0],
        "source": "registry",
        "registry_entry": "command-r-08-2024",
        "window_tokens": 128_000,
        "buffer_tokens": 25_600,
        "threshold_tokens": 102_400,
        "summary_tokens": 12_800,
        "costs": {"input": 0.15, "output": 0.6},
        "trigger": "",  # Said of windows above 200,000 tokens only.
    }

    changes = {"source": "default", "registry_entry": None, "costs": None}
    assert unknown == {**known, "model": models[1], **changes}
    assert writer["summarizer"] == "gemini-flash-latest"
    assert {b["window_tokens"] for b in writer["budgets"]} == {50_000}
    assert (router["strategy"], router["budgets"]) == (None, [])


def test_it_prints_lines_for_people(
    config: Path, monkeypatch: Patch, capsys: Output
) -> None:
    """Agent by agent, and no number is cut however narrow the terminal."""
    monkeypatch.setenv("COLUMNS", "20")
    models = ["command-r-08-2024", "nobody-knows-it", "own-model"]
    assert main(["check", str(config), "--model", *models]) == 0
    output = capsys.readouterr()
    assert output.err == ""  # The lines say what the guard would warn of.

    lines = output.out.splitlines()
    assert lines[0].endswith("guard.toml: good")
    sizes = "buffer 25,600, threshold 102,400, summary 12,800"
    window = "window 128,000 (registry: command-r-08-2024)"
    assert f"  command-r-08-2024: {window}, {sizes}" in lines
    assert any("(unknown model: assumed)" in line for line in lines)
    for price in (
        "input 0.15, output 0.6",
        "unknown",
        "input 0, output 0.5",
    ):
        assert f"    dollars per million tokens: {price}" in lines

    writer = lines.index("writer: Pipeline")
    assert lines[writer + 1 : writer + 3] == [
        "  summary = false",
        "  summaries by gemini-flash-latest",
    ]
    assert lines[writer + 3].startswith("  command-r-08-2024: window 50,000 (config)")
    assert lines[-1] == "router: not guarded"

    assert main(["check", str(config)]) == 0
    printed = capsys.readouterr().out
    assert "name models with --model" in printed
    assert "any model: window 50,000 (config)" in printed


def test_a_large_window_says_what_a_prompt_costs_where_it_is_compacted(
    tmp_path: Path, capsys: Output
) -> None:
    """By the tier that such a prompt reaches; "auto" in a file is one word."""
    file = tmp_path / "guard.toml"
    file.write_text('[agents.early]\ntrigger = "auto"')
    assert main(["check", str(file), "--model", "gemini/gemini-pro-latest"]) == 0

    lines = capsys.readouterr().out.splitlines()
    costs = [line for line in lines if line.startswith("    compacts at")]
    assert costs == [
        "    compacts at 1,028,576 tokens, a prompt of that size costs $4.11",
        "    compacts at 32,000 tokens, a prompt of that size costs $0.06",
    ]

    prices = (
        "input 2, output 12, cached_input 0.2; above 200,000 tokens "
        "input 4, output 18, cached_input 0.4"
    )
    assert f"    dollars per million tokens: {prices}" in lines


def test_the_variable_names_the_file(
    config: Path, monkeypatch: Patch, capsys: Output
) -> None:
    """As for the plugin itself; without it the built-in settings are shown. Classes
    are found in the present folder."""
    found = check_json(capsys)
    assert (found["config"], len(found["agents"])) == (None, 1)

    monkeypatch.setenv(CONFIG_VARIABLE, str(config))
    found = check_json(capsys)
    assert (found["config"], len(found["agents"])) == (str(config), 3)

    ours = "from contextguard_adk import Threshold\nclass Ours(Threshold):\n    pass\n"
    (config.parent / "our_strategies_here.py").write_text(ours)
    config.write_text("default = 'our_strategies_here.Ours'")
    monkeypatch.chdir(config.parent)
    monkeypatch.setattr("sys.path", [*sys.path])
    assert check_json(capsys)["agents"][0]["strategy"] == "Ours"


def test_it_shows_what_strategies_do_of_themselves(
    config: Path, capsys: Output
) -> None:
    """An automatic trigger is a threshold, in a small window the usual one; a pipeline
    may run before the threshold, and its own reducers have names."""
    for window, shown in ((128_000, "32,000"), (8_000, "6,400")):
        config.write_text(f"[default]\ntrigger = 'auto'\ncontext_window = {window}")
        assert main(["check", str(config)]) == 0
        assert f"threshold {shown}, summary" in capsys.readouterr().out

    config.write_text(
        "[default]\nstrategy = 'pipeline'\ncompression_threshold = 0.75\n"
        "context_window = 32_000\n[[default.reducers]]\n"
        "reducer = 'contextguard_adk.strategies.TokenWindow'\nbudget_tokens = 500\n"
    )
    default = check_json(capsys, str(config))["agents"][0]
    assert default["budgets"][0]["threshold_tokens"] == 24_000

    reducer = "contextguard_adk.strategies.reducers.TokenWindow"
    reducers = [{"reducer": reducer, "budget_tokens": 500}]
    assert default["settings"]["reducers"] == reducers
