"""The command line: `contextguard demo`, its exit codes and its file tools."""

from __future__ import annotations

import gc
import io
import logging
import os
import re
import subprocess
import sys
import types as python_types
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.models.registry import LLMRegistry
from google.genai import types
from rich.console import Console

import contextguard_adk
from contextguard_adk.providers.windows import LitellmRegistry
from contextguard_adk.testing import Reply, SimulatedLlm, SimulatedProviderError
from contextguard_adk.tools import demo
from contextguard_adk.tools import file_tools as _file_tools
from contextguard_adk.tools.cli import main
from contextguard_adk.tools.demo_plan import OfflineAgent, Turn, plan_turns
from contextguard_adk.tools.demo_run import Meter
from contextguard_adk.tools.demo_view import DemoView, PhaseResult
from contextguard_adk.tools.file_tools import MAX_READ_BYTES, FileTools
from contextguard_adk.tools.terminal import WarningHandler

WINDOW_TOKENS = 4_000


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small project: three folders of source files, each of 1,000 tokens or so."""
    root = tmp_path / "project"
    for package in ("billing", "mail", "store"):
        folder = root / package
        folder.mkdir(parents=True)
        for number in range(4):
            name = f"{package.title()}Service{number}"
            body = "\n".join(
                f"    def step_{line}(self) -> int:\n        return {line * 7919}"
                for line in range(70)
            )
            (folder / f"service_{number}.py").write_text(f"class {name}:\n{body}\n")
    (root / "README.md").write_text("# A project\n\nIt has three folders.\n")
    return root


def run_demo(tree: Path, *arguments: str) -> int:
    """Runs the demo on a tree with a small window."""
    window = str(WINDOW_TOKENS)
    return main(["demo", str(tree), "--window", window, "--steps", "30", *arguments])


def read_table(output: str) -> dict[str, list[str]]:
    """Reads the last table of an output: its values by the name of their row."""
    rows = [line.split("│") for line in output.splitlines() if line.count("│") == 2]
    return {name.strip(): [v.strip() for v in values] for name, *values in rows}


# The demo.


@pytest.mark.parametrize("strategy", ["threshold", "sliding-window"])
def test_demo_finishes_only_with_the_guard(
    tree: Path, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    """Without the guard the run is over at the first refusal; with it, it is done."""
    assert run_demo(tree, "--strategy", strategy) == 0

    output = capsys.readouterr().out
    table = read_table(output)
    bare_steps, guarded_steps = table["steps done"]
    assert int(bare_steps.split()[0]) < 10
    assert guarded_steps == "30 of 30"
    assert int(table["requests rejected"][0]) == 5  # All five turns.
    assert table["requests rejected"][1] == "0"
    assert table["compactions"][0] == "0"
    assert int(table["compactions"][1]) >= 5
    largest = [int(value.replace(",", "")) for value in table["largest request"]]
    assert largest[0] > WINDOW_TOKENS >= largest[1]
    billed = [int(value.replace(",", "")) for value in table["tokens billed"]]
    assert billed[1] > billed[0] > 0
    assert "with it all 30 steps were done and no request was refused." in output


def test_demo_reports_what_happens_in_plain_lines(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal there is a line for each event and no control character."""
    run_demo(tree)

    output = capsys.readouterr().out
    assert all(character.isprintable() or character == "\n" for character in output)
    assert "turn 2: Now summarise the folder mail" in output
    assert "rejected by the provider: " in output
    assert "compaction 1: " in output
    assert "of 4,000 tokens" in output


def test_demo_draws_a_gauge_on_a_terminal(
    tree: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a terminal the current tool and the gauge are redrawn in place."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")

    assert run_demo(tree) == 0

    output = capsys.readouterr().out
    assert "\x1b[" in output
    assert "answer" in output


def test_demo_works_through_the_adk_package_by_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a path it is the installed google-adk package, with 32,000 tokens."""
    assert main(["demo", "--steps", "2"]) == 0

    output = capsys.readouterr().out
    assert str(Path("google", "adk")) in output
    assert "window 32,000 tokens, compaction from 25,600" in output
    assert "fits into the window without it as well" in output


def test_demo_fails_when_a_guarded_request_is_refused(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guard that does nothing is reported as such: exit code 1."""
    idle = contextguard_adk.ContextGuardPlugin(default=None)
    monkeypatch.setattr(demo, "ContextGuardPlugin", lambda **_: idle)

    assert run_demo(tree) == 1

    assert "but the provider refused 5 of its requests." in capsys.readouterr().out


