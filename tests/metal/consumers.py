"""Libraries that take our tensors: MLX's own wheel, and an extension that takes capsules with nanobind, as MLX does."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

__all__ = ["load_consumer", "require"]

SOURCE = Path(__file__).with_name("consumer.cpp")


def require(module: str) -> None:
    """Skip where a library of the test extra is not installed; CI has it, except where it has no wheel."""
    if importlib.util.find_spec(module) is None:
        if os.environ.get("CI"):
            pytest.fail(f"{module} is not installed, although it is one of the test extra")
        pytest.skip(f"{module} is not installed: pip install -e '.[test]'")


def load_consumer(folder: Path) -> ModuleType:
    """The extension of consumer.cpp, compiled into ``folder`` unless it is there."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler to build an extension with")
    require("nanobind")
    nanobind = importlib.import_module("nanobind")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        pytest.skip(f"no headers of Python {sys.version_info[0]}.{sys.version_info[1]} to build an extension with")
    name = f"nanobind-{nanobind.__version__}-{SOURCE.stat().st_mtime_ns}"
    library = folder / name / f"consumer{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    if not library.exists():
        root = Path(nanobind.include_dir()).parent
        library.parent.mkdir(parents=True, exist_ok=True)
        part = library.with_name(f"{os.getpid()}.part")  # renamed when it is whole: others may be at it
        includes = [f"-I{folder}" for folder in (root / "include", root / "ext" / "robin_map" / "include", headers)]
        options = ["-std=c++17", "-O0", "-shared", "-fPIC", "-fvisibility=hidden", "-DNDEBUG"]
        if sys.platform == "darwin":
            options += ["-undefined", "dynamic_lookup"]
        sources = [str(SOURCE), str(root / "src" / "nb_combined.cpp")]
        subprocess.run([compiler, *options, *includes, "-o", str(part), *sources], check=True)
        part.replace(library)
    spec = importlib.util.spec_from_file_location("consumer", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
