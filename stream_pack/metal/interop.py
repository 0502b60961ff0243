"""Tensors on the GPU, as other libraries take them: PyTorch, MLX, pyobjc.

Each of them is imported only by the function that serves it.  What they get stands on the same bytes, which are mapped
read-only: writing through any of it is undefined.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import math
from ctypes import c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

from stream_pack.errors import MetalUnavailable, UnsupportedDtype
from stream_pack.metal import objc
from stream_pack.metal.device import Buffer, Device
from stream_pack.metal.views import MetalView
from stream_pack.reader.tensors import torch_form

if TYPE_CHECKING:
    import torch

__all__ = ["as_pyobjc", "device_of_pyobjc", "mps_graph_feed", "to_mlx", "to_torch"]

KDL_METAL = 8
"""DLDeviceType of Metal: ``data`` is the ``id<MTLBuffer>``, and only ``byte_offset`` leads into it."""

DLPACK_TYPES: dict[str, tuple[int, int]] = {
    # name: DLDataTypeCode, bits
    "bool": (6, 8),
    "uint8": (1, 8),
    "int8": (0, 8),
    "uint16": (1, 16),
    "int16": (0, 16),
    "uint32": (1, 32),
    "int32": (0, 32),
    "uint64": (1, 64),
    "int64": (0, 64),
    "float16": (2, 16),
    "bfloat16": (4, 16),
    "float32": (2, 32),
    "complex64": (5, 64),
}
"""Those that both DLPack and MPS have.  Source: dmlc/dlpack, dlpack.h."""


class _DLDevice(ctypes.Structure):
    _fields_ = (("device_type", c_int32), ("device_id", c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device", _DLDevice),
        ("ndim", c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("dl_tensor", _DLTensor), ("manager_ctx", c_void_p), ("deleter", c_void_p))


_Deleter = ctypes.CFUNCTYPE(None, c_void_p)


class _Lent:
    """The structures that other libraries hold, by address, each with the buffer it keeps.

    Like the registry of :mod:`stream_pack.metal.objc`, all of this lives for ever, because it is called whenever
    another library lets go.
    """

    def __init__(self) -> None:
        self.structures: dict[int, tuple[_DLManagedTensor, Buffer]] = {}
        api = ctypes.PyDLL(None)
        self._new_capsule = api.PyCapsule_New
        self._new_capsule.argtypes = (c_void_p, c_void_p, c_void_p)
        self._new_capsule.restype = ctypes.py_object
        is_valid, pointer_of = api.PyCapsule_IsValid, api.PyCapsule_GetPointer
        is_valid.argtypes = pointer_of.argtypes = (c_void_p, c_void_p)
        pointer_of.restype = c_void_p
        pop = self.structures.pop
        self._name = ctypes.create_string_buffer(b"dltensor")
        name = ctypes.addressof(self._name)

        # Bound to what they need: while the interpreter ends, the names of this module are gone.
        def delete(structure: int) -> None:
            pop(structure, None)

        def destroy(capsule: int) -> None:
            if is_valid(capsule, name):  # nobody took it: who does, renames it
                pop(pointer_of(capsule, name), None)

        self._delete, self._destroy = _Deleter(delete), _Deleter(destroy)
        objc.immortal(self)
        atexit.register(self._retire)

    def capsule(self, view: MetalView) -> object:
        """A DLPack capsule of a tensor.  Raises: UnsupportedDtype, MetalBufferError for a tensor of 0 bytes."""
        if view.dtype not in DLPACK_TYPES:
            raise UnsupportedDtype(
                f"tensor {view.name!r} is {view.dtype}, which DLPack and MPS do not both have; cast it before it is "
                "packed, or use view.buffer and view.offset",
                tensor=view.name,
                dtype=view.dtype,
            )
        code, bits = DLPACK_TYPES[view.dtype]
        # PyTorch honours byte_offset only beside strides, and not for tensors without dims (pytorch#170432).
        shape = view.shape or (1,)
        dims = c_int64 * len(shape)
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        structure = _DLManagedTensor(
            _DLTensor(
                view.buffer.pointer,
                _DLDevice(KDL_METAL, 0),
                len(shape),
                _DLDataType(code, bits, 1),
                dims(*shape),
                dims(*strides),
                view.offset,
            ),
            None,
            ctypes.cast(self._delete, c_void_p),
        )
        address = ctypes.addressof(structure)
        self.structures[address] = (structure, view.buffer)
        return self._new_capsule(
            address, ctypes.addressof(self._name), ctypes.cast(self._destroy, c_void_p)
        )

    def _retire(self) -> None:
        """What dies from now on finds no deleter: the interpreter that would run it is ending."""
        for structure, _ in list(self.structures.values()):
            structure.deleter = None


@functools.cache
def _lent() -> _Lent:
    return _Lent()


class _Producer:
    """A view as the object that DLPack's Python protocol wants."""

    def __init__(self, view: MetalView) -> None:
        self._view = view

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: object = None,
        dl_device: object = None,
        copy: bool | None = None,
    ) -> object:
        if copy:
            raise BufferError("a tensor of a pack is lent in place, not copied: pass copy=False")
        return _lent().capsule(self._view)

    def __dlpack_device__(self) -> tuple[int, int]:
        return KDL_METAL, 0


