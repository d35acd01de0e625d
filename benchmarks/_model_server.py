"""Serves a model with llama.cpp, as `python -m llama_cpp.server` does.

    python benchmarks/_model_server.py --model FILE --chat_format turns

Takes the same arguments, and knows one more chat format.
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


def main() -> None:
    """Serves until the process ends."""
    chat_format = importlib.import_module("llama_cpp.llama_chat_format")
    chat_format.register_chat_format(TURNS)(write_turns)
    importlib.import_module("llama_cpp.server.__main__").main()


if __name__ == "__main__":
    main()
