"""What people save: plain tensors and views, everything beside them, and tensors that are more than an array."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from tests.sources.field.case import Case, Tensors, packed, refused
from tests.sources.torch_save.test_special import QUANTIZED, SPARSE, FromNumpy
from tests.support.torch_zips import saved

__all__ = ["CONTENT", "two_linear"]

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
FLOAT8 = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def of_dtypes(dtypes: list[torch.dtype]) -> dict[str, torch.Tensor]:
    return {str(dtype): torch.ones(3, 5).to(dtype) for dtype in dtypes}


def all_views() -> dict[str, torch.Tensor]:
    w = torch.arange(12.0).reshape(3, 4)
    return {"a": w, "b": w, "c": w[1:3], "d": w.t()}


def channels_last() -> dict[str, torch.Tensor]:
    w = torch.arange(120.0).reshape(2, 3, 4, 5)
    return {"w": w.to(memory_format=torch.channels_last)}


def reversed_strides() -> dict[str, torch.Tensor]:
    """facenet-pytorch's pnet.pt."""
    w = torch.empty_strided((10, 3, 3, 3), (1, 10, 30, 90))
    return {"w": w.copy_(torch.arange(270.0).reshape(10, 3, 3, 3))}


def with_attributes() -> dict[str, torch.Tensor]:
    parameter, tensor = torch.nn.Parameter(torch.ones(2)), torch.ones(3)
    parameter.tag = tensor.tag = "x"  # type: ignore[attr-defined]
    return {"p": parameter, "t": tensor, "b": torch.nn.Buffer(torch.ones(4))}


def two_layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))


def two_linear() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(torch.nn.Linear(3, 2).state_dict())


def training(**more: object) -> bytes:
    """What a training loop keeps: model, optimizer, schedule, random state and an average of the model."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return saved(
        {
            "model": two_linear(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "rng": torch.get_rng_state(),
            "ema": {"weight": torch.zeros(2, 3)},
            "epoch": 3,
            **more,
        }
    )


def keyed(key: object) -> bytes:
    return saved({key: torch.ones(1)})


def odd_names() -> dict[str, torch.Tensor]:
    names = ["", "../../etc/x", "a/b", "\u00e9", "e\u0301", "new\nline", "n" * 5000]
    return {name: torch.tensor(float(k)) for k, name in enumerate(names)}


def miscellany() -> bytes:
    return saved(
        {
            "w": torch.ones(2), "size": torch.Size([1]), "dtype": torch.float16, "device": torch.device("cpu"),
            "set": {1}, "bytes": b"x", "bytearray": bytearray(b"x"), "complex": 1j, "long": 1 << 70, "nan": math.nan,
            "counter": Counter("aab"), "layout": torch.strided,
        }
    )  # fmt: skip


def fine_grained() -> dict[str, torch.Tensor]:
    """NaN payloads, both zeros, infinities and denormals, told by their bits."""
    wide = [0x7FC00001, 0xFF800001, 0x80000000, 0x7F800000, 0xFF800000, 1, 0x807FFFFF]
    half = [0x7E01, 0xFC01, 0x8000, 0x7C00, 1, 0x83FF]
    brain = [0x7FC1, 0xFF81, 0x8000, 0x7F80, 1, 0x807F]
    return {
        "f32": torch.from_numpy(np.array(wide, np.uint32)).view(torch.float32),
        "f16": torch.from_numpy(np.array(half, np.uint16)).view(torch.float16),
        "bf16": torch.from_numpy(np.array(brain, np.uint16)).view(torch.bfloat16),
    }


def float4() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(torch.float4_e2m1fn_x2)}


def skipped_data() -> bytes:
    with torch.serialization.skip_data():
        return saved({"w": torch.arange(3.0)})


class Subclass(torch.Tensor):
    """A user's own."""


class Holder:
    """An object of the user's own code, with a tensor."""

    def __init__(self) -> None:
        self.tensor = torch.ones(3)


def beside_a_tensor() -> bytes:
    namespace = argparse.Namespace(lr=0.1)
    things = {
        "array": np.arange(3),
        "number": np.float32(1),
        "args": namespace,
        "function": two_layers,
        "obj": Holder(),
    }
    return saved({"w": torch.ones(2), **things})


def special(make: Callable[[], object]) -> bytes:
    return saved({"w": make()})


def two_tensors() -> torch.Tensor:
    from torch.testing._internal.two_tensor import TwoTensor

    made: torch.Tensor = TwoTensor(torch.ones(2), torch.ones(2))  # type: ignore[no-untyped-call]
    return made


