"""Finds the names of a schema: tables, columns, fields and parameters.

An agent needs these names word for word, though most are plain words: "status". They
are known by the place in which they stand, such as a `CREATE TABLE` statement.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAX_NAMES = 1_000
"""Only this many names of one text are read."""

MAX_BODY_CHARS = 20_000
"""Only this many characters of one statement or declaration are read."""

_NAME = r"(?:\"[^\"\n]{1,64}\"|`[^`\n]{1,64}`|\[[^\]\n]{1,64}\]|[^\W\d][\w$]{0,63})"
"""A name as SQL writes it: bare, or in quotes, backticks or brackets."""

_PATH = rf"{_NAME}(?:\.{_NAME}){{0,3}}"
"""A name with the schema in front: public.orders."""

_TYPE = (
    r"(?:(?:tiny|small|medium|big)?int(?:eger)?\d{0,3}|uint\d{0,3}|serial|bigserial|"
    r"(?:n?var|n)?char2?|character|(?:tiny|medium|long)?text|string|str|clob|"
    r"(?:tiny|medium|long)?blob|bytea|bytes|binary|varbinary|bool(?:ean)?|bit|"
    r"float\d{0,2}|double|real|decimal|numeric|number|money|date|time|datetime2?|"
    r"timestamp(?:tz)?|interval|uuid|jsonb?|xml|array|object|enum|any|null|inet|"
    r"geometry|geography|point|table|view|record|struct|map|list|dict|id)"
)
"""The types of SQL, JSON Schema, GraphQL, pandas and others."""

_IS_TYPE = re.compile(rf"{_TYPE}\b(?![\w.@/-])", re.IGNORECASE)

_COMMENT = re.compile(r"--[^\n]*|/\*.{0,2000}?\*/", re.DOTALL)

_STRING = re.compile(r"'(?:[^'\n]|''){0,2000}'")

_TABLE = re.compile(
    r"\bcreate\s{1,8}(?:or\s{1,4}replace\s{1,4})?(?:\w{1,16}\s{1,4}){0,2}?"
    r"(?:table|view|index)\s{1,8}"
    rf"(?:if\s{{1,4}}not\s{{1,4}}exists\s{{1,4}})?(?P<name>{_PATH})"
    r"(?=\s{0,8}\(|\s{1,8}(?:as|on|using|like|partition)\b)",
    re.IGNORECASE,
)
"""The beginning of a `CREATE` statement."""

_ON = re.compile(rf"\s{{1,8}}on\s{{1,8}}(?P<name>{_PATH})", re.IGNORECASE)
"""The table of an index, behind the name of the index."""

_NAMED = re.compile(
    rf"\b(?:alter\s{{1,8}}table\s{{1,8}}(?:if\s{{1,4}}exists\s{{1,4}})?(?:only\s{{1,4}})?"
    rf"|insert\s{{1,8}}into\s{{1,8}}|references\s{{1,8}}"
    rf"|(?:add|drop|alter|modify|change)\s{{1,8}}column\s{{1,8}}"
    rf"(?:if\s{{1,4}}(?:not\s{{1,4}})?exists\s{{1,4}})?"
    rf"|rename\s{{1,8}}column\s{{1,8}}|rename\s{{1,8}}to\s{{1,8}})(?P<name>{_PATH})"
    rf"(?:\s{{1,8}}to\s{{1,8}}(?P<to>{_NAME})|\s{{0,8}}\((?P<list>[^()]{{1,4000}})\))?",
    re.IGNORECASE,
)
"""A name behind the words of SQL that say of what it is the name, and its columns."""

_ADDED = re.compile(
    rf"\badd\s{{1,8}}(?!column|constraint|primary|foreign|unique|index|key|check)"
    rf"(?P<name>{_NAME})\s{{1,8}}{_TYPE}\b",
    re.IGNORECASE,
)
"""A column that a statement adds without the word COLUMN."""

_KEY = re.compile(
    r"\b(?:primary\s{1,8}key|foreign\s{1,8}key|unique(?:\s{1,8}(?:key|index))?|key|"
    rf"index|btree)\s{{0,8}}(?:{_NAME}\s{{0,8}})?\((?P<list>[^()]{{1,2000}})\)",
    re.IGNORECASE,
)
"""The columns of a key."""

_NO_COLUMN = re.compile(
    r"(?:primary|foreign|unique|constraint|check|key|index|exclude|like|fulltext|"
    r"spatial|partition|period)\b",
    re.IGNORECASE,
)
"""How the items of a table begin that are no columns."""

_FIRST_NAME = re.compile(rf"\s{{0,200}}(?P<name>{_NAME})")

_DESCRIBED = re.compile(r"\b(?:Table|View) \"(?P<name>[\w.$]{1,128})\"")
"""The heading of a table's description by psql."""

