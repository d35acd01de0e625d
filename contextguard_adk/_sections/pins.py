"""Texts that stand word for word beside every summary."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from typing import Any, NamedTuple

from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from contextguard_adk._runtime.runs import branch_scope
from contextguard_adk._runtime.state import PIN_KEY, AgentState, StateOrDict
from contextguard_adk._support.log import warn_once
from contextguard_adk._support.phrases import PINS
from contextguard_adk._turn.room import Room
from contextguard_adk._turn.turn import Turn
from contextguard_adk._turn.units import Section, declare

MAX_PINNED_BYTES = 4 * 1024
"""The most that all lines for one agent take together."""

MAX_KEY_CHARS = 64
"""The most characters of a key that an app or an agent gives to a text."""

ROOM_RATIO = 0.5
"""The lines take at most this part of `Turn.room_tokens`.

`Turn.room_tokens` is the threshold less the tokens of instruction and tools.
"""

logger = logging.getLogger("contextguard_adk.call")


class _PinName(NamedTuple):
    """The name of a pinned text in session state.

    Attributes:
        owner: The agent that is shown the text, or the agent with its scope, such as
            "writer@branch"; "" for every agent.
        key: The key of the text, as `pin` returns it.
    """

    owner: str
    key: str


def pin(state: StateOrDict, text: str, key: str = "", agent: str | None = None) -> str:
    """Has a text stand word for word beside every summary, from the next one on.

    The state may be that of a tool context or a callback context, or a plain dict that
    is sent as a `state_delta`. A plain dict does not have the texts that the session
    has already, so all texts together may exceed the limit. Then the agent is shown the
    last ones in the order of the state.

    Args:
        state: The state that keeps the text.
        text: The text to pin.
        key: A name with which the text can be replaced or taken back: at most 64
            characters, without a colon. "" derives a key from the text.
        agent: The agent that is shown the text; None for every guarded agent of the
            session.

    Returns:
        The key.

    Raises:
        ValueError: Nothing is pinned, for one of these reasons:

            - The text is empty or no string.
            - The key is too long, has a colon, or is no string.
            - An agent would be shown more than 4,096 bytes of UTF-8 in all. Each text
              counts with its bytes and three more.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError("The text to pin is empty, or no string.")
    if not isinstance(key, str) or len(key) > MAX_KEY_CHARS or ":" in key:
        raise ValueError("A key is a string of at most 64 characters, without a colon.")

    if not key:
        key = hashlib.blake2b(text.encode("utf-8", "replace")).hexdigest()[:8]
    owner = agent or ""
    pinned = {**_find(AgentState(state, "")), _PinName(owner, key): text}
    shown_bytes = _largest_view_bytes(pinned, owner)
    if shown_bytes > MAX_PINNED_BYTES:
        raise ValueError(
            f"With this text {shown_bytes:,} bytes would be pinned; the limit is "
            f"{MAX_PINNED_BYTES:,}. Take another text back first, or pin less."
        )

    state[f"{PIN_KEY}{owner}:{key}"] = text
    return key


def _largest_view_bytes(pinned: dict[_PinName, str], pinning_owner: str) -> int:
    """Returns the most bytes that any agent is shown.

    Agents that are not shown the texts of `pinning_owner` do not count.

    Args:
        pinned: All pinned texts, the new text of `pinning_owner` included.
        pinning_owner: The owner of the new text.
    """
    bytes_by_owner = Counter[str]()
    for name, text in pinned.items():
        bytes_by_owner[name.owner] += _line_bytes(text)

    view_bytes = []
    # An agent without texts of its own is shown no more than one of these owners.
    for viewer in bytes_by_owner:
        shown_owners = _shown_owners(viewer)
        if pinning_owner in shown_owners:
            view_bytes.append(sum(bytes_by_owner[owner] for owner in shown_owners))
    # The list is not empty: `pinning_owner` is shown its own texts.
    return max(view_bytes)


def unpin(state: StateOrDict, key: str, agent: str | None = None) -> None:
    """Takes a pinned text back: the next summary stands without it.

    An unknown key is no error.

    Args:
        state: See `pin`.
        key: The key that `pin` returned.
        agent: The agent for which the text was pinned, as for `pin`.
    """
    name = f"{agent or ''}:{key}"
    # A plain dict does not have the texts of the session. So the key is written even if
    # the session may not have it.
    is_plain_dict = not hasattr(state, "to_dict")
    if is_plain_dict or name in AgentState(state, "").find(PIN_KEY):
        # ADK's state cannot delete a key, but None counts as absent.
        state[f"{PIN_KEY}{name}"] = None


