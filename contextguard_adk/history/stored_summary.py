"""A summary as session state keeps it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from contextguard_adk.history.coverage import Covered


@dataclass(frozen=True)
class SummaryMark:
    """What a stored summary was made for; kept as one flat JSON string.

    Attributes:
        scope: Session, branch and isolation scope; it is used nowhere else.
        invocation: The invocation in which the compaction ran.
        request: Hex fingerprint of the live request that the continuation quotes,
            or "" for the generic continuation.
        request_chars: How many characters of it are quoted; -1 is all of it.
        has_continuation: Whether a continuation follows the summary.
        model_summary_chars: Length of the leading part of the summary that a model
            wrote; what follows is mechanical.
        model_covered_count: How many covered contents that part stands for.
        truncation: How tool results are shortened, as JSON; "" for not at all.
        truncated_upto: The newest content that is shortened: its fingerprint in
            hex, and after a dot the how-manyth with it it is.
        todos_chars: Length of the todo list that is stored behind the summary.
        index_chars: Length of the index of items that is stored behind that.
        has_recall: Whether handles of what is left out are told.
    """

    scope: str = ""
    invocation: str = ""
    request: str = ""
    request_chars: int = -1
    has_continuation: bool = True
    model_summary_chars: int = 0
    model_covered_count: int = 0
    truncation: str = ""
    truncated_upto: str = ""
    todos_chars: int = 0
    index_chars: int = 0
    has_recall: bool = False

    def to_json(self) -> str:
        """Writes the mark as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SummaryMark:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: The text is not such a mark.
        """
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("not an object")
        mark = cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
        for item in fields(cls):
            if type(getattr(mark, item.name)) is not type(item.default):
                raise ValueError(f"{item.name} has the wrong type")
        return mark


@dataclass(frozen=True)
class StoredSummary:
    """A summary as session state keeps it.

    Attributes:
        text: What the model, or the mechanical fallback, wrote.
        ledger: Excerpts of the user's messages that it covers.
        covered: Fingerprints of the contents that it stands for.
        mark: What it was made for.
        todos: The todo list as it stood, written by the guard.
        index: Which items were left out, written by the guard.
    """

    text: str
    ledger: tuple[str, ...]
    covered: Covered
    mark: SummaryMark
    todos: str = ""
    index: str = ""

    @property
    def is_mechanical(self) -> bool:
        """Whether a part of it was written without a model."""
        return self.mark.model_covered_count < self.covered.content_count

    @property
    def model_text(self) -> str:
        """The part of it that a model wrote."""
        return self.text[: self.mark.model_summary_chars]
