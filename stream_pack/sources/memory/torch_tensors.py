"""PyTorch tensors as live tensors.  Imported only when the caller has torch objects to pass."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from stream_pack.errors import UnsupportedTensorError
from stream_pack.format.dtypes import BY_TORCH, DTYPES
from stream_pack.pipeline.gather import row_windows
from stream_pack.pipeline.geometry import Recipe, merged, sign_flips
from stream_pack.sources.memory.tensor import HOST, LiveTensor, byte_span, cut
from stream_pack.text import quoted

__all__ = ["address_of", "describe_tensor", "module_tensors"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tensor(LiveTensor):
    tensor: torch.Tensor

    def read(self, begin: int, end: int, *, chunk_nbytes: int) -> Iterator[memoryview]:
        if self.derivation is not None:
            windows = _gathered(self.tensor, chunk_nbytes)
            return cut(windows, begin, end, chunk_nbytes=chunk_nbytes)
        if in_host_memory(self.tensor):
            return cut([_memory(self.tensor)], begin, end, chunk_nbytes=chunk_nbytes)
        return _fetched(self.tensor, begin, end, chunk_nbytes)


def module_tensors(module: torch.nn.Module) -> Mapping[str, object]:
    """What ``module`` would save: its parameters and persistent buffers, the very objects."""
    state: Mapping[str, object] = module.state_dict(keep_vars=True)
    return state


def in_host_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's pointer is one that this process can read at."""
    return tensor.device.type == "cpu"


