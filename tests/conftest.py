"""Settings of every test: property tests draw the same examples on every machine, and none has a deadline."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=25)
settings.load_profile("ci")
