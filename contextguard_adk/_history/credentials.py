"""Tells credentials and the numbers of payment cards from other values.

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
from functools import lru_cache
from typing import Any

MAX_DEPTH = 20
"""Objects and lists that are nested deeper are not read."""

Names = tuple[str, ...]
"""The names of the fields around a value, the outermost one first."""

_MAX_NAME_CHARS = 80
"""Of a longer name of a field, only this many characters at the end are read."""

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

_MAX_CARD_DIGITS = 19
_MAX_CARD_CHARS = 48
"""A longer text in a field is no number of a card, but may have one."""

_BEFORE_CARD_CHARS = 32
"""This many characters before a number may tell whether the number is a card's."""

# What the name of a field says about a text in the field.
_ALWAYS = "always"  # "password": the text is a credential.
_MOSTLY = "mostly"  # "cookie": a credential, unless the text has the form of an id.
_SOMETIMES = "sometimes"  # "token": a credential if the text has the form of one.
_NEVER = "never"  # "order_id": none, whatever the objects around are called.
_UNKNOWN = "unknown"  # "value": the names of the objects around decide.

# The endings that a credential's name keeps its meaning with: "password_hash_2".
_ENDING = (
    r"(?:_?(?:values?|text|string|plain|raw|hash|hashed|salt|encrypted|b64|base64|pem|json|"
    r"header|jar|hint|old|new|current|previous|confirm|confirmation|repeat|prod|"
    r"production|dev|test|staging|live|env|default|backup|\d))*$"
)
_TOKEN_OWNER = (
    r"access|refresh|id|auth|authorization|authentication|api|bearer|session|security|"
    r"oauth2?|jwt|csrf|xsrf|bot|github|gh|gitlab|slack|npm|pypi|hf|telegram|discord|"
    r"personal|service|webhook|verification|reset|login|client|deploy|registry|push|"
    r"identity|secret"
)

_NEVER_NAME = re.compile(
    # Tokens and cursors that name a page.
    r"(?:page|paging|pagination|next|prev|previous|continuation|sync|cursor|resume|"
    r"change|skip|delta|start)_?tokens?$|"
    r"(?:boarding|ski|lift|season|day|travel|bus|rail|parking|visitor|guest|event)_?pass"
)
_ALWAYS_NAME = re.compile(
    rf"(?:passw(?:or[dt]|d)s?|passphrases?|passcodes?|pwds?|cvv|(?<![a-z])cvc|"
    rf"(?:api|access|account|auth|encryption|decryption|hmac|master|private|secret|"
    rf"signing|ssh)_?keys?|(?<=\w)secrets?|"
    rf"secret_?(?:answer|code|phrase|word)s?|"
    rf"(?:^|_)(?:{_TOKEN_OWNER})_?tokens?|"
    rf"(?:^|_)(?:db|database|user|login|root|admin|smtp|mail|ftp|mysql|pg|redis)_pass)"
    rf"{_ENDING}"
)
_MOSTLY_NAME = re.compile(
    rf"(?:(?:^|_)(?:secrets?|creds?|pass)|credentials?|cookies?){_ENDING}"
)
_SOMETIMES_NAME = re.compile(
    rf"(?:tokens?|authorization|(?:^|_)(?:auth|bearer|jwt)){_ENDING}|"
    r"auth(?:orization)?_code$|^(?:x_)?key$|secret_id$"
)
_DESCRIPTION_NAME = re.compile(
    # A session's id in an object "cookies" is a credential.
    r"(?<!session)(?<!session_)(?<!sess)(?:^|_)(?:ids?|uid|uuid|guid)$|"
    r"(?:^|_)(?:status|state|type|kind|name|label|title|description|note|symbol|ticker|"
    r"address|contract|mint|wallet|arn|network|chain|decimals|order|number|no|count|total|url|uri|link|path|file|"
    r"email|users?|username|owner|member|patient|customer|merchant|payer|insurer|"
    r"provider|issuer|date|time|at|by|on|until|expiry|expires|expiration|scopes?|policy|"
    r"rules?|sku|price|amount|currency|quantity|qty|limit|min|max|length|age|days|hours|"
    r"minutes|seconds|attempts|version|ref|reference|method|role|region|country|city|"
    r"domain|host|port|algorithm|format|plan|service|product|item|items|category|level|"
    r"imei|serial|tracking)$"
)

_ID_NAME = re.compile(
    r"(?:page|paging|pagination|next|prev|previous|continuation|sync|resume)_?tokens?$|"
    r"(?:^|_)(?:ids?|uid|uuid|guid|imei\w{0,4}|meid|iccid|serial|orders?|tracking|"
    r"shipment|parcel|invoice|ticket|booking|reservation|barcode|ean|gtin|upc|sku|isbn|"
    r"msisdn|phone|address|contract|wallet|mint|cursor|hash|sha\d{0,3}|checksum|etag|txid|commit|"
    r"revision|fingerprint|timestamp|reference|ref|case|claim|meter|device)"
    r"(?:_?(?:no|nr|num|number|ids?|code))?$"
)
"""The names of fields with ids, which may look random, or like a card's number."""