_RAW_ROW = re.compile(
    rf"(?m)^\d{{1,4}}\|(?P<name>[^|\n]{{1,64}})\|{_TYPE}\b", re.IGNORECASE
)
"""A row of `PRAGMA table_info` as the shell of SQLite prints it: 0|id|INTEGER|0||1."""

_QUOTED_ROW = re.compile(
    rf"(?P<quote>[\"'])(?P<name>\w{{1,64}})(?P=quote), {{0,2}}(?P=quote){_TYPE}\b",
    re.IGNORECASE,
)
"""A row that Python has printed: (0, 'id', 'INTEGER', 0, None, 1)."""

_QUOTED_PROPERTY = re.compile(
    r"\"(?P<name>\w{1,64})\"\s{0,8}:\s{0,8}\{\s{0,40}\"type\"\s{0,8}:"
)
"""A property of a JSON schema within other text."""

_LISTED_FIELD = re.compile(
    r"(?m)^[ \t]{0,8}(?P<bullet>[-*] [`*\"]{0,2})?(?P<name>[^\W\d]\w{0,63})[`*\"]{0,2}"
    rf"(?:[ \t]?[:(][ \t]{{0,2}}|[ \t]{{1,40}})(?P<type>{_TYPE})\b",
    re.IGNORECASE,
)
"""A column in a list: "- status (text)", "status: TEXT"."""

_LISTED_TABLE = re.compile(
    r"(?m)^[#*\- \t]{0,8}table:?[ \t]{1,4}[`*\"']{0,2}(?P<name>[\w.]{1,64})[`*\"']{0,2}"
    r"[ \t]{0,4}[:(]?[ \t]{0,4}$",
    re.IGNORECASE,
)
"""The heading of such a list: "Table: orders"."""

_TABLE_NAME = re.compile(r"__tablename__ = [\"'](?P<name>\w{1,64})[\"']")
"""The table of a class of SQLAlchemy."""

_BLOCK = re.compile(
    r"(?m)^[ \t]{0,16}(?:export |declare |pub |public |data )*"
    r"(?P<kind>type|input|interface|message|struct|model|enum)\s{1,4}"
    r"(?P<name>[A-Za-z]\w{0,63})[^{}\n;:]{0,120}\{"
)
"""The head of a type in GraphQL, TypeScript, Protocol Buffers, Go, Rust or Prisma."""

_BLOCK_FIELD = re.compile(
    r"(?m)(?:^|[;{,])[ \t]{0,16}(?:(?:readonly|pub|public|private) )?"
    r"(?P<name>[A-Za-z]\w{0,63})\??(?:\([^()\n]{0,200}\))?"
    r"[ \t]{0,4}:[ \t]{0,4}[\w\[{\"']"
)
"""A field in GraphQL, TypeScript and Rust: "status: String"."""

_NUMBERED_FIELD = re.compile(
    r"(?:^|[;{])\s{0,16}(?:(?:repeated|optional|required) )?[\w.<>, ]{1,80} "
    r"(?P<name>[A-Za-z]\w{0,63})\s{0,4}=\s{0,4}\d{1,6}",
    re.MULTILINE,
)
"""A field in Protocol Buffers: "string status = 1"."""

_SPACED_FIELD = re.compile(
    r"(?m)^[ \t]{1,16}(?P<name>[A-Za-z]\w{0,63})[ \t]{1,24}"
    r"[A-Z*\[\]a-z][\w.*\[\]?]{0,64}"
    r"(?=[ \t]*(?:$|[@`]))"
)
"""A field in Go and Prisma: "Status string"."""

