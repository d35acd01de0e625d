"""Tells a summary from a refusal, a tool call, and other answers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace

from contextguard_adk._measuring.tokens import text_bytes
from contextguard_adk._support.log import safe_code
from contextguard_adk._support.phrases import quote
from contextguard_adk.errors import UnusableAnswerError
from contextguard_adk.records import Usage


@dataclass(frozen=True)
class Answer:
    """The text that a model wrote, without thoughts.

    Attributes:
        text: The text.
        output_tokens: The provider's count of it; 0 if it was not counted.
        has_calls: Whether the model called a tool.
        finish: The reason for which it ended, or an error that came in its place.
        usage: The tokens of the call.
    """

    text: str
    output_tokens: int = 0
    has_calls: bool = False
    finish: str = ""
    usage: Usage = field(default_factory=Usage)


MAX_REFUSAL_CHARS = 400
"""A refusal, or a question to the user, is shorter than this."""

_LEAST_CUT_RATIO = 0.5
"""A summary that was cut at its limit is used from this part of its budget on."""

_MOST_COPIED_RATIO = 0.8
"""An answer of which more is copied from the transcript is no summary."""

_LEAST_OWN_WORDS = 2
"""A summary with the guard's headings has at least this many words below them."""

_BLOCKED = re.compile(
    "SAFETY|RECITATION|LANGUAGE|BLOCK|PROHIBITED|SPII|ARMOR|JAILBREAK|FILTER", re.I
)
"""Reasons to finish with which a provider's filter ends an answer."""

_FENCE = re.compile(r"```\w*|</?tool_call>")
"""Marks around JSON that a model writes as a text."""

_REFUSAL = re.compile(
    r"""\W*(I(.m|\ am)\ (very\ |so\ )?sorry | (I\ )?apologi[sz]e\b | sorry,
    | I(.m|\ am)\ (unable|not\ able) | as\ an\ AI\b | unfortunately,?\ I\b
    | I\ (can(.t|not|\ not)|won.t|will\ not)\ (assist|help|provide|fulfill|comply
      |summarize|summarise|continue|complete|process|create|generate|engage|discuss|do)
    | (es\ )?tut\ mir\ leid | leider\ kann\ ich\b | entschuldigung
    | lo\ siento | lo\ lamento | no\ puedo | (je\ suis\ )?désolée?\b | je\ ne\ peux
    | mi\ dispiace | non\ posso | (sinto|lamento)\ muito | desculpe | não\ posso
    | ((sure|certainly|of\ course|understood|got\ it)\W+)?please\ (provide|share|paste)
    | het\ spijt\ me | przykro\ mi | przepraszam | üzgünüm
    | извините | простите | к\ сожалению | я\ не\ могу
    | (很|非常)?抱歉 | 对不起 | 對不起 | 我(无法|無法|不能) | (大変)?申し訳 | すみません
    | (정말\ )?죄송 | क्षमा | माफ़ | آسف | عذر)""",
    re.VERBOSE | re.IGNORECASE,
)
"""Beginnings of refusals, in the languages that are used most."""

_QUESTION_MARKS = "?\uff1f\u061f\u037e"
"""The question marks of Latin, Chinese, Arabic and Greek script."""

_TRANSCRIPT_LINE = re.compile(r"  |(user|model|tool|other agent):(?: \[|$)")
"""Beginnings of lines of a transcript, as "user:", "model: [" or "  Hello"."""

_KANA_OR_HAN = "\u3040-\u30ff\u4e00-\u9fff"
"""The letters of Japanese and Chinese, as a range of a regular expression."""

_FACT = re.compile(
    rf"""(?=([{_KANA_OR_HAN}]{{3}}))[{_KANA_OR_HAN}]
    |(?<![^\W{_KANA_OR_HAN}])(?=[^\W\d{_KANA_OR_HAN}]*\d)[^\W{_KANA_OR_HAN}]{{2,}}
    |\b(?!summar|conversa|transcript|please|provide|specific|content|message|details
      |context|clarify|exactly|document|zusammen|möchte|welche|gespräch|r[ée]sum|gustaría
      |souhait|voulez)[^\W\d_{_KANA_OR_HAN}]{{6,}}""",
    re.VERBOSE,
)
"""Words that may name something, as "v2", "Copenhagen" or three letters of Japanese.

A word with a digit counts, and a word of six letters or more. The listed words do not
count: with these a model asks for more.
"""

_WORD = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]|\w+")
"""A word; a single letter of Japanese, Chinese or Korean counts as one."""


