"""How people see a compaction: a line in session state, and an artifact."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from google.adk.agents.invocation_context import InvocationContext
from google.adk.tools.load_artifacts_tool import LoadArtifactsTool
from google.genai import types

from contextguard_adk._calls.guard import Guard
from contextguard_adk._history.state import AgentState, walk_tree
from contextguard_adk._memory import call_key, name_session
from contextguard_adk.telemetry import (
    REASONS,
    CompactionRecord,
    describe_compaction,
    format_cost,
    warn_once,
)

if TYPE_CHECKING:
    from google.adk.agents.callback_context import CallbackContext

logger = logging.getLogger("contextguard_adk.artifacts")

SAVE_SECONDS = 2
"""How long a model call waits for an artifact service; a summary takes far longer."""


async def show_compaction(
    guard: Guard, context: CallbackContext, state: AgentState, record: CompactionRecord
) -> None:
    """Writes the line, and saves the artifact where there is a service."""
    state.show(describe_compaction(record))
    invocation, summary = context.get_invocation_context(), state.record.summary
    service, session = invocation.artifact_service, invocation.session
    if service is None or not guard.has_artifacts:
        return
    name = f"compaction-{record.agent}.md"
    text = _write_markdown(record, summary.text if summary else "")
    data = text.encode("utf-8", "replace")
    try:
        if _shows_artifacts(invocation):
            return  # The model would be told of one that is not for it.
        async with asyncio.timeout(SAVE_SECONDS):
            version = await service.save_artifact(
                app_name=invocation.app_name,
                user_id=session.user_id,
                session_id=session.id,
                filename=name,
                artifact=types.Part.from_bytes(data=data, mime_type="text/markdown"),
            )
    except Exception as error:  # noqa: BLE001 - a service may raise anything.
        message = "The artifact %r could not be saved: %s. Later failures are not "
        message += "logged; `summary_artifacts = false` writes none."
        warn_once(logger, message, name, type(error).__name__)
    else:
        key = name_session(invocation), *call_key(context)
        guard.memory.artifacts[key] = name, version


def _shows_artifacts(invocation: InvocationContext) -> bool:
    """Whether an agent of the app, or of one that calls it, lists all artifacts."""
    return any(
        isinstance(node, LoadArtifactsTool)
        for root in _list_roots(invocation)
        for node in walk_tree(root)
    )


def _list_roots(invocation: InvocationContext) -> Iterator[object]:
    """The agent tree of a run, and those of the runs that an `AgentTool` was in."""
    yield getattr(invocation.agent, "root_agent", invocation.agent)
    caller = getattr(invocation.artifact_service, "tool_context", None)
    if caller is not None:
        yield from _list_roots(caller.get_invocation_context())


def _write_markdown(record: CompactionRecord, text: str) -> str:
    """Describes a compaction; its summary is fenced, so that nothing in it is markup.

    The rest is ASCII, which is all that ADK's chat page decodes correctly.
    """
    used = record.usage
    rows = {
        "Agent": record.agent,
        "Reason": REASONS.get(record.reason, record.reason),
        "Strategy": record.strategy,
        "Tokens": f"{record.tokens_before:,} before, {record.tokens_after:,} after",
        "Messages": f"{record.contents_before} before, {record.contents_after} after",
    }
    if record.model:
        cached = f" ({used.cached_tokens:,} cached)" if used.cached_tokens else ""
        rows["Summarizer"] = f"`{record.model.replace('`', '')}`"
        rows["Usage"] = f"{used.prompt_tokens:,} prompt tokens{cached}, "
        rows["Usage"] += f"{used.output_tokens:,} output tokens"
        rows["Cost"] = format_cost(record.cost)
    rows["Waited"] = f"{record.waited_seconds:.1f} s"
    if record.was_ahead:
        rows["Waited"] += f" (written ahead of time in {record.duration_seconds:.1f} s)"
    width = max(map(len, rows))
    lines = [f"| {name:{width}} | {value} |" for name, value in rows.items()]
    lines.insert(1, f"|{'-' * (width + 2)}|---|")
    table = "\n".join(["# Compaction of the history", "", *lines, "", ""])
    if not text:
        return f"{table}No summary was needed: older messages were left out.\n"
    kind = "Summary, in part without a model" if record.is_mechanical else "Summary"
    runs = re.findall("`{3,}", text)
    fence = "`" * (max(map(len, runs), default=2) + 1)
    return f"{table}## {kind}\n\n{fence}\n{text}\n{fence}\n"
