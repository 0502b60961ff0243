"""A safetensors file, planned: header, then tensors without a gap.

The bytes are those that the safetensors package writes for the same tensors, if they are ordered by name and there is
at most one text of metadata, whose order that package leaves to chance.

Source: https://github.com/huggingface/safetensors, "Format", and ``prepare`` in safetensors/src/tensor.rs 0.5 to 0.8:
dtypes in falling order of its ``Dtype``, so that every tensor is aligned to its elements; in each, by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import LimitError, UnsupportedTensorError
from stream_pack.extraction.file_plan import FilePlan, check_dtypes, offsets_after
from stream_pack.format.align import align_up
from stream_pack.format.catalog import Catalog
from stream_pack.format.dtypes import DTYPES
from stream_pack.format.file_kinds import MAX_SAFETENSORS_HEADER_NBYTES
from stream_pack.pipeline.source import Requests
from stream_pack.text import counted

__all__ = ["DEFAULT_METADATA", "ordered_rows", "plan_safetensors", "repeated_rows"]

METADATA_KEY = "__metadata__"
DEFAULT_METADATA = {"format": "pt"}
"""What transformers asks for before it loads a file."""

_RISING = (
    "BOOL", "F4", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16", "F16",
    "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip
"""The dtypes of a pack in the order of that package's ``Dtype``."""

_RANKS = np.array([_RISING.index(d.safetensors) if d.safetensors in _RISING else -1 for d in DTYPES])


def ordered_rows(catalog: Catalog, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """``rows`` of ``catalog`` in the order of a file: by dtype, else as they are.

    Raises: UnsupportedTensorError for a dtype, or a name, that the format does not have.
    """
    known = [dtype.safetensors is not None for dtype in DTYPES]
    check_dtypes(catalog, known, target="safetensors", advice="extract it --to torch or raw")
    if METADATA_KEY in catalog.names:
        raise UnsupportedTensorError(
            f"a tensor is called {METADATA_KEY!r}, which is the metadata of a safetensors file: rename it with "
            "--rename (rename=)",
            tensor=METADATA_KEY,
        )
    return rows[np.argsort(-_RANKS[catalog.dtypes[rows]], kind="stable")]


def repeated_rows(catalog: Catalog) -> NDArray[np.bool_]:
    """Which rows have the bytes, dtype and shape of an earlier one."""
    seen = set()
    repeated = np.zeros(len(catalog), bool)
    columns = zip(catalog.storages.tolist(), catalog.starts.tolist(), catalog.nbytes.tolist(), catalog.dtypes.tolist())
    for row, place in enumerate(columns):
        key = (*place, catalog.dims.row(row).tobytes())
        repeated[row] = place[2] > 0 and key in seen
        seen.add(key)
    return repeated


def plan_safetensors(catalog: Catalog, rows: NDArray[np.int64], metadata: Mapping[str, str]) -> FilePlan:
    """A file of these ``rows`` of ``catalog``, in this order.

    Raises: LimitError for a header that is longer than readers take.
    """
    nbytes = catalog.nbytes[rows]
    ends = np.cumsum(nbytes)
    header: dict[str, object] = {METADATA_KEY: dict(metadata)} if metadata else {}
    columns = (rows.tolist(), catalog.dtypes[rows].tolist(), (ends - nbytes).tolist(), ends.tolist())
    for row, dtype, begin, end in zip(*columns):
        shape = catalog.dims.row(row).tolist()
        name = catalog.names[row]
        header[name] = {"dtype": DTYPES[dtype].safetensors, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    header_nbytes = align_up(len(text), 8)
    if header_nbytes > MAX_SAFETENSORS_HEADER_NBYTES:
        raise LimitError(
            f"the header of {counted(len(rows), 'tensor')} would have {header_nbytes} bytes: readers of safetensors "
            f"take at most {MAX_SAFETENSORS_HEADER_NBYTES}; extract into several files with --max-shard-size "
            "(max_shard_nbytes=)",
            value=header_nbytes,
            limit=MAX_SAFETENSORS_HEADER_NBYTES,
        )
    data_begin = 8 + header_nbytes
    held = rows[nbytes > 0]
    sizes = catalog.nbytes[held]
    return FilePlan(
        requests=Requests(catalog.storages[held], catalog.starts[held], sizes),
        rows=held,
        offsets=offsets_after(data_begin, sizes),
        nbytes=data_begin + int(nbytes.sum()),
        head=((0, header_nbytes.to_bytes(8, "little") + text.ljust(header_nbytes)),),
    )
