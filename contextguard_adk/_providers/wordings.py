"""The words of providers, servers and gateways for a request that is too long.

A wording is a regular expression with marks for numbers. `<limit>`, `<prompt>`,
`<output>` and `<count>` stand for numbers that are read. `<_>` stands for a number that
is not read. Wordings are searched in lower-case text.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final

# A number such as "128000", "128,000" or "128_000".
_NUMBER = r"[0-9](?:[0-9]|[,_](?=[0-9])){0,14}+"


@cache  # Wordings are compiled when an error is read; most runs have no error.
def compile_wordings(wordings: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """Returns the pattern of each wording, with a named group for each read number.

    "limit of <limit> of <_>" -> "limit of (?P<limit>NUMBER) of NUMBER"

    The patterns are for a text in lower case, on one line and without backslashes.
    """
    patterns = list[re.Pattern[str]]()
    for wording in wordings:
        with_groups = re.sub("<([a-z]+)>", rf"(?P<\1>{_NUMBER})", wording)
        expression = with_groups.replace("<_>", _NUMBER)
        patterns.append(re.compile(expression))
    return tuple(patterns)


# Rate limits with the number of tokens that a key may send in a period.
RATES: Final = (
    r"tokens per (?:min(?:ute)?|hour|day)\b[^:]{0,30}: limit:? <limit>,"
    r"(?: used:? <_>,)? requested:? <prompt>",
    r"rate limit (?:for your organization (?:\([^)]{1,80}\) )?)?"
    r"(?:of|for this model is) <limit> (?:input )?"
    r"tokens per (?:min(?:ute)?|hour|day)\b",
    r"input_token_count, limit: <limit>",
    r"tpm limit=<limit>",
)

# Errors that a shorter request would not avoid.
REFUSALS: Final = (
    # Rate limits and quotas: the same request may pass in a minute.
    r"rate[ _-]?limit[ _-]?(?:error|exceeded|reached)",
    r"rate limit of <_>",
    r"tokens per (?:min|hour|day)",
    r"\(tp[md]\)",
    r"too many requests",
    r"too many tokens[^.]{0,40}(?:wait|try again)",
    r"throttlingexception",
    r"resource_exhausted",
    r"(?:error code|status code|status|http):? 429\b",
    # A plan, not a window.
    r"extra usage is required",
    # The reserved output alone is too large: a shorter history changes nothing.
    r"maxoutputtokens value of",
    r"max_[a-z_]{0,20}tokens[^.]{0,40}(?:exceeds the limit|only supports up to)",
    r"too many tokens: max tokens must be",
    # A name or an id, which LiteLLM takes for the prompt.
    r"(?:expected a string with maximum length|expected maxlength:) [0-9]{1,4}\b",
)

# Requests that are longer than a limit in tokens. Only the numbers of the first wording
# that matches are read. So special wordings stand before general ones.
LIMITS: Final = (
    r"exceed context limit: <prompt> \+ <output> > <limit>",
    r"prompt is too long: <prompt> tokens > <limit> maximum",
    r"prompt is too long: <prompt>, model maximum context length: <limit>",
    r"configured limit of <limit> tokens",
    r"maximum number of tokens allowed \(?<limit>",
    r"model only supports up to <limit>(?! (?!tokens|input)[a-z])",
    r"too large for model with <limit> maximum context length",
    r"body too large for \S{1,80} model\. max size: <limit> tokens",
    r"context length (?:is|of) only <limit> tokens",
    r"maximum (?:model length of|prompt length is) <limit>",
    r"too long to fit into the model \(context length <limit>",
    r"(?:available|larger than the max) context size \(<limit>",
    r"n_prompt_tokens[\"': ]{1,4}<prompt>[\"', ]{1,4}n_ctx[\"': ]{1,4}<limit>",
    r"n_keep: <_>[>= ]{1,4}n_ctx: <limit>",
    r"exceed context window of <limit>",
    r"longer than the model'?s (?:maximum )?context length \(<limit> tokens\)",
    r"model token limit: <limit>",
    r"input length should be \[<_>, ?<limit>\]",
    r"input length \(?<prompt>(?: tokens)?\)? exceeds (?:the )?maximum (?:allowed )?"
    r"(?:input )?length (?:of )?\(?<limit>",
    r"inputs tokens \+ max_new_tokens must be <= <limit>",
    r"inputs must have less than <limit> tokens",
    r"tokens (?:in the prompt|\(prompt and prediction\)) cannot exceed <limit>",
    r"size limit exceeded by <_> tokens.{0,80}the limit for this model is <limit>",
    r"input tokens <prompt> cannot exceed the total tokens limit <limit>",
    r"prompt tokens \(<prompt>\) exceed model maximum \(<limit>\)",
    r"max input tokens: <limit>, request input token count: <prompt>",
    r"input tokens \(<prompt>\) has exceeded max_prompt_tokens \(<limit>\)",
    r"current length is <prompt> while limit is <limit>",
    r"maximum context length:? (?:for this model )?(?:is |of )?\(?<limit>",
    r"exceeds the limit of <limit>(?! ?(?:[kmg]i?b\b|byte|char|image|message|tool|file"
    r"|item|page|second|request|output))",
)

# Requests that are too long. These wordings do not name the limit.
LIMITLESS: Final = (
    r"context[ _]?(?:length|window)[ _]?exceeded",
    r"exceed_context_size_error|model_max_prompt_tokens_exceeded",
    r"exceeds? (?:the |this )?(?:available |model'?s )?(?:max(?:imum)? )?"
    r"context (?:window|length|limit|size)",
    r"(?:greater|longer) than the (?:model'?s )?(?:maximum )?context length",
    r"larger than the max context size",
    r"context size has been exceeded|context window exceeds limit",
    r"exceeded model token limit",
    r"(?:prompt|input) is too long|prompt too long; exceeded",
    r"prompt exceeds max(?:imum)? length",
    r"exceeds the maximum number of tokens allowed",
    r"exceed max message tokens",
    r"input tokens (?:exceed the configured limit|exceeded:)",
    r"number of input tokens exceeds maximum length",
    r"prompt has too many tokens|too many input tokens",
    r"too many tokens: (?:total|size limit|minimal context|multi-hop)",
    r"reduce the length of the (?:messages|prompt|input)",
)

# Requests that are longer than a limit in bytes or characters.
PAYLOADS: Final = (
    r"request_too_large",
    r"(?:request entity|payload|content|request body)(?: is)? too large",
    r"request payload size exceeds the limit",
    r"(?:request|payload|body)[a-z ]{0,20}"
    r"(?: \(?<_> ?(?:bytes|[kmg]i?b)\)?)? exceeds (?:the )?"
    r"(?:maximum|limit|max)[a-z ]{0,20}:? ?<_> ?(?:bytes|[kmg]i?b)\b",
    r"string too long\. expected a string with maximum length [0-9]",
    r"expected maxlength: [0-9]",
    r"string value length \(<_>\) exceeds the maximum allowed",
)

# The wordings below are for numbers near a limit. Counts of prompt and output together.
TOTALS: Final = (r"requested (?:about |a total of )?<count> tokens",)
# Counts of the output.
OUTPUTS: Final = (
    r"<count> (?:tokens )?(?:in|for) the (?:completion|output)",
    r"requested <count> output tokens",
    r"plus <count> '?max_tokens",
    r"max_completion_tokens'? is too large: <count>",
    r"inputs tokens and <count> max_new_tokens",
)
# Counts of the prompt.
PROMPTS: Final = (
    r"(?:input|prompt) token count (?:is |of |\()<count>",
    r"(?:request|input|prompt|requested tokens) \(<count>(?: tokens)?\)",
    r"input length \(?<count>",
    r"prompt \((?:total )?length <count>\)",
    r"prompt length of <count>",
    r"(?:prompt|request) contains <count> (?:input )?tokens",
    r"resulted in <count> tokens",
    r"\(requested: <count>\)",
    r"<count> tokens from the input messages",
    r"in the prompt cannot exceed <_> - received <count>",
    r"must have less than <_> tokens\. given: <count>",
    r"given: <count> inputs tokens",
)
# Counts of a prompt that may be too low: vLLM may stop one token past the limit.
CAPPED_PROMPTS: Final = (r"(?:passed|request has) <count> input tokens",)
# Words that say the limit holds for prompt and output together.
SUM: Final = re.compile(r"\+ max_new_tokens must be|\(prompt and prediction\)")
