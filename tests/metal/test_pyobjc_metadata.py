"""Selectors, their types and Apple's numbers, compared with what pyobjc took from Apple's headers.

The macOS wheels are downloaded as packages and read as text; nothing of them is installed or run.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import zipfile
from typing import Any

import pytest

from stream_pack.metal import device
from stream_pack.metal.objc import MESSAGES
from stream_pack.metal.rules import MPS_DATA_TYPES
from tests.metal.standin import BLIT_MESSAGES, COMPLETED

VERSION = "12.2.2"
PACKAGES = {
    "pyobjc-framework-Metal": "Metal",
    "pyobjc-framework-MetalPerformanceShaders": "MetalPerformanceShaders",
    "pyobjc-framework-MetalPerformanceShadersGraph": "MetalPerformanceShadersGraph",
}
FOUNDATION = {
    "UTF8String", "drain", "new", "release", "respondsToSelector:", "retain",
}  # fmt: skip
"""Messages that are no business of Metal's, and that its metadata does not have."""


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The text of each framework's metadata."""
    folder = tmp_path_factory.mktemp("wheels")
    download = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder),
            *("--platform", "macosx_11_0_universal2", "--platform", "macosx_10_13_universal2"),
            *("--only-binary=:all:", "--python-version", "3.12", "--retries", "1", "--timeout", "20"),
            *(f"{package}=={VERSION}" for package in PACKAGES),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if download.returncode:
        pytest.skip(f"pyobjc's wheels cannot be downloaded: {download.stderr.strip()[-200:]}")
    texts = {}
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith("/_metadata.py"):
                    texts[name.partition("/")[0]] = archive.read(name).decode()
    assert set(texts) == set(PACKAGES.values())
    return texts


def enums(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"\$(\w+)@(-?\d+)(?=\$)", text)}


@functools.cache
def methods(text: str) -> dict[str, dict[str, Any]]:
    """What is registered for each selector."""
    found: dict[str, dict[str, Any]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "r" and len(node.args) == 3:
            try:
                _, selector, about = (ast.literal_eval(argument) for argument in node.args)
            except ValueError:
                continue  # types that are spelled as expressions
            found.setdefault(selector.decode(), {}).update(about)
    return found


def encoding(about: dict[str, Any]) -> str:
    """Result and arguments, as our tables write them."""

    def one(part: dict[str, Any]) -> str:
        if "callable" in part:
            return "@?"
        kind = part["type"]
        return kind if isinstance(kind, str) else str(kind.decode())

    arguments = about.get("arguments", {})
    return one(about["retval"]) + "".join(one(arguments[at]) for at in sorted(arguments))


@pytest.mark.parametrize("selector", sorted((MESSAGES | BLIT_MESSAGES).keys() - FOUNDATION))
def test_every_message_has_the_types_of_apples_headers(metadata: dict[str, str], selector: str) -> None:
    about = methods(metadata["Metal"])[selector]
    ours = (MESSAGES | BLIT_MESSAGES)[selector]
    # Enumerations are signed or not as their headers happen to say; the register is the same.
    assert encoding(about).replace("q", "Q") == ours.replace("q", "Q")


def test_the_deallocator_takes_a_pointer_and_a_length_and_returns_nothing(metadata: dict[str, str]) -> None:
    about = methods(metadata["Metal"])["newBufferWithBytesNoCopy:length:options:deallocator:"]
    block = about["arguments"][5]["callable"]
    assert block["retval"] == {"type": b"v"}
    # The first argument is the block itself; "n" says that the pointer is only read.
    assert [block["arguments"][at]["type"] for at in (0, 1, 2)] == [b"^v", b"n^v", b"Q"]


def test_the_default_device_comes_retained(metadata: dict[str, str]) -> None:
    found = re.search(r'"MTLCreateSystemDefaultDevice": \((.*?)\),\n', metadata["Metal"], re.DOTALL)
    assert found is not None
    kind, _, about = ast.literal_eval(f"({found[1]})")
    assert kind == b"@"
    assert about["retval"]["already_cfretained"] is True


def test_metals_numbers_are_apples(metadata: dict[str, str]) -> None:
    numbers = enums(metadata["Metal"])
    assert numbers["MTLResourceStorageModeShared"] == device.STORAGE_MODE_SHARED
    assert numbers["MTLResourceCPUCacheModeDefaultCache"] == 0
    assert numbers["MTLGPUFamilyApple7"] == device.FAMILY_APPLE7
    assert numbers["MTLCommandBufferStatusCompleted"] == COMPLETED


def test_every_mps_data_type_has_apples_number(metadata: dict[str, str]) -> None:
    names = {"complex32": "ComplexFloat16", "complex64": "ComplexFloat32", "bfloat16": "BFloat16"}
    numbers = enums(metadata["MetalPerformanceShaders"])
    for dtype, number in MPS_DATA_TYPES.items():
        name = names.get(dtype, dtype.capitalize().replace("Uint", "UInt"))
        assert numbers[f"MPSDataType{name}"] == number, dtype


def test_mps_has_no_float64(metadata: dict[str, str]) -> None:
    assert "MPSDataTypeFloat64" not in enums(metadata["MetalPerformanceShaders"])


def test_tensor_data_of_a_graph_takes_no_offset(metadata: dict[str, str]) -> None:
    text = metadata["MetalPerformanceShadersGraph"]
    selectors = re.findall(r'"MPSGraphTensorData", b"(initWithMTLBuffer:[\w:]*)"', text)
    assert sorted(selectors) == ["initWithMTLBuffer:shape:dataType:", "initWithMTLBuffer:shape:dataType:rowBytes:"]
