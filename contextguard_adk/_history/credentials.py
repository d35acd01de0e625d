"""Tells credentials from other values, and hides them.

A text is a credential if its form is that of a key, whatever its field is called. Other
texts are credentials only if the name of the field says so, and if the form fits the
name: "a7" is no credential in a field "token", but it is one in a field "password". An
inner name goes before the names around it: {"authorization": {"id": "PA-8813"}} has no
credential.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from contextguard_adk._history.cards import hide_cards, without_card
from contextguard_adk._history.field_names import (
    ALWAYS,
    MOSTLY,
    NEVER,
    SOMETIMES,
    UNKNOWN,
    Names,
    is_id,
    judge_name,
    name_field,
)

MAX_DEPTH = 20
"""Objects and lists that are nested deeper are not read."""

_MAX_FORM_CHARS = 200
"""Only this many characters of a text are read to tell the form of the text."""

_LEAST_RANDOM_CHARS = 24
"""A shorter word with capital letters, small letters and digits is mostly a name."""

_LEAST_MIXED_CHARS = 12
"""A shorter word in a field such as "token" is no credential."""

_LEAST_PART_CHARS = 8
"""A shorter part of a word, between marks such as "-", tells nothing of its form."""

_RANDOM_CHANGES_RATIO = 0.25
"""In a random text, at least this part of the neighboring characters are of two kinds.

