"""Hypothesis profiles: many examples in CI, fewer elsewhere."""

import os

from hypothesis import settings

settings.register_profile("ci", max_examples=2000, deadline=None)
settings.register_profile("default", max_examples=200, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "default")
