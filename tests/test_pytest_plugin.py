"""The fixtures for users' tests, as pytest finds them in an environment of theirs."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.adk.sessions import Session

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.testing import SimulatedLlm
from tests.builders import Chat, guarded_agent
from tests.recordings import save

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parent.parent / "docs" / "testing.md"


async def record() -> Session:
    """Records a session that is longer than the window of the example."""
    guard = ContextGuardPlugin(default=Threshold(context_window=100_000))
    chat = Chat(guarded_agent(SimulatedLlm(context_window=100_000)), [guard])
    for turn in range(12):
        await chat.say(f"Turn {turn}. " + "And so on. " * 300)
    return await chat.session()


@pytest.fixture(scope="module")
def recorded() -> Session:
    """A recorded session; what it imports stays, what pytester imports does not."""
    return asyncio.run(record())


@pytest.fixture
def folder(recorded: Session, pytester: pytest.Pytester) -> Path:
    """A folder that knows nothing of this project's settings, with the session."""
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    save(recorded, pytester.path)
    return pytester.path


@pytest.mark.slow
def test_the_example_of_the_page_passes(
    folder: Path, pytester: pytest.Pytester
) -> None:
    """As it is pasted, with a recorded session beside it."""
    [example] = re.findall(r"(?s)```python\n(.*?)```", PAGE.read_text("utf-8"))
    (folder / "test_clerk.py").write_text(example)
    pytester.runpytest_inprocess("-q").assert_outcomes(passed=3)


def test_a_refused_request_fails_the_test(
    folder: Path, pytester: pytest.Pytester
) -> None:
    """At its end, and it says how many; the plain model only refuses."""
    (folder / "test_it.py").write_text(
        "import asyncio\n"
        "from google.adk.agents import LlmAgent\n"
        "from google.adk.runners import InMemoryRunner\n"
        "def talk(llm):\n"
        "    runner = InMemoryRunner(agent=LlmAgent(name='a', model=llm))\n"
        "    try:\n"
        "        asyncio.run(runner.run_debug('And so on. ' * 900, quiet=True))\n"
        "    except Exception:\n"
        "        pass\n"
        "def test_strict(contextguard_strict_llm):\n"
        "    talk(contextguard_strict_llm(context_window=1_000))\n"
        "def test_plain(contextguard_llm):\n"
        "    llm = contextguard_llm(context_window=1_000)\n"
        "    talk(llm)\n"
        "    assert llm.rejections == 1\n"
    )

    done = pytester.runpytest_inprocess("-q")
    done.assert_outcomes(passed=2, errors=1)
    done.stdout.fnmatch_lines(["*1 of 1 requests refused*"])


@pytest.mark.slow
def test_a_run_that_uses_no_fixture_imports_nothing(tmp_path: Path) -> None:
    """Of this package, and nothing of ADK: pytest finds the fixtures by itself."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test_it():\n"
        "    assert 'pytest_contextguard_adk' in sys.modules\n"
        "    assert not {'contextguard_adk', 'google.adk'} & {*sys.modules}\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist"]
    command += ["-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name", ["contextguard_llm", "contextguard_strict_llm", "contextguard_recording"]
)
def test_the_page_names_each_fixture(name: str, request: pytest.FixtureRequest) -> None:
    """And pytest has it in this very run."""
    assert request.getfixturevalue(name)
    assert f"| `{name}` |" in PAGE.read_text("utf-8")
