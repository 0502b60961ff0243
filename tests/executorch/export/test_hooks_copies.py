"""Copies of weights that an export makes: in a block they share memory until somebody writes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack import xnnpack_preprocess
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from torch._dynamo.variables import builder

from stream_pack.executorch import streaming_constants

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


def test_a_backend_is_given_the_weights_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    stock = xnnpack_preprocess.XnnpackBackend.preprocess

    def preprocess(program: Any, specs: Any) -> Any:
        given.extend(tensor.data_ptr() for tensor in program.state_dict.values())
        return stock(program, specs)

    monkeypatch.setattr(xnnpack_preprocess.XnnpackBackend, "preprocess", staticmethod(preprocess))
    model = torch.nn.Linear(64, 64)
    with streaming_constants(tmp_path):
        program = torch.export.export(model, INPUTS)
        to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    assert set(given) == {model.weight.data_ptr(), model.bias.data_ptr()}


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
