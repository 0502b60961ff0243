"""Tensors on the GPU for other libraries: PyTorch, MLX, pyobjc.

Each library is imported only by its own function.  All tensors and arrays share the same bytes, which are mapped
read-only: writing to them is undefined.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

from stream_pack.errors import MetalUnavailable, TensorTooLarge, UnsupportedDtype
from stream_pack.metal import objc
from stream_pack.metal.device import Buffer, Device
from stream_pack.metal.finalizers import Finalizer, cancel, keep_while, when_collected
from stream_pack.metal.rules import MAX_DIM, NDARRAY_NBYTES
from stream_pack.metal.views import MetalView
from stream_pack.reader.tensors import torch_form
from stream_pack.text import quoted

if TYPE_CHECKING:
    import torch

__all__ = ["as_pyobjc", "device_of_pyobjc", "mps_graph_feed", "to_mlx", "to_torch"]

KDL_METAL = 8
"""DLDeviceType of Metal: ``data`` is the ``id<MTLBuffer>``, and ``byte_offset`` is the offset in it."""

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
"""The dtypes of both DLPack and MPS.  Source: dmlc/dlpack, dlpack.h."""


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
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("byte_offset", c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("dl_tensor", _DLTensor), ("manager_ctx", c_void_p), ("deleter", c_void_p))


_Deleter = ctypes.CFUNCTYPE(None, c_void_p)


def _dlpack_type(view: MetalView) -> tuple[int, int]:
    if view.dtype not in DLPACK_TYPES:
        raise UnsupportedDtype(
            f"tensor {quoted(view.name)} has the dtype {quoted(view.dtype)}, which DLPack or MPS lacks; cast it with "
            "--dtype when it is packed, or use view.buffer and view.offset",
            tensor=view.name,
            dtype=view.dtype,
        )
    return DLPACK_TYPES[view.dtype]


def _refuse_wide(view: MetalView, library: str) -> None:
    """Raises: TensorTooLarge for a dim that the library cannot have."""
    if max(view.shape, default=0) > MAX_DIM:
        raise TensorTooLarge(
            f"tensor {quoted(view.name)} has the shape {list(view.shape)}, and {library} has no dims above {MAX_DIM}; "
            "pack it in another shape, or use view.buffer and view.offset",
            tensors=(view.name,),
            nbytes=view.nbytes,
            limit=MAX_DIM,
        )


class _Lease:
    """What a DLPack structure keeps: the buffer, and its own memory."""

    __slots__ = ("__weakref__", "buffer", "freed")

    def __init__(self, buffer: Buffer, free: Callable[[], object]) -> None:
        self.buffer = buffer
        self.freed: Finalizer | None = when_collected(self, free)


class _Lent:
    """What other libraries hold: DLPack structures.  ``held`` has what each of them keeps, by its address.

    Like the registry of :mod:`stream_pack.metal.objc`, all of this is kept until the process ends, because another
    library may call it at any time to release a tensor; the call waits for Python's lock.
    """

    def __init__(self) -> None:
        self.held: dict[int, _Lease] = {}
        libc, api = ctypes.CDLL(None), ctypes.PyDLL(None)
        self._malloc, self._free = libc.malloc, libc.free
        self._malloc.argtypes, self._malloc.restype = (c_size_t,), c_void_p
        self._free.argtypes, self._free.restype = (c_void_p,), None
        self._new_capsule = api.PyCapsule_New
        self._new_capsule.argtypes = (c_void_p, c_void_p, c_void_p)
        self._new_capsule.restype = ctypes.py_object
        self._get_pointer = api.PyCapsule_GetPointer
        self._get_pointer.argtypes, self._get_pointer.restype = (ctypes.py_object, c_void_p), c_void_p
        self._is_valid, self._set_name = api.PyCapsule_IsValid, api.PyCapsule_SetName
        self._get_destructor, self._set_destructor = api.PyCapsule_GetDestructor, api.PyCapsule_SetDestructor
        self._get_destructor.argtypes, self._get_destructor.restype = (ctypes.py_object,), c_void_p
        for function in (self._is_valid, self._set_name, self._set_destructor):
            function.argtypes = (ctypes.py_object, c_void_p)
        # A capsule holds the addresses of these names.
        self._names = [ctypes.create_string_buffer(name) for name in (b"dltensor", b"used_dltensor")]
        self._name, self._used_name = map(ctypes.addressof, self._names)
        # A C function that does nothing.
        self._destructor = ctypes.cast(api.Py_IsInitialized, c_void_p).value
        # Written in C, so that no Ctrl-C can come between the call and what it is for.
        self._delete = _Deleter(self.held.pop)
        objc.immortal(self)
        atexit.register(self._retire)

    @contextmanager
    def capsule(self, view: MetalView, *, keep: bool = True) -> Iterator[object]:
        """A DLPack capsule of a tensor, valid until the ``with`` block ends.

        ``keep``: the buffer is kept until the deleter is called.  Otherwise the caller keeps it, and the deleter is C's
        ``free``.  A deleter of Python's loses an exception that propagates while it is called, for example when a
        temporary is dropped in ``f(temporary, 1 / 0)``, and Python may crash for want of it.  For the same reason the
        capsule's destructor does nothing.

        A consumer that has taken the capsule either renames it or clears its destructor (nanobind, from 2.13 on).

        Raises: UnsupportedDtype, MetalBufferError for a tensor of 0 bytes.
        """
        address = self._structure(view, keep=keep)
        capsule = self._new_capsule(address, self._name, self._destructor)
        try:
            yield capsule
        finally:
            taken = not self._is_valid(capsule, self._name) or self._get_destructor(capsule) != self._destructor
            self._set_destructor(capsule, None)
            self._set_name(capsule, self._used_name)
            if not taken:
                (self.held.pop if keep else self._free)(address)

    def _structure(self, view: MetalView, *, keep: bool) -> int:
        """The address of a DLManagedTensor, followed by shape and strides."""
        code, bits = _dlpack_type(view)
        buffer = view.buffer
        # PyTorch honours byte_offset only beside strides, and not for tensors without dims (pytorch#170432).
        shape = view.shape or (1,)
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        dims = (c_int64 * (2 * len(shape)))(*shape, *strides)
        allocated: int | None = self._malloc(ctypes.sizeof(_DLManagedTensor) + ctypes.sizeof(dims))
        if allocated is None:
            raise MemoryError
        address = allocated
        dims_address = address + ctypes.sizeof(_DLManagedTensor)
        ctypes.memmove(dims_address, dims, ctypes.sizeof(dims))
        structure = _DLManagedTensor.from_address(address)
        structure.dl_tensor = _DLTensor(
            buffer.pointer,
            _DLDevice(KDL_METAL, 0),
            len(shape),
            _DLDataType(code, bits, 1),
            dims_address,
            dims_address + ctypes.sizeof(dims) // 2,
            view.offset,
        )
        structure.manager_ctx = None
        if keep:
            self.held[address] = _Lease(buffer, functools.partial(self._free, address))
        structure.deleter = ctypes.cast(self._delete if keep else self._free, c_void_p)
        return address

    def hand_over(self, capsule: object, producer: _Producer) -> None:
        """Let ``producer`` keep the buffer of a capsule that was taken, and not the structure, which is only freed.

        For a library that keeps the producer as long as the tensor.  It then calls nothing of Python's at the end.
        """
        address = self._get_pointer(capsule, self._used_name)
        lease = self.held[address]
        producer.buffer = lease.buffer
        if lease.freed is not None:
            cancel(lease.freed)
            lease.freed = None
        _DLManagedTensor.from_address(address).deleter = ctypes.cast(self._free, c_void_p)
        del self.held[address]

    def _retire(self) -> None:
        """Remove the deleters: the interpreter that would run them is shutting down."""
        for address in list(self.held):
            _DLManagedTensor.from_address(address).deleter = None


@functools.cache
def _lent() -> _Lent:
    return _Lent()


class _Producer:
    """A capsule as an object of DLPack's Python protocol."""

    __slots__ = ("__weakref__", "_capsule", "buffer")

    def __init__(self, capsule: object) -> None:
        self._capsule: object | None = capsule
        self.buffer: Buffer | None = None

    def __dlpack__(self, *, dl_device: object = None, copy: bool | None = None, **ignored: object) -> object:
        if copy:
            raise BufferError("a tensor of a pack is shared in place, never copied: pass copy=False")
        if dl_device not in (None, self.__dlpack_device__()):
            raise BufferError(
                f"a tensor of a pack is shared in place, on device {self.__dlpack_device__()}, not on {dl_device}"
            )
        capsule, self._capsule = self._capsule, None
        if capsule is None:
            raise BufferError("a capsule is given once; call to_mlx again")
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return KDL_METAL, 0