def judge(
    answer: Answer, budget_tokens: int, has_own_form: bool, source: str = ""
) -> Answer:
    """Returns an answer if it is a summary, and raises an error if not.

    An answer that was cut at its limit is returned without its last line, if it takes
    at least half of the budget: so much is worth more than excerpts.

    Args:
        answer: The model's answer.
        budget_tokens: The length that a summary may have.
        has_own_form: Whether the model was asked for the guard's own headings.
        source: The text that was to be summarized.

    Raises:
        UnusableAnswerError: The answer is no summary.
    """
    finish = answer.finish
    if _BLOCKED.search(finish):
        filter_name = safe_code(finish, "a filter")
        message = f"the answer was ended by {filter_name}"
        raise UnusableAnswerError(message, is_blocked=True)

    text = answer.text
    if not text:
        # "STOP" is the usual end of an answer, and explains nothing.
        has_reason = finish not in ("", "STOP")
        reason = f" ({safe_code(finish, 'an unnamed reason')})" if has_reason else ""
        raise UnusableAnswerError(f"the answer holds no text{reason}")

    if finish == "MAX_TOKENS":
        estimated_tokens = text_bytes(text) / 4
        if estimated_tokens < _LEAST_CUT_RATIO * budget_tokens:
            raise UnusableAnswerError("the answer was cut at its limit")
        whole_lines, _, _ = text.rpartition("\n")
        # A single line is used as far as it goes.
        text = whole_lines.strip() or text

    if answer.has_calls or (has_own_form and _is_json(text)):
        raise UnusableAnswerError("the answer calls a tool")
    fault = _find_fault(text, has_own_form, source)
    if fault:
        raise UnusableAnswerError(f"the answer {fault}")
    return replace(answer, text=quote(text))


def _find_fault(text: str, has_own_form: bool, source: str) -> str:
    """Returns the fault of an answer, as "is a question"; "" for none.

    A long answer is no refusal and no question, however it begins or ends. The
    arguments are those of `judge`.
    """
    is_short = len(text) < MAX_REFUSAL_CHARS
    if is_short and _REFUSAL.match(text):
        return "is a refusal"

    # A short summary may end with an open question of the conversation. But then it has
    # a heading, or names something of the conversation.
    is_question = "#" not in text and text[-1] in _QUESTION_MARKS
    if is_short and is_question and not _has_facts(text, source):
        return "is a question"

    if _is_echo(text, source):
        return "repeats the transcript"

    if has_own_form:
        has_words = _count_words_below_headings(text) >= _LEAST_OWN_WORDS
    else:
        has_words = _WORD.search(text) is not None
    return "" if has_words else "is no summary"


def _has_facts(text: str, source: str) -> bool:
    """Whether a short answer names things that stand in the summarized text."""
    return not _find_facts(text).isdisjoint(_find_facts(source))


def _find_facts(text: str) -> set[str]:
    """Returns the words of a text that may name something, in small letters."""
    # The first group holds letters of a script without spaces.
    return {match[1] or match[0] for match in _FACT.finditer(text.lower())}


def _is_echo(text: str, source: str) -> bool:
    """Whether an answer is little more than a copy of the transcript.

    A line counts as copied only if it has the form of a transcript's line: an author,
    as "user:", or a margin before text, as "  Hello".
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    copied_lines = {
        line.rstrip() for line in source.splitlines() if _TRANSCRIPT_LINE.match(line)
    }
    # The last line may have been cut, so it may be the beginning of a copied line.
    last_line = lines[-1]
    if _TRANSCRIPT_LINE.match(last_line) and f"\n{last_line}" in source:
        copied_lines.add(last_line)

    all_chars = sum(len(line) for line in lines)
    copied_chars = sum(len(line) for line in lines if line in copied_lines)
    return copied_chars > _MOST_COPIED_RATIO * all_chars


def _count_words_below_headings(text: str) -> int:
    """Counts the words of a summary, without headings.

    A line with the single word "None" does not count: it says that a section is empty.
    """
    count = 0
    for line in text.split("\n"):
        if line.lstrip(" \t").startswith("#"):
            continue
        words = _WORD.findall(line)
        is_none = len(words) == 1 and words[0].lower() == "none"
        if not is_none:
            count += len(words)
    return count


def _is_json(text: str) -> bool:
    """Whether a text is nothing but JSON, as a call written out is."""
    try:
        return isinstance(json.loads(_FENCE.sub("", text)), dict | list)
    except (ValueError, RecursionError):
        return False