The kinds are digits, capital letters and small letters.
"""

_SCHEME = r"(?:bearer|basic|digest|token)[ \t]{1,4}"
_HEAD = re.compile(
    # A word is read once, from its beginning: not again from each of its letters.
    r"(?<![\w-])(?:"
    # An option: "--password ".
    r"--(?P<option>[\w-]{2,60})[ \t]{1,4}|"
    # A name and a separator: "api_key = ", "API key: ", "\"token\": ".
    r"(?P<name>(?:(?:api|access|auth|client|private|refresh|secret|session)[ ])?"
    r"[\w-]*?(?:pass|pwd|secret|token|key|auth|cred|cookie|cvv|cvc)[\w-]{0,24})"
    r"[\\\"']{0,4}[ \t]{0,4}(?P<separator>:=|=>|==?|:|>)[ \t]{0,4}"
    # The text may begin in the next line: "password: |" in YAML.
    r"(?:(?:[|>][+-]?)?\r?\n[ \t]{1,16})?|"
    # "Basic 5f2a93bc"
    rf"(?P<scheme>{_SCHEME}))",
    re.IGNORECASE,
)
"""What may stand before a credential in a text."""

_KEY_FILE = r"-----BEGIN[^-]{1,40}-----(?:[^-]|-(?!----)){1,8000}"
_AFTER_HEAD = re.compile(
    # An object is no credential, but may have one: {"secrets": {"password": "x"}}.
    r"(?!\{[\s\"'])"
    # In quotes, in escaped quotes, or a word.
    rf"(?:{_KEY_FILE}|(?:{_SCHEME})?(?:"
    r"\"(?:[^\"\\\n]|\\.){1,2000}|'(?:[^'\\\n]|\\.){1,2000}|"
    r"\\{1,3}[\"'][^\"'\\\n]{1,2000}|\S{1,2000}))",
    re.IGNORECASE,
)
"""The text behind a name, which may be a credential."""

_SECRET_FORM = re.compile(
    # An address with a password: https://ann:pw@host/a
    r"\w[\w+.-]{0,20}://[^\s/@]{0,200}:[^\s/@]{1,200}@\S{0,2000}|"
    # A signed address: ?sig=5f2a
    r"(?<=[?&])(?:x-amz-\w{1,20}|sig|signature|key)=[^&\s\"']{1,2000}|"
    # A key in a file.
    rf"{_KEY_FILE}",
    re.IGNORECASE,
)
"""The credentials in a text that need no name."""

_WORD = re.compile(r"[^\s,;\"'=()\[\]{}<>`]{8,}")
"""The words that are long enough for a credential."""

_KEY_SHAPE = re.compile(
    # "sk-SK" is a language.
    r"sk[-_](?!SK\b)\w|[pr]k[-_](?:live|test|proj)|gh[pousr]_|github_pat_|glpat-|"
    r"xox[a-z]-|A[KS]IA[A-Z0-9]{12}|AIza|ya29\.|eyJ[\w-]{8}|hf_\w{20}|npm_\w{20}|"
    r"SG\.[\w-]{16}"
)
"""How keys of OpenAI, Stripe, GitHub, GitLab, Slack, AWS and Google begin, and JWTs."""

_ID_FORM = re.compile(
    r"[A-Z]{1,8}(?:[-/_.](?:\d{1,8}|[A-Z]{1,8})){1,4}|[A-Z]{2,4}(?:, ?[A-Z]{2,4})*"
)
"""Ids and titles that are no credential in a field "credential": CR-2024-11, MD."""

_UUID = re.compile(r"[\da-f]{8}(?:-[\da-f]{4}){3}-[\da-f]{12}", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_ADDRESS = re.compile(r"0x[\da-fA-F]{1,40}")
"""The address of a coin or an account."""


def is_credential(names: Names, value: object) -> bool:
    """Whether a value is a credential by the names of its fields.

    The innermost name is asked first. A name that describes a value, such as "status",
    ends the search: the objects around do not count.

    Args:
        names: The names of the fields around the value, the outermost one first.
        value: A text, a number or another value, but no object or list.
    """
    if value is None or isinstance(value, bool):
        return False

    for name in reversed(names):
        meaning = judge_name(name)
        if meaning == NEVER:
            return False
        if meaning != UNKNOWN and _fits(meaning, name, value):
            return True
    return False


def _fits(meaning: str, name: str, value: object) -> bool:
    """Whether the form of a value fits the name of a credential."""
    if isinstance(value, int | float):
        # A plural counts: {"secrets": 3}.
        return meaning == ALWAYS and not name.lower().endswith("s")
    if not isinstance(value, str):
        return meaning != SOMETIMES

    text = value.strip()
    if meaning == ALWAYS:
        # `pwd` with a path names a folder.
        is_folder = name.lower().endswith("pwd") and text.startswith(("/", "~"))
        return not is_folder
    if meaning == MOSTLY:
        return _ID_FORM.fullmatch(text) is None
    return _has_credential_form(text)


def _has_credential_form(text: str) -> bool:
    """Whether a text has the form of a credential, if its name allows for one.

    These texts have:

    - a scheme with a credential, such as "Basic dXNlcjpwYXNz"
    - a text with a word that looks like a credential
    - a text with a UUID, or with a word that mixes letters and digits at random
    """
    words = text[:_MAX_FORM_CHARS].split()
    has_scheme = len(words) > 1 and re.fullmatch(_SCHEME, f"{words[0]} ", re.IGNORECASE)
    if has_scheme:
        is_plain_word = words[1].islower() and words[1].isalpha()
        if words[0].lower() == "bearer" or not is_plain_word:
            return True

    for word in words:
        bare_word = word.strip("\"'\\,;()[]{}")
        is_key = looks_secret(bare_word) or _UUID.fullmatch(bare_word) is not None
        if is_key or _is_random(bare_word):
            return True
    return False


def _is_random(word: str) -> bool:
    """Whether a word mixes letters and digits as keys do, not as ids do.

    "9f8a7c11d0e4" changes between letters and digits all the time. "ORD2024ABC00012"
    and the parts of "PA-2024-8813" hardly do.
    """
    has_digit = any(char.isdecimal() for char in word)
    if len(word) < _LEAST_MIXED_CHARS or not has_digit or _ADDRESS.fullmatch(word):
        return False

    parts = re.split(r"[^A-Za-z0-9]+", word)
    without_hyphens = word.replace("-", "")  # The parts of ab12-cd34-ef56 are short.
    if without_hyphens.isalnum():
        parts.append(without_hyphens)
    for part in parts:
        kinds = [(char.isdigit(), char.isupper()) for char in part]
        pairs = itertools.pairwise(kinds)
        change_count = sum(left != right for left, right in pairs)
        is_long = len(part) >= _LEAST_PART_CHARS
        if is_long and change_count / (len(part) - 1) >= _RANDOM_CHANGES_RATIO:
            return True
    return False


def without_secrets(value: Any, names: Names = (), depth: int = 0) -> Any:
    """Returns a payload without the fields that hold credentials.

    For example, {"user": "Ann", "password": "x"} becomes {"user": "Ann"}. In a field
    with the number of a card, x stands for each digit.

    Args:
        value: The payload, or a value that is nested in the payload.
        names: The names of the fields around `value`, the outermost one first.
        depth: How many objects and lists are around `value`. From 20 on, objects and
            lists come back empty.
    """
    if not is_nested(value):
        return without_card(value, names)

    if isinstance(value, dict):
        fields = value if depth < MAX_DEPTH else {}
        named = {name: name_field(fields, names, name) for name in fields}
        return {
            name: without_secrets(item, named[name], depth + 1)
            for name, item in fields.items()
            if is_nested(item) or not is_credential(named[name], item)
        }

    items = value if depth < MAX_DEPTH else []
    return [
        without_secrets(item, names, depth + 1)
        for item in items
        if is_nested(item) or not is_credential(names, item)
    ]


def is_nested(value: object) -> bool:
    """Whether a value is an object or a list."""
    return isinstance(value, dict | list | tuple)


def hide_secrets(text: str, names: Names = ()) -> str:
    """Leaves out the credentials of a text; writes x for the digits of card numbers.

    A word is a credential if it looks like a key, or follows a name such as "password".
    The name is left out as well: "pwd=x1 user=ann" becomes "  user=ann".

    Args:
        text: The text.
        names: The names of the fields around the text; () for a text in no field.
    """
    may_be_random = is_id(names, text)

    def drop_secret(match: re.Match[str]) -> str:
        word = match.group()
        return "" if looks_secret(word, may_be_random) else word

    return _WORD.sub(drop_secret, hide_named(text, names))


def hide_named(text: str, names: Names = ()) -> str:
    """Hides what `hide_secrets` hides, but for words that only look like a key."""
    # Cards come first. In "4242 4242 4242 4242token=x", the word "4242token" passes for
    # the name of a credential. Without this word the other digits would be no card.
    without_cards = hide_cards(text, names)
    pieces: list[str] = []
    position = 0
    for start, end in _find_named(without_cards):
        pieces += [without_cards[position:start], " "]
        position = end
    pieces.append(without_cards[position:])
    return _SECRET_FORM.sub(" ", "".join(pieces))


def _find_named(text: str) -> Iterator[tuple[int, int]]:
    """Yields where each credential that follows a name begins and ends.

    The name is a part of it. None of them overlap.
    """
    position = 0
    for head in _HEAD.finditer(text):
        value = _AFTER_HEAD.match(text, head.end())
        if value is None or head.start() < position:
            continue

        if _is_named_credential(head, value.group()):
            position = value.end()
            yield head.start(), position


def _is_named_credential(head: re.Match[str], value: str) -> bool:
    """Whether the text behind a name, an option or a scheme is a credential."""
    bare_value = value.strip("\"'\\,;)]}")
    if head["scheme"]:
        return len(value) >= 8 and _follows_scheme(head["scheme"], bare_value)

    name = head["option"] or head["name"]
    before = head.string[head.start() - 1 : head.start()]
    if before == "\\":
        # The first letter belongs to an escape: "\npassword: x".
        name = name[1:]

    # A setting, a part of an address or an option: "token=a7", "--token a7".
    is_setting = head["option"] is not None or head["separator"] != ":"
    is_token = name.lower().endswith("token") and judge_name(name) == SOMETIMES
    return (is_setting and is_token) or is_credential((name,), bare_value)


def _follows_scheme(scheme: str, text: str) -> bool:
    """Whether a text behind a word such as "Basic" is a credential.

    "Basic coverage" and "token PA-2024-8813" have none.
    """
    scheme_name = scheme.strip().lower()
    if scheme_name == "bearer" or _has_credential_form(text):
        return True

    # Capital letters within a word, as in dXNlcjpwYXNz, are a sign of base64.
    is_base64 = _BASE64.fullmatch(text) is not None
    has_both_cases = not text[1:].islower() and not text.isupper()
    return scheme_name == "basic" and is_base64 and has_both_cases


def looks_secret(word: str, may_be_random: bool = False) -> bool:
    """Whether a word looks like a credential.

    These words do:

    - a word that begins like a key
    - an address with a password
    - a long word that mixes capital letters, small letters and digits, and nothing
      else, unless it is an address of a coin

    Args:
        word: The word.
        may_be_random: Whether the word is an id by its name. Then the last rule does
            not hold.
    """
    begins_like_key = _KEY_SHAPE.match(word) is not None
    if begins_like_key:
        return True

    if "://" in word:
        host = word.split("/")[2]  # The parts are "https:", "", "ann:pw@host" and more.
        has_password = "@" in host
        if has_password:
            return True

    is_long = len(word) >= _LEAST_RANDOM_CHARS and word.isalnum()
    if may_be_random or not is_long or _ADDRESS.fullmatch(word):
        return False
    has_upper = any(char.isupper() for char in word)
    has_lower = any(char.islower() for char in word)
    has_decimal = any(char.isdecimal() for char in word)
    return has_upper and has_lower and has_decimal
