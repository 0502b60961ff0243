"""Packs of kind ``ptd`` in ExecuTorch's Linux runtime: it takes them for the data files that it wrote itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executorch.exir import ExecutorchBackendConfig, to_edge
from executorch.exir._serialize._cord import Cord
from executorch.exir._serialize.data_serializer import DataEntry, DataPayload
from executorch.exir.scalar_type import ScalarType
from executorch.exir.tensor_layout import TensorLayout
from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

import stream_pack
from tests.executorch.programs import run_file
from tests.support.sparse_source import SparseSource

GIB = 1 << 30


def contents(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """What ExecuTorch's own reader finds in a .ptd: floats where there is a layout, else bytes."""
    payload = FlatTensorSerializer().deserialize(Cord(path.read_bytes()))
    found: dict[str, np.ndarray[Any, Any]] = {}
    for key, entry in payload.named_data.items():
        data = np.frombuffer(payload.buffers[entry.buffer_index], np.uint8)
        layout = entry.tensor_layout
        found[key] = data if layout is None else data.view("<f4").reshape(layout.sizes)
    return found


@pytest.fixture(scope="module")
def x(gold: Path) -> torch.Tensor:
    with np.load(gold / "ptd" / "mlp.io.npz") as arrays:
        return torch.from_numpy(arrays["x"])


@pytest.mark.parametrize("name", ["portable", "xnnpack"])
def test_programs_run_with_our_data_as_with_executorchs_own_bit_for_bit(
    name: str, gold: Path, x: torch.Tensor, tmp_path: Path
) -> None:
    program, data = (gold / "ptd" / f"mlp_{name}.{ending}" for ending in ("pte", "ptd"))
    ours = tmp_path / "ours.ptd"
    stream_pack.save_file(contents(data), ours, to="ptd")
    (output,) = run_file(program, [x], ours)
    (stock,) = run_file(program, [x], data)
    assert output.tobytes() == stock.tobytes()
    with np.load(gold / "ptd" / "mlp.io.npz") as arrays:
        # Another CPU, and another release, may round a last bit otherwise.
        np.testing.assert_allclose(output, arrays[name], rtol=1e-5, atol=1e-6)


def test_the_weights_of_a_checkpoint_become_the_data_of_a_program(gold: Path, x: torch.Tensor, tmp_path: Path) -> None:
    with np.load(gold / "ptd" / "mlp.io.npz") as arrays:
        weights = {name.removeprefix("w_"): torch.from_numpy(arrays[name]) for name in arrays if name.startswith("w_")}
    torch.save(weights, tmp_path / "checkpoint.pt")
    first, second = tmp_path / "weights.pack", tmp_path / "weights.ptd"
    stream_pack.convert(tmp_path / "checkpoint.pt", first)
    stream_pack.convert(first, second, to="ptd")
    program = gold / "ptd" / "mlp_portable.pte"
    (output,) = run_file(program, [x], second)
    (stock,) = run_file(program, [x], gold / "ptd" / "mlp_portable.ptd")
    assert output.tobytes() == stock.tobytes()


def test_executorchs_own_reader_finds_every_tensor_with_its_dtype_and_shape(tmp_path: Path) -> None:
    path = tmp_path / "ours.ptd"
    wanted = {
        "half": torch.arange(6.0).reshape(1, 2, 3).half(),
        "brain": torch.ones(3).bfloat16(),
        "flags": torch.tensor([True, False]),
        "long": torch.tensor(-7),
        "none": torch.empty(2, 0),
        "unsigned": torch.tensor([1, 65535], dtype=torch.uint16),
        "eight": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "complex": torch.zeros(2, dtype=torch.complex64),
    }
    stream_pack.save_file(wanted, path, to="ptd")
    payload = FlatTensorSerializer().deserialize(Cord(path.read_bytes()))
    assert list(payload.named_data) == list(wanted)
    for name, entry in payload.named_data.items():
        raw = wanted[name].flatten().view(torch.uint8).numpy().tobytes()
        assert bytes(payload.buffers[entry.buffer_index]) == raw
        if name == "complex":
            assert entry.tensor_layout is None
            continue
        assert entry.tensor_layout.sizes == list(wanted[name].shape)
        assert entry.tensor_layout.dim_order == list(range(wanted[name].dim()))
        assert (
            entry.tensor_layout.scalar_type.name
            == {
                "half": "HALF",
                "brain": "BFLOAT16",
                "flags": "BOOL",
                "long": "LONG",
                "none": "FLOAT",
                "unsigned": "UINT16",
                "eight": "FLOAT8E4M3FN",
            }[name]
        )


class Odd(torch.nn.Module):
    """Weights of no bytes and of no dims, and one that two names share."""

    def __init__(self) -> None:
        super().__init__()
        self.none = torch.nn.Parameter(torch.empty(0, 4))
        self.scale = torch.nn.Parameter(torch.tensor(2.5))
        self.shift = torch.nn.Parameter(torch.arange(4.0))
        self.tied = self.shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.none, x * self.scale + self.shift]) + self.tied


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Odd]:
    """A program whose weights are external."""
    path = tmp_path_factory.mktemp("odd") / "program.pte"
    model = Odd().eval()
    edge = to_edge(torch.export.export(model, (torch.ones(2, 4),)))
    program = edge.to_executorch(ExecutorchBackendConfig(external_constants=True))
    path.write_bytes(program.buffer)
    return path, model


