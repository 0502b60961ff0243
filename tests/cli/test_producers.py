"""Programs that write a checkpoint into a pipe, in all the ways that people do, and the command that reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stream_pack

pytestmark = pytest.mark.slow  # each starts torch in a process of its own

MAKE = "import sys, torch; sd = {'a': torch.arange(5.0), 't': torch.arange(6.0).reshape(2, 3).t()}; "
TENSORS = {"a": torch.arange(5.0), "t": torch.arange(6.0).reshape(2, 3).t()}


def piped(program: str, target: Path, **environment: str) -> tuple[int, subprocess.CompletedProcess[bytes]]:
    """``python -c program | stream-pack convert - target``: the producer's exit code, and the command that ended."""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
    ) as producer:
        command = [sys.executable, "-m", "stream_pack", "convert", "--quiet", "-", str(target)]
        done = subprocess.run(command, stdin=producer.stdout, capture_output=True, check=False)
        assert producer.stdout is not None
        producer.stdout.close()
    return producer.returncode, done


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_torch_saves_into_stdout(tmp_path: Path, unbuffered: str, legacy: bool) -> None:
    """PT#7736: a checkpoint through a pipe, which torch itself cannot load."""
    save = f"torch.save(sd, sys.stdout.buffer, _use_new_zipfile_serialization={not legacy})"
    code, done = piped(MAKE + save, tmp_path / "pack", PYTHONUNBUFFERED=unbuffered)
    assert (code, done.returncode) == (0, 0), done.stderr
    found = stream_pack.load_file(tmp_path / "pack")
    assert list(found) == list(TENSORS)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_torch_saves_into_the_path_of_stdout(tmp_path: Path) -> None:
    code, done = piped(MAKE + "torch.save(sd, '/dev/stdout')", tmp_path / "pack")
    assert (code, done.returncode) == (0, 0), done.stderr
    assert torch.equal(stream_pack.load_file(tmp_path / "pack")["t"], TENSORS["t"])


def test_a_producer_that_fails_on_the_way_leaves_no_pack(tmp_path: Path) -> None:
    """Into the path of stdout torch fails as soon as a tensor has no bytes."""
    program = MAKE + "torch.save({**sd, 'e': torch.empty(0), 'z': torch.ones(3)}, '/dev/stdout')"
    code, done = piped(program, tmp_path / "pack")
    assert code != 0
    assert done.returncode == 3
    assert done.stderr.startswith(b"stream-pack: error: stdin: ")
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_the_producer_swallows_is_found(tmp_path: Path) -> None:
    """What cannot be pickled fails while torch already writes; it still closes the archive, without a pickle."""
    program = MAKE + "\ntry: torch.save({**sd, 'f': lambda: 0}, sys.stdout.buffer)\nexcept Exception: pass"
    code, done = piped(program, tmp_path / "pack")
    assert code == 0
    assert done.returncode == 3
    assert list(tmp_path.iterdir()) == []


def test_a_line_printed_before_the_checkpoint_is_shown(tmp_path: Path) -> None:
    program = MAKE + "print('loading...', flush=True); torch.save(sd, sys.stdout.buffer)"
    _, done = piped(program, tmp_path / "pack")
    assert done.returncode == 3
    assert b"loading..." in done.stderr
