"""The project's own files agree with each other, and none of its rooms grows too large."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from stream_pack._version import __version__

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "stream_pack"

MAX_BODY_LINES = 60  # a screen
MAX_DECISIONS = 15
MAX_ENTRIES = 17  # torch.py and numpy.py are the modules that users of safetensors expect
MAX_SHARE = 0.30


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
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
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


def test_ci_tests_the_lowest_versions_that_users_may_have() -> None:
    done = subprocess.run([ROOT / ".ci/lowest"], capture_output=True, text=True, check=True)
    wanted = config()["options"]["install_requires"].split("\n")
    assert done.stdout.split("\n")[:-1] == [line.replace(" >=", "==") for line in wanted if line]
    assert re.fullmatch(r"([\w-]+==\d+(\.\d+){2}\n)+", done.stdout)  # as pip prints them: 2.1 is not 2.1.0


def test_the_scripts_can_be_run_and_parse() -> None:
    for script in (ROOT / ".ci/run", ROOT / "examples/demo.sh"):
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", script], check=True)


def written() -> Iterator[tuple[Path, str]]:
    """The modules that are written by hand, and their text."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "generated" not in path.parts:
            yield path.relative_to(PACKAGE), path.read_text()


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[str, Function]]:
    for path, text in written():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, Function):
                yield f"{path}:{node.name}", node


def body_lines(function: Function) -> int:
    """From the first statement after the docstring to the end."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def decisions(function: Function) -> int:
    """McCabe's number of paths, where each operand of ``and`` and ``or`` and each comprehension is a decision too."""
    number, nodes = 1, list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        if isinstance(node, Function | ast.Assert):
            continue  # a function is counted by itself; what is asserted has one way only
        nodes += ast.iter_child_nodes(node)
        match node:
            case ast.BoolOp(values=values):
                number += len(values) - 1
            case ast.comprehension(ifs=ifs):
                number += 1 + len(ifs)
            case ast.For(orelse=orelse) | ast.AsyncFor(orelse=orelse) | ast.While(orelse=orelse):
                number += 1 + bool(orelse)
            case ast.If() | ast.IfExp() | ast.ExceptHandler() | ast.match_case():
                number += 1
    return number


def test_a_function_fits_a_screen() -> None:
    lengths = {name: body_lines(function) for name, function in functions()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_BODY_LINES} == {}


def test_a_function_takes_few_decisions() -> None:
    numbers = {name: decisions(function) for name, function in functions()}
    assert {name: number for name, number in numbers.items() if number > MAX_DECISIONS} == {}


def test_no_room_is_much_larger_than_the_others() -> None:
    lines: Counter[str] = Counter()
    for path, text in written():
        lines[path.parts[0]] += text.count("\n")
    entries = lines.keys() - {"__init__.py", "__main__.py", "_version.py"}
    assert len(entries) <= MAX_ENTRIES
    shares = {name: count / lines.total() for name, count in lines.items()}
    assert {name: share for name, share in shares.items() if share > MAX_SHARE} == {}