_CARD_NAME = re.compile(
    r"(?:(?<!sim)(?<!sim_)(?:^|_)cards?|creditcard|debitcard|(?:^|_)(?:pan|ccn?))"
    r"(?=_|num|no|$)"
)
"""The names of fields with the number of a card."""

_CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_NAME_MARKS = re.compile(r"\W+")

_SCHEME = r"(?:bearer|basic|digest|token)[ \t]{1,4}"
_HEAD = re.compile(
    # A word is read once, from its beginning: not again from each of its letters.
    r"(?<![\w-])(?:"
    # An option: "--password ".
    r"--(?P<option>[\w-]{2,60})[ \t]{1,4}|"
    # A name and a separator: "api_key = ", "API key: ", "\"token\": ".
    r"(?P<name>(?:(?:api|access|auth|client|private|refresh|secret|session)[ ])?"
    r"[\w-]*?(?:pass|pwd|secret|token|key|auth|cred|cookie|cvv|cvc)[\w-]{0,24})"
    r"[\\\"']{0,4}[ \t]{0,4}(?P<separator>:=|=>|==?|:)[ \t]{0,4}(?:\r?\n[ \t]{1,16})?|"
    # "Basic 5f2a93bc"
    rf"(?P<scheme>{_SCHEME}))",
    re.IGNORECASE,
)
"""What may stand before a credential in a text."""

_KEY_FILE = r"-----BEGIN[^-]{1,40}-----[^-]{1,8000}"
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

_CARD = re.compile(
    # In the number of a bank account, "DE89 3704 0044 ...", no card begins.
    r"(?<!\d)(?<![A-Z]{2}\d{2}[ -])"
    r"(?:\d{4}(?P<gap>[ -])(?:\d{4}(?P=gap)\d{4}(?P=gap)\d{4}|"
    r"\d{6}(?P=gap)\d{5})|\d{13,19})(?!\d)"
)
"""Numbers like those of payment cards: 4242 4242 4242 4242, 3782-822463-10005."""

_ISSUED = re.compile(
    r"4\d{12}(?:\d{3}){0,2}|"  # Visa
    r"(?:5[1-5]\d{2}|222[1-9]|22[3-9]\d|2[3-6]\d{2}|27[01]\d|2720)\d{12}|"  # Mastercard
    r"3[47]\d{13}|"  # American Express
    r"(?:6011|62\d{2}|64[4-9]\d|65\d{2})\d{12,15}|"  # Discover, UnionPay
    r"35(?:2[89]|[3-8]\d)\d{12}|"  # JCB
    r"3(?:0[0-5]|[68]\d)\d{11}"  # Diners Club
)
"""The beginnings and lengths of the numbers that issuers of cards give."""

_CARD_BEFORE = re.compile(r"(?<!sim )(?<!sim_)card|\b(?:pan|cc)\b", re.IGNORECASE)
_ID_BEFORE = re.compile(
    r"(?:\b|_)(?:imei\w{0,4}|meid|iccid|serial|order|tracking|shipment|parcel|invoice|"
    r"barcode|ean|gtin|upc|isbn|msisdn|id)(?:[ _](?:no|nr|num|number|id))?\W{0,6}$",
    re.IGNORECASE,
)
"""The words before a number that say what the number is: "IMEI: ", "order no. "."""


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
        meaning = _judge_name(name)
        if meaning == _NEVER:
            return False
        if meaning != _UNKNOWN and _fits(meaning, name, value):
            return True
    return False


def _fits(meaning: str, name: str, value: object) -> bool:
    """Whether the form of a value fits the name of a credential."""
    if isinstance(value, int | float):
        # A plural counts: {"secrets": 3}.
        return meaning == _ALWAYS and not name.lower().endswith("s")
    if not isinstance(value, str):
        return meaning != _SOMETIMES

    text = value.strip()
    if meaning == _ALWAYS:
        # `pwd` with a path names a folder.
        is_folder = name.lower().endswith("pwd") and text.startswith(("/", "~"))
        return not is_folder
    if meaning == _MOSTLY:
        return _ID_FORM.fullmatch(text) is None
    return _has_credential_form(text)


def _judge_name(name: str) -> str:
    """Returns what the name of a field says about a text in the field."""
    return _judge_short_name(name[-_MAX_NAME_CHARS:])


@lru_cache(maxsize=4_096)
def _judge_short_name(name: str) -> str:
    words = _split_name(name)
    if _NEVER_NAME.search(words):
        return _NEVER
    # Variables of the environment: GITLAB_CI_TOKEN.
    is_variable = name.isupper() and words.endswith("_token")
    if is_variable or _ALWAYS_NAME.search(words):
        return _ALWAYS
    if _MOSTLY_NAME.search(words):
        return _MOSTLY
    if _SOMETIMES_NAME.search(words):
        return _SOMETIMES
    if _DESCRIPTION_NAME.search(words):
        return _NEVER
    # "secret_santa" is none, and "secret_access" is one: the form decides.
    return _SOMETIMES if "secret" in words or "passw" in words else _UNKNOWN