class PinTool(BaseTool):
    """A tool named `pin`: pins a text, takes a text back, or lists the pinned texts.

    The texts are those of the agent that calls the tool. In a branch or an isolation
    scope, they are those of the agent in this scope alone.
    """

    def __init__(self) -> None:
        super().__init__(
            name="pin",
            description="Keeps a text word for word when older messages are summarized:"
            " pin rules, constraints and decisions that must not be forgotten. `key` "
            "names it, and alone takes it back; no arguments list what is pinned.",
        )

    def _get_declaration(self) -> types.FunctionDeclaration:
        return declare(self, text={"type": "string"}, key={"type": "string"})

    async def run_async(
        self, *, args: dict[str, Any], tool_context: ToolContext
    ) -> dict[str, Any]:
        """Pins, unpins or lists, depending on the arguments.

        - `text`, with or without `key`: pins the text, and returns its key.
        - `key` alone: unpins the text with this key, and returns the other texts.
        - Neither: returns the pinned texts, by key.

        If `pin` refuses the text, the result has the reason as `error`.
        """
        text = args.get("text")
        key = str(args.get("key") or "")
        state = tool_context.state
        # In a branch or an isolation scope, the owner is the agent with this scope.
        scope = branch_scope(tool_context.get_invocation_context())
        agent_state = AgentState(state, tool_context.agent_name, scope=scope)
        owner = agent_state.owner

        try:
            if text:
                return {"pinned": pin(state, text, key, owner)}
            if key:
                unpin(state, key, owner)
        except ValueError as error:
            return {"error": str(error)}

        pinned = _find(agent_state)
        own = {name.key: kept for name, kept in pinned.items() if name.owner == owner}
        return {"pinned": own}


class Pins(Section):
    """Shows what is pinned for all agents, for this agent, and for its scope."""

    name = "pins"
    label = "what is pinned"
    heading = PINS
    goes_at = None
    own_state_bytes = MAX_PINNED_BYTES
    stands_alone = True
    is_briefed = True

    def write(self, turn: Turn, covered: frozenset[int], known: str, room: Room) -> str:
        """Returns the text of `brief`, whose size `brief` itself limits.

        The argument `room` is not used: a pinned text has to stand beside each summary.
        """
        return turn.history.redactor.redact_text(self.brief(turn))

    def brief(self, turn: Turn) -> str:
        """Returns the heading and a line for each text, in the order of the state.

        The last texts get their room first. A text that has no room is left out, and a
        warning is logged. Returns "" if no text is shown.
        """
        # The bytes of a token are guessed as in `Room.fill`: three, or fewer if the
        # model counts more tokens than the estimate.
        bytes_a_token = 3 / max(1.0, turn.correction)
        share_bytes = int(ROOM_RATIO * turn.room_tokens * bytes_a_token)
        most_bytes = min(MAX_PINNED_BYTES, share_bytes)

        shown_owners = _shown_owners(turn.state.owner)
        left_bytes = most_bytes
        last_first: list[str] = []
        for name, text in reversed(_find(turn.state).items()):
            if name.owner not in shown_owners:
                continue

            line_bytes = _line_bytes(text)
            if line_bytes <= left_bytes:
                left_bytes -= line_bytes
                last_first.append(f"- {text}")
            else:
                message = (
                    "Agent %r is not shown all that is pinned: there is room for "
                    "%d bytes. Pin less, or use a larger window."
                )
                warn_once(logger, message, turn.agent, most_bytes)
        return "\n".join([PINS, *reversed(last_first)]) if last_first else ""

    def describe(self, state: AgentState) -> str:
        """Returns the number of texts that an agent is shown, such as "3 pins"."""
        shown_owners = _shown_owners(state.owner)
        owners = [name.rpartition(":")[0] for name in state.find(PIN_KEY)]
        count = sum(1 for owner in owners if owner in shown_owners)
        return f"{count} pins"


def _line_bytes(text: str) -> int:
    """Returns the size of the line of a text, with its dash and line break."""
    return len(f"- {text}\n".encode("utf-8", "replace"))


def _shown_owners(viewer: str) -> set[str]:
    """Returns the owners whose texts a viewer is shown.

    An example: "writer@branch" is shown the texts for every agent, those of "writer",
    and its own.
    """
    agent, _, _ = viewer.partition("@")
    return {"", agent, viewer}


def _find(state: AgentState) -> dict[_PinName, str]:
    """Finds the pinned texts of all agents, in the order of the state.

    Values that are empty or no text are left out: an app may have written them.
    """
    found = {}
    for name, text in state.find(PIN_KEY).items():
        if isinstance(text, str) and text.strip():
            # "writer:style" -> "writer", "style".
            owner, _, key = name.rpartition(":")
            found[_PinName(owner, key)] = text
    return found
