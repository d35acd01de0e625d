"""What an agent may need again of a text: ids, numbers, paths, addresses, names."""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_VALUE_CHARS = 120
MAX_TEXT_CHARS = 100_000  # Of what comes after in one text nothing is read.

_TOKEN = re.compile(
    r"""https?://[^\s"'<>()\[\]{}|\\`]{3,200}
    | [\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,32}){1,4}
    | [~.]{0,2}(?:[\w.@+-]{0,64}/){1,16}[\w.@+-]{1,64}
    | [$€£]?\d{1,3}(?:,\d{3}){1,5}(?:\.\d{1,9})?
    | [$€£]?\d{1,15}(?:[.:]\d{1,9}){1,4}%?
    | \w{1,64}(?:(?:[.:-]|->|::)\w{1,64}){0,8}
    """,
    re.VERBOSE,
)
_WORD = re.compile(r"[^\s,;\"']{8,}")
_LINE_NUMBER = re.compile(r"(?m)^[ \t]{0,16}\d{1,6}(?=[\t:| ])")
_CODE = re.compile(r"[a-z]\w*?[A-Z]|\w_\w|\w\.\w|::|->|@|/")
_SECRET_NAME = re.compile(
    r"passw|secret|api_?key|(?<!page)(?<!page[_-])token(?!s)|authoriz|credential|cookie|"
    r"cvv|private_?key",
    re.IGNORECASE,
)
_SECRET = re.compile(
    r"(?:bearer|basic)[ \t]{1,4}\S{8,2000}|"
    r"(?:passw\w{0,8}|\w{0,16}secret|\w{0,16}token|\w{0,8}api[_-]?key|authorization)"
    r"[\"']{0,2}[ \t]{0,4}[:=][ \t]{0,4}(?:(?:bearer|basic)[ \t]{1,4})?\S{1,2000}|"
    r"-----BEGIN[^-]{1,40}-----[^-]{1,8000}|(?<!\d)\d(?:[ -]?\d){12,18}(?!\d)",
    re.IGNORECASE,
)
_KEY_SHAPE = re.compile(
    r"(?:sk|pk|rk)[-_]\w|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|A[KS]IA[A-Z0-9]{12}|"
    r"AIza|ya29\.|eyJ[\w-]{8}"
)


def is_secret_name(name: str) -> bool:
    """Whether a field or argument of this name holds a credential."""
    return _SECRET_NAME.search(name) is not None


def find_values(text: str) -> Iterator[str]:
    """Yields the values of a text in their order, repeated ones each time.

    Credentials, by their shape or by what stands before them, are left out.
    """
    text = _LINE_NUMBER.sub("", _SECRET.sub(_blank_secret, text[:MAX_TEXT_CHARS]))
    for token in _TOKEN.findall(text):
        value = token.rstrip(".-:,+/")
        value = value if value.startswith("/") else value.lstrip(".-:,+")
        if 3 <= len(value) <= MAX_VALUE_CHARS and is_value(value):
            yield value


def hide_secrets(text: str) -> str:
    """Leaves credentials out of a text, by their shape or what stands before them."""
    text = _SECRET.sub(_blank_secret, text)
    return _WORD.sub(lambda m: "" if _looks_secret(m[0]) else m[0], text)


def is_value(word: str) -> bool:
    """Whether a word names something exactly, and is no credential by its shape."""
    if _looks_secret(word):
        return False
    if any(map(str.isdigit, word)):
        return len(word) >= 4 or not word.isdigit()
    is_code = _CODE.search(word) is not None
    # Codes as of airports or currencies; longer ones are mostly words.
    return is_code or (word.isascii() and word.isupper() and len(word) <= 4)


def _blank_secret(match: re.Match[str]) -> str:
    """Leaves a long number that cannot be that of a card."""
    digits = [int(char) for char in match.group() if char.isdecimal()]
    is_number = match.group()[0].isdecimal()
    return match.group() if is_number and not _is_card(digits) else " "


def _is_card(digits: list[int]) -> bool:
    """Whether digits pass the check of card numbers (Luhn)."""
    doubled = (2 * digit - 9 * (digit > 4) for digit in digits[-2::-2])
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def _looks_secret(word: str) -> bool:
    if _KEY_SHAPE.match(word) or ("://" in word and "@" in word.split("/")[2]):
        return True
    if word.isdecimal() and 13 <= len(word) <= 19:
        return _is_card([*map(int, word)])
    kinds = (str.isupper, str.islower, str.isdecimal)
    is_mixed = all(any(map(is_kind, word)) for is_kind in kinds)
    return len(word) >= 24 and word.isalnum() and is_mixed


def name_hidden(text: str, shown: str, max_bytes: int) -> str:
    """Names values of a text that its shortened form does not show, in their order."""
    hidden = [value for value in dict.fromkeys(find_values(text)) if value not in shown]
    places = {value: place for place, value in enumerate(hidden)}
    chosen = []
    # Ids and paths before words of code.
    for value in sorted(hidden, key=lambda value: not re.search(r"[\d/@]", value)):
        max_bytes -= len(value.encode("utf-8", "replace")) + 2
        if max_bytes < 0:
            break
        chosen.append(value)
    return ", ".join(sorted(chosen, key=places.__getitem__))
