"""Takes turns of a guarded session in a process of its own, and may kill itself."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncGenerator
from multiprocessing.connection import Connection
from typing import Any

from google.adk.apps import App
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions import DatabaseSessionService
from google.genai import types

from contextguard_adk import ContextGuardPlugin, Threshold
from contextguard_adk.testing import Reply, SimulatedLlm, call
from tests.builders import guarded_agent

APP, USER, SESSION = "app", "user", "session"
WINDOW = 4_000
PROVIDER_WINDOW = 12_000
"""Of the provider: a summary then takes one call. Agent requests must fit WINDOW."""

POINTS = (
    "summary asked",
    "summary written",
    "after the guard",
    "model answered",
    "call stored",
    "in a tool",
    "result stored",
    "answer stored",
)
"""Where a process may die, in the order of a turn."""

_FACT = re.compile(r"fact-\w+")
_WANTED = re.compile(r"Look up: ((?:\w+ )*\w+)\.")


class Life:
    """When this process dies: at a point of a turn, after so many summaries."""

    point, after_summaries, summaries = "", 0, 0

    def reach(self, point: str) -> None:
        """Dies, where this is the point and the time."""
        if point == self.point and self.summaries >= self.after_summaries:
            os.kill(os.getpid(), signal.SIGKILL)


life = Life()


class LoggingLlm(SimulatedLlm):
    """Adds a line to a file for every request that it gets."""

    log: str

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answers, and notes what it was asked."""
        is_summary = self.is_summary_request(llm_request)
        life.summaries += is_summary
        if is_summary:
            life.reach("summary asked")
        try:
            async for answer in super().generate_content_async(llm_request, stream):
                self._write_down(is_summary)
                life.reach("summary written" if is_summary else "model answered")
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
    for ref in wanted:
        if f"fact-{ref}" not in text:
            return call("look_up", ref=ref)
    return f"Found all of {' '.join(wanted)}."


def list_facts(request: LlmRequest) -> str:
    """A summary that keeps every fact."""
    return "Known: " + " ".join(dict.fromkeys(_FACT.findall(read(request))))


def look_up(ref: str) -> dict[str, Any]:
    """Looks something up."""
    life.reach("in a tool")
    rows = [{"row": row / 7, "name": f"{ref} notebook {row}"} for row in range(20)]
    return {"zeta": ref, "rows": rows, "fact": f"fact-{ref}", "alpha": "words " * 60}


class Deadly(BasePlugin):
    """Dies behind the guard, if it has to."""

    async def before_model_callback(self, **_: Any) -> None:
        """Comes to a request."""
        life.reach("after the guard")


def make_runner(url: str, log: str) -> Runner:
    """A runner with a guard of its own."""
    llm = LoggingLlm(
        log=log,
        context_window=PROVIDER_WINDOW,
        token_ratio=1.0,
        script=reply,
        summary_replies=list_facts,
    )
    strategy = Threshold(
        context_window=WINDOW, summarizer_context_window=PROVIDER_WINDOW
    )
    plugins = [ContextGuardPlugin(default=strategy), Deadly("deadly")]
    return Runner(
        app=App(name=APP, root_agent=guarded_agent(llm, [look_up]), plugins=plugins),
        session_service=DatabaseSessionService(url),
        auto_create_session=True,
    )


async def take_turn(runner: Runner, message: str) -> str:
    """Runs one turn and returns its answer."""
    answer = ""
    async for event in runner.run_async(
        user_id=USER, session_id=SESSION, new_message=types.UserContent(message)
    ):
        kind = "result" if event.get_function_responses() else "answer"
        life.reach("call stored" if event.get_function_calls() else f"{kind} stored")
        parts = event.content.parts if event.content else None
        answer = "".join(part.text or "" for part in parts or ()) or answer
    return answer


def work(
    pipe: Connection[str, str], url: str, log: str, point: str, after_summaries: int
) -> None:
    """Answers the messages that come through a pipe, until it is closed."""
    life.point, life.after_summaries = point, after_summaries

    async def take_turns() -> None:
        runner = make_runner(url, log)
        while True:
            try:
                message = pipe.recv()
            except EOFError:
                return
            pipe.send(await take_turn(runner, message))

    asyncio.run(take_turns())