def _split_name(name: str) -> str:
    """Writes a name in small letters: "nextPageToken" becomes "next_page_token"."""
    spaced = _CAMEL_CASE.sub("_", name)
    return _NAME_MARKS.sub("_", spaced).lower().strip("_")


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
    if isinstance(value, dict):
        fields: dict[Any, Any] = {}
        if depth < MAX_DEPTH:
            for name, item in value.items():
                item_names = name_field(value, names, name)
                if is_nested(item) or not is_credential(item_names, item):
                    fields[name] = without_secrets(item, item_names, depth + 1)
        return fields

    if isinstance(value, list | tuple):
        items: list[Any] = []
        if depth < MAX_DEPTH:
            for item in value:
                if is_nested(item) or not is_credential(names, item):
                    items.append(without_secrets(item, names, depth + 1))
        return items

    return _without_card(value, names)


def _without_card(value: Any, names: Names) -> Any:
    """Returns a value, or x for each digit if it is the number of a card."""
    is_small_number = isinstance(value, int) and abs(value) < 10**_MAX_CARD_DIGITS
    is_short_text = isinstance(value, str) and len(value) <= _MAX_CARD_CHARS
    if not is_small_number and not is_short_text:
        return value

    text = str(value)
    without_card = _hide_cards(text, names)
    return value if without_card == text else without_card


def is_nested(value: object) -> bool:
    """Whether a value is an object or a list."""
    return isinstance(value, dict | list | tuple)


def name_field(fields: dict[Any, Any], names: Names, key: object) -> Names:
    """Returns the names around the value of a field, with the name of the field.

    In {"name": "PASSWORD", "value": "x"}, the name of "x" is PASSWORD.

    Args:
        fields: The object with the field.
        names: The names around the object.
        key: The key of the field.
    """
    name = key if isinstance(key, str) else ""
    if name.lower() == "value":
        for label_key in ("name", "key", "header", "Name", "Key"):
            label = fields.get(label_key)
            if isinstance(label, str):
                return (*names, label)
    return (*names, name)


def is_id(names: Names, text: str) -> bool:
    """Whether a text is an id by the name of its field, so that it may look random."""
    is_word = len(text.split()) == 1
    return is_word and bool(names) and _names_id(names[-1])


@lru_cache(maxsize=4_096)
def _search_names(pattern: re.Pattern[str], name: str) -> bool:
    return pattern.search(_split_name(name)) is not None


def _names_id(name: str) -> bool:
    return _search_names(_ID_NAME, name[-_MAX_NAME_CHARS:])


def _names_card(name: str) -> bool:
    return _search_names(_CARD_NAME, name[-_MAX_NAME_CHARS:])


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
    without_cards = _hide_cards(text, names)
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
    is_token = name.lower().endswith("token") and _judge_name(name) == _SOMETIMES
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


def _hide_cards(text: str, names: Names) -> str:
    """Writes x for each digit of a card's number; other long numbers stay."""

    def mask(match: re.Match[str]) -> str:
        number = match.group()
        before = text[max(0, match.start() - _BEFORE_CARD_CHARS) : match.start()]
        if not _is_card(number, before, names):
            return number
        # The length stays the same, so that the patterns still find the names around.
        return re.sub(r"\d", "x", number)

    return _CARD.sub(mask, text)


def _is_card(number: str, before: str, names: Names) -> bool:
    """Whether a number that passes the check of cards is the number of a card.

    Every tenth number passes the check, and every IMEI does. So the name must say that
    it is a card, or the form must: groups of digits, or the beginning and the length of
    the numbers of an issuer.

    Args:
        number: The number, maybe with gaps.
        before: The end of the text before the number.
        names: The names of the fields around the text.
    """
    digits = "".join(str(int(char)) for char in number if char.isdecimal())
    if not _passes_check(digits):
        return False

    is_issued = _ISSUED.fullmatch(digits) is not None
    has_gaps = len(digits) < len(number)
    names_card = _CARD_BEFORE.search(before) or any(_names_card(name) for name in names)
    names_id = _ID_BEFORE.search(before) or (names and _names_id(names[-1]))
    if names_id and not has_gaps:
        return bool(names_card) and is_issued
    return bool(names_card) or is_issued or (has_gaps and digits[0] in "3456")


def _passes_check(digits: str) -> bool:
    """Whether digits pass the check of card numbers (Luhn).

    From the last digit back, every second digit is doubled, and the digits of the
    double are added. A valid number has a sum that ends in 0.
    """
    total = sum(int(digit) for digit in digits[-1::-2])
    for digit in digits[-2::-2]:
        tens, ones = divmod(2 * int(digit), 10)
        total += tens + ones
    return total % 10 == 0
