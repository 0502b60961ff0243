"""Metal systems and packs to use with them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

import stream_pack
from tests.metal.bench import KINDS, Bench, c_bench, compiler, native_bench, python_bench
from tests.metal.consumers import load_consumer
from tests.metal.standin import StandIn

MIB = 1 << 20


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Each Metal system there is; on a Mac the real one must be among them."""
    if request.param == "c":
        if compiler() is None:
            pytest.skip("no C compiler to build the stand-in with")
        found = c_bench(tmp_path_factory.getbasetemp())
    else:
        found = python_bench() if request.param == "python" else native_bench()
    before = found.live()
    yield found
    found.wait()
    assert found.violations() == []
    assert found.live() == before, "a test left buffers behind"


@pytest.fixture(scope="session")
def consumer_folder(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the extension is, from one session to the next unless pytest has no cache."""
    cache: pytest.Cache | None = getattr(pytestconfig, "cache", None)
    return tmp_path_factory.getbasetemp() if cache is None else cache.mkdir("consumer")


@pytest.fixture(scope="session")
def consumer(consumer_folder: Path) -> ModuleType:
    """An extension that takes capsules with nanobind, as MLX does; it takes 3 seconds to build, once."""
    return load_consumer(consumer_folder)


@pytest.fixture
def standin() -> StandIn:
    return StandIn()


@pytest.fixture(scope="session")
def arrays() -> dict[str, NDArray[np.generic]]:
    """Large and small tensors, of several dtypes, one of them empty and one without dims."""
    random = np.random.default_rng(1)
    return {
        "embedding": random.standard_normal((300, 1024), np.float32),  # 1.17 MiB
        "scale": np.array(2.5, np.float32),
        "bias": random.standard_normal(37).astype(np.float16),
        "ids": random.integers(-9, 9, (11, 3)),
        "empty": np.empty((0, 7), np.float32),
        "head": random.standard_normal((260, 2048), np.float32),  # 2.03 MiB
        "mask": random.integers(0, 2, 5).astype(bool),
    }


@pytest.fixture(scope="session")
def pack_path(arrays: dict[str, NDArray[np.generic]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("metal") / "model.pack"
    stream_pack.save_file(arrays, path)
    return path


@pytest.fixture
def pyobjc(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """pyobjc's calls, as far as they are used."""
    calls: list[tuple[object, ...]] = []

    class TensorData:
        @classmethod
        def alloc(cls) -> TensorData:
            return cls()

        def initWithMTLBuffer_shape_dataType_(self, *arguments: object) -> TensorData:  # noqa: N802
            calls.append(arguments)
            return self

    objc = ModuleType("objc")
    objc.objc_object = lambda *, c_void_p: ("pyobjc", c_void_p)  # type: ignore[attr-defined]
    graph = ModuleType("MetalPerformanceShadersGraph")
    graph.MPSGraphTensorData = TensorData  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "objc", objc)
    monkeypatch.setitem(sys.modules, "MetalPerformanceShadersGraph", graph)
    return calls