_CLASS = re.compile(
    r"(?m)^(?P<mark>@(?:\w+\.)?dataclass[^\n]{0,100}\n)?[ \t]{0,8}"
    r"class (?P<name>\w{1,64})(?:\((?P<bases>[^()\n]{0,200})\))?:[^\n]{0,80}\n"
    r"(?P<body>(?:(?:[ \t]{2,16}[^\n]{0,400})?(?:\n|\Z)){1,200})"
)
"""A class in Python with its body."""

_DATA_BASES = ("BaseModel", "TypedDict", "NamedTuple", "Base", "SQLModel", "Model")
"""The base classes of classes whose attributes are the fields of a schema."""

_CLASS_FIELD = re.compile(
    r"(?m)^[ \t]{2,8}(?P<name>[a-z]\w{0,63})(?:[ \t]{0,4}:[ \t]{0,4}[\w\"'\[]"
    r"|[ \t]{0,4}=[ \t]{0,4}(?:\w+\.)?(?:Column|mapped_column|\w+Field|ForeignKey)\()"
)
"""A field of a data class, or of a model of SQLAlchemy and Django."""

_NAME_HEADS = frozenset(
    (
        "column",
        "column_name",
        "column name",
        "columnname",
        "col_name",
        "field",
        "field name",
        "parameter",
        "param",
        "property",
        "attribute",
        "attname",
    )
)
"""The heads of columns and the names of fields with names of a schema."""

_TABLE_HEADS = frozenset(
    (
        "table_name",
        "table name",
        "tablename",
        "tbl_name",
        "table",
    )
)
"""The same for the names of tables."""

_UNSURE_HEADS = frozenset(("name", "field", "key", "argument", "arg"))
"""The same, if a type stands beside the name."""

_TYPE_HEADS = frozenset(
    (
        "type",
        "data_type",
        "data type",
        "datatype",
        "dtype",
        "column_type",
        "udt_name",
        "format",
    )
)
"""The heads of columns and the names of fields with types."""

_LIST_KEYS = frozenset(
    (
        "columns",
        "column_names",
        "fields",
        "field_names",
        "tables",
        "table_names",
        "headers",
        "required",
        "primary_key",
        "primary_keys",
        "parameters",
        "params",
        "properties",
    )
)
"""The fields whose lists have names of a schema."""

_MAP_KEYS = frozenset(
    (
        "properties",
        "tables",
        "columns",
        "fields",
        "definitions",
        "$defs",
    )
)
"""The fields whose objects have names of a schema as the names of their fields."""

_PLACES = frozenset(("query", "path", "header", "body", "cookie", "formData"))
"""Where the parameters of an HTTP interface stand."""


def find_schema_names(text: str) -> list[str]:
    """Returns the names of tables, columns, fields and parameters in a text.

    A name that is repeated is returned once. A name with its schema, "public.orders",
    is followed by the name alone.
    """
    found: dict[str, None] = {}
    for written in _find_written(text):
        name = ".".join(part.strip('"`[] ') for part in written.split("."))
        last_name = name.rpartition(".")[2]
        for each in (name, last_name):
            if is_schema_name(each):
                found[each] = None
        if len(found) >= MAX_NAMES:
            break
    return list(found)


def is_schema_name(text: object) -> bool:
    """Whether a text may be the name of a table or a column."""
    if not isinstance(text, str) or not 2 <= len(text) <= 64:
        return False
    words = re.split(r"[ .$-]", text)
    return not text[0].isdigit() and all(re.fullmatch(r"\w+", word) for word in words)


def find_names_of_object(fields: Mapping[Any, Any]) -> list[str]:
    """Returns the names of a schema in an object that describes a part of a schema.

    For example, {"column_name": "status", "data_type": "text"} has "status", and so has
    {"properties": {"status": {"type": "string"}}}.
    """
    heads = {key: key.lower() for key in fields if isinstance(key, str)}
    names: list[object] = []
    for key, head in heads.items():
        names += _find_names_of_field(head, fields[key])

    if _describes_one(fields, heads):
        names += [fields[key] for key, head in heads.items() if head in _UNSURE_HEADS]
    elif len(heads) > 1 and all(_is_type(item) for item in fields.values()):
        # {"status": "text", "city": "varchar(40)"}
        names += heads
    return [name for name in names if isinstance(name, str) and is_schema_name(name)]


