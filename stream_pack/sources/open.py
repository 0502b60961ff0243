"""Opens any accepted input as a :class:`Source`."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from stream_pack.arguments.paths import require_path
from stream_pack.errors import OptionError, RawPayloadError, SourceError, UnsupportedCheckpointError
from stream_pack.format.file_kinds import SNIFF_NBYTES, Kind, describe, sniff
from stream_pack.pickles.nesting import WHOLE, Key, flattening
from stream_pack.pickles.state_dict import Flatten, StateDict
from stream_pack.pipeline.budget import UNLIMITED, MemoryWatch
from stream_pack.pipeline.bytestream import BinaryReader, ByteStream
from stream_pack.pipeline.source import Source
from stream_pack.pipeline.spool import MEMORY_NBYTES, Spool

if TYPE_CHECKING:
    import torch

    from stream_pack.pickles.outline import KeySummary

__all__ = ["Convertible", "FileAt", "list_keys", "open_source"]


@dataclass(frozen=True, slots=True)
class FileAt:
    """What begins at byte ``offset`` of the regular file at ``path``; more may follow a pack there."""

    path: str
    offset: int


Convertible: TypeAlias = (
    "str | os.PathLike[str] | FileAt | int | BinaryReader | Mapping[str, object] | torch.nn.Module | Source"
)
"""A path (of a file, or of a folder that holds a set of files), a place in a file, a descriptor, a binary file object,
a mapping of names to tensors or arrays, a module, or a source.
"""


def open_source(
    source: Convertible,
    *,
    key: Key = None,
    ignore_unknown: bool = False,
    spool: Spool | None = None,
    max_memory: int | None = None,
) -> Source:
    """Open ``source``; close what comes back.

    ``key`` and ``ignore_unknown``: as for :func:`stream_pack.pickles.nesting.flattening`.  ``spool``: for an archive
    that has to be read whole before its tensors are known; None refuses such an archive.  ``max_memory``: what the
    process may have of resident anonymous memory while it reads what the source holds; above it, a LimitError.

    Raises: UnsupportedCheckpointError for bytes that are no checkpoint, saying what they look like;
    as the source's constructor; OptionError for a key where nothing is nested; OSError; TypeError
    for any other object.
    """
    flatten = flattening(key, ignore_unknown=ignore_unknown)
    nests = False

    def noting(value: object, unknown: Collection[str]) -> StateDict:
        nonlocal nests
        nests = True
        return flatten(value, unknown)

    opened = _Opening(noting, spool, MemoryWatch(max_memory)).source(source)
    if key is not None and key != WHOLE and not nests:
        opened.close()
        raise OptionError(f"--key (key=) selects from nested dicts, and this source ({opened.traits.kind}) has none")
    return opened


def list_keys(source: Convertible, *, spool_dir: str | os.PathLike[str] | None = None) -> list[KeySummary]:
    """List the keys of a checkpoint that hold tensors: what ``key`` of :func:`stream_pack.convert` can choose.

    Nested dicts and lists are followed two levels down, up to 1,000 rows.  A source that does not nest its tensors has
    one row.  Only the head of a pipe is read, unless it is an archive that does not begin with its pickle: that waits
    in memory up to 16 MiB, else in ``spool_dir``, by default the system's folder for temporary files.

    Raises: SourceError and its kinds for what is not a checkpoint; LimitError; OSError.
    """
    from stream_pack.pickles.outline import KeySummary, outline

    found: list[list[KeySummary]] = []

    def keep(value: object, unknown: Collection[str]) -> StateDict:
        found.append(outline(value))
        try:
            return flattening(ignore_unknown=True)(value, unknown)
        except SourceError:  # the keys are what the caller needs to avoid this
            return StateDict({}, 0)

    if spool_dir is not None:
        require_path("spool_dir", spool_dir, "folder")
    with _Opening(keep, Spool(spool_dir, memory_nbytes=MEMORY_NBYTES)).source(source) as opened:
        if len(found) == 1:
            return found[0]
        catalog = opened.catalog
        return [KeySummary((), opened.traits.kind, len(catalog), catalog.storages_nbytes, True)]


@dataclass(frozen=True, slots=True)
class _Opening:
    """How checkpoints that nest their tensors are to be read."""

    flatten: Flatten
    spool: Spool | None
    watch: MemoryWatch = UNLIMITED
    within: bool = False

    def source(self, source: Convertible) -> Source:
        if isinstance(source, (str, os.PathLike)):
            require_path("source", source, "source")
            return self._path(source)
        if isinstance(source, FileAt):
            require_path("source", source.path, "source")
            nbytes = max(0, os.stat(source.path).st_size - source.offset)
            return replace(self, within=True).stream(ByteStream.open_range(source.path, source.offset, nbytes))
        if isinstance(source, int):
            return self.stream(ByteStream(source))
        if isinstance(source, Source):
            return source
        if not isinstance(source, Mapping) and hasattr(source, "read"):
            return self.stream(ByteStream(cast("BinaryReader", source)))
        from stream_pack.sources.memory.source import LiveSource

        return LiveSource(cast("Mapping[str, object] | torch.nn.Module", source))

    def _path(self, given: str | os.PathLike[str]) -> Source:
        """A file, or a set of files: what a folder holds, or what an index names."""
        path = Path(given)
        if path.is_dir():
            from stream_pack.sources.sets.recognise import open_folder

            return open_folder(path, open_file=self._file, flatten=self.flatten, watch=self.watch)
        from stream_pack.sources.sets.hugging_face import is_index_name, open_hugging_face

        if is_index_name(path.name):
            return open_hugging_face(path, open_file=self._file, watch=self.watch)
        return self._file(given)

    def _file(self, path: str | os.PathLike[str]) -> Source:
        return self.stream(ByteStream.open_path(path))

    def stream(self, stream: ByteStream) -> Source:
        """The source that ``stream`` is, which it owns, also when there is an error."""
        try:
            with self.watch.over(stream):
                return self._known(stream)
        except BaseException:
            stream.close()
            raise

    def _known(self, stream: ByteStream) -> Source:
        """The source that reads the kind of file that ``stream`` begins like."""
        start = stream.peek(SNIFF_NBYTES)
        kind = sniff(start)
        if kind is Kind.TORCH_ZIP:
            from stream_pack.sources.torch_save.zip import TorchZipSource

            return TorchZipSource(stream, flatten=self.flatten, spool=self.spool, watch=self.watch)
        if kind is Kind.TORCH_LEGACY:
            from stream_pack.sources.torch_save.legacy import LegacyTorchSource

            return LegacyTorchSource(stream, flatten=self.flatten, watch=self.watch)
        if kind is Kind.SAFETENSORS:
            from stream_pack.sources.safetensors import SafetensorsSource

            return SafetensorsSource(stream, watch=self.watch)
        if kind is Kind.GGUF:
            from stream_pack.sources.gguf.source import GgufSource

            return GgufSource(stream, watch=self.watch)
        if kind in (Kind.PACK, Kind.PTD):
            from stream_pack.sources.pack.source import PackSource

            try:
                return PackSource(stream, within=self.within)
            except RawPayloadError:
                from stream_pack.et_files.survey import survey_payload
                from stream_pack.sources.executorch.source import open_et_file

                return open_et_file(stream, survey_payload, spool=self.spool)
        if kind is Kind.PTE:
            from stream_pack.et_files.survey import survey_program
            from stream_pack.sources.executorch.source import open_et_file

            return open_et_file(stream, survey_program, spool=self.spool)
        raise UnsupportedCheckpointError(f"cannot convert this input: it is {describe(kind, start)}")
