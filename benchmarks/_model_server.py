"""Serves a model with llama.cpp: `python -m llama_cpp.server`, for more machines.

    python benchmarks/_model_server.py --model FILE --chat_format turns

Takes the arguments of `llama_cpp.server`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

TURNS = "turns"
"""The name of the chat format of models whose file has none."""


def write_turns(messages: Sequence[dict[str, Any]], **_: Any) -> Any:
    """Writes messages as Gemma reads them: turns of a user and of a model.

    Instructions and results are turns of the user. `llama_cpp` has a format for Gemma,
    which leaves both out.
    """
    chat_format = importlib.import_module("llama_cpp.llama_chat_format")
    turns = list[str]()
    for message in messages:
        role = "model" if message["role"] == "assistant" else "user"
        text = message.get("content") or ""
        turns.append(f"<start_of_turn>{role}\n{text}<end_of_turn>\n")
    prompt = "".join(turns) + "<start_of_turn>model\n"
    return chat_format.ChatFormatterResponse(prompt=prompt, stop="<end_of_turn>")


def keep_weights() -> None:
    """Keeps llama.cpp from packing weights for AMX.

    Some virtual machines announce AMX and do not have it; there the first token would
    end the process.
    """
    library = importlib.import_module("llama_cpp.llama_cpp")
    make_defaults = library.llama_model_default_params

    def make_params() -> Any:
        params = make_defaults()
        params.use_extra_bufts = False
        return params

    # The binding reads this default and has no setting for it.
    library.llama_model_default_params = make_params


def main() -> None:
    """Serves until the process ends."""
    keep_weights()
    chat_format = importlib.import_module("llama_cpp.llama_chat_format")
    chat_format.register_chat_format(TURNS)(write_turns)
    importlib.import_module("llama_cpp.server.__main__").main()


if __name__ == "__main__":
    main()
