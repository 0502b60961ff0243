"""The element types a pack can hold, and what each is called elsewhere.

One table, :data:`DTYPES`; a dtype's place in it is a run-time number only (a file carries its own small table of names
and bits, see :mod:`stream_pack.format.index`).  Nothing here imports torch or ml_dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BITS", "BY_NAME", "BY_SAFETENSORS", "BY_TORCH", "DTYPES", "GGUF_TYPE_NOTE", "Dtype"]

GGUF_TYPE_NOTE = "gguf.type"
"""The note that has the type of a block-quantised tensor of GGUF, whose bytes are uint8 in a pack."""


@dataclass(frozen=True, slots=True)
class Dtype:
    """An element type.

    ``name`` is the name in the index: torch's name, but for the packed four-bit types, where the index counts elements
    and torch (``float4_e2m1fn_x2``) counts pairs. ``bits`` per element.  ``swap_nbytes`` is the unit whose bytes a
    big-endian source reverses: the element, or for complex numbers each half. ``numpy`` is the NumPy type of the same
    bytes, None where NumPy has none; ``ml_dtypes`` is the name in the package of that name.  ``torch`` is the attribute
    of ``torch``, None where torch has none. ``safetensors`` is the name in a safetensors header, None where that format
    has none. ``mps`` is ExecuTorch's MPSDataType, 0 (invalid) where MPS has none; ``executorch`` its ScalarType, None
    where a .ptd has none.
    """

    name: str
    bits: int
    swap_nbytes: int
    numpy: str | None
    ml_dtypes: str | None
    torch: str | None
    safetensors: str | None
    mps: int
    executorch: int | None

    @property
    def torch_pairs(self) -> bool:
        """Whether one torch element holds two of ours: its last dim is doubled in the index."""
        return self.torch is not None and self.torch.endswith("_x2")


# Order: as in torch's documentation.  MPSDataType numbers: ExecuTorch 1.4.1,
# backends/apple/mps/serialization/schema.fbs, enum MPSDataType; ScalarType: schema/scalar_type.fbs.
DTYPES: tuple[Dtype, ...] = (
    #     name              bits swap numpy   ml_dtypes          torch               safetensors  mps  executorch
    Dtype("bool",             8, 1, "bool",  None,              "bool",             "BOOL",       15,   11),
    Dtype("uint8",            8, 1, "u1",    None,              "uint8",            "U8",         11,    0),
    Dtype("int8",             8, 1, "i1",    None,              "int8",             "I8",          6,    1),
    Dtype("uint16",          16, 2, "<u2",   None,              "uint16",           "U16",        12,   27),
    Dtype("int16",           16, 2, "<i2",   None,              "int16",            "I16",         7,    2),
    Dtype("uint32",          32, 4, "<u4",   None,              "uint32",           "U32",        13,   28),
    Dtype("int32",           32, 4, "<i4",   None,              "int32",            "I32",         8,    3),
    Dtype("uint64",          64, 8, "<u8",   None,              "uint64",           "U64",        14,   29),
    Dtype("int64",           64, 8, "<i8",   None,              "int64",            "I64",         9,    4),
    Dtype("float16",         16, 2, "<f2",   None,              "float16",          "F16",         1,    5),
    Dtype("bfloat16",        16, 2, None,    "bfloat16",        "bfloat16",         "BF16",        4,   15),
    Dtype("float32",         32, 4, "<f4",   None,              "float32",          "F32",         2,    6),
    Dtype("float64",         64, 8, "<f8",   None,              "float64",          "F64",         3,    7),
    Dtype("complex32",       32, 2, None,    None,              "complex32",        None,         16, None),
    Dtype("complex64",       64, 4, "<c8",   None,              "complex64",        "C64",        17, None),
    Dtype("complex128",     128, 8, "<c16",  None,              "complex128",       None,          0, None),
    Dtype("float8_e4m3fn",    8, 1, None,    "float8_e4m3fn",   "float8_e4m3fn",    "F8_E4M3",     0,   24),
    Dtype("float8_e5m2",      8, 1, None,    "float8_e5m2",     "float8_e5m2",      "F8_E5M2",     0,   23),
    Dtype("float8_e4m3fnuz",  8, 1, None,    "float8_e4m3fnuz", "float8_e4m3fnuz",  "F8_E4M3FNUZ", 0,   26),
    Dtype("float8_e5m2fnuz",  8, 1, None,    "float8_e5m2fnuz", "float8_e5m2fnuz",  "F8_E5M2FNUZ", 0,   25),
    Dtype("float8_e8m0fnu",   8, 1, None,    "float8_e8m0fnu",  "float8_e8m0fnu",   "F8_E8M0",     0, None),
    Dtype("float4_e2m1fn",    4, 1, None,    None,              "float4_e2m1fn_x2", "F4",          0, None),
    Dtype("int4",             4, 1, None,    None,              None,               None,          5, None),
    Dtype("uint4",            4, 1, None,    None,              None,               None,         10, None),
)  # fmt: skip

BITS: tuple[int, ...] = tuple(dtype.bits for dtype in DTYPES)
BY_NAME: dict[str, int] = {dtype.name: number for number, dtype in enumerate(DTYPES)}
BY_TORCH: dict[str, int] = {d.torch: n for n, d in enumerate(DTYPES) if d.torch is not None}
BY_SAFETENSORS: dict[str, int] = {d.safetensors: n for n, d in enumerate(DTYPES) if d.safetensors is not None}
