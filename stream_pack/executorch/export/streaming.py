"""The block in which the constants of an export go to disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from stream_pack.arguments.paths import require_path
from stream_pack.errors import LimitError, OptionError
from stream_pack.executorch.export.held import CHUNK_NBYTES, Holder
from stream_pack.executorch.export.patching import Patches
from stream_pack.executorch.export.session import Export, SegmentAlignment, activate

__all__ = ["streaming_constants"]

MIN_CHUNK_NBYTES = 64 << 10
IN_FLIGHT_CHUNKS = 8
"""More than there are at once: one being gathered or cast, one being read back, and what the allocator keeps."""


@contextlib.contextmanager
def streaming_constants(
    folder: str | os.PathLike[str],
    *,
    alignment: SegmentAlignment = "page",
    max_memory: int | None = None,
    allow_untested: bool = False,
) -> Iterator[None]:
    """In this block, exports of ExecuTorch write each constant to ``folder`` once, in chunks, instead of copying it in
    memory.

    The export itself does not change; all of it, from ``to_edge_transform_and_lower`` to ``to_executorch``, must be in
    the block.  Its result can be written as always (``write_to_file``, ``save``, ``buffer``,
    ``write_tensor_data_to_file``), in the block and after it, or better with
    :func:`stream_pack.executorch.write_program`.

    ``alignment="page"``: the segments of a program begin on pages of 16,384 bytes, ready to be mapped, and the payload
    of an MPS delegate is a pack, whose constants are on pages too, named and checksummed: ``stream_pack.open(program,
    offset=...)`` reads them in place.  ``"stock"``: the layout is ExecuTorch's, and the program is byte for byte the
    same, except for constants that ExecuTorch would have written wrongly.
    ``max_memory``: the most bytes of constants in memory at once, 8 MiB by default, in addition to what ExecuTorch
    makes of one tensor at a time before it reads its bytes (fp32 of another dtype, packed values).

    Copies: those that ExecuTorch makes of a program or weight are torch's lazy clones, which take memory once something
    writes to them; a backend may write to its program as always.  MPS and XNNPACK, which write to no weight, are given
    the weights themselves.

    Lifetime: the bytes are in a file without a name in ``folder``, which needs room for all constants.  The disk space
    is free again when nothing refers to it any more (the program manager, the lowered modules), or the process ends,
    however that does.  There is nothing to delete.  Caches of torch and ExecuTorch that keep modules are cleared when
    the block ends; an export after it, from modules lowered in it, fills them again.

    Only the thread that is in the block streams; other threads work as always.  Blocks may be nested, and several
    threads may each have one, for lowering and ``to_executorch``.  ``torch.export.export`` must not run in two threads
    at once, with or without blocks: torch replaces functions of its own meanwhile, for the whole process, and two at a
    time leave it unable to export.

    Raises: UntestedVersionError when ExecuTorch is not as in the versions tested (with ``allow_untested``, a warning);
    OptionError; LimitError for a ``max_memory`` that is too small; OSError, which names the folder, also during the
    export when the disk is full: then it says which constant did not fit; ModuleNotFoundError without ExecuTorch.
    """
    if alignment not in ("page", "stock"):
        raise OptionError(f"alignment={alignment!r}: expected 'page' or 'stock'")
    require_path("folder", folder, "folder")
    holder = Holder(folder, chunk_nbytes=_chunk_nbytes(max_memory))
    # Only now: they import torch and ExecuTorch.
    from stream_pack.executorch.export.hooks import HOOKS, clear_caches

    export = Export(holder=holder, alignment=alignment)
    with Patches(HOOKS, allow_untested=allow_untested) as patches:
        export.refresh = patches.refresh
        try:
            with activate(export):
                yield
        finally:
            clear_caches()


def _chunk_nbytes(max_memory: int | None) -> int:
    if max_memory is None:
        return CHUNK_NBYTES
    chunk = min(CHUNK_NBYTES, max_memory // IN_FLIGHT_CHUNKS)
    if chunk < MIN_CHUNK_NBYTES:
        least = MIN_CHUNK_NBYTES * IN_FLIGHT_CHUNKS
        raise LimitError(
            f"max_memory={max_memory}: streaming constants takes at least {least} bytes", value=max_memory, limit=least
        )
    return chunk
