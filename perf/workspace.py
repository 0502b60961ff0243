"""Files to measure with, on the disk that the project stands on (a temporary folder may be memory)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cached_property
from pathlib import Path
from types import TracebackType

import safetensors.torch
import torch

import stream_pack

__all__ = ["PYTHON", "Workspace", "environment", "shell"]

PYTHON = sys.executable
ROOT = Path(__file__).parent.parent


class Workspace:
    """A temporary folder with inputs that are made when first asked for.

    ``nbytes`` is the length of the large inputs, in 32 tensors of float32.
    """

    def __init__(self, *, nbytes: int) -> None:
        self.nbytes = nbytes
        self._folder = tempfile.TemporaryDirectory(dir=ROOT, prefix=".perf-")

    def path(self, name: str) -> Path:
        """A path in the folder."""
        return Path(self._folder.name) / name

    def tensors(self, count: int = 32) -> dict[str, torch.Tensor]:
        """``count`` tensors of random numbers, ``nbytes`` in all."""
        generator = torch.Generator().manual_seed(0)
        numel = self.nbytes // 4 // count
        return {f"layers.{k}.weight": torch.randn(numel, generator=generator) for k in range(count)}

    @cached_property
    def checkpoint(self) -> Path:
        """What torch.save makes of :meth:`tensors`."""
        path = self.path("model.pt")
        torch.save(self.tensors(), path)
        return path

    @cached_property
    def safetensors(self) -> Path:
        """The same as a safetensors file."""
        path = self.path("model.safetensors")
        safetensors.torch.save_file(self.tensors(), path)
        return path

    @cached_property
    def pack(self) -> Path:
        """The same as a pack."""
        path = self.path("model.pack")
        stream_pack.save_file(self.tensors(), path)
        return path

    def many(self, count: int) -> tuple[Path, Path]:
        """A pack and a safetensors file of ``count`` tensors of 1 KiB."""
        pack, other = self.path(f"{count}.pack"), self.path(f"{count}.safetensors")
        if not pack.exists():
            tensors = {f"layers.{k}.weight": torch.full((256,), float(k)) for k in range(count)}
            stream_pack.save_file(tensors, pack)
            safetensors.torch.save_file(tensors, other)
        return pack, other

    def clear(self, *names: str) -> None:
        """Remove targets, and let the disk finish what it has been given before."""
        for name in names:
            self.path(name).unlink(missing_ok=True)
        os.sync()

    def drop(self) -> None:
        """Forget the large inputs: they are made again when asked for."""
        for name in ("checkpoint", "safetensors", "pack"):
            path = self.__dict__.pop(name, None)
            if path is not None:
                path.unlink()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._folder.cleanup()


def environment(**variables: Path) -> dict[str, str]:
    """This process's, without what keeps Python from using compiled modules and buffers as it does by default."""
    unwanted = {"PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**kept, **{name: str(path) for name, path in variables.items()}}


def shell(script: str, **paths: Path) -> None:
    """Run a line of shell, whose variables are ``paths``."""
    subprocess.run(["bash", "-e", "-o", "pipefail", "-c", script], env=environment(**paths), check=True)