def describe_tensor(name: str, tensor: torch.Tensor) -> LiveTensor:
    """What is to be known of ``tensor``, called ``name``.

    Raises: UnsupportedTensorError unless it is a plain, dense tensor with memory of its own: the pointer of any
    other is not memory, or what is there is not the tensor's elements.
    """
    reason = _why_not_plain(tensor)
    if reason:
        raise UnsupportedTensorError(f"tensor {quoted(name)} {reason}", tensor=name)
    if tensor.requires_grad:
        tensor = tensor.detach()  # no autograd graph over the windows
    dtype = _number(tensor.dtype)
    assert dtype is not None
    shape = list(tensor.shape)
    if DTYPES[dtype].torch_pairs:
        if not shape:
            raise UnsupportedTensorError(
                f"tensor {quoted(name)} is one {tensor.dtype} of rank 0: its two elements need a dim; "
                "reshape it to [1]",
                tensor=name,
            )
        shape[-1] *= 2
    itemsize = tensor.itemsize
    plain = _is_plain(tensor)
    strides = tuple(stride * itemsize for stride in tensor.stride())
    storage = tensor.untyped_storage()
    begin = int(tensor.storage_offset()) * itemsize
    span = (begin, begin + tensor.numel() * itemsize)
    begin, end = span if plain else byte_span(begin, tensor.shape, strides, itemsize)
    space: Hashable
    if in_host_memory(tensor):
        space, base = HOST, _storage_address(tensor)
    else:
        # Not every device has addresses; an allocation's own identity serves as well.
        space, base = (str(tensor.device), storage._cdata), 0
    if tensor.numel() and (end > storage.nbytes() or (space == HOST and not base)):
        raise UnsupportedTensorError(
            f"tensor {quoted(name)} reaches to byte {end} of a storage of {storage.nbytes()} bytes at address "
            f"{base:#x}: its memory was freed or moved away (sharded training does that); gather it first",
            tensor=name,
        )
    return _Tensor(
        dtype=dtype,
        shape=tuple(shape),
        space=space,
        storage=(base, base + storage.nbytes()),
        span=(base + begin, base + end),
        derivation=None if plain else _derivation(name, dtype, tensor, strides, base + begin),
        tensor=tensor,
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes are just what a pack holds; most of many tensors are so."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _derivation(name: str, dtype: int, tensor: torch.Tensor, strides: tuple[int, ...], address: int) -> Recipe | None:
    """How the bytes of a tensor are made from what is at ``address``; None if they are there."""
    dims, steps = merged(tensor.shape, strides, tensor.itemsize)
    unit_nbytes, signs = sign_flips(name, dtype, conj=tensor.is_conj(), neg=tensor.is_neg())
    made = Recipe(
        start=address,
        shape=dims,
        strides=steps,
        itemsize=tensor.itemsize,
        swap_nbytes=1,
        unit_nbytes=unit_nbytes,
        signs=signs,
    )
    return None if made.contiguous else made


def _why_not_plain(tensor: torch.Tensor) -> str | None:
    """Why the bytes at the tensor's pointer would not be its elements; None if they are."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        return f"is a {kind}, a tensor subclass whose shape and dtype may not match its stored bytes"
    if torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "is a wrapper that a function transform made (functionalize, vmap, grad): it has no bytes"
    if tensor.is_nested:
        return "is nested: save its values and offsets as tensors of their own"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}: save x.to_dense(), or its parts"
    if tensor.is_quantized:
        return f"is quantized ({tensor.dtype}): save x.dequantize(), or x.int_repr(), scale and zero point"
    if tensor.is_meta:
        return "is on the meta device: it has no bytes"
    if tensor._is_zerotensor():
        return "is a placeholder for zeros without bytes: save x.clone()"
    if _number(tensor.dtype) is None:
        return f"has the dtype {tensor.dtype}, which a pack cannot hold: save x.view(torch.uint8), or convert it"
    return None


@cache
def _number(dtype: torch.dtype) -> int | None:
    """The number of a dtype; None if no pack holds it."""
    return BY_TORCH.get(str(dtype).removeprefix("torch."))


class _Address:
    """Makes NumPy see memory that a tensor owns, without asking torch, whose modes could interfere."""

    def __init__(self, tensor: torch.Tensor, address: int, nbytes: int) -> None:
        self._tensor = tensor
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, True)}


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, read-only, keeping the tensor alive.  Copies: none."""
    nbytes = tensor.numel() * tensor.itemsize
    return memoryview(np.asarray(_Address(tensor, address_of(tensor), nbytes)))


def address_of(tensor: torch.Tensor) -> int:
    """Where the first element of a tensor in host memory is, to be read.

    A lazy clone, which shares the memory of its original, would become a copy if torch were asked for a pointer that
    may be written through.
    """
    if _is_lazy_clone(tensor):
        return _storage_address(tensor) + int(tensor.storage_offset()) * tensor.itemsize
    return tensor.data_ptr()


def _storage_address(tensor: torch.Tensor) -> int:
    if _is_lazy_clone(tensor):
        return int(torch._C._data_address(tensor))  # type: ignore[attr-defined]  # the storage's, despite its name
    return tensor.untyped_storage().data_ptr()


def _is_lazy_clone(tensor: torch.Tensor) -> bool:
    asked = getattr(torch._C, "_is_cow_tensor", None)  # None in a torch that has no lazy clones
    return asked is not None and bool(asked(tensor))


def _gathered(tensor: torch.Tensor, chunk_nbytes: int) -> Iterator[memoryview]:
    """The elements in row-major order, conj and neg resolved, fetched from wherever they are."""
    for index in row_windows(tensor.shape, tensor.itemsize, chunk_nbytes):
        window = tensor[index].contiguous().resolve_conj().resolve_neg()
        yield _memory(window.cpu())


def _fetched(tensor: torch.Tensor, begin: int, end: int, chunk_nbytes: int) -> Iterator[memoryview]:
    """Bytes ``[begin, end)`` of a contiguous tensor of another device, one chunk in host memory at a time."""
    flat = tensor.reshape(-1)
    itemsize = tensor.itemsize
    step = max(1, chunk_nbytes // itemsize)
    for first in range(begin // itemsize, -(-end // itemsize), step):
        window = _memory(flat[first : first + step].cpu())
        at = first * itemsize
        yield from cut([window], max(begin - at, 0), end - at, chunk_nbytes=chunk_nbytes)
