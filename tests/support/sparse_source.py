"""A source of tensors larger than the machine: runs of zeros that nobody allocates, and a few bytes at their ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stream_pack.format.catalog import CatalogBuilder
from stream_pack.format.dtypes import BY_NAME
from stream_pack.pipeline.chunks import Piece, Zeros
from stream_pack.pipeline.source import Requests, Source, StreamOptions, Traits

__all__ = ["SparseSource"]


class SparseSource(Source):
    """Tensors of zeros that end in 8 bytes of their own: their number, little-endian.

    ``endings`` are other last bytes, for some of them.
    """

    def __init__(
        self, tensors: dict[str, tuple[str, tuple[int, ...]]], *, endings: Mapping[str, bytes] | None = None
    ) -> None:
        builder = CatalogBuilder()
        total = 0
        self._endings = [(endings or {}).get(name, number.to_bytes(8, "little")) for number, name in enumerate(tensors)]
        for number, (name, (dtype, shape)) in enumerate(tensors.items()):
            total += builder.add(name, BY_NAME[dtype], shape, storage=number, start=0)
        super().__init__(builder.build(storages_nbytes=total), Traits("sparse", sparse=True))

    @property
    def verification(self) -> str:
        return "nothing to verify"

    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        rows = zip(requests.storages.tolist(), requests.nbytes.tolist(), strict=True)
        for buffer, (storage, nbytes) in enumerate(rows):
            ending = self._endings[storage]
            if nbytes > len(ending):
                yield buffer, Zeros(nbytes - len(ending))
            yield buffer, ending