def _find_names_of_field(head: str, item: object) -> list[object]:
    """Returns what may be names of a schema in a field.

    Args:
        head: The name of the field in lower case.
        item: The value of the field.
    """
    if _is_name_head(head) and isinstance(item, str):
        return [item]
    if head in _LIST_KEYS and isinstance(item, list | tuple):
        return list(item)
    if head in _MAP_KEYS and isinstance(item, dict):
        return list(item)
    return []


def _is_name_head(head: str) -> bool:
    """Whether names of a schema stand under a head of a column, or in a field."""
    is_told = head in _NAME_HEADS or head in _TABLE_HEADS
    return is_told or head.startswith("tables_in_")


def _describes_one(fields: Mapping[Any, Any], heads: Mapping[str, str]) -> bool:
    """Whether an object describes a column, a parameter or a table by its "name"."""
    has_unsure_head = any(head in _UNSURE_HEADS for head in heads.values())
    if not has_unsure_head:
        return False
    place = fields.get("in")
    is_parameter = isinstance(place, str) and place in _PLACES
    return is_parameter or any(
        (head in _TYPE_HEADS and _is_type(fields[key]))
        or (head in ("columns", "fields") and isinstance(fields[key], list))
        for key, head in heads.items()
    )


def find_names_of_row(row: Sequence[object]) -> list[str]:
    """Returns the name in a row such as [0, "status", "TEXT", 0]; [] for none."""
    if not 2 <= len(row) <= 8:
        return []
    for name, type_ in itertools.pairwise(row):
        if _is_type(type_) and is_schema_name(name) and not _is_type(name):
            return [str(name)]
    return []


def _is_type(item: object) -> bool:
    return (
        isinstance(item, str) and len(item) <= 64 and _IS_TYPE.match(item) is not None
    )


def _find_written(text: str) -> Iterator[str]:
    """Yields the names of schemas as they are written, some of them in quotes.

    Each kind of schema has a word or a sign, for which the text is searched first.
    """
    lowered = text.lower()
    has_create = "create " in lowered
    has_sql = has_create or "alter table" in lowered or "insert into" in lowered
    if has_sql:
        yield from _read_sql(text, has_create)
    elif "table" in lowered or "dtype: " in text:
        yield from _read_listed(text)
        yield from _read_described(text)

    if "column_name" in lowered:
        yield from _read_tables(text, ",")
    if "|" in text:
        yield from _read_tables(text, "|")
        yield from _names(_RAW_ROW, text)
    if "{" in text:
        yield from _names(_QUOTED_PROPERTY, text)
        yield from _read_blocks(text)
    if "class " in text:
        yield from _read_classes(text)
    yield from _names(_QUOTED_ROW, text)


def _read_described(text: str) -> Iterator[str]:
    """Yields the names in descriptions by psql, besides those in its tables."""
    has_heading = False
    for match in _DESCRIBED.finditer(text):
        has_heading = True
        yield match["name"]
    if has_heading:
        yield from _read_clauses(text)


