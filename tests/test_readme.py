"""Every command and every program in the README runs, in the order in which it stands there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import safetensors.torch
import torch

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "tests" / "vectors" / "executorch" / "mps" / "linear_fp16.pte"
BLOCKS = re.findall(
    r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
)

TRAIN = """
import sys, torch
torch.save(torch.load("model.pt"), sys.stdout.buffer)
"""


# Where there is no Metal, the tests' stand-in for its runtime serves.
METAL = """
from stream_pack.metal import objc
from tests.metal.standin import StandIn
objc.native = lambda standin=StandIn(): standin.runtime
"""


def needs_executorch(block: str) -> bool:
    """Whether a block is for ``tests/executorch/test_readme.py``."""
    return "executorch" in block or "export_llama" in block


def put_program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(script)
    path.chmod(0o755)


def test_every_block_of_the_readme_runs(tmp_path: Path) -> None:
    embedding = torch.arange(64.0).reshape(16, 4)
    state = {"embedding.weight": embedding, "head.weight": embedding, "step": torch.tensor(7)}
    torch.save(state, tmp_path / "model.pt")
    # safetensors refuses tied tensors.
    alone = {"embedding.weight": embedding, "step": torch.tensor(7)}
    safetensors.torch.save_file(alone, tmp_path / "model.safetensors")
    (tmp_path / "train.py").write_text(TRAIN)
    shutil.copy(PROGRAM, tmp_path / "program.pte")
    # "python" is this interpreter, and "host" this machine.
    programs = tmp_path / "programs"
    put_program(programs, "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    put_program(programs, "ssh", '#!/bin/sh\nshift\nexec "$@"\n')
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(ROOT)
    commands = {"sh": ["bash", "-e", "-o", "pipefail", "-c"], "python": ["python", "-c"]}
    for language, block in BLOCKS:
        if language == "text" or needs_executorch(block):
            continue
        if "stream_pack.metal" in block and language == "python" and sys.platform != "darwin":
            block = METAL + block
        result = subprocess.run(
            [*commands[language], block],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, f"{block}\n{result.stdout}{result.stderr}"
    assert {"model.pack", "copy.pack", "small.pack"} <= {path.name for path in tmp_path.iterdir()}


def test_the_readme_shows_commands_and_programs() -> None:
    languages = [language for language, _ in BLOCKS]
    assert set(languages) == {"text", "sh", "python"}
    assert languages.count("sh") >= 2
