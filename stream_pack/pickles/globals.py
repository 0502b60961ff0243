"""What the names in a torch pickle mean to us: inert stand-ins for everything ``torch.load(weights_only=True)`` allows.

One table, :data:`TABLE`, decides about every name.  A name that is not in it becomes an ``Opaque`` and is remembered
in :attr:`TorchObjects.unknown`; what to do about it is the reader's decision, but for an unknown
``torch._utils._rebuild...``, which makes tensors by rules we do not know and is always an error.

Source: torch/_weights_only_unpickler.py, torch/_utils.py and torch/_tensor.py of torch 1.5 to 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from stream_pack.errors import UnsupportedCheckpointError
from stream_pack.format.dtypes import BY_TORCH
from stream_pack.format.limits import MAX_RANK
from stream_pack.pickles.dtensor import DTENSOR_NAMES, is_dtensor, local_tensor
from stream_pack.pickles.unpickler import Callee, Opaque, malformed
from stream_pack.text import quoted

__all__ = [
    "MAX_NUMBER",
    "STORAGE_CLASSES",
    "TABLE",
    "Storage",
    "Tensor",
    "TorchObjects",
    "TypedStorage",
    "Unpackable",
    "of_dtype",
]

MAX_NUMBER = 2**63 - 1
"""torch counts in signed 64-bit integers."""


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """One of torch's allocations: its record's key, its length, and the elements that it is said to have.

    ``data``: its bytes, if they are in the pickle and in no record.
    """

    key: str
    nbytes: int
    numel: int
    data: bytes | None = None

    def __str__(self) -> str:
        return f"storage {quoted(self.key)} of {self.nbytes} bytes"


@dataclass(frozen=True, slots=True, eq=False)
class TypedStorage:
    """A storage as one tensor refers to it; ``dtype`` is torch's name, None if untyped.

    ``begin`` and ``end`` bound the elements that the reference is good for: torch once had views of storages.
    """

    storage: Storage
    dtype: str | None
    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A strided tensor as the pickle describes it; nothing of it is checked but the types.

    Units: ``offset`` and ``strides`` count elements.  ``dtype`` is a number in
    :data:`stream_pack.format.dtypes.DTYPES`; ``shape`` counts torch's elements (for ``float4_e2m1fn_x2``: pairs).
    """

    storage: Storage
    dtype: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conj: bool
    neg: bool


@dataclass(frozen=True, slots=True, eq=False)
class Unpackable:
    """A tensor of torch that no pack can hold as it is: what it is, and what to do instead."""

    what: str
    advice: str


class TorchObjects:
    """The globals and storages of one pickle.

    ``storages`` by key, in the order of first use.  ``unknown`` holds the names that :data:`TABLE` lacks,
    in the order met.
    """

    def __init__(self) -> None:
        self.storages: dict[str, Storage] = {}
        self.unknown: dict[str, None] = {}

    def find_global(self, name: str) -> object:
        """For :class:`~stream_pack.pickles.unpickler.Unpickler`."""
        for old, new in _MOVED.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
        found = TABLE.get(name)
        if found is not None:
            return found
        if name.removeprefix("torch.") in BY_TORCH or _OTHER_DTYPE.fullmatch(name):
            return Opaque(name)
        if name.startswith("torch._utils._rebuild"):
            raise UnsupportedCheckpointError(
                f"the checkpoint holds tensors made by {quoted(name)}, which this version does not know: "
                "save them as plain tensors"
            )
        self.unknown[name] = None
        return Opaque(name)

    def find_persistent(self, identifier: object) -> TypedStorage:
        """For :class:`~stream_pack.pickles.unpickler.Unpickler`."""
        if type(identifier) is tuple and identifier[:1] == ("module",):
            raise UnsupportedCheckpointError(_WHOLE_MODULE)
        if type(identifier) is not tuple or len(identifier) not in (5, 6) or identifier[0] != "storage":
            raise malformed("a persistent id that does not describe a storage")
        kind, key, _location, numel = identifier[1:5]
        if type(kind) is not Opaque or kind.name not in _STORAGES:
            raise malformed("a storage of an unknown type")
        if type(key) is not str or type(numel) is not int:
            raise malformed("a storage whose key is not text, or whose length is not a number")
        dtype, itemsize = _STORAGES[kind.name]
        nbytes = numel * itemsize
        if not 0 <= nbytes <= MAX_NUMBER:
            raise malformed(f"storage {quoted(key)} of {numel} elements")
        storage = self.storages.get(key)
        if storage is None:
            storage = self.storages[key] = Storage(key, nbytes, numel)
        elif storage.nbytes != nbytes:
            raise malformed(f"storage {quoted(key)} has {storage.nbytes} bytes for one tensor, {nbytes} for another")
        begin, end = 0, numel
        if len(identifier) == 6 and identifier[5] is not None:
            begin, end = _view(identifier[5], numel)
        return TypedStorage(storage, dtype, begin, end)


