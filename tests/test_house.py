"""The project's own files agree with each other."""

from __future__ import annotations

import configparser
import importlib.metadata
import os
import re
import subprocess
from pathlib import Path

from stream_pack._version import __version__

ROOT = Path(__file__).parent.parent


def config() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def canonical(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def test_the_installed_metadata_carries_the_version_that_the_code_says() -> None:
    assert importlib.metadata.version("stream_pack") == __version__


def test_every_requirement_is_pinned_for_ci() -> None:
    pins = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+( ; .+)?", pin) for pin in pins)
    wanted = config()["options"]["install_requires"].split("\n")
    for extra in config()["options.extras_require"].values():
        wanted += extra.split("\n")
    required = {canonical(line) for line in wanted if line}
    required.remove("executorch")  # the Makefile names its releases
    assert required <= {canonical(pin) for pin in pins}


def test_the_changelog_has_an_entry_for_this_version_that_speaks_of_the_format() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    _, _, entry = changelog.partition(f"## [{__version__}]")
    assert "### Format" in entry.split("\n## ")[0]


def test_the_makefile_explains_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    assert phony is not None
    explained = set(re.findall(r'@echo "make ([\w-]+)', makefile))
    assert explained == set(phony[1].split()) - {"help"}


def test_the_scripts_can_be_run_and_parse() -> None:
    for script in (ROOT / ".ci/run", ROOT / "examples/demo.sh"):
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", script], check=True)
