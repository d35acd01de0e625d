"""Saves the summary of each compaction as an artifact, for people."""

from __future__ import annotations

import asyncio
import logging
import re

from google.adk.agents.invocation_context import InvocationContext
from google.genai import types

from contextguard_adk._runtime.adk_tree import names_of, walk_tree
from contextguard_adk._runtime.runs import call_key, find_caller, name_session
from contextguard_adk._support.log import warn_once
from contextguard_adk._turn.facts import Outcome
from contextguard_adk._turn.units import Compacted, Listener
from contextguard_adk.records import REASONS, CompactionRecord, describe_compaction

logger = logging.getLogger("contextguard_adk.artifacts")

_SAVE_SECONDS = 2
"""How long a model call waits for the artifact service: far less than for a summary."""

_LISTING_TOOL = "load_artifacts"
"""The name of ADK's tool by which a model is told of all artifacts of the session."""


class Artifacts(Listener):
    """Saves each summary as an artifact, where the app has an artifact service."""

    setting = "summary_artifacts"

    async def compacted(self, event: Compacted) -> None:
        """Saves the summary, and notes the artifact for an event of the agent.

        Nothing is saved if the app has no artifact service, or if an agent may list
        artifacts: the model would then read the summary, which is for people.
        """
        record = event.record
        invocation = event.context.get_invocation_context()
        session = invocation.session
        service = invocation.artifact_service
        if service is None or _shows_artifacts(invocation):
            return

        name = f"compaction-{record.agent}.md"
        markdown = _write_markdown(record, event.outcome)
        artifact = types.Part.from_bytes(
            data=markdown.encode("utf-8", "replace"), mime_type="text/markdown"
        )
        try:
            async with asyncio.timeout(_SAVE_SECONDS):
                version = await service.save_artifact(
                    app_name=invocation.app_name,
                    user_id=session.user_id,
                    session_id=session.id,
                    filename=name,
                    artifact=artifact,
                )
        except Exception as error:  # noqa: BLE001 - a service may raise anything.
            message = (
                "The artifact %r could not be saved: %s. Later failures are not logged."
            )
            warn_once(logger, message, name, type(error).__name__)
            return

        # ADK learns of an artifact from an event. `Guard.hand_over` names this artifact
        # in the agent's next event without text.
        agent, scope = call_key(event.context)
        key = name_session(invocation), agent, scope
        event.guard.artifacts[key] = name, version


def _shows_artifacts(invocation: InvocationContext) -> bool:
    """Returns whether an agent may list the artifacts of the session.

    This may be any agent of the app. If an `AgentTool` has begun the run, this may also
    be any agent of the calling app.
    """
    tree = walk_tree(getattr(invocation.agent, "root_agent", invocation.agent))
    if _LISTING_TOOL in names_of(tree):
        return True
    caller = find_caller(invocation)
    return caller is not None and _shows_artifacts(caller)


def _write_markdown(record: CompactionRecord, outcome: Outcome) -> str:
    """Returns the text of the artifact: the facts of a compaction and its summary.

    The summary is fenced, so that nothing in the summary is markup. The other text is
    ASCII, because ADK's chat page decodes nothing else correctly.
    """
    head = _write_head(record)
    text = outcome.stored.text
    if not text:
        return f"{head}No summary was needed: older messages were left out.\n"

    title = _choose_title(record, outcome)
    # The fence has to be longer than any fence in the text. A fence has at least three
    # characters, so the default is one less.
    inner_fences = re.findall("`{3,}", text)
    longest_inner_chars = max((len(each) for each in inner_fences), default=2)
    fence = "`" * (longest_inner_chars + 1)
    return f"{head}## {title}\n\n{fence}\n{text}\n{fence}\n"


def _choose_title(record: CompactionRecord, outcome: Outcome) -> str:
    """Returns the title of a text, which says how much of it a model wrote."""
    if not record.is_mechanical:
        return "Summary"
    if not record.is_without_model:
        return "Summary, in part without a model"

    has_earlier_summary = outcome.draft.model_chars > 0
    if has_earlier_summary:
        return "Earlier summary, then excerpts without a model"
    return "Excerpts, without a model"


def _write_head(record: CompactionRecord) -> str:
    """Returns the title of the artifact, a line on the compaction, and more facts."""
    usage = record.usage
    line = describe_compaction(record).replace("→", "to")
    read = f"{usage.prompt_tokens:,} tokens, {usage.cached_tokens:,} of them cached"
    facts = {
        "Reason": REASONS.get(record.reason, record.reason),
        "Strategy": record.strategy,
        "Read": read,
        "Written": f"{usage.output_tokens:,} tokens",
        "Waited": f"{record.waited_seconds:.1f} s",
    }
    if record.was_ahead:
        facts["Written in the background"] = f"in {record.duration_seconds:.1f} s"
    listed = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    return f"# Compaction of {record.agent}\n\n{line}\n\n{listed}\n\n"
