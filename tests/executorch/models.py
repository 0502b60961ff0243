"""Small models, exported here and now for the XNNPACK delegate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower

__all__ = ["EXPORTS", "exported"]


class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.linear = torch.nn.Linear(8 * 6 * 6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(self.norm(self.conv(x)).relu().flatten(1))
        return result


class Alike(torch.nn.Module):
    """Two layers with equal weights, which ExecuTorch stores under one key."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.second.load_state_dict(self.first.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x).sigmoid())
        return result


class TwoDelegates(torch.nn.Module):
    """An operator in the middle that XNNPACK does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = torch.nn.Linear(12, 20), torch.nn.Linear(20, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.after(torch.cumsum(self.before(x), dim=1))
        return result


class Block(torch.nn.Module):
    """One block of a Llama, without a cache."""

    def __init__(self, dim: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = torch.nn.RMSNorm(dim), torch.nn.RMSNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (torch.nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w3 = (torch.nn.Linear(dim, 3 * dim, bias=False) for _ in range(2))
        self.w2 = torch.nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        normed = self.attention_norm(x)
        q, k, v = (
            projection(normed).view(batch, length, self.heads, -1).transpose(1, 2)
            for projection in (self.wq, self.wk, self.wv)
        )
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.wo(attended.transpose(1, 2).reshape(batch, length, dim))
        normed = self.feed_norm(x)
        result: torch.Tensor = x + self.w2(torch.nn.functional.silu(self.w1(normed)) * self.w3(normed))
        return result


def _quantized(model: torch.nn.Module, bits: int) -> torch.nn.Module:
    """Weights of ``bits`` in groups of 32, activations of 8 bits: what export_llama calls 8da4w and 8da8w."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup
    from torchao.utils import unwrap_tensor_subclass

    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=getattr(torch, f"int{bits}"), weight_granularity=PerGroup(32) if bits == 4 else PerAxis(0)
    )
    quantize_(model, config)
    unwrapped: torch.nn.Module = unwrap_tensor_subclass(model)
    return unwrapped


def _static(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.nn.Module:
    """Weights and activations of 8 bits, whose scales are constants that a calibration has found."""
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    prepared = prepare_pt2e(torch.export.export(model.eval(), inputs).module(), quantizer)
    prepared(*inputs)
    converted: torch.nn.Module = convert_pt2e(prepared)
    return converted


@functools.cache
def exported(name: str) -> tuple[bytes, Sequence[torch.Tensor]]:
    """The program of one of :data:`EXPORTS`, as stock ExecuTorch writes it, and inputs for it."""
    torch.manual_seed(0)
    with torch.no_grad():
        model, inputs = EXPORTS[name]()
        program = torch.export.export(model if isinstance(model, torch.fx.GraphModule) else model.eval(), inputs)
        manager = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        return bytes(manager.to_executorch().buffer), inputs


EXPORTS: dict[str, Callable[[], tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]] = {
    "convolutions fp32": lambda: (Convolutions(), (torch.randn(1, 3, 6, 6),)),
    "linear fp16": lambda: (TwoDelegates().half(), (torch.randn(3, 12).half(),)),
    "equal weights": lambda: (Alike(), (torch.randn(2, 16),)),
    "two delegates": lambda: (TwoDelegates(), (torch.randn(3, 12),)),
    "llama block fp32": lambda: (Block(), (torch.randn(1, 7, 64),)),
    "two delegates int8": lambda: (_quantized(TwoDelegates(), 8), (torch.randn(3, 12),)),
    "convolutions static int8": lambda: (
        _static(Convolutions(), (torch.randn(1, 3, 6, 6),)),
        (torch.randn(1, 3, 6, 6),),
    ),
    "llama block int4": lambda: (_quantized(Block(), 4), (torch.randn(1, 7, 64),)),
}
