"""The command line: `contextguard demo`, exit codes, and the demo's file tools."""

from __future__ import annotations

import gc
import importlib.util
import io
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
from contextguard_adk.testing import SimulatedLlm
from tests.builders import call, model

WINDOW_TOKENS = 4_000


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
    return main(["demo", str(tree), "--window", window, "--steps", "30", *arguments])


def read_table(output: str) -> dict[str, list[str]]:
    """Reads the table of an output: its values by the name of their row."""
    rows = [line.split("|") for line in output.replace("│", "|").splitlines()]
    return {row[0].strip(): [v.strip() for v in row[1:]] for row in rows if row[2:]}


@pytest.mark.parametrize("strategy", ["threshold", "sliding-window", "pipeline"])
def test_demo_finishes_only_with_the_guard(
    tree: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
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
    bare_steps, guarded_steps = table["steps done"]
    assert int(bare_steps.split()[0]) < 10
    assert guarded_steps == "30 of 30"
    assert table["requests rejected"] == ["10", "0"]
    assert "time to the last answer" not in table
    assert table["compactions"][0] == "0"
    assert int(table["compactions"][1]) >= 5
    largest = [int(value.replace(",", "")) for value in table["largest request"]]
    assert largest[0] > WINDOW_TOKENS >= largest[1]
    for name in ("uncached input", "cached input", "output"):
        counts = [int(value.replace(",", "")) for value in table[f"{name} / step"]]
        assert 0 < max(counts) <= WINDOW_TOKENS
    for name in ("cost / step", "cost of the steps done"):
        assert [value[:3] for value in table[name]] == ["$0."] * 2
    bars = [line.split()[-1] for line in output.splitlines() if "_" in line[:22]]
    assert bars[0].endswith("x" * 10)
    assert "x" not in bars[1]
    assert "Prices: $1 for a million input tokens, " in output
    assert "30 of 30 steps were done, no request refused; without it only " in output


@pytest.mark.parametrize("strategy", ["threshold", "sliding-window"])
def test_latency_shows_what_summaries_ahead_save(
    tree: Path, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    """Without them a call waits for every summary, however slow; with them, for few."""
    assert run_demo(tree, "--strategy", strategy, "--latency", "90") == 0

    output = capsys.readouterr().out
    assert "Times are simulated: 90 s for every answer and every summary." in output
    assert "30 of 30 steps were done, no request refused" in output
    assert "mechanical" not in output
    table = read_table(output)
    compactions = [int(count) for count in table["compactions"]]
    assert compactions[0] == 0 < min(compactions[1:])
    steps = [int(value.split()[0]) for value in table["steps done"]]
    assert steps[1:] == [30, 30]
    waits = [read_seconds(value) for value in table["waited for summaries"]]
    assert waits[:2] == [0, 90 * compactions[1]]
    assert waits[2] < waits[1] / 2
    ends = [read_seconds(value) for value in table["time to the last answer"]]
    assert ends == [90 * done + wait for done, wait in zip(steps, waits, strict=True)]


def test_warnings_measure_as_the_table_does(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the provider's count, where the log has an estimate."""
    arguments = ["--window", "2000", "--steps", "20", "--strategy", "sliding-window"]
    assert main(["demo", str(tree), *arguments]) == 0
    output = capsys.readouterr().out
    warned = re.findall(r"warning: a request fills (\d+)% of the context", output)
    (_, share), (_, largest) = (
        read_table(output)[name] for name in ("of the window", "largest request")
    )
    assert warned
    assert share == f"{int(largest.replace(',', '')) / 2_000:.0%}"
    assert max(map(int, warned)) <= int(share.rstrip("%"))


def read_seconds(text: str) -> float:
    """Reads a time such as `7 min 42 s`."""
    minutes, _, seconds = text.rpartition(" min ")
    return 60 * float(minutes or 0) + float(seconds.removesuffix(" s"))


def test_a_failure_with_summaries_ahead_is_one(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    assert read_table(output)["steps done"][1:] == ["30 of 30", "1 of 30"]
    assert read_table(output)["time to the last answer"][2] == "0.5 s"
    assert "1 of 30 steps were done, then the model failed: overloaded." in output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["demo", "/no/such/folder"], "'/no/such/folder' does not exist"),
        (["demo", "--window", "999"], "'--window': at least 1,000, not 999"),
        (["demo", "--window", "wide"], "'--window': 'wide' is not a number"),
        (["demo", "--steps", "0"], "'--steps': at least 1, not 0"),
        (["demo", "--latency", "0"], "at least 0.001, at most 3,500, not 0"),
        (["demo", "--latency", "3501"], "at most 3,500, not 3501"),
        (["demo", "--latency", "nan"], "at most 3,500, not nan"),
        (["demo", "--latency", "slow"], "'--latency': 'slow' is not a number"),
        (["demo", "--latency", "1", "--model", "x"], "a real model takes its own time"),
        (["demo", "--strategy", "luck"], "'luck' is not one of threshold, "),
        (["dmo"], "No such command 'dmo'"),
        (["dmo"], " Did you mean 'demo'?"),
        (["demo", "--strategy", "pipelin"], " Did you mean 'pipeline'?"),
        (["demo", "--context-windo=1"], "--context-window"),
        (["replay", "x", "--widow=3"], "--window"),
        (["report", "x.json", "--plot=y"], "No such option"),
        (["--versio2"], "Did you mean"),
        (["demo", "."], "there is no source file in /"),
        (["check", "--model", "gpt-4o", "guard.toml"], "name the file before --model"),
        (["check", "unknown.toml"], "unknown.toml: "),
        (["check", "unknown.yaml"], "unknown.yaml: "),
        (["check", "missing.toml"], "cannot be read"),
        (["check", "guard.json"], ".toml, .yaml or .yml"),
    ],
)
def test_wrong_arguments_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    """What is wrong stands in one line on stderr; the exit code is 2."""
    monkeypatch.chdir(tmp_path)
    Path("binary.py").write_bytes(b"x = 1\0")
    Path("bundle.js").write_bytes(b"a" * 9_000)
    if arguments[:1] == ["check"]:
        Path("unknown.toml").write_text("[default]\nmax_turn = 3")
        Path("unknown.yaml").write_text("default: [\nagents: {")
    assert main(arguments) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("contextguard")
    assert captured.err.count("\n") == 1
    assert reason in captured.err


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """With `--help` each prints how it is used."""
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("Usage: contextguard [OPTIONS]")
    for command in ([], ["demo"], ["check"], ["replay"], ["report"]):
        assert main([*command, "--help"]) == 0
        usage = " ".join(["Usage: contextguard", *command, "[OPTIONS]"])
        assert capsys.readouterr().out.startswith(usage)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("redirect", "error"),
    [
        ("> /dev/full", "contextguard: error: [Errno 28] No space left on device\n"),
        ("| head -c 0", ""),
    ],
)
def test_an_output_that_takes_nothing_is_no_traceback(
    redirect: str, error: str
) -> None:
    """A full disk is one line, a reader that leaves is none."""
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
def fake_litellm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the fake models, and a litellm that need not be imported."""
    litellm = python_types.ModuleType("litellm")
    # What is installed beside it, as the table of windows, is found as before.
    litellm.__spec__ = importlib.util.find_spec("litellm")
    monkeypatch.setitem(sys.modules, "litellm", litellm)
    LLMRegistry.register(LiteLlm)


@pytest.mark.usefixtures("fake_litellm")
@pytest.mark.parametrize(
    ("kind", "exit_code", "said", "row"),
    [
        (
            "reader",
            0,
            "",
            {"output / step": ["5", "5"], "cost / step": ["unknown"] * 2},
        ),
        ("answers", 0, "turn 30, step ", {"steps done": ["30 of 30"] * 2}),
        ("unmetered", 0, "", {"uncached input / step": ["0", "0"]}),
        ("flaky", 1, "No API key was provided.", {"steps done": ["3 of 30"] * 2}),
        ("tiny", 1, "after 10 refused turns", {"largest request": ["5,000"] * 2}),
    ],
)
def test_what_a_real_model_does_is_reported(
    tree: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    exit_code: int,
    said: str,
    row: dict[str, list[str]],
) -> None:
    """Steps until then count, a failure or refusals of the guarded run end with 1."""
    assert run_demo(tree, "--model", f"fake/{kind}") == exit_code

    output = capsys.readouterr().out
    assert said in output
    assert row.items() <= read_table(output).items()


@pytest.mark.usefixtures("fake_litellm")
def test_ctrl_c_ends_the_demo(
    tree: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C ends it with exit code 130 and one line, and logs as before."""
    assert run_demo(tree, "--model", "fake/interrupted") == 130

    gc.collect()  # Tasks speak of lost exceptions when they are collected.
    assert capsys.readouterr().err == "contextguard: interrupted\n"
    assert not caplog.records
    assert logging.getLogger("contextguard_adk").propagate


