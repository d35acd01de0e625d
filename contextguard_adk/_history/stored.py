"""The draft of a summary, and what session state keeps of an agent, as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic import PlainSerializer as Write
from pydantic import PlainValidator as Read

from contextguard_adk._history.fingerprints import (
    Covered,
    decode_covered,
    encode_covered,
)
from contextguard_adk._history.truncation import Length, Truncation

VERSION = 2
"""The version of the records that this release writes; older ones are ignored."""

MAX_RECORD_CHARS = 256 * 1024
"""The most characters of a stored record, as JSON.

The guard itself writes smaller records. The texts beside a summary take at most 164 KB:
48 KB each for the user's messages and for skills, 4 KB for what is pinned, and 64 KB
for all others. The rest of a record takes at most about 20 KB.
"""

MAX_SUMMARY_CHARS = 256 * 1024
"""The most characters of a stored summary.

The guard's own summarizer writes at most 20,000 tokens. A longer summary of a custom
summarizer is shortened before it is stored.
"""

MAX_TODOS = 1_000
"""The most tasks of a todo list."""

MAX_SKILLS = 1_000
"""The most active skills of an agent."""

Reason = Literal["tokens", "requested", "overflow", "turns"]
"""Why a history is compacted; `turns` means too many messages."""

MAX_SHRINK = 4
"""The last of the steps in which a summary and the texts beside it are shortened.

See `Draft.shrink`.
"""


@dataclass(frozen=True)
class Draft:
    """The decision of a strategy: which text replaces which contents.

    Attributes:
        text: The summary; "" if the covered contents are left out without a summary.
        covered: The indexes of the contents that the text replaces.
        model_covered: Those of the covered indexes whose contents a model summarized.
        model_chars: How many characters at the beginning of the text a model wrote.
        reason: Why the history is compacted.
        truncation: How tool results are shortened; None leaves them whole.
        truncated_upto: The index of the last content whose tool results are shortened;
            -1 for none.
        shrink: How far the summary and the texts beside it are shortened: a step from
            0, which leaves them whole, to `MAX_SHRINK`.
    """

    text: str
    covered: frozenset[int]
    model_covered: frozenset[int] = frozenset()
    model_chars: int = 0
    reason: Reason = "tokens"
    truncation: Truncation | None = None
    truncated_upto: int = -1
    shrink: int = 0

    @property
    def is_mechanical(self) -> bool:
        """Whether there are covered contents that no model summarized."""
        return self.model_covered != self.covered


def _read_covered(value: object) -> Covered:
    return value if isinstance(value, Covered) else decode_covered(str(value))


def _read_text(value: object) -> str:
    """Returns the text that a section has stored; "" for any other value.

    Older releases stored other values than texts:

    - a dict with lines as "text", or with a list as "excerpts"
    - a list of texts, each of which is one item of a list that is shown
    - a list of pairs: an id, and a line that is shown
    """
    if isinstance(value, dict):
        value = value.get("excerpts", value.get("text"))
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return ""

    lines: list[str] = []
    for item in value:
        match item:
            case [str(), str(line)]:
                lines.append(line)
            case str():
                lines.append("- " + "\n  ".join(item.splitlines()))
    return "\n".join(lines)


# Fields of a later release stay when this release writes the record again.
class _Stored(BaseModel, extra="allow"):
    model_config = ConfigDict(frozen=True, strict=True, arbitrary_types_allowed=True)


class StoredSummary(_Stored):
    """A summary, and the contents that it replaces.

    The continuation is a message after the summary. It quotes the user's request, and
    tells the model to go on with it.

    Attributes:
        text: The summary; it has a key of its own in session state.
        covered: The fingerprints of the contents that the summary replaces.
        beside: The texts of sections, by the section's name.
        scope: The scope in which the summary is valid, as `summary_scope` names it.
        invocation: The id of the invocation that made the summary.
        last_event: The id of the newest event that the summary replaces.
        reason: Why the history was compacted; the continuation tells the reason.
        request: The fingerprint, in hex, of the request that the continuation quotes.
        request_chars: How many characters of this request are quoted; -1 for all.
        request_excerpt: An excerpt of this request, for a session that is loaded
            without it; "" if no request is quoted.
        has_continuation: Whether a continuation stands after the summary.
        model_chars: How many characters at the beginning of the text a model wrote.
        model_covered_count: How many of the oldest covered contents a model summarized.
        truncation: How tool results after the summary are shortened; None leaves them
            whole.
        truncated_upto: The name of the last content with shortened results, as
            `History.name_content` returns it; "" for none.
        has_recall: Whether the compacted request declared the recall tool.
        has_older: Whether the summary also replaces all contents before those of
            `covered`.
        has_tools: Whether a tool was called in the agent's history when the summary was
            made.
        left_tokens: The tokens of the request once the summary was in place.
        edits: The value of `AgentRecord.edits` when the summary was made.
    """

    text: str = Field(default="", exclude=True)
    covered: Annotated[Covered, Read(_read_covered), Write(encode_covered)] = Covered()
    beside: dict[str, Annotated[str, Read(_read_text)]] = Field(default={})
    scope: str = ""
    invocation: str = ""
    last_event: str = ""
    reason: str = ""
    request: str = ""
    request_chars: int = Field(default=-1, ge=-1, le=2**53)
    request_excerpt: str = Field(default="", max_length=4_096)
    has_continuation: bool = True
    model_chars: Length = 0
    model_covered_count: Length = 0
    truncation: Truncation | None = None
    truncated_upto: str = ""
    has_recall: bool = False
    has_older: bool = False
    has_tools: bool = False
    left_tokens: Length = 0
    edits: Length = 0

    @property
    def model_text(self) -> str:
        """The beginning of the text, which a model wrote."""
        return self.text[: self.model_chars]


class AgentRecord(_Stored):
    """The stored facts on an agent in one scope.

    The JSON of a record begins with `{"version":`. Earlier releases have also stored
    limits of models, as `learned`; these are not read.

    Attributes:
        version: The version of the form of this record.
        summary: The summary without its text; None for no summary.
        has_recall: Whether the agent's requests declare the recall tool; None for
            unknown.
        helped: The forms of contents that a provider accepted after it had refused
            another form; None for none.
        edits: How many times a summary was edited by hand.
    """

    version: int = Field(default=VERSION, ge=VERSION, le=2**53)
    summary: StoredSummary | None = None
    has_recall: bool | None = None
    helped: dict[str, Annotated[str, Field(max_length=256)]] | None = Field(
        default=None, max_length=16
    )
    edits: Length = 0

    @property
    def is_newer(self) -> bool:
        """Whether a later release has written the record.

        Such a record is read, but never changed.
        """
        return self.version > VERSION


class StateValues(_Stored):
    """The values under an agent's keys in session state.

    Some stand under keys of an app or of ADK. A value that exceeds one of these limits
    is ignored.
    """

    summary: str = Field(default="", max_length=MAX_SUMMARY_CHARS)
    record: str = Field(default="{}", max_length=MAX_RECORD_CHARS)
    summarized_at: float = Field(default=1, ge=1, le=2**53)
    real_tokens: float = Field(default=1, ge=1, le=2**53)
    last_heuristic: float = Field(default=1, ge=1, le=2**53)
    scopes: list[Annotated[str, Field(max_length=64)]] = Field([], max_length=1_024)
    todos: list[Any] = Field([], max_length=MAX_TODOS)
    active_skills: list[Any] = Field([], max_length=MAX_SKILLS)
    skill_lifecycles: dict[str, Any] = Field({}, max_length=MAX_SKILLS)
