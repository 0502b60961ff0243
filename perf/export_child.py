"""One export, in a process of its own: ``python -m perf.export_child CASE WAY NBYTES TARGET``.

Prints a line of JSON: how long it took, and how much more memory than the model it needed.

A toy is exported first, the same way, so that what Python imports on the way (some 100 MiB) is there before the clock
starts.  Then the model is made, the kernel's high-water mark of resident memory (``VmHWM``) is reset to what is
resident now, and the rest counts: torch.export, lowering, emitting, and the program on the disk.  The mark misses no
moment, and takes mapped files in, so the error is to the side of too much.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

__all__ = ["CASES", "WAYS"]

WAYS = ("streamed", "stock")
WIDTH = 4096  # of each linear layer, both ways: Llama-3-8B's
TOKENS = torch.arange(8).reshape(1, 8)


class Llama(torch.nn.Module):
    """What counts of a Llama here: a quarter of the weights in an embedding, three quarters in square linear layers.

    The embedding is looked up with ``gather``, which neither MPS nor XNNPACK takes, so it stays outside of delegates.
    """

    def __init__(self, *, rows: int, width: int, layers: int, layer: Callable[[int], torch.nn.Module]) -> None:
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.randn(rows, width), requires_grad=False)
        self.layers = torch.nn.ModuleList(layer(width) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        width = self.embedding.shape[1]
        rows = tokens.reshape(-1, 1).expand(-1, width)
        hidden = torch.gather(self.embedding, 0, rows)
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        return hidden


def float_layer(width: int) -> torch.nn.Module:
    return torch.nn.Linear(width, width, bias=False)


def quantized_layer(width: int) -> torch.nn.Module:
    """As ``-qmode 8da4w`` makes it: 4-bit weights in groups, held as int8; activations are quantized as they come."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    layer = float_layer(width)
    quantize_(
        layer,
        Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4,  # type: ignore[attr-defined]  # missing in torch's stubs
            weight_granularity=PerGroup(128),
        ),
    )
    return layer


def make_model(case: str, nbytes: int) -> Llama:
    """The model of a case, ``nbytes`` of weights (and the scales of quantized ones, some 3 %); 0: a toy."""
    quantized = case == "xnnpack-8da4w"
    layer = quantized_layer if quantized else float_layer
    if not nbytes:
        return Llama(rows=16, width=256, layers=2, layer=layer).eval()
    matrix_nbytes = WIDTH * WIDTH * (1 if quantized else 4)  # as the model holds it
    rows, layers = nbytes // 4 // (4 * WIDTH), max(1, nbytes * 3 // 4 // matrix_nbytes)
    return Llama(rows=rows, width=WIDTH, layers=layers, layer=layer).eval()


def lower_to_mps(program: torch.export.ExportedProgram, *, half: bool) -> Any:
    from executorch.backends.apple.mps.partition.mps_partitioner import MPSPartitioner
    from executorch.exir import to_edge
    from executorch.exir.backend.backend_details import CompileSpec

    partitioner = MPSPartitioner([CompileSpec("use_fp16", bytes([half]))])
    return to_edge(program).to_backend(partitioner)


def lower_to_xnnpack(program: torch.export.ExportedProgram, *, quantized: bool) -> Any:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import (
        XnnpackDynamicallyQuantizedPartitioner,
        XnnpackPartitioner,
    )
    from executorch.exir import to_edge_transform_and_lower

    partitioner = XnnpackDynamicallyQuantizedPartitioner() if quantized else XnnpackPartitioner()
    return to_edge_transform_and_lower(program, partitioner=[partitioner])


CASES: dict[str, Callable[[torch.export.ExportedProgram], Any]] = {
    "mps-fp32": lambda program: lower_to_mps(program, half=False),
    "mps-fp16": lambda program: lower_to_mps(program, half=True),
    "xnnpack-fp32": lambda program: lower_to_xnnpack(program, quantized=False),
    "xnnpack-8da4w": lambda program: lower_to_xnnpack(program, quantized=True),
}


def export(case: str, way: str, model: Llama, target: Path) -> None:
    """From the model to a program on the disk, synced."""
    from stream_pack.executorch import streaming_constants, write_program

    streamed = way == "streamed"
    with streaming_constants(target.parent) if streamed else nullcontext():
        program = torch.export.export(model, (TOKENS,), strict=True)
        manager = CASES[case](program).to_executorch()
    if streamed:
        write_program(manager, target)
        return
    with target.open("wb") as file:
        manager.write_to_file(file)
        os.fsync(file.fileno())


def resident_nbytes(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (at most since the mark was reset), of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def main(case: str, way: str, nbytes: int, target: Path) -> dict[str, float]:
    """Warm up, make the model, measure."""
    warnings.simplefilter("ignore")  # ExecuTorch's and torch's own
    export(case, way, make_model(case, 0), target)
    model = make_model(case, nbytes)
    gc.collect()
    # What malloc kept of the toy would be used again, unseen.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the high-water mark
    before, began = resident_nbytes("VmRSS"), time.perf_counter()
    export(case, way, model, target)
    return {
        "seconds": time.perf_counter() - began,
        "added_nbytes": resident_nbytes("VmHWM") - before,
        "program_nbytes": target.stat().st_size,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))))