def _names(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    for match in pattern.finditer(text):
        yield match["name"]


def _read_sql(text: str, has_create: bool) -> Iterator[str]:
    """Yields the names in statements of SQL."""
    without_comments = _COMMENT.sub(" ", text)
    sql = _STRING.sub("''", without_comments)
    if has_create:
        statements = list(_TABLE.finditer(sql))
        # A statement ends where the next one begins, or at the end of the text.
        next_begins = [match.start() for match in statements[1:]]
        ends = [*next_begins, len(sql)]
        for match, end in zip(statements, ends, strict=False):
            yield match["name"]
            begin = match.end()
            indexed = _ON.match(sql, begin)
            if indexed:
                yield indexed["name"]
                begin = indexed.end()
            yield from _read_columns(sql[begin : min(end, begin + MAX_BODY_CHARS)])
    yield from _read_clauses(sql)


def _read_clauses(sql: str) -> Iterator[str]:
    """Yields the names in clauses, such as `REFERENCES t (a)` or `PRIMARY KEY (a)`."""
    for match in _NAMED.finditer(sql):
        yield match["name"]
        if match["to"]:
            yield match["to"]
        yield from _read_list(match["list"] or "")
    yield from _names(_ADDED, sql)
    for match in _KEY.finditer(sql):
        yield from _read_list(match["list"])


def _read_list(text: str) -> Iterator[str]:
    """Yields the first name of each item between commas."""
    for item in text.split(","):
        match = _FIRST_NAME.match(item)
        if match:
            yield match["name"]


def _read_columns(sql: str) -> Iterator[str]:
    """Yields the names of columns in a text that begins behind the name of a table."""
    body = sql.lstrip()
    if not body.startswith("("):
        return

    for item in _split_items(body):
        column = _FIRST_NAME.match(item)
        if column and not _NO_COLUMN.match(item):
            yield column["name"]


def _split_items(body: str) -> Iterator[str]:
    """Yields the items between the first bracket of a text and the one that closes it.

    A comma within inner brackets, as in "numeric(8, 2)", ends no item.
    """
    depth = 0
    item_begin = 1
    for match in re.finditer(r"[(),]", body):
        mark = match.group()
        if mark == "(":
            depth += 1
            continue
        if depth == 1:
            yield body[item_begin : match.start()].strip()
            item_begin = match.end()
        if mark == ")":
            depth -= 1
        if depth == 0:
            return


def _read_listed(text: str) -> Iterator[str]:
    """Yields the names in a list of columns.

    A type without a bullet before the name is in capital letters, as in SQL, or of
    pandas. Otherwise it would be any annotation in code.
    """
    is_of_pandas = "dtype: " in text
    yield from _names(_LISTED_TABLE, text)
    for match in _LISTED_FIELD.finditer(text):
        if match["bullet"] or match["type"].isupper() or is_of_pandas:
            yield match["name"]


def _read_tables(text: str, separator: str) -> Iterator[str]:
    """Yields the names in tables that describe columns.

    Such a table has a head like "| name | type |", or like "Column | Type".
    """
    name_indexes: list[int] = []
    for line in text.splitlines():
        if separator not in line:
            # A rule between the head and the rows may have no bar.
            is_rule = line.strip().startswith(("+-", "--", "=="))
            name_indexes = name_indexes if is_rule else []
            continue

        cells = _split_row(line, separator)
        if name_indexes:
            yield from [cells[index] for index in name_indexes if index < len(cells)]
        else:
            name_indexes = _find_name_columns([cell.lower() for cell in cells])


def _split_row(line: str, separator: str) -> list[str]:
    """Returns the cells of a row, without bars, blanks and quotes around them."""
    row = line.strip().strip("|")
    return [cell.strip(" \t`*\"'") for cell in row.split(separator)]


def _find_name_columns(heads: Sequence[str]) -> list[int]:
    """Returns which columns of a table have names of a schema."""
    indexes: list[int] = []
    has_type = any(head in _TYPE_HEADS for head in heads)
    for index, head in enumerate(heads):
        is_unsure = head in _UNSURE_HEADS and has_type
        if is_unsure or _is_name_head(head):
            indexes.append(index)
    return indexes


def _read_blocks(text: str) -> Iterator[str]:
    """Yields the names of types and their fields in braces."""
    for match in _BLOCK.finditer(text):
        yield match["name"]
        end = text.find("}", match.end(), match.end() + MAX_BODY_CHARS)
        body = text[match.end() - 1 : end] if end >= 0 else ""
        for pattern in _choose_field_patterns(match["kind"]):
            yield from _names(pattern, body)


def _choose_field_patterns(kind: str) -> list[re.Pattern[str]]:
    """Returns the patterns of fields in a block of this kind."""
    if kind == "message":
        return [_NUMBERED_FIELD]
    if kind in ("interface", "input"):
        return [_BLOCK_FIELD]
    return [_BLOCK_FIELD, _SPACED_FIELD]


def _read_classes(text: str) -> Iterator[str]:
    """Yields the names of data classes in Python and their fields."""
    for match in _CLASS.finditer(text):
        bases = re.findall(r"\w+", match["bases"] or "")
        if match["mark"] or any(base in _DATA_BASES for base in bases):
            yield match["name"]
            yield from _names(_TABLE_NAME, match["body"])
            yield from _names(_CLASS_FIELD, match["body"])
