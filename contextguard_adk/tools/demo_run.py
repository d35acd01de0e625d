"""One run of the demo's work through ADK, and what it cost."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.events import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService, Session
from google.genai import types

from contextguard_adk.history.state import AgentState
from contextguard_adk.providers.overflow import parse_overflow
from contextguard_adk.testing.llm import SimulatedProviderError
from contextguard_adk.tools.demo_plan import OfflineAgent, Turn
from contextguard_adk.tools.demo_view import DemoView, PhaseResult
from contextguard_adk.tools.file_tools import FileTools

AGENT = "explorer"
INSTRUCTION = """\
You study the source files of a project with your tools and answer questions about it.
Read the files that matter one after another, note in a sentence what you found in
each, and then answer. Paths are relative to the project's top folder."""

MAX_REFUSED_TURNS = 10
"""After so many refused turns in a row the user gives up."""

_MAX_REASON_CHARS = 200
_SUMMARIZED_AT = AgentState({}, AGENT).key("summarized_at")


class Meter:
    """Counts what a model is asked and answers, summaries and resends included.

    Args:
        on_rejection: Told of every refused request, with its prompt tokens where the
            provider names them.
    """

    def __init__(self, on_rejection: Callable[[int | None], None]) -> None:
        self._on_rejection = on_rejection
        self.rejections = 0
        self.billed_tokens = 0
        self.largest_request_tokens = 0

    def attach(self, llm: BaseLlm) -> None:
        """Counts every call of a model from now on."""
        answer = llm.generate_content_async

        async def count_calls(
            llm_request: LlmRequest, stream: bool = False
        ) -> AsyncGenerator[LlmResponse, None]:
            try:
                async with aclosing(answer(llm_request, stream)) as responses:
                    async for response in responses:
                        self._bill(response)
                        yield response
            except Exception as error:
                self._note_rejection(error)
                raise

        # On the instance: ADK treats some model classes in special ways, so a wrapper
        # of another class would change what is sent.
        object.__setattr__(llm, "generate_content_async", count_calls)

    def _bill(self, response: LlmResponse) -> None:
        usage = response.usage_metadata
        if usage is None or response.partial:
            return
        prompt_tokens = usage.prompt_token_count or 0
        output_tokens = usage.candidates_token_count or 0
        self.billed_tokens += usage.total_token_count or prompt_tokens + output_tokens
        self._note_size(prompt_tokens)

    def _note_rejection(self, error: Exception) -> None:
        if not is_rejection(error):
            return
        self.rejections += 1
        overflow = parse_overflow(error)
        prompt_tokens = overflow.prompt_tokens if overflow else None
        self._note_size(prompt_tokens or 0)
        self._on_rejection(prompt_tokens)

    def _note_size(self, prompt_tokens: int) -> None:
        self.largest_request_tokens = max(self.largest_request_tokens, prompt_tokens)


def is_rejection(error: Exception) -> bool:
    """Tells whether a provider refused the request itself, for length or structure."""
    if isinstance(error, SimulatedProviderError):
        return True
    return parse_overflow(error) is not None


def describe_error(error: Exception) -> str:
    """Returns the reason of a failure in one line."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[:_MAX_REASON_CHARS]} ..."


class Phase:
    """The work of the demo, done once from beginning to end.

    Args:
        name: How the run is called in the table.
        llm: The agent's model.
        script: The offline model's script; it is told where each turn begins.
        tools: The agent's tools.
        plugins: The plugins of the app.
        view: Where progress is shown.
        max_steps: After how many answered model calls the run ends.
    """

    def __init__(
        self,
        name: str,
        llm: BaseLlm,
        script: OfflineAgent,
        tools: FileTools,
        plugins: list[BasePlugin],
        view: DemoView,
        max_steps: int,
    ) -> None:
        self._name = name
        self._script = script
        self._view = view
        self._max_steps = max_steps
        self._meter = Meter(view.rejection)
        self._meter.attach(llm)
        agent = LlmAgent(
            name=AGENT,
            model=llm,
            instruction=INSTRUCTION,
            tools=[tools.list_files, tools.read_file, tools.search],
        )
        self._app = App(name="contextguard_demo", root_agent=agent, plugins=plugins)
        self._sessions = InMemorySessionService()
        self._steps = 0
        self._refused_turns = 0  # in a row
        self._compactions = 0
        self._prompt_tokens = 0
        self._failure = ""

    async def run(self, turns: Iterable[Turn]) -> PhaseResult:
        """Goes through the turns, whatever happens to each, and adds up."""
        runner = Runner(app=self._app, session_service=self._sessions)
        try:
            session = await self._sessions.create_session(
                app_name=self._app.name, user_id="user"
            )
            for number, turn in enumerate(turns, 1):
                self._view.turn(number, turn.question)
                self._script.begin(turn)
                await self._run_turn(runner, session, turn)
                if self._is_over():
                    break
        finally:
            await runner.close()
        return PhaseResult(
            name=self._name,
            steps=self._steps,
            planned_steps=self._max_steps,
            rejections=self._meter.rejections,
            compactions=self._compactions,
            billed_tokens=self._meter.billed_tokens,
            largest_request_tokens=self._meter.largest_request_tokens,
            failure=self._failure,
        )

    def _is_over(self) -> bool:
        if self._refused_turns >= MAX_REFUSED_TURNS:
            self._view.line(f"    given up after {MAX_REFUSED_TURNS} refused turns")
            return True
        return bool(self._failure) or self._steps >= self._max_steps

    async def _run_turn(self, runner: Runner, session: Session, turn: Turn) -> None:
        """Runs one turn; it ends early when the provider refuses a request."""
        steps_before = self._steps
        refused_turns, self._refused_turns = self._refused_turns, 0
        message = types.Content(role="user", parts=[types.Part(text=turn.question)])
        events = runner.run_async(
            user_id=session.user_id, session_id=session.id, new_message=message
        )
        try:
            async with aclosing(events):
                async for event in events:
                    self._observe(event)
                    if self._steps >= self._max_steps:
                        break
        except Exception as error:  # noqa: BLE001 - whatever a provider's SDK raises
            if is_rejection(error):
                self._refused_turns = refused_turns + 1
            else:
                self._failure = describe_error(error)
                self._view.line(f"    stopped: {self._failure}", "bold red")
        if self._steps > steps_before:
            self._view.turn_done(self._steps, self._prompt_tokens)

    def _observe(self, event: Event) -> None:
        """Counts a model's answer and the compaction that went before it."""
        content = event.content
        if event.partial or content is None or content.role != "model":
            return
        self._steps += 1
        usage = event.usage_metadata
        self._prompt_tokens = (usage and usage.prompt_token_count) or 0
        if before_tokens := event.actions.state_delta.get(_SUMMARIZED_AT):
            self._compactions += 1
            self._view.compaction(self._compactions, before_tokens, self._prompt_tokens)
        self._view.step(self._steps, _describe_action(event), self._prompt_tokens)


def _describe_action(event: Event) -> str:
    calls = [
        f"{call.name} {next(iter((call.args or {}).values()), '')}"
        for call in event.get_function_calls()
    ]
    return ", ".join(calls) or "answer"
