"""Copies of weights that an export makes: in a block they share memory until somebody writes."""

from __future__ import annotations

import copy
import ctypes
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack import xnnpack_preprocess
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge, to_edge_transform_and_lower
from executorch.exir.backend.backend_api import to_backend
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.backend.utils import tag_constant_data
from torch._dynamo.variables import builder

from stream_pack.executorch import streaming_constants, write_program

INPUTS = (torch.ones(2, 64),)


@pytest.fixture
def block(tmp_path: Path) -> Iterator[None]:
    with streaming_constants(tmp_path):
        yield


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """As strict export clones each weight that it meets."""
    cloned: torch.Tensor = builder._clone_input(tensor, None)
    return cloned


def addresses(tensors: Any) -> set[int]:
    """Read without asking for memory to write to, which would be a copy."""
    return {torch._C._data_address(tensor) for tensor in tensors}  # type: ignore[attr-defined]


def test_xnnpack_is_given_the_weights_themselves_and_writes_to_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    stock = xnnpack_preprocess.XnnpackBackend.preprocess

    def preprocess(program: Any, specs: Any) -> Any:
        weights = {name: tensor for name, tensor in program.state_dict.items() if tensor.nbytes >= 4096}
        before = {name: (state(tensor), tensor.clone()) for name, tensor in weights.items()}
        given.extend(addresses(weights.values()))
        result = stock(program, specs)
        for name, tensor in weights.items():
            assert state(tensor) == before[name][0], name
            assert torch.equal(tensor, before[name][1]), name
        return result

    monkeypatch.setattr(xnnpack_preprocess.XnnpackBackend, "preprocess", staticmethod(preprocess))
    for model, inputs in readers():
        given.clear()
        weights = [tensor for tensor in model.state_dict().values() if tensor.nbytes >= 4096]
        program = torch.export.export(model, inputs)
        with streaming_constants(tmp_path):
            to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
        assert set(given) <= addresses(weights)
        assert given


def state(tensor: torch.Tensor) -> tuple[int, int, int]:
    """What a write to the tensor would change: where it is, its version, how long its storage is."""
    (address,) = addresses([tensor])
    return address, tensor._version, tensor.untyped_storage().nbytes()


def readers() -> Iterator[tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]:
    """Models that lead XNNPACK through each of its ways to a weight: folded, permuted, unsqueezed, grouped, packed."""
    yield torch.nn.Linear(64, 64).eval(), (torch.ones(2, 64),)
    images = (torch.ones(1, 16, 8, 8),)
    layers = {"conv": torch.nn.Conv2d(16, 32, 3), "norm": torch.nn.BatchNorm2d(32), "relu": torch.nn.ReLU()}
    yield torch.nn.Sequential(OrderedDict(layers)).eval(), images
    yield torch.nn.ConvTranspose2d(16, 32, 3, groups=2).eval(), images
    yield torch.nn.Conv1d(16, 32, 3).eval(), (torch.ones(1, 16, 9),)
    yield torch.nn.Linear(64, 64).half().eval(), (torch.ones(2, 64).half(),)


class Careless(BackendDetails):  # type: ignore[misc]
    """A backend that does with its program what the contract allows, as ``preprocess`` does before it is read."""

    spoil: Callable[[torch.Tensor], object]

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        held = b""
        with torch.no_grad():
            for tensor in (*edge_program.state_dict.values(), *edge_program.constants.values()):
                held += tensor.detach().clone().numpy().tobytes()  # not its own: NumPy's memory has a fixed length
                Careless.spoil(tensor)
        return PreprocessResult(processed_bytes=held)


class CarelessPartitioner(Partitioner):  # type: ignore[misc]
    """Gives everything to :class:`Careless`."""

    def partition(self, exported_program: Any) -> PartitionResult:
        for node in exported_program.graph.nodes:
            if node.op == "call_function":
                node.meta["delegation_tag"] = "all"
        tag_constant_data(exported_program)
        tags = {"all": DelegationSpec("Careless", [])}
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)


def write_by_numpy(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[...] = 7


def write_at_an_address(tensor: torch.Tensor) -> None:
    ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)


def write_at_the_storage_s_address(tensor: torch.Tensor) -> None:
    ctypes.memset(tensor.untyped_storage().data_ptr(), 0, tensor.nbytes)


def write_by_dlpack(tensor: torch.Tensor) -> None:
    torch.from_dlpack(tensor.detach()).mul_(3)  # type: ignore[attr-defined]


SPOILERS: list[Callable[[torch.Tensor], object]] = [
    lambda tensor: tensor.mul_(2),
    lambda tensor: tensor.untyped_storage().resize_(0),  # as ExecuTorch's CUDA backend does
    lambda tensor: tensor.data.add_(1),
    lambda tensor: tensor.set_(torch.zeros(3)),  # type: ignore[call-overload]
    lambda tensor: tensor.view(-1)[5:9].fill_(0),
    lambda tensor: tensor.view(torch.uint8).fill_(1),
    lambda tensor: tensor.untyped_storage().fill_(0),  # type: ignore[attr-defined]
    lambda tensor: torch.nn.init.zeros_(tensor),
    write_by_numpy,
    write_at_an_address,
    write_at_the_storage_s_address,
    write_by_dlpack,
]


class Several(torch.nn.Module):
    """Weights of every kind that a program has: a parameter, buffers, a view, a constant, one that is mapped."""

    buffer: torch.Tensor
    view: torch.Tensor
    hidden: torch.Tensor

    def __init__(self, mapped: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64))
        self.register_buffer("buffer", torch.randn(64, 64))
        self.register_buffer("view", torch.randn(65, 64)[1:])
        self.register_buffer("hidden", torch.randn(64, 64), persistent=False)
        self.mapped = torch.nn.Parameter(mapped)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.buffer[0] + self.view[0] + self.hidden[0] + self.mapped[0]


