"""The pages in docs/: their blocks run, their links lead somewhere, and the reference is that of the code."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import re
import runpy
import shutil
import sys
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch

import stream_pack
from stream_pack import errors
from stream_pack.format.names import Names
from tests.support.documents import ROOT, Block, Workshop, blocks_of, needs_executorch

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
PROGRAM = ROOT / "tests" / "vectors" / "executorch" / "mps" / "linear_fp16.pte"

# Where there is no Metal, the tests' stand-in for its runtime serves, and the CPU computes with the buffers' bytes.
WITHOUT_METAL = """
import ctypes, torch
from stream_pack.metal import interop, objc
from tests.metal.standin import StandIn

def to_torch(view):
    memory = (ctypes.c_char * view.nbytes).from_address(view.buffer.contents() + view.offset)
    return torch.frombuffer(memory, dtype=getattr(torch, view.dtype)).reshape(view.shape)

objc.native = lambda standin=StandIn(): standin.runtime
interop.to_torch = to_torch
torch.mps.synchronize = lambda: None
"""


# docs/adding-a-source.md: the source is a module that the next blocks import, and the last block is a test of it.
AS_FILES = {"class NpySource(": "npy_source.py", "class TestNpy(": "test_npy.py"}


def prepared(block: Block) -> Block:
    if "stream_pack.metal" not in block.text or block.language != "python":
        return block
    if sys.platform == "darwin":
        return block
    return Block("python", WITHOUT_METAL + block.text.replace('device="mps"', 'device="cpu"'))


@pytest.mark.slow  # a process for each block; the README's run always
@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_runs(page: str, tmp_path: Path) -> None:
    workshop = Workshop(tmp_path)
    embedding = torch.arange(64.0).reshape(16, 4)
    torch.save({"embedding.weight": embedding}, tmp_path / "model.pt")
    stream_pack.save_file({"embedding.weight": embedding}, tmp_path / "model.pack")
    shutil.copy(PROGRAM, tmp_path / "program.pte")
    (tmp_path / "sharded").mkdir()
    told = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0, 0]}})}
    safetensors.torch.save_file({"w": embedding}, tmp_path / "sharded" / "shard-00001.safetensors", told)
    for block in blocks_of(page):
        for beginning, name in AS_FILES.items():
            if beginning in block.text:
                (tmp_path / name).write_text(block.text)
        if block.language in ("python", "sh") and not needs_executorch(block):
            workshop.run(prepared(block))
    if (tmp_path / "test_npy.py").exists():
        command = "python -m pytest -q -p no:cacheprovider --rootdir=. test_npy.py"
        assert " passed" in workshop.run(Block("sh", command))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *PAGES])
def test_every_link_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    anchors = {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        if path:
            assert ((ROOT / page).parent / path).exists(), target
        else:
            # The second heading that differs from another in case only has a number: forecast, Forecast.
            assert re.sub(r"-1$", "", anchor) in anchors, target


@pytest.mark.skipif(sys.version_info < (3, 11), reason="griffe2md needs Python 3.11")
def test_the_reference_is_what_make_docs_makes_now() -> None:
    made: str = runpy.run_path(str(ROOT / "docs" / "reference.py"))["reference"]()
    assert (ROOT / "docs" / "python.md").read_text().endswith(made), "run `make docs`"


@pytest.mark.parametrize(
    "module",
    ["stream_pack", *(f"stream_pack.{name}" for name in ("torch", "numpy", "metal", "metal.interop", "executorch"))],
)
def test_the_reference_has_every_public_name(module: str) -> None:
    text = (ROOT / "docs" / "python.md").read_text()
    names = set(importlib.import_module(module).__all__) - {"executorch", "metal", "numpy", "torch", "__version__"}
    names.discard("SafetensorError")  # another name of StreamPackError, which has the text
    headings = set(re.findall(rf"^### `{re.escape(module)}\.(\w+)`$", text, re.MULTILINE))
    assert headings == names


def test_troubleshooting_explains_every_error_class_and_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    classes = set(errors.__all__) - {"SourceError", "FormatError", "MetalError", "ChecksumError"}
    explained = set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))
    assert explained == classes - {"StreamPackError", "SafetensorError"}
    for base in ("SourceError", "FormatError", "MetalError", "ChecksumError", "StreamPackError"):
        assert re.search(rf"`{base}`", text)

    from stream_pack.cli import main

    main(["--help"])
    _, _, codes = capsys.readouterr().out.partition("exit codes:\n")
    shown = set(re.findall(r"\d+", " ".join(re.findall(r"^  (\d[\d (),]*)", codes, re.MULTILINE))))
    rows = re.findall(r"^\| (\d[\d, ]*) \|", text, re.MULTILINE)
    assert set(re.findall(r"\d+", " ".join(rows))) == shown


def test_the_picture_is_an_svg_for_light_and_dark_pages() -> None:
    text = (ROOT / "docs" / "flow.svg").read_text()
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in text


def test_what_the_readme_says_of_other_formats_is_so(tmp_path: Path) -> None:
    values = torch.arange(5000.0)
    # torch.save: tensors at multiples of 64; its CRC-32 is not checked, mapped or not; ties are stored once.
    path = tmp_path / "model.pt"
    torch.save({"a": values, "b": values, "c": torch.ones(3)}, path)
    data = path.read_bytes()
    assert data.find(values.numpy().tobytes()) % 64 == 0
    assert path.stat().st_size < 2 * values.nbytes
    path.write_bytes(data.replace(values.numpy().tobytes(), bytes(values.nbytes)))
    for mmap in (False, True):
        assert not torch.load(path, mmap=mmap)["a"].any()
    # safetensors: ties are refused, and no checksum finds damage.
    path = tmp_path / "model.safetensors"
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.torch.save_file({"a": values, "b": values}, path)
    safetensors.torch.save_file({"a": values, "b": torch.ones(3, dtype=torch.bfloat16)}, path)
    data = path.read_bytes()
    assert data.find(values.numpy().tobytes()) % 256  # the header's length decides where they start
    path.write_bytes(data.replace(values.numpy().tobytes(), bytes(values.nbytes)))
    assert not safetensors.torch.load_file(path)["a"].any()
    # GGUF: 32 bytes unless a file says otherwise.
    assert gguf.GGUF_DEFAULT_ALIGNMENT == 32
    # What safetensors hands to NumPy is a copy.
    with safetensors.safe_open(path, "np") as file:
        first, second = file.get_tensor("a"), file.get_tensor("a")
    assert not np.shares_memory(first, second)


def test_every_place_that_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("| go to |")[2].partition("\n## ")[0]
    folder = ROOT / "stream_pack"
    for row in table.splitlines():
        beside = folder
        for place in re.findall(r"`([\w/]+(?:/|\.py|\.fbs))`", row):
            # Below the package, or beside the one named before it.
            path = folder / place if (folder / place).exists() else beside / place
            assert path.exists(), place
            beside = path.parent


PACKAGES = sorted(
    path.parent.relative_to(ROOT).as_posix()
    for path in (ROOT / "stream_pack").rglob("__init__.py")
    if "schema" not in path.parts
)


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_a_package_says_what_its_modules_are_for(package: str) -> None:
    """The docstring of ``__init__`` names every module and package in it."""
    text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""
    inside = {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__"}
    inside |= {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    named = re.findall(r"``([\w*]+)``", text)
    assert {name for name in inside if not any(fnmatch(name, known) for known in named)} == set()
    assert len(text.splitlines()) <= 20


def modules_of(section: str) -> list[str]:
    """The modules in the table below a heading of docs/how-it-works.md."""
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    _, _, below = text.partition(f"\n## {section}\n")
    return re.findall(r"^\| `([\w.]+)` \|", below.partition("\n## ")[0], re.MULTILINE)


class Followed:
    """The modules that hand on something that ``wanted`` knows, in all threads: first those that return or yield it, in
    the order in which they do, then those that only take it.
    """

    def __init__(self, wanted: Callable[[object], bool]) -> None:
        self._gave: list[str] = []
        self._took: list[str] = []
        self._wanted = wanted

    @property
    def modules(self) -> list[str]:
        once = [name for name, _ in itertools.groupby(self._gave)]
        return once + [name for name in dict.fromkeys(self._took) if name not in once]

    @property
    def takers(self) -> list[str]:
        return [name for name, _ in itertools.groupby(self._took)]

    def __call__(self, frame: FrameType, event: str, value: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("stream_pack."):
            return
        name = module.removeprefix("stream_pack.")
        if event == "return" and self._wanted(value):
            self._gave.append(name)
        if event == "call":
            arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
            if any(self._wanted(frame.f_locals.get(argument)) for argument in arguments):
                self._took.append(name)

    def __enter__(self) -> Followed:
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def test_a_chunk_passes_through_the_modules_that_are_named_each_once(tmp_path: Path) -> None:
    values = torch.arange(3000.0)
    safetensors.torch.save_file({"a": values}, tmp_path / "a.safetensors")

    def is_chunk(value: object) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(is_chunk, value))
        return isinstance(value, (bytes, memoryview)) and len(value) in (12000, 6000)

    # Imports come first: what loads modules also hands on bytes.
    stream_pack.convert(tmp_path / "a.safetensors", tmp_path / "a.pack", jobs=2, dtype="f16")
    with Followed(is_chunk) as followed:
        stream_pack.convert(tmp_path / "a.safetensors", tmp_path / "a.pack", jobs=2, dtype="f16")
    assert followed.modules == modules_of("The way of one chunk")


def test_a_name_passes_through_the_modules_that_are_named_each_once(tmp_path: Path) -> None:
    safetensors.torch.save_file({"wanted": torch.arange(3000.0)}, tmp_path / "a.safetensors")

    def has_name(value: object) -> bool:
        if isinstance(value, Names):
            return hasattr(value, "column") and has_name(value.column.values.tobytes())
        if isinstance(value, (list, tuple)):
            return any(map(has_name, value))
        if isinstance(value, (bytes, bytearray, memoryview)):
            return len(value) < 10_000 and b"wanted" in bytes(value)
        return value == "wanted" if isinstance(value, str) else False

    stream_pack.convert(tmp_path / "a.safetensors", tmp_path / "a.pack", jobs=1)
    with Followed(has_name) as followed:
        stream_pack.convert(tmp_path / "a.safetensors", tmp_path / "a.pack", jobs=1)
    # Two look at the bytes that the name is in, and not at the name; one is the column itself.
    aside = ("format.file_kinds", "format.checksum", "format.names")
    takers = [name for name, _ in itertools.groupby(name for name in followed.takers if name not in aside)]
    named = modules_of("The way of one name")
    assert [name for name in named if name != "pipeline.adapt.select"] == takers
