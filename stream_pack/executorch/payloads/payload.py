"""Writing a delegate's payload: a pack whose front is the delegate's own graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from stream_pack.executorch.payloads.constants import (
    GraphConstant,
    Tensors,
    constants_source,
    open_tensors,
)
from stream_pack.format.align import Alignment
from stream_pack.format.front import Front
from stream_pack.format.header import HeadKind
from stream_pack.format.layout import Policy
from stream_pack.pipeline.spool import Spool
from stream_pack.report import Report
from stream_pack.writer.pack import CHUNK_NBYTES, Progress, default_jobs, write_pack
from stream_pack.writer.sink import BinaryWriter, open_sink

__all__ = ["write_payload"]


def write_payload(
    kind: HeadKind,
    encode: Callable[[Sequence[int], Sequence[int]], bytes],
    tensors: Tensors,
    wanted: Sequence[GraphConstant],
    target: str | os.PathLike[str] | int | BinaryWriter,
    *,
    metadata: Mapping[str, str] | None,
    alignment: Alignment,
    block_nbytes: int,
    jobs: int | None,
    max_memory: int | None,
    spool_dir: str | os.PathLike[str] | None,
    progress: Progress | None,
) -> Report:
    """Stream the constants ``wanted`` into a pack of this kind.

    ``encode(offsets, nbytes)`` gives the flatbuffer of the graph, with its constants at these places, in bytes from the
    region's first one.

    Raises: SourceError and its kinds, LimitError, OSError; a target path is then as it was before.
    """
    # The graph fixes what each constant holds, expanded views too: the caller has nothing to allow.
    policy = Policy(alignment=alignment, block_nbytes=block_nbytes, allow_blowup=True)
    front = Front(kind, lambda index: encode(index.offsets.tolist(), index.tensor_nbytes.tolist()))
    with ExitStack() as stack:
        source = stack.enter_context(open_tensors(tensors))
        fitting = constants_source(source, wanted)
        sink = stack.enter_context(open_sink(target))
        return write_pack(
            fitting,
            sink,
            front=front,
            policy=policy,
            metadata=metadata or {},
            chunk_nbytes=CHUNK_NBYTES,
            jobs=jobs or default_jobs(),
            spool=Spool(sink.folder or spool_dir),
            progress=progress,
            max_memory=max_memory,
        )