def _view(metadata: object, numel: int) -> tuple[int, int]:
    """The elements of a storage that a view of it has, as torch before 0.4 wrote them: (key, offset, numel)."""
    if type(metadata) is not tuple or len(metadata) != 3 or not _ints(metadata[1:]):
        raise malformed("an invalid view of a storage")
    _, begin, count = metadata
    if begin < 0 or count < 0 or begin + count > numel:
        raise malformed(f"a view of {count} elements from {begin} on of a storage of {numel}")
    return begin, begin + count


_WHOLE_MODULE = (
    "this is a whole pickled module, which only its own code could rebuild: "
    "save its state_dict() instead, torch.save(model.state_dict(), ...)"
)

_MOVED = {"__builtin__.": "builtins.", "copy_reg.": "copyreg.", "torch.tensor.": "torch._tensor."}
"""Modules under their older names."""

_OTHER_DTYPE = re.compile(r"torch\.(bits|q?u?int)[0-9]+(x[0-9]+)?")
"""Dtypes that a pack does not hold: harmless beside tensors, refused as a tensor's."""

_STORAGES: dict[str, tuple[str | None, int]] = {
    f"{module}.{name}Storage": (dtype, itemsize)
    for module in ("torch", "torch.cuda")
    for name, dtype, itemsize in (
        ("Double", "float64", 8),
        ("Float", "float32", 4),
        ("Half", "float16", 2),
        ("BFloat16", "bfloat16", 2),
        ("Long", "int64", 8),
        ("Int", "int32", 4),
        ("Short", "int16", 2),
        ("Char", "int8", 1),
        ("Byte", "uint8", 1),
        ("Bool", "bool", 1),
        ("ComplexDouble", "complex128", 16),
        ("ComplexFloat", "complex64", 8),
        ("QInt8", "qint8", 1),
        ("QUInt8", "quint8", 1),
        ("QInt32", "qint32", 4),
        ("QUInt4x2", "quint4x2", 1),
        ("QUInt2x4", "quint2x4", 1),
    )
} | {
    "torch.storage.UntypedStorage": (None, 1),
    "torch.storage._UntypedStorage": (None, 1),
    "torch.UntypedStorage": (None, 1),
}
"""Element type and length of each of torch's storage classes; the numel of an untyped one counts bytes."""

STORAGE_CLASSES: dict[str, str] = {
    dtype: name.replace(".", " ")
    for name, (dtype, _) in _STORAGES.items()
    if dtype is not None and not name.startswith("torch.cuda.")
}
"""The class of a storage, by torch's name of its dtype, as a pickle calls it: its module and its own name."""


def _tensor(
    storage: object, offset: object, shape: object, strides: object, dtype: str | None, metadata: object
) -> Tensor | Unpackable:
    if type(storage) is not TypedStorage:
        raise malformed("a tensor without a storage")
    if not _ints((offset,)) or not _ints(shape) or not _ints(strides):
        raise malformed("a tensor whose offset, shape or strides are not whole numbers of 64 bits")
    assert isinstance(offset, int) and isinstance(shape, tuple) and isinstance(strides, tuple)
    if len(shape) > MAX_RANK:
        raise UnsupportedCheckpointError(f"the checkpoint holds a tensor of {len(shape)} dims: the limit is {MAX_RANK}")
    if len(shape) != len(strides):
        raise malformed(f"a tensor of {len(shape)} dims with {len(strides)} strides")
    conj, neg = _bits(metadata)
    number = BY_TORCH.get(dtype or "uint8")
    if number is None:
        return of_dtype(dtype or "uint8")
    if storage.begin or storage.end < storage.storage.numel:
        last = offset + sum((dim - 1) * stride for dim, stride in zip(shape, strides))
        if 0 not in shape and not 0 <= last < storage.end - storage.begin:
            raise malformed("a tensor that reaches beyond its view of a storage")
        offset += storage.begin
    return Tensor(storage.storage, number, offset, shape, strides, conj, neg)


