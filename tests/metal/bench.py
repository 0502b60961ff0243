"""The Metal systems that the tests run on: two stand-ins, and on a Mac the real one."""

from __future__ import annotations

import ctypes
import gc
import mmap
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stream_pack.metal import objc
from stream_pack.metal.device import Device
from stream_pack.metal.objc import Runtime
from tests.metal.standin import StandIn

__all__ = ["KINDS", "Bench", "c_bench", "c_library", "compiler", "gone", "native_bench", "python_bench"]

KINDS = ("python", "c", "native") if sys.platform == "darwin" else ("python", "c")


@dataclass(frozen=True)
class Bench:
    """A system.  ``wait`` returns when all deallocators that are due have run; ``live`` counts buffers that are not
    gone (None: nobody knows); ``violations`` of what the documentation demands."""

    kind: str
    runtime: Runtime
    wait: Callable[[], None]
    live: Callable[[], int | None]
    violations: Callable[[], list[str]]

    def device(self) -> Device:
        return Device.default(self.runtime)


def python_bench() -> Bench:
    standin = StandIn()
    return Bench("python", standin.runtime, standin.wait, standin.live, lambda: list(standin.violations))


def native_bench() -> Bench:
    return Bench("native", objc.native(), lambda: None, lambda: None, list)


def gone(bench: Bench, *tokens: int) -> bool:
    """Whether these buffers are gone.  Of a real driver nobody can tell when it is done, so it gets ten seconds."""
    gc.collect()
    bench.wait()
    for _ in range(1000 if bench.kind == "native" else 1):
        if not any(map(objc.kept, tokens)):
            return True
        time.sleep(0.01)
    return False


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def c_bench(folder: Path) -> Bench:
    """The stand-in, of which there is one in a process."""
    return load_c(c_library(folder))


def c_library(folder: Path) -> Path:
    """Compiles it, the first time."""
    library = folder / "standin.so"
    if not library.exists():
        source = Path(__file__).with_name("standin.c")
        flags = ("-shared", "-fPIC", "-O1", "-pthread")
        command = [compiler() or "cc", *flags, "-o", str(library), str(source)]
        subprocess.run(command, check=True)
    return library


def load_c(library: Path) -> Bench:
    standin = ctypes.CDLL(str(library))
    ctypes.c_ulong.in_dll(standin, "standin_page").value = mmap.PAGESIZE
    ctypes.c_ulong.in_dll(standin, "standin_limit").value = 1 << 34

    def count(name: str) -> int:
        return ctypes.c_long.in_dll(standin, name).value

    def address(name: str) -> int:
        return ctypes.cast(getattr(standin, name), ctypes.c_void_p).value or 0

    runtime = Runtime(
        msg_send=address("objc_msgSend"),
        sel_register_name=address("sel_registerName"),
        get_class=address("objc_getClass"),
        create_system_default_device=address("MTLCreateSystemDefaultDevice"),
        global_block_class=ctypes.addressof(ctypes.c_void_p.in_dll(standin, "_NSConcreteGlobalBlock")),
        translated=False,
    )
    violations = lambda: ["see standin.c"] * count("standin_violations")  # noqa: E731
    return Bench("c", runtime, standin.standin_wait, lambda: count("standin_live"), violations)