def test_empty_rank_0_and_tied_weights_are_found(odd: tuple[Path, Odd], tmp_path: Path) -> None:
    program, model = odd
    data = tmp_path / "odd.ptd"
    stream_pack.save_file(model, data, to="ptd")
    x = torch.randn(2, 4)
    (output,) = run_file(program, [x], data)
    assert np.array_equal(output, model(x).detach().numpy())


def test_weights_on_pages_are_found(odd: tuple[Path, Odd], tmp_path: Path) -> None:
    program, model = odd
    data = tmp_path / "pages.ptd"
    pages = stream_pack.Alignment(small=16384, large=16384)
    stream_pack.save_file(model, data, to="ptd", alignment=pages)
    with stream_pack.open(data) as pack:
        places = {pack[name].file_offset for name in ("scale", "shift", "tied")}
        assert len(places) == 2
        assert {place % 16384 for place in places} == {0}
    x = torch.randn(2, 4)
    (output,) = run_file(program, [x], data)
    assert np.array_equal(output, model(x).detach().numpy())


def test_weights_that_lie_past_4_gib_are_found(odd: tuple[Path, Odd], tmp_path: Path) -> None:
    # FB#7536: 32 bits would find zeros in the first 4 GiB
    program, model = odd
    data = tmp_path / "large.ptd"
    state = model.state_dict()
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {"zeros": ("uint8", (4 * GIB + GIB // 2,))}
    tensors.update({name: ("float32", tuple(tensor.shape)) for name, tensor in state.items()})
    endings = {name: tensor.numpy().tobytes() for name, tensor in state.items()}
    stream_pack.convert(SparseSource(tensors, endings=endings), data, to="ptd")
    assert data.stat().st_blocks * 512 < 64 << 20
    with stream_pack.open(data) as pack:
        assert pack["shift"].file_offset > 4 * GIB + GIB // 2
    x = torch.randn(2, 4)
    (output,) = run_file(program, [x], data)
    assert np.array_equal(output, model(x).detach().numpy())


def test_a_name_that_the_program_wants_and_the_pack_lacks_is_the_runtimes_error(
    odd: tuple[Path, Odd], tmp_path: Path
) -> None:
    program, model = odd
    data = tmp_path / "odd.ptd"
    stream_pack.save_file(
        {name: tensor for name, tensor in model.state_dict().items() if name != "scale"}, data, to="ptd"
    )
    with pytest.raises(RuntimeError):
        run_file(program, [torch.ones(2, 4)], data)


# Tensors in another dim order


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 1, 0, 2), (0, 1, 2, 3)])
def test_a_data_file_of_executorchs_own_gives_the_module_its_tensor_in_any_dim_order(
    order: tuple[int, ...], tmp_path: Path
) -> None:
    weight = torch.randn(8, 3, 3, 3)
    layout = TensorLayout(ScalarType.FLOAT, [8, 3, 3, 3], list(order))
    data = weight.permute(order).contiguous().numpy().tobytes()
    payload = DataPayload(buffers=[data], named_data={"w": DataEntry(0, 16, layout)})
    path = tmp_path / "weights.ptd"
    path.write_bytes(bytes(FlatTensorSerializer().serialize(payload)))
    stream_pack.convert(path, tmp_path / "weights.pack")
    assert torch.equal(stream_pack.load_file(tmp_path / "weights.pack")["w"], weight)
    with stream_pack.open(path, kind="ptd") as weights:
        assert torch.equal(weights["w"].torch(), weight)
        assert np.array_equal(weights["w"].numpy(), weight.numpy())


class ChannelsLast(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.arange(48.0).reshape(2, 3, 2, 4)
        self.weight = torch.nn.Parameter(weight.to(memory_format=torch.channels_last))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def test_weights_in_channels_last_are_the_modules_and_a_program_refuses_them_row_major(tmp_path: Path) -> None:
    model = ChannelsLast().eval()
    x = torch.randn(2, 3, 2, 4).to(memory_format=torch.channels_last)
    manager = to_edge(torch.export.export(model, (x,))).to_executorch(ExecutorchBackendConfig(external_constants=True))
    program = tmp_path / "program.pte"
    program.write_bytes(manager.buffer)
    manager.write_tensor_data_to_file(str(tmp_path))
    (stock,) = tmp_path.glob("*.ptd")
    with stream_pack.open(stock, kind="ptd") as weights:
        assert weights["weight"].dim_order == (0, 2, 3, 1)
        assert torch.equal(weights["weight"].torch(), model.weight)
    stream_pack.convert(stock, tmp_path / "weights.pack")
    assert torch.equal(stream_pack.load_file(tmp_path / "weights.pack")["weight"], model.weight)
    # What the warning says.
    report = stream_pack.convert(tmp_path / "weights.pack", tmp_path / "ours", to="ptd")
    assert "refuses them; give it the .ptd that they came from" in " ".join(report.warnings)
    (output,) = run_file(program, [x], stock)
    assert np.array_equal(output, model(x).detach().numpy())
    with pytest.raises(RuntimeError, match="Failed to execute"):
        run_file(program, [x], tmp_path / "ours")
