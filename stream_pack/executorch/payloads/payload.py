"""Writing a delegate's payload: a pack whose front is the delegate's own graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from stream_pack.executorch.payloads.constants import (
    GraphConstant,
    Tensors,
    constants_source,
    open_tensors,
)
from stream_pack.format.front import Front
from stream_pack.format.header import HeadKind
from stream_pack.report import Report
from stream_pack.writer.convert import convert_with
from stream_pack.writer.options import ConvertOptions
from stream_pack.writer.sink import BinaryWriter

__all__ = ["write_payload"]


def write_payload(
    kind: HeadKind,
    encode: Callable[[Sequence[int], Sequence[int]], bytes],
    tensors: Tensors,
    wanted: Sequence[GraphConstant],
    target: str | os.PathLike[str] | int | BinaryWriter,
    options: ConvertOptions,
) -> Report:
    """Stream the constants ``wanted`` into a pack of this kind.

    ``encode(offsets, nbytes)`` gives the flatbuffer of the graph, with its constants at these places, in bytes from the
    region's first one.

    Raises: SourceError and its kinds, LimitError, OSError; a target path is then as it was before.
    """
    front = Front(kind, lambda index: encode(index.offsets.tolist(), index.tensor_nbytes.tolist()))
    with open_tensors(tensors) as source:
        return convert_with(constants_source(source, wanted), target, options, front=front)
