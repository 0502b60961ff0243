"""Large tests are slow, and run one after another in one worker, so that there is never more than one big file."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, and put them first: the group that takes longest must not be what the other workers wait for."""
    large = [item for item in items if FOLDER in item.path.parents]
    for item in large:
        item.add_marker(pytest.mark.slow)
        item.add_marker(pytest.mark.xdist_group("large"))
    items[:] = large + [item for item in items if FOLDER not in item.path.parents]
