"""What a file is, from its first bytes: what this package reads, and what it is given by mistake.

Pure: bytes in, a :class:`Kind` or a line of text out.  A kind is a guess at what the bytes *claim* to be; the reader
proves it.

Some formats begin with bytes that depend on the content: a safetensors file with the length of its header, a tar
archive with the name of a file.  These may spell another format's magic, so their structure is looked at first.
"""

from __future__ import annotations

import enum
import re

from stream_pack.format.header_kinds import KINDS

__all__ = [
    "CHECKPOINTS",
    "MAX_SAFETENSORS_HEADER_NBYTES",
    "SNIFF_NBYTES",
    "Kind",
    "describe",
    "describe_start",
    "sniff",
]

SNIFF_NBYTES = 512
"""Bytes that are looked at: one block of a tar archive."""

MAX_SAFETENSORS_HEADER_NBYTES = 100_000_000
"""The format's own limit."""


class Kind(enum.Enum):
    """What the first bytes claim: in words, with what to do about it after a colon."""

    # What this package reads.
    PACK = "a pack, or a raw payload of ExecuTorch"
    TORCH_ZIP = "a checkpoint of torch.save"
    TORCH_LEGACY = "a checkpoint of torch.save in its format before 1.6"
    SAFETENSORS = "a safetensors file"
    GGUF = "a GGUF file"
    # Other forms of weights.
    TORCH_TAR = "a checkpoint of torch 0.1: load it with a later torch and save it again"
    TORCH_SCRIPT = "a TorchScript archive, which holds code: load it with torch.jit.load and save its state_dict()"
    TORCH_EXPORT = "a torch.export program (.pt2): load it with torch.export.load and save its state_dict"
    PICKLE = (
        "a bare pickle, which torch.save did not write: if you trust it, load it and save its tensors with torch.save"
    )
    NPZ = "a NumPy archive (.npz): pass its arrays to save_file"
    NPY = "a NumPy array (.npy), without a name: pass it to save_file under one"
    HDF5 = "an HDF5 file (Keras?): load it where it was written and save its tensors"
    PTE = "an ExecuTorch program (.pte)"
    PTD = "an ExecuTorch data file (.ptd)"
    # Containers and compression.
    ZIP = "a zip archive, but not of torch.save: unpack it first"
    TAR = "a tar archive: pipe the checkpoint in it, `tar -xOf FILE MEMBER | stream-pack convert - x.pack`"
    GZIP = "compressed data: pipe it through gzip -dc"
    ZSTD = "compressed data: pipe it through zstd -dc"
    XZ = "compressed data: pipe it through xz -dc"
    BZIP2 = "compressed data: pipe it through bzip2 -dc"
    LZ4 = "compressed data: pipe it through lz4 -dc"
    # Common mistakes.
    EMPTY = "empty input: did the program that writes it fail?"
    ZEROS = "nothing but zero bytes: a download that reserved its space and never filled it?"
    HTML = "a web page: the server returned a login or error page instead of the file"
    GIT_LFS = "a Git LFS pointer, not the file itself: run git lfs pull"
    LEADING_TEXT = "text before the archive: does the program that writes it print to stdout?"
    TEXT = "text"
    UNKNOWN = "an unknown format"


_MAGICS: tuple[tuple[int, bytes, Kind], ...] = (
    (0, b"GGUF", Kind.GGUF),
    (0, b"\x93NUMPY", Kind.NPY),
    (0, b"\x89HDF\r\n\x1a\n", Kind.HDF5),
    (0, b"\x1f\x8b\x08", Kind.GZIP),  # with the only method there is
    (0, b"\x28\xb5\x2f\xfd", Kind.ZSTD),
    (0, b"\xfd7zXZ\0", Kind.XZ),
    (4, b"1AY&SY", Kind.BZIP2),  # after "BZh" and a digit; a text may begin like those
    (0, b"\x04\x22\x4d\x18", Kind.LZ4),
    (0, b"PK\5\6", Kind.ZIP),  # an archive of no files
    # Flatbuffers carry their identifier, two letters and a two-digit version, after the root's offset.
    (4, b"ET12", Kind.PTE),
    (4, b"FT01", Kind.PTD),  # a pack of that kind too: the reader tells them apart
    *((kind.magic_at, kind.magic, Kind.PACK) for kind in KINDS.values()),
    (257, b"ustar", Kind.TAR),
)

_ZIP_ENTRY = b"PK\3\4"
_BEGINNING = re.compile(
    b"|".join(
        [rb"PK\x03\x04|\x80[\x02-\x05]", *(re.escape(kind.magic) for kind in KINDS.values() if kind.magic_at == 0)]
    )
)
"""Where an input that begins with text may really begin: an archive, a pickle, a pack."""
_TORCH_RECORD = re.compile(r"(data\.pkl|data/\d+|\.data/.*|byteorder|version|\.format_version|\.storage_alignment)$")
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # Source: torch/serialization.py, MAGIC_NUMBER
_LEGACY = re.compile(
    rb"(\x80[\x02-\x05](\x95.{8})?\x8a\x0a%b|L%dL\n)\."  # protocols 2 to 5, the later two in frames; 0 and 1
    % (re.escape(_LEGACY_MAGIC.to_bytes(10, "little")), _LEGACY_MAGIC),
    re.DOTALL,
)