def lower_all(program: Any) -> None:
    to_edge_transform_and_lower(program, partitioner=[CarelessPartitioner()])


def lower_by_name(program: Any) -> None:
    to_backend("Careless", to_edge(program).exported_program(), [])


@pytest.mark.parametrize("lower", [lower_all, lower_by_name])
@pytest.mark.parametrize("spoil", SPOILERS, ids=range(len(SPOILERS)))
def test_a_backend_may_write_to_its_program_and_the_model_stays(
    spoil: Callable[[torch.Tensor], object], lower: Callable[[Any], None], tmp_path: Path
) -> None:
    torch.save({"w": torch.randn(64, 64)}, tmp_path / "w.pt")
    model = Several(torch.load(tmp_path / "w.pt", mmap=True)["w"]).eval()
    wanted = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    wanted |= {name: tensor.clone() for name, tensor in model.named_buffers()}
    Careless.spoil = staticmethod(spoil)
    program = torch.export.export(model, (torch.ones(2, 64),))
    with streaming_constants(tmp_path):
        lower(program)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(tensor, wanted[name]), name


def test_a_lazy_clone_that_is_read_to_be_written_out_stays_one(tmp_path: Path) -> None:
    # The embedding is a constant of the program, the other weight one of XNNPACK's.
    layers = {"embedding": torch.nn.Embedding(64, 64), "linear": torch.nn.Linear(64, 64)}
    for layer in layers.values():
        layer.weight = torch.nn.Parameter(torch.randn(65, 64)[1:])  # a view, which begins inside its storage
    model = torch.nn.Sequential(OrderedDict(layers)).eval()
    weights: list[torch.Tensor] = [layer.weight for layer in layers.values()]  # type: ignore[misc]
    clones = [weight.detach()._lazy_clone() for weight in weights]
    program = torch.export.export(model, (torch.tensor([1, 2]),))
    with streaming_constants(tmp_path):
        manager = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
    write_program(manager, tmp_path / "program.pte")
    assert addresses(clones) == addresses(weights)
    data = (tmp_path / "program.pte").read_bytes()
    assert all(weight.detach().clone().numpy().tobytes() in data for weight in weights)


def test_tensors_of_one_storage_share_one_in_a_lazy_copy_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Any] = []
    monkeypatch.setattr(Careless, "preprocess", staticmethod(lambda program, specs: keep(copies, program)))
    pair = torch.randn(2, 64, 64)
    with streaming_constants(tmp_path):
        lower_by_name(torch.export.export(Pair(pair), (torch.ones(64, 64),)))
    (copied,) = copies
    assert addresses(copied.values()) == addresses(pair)
    storages = {tensor.untyped_storage()._cdata for tensor in copied.values()}
    assert len(storages) == 1
    assert storages.isdisjoint({pair.untyped_storage()._cdata})


class Pair(torch.nn.Module):
    """Two buffers in one storage."""

    first: torch.Tensor
    second: torch.Tensor

    def __init__(self, pair: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("first", pair[0])
        self.register_buffer("second", pair[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.first + self.second


def keep(copies: list[Any], program: Any) -> PreprocessResult:
    copies.append(dict(program.state_dict))
    return PreprocessResult(processed_bytes=b"kept")


@pytest.mark.usefixtures("block")
def test_everybody_else_s_deepcopy_is_one() -> None:
    program = torch.export.export(torch.nn.Linear(64, 64), INPUTS)
    for original, copied in (
        (program.state_dict, copy.deepcopy(program).state_dict),
        ({"weight": torch.ones(64, 64)}, copy.deepcopy({"weight": torch.ones(64, 64)})),
    ):
        assert original["weight"].data_ptr() != copied["weight"].data_ptr()
        copied["weight"].data.fill_(7)
        assert not (original["weight"] == 7).any()


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("make", [torch.nn.Parameter, torch.Tensor.detach])
def test_a_clone_for_strict_export_takes_no_memory_until_it_is_written_to(make: Any) -> None:
    weight = make(torch.arange(4096.0).reshape(64, 64).T)
    cloned = clone(weight)
    assert addresses([cloned]) == addresses([weight])
    assert cloned.stride() == weight.stride()
    assert cloned.requires_grad == weight.requires_grad
    with torch.no_grad():
        cloned.add_(1)
    assert torch.equal(weight, torch.arange(4096.0).reshape(64, 64).T)
    assert torch.equal(cloned, weight + 1)


@pytest.mark.usefixtures("block")
def test_writing_to_the_weight_does_not_reach_its_clone() -> None:
    weight = torch.ones(64, 64)
    cloned = clone(weight)
    weight.fill_(5)
    assert bool((cloned == 1).all())


@pytest.mark.usefixtures("block")
def test_a_mapped_parameter_is_shared_and_a_mapped_buffer_is_copied(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(64, 64)}, tmp_path / "w.pt")
    mapped = torch.load(tmp_path / "w.pt", mmap=True)["w"]
    parameter = torch.nn.Parameter(mapped)
    assert addresses([clone(parameter)]) == addresses([mapped])
    assert addresses([clone(mapped)]) != addresses([mapped])


@pytest.mark.usefixtures("block")
def test_the_parts_of_a_quantized_weight_are_shared() -> None:
    from torchao.quantization import IntxUnpackedToInt8Tensor

    int4: torch.dtype = torch.int4  # type: ignore[attr-defined]
    weight: Any = IntxUnpackedToInt8Tensor.from_hp(torch.randn(64, 64), (1, 32), int4)
    cloned: Any = clone(weight)
    assert type(cloned) is type(weight)
    assert addresses([cloned.qdata]) == addresses([weight.qdata])
