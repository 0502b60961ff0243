"""The blocks of a Markdown page, and a folder in which its commands and programs run.

"python" and "stream-pack" are those of this interpreter, "host" is this machine.  "make" and "pip" say what they would
do: a target that the Makefile does not have, or an extra that setup.cfg does not have, fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Block", "Workshop", "blocks_of", "commands_of", "needs_executorch"]

ROOT = Path(__file__).parent.parent.parent

_STREAM_PACK = """#!{python}
import sys
from stream_pack.cli import main
sys.exit(main())
"""
_PIP = """#!{python}
import configparser, re, sys
config = configparser.ConfigParser()
config.read({root!r} + "/setup.cfg")
command, package = sys.argv[1:]
extras = re.fullmatch(r"[.](?:\\[(.*)\\])?", package)[1]
assert command == "install"
assert set((extras or "test").split(",")) <= set(config["options.extras_require"]), extras
"""
_PROGRAMS = {
    "make": '#!/bin/sh\nexec "{make}" --dry-run -C "{root}" "$@" >/dev/null\n',
    "pip": _PIP,
    "python": '#!/bin/sh\nexec "{python}" "$@"\n',
    "ssh": '#!/bin/sh\nshift\nexec "$@"\n',
    "stream-pack": _STREAM_PACK,
}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str


def blocks_of(page: str) -> list[Block]:
    """Those of a page in the project's folder, in its order; of docs/python.md those above the reference."""
    by_hand = (ROOT / page).read_text().partition("\n## Reference\n")[0]
    found = re.findall(r"^```(\w+)\n(.*?)^```$", by_hand, re.MULTILINE | re.DOTALL)
    return [Block(language, text) for language, text in found]


def commands_of(console: str) -> list[tuple[str, str]]:
    """The commands of a ``console`` block, each with the output shown below it."""
    return re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", console, re.MULTILINE)


def needs_executorch(block: Block) -> bool:
    """Whether a block is for ``tests/executorch/test_docs.py``."""
    return "from executorch" in block.text or "export_llama" in block.text


class Workshop:
    """A folder to run blocks in, one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder.with_name(f"{folder.name}-programs")
        programs.mkdir()
        names = {"python": sys.executable, "root": str(ROOT), "make": shutil.which("make")}
        for name, script in _PROGRAMS.items():
            path = programs / name
            path.write_text(script.format(**names))
            path.chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }

    def run(self, block: Block) -> str:
        """What a block of commands or a program prints.  Raises: AssertionError if it fails."""
        shell = ["bash", "-e", "-o", "pipefail", "-c"]
        commands = {"sh": shell, "console": shell, "python": ["python", "-c"]}
        result = subprocess.run(
            [*commands[block.language], block.text],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert result.returncode == 0, f"{block.text}\n{result.stdout}"
        return result.stdout
