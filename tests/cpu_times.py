"""CPU seconds of each test: `pytest --cpu-times=FILE` prints what took most.

Seconds of CPU, those of child processes included, and not of the clock: a busy machine
changes them little.
"""

from __future__ import annotations

import resource
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

SHOWN = 20
_KEY = "cpu_seconds"
_START = pytest.StashKey[float]()


def used_seconds() -> float:
    """What this process and its children that have ended took until now."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


class Measuring:
    """Measures the tests that run in this process, and the process itself."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Notes when a test begins."""
        item.stash[_START] = used_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Adds what a test took to its last report."""
        report = yield
        if call.when == "teardown":
            taken_seconds = used_seconds() - item.stash[_START]
            report.user_properties.append((_KEY, taken_seconds))
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Tells the first process what a worker took, imports and all."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_KEY] = used_seconds()


class Printing:
    """Gathers what all processes measured; writes it to a file and prints a summary."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, float] = {}
        self._workers_seconds = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes what a report says."""
        for name, value in report.user_properties:
            if name == _KEY:
                self._tests[report.nodeid] = float(str(value))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Takes what a worker says at its end; one that died says nothing."""
        output = getattr(node, "workeroutput", None) or {}
        self._workers_seconds += output.get(_KEY, 0.0)

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        """Prints the sum, and the share of the tests that took most."""
        by_cost = sorted(self._tests.items(), key=lambda item: item[1], reverse=True)
        lines = [f"{seconds:.2f}\t{test}\n" for test, seconds in by_cost]
        self._path.write_text("".join(lines), "utf-8")

        in_tests = sum(self._tests.values())
        # Each worker has told its own; to this process it is no child until it ends.
        all_seconds = self._workers_seconds or used_seconds()
        of_shown = sum(seconds for _, seconds in by_cost[:SHOWN])
        share = of_shown / in_tests if in_tests else 0.0
        terminalreporter.section("CPU seconds")
        terminalreporter.line(
            f"{all_seconds:.0f} in all, {in_tests:.0f} in {len(by_cost):,} tests; "
            f"the {SHOWN} most expensive took {share:.0%}:"
        )
        for test, seconds in by_cost[:SHOWN]:
            terminalreporter.line(f"{seconds:6.2f}  {test}")


def add_option(parser: pytest.Parser) -> None:
    """Adds the option."""
    parser.addoption(
        "--cpu-times",
        metavar="FILE",
        help="write the CPU seconds of each test to FILE, and print what took most",
    )


def register(config: pytest.Config) -> None:
    """Measures where the option is given: in each worker, or in the only process."""
    name = config.getoption("--cpu-times")
    if name is None or config.option.collectonly:
        return
    config.pluginmanager.register(Measuring(), "cpu-times-measuring")
    if hasattr(config, "workerinput"):
        return
    path = Path(name)

    try:
        path.touch()
    except OSError as error:
        raise pytest.UsageError(f"--cpu-times={name}: {error.strerror}") from error

    config.pluginmanager.register(Printing(path), "cpu-times-printing")