@pytest.mark.usefixtures("fake_litellm")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fake/keyless", "No API key was provided.\n"),
        ("nobody-knows", "nobody-knows not found.\n"),
    ],
)
def test_model_that_cannot_be_used_is_one_line(
    tree: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    """A wrong name, a missing key or an unknown window is told in one line."""
    assert run_demo(tree, "--model", name) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert reason in error

    assert main(["demo", str(tree), "--model", name]) == 2
    assert f"window of {name} is unknown: give" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path",
    [
        *("mail/../../secret.txt", "/etc/passwd", "link.txt", "out/secret.txt", "loop"),
        *("gone.py", "billing", "pipe", "a\0b", 7, "x" * 5_000),
    ],
)
def test_what_cannot_be_read_is_an_answer(tree: Path, path: Any) -> None:
    """No tool raises, leaves the folder, or says where it is."""
    (tree.parent / "secret.txt").write_text("the password")
    (tree / "link.txt").symlink_to(tree.parent / "secret.txt")
    (tree / "out").symlink_to(tree.parent)
    (tree / "loop").symlink_to(tree / "loop")
    os.mkfifo(tree / "pipe")

    answer = FileTools(tree).read_file(path)

    assert answer == {"error": f"the project has no source file {path!r}"}
    assert "error" in FileTools(tree).list_files("..")
