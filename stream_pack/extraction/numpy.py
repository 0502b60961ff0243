"""NumPy's files, planned: .npy for one tensor, .npz (stored, not compressed) for several.

Source: numpy/lib/format.py, which writes the headers; ``numpy.savez`` for the names in an archive.
"""

from __future__ import annotations

import io

import numpy as np

from stream_pack.errors import SourceError
from stream_pack.extraction.file_plan import FilePlan, check_dtypes
from stream_pack.extraction.zip_archive import ZipPlan
from stream_pack.format.catalog import Catalog
from stream_pack.format.dtypes import DTYPES
from stream_pack.pipeline.source import Requests

__all__ = ["plan_npy", "plan_npz"]

ALIGNMENT = 64
"""As ``numpy.lib.format.ARRAY_ALIGN``: the data of a .npy that is mapped."""


def plan_npy(catalog: Catalog) -> FilePlan:
    """A .npy file of the one tensor.

    Raises: SourceError for several tensors; UnsupportedTensorError for a dtype that NumPy does not have.
    """
    _check(catalog)
    if len(catalog) != 1:
        raise SourceError(
            f"a .npy file holds one array, and {len(catalog)} tensors are selected: name one, or extract --to npz"
        )
    header = _header(catalog, 0)
    held = np.flatnonzero(catalog.nbytes)
    return FilePlan(
        requests=Requests(catalog.storages[held], catalog.starts[held], catalog.nbytes[held]),
        rows=held,
        offsets=np.full(len(held), len(header)),
        nbytes=len(header) + int(catalog.nbytes[0]),
        head=((0, header),),
    )


def plan_npz(catalog: Catalog) -> FilePlan:
    """An .npz file of all tensors under their names.

    Raises: UnsupportedTensorError for a dtype that NumPy does not have; LimitError for a name of more than 64 KiB.
    """
    _check(catalog)
    archive = ZipPlan(alignment=ALIGNMENT)
    for row, (name, nbytes) in enumerate(zip(catalog.names, catalog.nbytes.tolist())):
        archive.add(f"{name}.npy", _header(catalog, row), data_nbytes=nbytes)
    held = np.flatnonzero(catalog.nbytes)
    requests = Requests(catalog.storages[held], catalog.starts[held], catalog.nbytes[held])
    return archive.file_plan(requests, held)


def _check(catalog: Catalog) -> None:
    known = [dtype.numpy is not None for dtype in DTYPES]
    check_dtypes(catalog, known, target="NumPy", advice="cast it with --dtype f32 (dtype=)")


def _header(catalog: Catalog, row: int) -> bytes:
    dtype = np.dtype(DTYPES[catalog.dtypes[row]].numpy)
    header = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": catalog.shape(row)}
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue()
