"""Hypothesis profiles: many examples in CI, fewer elsewhere; what runs on request."""

import os

import pytest
from hypothesis import settings

settings.register_profile("ci", max_examples=2000, deadline=None)
settings.register_profile("default", max_examples=200, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "default")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Skips the tests with a real model unless `-m` names them."""
    if "real_model" in config.getoption("markexpr"):
        return
    skip = pytest.mark.skip(reason="a real model is asked only with -m real_model")
    for item in items:
        if "real_model" in item.keywords:
            item.add_marker(skip)
