"""What holds where nothing but the wheel is installed, without extras.

    ENVIRONMENT/bin/python .ci/wheel_check.py

Importing the package loads nothing heavy, and an app with the guard runs offline.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys

import google.adk.apps
import google.adk.plugins
from google.adk.agents import LlmAgent
from google.adk.runners import InMemoryRunner

before = set(sys.modules)  # httpx, which ADK needs, loads rich where it is installed.
import contextguard_adk  # noqa: E402

loaded = {"jinja2", "rich", "tiktoken", "yaml"} & (set(sys.modules) - before)
from contextguard_adk.testing import SimulatedLlm  # noqa: E402


def main() -> None:
    """Runs turns until there was a compaction."""
    assert "site-packages" in contextguard_adk.__file__, contextguard_adk.__file__
    assert not loaded, loaded
    assert importlib.util.find_spec("litellm") is None, "litellm is an extra"

    records: list[contextguard_adk.CompactionRecord] = []
    llm = SimulatedLlm(context_window=8_000)
    guard = contextguard_adk.ContextGuardPlugin(
        default=contextguard_adk.Threshold(context_window=8_000),
        on_compaction=records.append,
    )
    app = google.adk.apps.App(
        name="wheel",
        root_agent=LlmAgent(name="helper", model=llm, instruction="Help."),
        plugins=[guard],
    )
    messages = [f"Chapter {number}. " + "And so on. " * 300 for number in range(12)]
    asyncio.run(InMemoryRunner(app=app).run_debug(messages, quiet=True))

    assert records, "there was no compaction"
    assert not llm.rejections, f"{llm.rejections} requests were rejected"
    print(f"wheel ok: {llm.calls} calls, {len(records)} compactions")


if __name__ == "__main__":
    main()
