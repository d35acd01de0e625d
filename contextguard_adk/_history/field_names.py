"""Tells from the name of a field whether the field may hold a credential, or an id."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

Names = tuple[str, ...]
"""The names of the fields around a value, the outermost one first."""

_MAX_NAME_CHARS = 80
"""Of a longer name of a field, only this many characters at the end are read."""

# What the name of a field says about a text in the field.
ALWAYS = "always"  # "password": the text is a credential.
MOSTLY = "mostly"  # "cookie": a credential, unless the text has the form of an id.
SOMETIMES = "sometimes"  # "token": a credential if the text has the form of one.
NEVER = "never"  # "order_id": none, whatever the objects around are called.
UNKNOWN = "unknown"  # "value": the names of the objects around decide.

# The endings that a credential's name keeps its meaning with: "password_hash_2".
_ENDING = (
    r"(?:_?(?:values?|text|string|plain|raw|hash|hashed|salt|encrypted|b64|base64|pem|"
    r"json|header|jar|hint|old|new|current|previous|confirm|confirmation|repeat|prod|"
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
    r"(?:boarding|ski|lift|season|day|travel|bus|rail|parking|visitor|guest|"
    r"event)_?pass"
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
    r"address|contract|mint|wallet|arn|network|chain|decimals|order|number|no|"
    r"count|total|url|uri|link|path|file|"
    r"email|users?|username|owner|member|patient|customer|merchant|payer|insurer|"
    r"provider|issuer|date|time|at|by|on|until|expiry|expires|expiration|scopes?|"
    r"policy|rules?|sku|price|amount|currency|quantity|qty|limit|min|max|length|age|"
    r"days|hours|minutes|seconds|attempts|version|ref|reference|method|role|region|"
    r"country|city|"
    r"domain|host|port|algorithm|format|plan|service|product|item|items|category|level|"
    r"imei|serial|tracking)$"
)

_ID_NAME = re.compile(
    r"(?:page|paging|pagination|next|prev|previous|continuation|sync|resume)_?tokens?$|"
    r"(?:^|_)(?:ids?|uid|uuid|guid|imei\w{0,4}|meid|iccid|serial|orders?|tracking|"
    r"shipment|parcel|invoice|ticket|booking|reservation|barcode|ean|gtin|upc|sku|isbn|"
    r"msisdn|phone|address|contract|wallet|mint|cursor|hash|sha\d{0,3}|"
    r"checksum|etag|txid|commit|"
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


def judge_name(name: str) -> str:
    """Returns what the name of a field says about a text in the field."""
    return _judge_short_name(name[-_MAX_NAME_CHARS:])


@lru_cache(maxsize=4_096)
def _judge_short_name(name: str) -> str:
    words = _split_name(name)
    if _NEVER_NAME.search(words):
        return NEVER
    # Variables of the environment: GITLAB_CI_TOKEN.
    is_variable = name.isupper() and words.endswith("_token")
    if is_variable or _ALWAYS_NAME.search(words):
        return ALWAYS
    if _MOSTLY_NAME.search(words):
        return MOSTLY
    if _SOMETIMES_NAME.search(words):
        return SOMETIMES
    if _DESCRIPTION_NAME.search(words):
        return NEVER
    # "secret_santa" is none, and "secret_access" is one: the form decides.
    return SOMETIMES if "secret" in words or "passw" in words else UNKNOWN


def _split_name(name: str) -> str:
    """Writes a name in small letters: "nextPageToken" becomes "next_page_token"."""
    spaced = _CAMEL_CASE.sub("_", name)
    return _NAME_MARKS.sub("_", spaced).lower().strip("_")


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


def find_field(names: Names) -> str:
    """Returns the name that the fields of many objects share; "" for none.

    This is the innermost name without a digit. One with a digit is mostly the id of an
    object: in {"ord-81": {"2024": 4}, "ord-82": {"2024": 5}}, no name is shared.
    """
    for name in reversed(names):
        short_name = name[-_MAX_NAME_CHARS:]
        if not any(char.isdigit() for char in short_name):
            return short_name
    return ""


def is_id(names: Names, text: str) -> bool:
    """Whether a text is an id by the name of its field, so that it may look random."""
    is_word = len(text.split()) == 1
    return is_word and names_id(names)


@lru_cache(maxsize=4_096)
def _search_names(pattern: re.Pattern[str], name: str) -> bool:
    return pattern.search(_split_name(name)) is not None


def names_id(names: Names) -> bool:
    """Whether the innermost name is that of a field with an id."""
    return bool(names) and _search_names(_ID_NAME, names[-1][-_MAX_NAME_CHARS:])


def names_card(name: str) -> bool:
    """Whether a field of this name holds the number of a card, or data of a card."""
    return _search_names(_CARD_NAME, name[-_MAX_NAME_CHARS:])
