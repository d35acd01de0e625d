"""More conversations for `compare`: many small facts, far apart.

In those of `_conversations`, large results fill the window. Here talk does: what
matters are a few words in each message and in short results, or the names of columns
that were read once, long before. As there, the facts are random.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from benchmarks import _common
from benchmarks._conversations import (
    FINAL_QUESTION,
    Conversation,
    ToolUse,
    Turn,
    chars_per_token,
)

_TALK = "other languages"
_USER_NOTES = (
    "The neighbor's parcel is {0}.",
    "Please remember {0} for later.",
    "My reference is {0}.",
    "We agreed on {0}.",
    "The spare one is {0}.",
)
_STEMS = ("tide", "moss", "anvil", "plume", "gravel", "saddle", "walnut", "thimble")
_ENDS = ("code", "rank", "weight", "origin", "state", "owner", "grade", "batch")
_COLUMN_TYPES = (
    "integer NOT NULL",
    "varchar(40)",
    "numeric(8, 2) NULL",
    "timestamp",
    "boolean DEFAULT false",
)
_TABLES = ("harvests", "depots", "crates", "drivers", "invoices", "inspections")
_TABLE_COLUMNS = 8


class _Writer:
    """Writes one conversation, and notes the facts in it.

    All sizes are shares of the window.
    """

    def __init__(self, seed: str, window_tokens: int) -> None:
        self.turns: list[Turn] = []
        self.user_facts: list[str] = []
        self.tool_facts: list[str] = []
        self.notes: dict[str, str] = {}
        self.rng = random.Random(seed)
        self._window_tokens = window_tokens

    def talk(self, share: float) -> str:
        """Writes prose in one line, as people talk: with few names and numbers."""
        chars = int(share * self._window_tokens * chars_per_token(_TALK))
        return " ".join(_common.cut_text(_TALK, chars, self.rng).split())

    def mention(self, share: float) -> str:
        """Writes a message of the user that names a fact somewhere within."""
        fact = f"{self._letters(4)}-{self._digits(4)}"
        note = self.rng.choice(_USER_NOTES).format(fact)
        self.user_facts.append(fact)
        self.notes[fact] = note
        before = self.rng.random() * share
        return f"{self.talk(before)} {note} {self.talk(share - before)}"

    def code(self, prefix: str) -> str:
        """Makes the number of something that a tool returns: a fact."""
        fact = f"{prefix}{self._digits(5)}{self._letters(1)}"
        self.add_tool_fact(fact)
        return fact

    def add_tool_fact(self, fact: str) -> None:
        """Notes a fact that an ideal summary has word for word, alone on its line."""
        self.tool_facts.append(fact)
        self.notes[fact] = fact

    def _letters(self, count: int) -> str:
        return "".join(self.rng.choices("BCDFGHJKLMNPQRSTVWXZ", k=count))

    def _digits(self, count: int) -> str:
        return "".join(self.rng.choices("0123456789", k=count))


def _write_hundred_turns(writer: _Writer, length: float) -> None:
    """Each message names one fact, and each answer looks one up."""
    for number in range(round(100 * length)):
        found = {
            "article": number,
            "shelf": writer.code("S"),
            "remark": writer.talk(0.01),
        }
        use = ToolUse("find_article", found)
        writer.turns.append(Turn(writer.mention(0.01), [[use]], "I have noted it."))


def _write_receipts(writer: _Writer, length: float) -> None:
    """A talk, with a booking, a ticket or a payment in every fifth turn."""
    for number in range(round(60 * length)):
        if number % 5 == 2:
            use = _RECEIPTS[number // 5 % len(_RECEIPTS)](writer)
            turn = Turn("Yes, please do that for me.", [[use]], "That is arranged.")
        elif number % 5 == 4:
            turn = Turn(writer.mention(0.01), answer=writer.talk(0.05))
        else:
            turn = Turn(writer.talk(0.01), answer=writer.talk(0.05))
        writer.turns.append(turn)


def _book(writer: _Writer) -> ToolUse:
    return ToolUse("book_table", {"booking": writer.code("BK-"), "people": 4})


def _buy_ticket(writer: _Writer) -> ToolUse:
    return ToolUse("buy_ticket", f"Ticket {writer.code('T')}, platform 7.")


def _pay(writer: _Writer) -> ToolUse:
    paid = {"receipt": {"no": writer.code("R/")}, "status": "paid"}
    return ToolUse("pay", paid)


_RECEIPTS = (_book, _buy_ticket, _pay)


def _write_schema(writer: _Writer, length: float) -> None:
    """The tables of a database are read once; queries and talk follow."""
    names = [
        f"{stem}{gap}{end}" for stem in _STEMS for end in _ENDS for gap in ("", "_")
    ]
    writer.rng.shuffle(names)
    described = []
    for number, table in enumerate(_TABLES):
        columns = names[number * _TABLE_COLUMNS :][:_TABLE_COLUMNS]
        described.append(
            ToolUse("describe_table", _write_table(writer, table, columns))
        )
    half = len(described) // 2
    question = "Have a look at the tables before we begin."
    steps = [described[:half], described[half:]]
    writer.turns.append(Turn(question, steps, "I have read them."))

    for number in range(round(40 * length)):
        table = writer.rng.choice(_TABLES)
        query = {"sql": f"SELECT count(*) FROM {table} WHERE id > {number}"}
        rows = _common.cut_text("digits", 1_500, writer.rng)
        use = ToolUse("run_query", rows, query)
        message = writer.mention(0.01) if number % 3 == 0 else writer.talk(0.01)
        writer.turns.append(Turn(message, [[use]], writer.talk(0.02)))


def _write_table(writer: _Writer, table: str, columns: list[str]) -> str:
    """Writes how a table was created; each column is a fact."""
    quote = writer.rng.choice(('"', "`", ""))
    lines = ["id integer PRIMARY KEY"]
    for column in columns:
        writer.add_tool_fact(column)
        kind = writer.rng.choice(_COLUMN_TYPES)
        lines.append(f"{quote}{column}{quote} {kind}")
    body = ",\n  ".join(lines)
    return f"CREATE TABLE {quote}{table}{quote} (\n  {body}\n);"


SMALL_FACTS: dict[str, Callable[[_Writer, float], None]] = {
    "a hundred turns": _write_hundred_turns,
    "receipts between talk": _write_receipts,
    "a schema read once": _write_schema,
}


def write_small_facts(
    name: str, window_tokens: int, length: float = 1.0, seed: str = ""
) -> Conversation:
    """Writes a conversation, the same on every run.

    Args:
        name: One of `SMALL_FACTS`.
        window_tokens: The provider's window.
        length: How much of the conversation; less is for a quick try.
        seed: Another one gives another conversation of the same kind.
    """
    writer = _Writer(seed + name, window_tokens)
    SMALL_FACTS[name](writer, length)
    writer.turns.append(Turn(FINAL_QUESTION))
    return Conversation(
        name,
        writer.turns,
        writer.user_facts,
        writer.tool_facts,
        writer.notes,
        window_tokens,
        window_tokens,
    )