def of_dtype(dtype: str) -> Unpackable:
    """A tensor of a dtype that no pack holds; ``dtype`` is torch's name for it."""
    return Unpackable(f"of dtype {quoted(f'torch.{dtype}')}", "convert it to a dtype that packs hold")


def _ints(values: object) -> bool:
    if type(values) is not tuple:
        return False
    for value in values:
        if type(value) is not int or not -MAX_NUMBER <= value <= MAX_NUMBER:
            return False
    return True


def _bits(metadata: object) -> tuple[bool, bool]:
    """The conj and neg bits: a dict that torch writes only where one of them is set."""
    if metadata is None:
        return False, False
    if type(metadata) is not dict or not all(
        key in ("conj", "neg") and type(value) is bool for key, value in metadata.items()
    ):
        raise malformed("tensor metadata other than the bits conj and neg")
    return metadata.get("conj", False), metadata.get("neg", False)


def _rebuild_tensor(storage: object, offset: object, shape: object, strides: object) -> Tensor | Unpackable:
    dtype = storage.dtype if isinstance(storage, TypedStorage) else None
    return _tensor(storage, offset, shape, strides, dtype, None)


def _rebuild_tensor_v2(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    _requires_grad: object = None,
    _hooks: object = None,
    metadata: object = None,
) -> Tensor | Unpackable:
    dtype = storage.dtype if isinstance(storage, TypedStorage) else None
    return _tensor(storage, offset, shape, strides, dtype, metadata)


def _rebuild_tensor_v3(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    _requires_grad: object,
    _hooks: object,
    dtype: object,
    metadata: object = None,
) -> Tensor | Unpackable:
    if type(dtype) is not Opaque or not dtype.name.startswith("torch."):
        raise malformed("a tensor with an unknown dtype")
    return _tensor(storage, offset, shape, strides, dtype.name.removeprefix("torch."), metadata)


def _rebuild_parameter(data: object, *_: object) -> object:
    return _of_tensor(data, "a parameter")


def _rebuild_from_type(function: object, kind: object, args: object, state: object) -> object:
    """A tensor of a subclass, or one with attributes of its own (which are dropped)."""
    kind_name = kind.name if isinstance(kind, Opaque | Callee) else ""
    if kind_name in _PLAIN:
        # Only functions that call no other: the file could nest these ones without end.
        if type(function) is not Callee or type(args) is not tuple or "_rebuild_from" in function.name:
            raise malformed("a tensor with attributes that is not built from a tensor")
        return _of_tensor(function.call(*args), kind_name)
    if is_dtensor(kind_name):
        local, shape = local_tensor(args, state) or (None, None)
        if type(local) is Tensor and type(shape) is tuple and local.shape == shape:
            return local
        return Unpackable("a DTensor, one rank's shard", "save x.full_tensor(), or the whole checkpoint's shards")
    if kind_name == "torch.nested._internal.nested_tensor.NestedTensor":
        return _NESTED
    return Unpackable(
        f"a tensor subclass, {quoted(kind_name)}", "save a plain tensor, or its parts under names of their own"
    )


def _of_tensor(data: object, what: str) -> object:
    if not isinstance(data, Tensor | Unpackable):
        raise malformed(f"{what} that is not built from a tensor")
    return data


_PLAIN = {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}

_NESTED = Unpackable("a nested tensor", "save its components under names of their own")


def _unpackable(what: str, advice: str) -> Callable[..., object]:
    value = Unpackable(what, advice)
    return lambda *_args: value


def _rebuild_qtensor(*args: object) -> Unpackable:
    """torch passes a storage, offset, shape, strides, and the quantizer's parameters, the first of them its kind."""
    how = []
    if args and type(args[0]) is TypedStorage and args[0].dtype is not None:
        how.append(args[0].dtype)
    if len(args) > 4 and isinstance(args[4], tuple) and args[4] and isinstance(args[4][0], Opaque):
        how.append(args[4][0].name.removeprefix("torch."))
    return Unpackable(f"quantized ({', '.join(how)})" if how else "quantized", "save x.dequantize()")


