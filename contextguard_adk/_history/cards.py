"""Tells the numbers of payment cards from other long numbers, and hides them."""

from __future__ import annotations

import re
from typing import Any

from contextguard_adk._history.field_names import Names, names_card, names_id

_MAX_CARD_DIGITS = 19
"""How many digits the number of a payment card has at most."""

_MAX_CARD_CHARS = 48
"""A longer text in a field is no number of a card, but may have one."""

_BEFORE_CARD_CHARS = 32
"""This many characters before a number may tell whether the number is a card's."""

_CARD = re.compile(
    # In the number of a bank account, "DE89 3704 0044 ...", no card begins.
    r"(?<!\d)(?<![A-Z]{2}\d{2}[ \u00a0\u202f\u2011\u2013-])"
    r"(?:\d{4}(?P<gap>[ \u00a0\u202f\u2011\u2013-])(?:\d{4}(?P=gap)\d{4}(?P=gap)\d{4}|"
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


def hide_cards(text: str, names: Names) -> str:
    """Writes x for each digit of a card's number; other long numbers stay."""

    def mask(match: re.Match[str]) -> str:
        number = match.group()
        before = text[max(0, match.start() - _BEFORE_CARD_CHARS) : match.start()]
        if not _is_card(number, before, names):
            return number
        # The length stays the same, so that the patterns still find the names around.
        return re.sub(r"\d", "x", number)

    return _CARD.sub(mask, text)


def without_card(value: Any, names: Names) -> Any:
    """Returns a value, or x for each digit if it is the number of a card."""
    is_small_number = isinstance(value, int) and abs(value) < 10**_MAX_CARD_DIGITS
    is_short_text = isinstance(value, str) and len(value) <= _MAX_CARD_CHARS
    if not is_small_number and not is_short_text:
        return value

    text = str(value)
    hidden = hide_cards(text, names)
    return value if hidden == text else hidden


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
    follows_card = _CARD_BEFORE.search(before) is not None
    is_named_card = follows_card or any(names_card(name) for name in names)
    follows_id = _ID_BEFORE.search(before) is not None
    is_named_id = follows_id or names_id(names)

    if is_named_id and not has_gaps:
        return is_named_card and is_issued
    return is_named_card or is_issued or (has_gaps and digits[0] in "3456")


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
