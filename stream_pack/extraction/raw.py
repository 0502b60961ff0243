"""The bytes of tensors and nothing else, one after the other."""

from __future__ import annotations

import numpy as np

from stream_pack.extraction.file_plan import FilePlan, offsets_after
from stream_pack.format.catalog import Catalog
from stream_pack.pipeline.source import Requests

__all__ = ["plan_raw"]


def plan_raw(catalog: Catalog) -> FilePlan:
    """All tensors in the order of ``catalog``: row-major, little-endian, without padding."""
    held = np.flatnonzero(catalog.nbytes)
    sizes = catalog.nbytes[held]
    return FilePlan(
        requests=Requests(catalog.storages[held], catalog.starts[held], sizes),
        rows=held,
        offsets=offsets_after(0, sizes),
        nbytes=int(sizes.sum()),
    )
