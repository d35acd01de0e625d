"""The copy of litellm's table, for those who have no litellm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from contextguard_adk._providers import registry
from contextguard_adk._providers.registry import LitellmRegistry
from tests.model_table import COPY, SOURCE, find_differences, shorten, write
from tests.retiring_models import load_table

MODEL = {
    "mode": "chat",
    "max_input_tokens": 90_000,
    "input_cost_per_token": 0,
    "cache_read_input_token_cost_above_200k_tokens": 1e-7,
    "supports_reasoning": False,
    "supports_vision": True,
    "output_vector_size": None,
}
TABLE = {
    "m-1": MODEL,
    "m-latest": {"alias_of": "m-1", "source": "somewhere"},
    "m-embeds": {"mode": "embedding", "max_input_tokens": 8_000},
    "sample_spec": "not a model",
}
SHORTENED = {
    "m-1": {
        "mode": "chat",
        "max_input_tokens": 90_000,
        "input_cost_per_token": 0,
        "cache_read_input_token_cost_above_200k_tokens": 1e-7,
    },
    "m-latest": {"alias_of": "m-1"},
}


def test_a_copy_has_what_the_guard_reads() -> None:
    """Models that answer in text, and aliases; a price of 0 stays."""
    assert shorten(TABLE) == SHORTENED
    assert json.loads(write(TABLE, "litellm 1")) == {SOURCE: "litellm 1", **SHORTENED}


def test_a_copy_answers_as_the_whole_table(tmp_path: Path) -> None:
    """That of the installed litellm has the same facts for each of its names."""
    table = load_table()
    path = tmp_path / "copy.json"
    path.write_text(write(table, "here"), "utf-8")
    copy = LitellmRegistry(path)
    whole = LitellmRegistry()

    known = 0
    for name in table:
        entry_name = whole.entry_name(name)
        assert copy.entry_name(name) == entry_name
        assert copy.context_window(name) == whole.context_window(name)
        assert copy.max_output_tokens(name) == whole.max_output_tokens(name)
        assert copy.costs(name) == whole.costs(name)
        assert copy.supports_reasoning(name) == whole.supports_reasoning(name)
        known += entry_name is not None
    assert known > 1_000


def test_ci_tells_which_models_changed() -> None:
    """New, changed and removed ones, but not what the guard does not read."""
    copy = json.loads(write({**TABLE, "m-gone": MODEL}, "litellm 1"))
    changed = {**MODEL, "max_input_tokens": 91_000}
    table = {**TABLE, "m-latest": changed, "m-new": MODEL, "m-1": {**MODEL, "x": 1}}

    assert find_differences(copy, TABLE | {"m-gone": MODEL}) == []
    assert find_differences(copy, table) == ["m-gone", "m-latest", "m-new"]


@pytest.mark.parametrize("text", [None, "{", "[]", '{"m-1": {"mode": "embedding"}}'])
def test_a_table_that_cannot_be_used_is_replaced_by_the_copy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    """With a warning that names the file."""
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text, "utf-8")

    rows = json.loads(COPY.read_bytes())
    window_tokens = LitellmRegistry(path).context_window("gemini-flash-latest")
    assert window_tokens == rows["gemini-flash-latest"]["max_input_tokens"]
    assert str(path) in caplog.text


def test_the_table_of_an_installed_litellm_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is newer than the copy, as a rule."""
    package = tmp_path / "litellm" / "__init__.py"
    package.parent.mkdir()
    package.write_text("")
    table = package.with_name("model_prices_and_context_window_backup.json")
    table.write_text(json.dumps({"gemini-flash-latest": MODEL}))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "litellm", raising=False)
    registry._load_table.cache_clear()
    try:
        window_tokens = LitellmRegistry().context_window("gemini-flash-latest")
        assert window_tokens == MODEL["max_input_tokens"]
    finally:
        registry._load_table.cache_clear()
