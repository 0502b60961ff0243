"""From whatever a caller calls a source to the :class:`Source` that reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from stream_pack.errors import UnsupportedCheckpointError
from stream_pack.sniff import SNIFF_NBYTES, Kind, describe, sniff
from stream_pack.writer.bytestream import BinaryReader, ByteStream
from stream_pack.writer.source import Source

if TYPE_CHECKING:
    import torch

__all__ = ["Convertible", "open_source"]

Convertible: TypeAlias = (
    "str | os.PathLike[str] | int | BinaryReader | Mapping[str, object] | torch.nn.Module | Source"
)
"""A path (of a file, or of a folder that holds a set of files), a descriptor, a binary file object, a
mapping of names to tensors or arrays, a module, or a source."""


def open_source(source: Convertible) -> Source:
    """Open ``source``; close what comes back.

    Raises: UnsupportedCheckpointError for bytes that are no checkpoint, saying what they look like;
    as the source's constructor; OSError; TypeError for an object that is none of these.
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, (str, os.PathLike)):
        return _open_path(Path(source))
    if isinstance(source, int):
        return _open_stream(ByteStream(source))
    if not isinstance(source, Mapping) and hasattr(source, "read"):
        return _open_stream(ByteStream(cast("BinaryReader", source)))
    from stream_pack.writer.live import LiveSource

    return LiveSource(cast("Mapping[str, object] | torch.nn.Module", source))


def _open_path(path: Path) -> Source:
    """A file, or a set of files: what a folder holds, or what an index names."""
    if path.is_dir():
        from stream_pack.writer.sets.recognise import open_folder

        return open_folder(path, open_file=_open_file)
    from stream_pack.writer.sets.hugging_face import is_index_name, open_hugging_face

    if is_index_name(path.name):
        return open_hugging_face(path, open_file=_open_file)
    return _open_file(path)


def _open_file(path: Path) -> Source:
    return _open_stream(ByteStream.open_path(path))


def _open_stream(stream: ByteStream) -> Source:
    try:
        start = stream.peek(SNIFF_NBYTES)
        kind = sniff(start)
        if kind is Kind.TORCH_ZIP:
            from stream_pack.writer.torch_zip import TorchZipSource

            return TorchZipSource(stream)
        if kind is Kind.SAFETENSORS:
            from stream_pack.writer.safetensors_source import SafetensorsSource

            return SafetensorsSource(stream)
        if kind is Kind.GGUF:
            from stream_pack.writer.gguf_source import GgufSource

            return GgufSource(stream)
        if kind is Kind.PACK:
            from stream_pack.writer.pack_source import PackSource

            return PackSource(stream)
        raise UnsupportedCheckpointError(f"cannot be converted: {describe(kind, start)}")
    except BaseException:
        stream.close()
        raise