def distributed(*, shard: bool) -> bytes:
    """What rank 0 of two saves by itself."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        placement: Placement = Shard(0) if shard else Replicate()
        return saved({"w": DTensor.from_local(torch.arange(4.0), mesh, [placement], run_check=False)})
    finally:
        dist.destroy_process_group()


def one(tensor: torch.Tensor) -> Callable[[], Tensors]:
    return lambda: {"w": tensor}


def bits(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(2, dtype=torch.uint8).view(dtype)


def jagged(layout: Any) -> torch.Tensor:
    made: torch.Tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    return made


PLAIN: list[Case] = [
    packed("flat, all dtypes", lambda: of_dtypes(DTYPES)),
    packed("an empty dict", dict),
    packed("a scalar without dims", one(torch.tensor(3.5))),
    packed("no elements", lambda: {"e": torch.empty(0), "e2": torch.empty(3, 0, 2)}),
    packed("transposed", one(torch.arange(12.0).reshape(3, 4).t())),
    packed("channels last", channels_last),
    packed("reversed strides", reversed_strides),
    packed("expanded", one(torch.tensor([1.0, 2.0]).expand(5, 2))),
    packed("a small view of a big storage", one(torch.arange(10_000.0)[500:510])),
    packed("tied and shared", all_views),
    packed("parameters, buffers and tensors with attributes", with_attributes),
    packed("an OrderedDict with metadata", lambda: two_layers().state_dict()),
    packed("odd names", odd_names),
    packed("many storages", lambda: {f"t{k}": torch.tensor(k) for k in range(500)}),
    packed("NaN payloads, signed zeros, infinities, denormals", fine_grained),
    packed("float8, five kinds", lambda: of_dtypes(FLOAT8)),
    packed("float4, two a byte", float4),
    packed("uint16, uint32, uint64", lambda: of_dtypes([torch.uint16, torch.uint32, torch.uint64])),
    packed("complex32", one(torch.arange(60, dtype=torch.uint8).view(torch.complex32))),
    packed("the conj bit", one(torch.tensor([1 + 2j, 3 - 4j]).conj())),
    packed("the neg bit", one(torch.tensor([1 + 2j, 3 - 4j]).conj().imag)),
]  # fmt: skip
"""``torch.save`` of a flat dict: both of its formats have to give the same pack."""

CONTENT: list[Case] = [
    *PLAIN,
    refused(
        "one element expanded to 2**40",
        lambda: saved({"w": torch.tensor(1.0).expand(2**40)}),
        "--allow-blowup",
    ),
    packed("a training checkpoint, with --key", two_linear, training, key="model"),
    packed("a training checkpoint, its one model by default", two_linear, training),
    refused(
        "a training checkpoint with two models",
        lambda: training(state_dict={"w": torch.ones(1)}),
        r"nested below .*'model'.*'state_dict'.*--key",
    ),
    refused("a tensor by itself", lambda: saved(torch.ones(3)), "a single tensor, which has no name"),
    refused("a list", lambda: saved([torch.ones(1), (torch.ones(2),)]), "a list, whose tensors have no names"),
    packed(
        "a list, all of it by --key",
        lambda: {"0": torch.ones(1), "1.0": torch.ones(2)},
        lambda: saved([torch.ones(1), (torch.ones(2),)]),
        key=".",
    ),
    *(
        refused(f"the key {key!r}", partial(keyed, key), "only text or an integer can name a tensor")
        for key in (("a", 1), None, 1.5)
    ),
    refused("a lone surrogate in a name", partial(keyed, "\ud800"), "surrogate|UTF-8"),
    refused(
        "colliding paths",
        lambda: saved({"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}),
        "two tensors are named 'a.b'",
        key=".",
    ),
    packed("values that are no tensors beside one", one(torch.ones(2)), miscellany),
    *(
        refused(f"{dtype}, which means nothing", partial(special, partial(bits, dtype)), "is of dtype 'torch")
        for dtype in (torch.bits8, torch.bits4x2, torch.bits1x8)
    ),
    *(
        refused(f"quantized {kind}", partial(special, make), "tensor 'w' is quantized")
        for kind, make in QUANTIZED.items()
    ),
    *(
        refused(f"sparse {kind}", partial(special, make), "tensor 'w' is sparse")
        for kind, make in SPARSE.items()
    ),
    *(
        refused(f"nested, {layout}", partial(special, partial(jagged, layout)), "tensor 'w' is")
        for layout in (torch.strided, torch.jagged)
    ),
    refused("on the meta device", partial(special, partial(torch.empty, 2, 3, device="meta")), "tensor 'w' "),
    packed("saved without its data: zeros that nobody can tell", one(torch.zeros(3)), skipped_data),
    refused("a subclass", partial(special, lambda: torch.ones(2).as_subclass(Subclass)), "tensor subclass"),
    refused("a wrapper of two tensors", partial(special, two_tensors), "tensor subclass.*TwoTensor"),
    packed("a replicated DTensor", one(torch.arange(4.0)), partial(distributed, shard=False)),
    refused("one rank's shard of a DTensor", partial(distributed, shard=True), "tensor 'w' is a DTensor, one rank's"),
    refused("a tensor of torch 1.12 on Apple's GPU", partial(special, FromNumpy), "torch 2 or later"),
    refused("a whole module", lambda: saved(two_layers()), "whole pickled module.*state_dict"),
    refused(
        "a whole module, legacy",
        lambda: saved(two_layers(), _use_new_zipfile_serialization=False),
        "whole pickled module.*state_dict",
    ),
    refused("objects beside a tensor", beside_a_tensor, r"argparse\.Namespace.*--ignore-unknown"),
    packed(
        "objects beside a tensor, ignored",
        lambda: {"w": torch.ones(2), "array": torch.arange(3)},
        beside_a_tensor,
        ignore_unknown=True,
    ),
]  # fmt: skip