def to_torch(view: MetalView) -> torch.Tensor:
    """The tensor on PyTorch's ``mps`` device.

    Writing to it is undefined.  Whatever else uses the buffer has to be waited for (``torch.mps.synchronize``).

    Copies: none.
    Lifetime: the tensor keeps the buffer, the buffer keeps the memory.
    Raises: UnsupportedDtype; MetalUnavailable for a PyTorch that ignores where in a buffer the tensor stands.
    """
    import torch

    if not view.nbytes:
        dtype, shape = torch_form(view.dtype, view.shape)
        return torch.empty(shape, dtype=dtype, device="mps")
    tensor = torch.utils.dlpack.from_dlpack(_lent().capsule(view))
    # Up to 2.9 silently the first bytes of the buffer (pytorch#168177).
    if tensor.storage_offset() * tensor.itemsize != view.offset:
        raise MetalUnavailable(
            f"torch {torch.__version__} ignores that tensor {view.name!r} stands {view.offset} bytes into its buffer; "
            "use torch 2.10 or later, or view.own_buffer()"
        )
    return tensor if view.shape else tensor.reshape(())


def to_mlx(view: MetalView) -> Any:
    """The tensor as an ``mlx.core.array``; needs an MLX whose ``from_dlpack`` takes Metal buffers.

    Copies: none.
    Lifetime: the array keeps the buffer, the buffer keeps the memory.
    Raises: UnsupportedDtype; MetalBufferError for a tensor of 0 bytes; ImportError without MLX.
    """
    mlx = importlib.import_module("mlx.core")
    array = mlx.from_dlpack(_Producer(view), copy=False)
    return array if view.shape else array.reshape(())


def as_pyobjc(buffer: Buffer) -> Any:
    """The MTLBuffer as a pyobjc object, which holds a reference of its own.  Raises: ImportError without pyobjc."""
    return importlib.import_module("objc").objc_object(c_void_p=buffer.pointer)


def device_of_pyobjc(device: Any) -> Device:
    """A pyobjc ``MTLDevice`` as ours; both may be used."""
    return Device.retained(objc.native(), device.__c_void_p__().value)


def mps_graph_feed(view: MetalView) -> Any:
    """An ``MPSGraphTensorData`` (pyobjc) to feed a graph with, over a buffer of the tensor's own.

    Copies: none.
    Lifetime: it holds the buffer, the buffer holds the memory.
    Raises: UnsupportedDtype; AlignmentError unless the tensor starts at a page; MetalBufferError for a tensor of 0
    bytes; ImportError without pyobjc-framework-MetalPerformanceShadersGraph.
    """
    dtype = view.mps_dtype
    graph = importlib.import_module("MetalPerformanceShadersGraph")
    buffer = as_pyobjc(view.own_buffer())
    data = graph.MPSGraphTensorData.alloc()
    return data.initWithMTLBuffer_shape_dataType_(buffer, list(view.shape) or [1], dtype)