def to_torch(view: MetalView) -> torch.Tensor:
    """The tensor on PyTorch's ``mps`` device.

    Writing to it is undefined.  Wait for other uses of the buffer first (``torch.mps.synchronize``).

    Copies: none.
    Lifetime: the tensor keeps the buffer, the buffer keeps the memory.  Keep the tensor until after
    ``torch.mps.synchronize()``: see :class:`Buffer`.
    Raises: UnsupportedDtype; TypeError for a dtype that torch does not have; MissingPackageError without torch;
    MetalUnavailable for a PyTorch that ignores the tensor's offset in its buffer.
    """
    _dlpack_type(view)
    dtype, shape = torch_form(view.dtype, view.shape)
    import torch

    if view.nbytes and max(view.shape, default=0) > MAX_DIM:
        warnings.warn(
            f"tensor {quoted(view.name)} has the shape {list(view.shape)}: operations of MPS abort, or raise an error, "
            f"on a dim above {MAX_DIM}; give it another shape with .view() first",
            RuntimeWarning,
            stacklevel=2,
        )
    if not view.nbytes:
        return torch.empty(shape, dtype=dtype, device="mps")
    with _lent().capsule(view, keep=False) as capsule:
        tensor = torch.utils.dlpack.from_dlpack(capsule)
    # This object lives as long as the storage itself, however many tensors share it.
    keep_while(tensor.untyped_storage(), view.buffer)
    # Up to 2.9 silently the first bytes of the buffer (pytorch#168177).
    if tensor.storage_offset() * tensor.itemsize != view.offset:
        raise MetalUnavailable(
            f"torch {torch.__version__} ignores that tensor {quoted(view.name)} starts {view.offset} bytes into its "
            "buffer; use torch 2.10 or later, or view.own_buffer()"
        )
    return tensor if view.shape else tensor.reshape(())


