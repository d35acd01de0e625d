"""Images and files of many kinds, and whether something sent holds them."""

from __future__ import annotations

import base64
import json
from typing import Any

from google.genai import types

KINDS = {
    "text": "text/plain",
    "csv": "text/csv",
    "json": "application/json",
    "pdf": "application/pdf",
    "png": "image/png",
    "audio": "audio/wav",
    "video": "video/mp4",
}
"""By name, the MIME types of files that hold bytes."""

NOT_SHOWN = "It cannot be shown to this model."


def inline(mime_type: str | None, data: bytes = b"a,b", name: str = "") -> types.Part:
    """A file that holds bytes."""
    blob = types.Blob(mime_type=mime_type, data=data, display_name=name or None)
    return types.Part(inline_data=blob)


def linked(address: str, mime_type: str | None = "image/png") -> types.Part:
    """A file by its address."""
    return types.Part(file_data=types.FileData(file_uri=address, mime_type=mime_type))


def files_of(owner: str) -> dict[str, types.Part]:
    """A file of each kind, which nobody else has; one is named by its address."""
    files = {
        name: inline(mime_type, f"{name} of {owner}".encode())
        for name, mime_type in KINDS.items()
    }
    return {**files, "address": linked(f"https://files.test/{owner}.png")}


def in_result(name: str, *files: types.Part) -> types.Part:
    """A tool's result with files."""
    parts = [part.model_dump(exclude_none=True) for part in files]
    response = types.FunctionResponse.model_validate(
        {"name": name, "id": f"id-{name}", "response": {"n": 1}, "parts": parts}
    )
    return types.Part(function_response=response)


def holds(sent: Any, file: types.Part) -> bool:
    """Whether what was sent holds a file as one: its bytes or its address."""
    said = json.dumps(sent, default=str)
    if file.file_data:
        # In words an address stands between quotation marks.
        return f'"{file.file_data.file_uri}"' in said
    assert file.inline_data
    data = file.inline_data.data or b""
    codes = base64.b64encode(data), base64.urlsafe_b64encode(data)
    return any(code.decode().rstrip("=") in said for code in codes)
