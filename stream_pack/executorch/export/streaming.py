"""The block around an export in which constants go to disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from stream_pack.errors import LimitError, OptionError
from stream_pack.executorch.export.held import CHUNK_NBYTES, Holder
from stream_pack.executorch.export.patching import Patches
from stream_pack.executorch.export.session import Alignment, Export, activate

__all__ = ["streaming_constants"]

MIN_CHUNK_NBYTES = 64 << 10
IN_FLIGHT_CHUNKS = 8
"""More than there are at once: one that is gathered or cast, one that is read back, and what the allocator keeps."""


@contextlib.contextmanager
def streaming_constants(
    folder: str | os.PathLike[str],
    *,
    alignment: Alignment = "page",
    max_memory: int | None = None,
    allow_untested: bool = False,
) -> Iterator[None]:
    """Within this block, exports of ExecuTorch write each constant to ``folder`` once, in chunks, instead of copying it
    around in memory.

    The export itself stays as it is, from ``to_edge_transform_and_lower`` to ``to_executorch``, both in the block.
    What that gives writes itself as always (``write_to_file``, ``save``, ``buffer``, ``write_tensor_data_to_file``), in
    the block and after it, or better with :func:`stream_pack.executorch.write_program`.

    ``alignment="page"``: the segments of a program begin on pages of 16,384 bytes, ready to be mapped, and what an MPS
    delegate receives is a pack, its constants on pages too, named and checksummed: ``stream_pack.open(program,
    offset=...)`` reads them in place.  ``"stock"``: all is laid out as by ExecuTorch, and the program is byte for byte
    the same, unless ExecuTorch would have written wrong ones.
    ``max_memory``: most bytes of constants in memory at once, 8 MiB by default, beside what ExecuTorch itself makes of
    a tensor before it asks for its bytes (fp32 of another dtype, packed values): that is one tensor at a time.

    Lifetime: the bytes lie in a file without a name in ``folder``, which needs room for all constants.  The space is
    given back when the last object that needs it is gone: the program manager, the lowered modules, or the process,
    however that ends.  There is nothing to delete.  torch and ExecuTorch keep modules in caches, which are emptied when
    the block ends: what is exported after it from modules lowered in it stays longer.

    Only the thread that is in the block streams; others export as always meanwhile.  Blocks may be nested, and be in
    several threads.

    Raises: UntestedVersionError when ExecuTorch is not as in the versions tested, where ``allow_untested`` makes it a
    warning; OptionError; LimitError for a ``max_memory`` that is too small; OSError, also during the export when the
    disk is full; ModuleNotFoundError without ExecuTorch.
    """
    if alignment not in ("page", "stock"):
        raise OptionError(f"alignment={alignment!r}: expected 'page' or 'stock'")
    holder = Holder(folder, chunk_nbytes=_chunk_nbytes(max_memory))
    # Only now: they import torch and ExecuTorch.
    from stream_pack.executorch.export.hooks import HOOKS
    from stream_pack.executorch.export.hooks_caches import clear_caches

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
            f"streaming constants takes at least {least} bytes of memory; {max_memory} are allowed: raise max_memory",
            value=max_memory,
            limit=least,
        )
    return chunk
