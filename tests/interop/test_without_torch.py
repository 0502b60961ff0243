"""The package where torch is not installed: all that does not take or give torch objects works."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch

import stream_pack

pytestmark = pytest.mark.slow  # an environment of its own, with packages from the network

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("flatbuffers", "ml_dtypes", "mmap-ninja", "numpy", "safetensors", "xxhash")
TENSORS = {
    "norm": torch.linspace(-3, 3, 50),
    "transposed": torch.arange(600, dtype=torch.float16).reshape(20, 30).T,
    "small": torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "rounded": torch.linspace(0, 1, 33).to(torch.bfloat16),
    "count": torch.tensor(7),
}


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with this package and what it needs, but for torch."""
    folder = tmp_path_factory.mktemp("environment")
    copy = folder / "copy"
    shutil.copytree(REPOSITORY / "stream_pack", copy / "stream_pack")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy)
    run(sys.executable, "-m", "venv", folder / "venv").check_returncode()
    interpreter = folder / "venv" / "bin" / "python"
    pip = (interpreter, "-m", "pip", "install", "--quiet", "--timeout", "15", "--retries", "1", "--no-deps")
    done = run(*pip, "-c", REPOSITORY / "constraints.txt", *PACKAGES)
    if done.returncode:
        pytest.skip(f"the packages cannot be downloaded here: {(done.stderr.strip().splitlines() or [''])[-1]}")
    done = run(*pip, copy)
    assert done.returncode == 0, done.stderr
    assert run(interpreter, "-c", "import torch").returncode == 1
    return interpreter


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def source_of(kind: str, folder: Path) -> Path:
    path = folder / "source"
    if kind == "safetensors":
        safetensors.torch.save_file({name: t.contiguous() for name, t in TENSORS.items()}, path)
    elif kind == "gguf":
        writer = gguf.GGUFWriter(path, "llama")
        for name in ("norm", "transposed"):
            writer.add_tensor(name, TENSORS[name].contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    else:
        torch.save(TENSORS, path, _use_new_zipfile_serialization=kind == "torch zip")
    return path


@pytest.mark.parametrize("kind", ["torch zip", "torch legacy", "safetensors", "gguf"])
def test_files_are_converted_verified_and_inspected(kind: str, python: Path, tmp_path: Path) -> None:
    source, target = source_of(kind, tmp_path), tmp_path / "target"
    command = (python, "-m", "stream_pack")
    for arguments in (("convert", source, target), ("verify", target), ("inspect", target, "--json")):
        done = run(*command, *arguments)
        assert done.returncode == 0, done.stderr
    for name, tensor in stream_pack.load_file(target).items():
        assert tensor.dtype == TENSORS[name].dtype
        assert bytes_of(tensor) == bytes_of(TENSORS[name])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_floats_are_cast_as_torch_casts_them(dtype: str, python: Path, tmp_path: Path) -> None:
    source, target = source_of("torch zip", tmp_path), tmp_path / "target"
    done = run(python, "-m", "stream_pack", "convert", "--dtype", dtype, source, target)
    assert done.returncode == 0, done.stderr
    for name, tensor in stream_pack.load_file(target).items():
        if name in ("norm", "transposed", "rounded"):
            expected = TENSORS[name].to(getattr(torch, dtype)).contiguous()
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor, expected)


def test_numpy_has_every_dtype_and_torch_says_what_is_missing(python: Path, tmp_path: Path) -> None:
    names = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    tensors = {name: torch.arange(32, dtype=torch.uint8).view(getattr(torch, name)) for name in names}
    target = tmp_path / "target"
    stream_pack.save_file(tensors, target)
    program = f"""
import numpy, stream_pack
with stream_pack.open({str(target)!r}) as pack:
    for name, view in pack.items():
        array = view.numpy()
        assert array.tobytes() == bytes(range(32)) and array.dtype.name == name, (name, array.dtype)
    for call in (lambda: pack["bfloat16"].torch(), lambda: stream_pack.load_file({str(target)!r})):
        try:
            call()
        except stream_pack.MissingPackageError as error:
            print(error)
stream_pack.save_file({{"a": numpy.ones((3, 2))}}, {str(tmp_path / "new")!r}, dtype="bf16")
with stream_pack.Writer({str(tmp_path / "written")!r}, {{"b": ("bfloat16", [2])}}) as writer:
    writer.write("b", bytes(4))
"""
    done = run(python, "-W", "error", "-c", program)
    assert (done.returncode, done.stderr) == (0, "")
    message = "torch tensors need the package torch, which is not installed: pip install torch"
    assert done.stdout.count(message) == 2
    assert np.asarray(stream_pack.open(tmp_path / "new")["a"].torch().float()).tolist() == [[1, 1]] * 3
