"""A script for safetensors runs on packs when its import is changed; docs/python.md lists what it sees of that."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

import stream_pack
from tests.support.documents import ROOT

IMPORTS = """
from {0} import SafetensorError, safe_open
from {0}.torch import load, load_file, load_model, save, save_file, save_model
from {0} import numpy as arrays
"""

SETUP = """
import os, pathlib, numpy, torch

class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

torch.manual_seed(0)
plain, other, tied, untied = Plain(), Plain(), Tied(), Tied()
base = torch.arange(24.0).reshape(4, 6)
state = {"b": base, "a": torch.arange(6).to(torch.bfloat16), "flags": torch.tensor([True, False]),
         "scalar": torch.tensor(2.5, dtype=torch.float64), "empty": torch.empty(0, 3), "half": base.half()}
plain_arrays = {"b": numpy.arange(6.0).reshape(2, 3), "i": numpy.arange(4), "empty": numpy.empty((0, 2), numpy.int8)}
notes = {"format": "pt", "step": "7"}
save_file(state, "m", notes)
arrays.save_file(plain_arrays, "n", notes)
save_model(plain, "plain")
save_model(tied, "tied")
pathlib.Path("junk").write_bytes(b"x" * 100)
opened = safe_open("m", framework="pt", device="cpu")
in_numpy = safe_open("n", "np")
part = opened.get_slice("b")
"""

CALLS = """
save_file(state, "s1")
save_file(state, "s2", notes)
save_file(state, "s3", metadata=notes)
save_file(tensors=state, filename="s4", metadata=None)
save_file(state, pathlib.Path("s5"))
save_file({}, "s6")
save_file({"t": base, "u": base}, "s7")
save_file({"t": base.t()}, "s8")
save_file({"t": base[:, 1]}, "s9")
save_file({"t": 1}, "s10")
save_file([base], "s11")
save_file({"t": base.to_sparse()}, "s12")
save_file(state, "no/folder")
save_file(state, "s13", {"step": 7})
load_file("m")
load_file("m", "cpu")
load_file("m", device="cpu")
load_file(filename="m")
load_file(pathlib.Path("m"))
load_file("m", device="meta")
load_file("m", device=torch.device("cpu"))
load_file("m", backend="mmap")
load_file("m", backend="pread")
load_file("m", backend="other")
load_file("m", device="other")
load_file("nothing")
load_file("junk")
list(load_file("m"))
load_file("m")["b"].add_(1)
load(save(state))
load(save(state, notes))
load(save(tensors=state, metadata=notes))
load(data=save(state))
load(save({}))
load(save(state))["b"].add_(1)
type(save(state))
load(b"")
load(b"x" * 100)
load("text")
save_model(plain, "p1")
save_model(plain, "p2", notes)
save_model(plain, filename="p3", metadata=notes, force_contiguous=True)
save_model(plain, "p4", None, False)
save_model(tied, "t1")
safe_open("tied", "pt").keys()
load_model(other, "plain")
load_model(other, pathlib.Path("plain"))
load_model(model=other, filename="plain", strict=True, device="cpu")
load_model(other, "plain", False)
load_model(other, "plain", True, "cpu", backend="pread")
(load_model(other, "plain"), other.state_dict())
(load_model(untied, "tied"), untied.state_dict())
load_model(untied, "tied") and untied.head.weight is untied.embed.weight
load_model(other, "tied")
sorted(load_model(other, "tied", strict=False)[0])
sorted(load_model(other, "tied", strict=False)[1])
safe_open("m", "pt").keys()
safe_open("m", framework="torch").keys()
safe_open(filename="m", framework="pt", device="cpu", backend="mmap").keys()
safe_open("m", "pt", "cpu", backend="pread").keys()
safe_open("m", "pt", backend="other")
safe_open("m", "other")
safe_open("n", "numpy", device="cuda")
safe_open("nothing", "pt")
safe_open("junk", "pt")
safe_open("n", "mlx").get_tensor("b")
safe_open("m", "mlx").get_tensor("a")
safe_open("m", "mlx").get_slice("half")[1:3]
opened.metadata()
sorted(opened.offset_keys())
opened.offset_keys()
opened.get_tensor("b")
opened.get_tensor(name="a")
opened.get_tensor("nothing")
opened.get_tensors()
opened.get_slice("nothing")
part.get_shape()
part.get_dtype()
part[1:3]
part[:, 2:5]
part[0]
part[..., 1]
part[2, 3:4]
part[-1]
in_numpy.get_tensor("b")
in_numpy.get_slice("b")[:, 1:]
arrays.save_file(plain_arrays, "a1")
arrays.save_file(tensor_dict=plain_arrays, filename="a2", metadata=notes)
arrays.save_file({"f": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3))}, "a3") or arrays.load_file("a3")
arrays.load_file("n")
arrays.load_file(filename="n", backend="pread")
arrays.load(arrays.save(plain_arrays))
arrays.load(data=arrays.save(tensor_dict=plain_arrays, metadata=notes))
""".strip().splitlines()

HAS_MLX = importlib.util.find_spec("mlx") is not None
if HAS_MLX:  # safetensors finds MLX and bfloat16 only when their packages are loaded
    SETUP += "import ml_dtypes, mlx.core"
else:
    CALLS = [call for call in CALLS if "mlx" not in call]


def seen(value: Any) -> Any:
    """What a script sees of a result, as something to compare."""
    if isinstance(value, torch.Tensor):
        values = b"" if value.is_meta else value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return "tensor", str(value.dtype), tuple(value.shape), value.device.type, values
    if type(value).__module__.startswith("mlx"):
        return "mlx", str(value.dtype), tuple(value.shape), bytes(memoryview(value.view(value.dtype)))
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.flags.writeable, value.tobytes()
    if isinstance(value, dict):
        return {name: seen(held) for name, held in value.items()}
    if isinstance(value, set):  # of load_model, whose annotation says list
        return sorted(value)
    if isinstance(value, list | tuple):
        return [seen(held) for held in value]
    return value


def run(library: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each call gives: a value, or the error that it raises."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(IMPORTS.format(library) + SETUP, names)
    outcomes: dict[str, Any] = {}
    for call in CALLS:
        try:
            outcomes[call] = seen(eval(call, names))
        except Exception as error:
            outcomes[call] = error
    return outcomes


def same(theirs: Any, ours: Any) -> bool:
    """Whether a script that catches what safetensors raises also catches what we do, or both give the same."""
    if isinstance(theirs, safetensors.SafetensorError):
        return isinstance(ours, stream_pack.SafetensorError)
    if isinstance(theirs, Exception):
        return isinstance(ours, type(theirs))
    return bool(theirs == ours)


def listed_differences() -> list[str]:
    text = (ROOT / "docs" / "python.md").read_text()
    table = text.partition("| call | safetensors | stream_pack |")[2].partition("\n\n")[0]
    return [call.replace("\\|", "|") for call in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)]


@pytest.mark.filterwarnings("ignore:.*Sparse")
def test_a_script_sees_the_same_but_for_the_listed_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(CALLS) >= 91 - 3 * (not HAS_MLX)
    theirs = run("safetensors", tmp_path / "theirs", monkeypatch)
    ours = run("stream_pack", tmp_path / "ours", monkeypatch)
    different = [call for call in CALLS if not same(theirs[call], ours[call])]
    assert sorted(different) == sorted(listed_differences()), [(c, theirs[c], ours[c]) for c in different]
    errors = [value for value in ours.values() if isinstance(value, Exception)]
    assert not [error for error in errors if isinstance(error, TypeError | AttributeError)]


FUNCTIONS = [
    *((safetensors.torch, stream_pack.torch, name) for name in ("save_file", "load_file", "save", "load")),
    *((safetensors.torch, stream_pack.torch, name) for name in ("save_model", "load_model")),
    *((safetensors.numpy, stream_pack.numpy, name) for name in ("save_file", "load_file", "save", "load")),
]


@pytest.mark.parametrize(("theirs", "ours", "name"), FUNCTIONS)
def test_parameters_have_the_names_order_and_defaults_of_safetensors(
    theirs: ModuleType, ours: ModuleType, name: str
) -> None:
    wanted = inspect.signature(getattr(theirs, name)).parameters
    found = inspect.signature(getattr(ours, name)).parameters

    def form(parameter: inspect.Parameter) -> object:
        return parameter.name, parameter.kind, parameter.default

    assert list(map(form, found.values()))[: len(wanted)] == list(map(form, wanted.values()))
    assert {found[extra].kind for extra in found.keys() - wanted.keys()} <= {inspect.Parameter.KEYWORD_ONLY}


def test_safe_open_has_the_parameters_of_safetensors() -> None:
    wanted = inspect.signature(safetensors.safe_open).parameters
    found = inspect.signature(stream_pack.safe_open).parameters
    assert [(p.name, p.kind) for p in found.values()] == [(p.name, p.kind) for p in wanted.values()]
