"""Takes turns of guarded sessions in a process of its own, and may kill itself.

Run as a script with the repository's root on `PYTHONPATH`. It reads one JSON object a
line from standard input, `{"url": …, "log": …, "message": …}`, runs that turn of the
one session in the database, and writes one line with the answer. `log` names a file
to which a line is added for every request that the provider gets.

`--kill-at POINT` lets the process die by SIGKILL at that point of a turn, the first
time after `--after-summaries` summaries were asked for. With `--breed` it forks a
process for each line instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.events.event import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions import DatabaseSessionService
from google.genai import types

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.testing import Reply, SimulatedLlm, call

APP, USER, SESSION = "app", "user", "session"
WINDOW = 4_000
PROVIDER_WINDOW = 12_000
"""Of the provider: a summary then takes one call. Agent requests must fit WINDOW."""

POINTS = (
    "before the guard",
    "after the guard",
    "summary asked",
    "summary written",
    "model asked",
    "model answered",
    "after the model",
    "call emitted",
    "call stored",
    "in a tool",
    "after a tool",
    "result stored",
    "answer emitted",
    "answer stored",
    "after the run",
)
"""Where a process may die, in the order of a turn."""

_FACT = re.compile(r"fact-\w+")
_WANTED = re.compile(r"Look up: ((?:\w+ )*\w+)\.")


@dataclass
class Suicide:
    """When this process dies."""

    point: str = ""
    after_summaries: int = 0
    summaries: int = 0

    def reach(self, point: str) -> None:
        """Dies, where this is the point and the time."""
        if point == self.point and self.summaries >= self.after_summaries:
            os.kill(os.getpid(), signal.SIGKILL)


suicide = Suicide()


class LoggingLlm(SimulatedLlm):
    """Looks up whatever it was asked for and cannot see, one thing after the other."""

    log: str = ""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers, and notes what it was asked."""
        is_summary = self.is_summary_request(llm_request)
        suicide.summaries += is_summary
        suicide.reach("summary asked" if is_summary else "model asked")
        try:
            async for answer in super().generate_content_async(llm_request, stream):
                self._write_down(is_summary)
                suicide.reach("summary written" if is_summary else "model answered")
                yield answer
        except Exception:
            self._write_down(is_summary)
            raise

    def _write_down(self, is_summary: bool) -> None:
        record = self.requests[-1]
        line = {
            "is_summary": is_summary,
            "rejected": record.rejected,
            "tokens": record.prompt_tokens,
            "facts": sorted(set(_FACT.findall(record.text))),
        }
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read(request: LlmRequest) -> str:
    """All that a request says."""
    return "\n".join(content.model_dump_json() for content in request.contents)


def reply(request: LlmRequest) -> Reply:
    """Calls a tool for the next thing that is wanted and not known yet."""
    text = read(request)
    wanted = _WANTED.findall(text)[-1].split()
    known = set(_FACT.findall(text))
    for ref in wanted:
        if f"fact-{ref}" not in known:
            return call("look_up", ref=ref)
    return f"Found all of {' '.join(wanted)}."


def list_facts(request: LlmRequest) -> str:
    """A summary that keeps every fact."""
    text = read(request)
    return "Known: " + " ".join(dict.fromkeys(_FACT.findall(text)))


def look_up(ref: str) -> dict[str, Any]:
    """Looks something up."""
    suicide.reach("in a tool")
    rows = [{"row": row / 7, "name": f"{ref} notebook {row}"} for row in range(20)]
    return {"zeta": ref, "rows": rows, "fact": f"fact-{ref}", "alpha": "words " * 60}


class Deadly(BasePlugin):
    """Dies where it has to, on the side of the guard that its name says."""

    async def before_model_callback(self, **_: Any) -> None:
        """Comes to a request."""
        suicide.reach(f"{self.name} the guard")

    async def after_model_callback(self, **_: Any) -> None:
        """Comes to an answer."""
        suicide.reach(f"{self.name} the model")

    async def after_tool_callback(self, **_: Any) -> None:
        """Comes to a result."""
        suicide.reach(f"{self.name} a tool")

    async def on_event_callback(self, *, event: Event, **_: Any) -> None:
        """Comes to an event."""
        if self.name == "after":
            suicide.reach(f"{describe(event)} emitted")

    async def after_run_callback(self, **_: Any) -> None:
        """Comes to the end of a run."""
        suicide.reach(f"{self.name} the run")


def describe(event: Event) -> str:
    """What an event is."""
    if event.get_function_calls():
        return "call"
    return "result" if event.get_function_responses() else "answer"


class Sessions:
    """One process's view: a plugin, a runner and a connection for each database."""

    def __init__(self) -> None:
        self._runners: dict[str, Runner] = {}

    async def take_turn(self, url: str, log: str, message: str) -> str:
        """Runs one turn and returns its answer."""
        if url not in self._runners:
            self._runners[url] = make_runner(url, log)
        runner, answer = self._runners[url], ""
        async for event in runner.run_async(
            user_id=USER,
            session_id=SESSION,
            new_message=types.UserContent(message),
        ):
            suicide.reach(f"{describe(event)} stored")
            parts = event.content.parts if event.content else None
            answer = "".join(part.text or "" for part in parts or ()) or answer
        return answer


def make_runner(url: str, log: str) -> Runner:
    """A runner with a guard of its own."""
    llm = LoggingLlm(
        log=log,
        context_window=PROVIDER_WINDOW,
        token_ratio=1.0,
        script=reply,
        summary_replies=list_facts,
    )
    agent = LlmAgent(
        name="agent", model=llm, instruction="You look things up.", tools=[look_up]
    )
    strategy = Threshold(
        context_window=WINDOW, summarizer_context_window=PROVIDER_WINDOW
    )
    plugins = [Deadly("before"), ContextGuardPlugin(default=strategy), Deadly("after")]
    return Runner(
        app=App(name=APP, root_agent=agent, plugins=plugins),
        session_service=DatabaseSessionService(url),
        auto_create_session=True,
    )


async def serve(lines: Iterable[str]) -> None:
    """Takes one turn for every line."""
    sessions = Sessions()
    for line in lines:
        answer = await sessions.take_turn(**json.loads(line))
        print(json.dumps({"answer": answer}), flush=True)


def breed() -> None:
    """Forks a process for every line: `{"arguments": […], "turns": […]}`.

    It saves the seconds that imports take. A line with its exit code follows what
    the process has written.
    """
    make_runner("sqlite+aiosqlite://", os.devnull)  # Imports what comes late.
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if not pid:
            code = 1
            try:
                run(job["arguments"], map(json.dumps, job["turns"]))
                code = 0
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps({"code": code}), flush=True)


def run(arguments: Sequence[str], lines: Iterable[str]) -> None:
    """Reads a command line, and does what it says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kill-at", choices=POINTS, default="", dest="point")
    parser.add_argument("--after-summaries", type=int, default=0)
    parser.add_argument("--breed", action="store_true")
    options = parser.parse_args(arguments)
    if options.breed:
        breed()
        return
    suicide.point = options.point
    suicide.after_summaries = options.after_summaries
    asyncio.run(serve(lines))


if __name__ == "__main__":
    run(sys.argv[1:], iter(sys.stdin.readline, ""))
