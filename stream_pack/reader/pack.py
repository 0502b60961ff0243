"""The public entry point: :func:`open` gives a :class:`Pack`, a mapping of names to tensors in the file.

Opening proves the head and every bound in it, and reads no byte of a tensor (docs/FORMAT.md, "What a reader must do").
"""

from __future__ import annotations

import os
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import (
    FormatError,
    NewerVersionError,
    OptionError,
    RawPayloadError,
    StateError,
    UnknownTensorError,
)
from stream_pack.format.head import Head
from stream_pack.format.header_kinds import KINDS
from stream_pack.format.proof import prove_footer, prove_length
from stream_pack.reader.blocks import BlockCheck
from stream_pack.reader.file_range import FileRange
from stream_pack.reader.lending import Contents, Lender
from stream_pack.reader.mapping import Mapping as FileMapping
from stream_pack.reader.opening import naming, prove_tail, read_footer, read_head
from stream_pack.reader.payload import read_payload
from stream_pack.reader.tensors import materialize
from stream_pack.reader.verify import Progress, VerifyReport, verify_open
from stream_pack.reader.views import TensorSlice, View, view_of
from stream_pack.text import counted, quoted

if TYPE_CHECKING:
    import torch

__all__ = ["Kind", "Pack", "Verify", "open"]

Verify = Literal["never", "lazy", "full"]
Kind = Literal["pack", "mps", "xnnpack", "ptd"]


def open(
    path: str | os.PathLike[str],
    *,
    offset: int = 0,
    nbytes: int | None = None,
    verify: Verify = "never",
    kind: Kind = "pack",
) -> Pack:
    """Map a pack.

    ``offset`` and ``nbytes`` say where it is inside another file; without ``nbytes`` its own length counts.  Bytes that
    follow it are an error only if neither is given.

    ``verify``: ``"never"`` proves the head and every bound; ``"lazy"`` also the root checksum now, and each block
    before its first use; ``"full"`` proves everything now.

    ``kind``: ``"mps"`` and ``"xnnpack"`` open a raw delegate payload of ExecuTorch, whose tensors are named by number,
    ``"ptd"`` one of its data files.  These have no checksums to verify.

    Units: bytes; ``offset`` counts from the file's first byte.
    Copies: none.
    Lifetime: several threads may use a pack, and so may a child that is forked off, whatever its parent's threads were
    doing with it then.
    Raises: OSError; OptionError; NotAPackError, RawPayloadError, NewerVersionError, TruncatedError, TrailingBytesError,
    FormatError, ChecksumError.
    """
    if verify not in get_args(Verify):
        raise OptionError(f"verify={verify!r}: expected 'never', 'lazy' or 'full'")
    if kind not in get_args(Kind):
        raise OptionError(f"kind={kind!r}: expected 'pack', 'mps', 'xnnpack' or 'ptd'")
    file = FileRange(path, offset=offset, nbytes=nbytes)
    try:
        with naming(file):
            return _open(file, _Origin(file.path, offset, nbytes, verify, kind, file.identity))
    except BaseException:
        file.close()
        raise


def _open(file: FileRange, origin: _Origin) -> Pack:
    if origin.kind != "pack":
        if origin.verify != "never":
            raise RawPayloadError("a raw payload has no checksums: there is nothing to verify it against")
        contents = read_payload(file, KINDS[origin.kind])
    else:
        head = read_head(file)
        contained = origin.offset != 0 or origin.nbytes is not None
        prove_length(head, file.available, contained=contained)
        try:
            footer = prove_footer(head, read_footer(file, head))
        except NewerVersionError:  # or a flipped bit, which the root checksum shows
            footer = prove_tail(file, head)
        contents = Contents(
            head=head,
            checksum=footer.checksum,
            index=head.index,
            region_file_offset=head.region_file_offset,
            region_nbytes=head.region_nbytes,
            nbytes=head.pack_nbytes,
            faults={},
            dim_orders={},
        )
    mapping = FileMapping(file, contents.nbytes)
    lazy = origin.verify == "lazy"
    check = BlockCheck(file, contents.head) if contents.head is not None and lazy else None
    pack = Pack.__new__(Pack)
    pack._lender, pack._origin = Lender(mapping, contents, check, (_reopen, (origin,))), origin
    if origin.verify == "full":
        pack.verify().raise_if_damaged()
    return pack


@dataclass(frozen=True, slots=True)
class _Origin:
    """How a pack was opened, so that another process can open it again."""

    path: str
    offset: int
    nbytes: int | None
    verify: Verify
    kind: Kind
    identity: tuple[int, ...]


def _reopen(origin: _Origin) -> Lender:
    pack = open(origin.path, offset=origin.offset, nbytes=origin.nbytes, verify=origin.verify, kind=origin.kind)
    if pack._origin.identity != origin.identity:
        raise StateError(f"{origin.path} was changed or replaced since it was opened: open it again")
    return pack._lender


def _again(lender: Lender, origin: _Origin) -> Pack:
    pack = Pack.__new__(Pack)
    pack._lender, pack._origin = lender, origin
    return pack


class _Values(ValuesView[View]):
    _mapping: Pack

    def __iter__(self) -> Iterator[View]:
        return self._mapping._views()


class _Items(ItemsView[str, View]):
    _mapping: Pack

    def __iter__(self) -> Iterator[tuple[str, View]]:
        return ((view.name, view) for view in self._mapping._views())