def test_user_gives_up_after_ten_refused_turns(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that only meets refusals comes to an end."""
    idle = contextguard_adk.ContextGuardPlugin(default=None)
    monkeypatch.setattr(demo, "ContextGuardPlugin", lambda **_: idle)

    assert run_demo(tree, "--steps", "100") == 1

    output = capsys.readouterr().out
    assert "given up after 10 refused turns" in output
    assert read_table(output)["requests rejected"] == ["10", "10"]


@pytest.mark.parametrize("calls", [2, 30], ids=["without the guard", "with the guard"])
def test_ctrl_c_ends_the_demo(
    tree: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    calls: int,
) -> None:
    """Ctrl-C ends both runs with exit code 130 and one line."""
    seen = 0
    play = OfflineAgent.__call__

    def interrupt(self: OfflineAgent, request: LlmRequest) -> Reply:
        nonlocal seen
        seen += 1
        if seen == calls:
            raise KeyboardInterrupt
        return play(self, request)

    monkeypatch.setattr(OfflineAgent, "__call__", interrupt)

    assert run_demo(tree) == 130

    gc.collect()  # Tasks speak of lost exceptions when they are collected.
    captured = capsys.readouterr()
    assert captured.err == "contextguard: interrupted\n"
    assert not caplog.records
    assert ("with guard" in captured.out) is (calls > 2)
    assert logging.getLogger("contextguard_adk").propagate


# Wrong arguments.


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["demo", "/no/such/folder"], "'/no/such/folder' is not a folder"),
        (["demo", "--window", "999"], "--window: at least 1,000 tokens, not 999"),
        (["demo", "--window", "wide"], "--window: 'wide' is no number"),
        (["demo", "--steps", "0"], "--steps: at least 1 steps, not 0"),
        (["demo", "--strategy", "luck"], "invalid choice: 'luck'"),
        (["demo", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["dance"], "invalid choice: 'dance'"),
        ([], "required: COMMAND"),
    ],
)
def test_wrong_arguments_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    """What is wrong stands in one line on stderr; the exit code is 2."""
    assert main(arguments) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("contextguard")
    assert captured.err.count("\n") == 1
    assert reason in captured.err


@pytest.mark.parametrize(
    ("name", "data"),
    [("empty.py", b"\n"), ("image.png", b"\x89PNG\0\0"), ("bundle.js", b"a" * 9_000)],
)
def test_tree_without_a_source_file_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, data: bytes
) -> None:
    """Empty, binary and generated files are nothing to work on."""
    (tmp_path / name).write_bytes(data)

    assert main(["demo", str(tmp_path)]) == 2

    assert f"there is no source file in {tmp_path}" in capsys.readouterr().err


def test_folder_that_is_gone_is_an_error(tmp_path: Path) -> None:
    """`run_demo` checks the folder for callers that do not."""
    with pytest.raises(demo.DemoError, match="is not a folder"):
        demo.run_demo(demo.DemoSettings(root=tmp_path / "gone"))


def test_missing_adk_sources_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where google-adk has no folder, a path must be given."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    with pytest.raises(demo.DemoError, match="name one: PATH"):
        demo.run_demo(demo.DemoSettings())


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["--version"]])
def test_help_and_version_succeed(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """Both print to stdout and end with exit code 0."""
    assert main(arguments) == 0

    assert capsys.readouterr().out.startswith(("usage: contextguard", "contextguard"))


def test_version_is_that_of_the_installed_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version comes from the package's metadata."""
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.2.3")

    main(["--version"])

    assert capsys.readouterr().out == "contextguard 1.2.3\n"


def test_reader_that_leaves_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`contextguard demo | head -1` ends quietly, also with an older rich."""

    def break_pipe(_: object) -> int:
        raise BrokenPipeError

    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(demo, "run_demo", break_pipe)
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["demo"]) == 1
        stdout.write("what was left in the buffer")
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_output_that_is_full_is_one_line() -> None:
    """Though it shows only when the last of it is written."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "contextguard_adk", "check"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "contextguard: error: [Errno 28] No space left on device"
    ]


