"""Exports to the XNNPACK delegate in a block, with embeddings that it does not take: the same programs as
ExecuTorch's, or right ones where those are wrong."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.operators.node_visitor import NodeVisitor
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.passes.external_constants_pass import delegate_external_constants_pass_unlifted
from executorch.extension.pybindings import portable_lib

from stream_pack.executorch import streaming_constants, write_program
from stream_pack.executorch.export.held import Holder
from stream_pack.executorch.export.hooks_xnnpack import _pack_nibbles
from stream_pack.executorch.export.session import Export
from tests.executorch.models import _quantized
from tests.support.memory import anonymous_nbytes, measure, needs_proc

TOKENS = (torch.arange(6).reshape(1, 6),)
IMAGE = (torch.linspace(-1, 1, 3 * 100).reshape(1, 3, 10, 10),)
MIB = 1 << 20


class Language(torch.nn.Module):
    """Tokens in, through an embedding, a layer and a head that is as the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = torch.nn.Embedding(96, 64), torch.nn.Linear(64, 64)
        self.head = torch.nn.Linear(64, 96, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layer(self.table(tokens)))
        return result


class Quantized(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = torch.nn.Embedding(96, 256), torch.nn.Linear(256, 128)
        _quantized(self.layer, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(self.table(tokens))
        return result


class Untied(torch.nn.Module):
    """Weights that are equal, but not the same."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(96, 64) for _ in range(2))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))
        for pair in (self.tables, self.layers):
            pair[1].load_state_dict(pair[0].state_dict())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tables[0](tokens) * self.tables[1](tokens + 1)
        result: torch.Tensor = self.layers[1](torch.cumsum(self.layers[0](x), dim=1))
        return result


class Images(torch.nn.Module):
    """Weights that XNNPACK wants in another order: NHWC, and a transposed convolution's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.ConvTranspose2d(3, 24, 5)
        self.norm = torch.nn.BatchNorm2d(24)
        self.conv = torch.nn.Conv2d(24, 16, 5)
        self.slope = torch.nn.PReLU(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.slope(self.conv(self.norm(self.up(x))))
        return result


class Views(torch.nn.Module):
    """Weights that are rows of a fused one, of which the second does not begin where its storage does."""

    def __init__(self) -> None:
        super().__init__()
        fused, tables = torch.randn(128, 64), torch.randn(192, 64)
        self.first, self.second = (torch.nn.Linear(64, 64, bias=False) for _ in range(2))
        self.first.weight = torch.nn.Parameter(fused[:64])
        self.second.weight = torch.nn.Parameter(fused[64:])
        self.table = torch.nn.Embedding(96, 64, _weight=tables[96:])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        result: torch.Tensor = self.first(x) + self.second(x)
        return result


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]] = {
    "fp32": lambda: (Language(), TOKENS),
    "fp16": lambda: (Language().half(), TOKENS),
    "8da4w": lambda: (Quantized(), TOKENS),
    "equal weights": lambda: (Untied(), TOKENS),
    "convolutions": lambda: (Images(), IMAGE),
}


def exported(
    model: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    *,
    strict: bool = False,
    config: ExecutorchBackendConfig | None = None,
) -> Any:
    """Each time from the same weights, which an export does not change."""
    with torch.no_grad():
        program = torch.export.export(model.eval(), inputs, strict=strict)
        edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        return edge.to_executorch(config)


def written(manager: Any) -> bytes:
    file = io.BytesIO()
    manager.write_to_file(file)
    return file.getvalue()


@pytest.mark.parametrize(("name", "strict"), [*((name, False) for name in MODELS), ("fp32", True), ("8da4w", True)])
def test_the_program_is_the_one_that_executorch_writes(name: str, strict: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    stock = written(exported(model, inputs, strict=strict))
    with streaming_constants(tmp_path, alignment="stock"):
        manager = exported(model, inputs, strict=strict)
        write_program(manager, tmp_path / "inside.pte")
        inside = written(manager), bytes(manager.buffer)
    write_program(manager, tmp_path / "after.pte")
    assert inside == (stock, stock)
    assert written(manager) == stock
    assert (tmp_path / "inside.pte").read_bytes() == stock
    assert (tmp_path / "after.pte").read_bytes() == stock


@pytest.mark.parametrize("alignment", ["page", "stock"])
def test_weights_that_are_views_are_the_module_s(alignment: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Views()
    with streaming_constants(tmp_path, alignment=alignment):
        manager = exported(model, TOKENS)
    write_program(manager, tmp_path / "views.pte")
    (found,) = portable_lib._load_for_executorch(str(tmp_path / "views.pte")).forward(TOKENS)
    assert torch.allclose(found, model(*TOKENS), atol=1e-5)


def test_external_constants_of_the_emitter_are_executorch_s(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model, config = Untied(), ExecutorchBackendConfig(external_constants=True)
    stock = exported(model, TOKENS, config=config)
    with streaming_constants(tmp_path, alignment="stock"):
        ours = exported(model, TOKENS, config=config)
    same_files(stock, ours, tmp_path)


def same_files(stock: Any, ours: Any, folder: Path) -> None:
    for name, manager in (("stock", stock), ("ours", ours)):
        (folder / name).mkdir()
        manager.write_tensor_data_to_file(folder / name)
    names = sorted(os.listdir(folder / "stock"))
    assert names == sorted(os.listdir(folder / "ours")) != []
    for name in names:
        data = (folder / "ours" / name).read_bytes()
        assert data == (folder / "stock" / name).read_bytes()
        assert len(data) > 4096
    assert written(ours) == written(stock)


def test_external_constants_of_the_delegate_are_executorch_s(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Language()

    def tagged() -> Any:
        with torch.no_grad():
            unlifted = torch.export.export(model, TOKENS).module()
            delegate_external_constants_pass_unlifted(module=unlifted, gen_tag_fn=lambda node: "weights")
            program = torch.export.export(unlifted, TOKENS)
            edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
            return edge.to_executorch()

    stock = tagged()
    with streaming_constants(tmp_path, alignment="stock"):
        ours = tagged()
    same_files(stock, ours, tmp_path)


@pytest.mark.parametrize(
    "shape", [(1, 6), (2, 7), (3, 64), (5, 33), (1000, 96), (341, 96), (5, 20_001), (1, 4, 6), (4, 6, 1, 1)]
)
def test_nibbles_are_packed_in_parts_as_in_one(shape: tuple[int, ...], tmp_path: Path) -> None:
    values = torch.randint(-8, 8, shape, dtype=torch.int8)
    holder = Holder(tmp_path, chunk_nbytes=MIB)
    export = Export(holder=holder, alignment="stock")
    stock = NodeVisitor.convert_to_qc4w
    assert torch.equal(_pack_nibbles(export, stock, values), stock(values))


def test_nibbles_out_of_range_are_refused_as_by_executorch(tmp_path: Path) -> None:
    values = torch.zeros(1000, 96, dtype=torch.int8)
    values[-1, -1] = 8
    export = Export(holder=Holder(tmp_path, chunk_nbytes=MIB), alignment="stock")
    with pytest.raises(AssertionError, match="out of .-8, 7. range"):
        _pack_nibbles(export, NodeVisitor.convert_to_qc4w, values)


LARGE = """
import sys
from tests.executorch.export.test_hooks_xnnpack import large_export
large_export(sys.argv[1])
"""


def large_export(folder: str) -> None:
    """What the child of the next test runs: 32 MiB of embedding and 96 MiB of layers, by strict export.

    Writes how much memory was in use before.
    """

    class Large(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(4096, 2048)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(2048, 2048, bias=False) for _ in range(6))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x: torch.Tensor = self.table(tokens)
            for layer in self.layers:
                x = layer(x).relu()
            return x

    with streaming_constants(folder):
        exported(Language(), TOKENS, strict=True)  # what the first export imports is not its own
        model = Large()
        sys.stdout.write(f"{anonymous_nbytes()}\n")
        write_program(exported(model, TOKENS, strict=True), os.path.join(folder, "large.pte"))
    assert os.path.getsize(os.path.join(folder, "large.pte")) > 128 * MIB


@needs_proc
def test_an_export_takes_little_memory_beside_its_model_s(tmp_path: Path) -> None:
    child = measure([sys.executable, "-W", "ignore", "-c", LARGE, tmp_path])
    before = int(child.stdout.splitlines()[-1])
    # Without the block, both ExecuTorch and strict export take more than the model once more.
    assert child.peak_anonymous_nbytes - before < 24 * MIB
