"""What the README shows of ExecuTorch runs; its other blocks are run by ``tests/test_readme.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readme import BLOCKS, ROOT, needs_executorch, put_program

SHOWN = [block for language, block in BLOCKS if language == "python" and needs_executorch(block)]
(EXPORT_LLAMA,) = [block for language, block in BLOCKS if "export_llama" in block]


def run(argv: list[str], folder: Path) -> str:
    """What a program prints, in a folder where "python" is this interpreter."""
    (folder / "examples").symlink_to(ROOT / "examples")
    put_program(folder / "programs", "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    path = f"{folder / 'programs'}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        argv,
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"{argv[-1]}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


@pytest.mark.parametrize("block", SHOWN)
def test_a_block_of_the_readme_runs(block: str, tmp_path: Path) -> None:
    run([sys.executable, "-c", block], tmp_path)


def test_a_llama_exported_with_streamed_constants_is_byte_for_byte_what_executorch_makes(
    tmp_path: Path,
) -> None:
    printed = run(["bash", "-e", "-c", EXPORT_LLAMA], tmp_path)
    assert "the two programs are equal, byte for byte" in printed
    # One token ran through each.
    assert printed.count("next token after 1: ") == 2
