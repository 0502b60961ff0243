"""Settings of every test: property tests draw the same examples on every machine, and none has a deadline."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from tests.support.older_torch import lacking
from tests.support.spools import on_disk

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=25)
settings.load_profile("ci")

TOGETHER = (
    "tests/large/",  # one big file at a time
    "tests/sources/sets/test_dcp.py",  # torchrun takes seconds, and starts once
    "tests/interop/test_real_packages.py",  # each package is downloaded once
    "tests/interop/test_without_torch.py",  # one environment
    "tests/metal/test_pyobjc_metadata.py",
)
"""Tests whose paths begin with one of these run in one process, one after another, and begin before all others."""


@pytest.fixture
def spools_on_disk() -> Iterator[None]:
    """What has to wait goes to disk, however little it is."""
    with on_disk():
        yield


def group_of(nodeid: str) -> int:
    """The number of the test's group; the length of :data:`TOGETHER` for those that may run anywhere."""
    return next((number for number, path in enumerate(TOGETHER) if nodeid.startswith(path)), len(TOGETHER))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: group_of(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and (reason := lacking(item.name, call.excinfo)) is not None:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {reason}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    call = getattr(report, "call", None)
    if report.failed and call is not None and (reason := lacking(collector.name, call.excinfo)) is not None:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {reason}")
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Not ``--dist loadgroup``: pytest-xdist 3.8 writes groups into ids, which pytest 9.2 does not let it."""
    from xdist.scheduler import LoadScopeScheduling

    def split_scope(nodeid: str) -> str:
        number = group_of(nodeid)
        return TOGETHER[number] if number < len(TOGETHER) else nodeid

    config.option.loadscopereorder = False  # the order of collection is right
    scheduling = LoadScopeScheduling(config, log)
    scheduling._split_scope = split_scope
    return scheduling
