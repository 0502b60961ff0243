"""Tests against the real ExecuTorch: ``make test-executorch`` runs them with each release that the Makefile names.

Where the package is not installed, nothing here is collected; where the release has no MPS backend (1.5 and later),
nothing that is about MPS (files with ``mps`` in their name).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent

_spec = importlib.util.find_spec("executorch")
# Looked for as a folder: to find the module, Python would import the package, which warns.
_places = [Path(place) for place in (_spec.submodule_search_locations or ())] if _spec else []

if not _places:
    collect_ignore_glob = ["*"]
elif not any((place / "backends/apple/mps").is_dir() for place in _places):
    collect_ignore_glob = ["*mps*"]


def pytest_configure(config: pytest.Config) -> None:
    """ExecuTorch, and what it imports, warn of their own code: that is not ours to mend."""
    config.addinivalue_line("filterwarnings", "ignore")


@pytest.fixture(scope="session")
def gold() -> Path:
    """What ExecuTorch 1.4.1 wrote: ``mps``, ``xnnpack`` and ``ptd``; its README says what each file is."""
    return FOLDER.parent / "vectors" / "executorch"
