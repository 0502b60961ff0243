"""Selectors, their types and Apple's numbers, compared with what pyobjc took from Apple's headers.

``pyobjc_metadata.json`` has what is compared.  It comes from the macOS wheels, which a slow test downloads as packages
and reads as text and bytes; nothing of them is installed or run.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from stream_pack.metal import device
from stream_pack.metal.objc import MESSAGES
from stream_pack.metal.rules import MPS_DATA_TYPES
from tests.metal.standin import _HANDLERS, BLIT_MESSAGES, COMPLETED

VERSION = "12.2.2"
PACKAGES = {
    "pyobjc-core": "objc",
    "pyobjc-framework-Metal": "Metal",
    "pyobjc-framework-MetalPerformanceShaders": "MetalPerformanceShaders",
    "pyobjc-framework-MetalPerformanceShadersGraph": "MetalPerformanceShadersGraph",
}
DATA = Path(__file__).with_name("pyobjc_metadata.json")
NO_COPY = "newBufferWithBytesNoCopy:length:options:deallocator:"
FOUNDATION = {
    "UTF8String", "drain", "new", "release", "respondsToSelector:", "retain",
}  # fmt: skip
"""Messages that are no business of Metal's, and that its metadata does not have."""


ENUMS = re.compile("MPSDataType.*|MTLResourceStorageModeShared|MTLResourceCPUCacheModeDefaultCache|MTLGPUFamilyApple7|"
                   "MTLCommandBufferStatusCompleted")  # fmt: skip


def extract(folder: Path) -> dict[str, Any]:
    """What is compared, from wheels."""
    texts: dict[str, str] = {}
    core = b""
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith("/_metadata.py"):
                    texts[name.partition("/")[0]] = archive.read(name).decode()
                elif re.fullmatch(r"objc/_objc\.[^/]*\.so", name):
                    core = archive.read(name)
    assert set(texts) == set(PACKAGES.values()) - {"objc"}
    found = methods(texts["Metal"])
    functions = re.search(r'"MTLCreateSystemDefaultDevice": \((.*?)\),\n', texts["Metal"], re.DOTALL)
    assert functions is not None
    graph = re.findall(r'"MPSGraphTensorData",\s*b"(\w[\w:]*)"', texts["MetalPerformanceShadersGraph"])
    return {
        "version": VERSION,
        "methods": {s: plain(found[s]) for s in sorted(WANTED)},
        "enums": {n: v for text in texts.values() for n, v in sorted(enums(text).items()) if ENUMS.fullmatch(n)},
        "MTLCreateSystemDefaultDevice": plain(ast.literal_eval(f"({functions[1]})")),
        "MPSGraphTensorData": sorted(set(graph)),
        "objc": {
            name: re.search(rb"\b%b\b" % name.encode(), core) is not None
            for name in ("__c_void_p__", "c_void_p", "objc_object")
        },
    }


def plain(value: Any) -> Any:
    """A value that JSON has."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DATA.read_text())
    return loaded


@pytest.mark.slow  # from the network
def test_the_data_are_those_of_pyobjcs_wheels(metadata: dict[str, Any], tmp_path: Path) -> None:
    download = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path),
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
    assert extract(tmp_path) == metadata


def enums(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"\$(\w+)@(-?\d+)(?=\$)", text)}


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
        return "@?" if "callable" in part else str(part["type"])

    arguments = about.get("arguments", {})
    return one(about["retval"]) + "".join(one(arguments[at]) for at in sorted(arguments, key=int))


WANTED = (MESSAGES | BLIT_MESSAGES).keys() - FOUNDATION


@pytest.mark.parametrize("selector", sorted(WANTED))
def test_every_message_has_the_types_of_apples_headers(metadata: dict[str, Any], selector: str) -> None:
    ours = (MESSAGES | BLIT_MESSAGES)[selector]
    # Enumerations are signed or not as their headers happen to say; the register is the same.
    assert encoding(metadata["methods"][selector]).replace("q", "Q") == ours.replace("q", "Q")


def test_the_stand_in_understands_no_message_but_these() -> None:
    assert set(_HANDLERS) <= WANTED | FOUNDATION


def test_the_deallocator_takes_a_pointer_and_a_length_and_returns_nothing(metadata: dict[str, Any]) -> None:
    block = metadata["methods"][NO_COPY]["arguments"]["5"]["callable"]
    assert block["retval"] == {"type": "v"}
    # The first argument is the block itself; "n" says that the pointer is only read.
    assert [block["arguments"][at]["type"] for at in "012"] == ["^v", "n^v", "Q"]


def test_the_default_device_comes_retained(metadata: dict[str, Any]) -> None:
    kind, _, about = metadata["MTLCreateSystemDefaultDevice"]
    assert kind == "@"
    assert about["retval"]["already_cfretained"] is True


def test_metals_numbers_are_apples(metadata: dict[str, Any]) -> None:
    numbers = metadata["enums"]
    assert numbers["MTLResourceStorageModeShared"] == device.STORAGE_MODE_SHARED
    assert numbers["MTLResourceCPUCacheModeDefaultCache"] == 0
    assert numbers["MTLGPUFamilyApple7"] == device.FAMILY_APPLE7
    assert numbers["MTLCommandBufferStatusCompleted"] == COMPLETED


def test_every_mps_data_type_has_apples_number(metadata: dict[str, Any]) -> None:
    names = {"complex32": "ComplexFloat16", "complex64": "ComplexFloat32", "bfloat16": "BFloat16"}
    for dtype, number in MPS_DATA_TYPES.items():
        name = names.get(dtype, dtype.capitalize().replace("Uint", "UInt"))
        assert metadata["enums"][f"MPSDataType{name}"] == number, dtype


def test_mps_has_no_float64(metadata: dict[str, Any]) -> None:
    assert "MPSDataTypeFloat64" not in metadata["enums"]


def test_tensor_data_of_a_graph_takes_no_offset(metadata: dict[str, Any]) -> None:
    selectors = [name for name in metadata["MPSGraphTensorData"] if name.startswith("initWithMTLBuffer:")]
    assert selectors == ["initWithMTLBuffer:shape:dataType:", "initWithMTLBuffer:shape:dataType:rowBytes:"]


def test_pyobjc_has_the_methods_that_we_call_and_that_its_stand_in_has(
    metadata: dict[str, Any], pyobjc: list[tuple[object, ...]]
) -> None:
    graph, objc = sys.modules["MetalPerformanceShadersGraph"], sys.modules["objc"]
    methods = {name for name in vars(graph.MPSGraphTensorData) if not name.startswith("__")} - {"alloc"}
    assert methods == {"initWithMTLBuffer_shape_dataType_"}
    assert methods <= {selector.replace(":", "_") for selector in metadata["MPSGraphTensorData"]}
    assert list(inspect.signature(objc.objc_object).parameters) == ["c_void_p"]
    assert metadata["objc"] == {"__c_void_p__": True, "c_void_p": True, "objc_object": True}