def test_output_that_cannot_show_a_character_gets_another() -> None:
    """An ASCII output gets plain glyphs; names lose control characters."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", newline="")
    console = Console(file=stream, highlight=False)
    view = DemoView(console, 1_000, 800, 5)

    view.compaction(1, 900, 100)
    view.turn(1, "What is in caf\u00e9\x1b[2J?")
    view.turn_done(1, 400)
    view.rejection(None)
    view.table([PhaseResult("no guard", 1, 5, 1, 0, 10, 1_001)])
    stream.flush()

    output = raw.getvalue().decode("ascii")
    assert "compaction 1: 900 > 100 tokens" in output
    assert "What is in caf??[2J?" in output
    assert "#" in output
    assert "too many tokens" in output
    assert "\x1b" not in output


def test_warnings_of_the_guard_are_shown() -> None:
    """What the guard warns of appears among the demo's lines."""
    stream = io.StringIO()
    handler = WarningHandler(Console(file=stream, width=40))

    handler.handle(logging.makeLogRecord({"levelname": "WARNING", "msg": "Mind it."}))

    assert stream.getvalue() == "    warning: Mind it.\n"


def test_only_commands_import_rich() -> None:
    """The library itself does without rich."""
    package = Path(contextguard_adk.__file__).parent
    importers = {
        file.parent.name
        for file in package.rglob("*.py")
        if re.search(r"^\s*(from|import) rich", file.read_text("utf-8"), re.MULTILINE)
    }
    assert importers == {"tools"}


