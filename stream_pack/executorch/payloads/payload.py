"""Writing a delegate's payload: a pack whose front is the delegate's own graph."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from stream_pack.executorch.payloads.constants import (
    Constant,
    Constants,
    constants_source,
    open_constants,
)
from stream_pack.format.align import Alignment
from stream_pack.format.front import Front
from stream_pack.format.layout import Policy
from stream_pack.pipeline.spool import Spool
from stream_pack.report import Report
from stream_pack.writer.pack import CHUNK_NBYTES, Progress, default_jobs, write_pack
from stream_pack.writer.sink import BinaryWriter, open_sink

__all__ = ["write_payload"]


def write_payload(
    front: Front,
    constants: Constants,
    wanted: Sequence[Constant],
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
    """Stream the constants ``wanted`` into a pack that begins with ``front``.

    Raises: SourceError and its kinds, LimitError, OSError; a target path is then as it was before.
    """
    # The graph fixes what each constant holds, expanded views too: there is nothing for the caller to allow.
    policy = Policy(alignment=alignment, block_nbytes=block_nbytes, allow_blowup=True)
    with ExitStack() as stack:
        source = stack.enter_context(open_constants(constants))
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
