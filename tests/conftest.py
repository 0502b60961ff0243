"""What holds for every test: property tests draw the same examples on every machine, and no clock ends one."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci")
