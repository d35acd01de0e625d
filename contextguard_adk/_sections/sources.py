"""The sources of the values and lines that stand beside a summary.

An index is the position of a message among the contents of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.genai import types

from contextguard_adk._history.adk_events import RECALL_TOOL
from contextguard_adk._history.credentials import hide_secrets, without_secrets
from contextguard_adk._history.history import History
from contextguard_adk._history.noise import drop_noise
from contextguard_adk._history.text import PlacedPart, payload_text
from contextguard_adk._measuring.budgets import excerpt
from contextguard_adk._measuring.tokens import Memo
from contextguard_adk._sections.todos import TOOL_NAME as TODOS_TOOL
from contextguard_adk._sections.todos import read_todos
from contextguard_adk._turn.turn import Turn

USER = "user"
"""The origin of the user's messages."""

MAX_LABEL_BYTES = 60
"""The arguments of a call take at most this in the label of a source."""

MAX_READ_CHARS = 4_000
"""Only this many characters of a call's arguments are read for a label."""

MAX_READ_BYTES = 400_000
"""The newest messages are read whole, up to this size together.

Of older messages only the calls are read.
"""


COVERED_RATIO = 0.25
"""A list of values or lines takes at most this part of the tokens of what it is read
from.
"""

KNOWN_RATIO = 4 / 3
"""The list before may take this much of its own tokens, if it stands for messages that
are not loaded. `Room.fill` guesses three bytes for a token, and a list has about four.
"""


@dataclass(frozen=True, eq=False)
class Source:
    """A call with its result, or a message. Each object is another source.

    Attributes:
        origin: The name of the tool, or the author.
        args: The arguments of the call, such as "(src/a.py)"; "" for a message.
    """

    origin: str
    args: str = ""

    @property
    def label(self) -> str:
        """The name of the source, such as "read_file(src/a.py)" or "user"."""
        return self.origin + self.args


def find_repeating_tools(turn: Turn) -> frozenset[str]:
    """Returns the names of the tools of which nothing is listed.

    Their calls and results only repeat messages, the todo list or skills. A tool of the
    user's may be named like that of the todo list, or like those of skills. So these
    names count only if there are todos, or if ADK has counted a skill as active.
    """
    tools = {RECALL_TOOL}
    if read_todos(turn.state):
        tools.add(TODOS_TOOL)
    return frozenset(tools.union(turn.skill_tools))


def find_read(history: History, covered: frozenset[int]) -> frozenset[int]:
    """Returns the indexes of the messages that are read for a new list.

    If the session is loaded in part, the list before stands for all messages of the
    summary before. So the new list does not depend on how many of these are loaded.
    """
    return covered if history.is_whole else covered - history.covered


def limit_by_covered(turn: Turn, covered: frozenset[int], name: str) -> float:
    """Returns the most tokens of a list, by the size of what it is read from.

    Args:
        turn: The model call.
        covered: Indexes of the messages that the new summary replaces.
        name: The name of the list's section.
    """
    history = turn.history
    contents = [history.shown[index] for index in find_read(history, covered)]
    most_tokens = turn.measure_alone(contents) * COVERED_RATIO
    if history.stored is None or history.is_whole:
        return most_tokens

    # The list before stands for messages that are not loaded.
    known_tokens = turn.count(history.stored.beside.get(name, ""))
    return most_tokens + known_tokens * KNOWN_RATIO


def find_oldest_read(history: History, indexes: Sequence[int]) -> int:
    """Returns the index of the oldest message that is read whole, among the contents.

    Not all messages of a long history are read whole, because that would hold up the
    event loop. If even the newest message is too long, no message is read whole. Then
    an index is returned that is larger than those of all messages.

    Args:
        history: The history of the request.
        indexes: The indexes of the messages, in rising order.
    """
    left_bytes = MAX_READ_BYTES
    oldest_index = len(history.contents)
    for index in reversed(indexes):
        # A heuristic token is four bytes.
        left_bytes -= 4 * history.memo.estimate_tokens([history.contents[index]])
        if left_bytes < 0:
            break
        oldest_index = index
    return oldest_index


def describe_source(
    memo: Memo, placed: PlacedPart, call: types.FunctionCall | None
) -> Source:
    """Describes the source of a part.

    - For a call or a result: the tool with the values of the call's arguments, such as
      "read_file" and "(notes/a.txt, utf-8)".
    - For an output of code: "code".
    - For another part: the author of the message.

    Args:
        memo: Remembers the labels of calls of earlier runs.
        placed: The part.
        call: The call in the part, or the call that the part answers; None for neither.
    """
    if call is None:
        is_output = placed.part.code_execution_result is not None
        return Source("code" if is_output else placed.author)

    part = types.Part(function_call=call)
    args_label = memo.remember(_label_args, part, (part,))
    return Source(call.name or "?", args_label)


def _label_args(part: types.Part) -> str:
    """Returns the values of a call's arguments, such as "(notes/a.txt, utf-8)"."""
    call = part.function_call
    if call is None:
        return ""

    args = without_secrets(call.args or {})
    texts = [
        value if isinstance(value, str) else payload_text(value)
        for value in args.values()
    ]
    args_text = ", ".join(texts)
    without_noise = drop_noise(hide_secrets(args_text[:MAX_READ_CHARS]))
    shown = " ".join(without_noise.split())
    if len(args_text) > MAX_READ_CHARS:
        # The cut may go through a credential, and half a credential is not recognized.
        # `excerpt` shows the end of a text as well as its beginning. So the text before
        # the cut is taken away.
        shown = shown[:MAX_LABEL_BYTES]
    return f"({excerpt(shown, MAX_LABEL_BYTES)})"
