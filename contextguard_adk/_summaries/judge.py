"""Tells a summary from a refusal, a tool call, and other answers.

A summarizer's answer is judged by its text alone, with regular expressions: to ask
another model would cost a second call.
"""

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
    """The answer of a model to one call.

    Attributes:
        text: The text that the model wrote, without thoughts and blank margins.
        output_tokens: The provider's count of the text; 0 if there is no count.
        has_calls: Whether the model called a tool.
        finish: The reason for the end of the answer, such as "STOP", or the code of an
            error; "" if there is none.
        usage: The tokens of the call, as the provider reported them.
    """

    text: str
    output_tokens: int = 0
    has_calls: bool = False
    finish: str = ""
    usage: Usage = field(default_factory=Usage)


MAX_REFUSAL_CHARS = 400
"""An answer of this length or more is neither a refusal nor a question to the user."""

_LEAST_CUT_RATIO = 0.5
"""A summary that was cut at its limit is used if it takes this part of its budget."""

_MOST_COPIED_RATIO = 0.8
"""If a larger part of an answer is copied from the transcript, it is no summary."""

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
"""The beginning of a line of a transcript, such as "user:" or "model: [".

A line of a message begins with two spaces.
"""

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

    An answer that was cut at its limit counts as a summary if it takes at least half of
    the budget, because so long a text is worth more than excerpts.

    Args:
        answer: The model's answer.
        budget_tokens: The most that the summary may take.
        has_own_form: Whether the model was asked for the guard's own headings.
        source: The text that was to be summarized; "" if unknown.

    Returns:
        The answer with its text quoted, so that no line looks like a line of the guard.
        An answer that was cut has lost its last line, which was not complete.

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
        # A rough measure is enough here: four bytes count as one token.
        estimated_tokens = text_bytes(text) / 4
        if estimated_tokens < _LEAST_CUT_RATIO * budget_tokens:
            raise UnusableAnswerError("the answer was cut at its limit")
        whole_lines, _, _ = text.rpartition("\n")
        # If there is only one line, this line stays, although it is cut.
        text = whole_lines.strip() or text

    # An instruction of the user's own may ask for JSON. The guard's own never does.
    if answer.has_calls or (has_own_form and _is_json(text)):
        raise UnusableAnswerError("the answer calls a tool")
    fault = _find_fault(text, has_own_form, source)
    if fault:
        raise UnusableAnswerError(f"the answer {fault}")
    return replace(answer, text=quote(text))


def _find_fault(text: str, has_own_form: bool, source: str) -> str:
    """Returns the fault of an answer, as "is a question"; "" for none.

    Args:
        text: The text of the answer; it is not blank.
        has_own_form: Whether the model was asked for the guard's own headings.
        source: The text that was to be summarized; "" if unknown.
    """
    # A long answer is no refusal and no question, however it begins or ends.
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

    # With an instruction of the user's own, a single word may be a summary.
    if has_own_form:
        has_words = _count_words_below_headings(text) >= _LEAST_OWN_WORDS
    else:
        has_words = _WORD.search(text) is not None
    return "" if has_words else "is no summary"


def _has_facts(text: str, source: str) -> bool:
    """Whether an answer has a telling word that `source` has as well."""
    return not _find_facts(text).isdisjoint(_find_facts(source))


def _find_facts(text: str) -> set[str]:
    """Returns the words of a text that may name something, in small letters."""
    # Japanese and Chinese have no spaces, so any three letters in a row count as a
    # word. `_FACT` matches only the first letter, and has all three in group 1.
    return {match[1] or match[0] for match in _FACT.finditer(text.lower())}


def _is_echo(text: str, source: str) -> bool:
    """Whether an answer is little more than a copy of the transcript.

    A line counts as copied if the transcript has the same line, and the line begins as
    `_TRANSCRIPT_LINE` says. A summary may repeat other lines, such as a list.

    Args:
        text: The text of the answer; it is not blank.
        source: The transcript.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    copied_lines = {
        line.rstrip() for line in source.splitlines() if _TRANSCRIPT_LINE.match(line)
    }
    # The end of the answer may have been cut. So the last line counts as copied if a
    # line of the transcript begins with the same words.
    last_line = lines[-1]
    if _TRANSCRIPT_LINE.match(last_line) and f"\n{last_line}" in source:
        copied_lines.add(last_line)

    all_chars = sum(len(line) for line in lines)
    copied_chars = sum(len(line) for line in lines if line in copied_lines)
    return copied_chars > _MOST_COPIED_RATIO * all_chars


def _count_words_below_headings(text: str) -> int:
    """Counts the words of a summary, without headings.

    A line with the single word "None" does not count: the model was told to write
    "None" below a heading that has nothing.
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
    """Whether a text is nothing but a JSON object or list.

    Some models write a tool call as such a text.
    """
    without_fences = _FENCE.sub("", text)
    try:
        return isinstance(json.loads(without_fences), dict | list)
    except (ValueError, RecursionError):
        # Nested too deeply, JSON exceeds Python's recursion limit.
        return False