def test_command_line_starts_as_a_process() -> None:
    """The entry point works outside of pytest, and its output can be cut off."""
    code = "import sys; from contextguard_adk.tools.cli import main; sys.exit(main())"
    process = subprocess.run(
        [sys.executable, "-c", code, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.returncode == 0
    assert "demo" in process.stdout


# Real models.


class LiteLlm(BaseLlm):
    """Bears the name of ADK's class; what it does is in its model's name."""

    answered: int = 0

    @classmethod
    def supported_models(cls) -> list[str]:
        """The names that ADK's registry gives to this class."""
        return ["fake/.*"]

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Reads a file for ever; "answers" says nothing, others fail in time."""
        kind = self.model.partition("/")[2]
        if kind == "keyless" or (kind == "flaky" and self.answered == 3):
            raise ValueError("No API key was provided.\nGet one.")
        if kind == "silent":
            raise ValueError
        self.answered += 1
        part = types.Part.from_function_call(
            name="read_file", args={"path": "README.md"}
        )
        if kind == "answers":
            part = types.Part(text="Done.")
        usage = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=100, candidates_token_count=5
        )
        yield LlmResponse(
            content=types.Content(role="model", parts=[part]),
            usage_metadata=None if kind == "unmetered" else usage,
        )


class OtherLlm(LiteLlm):
    """The same, but nothing of litellm's."""


@pytest.fixture
def fake_litellm(monkeypatch: pytest.MonkeyPatch) -> python_types.ModuleType:
    """Registers the fake models, and a litellm that need not be imported."""
    litellm = python_types.ModuleType("litellm")
    monkeypatch.setitem(sys.modules, "litellm", litellm)
    registry = "google.adk.models.registry._llm_registry_dict"
    monkeypatch.setattr(registry, {"fake/.*": LiteLlm, "other/.*": OtherLlm})
    LLMRegistry.resolve.cache_clear()
    return litellm


def test_real_model_is_metered_by_its_usage(
    tree: Path,
    capsys: pytest.CaptureFixture[str],
    fake_litellm: python_types.ModuleType,
) -> None:
    """The run ends after so many steps, billed as the provider's usage says."""
    assert run_demo(tree, "--model", "fake/reader") == 0

    output = capsys.readouterr().out
    table = read_table(output)
    assert "fake/reader, window 4,000 tokens" in output
    assert table["steps done"] == ["30 of 30", "30 of 30"]
    assert table["tokens billed"][0] == "3,150"
    assert table["largest request"][0] == "100"
    assert fake_litellm.suppress_debug_info is True


@pytest.mark.usefixtures("fake_litellm")
def test_real_model_that_answers_at_once_is_asked_again(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There are questions until the steps are used up."""
    assert run_demo(tree, "--model", "fake/answers") == 0

    assert "turn 30: " in capsys.readouterr().out


@pytest.mark.usefixtures("fake_litellm")
def test_model_without_usage_costs_nothing(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a provider does not report is not guessed."""
    assert run_demo(tree, "--model", "other/unmetered") == 0

    assert read_table(capsys.readouterr().out)["tokens billed"] == ["0", "0"]


@pytest.mark.usefixtures("fake_litellm")
def test_model_that_fails_in_between_ends_the_run(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps done until then count, the reason is told, the exit code is 1."""
    assert run_demo(tree, "--model", "fake/flaky") == 1

    output = capsys.readouterr().out
    assert "stopped: No API key was provided." in output
    assert read_table(output)["steps done"] == ["3 of 30", "3 of 30"]
    assert "then the model failed: No API key was provided." in output


@pytest.mark.usefixtures("fake_litellm")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "fake/keyless", "--window", "5000"], "No API key was provided.\n"),
        (["--model", "fake/silent", "--window", "5000"], "used: ValueError\n"),
        (["--model", "nobody-knows"], "Model nobody-knows not found.\n"),
        (["--model", "fake/keyless"], "window of fake/keyless is unknown: give"),
    ],
    ids=["key", "no words", "name", "window"],
)
def test_model_that_cannot_be_used_is_one_line(
    tree: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    """A wrong name or a missing key is told in one line, with exit code 2."""
    assert main(["demo", str(tree), *arguments]) == 2

    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert reason in error


@pytest.mark.usefixtures("fake_litellm")
def test_window_of_a_known_model_comes_from_the_registry(
    tree: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without --window the guard assumes what the registry knows."""
    monkeypatch.setattr(LitellmRegistry, "context_window", lambda *_: 128_000)

    assert main(["demo", str(tree), "--model", "fake/reader", "--steps", "2"]) == 0

    assert "fake/reader, window 128,000 tokens" in capsys.readouterr().out


async def test_meter_agrees_with_the_simulated_provider(tree: Path) -> None:
    """The meter counts what the provider counts, refusals for structure included."""
    llm = SimulatedLlm(context_window=1_200, script=["One.", "Two."])
    sizes: list[int | None] = []
    meter = Meter(sizes.append)
    meter.attach(llm)
    short = types.Content(role="user", parts=[types.Part(text="Hello")])
    long = types.Content(role="user", parts=[types.Part(text="Hello " * 2_000)])
    for contents in ([short], [long], [], [short]):
        with suppress(SimulatedProviderError):
            async for _ in llm.generate_content_async(LlmRequest(contents=contents)):
                pass
    assert meter.rejections == llm.rejections + llm.violations == 2
    assert meter.billed_tokens == llm.billed_tokens
    assert meter.largest_request_tokens == llm.largest_request_tokens
    assert sizes == [llm.largest_request_tokens, None]


# The plan and the offline agent.


def test_plan_is_deterministic_and_as_long_as_asked(tree: Path) -> None:
    """Two plans over one tree are equal; their steps add up, round the tree again."""
    turns = plan_turns(tree, 100)

    assert turns == plan_turns(tree, 100)
    assert sum(turn.steps for turn in turns) == 100
    assert turns[0].question.startswith("Find out how BillingService0 works")
    assert turns[0].calls[:3] == (
        ("list_files", {"directory": "billing"}),
        ("search", {"pattern": "BillingService0"}),
        ("read_file", {"path": "billing/service_0.py"}),
    )
    assert any("the top folder" in turn.question for turn in turns)


def test_plan_leaves_out_what_it_cannot_read(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unreadable file is no reason to stop."""
    open_path = Path.open

    def deny(self: Path, *args: Any, **kwargs: Any) -> Any:
        if "mail" in self.parts:
            raise PermissionError(13, "Permission denied")
        return open_path(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", deny)

    assert not any("mail" in turn.question for turn in plan_turns(tree, 60))


def tool_result(**response: Any) -> types.Content:
    """A tool's answer, as the model sees it."""
    part = types.Part.from_function_response(name="tool", response=response)
    return types.Content(role="user", parts=[part])


@pytest.mark.parametrize(
    ("response", "note"),
    [
        (
            {"path": "a.py", "content": "class Mail:\n  pass\ndef send():\n"},
            "a.py has 4 lines and defines Mail, send.",
        ),
        ({"path": "a.md", "content": "Text"}, "a.md has 1 lines and defines nothing"),
        ({"directory": ".", "entries": ["a.py"]}, ". has 1 entries."),
        ({"matches": ["a.py:1: Mail", "b.py:2: Mail"]}, "2 lines match, in a.py, b.py"),
        ({"matches": []}, "0 lines match, in no file."),
        ({"error": "gone"}, "That did not work: gone."),
    ],
)
def test_offline_agent_notes_what_it_sees(response: dict[str, Any], note: str) -> None:
    """Its notes are taken from the request, and so is its answer."""
    agent = OfflineAgent()
    agent.begin(Turn("Why?", (("read_file", {"path": "a.py"}),) * 2))
    question = types.Content(role="user", parts=[types.Part(text="Why?")])
    first = agent(LlmRequest(contents=[question]))
    second = agent(LlmRequest(contents=[question, tool_result(**response)]))
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert first[0].text == "I carry on."
    assert (second[0].text or "").startswith(f"Noted: {note}")

    history = [
        question,
        types.Content(role="model", parts=second),
        tool_result(error=1),
    ]
    answer = agent(LlmRequest(contents=history))

    assert isinstance(answer, str)
    assert answer.startswith(f"What I found:\n- {note}")
    assert answer.endswith("- That did not work: 1.")


# The file tools.


def test_tools_list_read_and_search(tree: Path) -> None:
    """The answers name paths from the top of the folder."""
    tools = FileTools(tree)
    assert tools.list_files() == {
        "directory": ".",
        "entries": ["README.md (35 bytes)", "billing/", "mail/", "store/"],
    }
    assert tools.read_file("README.md") == {
        "path": "README.md",
        "content": "# A project\n\nIt has three folders.\n",
    }
    found = ["mail/service_2.py:1: class MailService2:"]
    assert tools.search("MailService2", "mail") == {"matches": found}
    assert tools.search("mailservice2") == {"matches": []}


def test_hidden_files_and_caches_are_left_out(tree: Path) -> None:
    """Neither lists nor searches show them."""
    (tree / ".env").write_text("SECRET = 1")
    (tree / "__pycache__").mkdir()
    (tree / "__pycache__" / "x.py").write_text("SECRET = 2")
    tools = FileTools(tree)

    assert len(tools.list_files(".")["entries"]) == 4
    assert tools.search("SECRET") == {"matches": []}


@pytest.fixture
def secret(tree: Path) -> Path:
    """A file outside of the folder, and links that lead to it."""
    secret = tree.parent / "secret.txt"
    secret.write_text("the password")
    (tree / "link.txt").symlink_to(secret)
    (tree / "out").symlink_to(tree.parent)
    (tree / "inside.md").symlink_to(tree / "README.md")
    (tree / "loop").symlink_to(tree / "loop")
    return secret


@pytest.mark.usefixtures("secret")
@pytest.mark.parametrize(
    "path",
    [
        "../secret.txt",
        "billing/../../secret.txt",
        "billing/../README.md",
        "/etc/passwd",
        "link.txt",
        "out/secret.txt",
        "out",
    ],
)
def test_paths_that_lead_out_are_refused(tree: Path, path: str) -> None:
    """No tool reads outside of the folder, whichever way it is asked."""
    tools = FileTools(tree)
    for answer in (
        tools.read_file(path),
        tools.list_files(path),
        tools.search("password", path),
    ):
        assert "is refused" in answer["error"]
        assert "password" not in str(answer)


@pytest.mark.usefixtures("secret")
def test_links_are_shown_but_not_followed_by_a_search(tree: Path) -> None:
    """A link inside the folder can be read; a search does not go through links."""
    tools = FileTools(tree)

    assert "link.txt (link)" in tools.list_files()["entries"]
    assert "three folders" in tools.read_file("inside.md")["content"]
    assert tools.search("password") == {"matches": []}
    assert len(tools.search("three folders")["matches"]) == 1


@pytest.mark.usefixtures("secret")
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("gone.py", "'gone.py' does not exist"),
        ("billing", "'billing' is not a file"),
        ("pipe", "'pipe' is not a file"),
        ("image.png", "'image.png' is a binary file of 7 bytes"),
        ("denied.py", "Permission denied"),
        ("a\0b", "a path must be a text"),
        (7, "a path must be a text"),
        ("x" * 5_000, "File name too long"),
        ("loop", "loop"),
    ],
)
def test_files_that_cannot_be_read_are_answers(
    tree: Path, monkeypatch: pytest.MonkeyPatch, path: Any, reason: str
) -> None:
    """A tool never raises, and no answer tells where the folder is."""
    (tree / "image.png").write_bytes(b"\x89PNG\0\0\0")
    (tree / "denied.py").write_text("secret")
    os.mkfifo(tree / "pipe")
    open_path = Path.open

    def deny(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == "denied.py":  # For root, no mode forbids reading.
            raise PermissionError(13, "Permission denied", str(self))
        return open_path(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", deny)

    error = FileTools(tree).read_file(path)["error"]

    assert reason in error
    assert str(tree) not in error


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda tools: tools.list_files("README.md"), "'README.md' is not a folder"),
        (lambda tools: tools.list_files("gone"), "'gone' does not exist"),
        (lambda tools: tools.search("x", "README.md"), "'README.md' is not a folder"),
        (lambda tools: tools.search(""), "at least one character"),
        (lambda tools: tools.search(7), "at least one character"),
    ],
)
def test_wrong_questions_are_answered(
    tree: Path, ask: Callable[[FileTools], dict[str, Any]], reason: str
) -> None:
    """The model learns what was wrong."""
    assert reason in ask(FileTools(tree))["error"]


def test_huge_files_are_read_in_part(tmp_path: Path) -> None:
    """At most 200 kB are returned, whole characters, with a note."""
    text = "\u00e9" * MAX_READ_BYTES
    (tmp_path / "huge.txt").write_text("a" + text, encoding="utf-8")

    answer = FileTools(tmp_path).read_file("huge.txt")

    assert answer["content"] == "a" + text[: MAX_READ_BYTES // 2 - 1]
    assert answer["note"].startswith("The file has 400,001 bytes; the first 200,000")


def test_long_answers_are_cut_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists and matches are limited, and say so."""
    monkeypatch.setattr(_file_tools, "MAX_ENTRIES", 3)
    monkeypatch.setattr(_file_tools, "MAX_MATCHES", 4)
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("needle\n" * 2)
    tools = FileTools(tmp_path)

    listed, found = tools.list_files(), tools.search("needle")

    assert len(listed["entries"]) == 3
    assert listed["note"] == "3 of 5 entries are shown."
    assert len(found["matches"]) == 4
    assert found["note"] == "Only the first 4 matches are shown."


def test_search_passes_over_what_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large, binary and unreadable files do not end a search."""
    monkeypatch.setattr(_file_tools, "MAX_SEARCHED_BYTES", 100)
    (tmp_path / "binary.bin").write_bytes(b"needle\0")
    (tmp_path / "denied.txt").write_text("needle")
    (tmp_path / "large.txt").write_text("needle" * 100)
    (tmp_path / "small.txt").write_text("needle")
    read_bytes = Path.read_bytes

    def deny(self: Path) -> bytes:
        if self.name == "denied.txt":
            raise PermissionError(13, "Permission denied")
        return read_bytes(self)

    monkeypatch.setattr(Path, "read_bytes", deny)

    assert FileTools(tmp_path).search("needle") == {"matches": ["small.txt:1: needle"]}


def test_walk_ends_in_an_endless_tree(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk stops after so many files."""
    monkeypatch.setattr(_file_tools, "MAX_WALKED_FILES", 5)

    assert len(list(_file_tools.walk_files(tree))) == 5