def _rebuild_wrapper_subclass(*args: object) -> object:
    kind = args[0] if args else None
    name = kind.name if isinstance(kind, Opaque | Callee) else "?"
    return Unpackable(
        f"a wrapper subclass, {quoted(name)}, whose outer shape and dtype have no bytes",
        "save its parts as plain tensors",
    )


def _ordered_dict(items: object = ()) -> object:
    if type(items) is tuple and not items:
        return {}
    pairs = list(items) if isinstance(items, list | tuple) else [()]
    if not all(isinstance(p, list | tuple) and len(p) == 2 and type(p[0]) is str for p in pairs):
        raise malformed("an OrderedDict that is not made of pairs of names and values")
    return {p[0]: p[1] for p in pairs if isinstance(p, list | tuple)}


def _default_dict(*_factory: object) -> object:
    return {}


def _size(shape: object = ()) -> object:
    return tuple(shape) if isinstance(shape, list | tuple) else Opaque("torch.Size", [shape])


def _leaf(name: str) -> Callee:
    """A type whose values stay closed: they are not tensors, and may be saved beside some."""
    return Callee(name, lambda *args: Opaque(name, list(args)))


_RESAVE = "its bytes are stored as a NumPy array inside the pickle: load and save it again with torch 2 or later"

_CALLS: dict[str, Callable[..., object]] = {
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": _default_dict,
    "torch.Size": _size,
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type": _rebuild_from_type,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch._utils._rebuild_wrapper_subclass": _rebuild_wrapper_subclass,
    "torch._utils._rebuild_qtensor": _rebuild_qtensor,
    "torch._utils._rebuild_sparse_tensor": _unpackable("sparse", "save x.to_dense()"),
    "torch._utils._rebuild_sparse_csr_tensor": _unpackable("sparse", "save x.to_dense()"),
    "torch._utils._rebuild_nested_tensor": lambda *_args: _NESTED,
    "torch.nested._internal.nested_tensor._rebuild_njt": lambda *_args: _NESTED,
    "torch._utils._rebuild_meta_tensor_no_storage": _unpackable(
        "on the meta device: it has no data", "materialise it before saving"
    ),
    "torch._utils._rebuild_device_tensor_from_numpy": _unpackable("on another device", _RESAVE),
    "torch._utils._rebuild_xla_tensor": _unpackable("on another device", _RESAVE),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _rebuild_parameter,
    "torch.nn.parameter.UninitializedParameter": _unpackable(
        "an uninitialised parameter: it has no data", "run the module once before saving"
    ),
    "torch.nn.parameter.UninitializedBuffer": _unpackable(
        "an uninitialised buffer: it has no data", "run the module once before saving"
    ),
}

_LEAVES = (
    "_codecs.encode",
    "builtins.bool",
    "builtins.bytearray",
    "builtins.bytes",
    "builtins.complex",
    "builtins.dict",
    "builtins.float",
    "builtins.frozenset",
    "builtins.int",
    "builtins.list",
    "builtins.long",
    "builtins.range",
    "builtins.set",
    "builtins.slice",
    "builtins.str",
    "builtins.tuple",
    "builtins.xrange",
    "collections.Counter",
    "collections.deque",
    "datetime.datetime",
    "datetime.timedelta",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib.WindowsPath",
    "torch.device",
    "torch.serialization._get_layout",
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.nn.parameter.Buffer",
)

TABLE: dict[str, Callee | Opaque] = (
    {name: Callee(name, call) for name, call in _CALLS.items()}
    | {name: _leaf(name) for name in (*_LEAVES, *DTENSOR_NAMES)}
    | {name: Opaque(name) for name in _STORAGES}
    | {
        f"torch.{name}": Opaque(f"torch.{name}")
        for name in (
            "per_tensor_affine",
            "per_tensor_symmetric",
            "per_channel_affine",
            "per_channel_symmetric",
            "per_channel_affine_float_qparams",
            "strided",
        )
    }
)
"""Every name we know, and what it becomes.  None of these calls anything but functions of this module."""