_JSON_OBJECTS = re.compile(rb"""\{\s*(?:\}\s*|"(?:[^"\\\0-\x1f]|\\.)*\\?(?:"\s*(?::\s*(?:[{n].*)?)?)?)?""", re.DOTALL)
"""The beginning, cut off anywhere, of a JSON object of objects (or nulls), or all of an empty one.

No pickle has one at byte 8 after a length within the limit: what follows the brace there is an opcode.  Nor has a GGUF
file of 123 tensors, whose ninth byte is a brace.
"""
_DAMAGED_HEADER_NBYTES = 2**40
"""A greater claim than the format allows is still safetensors, damaged.  Eight bytes of text are above this."""

_WEB_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype|html|head|\?xml)\b", re.IGNORECASE)
_NOT_TEXT = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f\x7f]")  # ESC is text: terminals' colours
_MAX_SHOWN = 40

CHECKPOINTS = frozenset({Kind.TORCH_ZIP, Kind.SAFETENSORS, Kind.TORCH_LEGACY, Kind.GGUF, Kind.PTE, Kind.PTD})
"""What a pack can be made of."""

_SHOWS_START = {Kind.HTML, Kind.LEADING_TEXT, Kind.TEXT}


def sniff(start: bytes) -> Kind:
    """Tell what ``start``, the first 512 bytes of an input (all of it, if it has fewer), claims to be."""
    if not start:
        return Kind.EMPTY
    start = start[:SNIFF_NBYTES]
    return _structured(start) or _marked(start) or _resembled(start)


def describe(kind: Kind, start: bytes) -> str:
    """One line: what input of this kind is, and what to do about it; ``start`` as for :func:`sniff`."""
    text: str = kind.value
    if kind in _SHOWS_START:
        what, separator, advice = text.partition(": ")
        shown = start[:_MAX_SHOWN]
        if kind is Kind.LEADING_TEXT:
            shown = _BEGINNING.split(start, maxsplit=1)[0][-_MAX_SHOWN:]
        text = f"{what}, {shown!r}{separator}{advice}"
    elif kind is Kind.UNKNOWN:
        end = "" if len(start) > 16 else " (the whole input)"
        text = f"{text}: it begins with the bytes {start[:16].hex(' ')}{end}"
    return text


def describe_start(start: bytes) -> str:
    """One line: what ``start`` looks like, and what to do about it."""
    return describe(sniff(start), start)


def _zip_kind(start: bytes) -> Kind:
    # Local header of the first entry: name length at 26, name at 30.
    nbytes = int.from_bytes(start[26:28], "little")
    entry = start[30 : 30 + nbytes].decode(errors="replace")
    if entry.endswith(".npy"):
        return Kind.NPZ
    record = entry.partition("/")[2]
    if record.startswith(("code/", "constants.pkl")):
        return Kind.TORCH_SCRIPT
    if record.startswith(("data/weights/", "data/constants/", "models/", "archive_")):
        return Kind.TORCH_EXPORT
    if not record and entry.endswith("/"):
        # An unpacked archive that was zipped again, its folder first; or anything else.
        return Kind.TORCH_ZIP
    # torch.jit.save too puts data/0 first; only the directory at the archive's end tells it from a checkpoint that
    # was zipped again in another order.
    return Kind.TORCH_ZIP if _TORCH_RECORD.match(record) else Kind.ZIP


def _structured(start: bytes) -> Kind | None:
    """A format whose first bytes may be any other's magic, told by more than them."""
    nbytes = int.from_bytes(start[:8], "little")
    if nbytes <= MAX_SAFETENSORS_HEADER_NBYTES and _JSON_OBJECTS.fullmatch(start[8 : 8 + nbytes]):
        return Kind.SAFETENSORS
    if not _is_tar_block(start):
        return None
    return Kind.TORCH_TAR if start.startswith(b"sys_info\0") else Kind.TAR


def _marked(start: bytes) -> Kind | None:
    """A format that has a magic."""
    if not _is_text(start):  # which may be about GGUF
        for at, magic, kind in _MAGICS:
            if start.startswith(magic, at):
                return kind
    if start.startswith(_ZIP_ENTRY):
        return _zip_kind(start)
    if _LEGACY.match(start):
        return Kind.TORCH_LEGACY
    if start[0] == 0x80 and 2 <= int.from_bytes(start[1:2], "little") <= 5:
        return Kind.PICKLE
    return Kind.GIT_LFS if start.startswith(b"version https://git-lfs") else None


def _resembled(start: bytes) -> Kind:
    """What is left: damaged files, and what is no file of weights at all."""
    if _WEB_PAGE.match(start):
        return Kind.HTML
    nbytes = int.from_bytes(start[:8], "little")
    if nbytes < _DAMAGED_HEADER_NBYTES and start[8 : 8 + nbytes].lstrip().startswith(b"{"):
        return Kind.SAFETENSORS
    if not start.strip(b"\0"):
        return Kind.ZEROS
    return _text_kind(start)


def _is_tar_block(start: bytes) -> bool:
    """Whether ``start`` is the header of a file in a tar archive: its checksum, in octal, is the sum of its bytes."""
    at, end = 148, 156
    field = start[at:end].strip(b" \0")
    if len(start) < SNIFF_NBYTES or re.fullmatch(b"[0-7]+", field) is None:
        return False
    return int(field, 8) == sum(start[:at]) + (end - at) * ord(" ") + sum(start[end:])


def _text_kind(start: bytes) -> Kind:
    beginning = _BEGINNING.search(start)
    if beginning and _is_text(start[: beginning.start()]):
        return Kind.LEADING_TEXT
    return Kind.TEXT if _is_text(start) else Kind.UNKNOWN


def _is_text(data: bytes) -> bool:
    if _NOT_TEXT.search(data):
        return False
    try:
        data.decode()
    except UnicodeDecodeError as error:
        # The last character may be cut off.
        return error.end == len(data) and error.start > len(data) - 4 > 0
    return True