def to_mlx(view: MetalView) -> Any:
    """The tensor as an ``mlx.core.array``; needs an MLX whose ``from_dlpack`` takes Metal buffers.

    Copies: none.
    Lifetime: the array keeps the buffer, the buffer keeps the memory.
    Raises: UnsupportedDtype; TensorTooLarge for a dim above 2147483647, which MLX does not have; MetalBufferError for a
    tensor of 0 bytes; ImportError without MLX.
    """
    _refuse_wide(view, "MLX")
    mlx = importlib.import_module("mlx.core")
    with _lent().capsule(view) as capsule:
        producer = _Producer(capsule)
        array = mlx.from_dlpack(producer, copy=False)
    # nanobind, with which MLX takes capsules, keeps the producer as long as the tensor (see its ndarray_dec_ref_free).
    find = weakref.ref(producer)
    del producer
    kept = find()
    if kept is not None:
        _lent().hand_over(capsule, kept)
    return array if view.shape else array.reshape(())


def as_pyobjc(buffer: Buffer) -> Any:
    """The MTLBuffer as a pyobjc object, which holds its own reference.  Raises: ImportError without pyobjc."""
    return importlib.import_module("objc").objc_object(c_void_p=buffer.pointer)


def device_of_pyobjc(device: Any) -> Device:
    """A pyobjc ``MTLDevice`` as a :class:`Device`; both stay usable."""
    return Device.retained(objc.native(), device.__c_void_p__().value)


def mps_graph_feed(view: MetalView) -> Any:
    """An ``MPSGraphTensorData`` (pyobjc) to feed a graph with, over the tensor's own buffer.

    Copies: none.
    Lifetime: it holds the buffer, the buffer holds the memory.
    Warns: RuntimeWarning from 4 GiB on, where MPS may abort, also on macOS 15.
    Raises: UnsupportedDtype; TensorTooLarge for a dim above 2147483647, on which MPS aborts; AlignmentError unless the
    tensor starts at a page; MetalBufferError for a tensor of 0 bytes; ImportError without
    pyobjc-framework-MetalPerformanceShadersGraph.
    """
    dtype = view.mps_dtype
    _refuse_wide(view, "MPS")
    if view.nbytes >= NDARRAY_NBYTES:
        warnings.warn(
            f"tensor {quoted(view.name)} has {view.nbytes} bytes: from 4 GiB on MPS may abort, also on macOS 15",
            RuntimeWarning,
            stacklevel=2,
        )
    graph = importlib.import_module("MetalPerformanceShadersGraph")
    buffer = as_pyobjc(view.own_buffer())
    data = graph.MPSGraphTensorData.alloc()
    return data.initWithMTLBuffer_shape_dataType_(buffer, list(view.shape) or [1], dtype)