class Pack(Mapping[str, View]):
    """An open pack: names to :class:`View`, in file order.

    Made by :func:`open`.  Pickling keeps the path, and unpickling opens the same file again, once for a pack and all
    views of it in one pickle.

    Lifetime: arrays and tensors of its views keep the memory mapped.  Leaving a ``with`` block never raises because of
    them; :meth:`close` does, because it unmaps now.
    Raises (everything but :meth:`close`): StateError once closed, also by another thread.
    """

    _lender: Lender
    _origin: _Origin

    def __init__(self) -> None:
        raise TypeError("a Pack is made by stream_pack.open")

    def __repr__(self) -> str:
        state = "closed" if self._lender.closed else counted(len(self), "tensor")
        return f"<Pack {self.path!r}, {state}>"

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (self._lender, self._origin)

    @property
    def path(self) -> str:
        """The file, as an absolute path."""
        return self._origin.path

    @property
    def offset(self) -> int:
        """File offset of the pack's first byte; its own file offsets count from there."""
        return self._origin.offset

    @property
    def nbytes(self) -> int:
        """Length of the pack in bytes."""
        return self._contents.nbytes

    @property
    def kind(self) -> Kind:
        """``"pack"``, or what it was opened as: ``"mps"``, ``"xnnpack"``, ``"ptd"``."""
        return self._origin.kind

    @property
    def checksum(self) -> int:
        """The root checksum, an XXH3-64 that covers the checksums of the head and of every block.

        Packs of the same checksum hold the same bytes.  It is what the footer says: opening proves where the footer is
        and no more; ``verify="lazy"`` or ``"full"`` and :meth:`verify` prove that it is right.

        Raises: RawPayloadError for a raw payload, which has none.
        """
        checksum = self._contents.checksum
        if checksum is None:
            raise self._no_head()
        return checksum

    @property
    def _head(self) -> Head:
        head = self._contents.head
        if head is None:
            raise self._no_head()
        return head

    def _no_head(self) -> RawPayloadError:
        return RawPayloadError(f"{self.path}: a raw payload has no index and no checksums")

    @property
    def _contents(self) -> Contents:
        """Index and region, also of a raw payload."""
        return self._lender.contents

    @property
    def metadata(self) -> dict[str, str]:
        """The text attached to the pack; a copy."""
        return self._contents.index.notes()

    def notes(self, name: str) -> dict[str, str]:
        """The text attached to a tensor; a copy.  Raises: UnknownTensorError."""
        return self._contents.index.notes(self._find(name))

    def _number(self, name: object) -> int | None:
        if not isinstance(name, str):
            return None
        try:
            return self._contents.index.find(name)
        except FormatError as error:
            raise FormatError(f"{self.path}: {error}") from None

    def _find(self, name: object) -> int:
        index = self._contents.index
        tensor = self._number(name)
        if tensor is None:
            shown = quoted(name) if isinstance(name, str) else repr(name)
            raise UnknownTensorError(
                f"{self.path} has no tensor {shown}; list(pack) gives the names of its {counted(len(index), 'tensor')}",
                tensor=name,
            )
        return tensor

    def __getitem__(self, name: str) -> View:
        """Raises: UnknownTensorError, which is a KeyError; FormatError if the index gives a wrong order of names."""
        return view_of(self._lender, self._find(name), name)

    def __contains__(self, name: object) -> bool:
        return self._number(name) is not None

    def __len__(self) -> int:
        return len(self._contents.index)

    def __iter__(self) -> Iterator[str]:
        index = self._contents.index
        return map(index.name, range(len(index)))

    def _views(self) -> Iterator[View]:
        # By number: no search for each name.
        return (view_of(self._lender, tensor, name) for tensor, name in enumerate(self))

    def values(self) -> ValuesView[View]:
        """All tensors, in file order."""
        return _Values(self)

    def items(self) -> ItemsView[str, View]:
        """All names with their tensors, in file order."""
        return _Items(self)

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor to be sliced: ``pack.get_slice("wq")[0:128]`` reads (and proves) only those rows.

        Raises: UnknownTensorError.
        """
        return TensorSlice(self[name])

    def memory(self, file_offset: int, nbytes: int, *, tensors: Iterable[int]) -> NDArray[np.uint8]:
        """Bytes of the pack where they are mapped, read-only and shared: for uses that need an address, such as Metal.

        ``tensors``: numbers (in file order) of those that :meth:`close` names while the array is alive.  Nothing is
        verified, even with ``verify="lazy"``.

        Units: bytes; ``file_offset`` counts from the pack's first byte.
        Copies: none.
        Lifetime: the array keeps the memory mapped.
        Raises: OptionError for a range that is empty or not inside the pack; TruncatedError when the file was truncated
        since it was opened.
        """
        if file_offset < 0 or nbytes < 1 or file_offset + nbytes > self.nbytes:
            raise OptionError(
                f"bytes {file_offset} to {file_offset + nbytes} are not inside the pack, which has {self.nbytes}"
            )
        return self._lender.range(file_offset, nbytes, tensors)

    def materialize(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors, independent of the file.  Tensors that share bytes share them in the copies too.

        Copies: each buffer once.
        """
        return materialize({name: view.torch() for name, view in self.items()})

    def verify(self, *, jobs: int | None = None, progress: Progress | None = None) -> VerifyReport:
        """Recompute every checksum and prove all that opening does not; the report lists all damage.

        ``jobs``: threads, by default as many as there are cores.  ``progress(done, total)`` is called in bytes of
        tensor data.
        Raises: OptionError, LimitError for ``jobs``; RawPayloadError for a raw payload, which has no checksums.
        """
        return verify_open(self._lender.mapping.file, self._head, jobs=jobs, progress=progress)

    def close(self) -> None:
        """Unmap the file.  Does nothing when already closed.

        Raises: MappingInUse, which names the tensors, and closes nothing, while arrays or tensors of it are alive.
        """
        self._lender.close()

    def __enter__(self) -> Pack:
        return self

    def __exit__(self, *exc: object) -> None:
        self._lender.release()
