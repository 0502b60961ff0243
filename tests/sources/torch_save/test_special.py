"""Tensors that are more than an array: each is packed as what it means, or refused by its name."""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stream_pack.errors import UnsupportedTensorError
from stream_pack.pipeline.source import Source
from stream_pack.sources.open import open_source
from tests.sources.source_suite import collect, options, requests_for
from tests.support.taking import taken
from tests.support.torch_zips import saved

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=["file", "pipe"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Source]:
    def open_it(value: object, **keywords: Any) -> Source:
        data = saved(value)
        if request.param == "pipe":
            return taken(open_source(io.BytesIO(data), **keywords))
        (tmp_path / "source").write_bytes(data)
        return taken(open_source(tmp_path / "source", **keywords))

    return open_it


Opened = Callable[..., Source]


class Wrapper(torch.Tensor):
    """What quantization libraries make: it says float32 of some shape, and holds integers and scales."""

    qdata: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, qdata: torch.Tensor, scale: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=torch.float32)
        made.qdata, made.scale = qdata, scale
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].qdata, args[0].scale)
        raise NotImplementedError(str(func))


def wrapped(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    kind = type(name, (Wrapper,), {"__module__": module, "__qualname__": name})
    steps = module.split(".")
    for end in range(1, len(steps) + 1):
        stand_in = types.ModuleType(".".join(steps[:end]))
        setattr(stand_in, name, kind)
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    made: torch.Tensor = kind(torch.ones(2, 2, dtype=torch.int8), torch.ones(2))
    return made


@pytest.mark.parametrize("name", ["Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor"])
def test_tensors_of_torchao_are_refused_because_their_outer_shape_has_no_bytes(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """pytorch/ao#2478"""
    weight = wrapped(f"torchao.quantization.{name.lower()}", name, monkeypatch)
    for ignore_unknown in (False, True):
        with pytest.raises(UnsupportedTensorError, match=rf"tensor 'layer\.w' is a tensor subclass, 'torchao.*{name}"):
            opened({"ok": torch.ones(1), "layer.w": weight}, ignore_unknown=ignore_unknown)


def test_a_tensor_made_of_two_is_refused(opened: Opened) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    made = TwoTensor(torch.ones(2), torch.ones(2))  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedTensorError, match=r"tensor 'w' is a tensor subclass.*TwoTensor"):
        opened({"w": made}, ignore_unknown=True)


QUANTIZED: dict[str, Callable[[], torch.Tensor]] = {
    "qint8, per_tensor_affine": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "quint8, per_channel_affine": lambda: torch.quantize_per_channel(
        torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.quint8
    ),
    "quint4x2, per_tensor_affine": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint4x2),
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_tensors_are_refused(opened: Opened, kind: str) -> None:
    with pytest.raises(UnsupportedTensorError, match=rf"tensor 'w' is quantized \({kind}\): save x\.dequantize"):
        opened({"w": QUANTIZED[kind]()})


SPARSE: dict[str, Callable[[], torch.Tensor]] = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "csc": lambda: torch.eye(3).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
}


@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_tensors_are_refused_and_never_given_as_their_values(opened: Opened, kind: str) -> None:
    with pytest.raises(UnsupportedTensorError, match=r"tensor 'w' is sparse: save x\.to_dense"):
        opened({"w": SPARSE[kind]()})


class FromNumpy:
    """As torch 1.12 and 1.13 pickled tensors on Apple's GPUs."""

    def __reduce__(self) -> Any:
        arguments = (np.arange(3.0), torch.float32, "mps:0", False)
        return (torch._utils._rebuild_device_tensor_from_numpy, arguments)


def test_tensors_whose_bytes_are_in_the_pickle_are_refused_with_advice(opened: Opened) -> None:
    for ignore_unknown in (False, True):
        with pytest.raises(
            UnsupportedTensorError,
            match=r"tensor 'w' is on another device: its bytes are stored as a NumPy array.*torch 2 or later",
        ):
            opened({"w": FromNumpy()}, ignore_unknown=ignore_unknown)


def test_tensors_saved_without_their_data_are_zeros_that_nobody_can_tell() -> None:
    with torch.serialization.skip_data():
        data = saved({"w": torch.arange(3.0)})
    with open_source(io.BytesIO(data)) as source:
        _, requests = requests_for(source.catalog)
        assert collect(source, requests, options()) == [bytes(12)]


def test_bits_without_a_meaning_are_refused_by_name(opened: Opened) -> None:
    for dtype in (torch.bits8, torch.bits4x2, torch.bits1x8):
        tensor = torch.ones(2, dtype=torch.uint8).view(dtype)
        with pytest.raises(UnsupportedTensorError, match="tensor 'w' is of dtype 'torch"):
            opened({"w": tensor})


# -- DTensors of one rank's file


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Any:
    """A mesh of as many ranks as asked for, of which this process is the first."""
    import torch.distributed as distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield init_device_mesh("cpu", (request.param,))
    distributed.destroy_process_group()


def distributed_tensor(mesh: Any, placement: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    made: torch.Tensor = DTensor.from_local(torch.arange(4.0).reshape(2, 2), mesh, [placement], run_check=False)
    return made


@pytest.mark.parametrize("world", [1, 2], indirect=True)
def test_a_replicated_dtensor_is_its_local_tensor(opened: Opened, world: Any) -> None:
    from torch.distributed.tensor import Replicate

    with opened({"w": distributed_tensor(world, Replicate())}) as source:
        _, requests = requests_for(source.catalog)
        assert source.catalog.shape(0) == (2, 2)
        assert collect(source, requests, options()) == [np.arange(4, dtype="<f4").tobytes()]


@pytest.mark.parametrize("world", [1], indirect=True)
def test_a_shard_of_a_world_of_one_is_the_whole(opened: Opened, world: Any) -> None:
    from torch.distributed.tensor import Shard

    with opened({"w": distributed_tensor(world, Shard(0))}) as source:
        assert source.catalog.shape(0) == (2, 2)


@pytest.mark.parametrize("world", [2], indirect=True)
def test_a_shard_and_a_sum_that_is_still_to_be_made_are_refused(opened: Opened, world: Any) -> None:
    from torch.distributed.tensor import Partial, Shard

    for placement in (Shard(0), Shard(1), Partial()):
        with pytest.raises(UnsupportedTensorError, match="tensor 'w' is a DTensor, one rank's"):
            opened({"w": distributed_tensor(world, placement)})
