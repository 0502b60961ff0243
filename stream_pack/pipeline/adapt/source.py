"""A source seen through a selection and a cast: whatever the source is, both happen on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stream_pack.format.catalog import Catalog
from stream_pack.format.dtypes import BITS
from stream_pack.pipeline.adapt.cast import CastStream, load_casts
from stream_pack.pipeline.adapt.cast_plan import CastStorages, cast_catalog
from stream_pack.pipeline.adapt.cast_rules import CastRule, cast_targets
from stream_pack.pipeline.adapt.select import Selection, select
from stream_pack.pipeline.chunks import Piece
from stream_pack.pipeline.places import NOWHERE, Places
from stream_pack.pipeline.source import Demand, Requests, Source, StreamOptions
from stream_pack.text import listed

__all__ = ["Adaptation", "AdaptedSource", "adapted"]

_ELEMENT_NBYTES = np.array(BITS) // 8  # of the floats; four-bit types are never asked


@dataclass(frozen=True, slots=True)
class Adaptation:
    """What is to be made of a source: which of its tensors, and which dtypes.  All patterns match its own names."""

    selection: Selection = field(default_factory=Selection)
    casts: tuple[CastRule, ...] = ()


def adapted(source: Source, adaptation: Adaptation) -> Source:
    """``source`` as ``adaptation`` wants it; itself, if that changes nothing.

    What is not taken is not judged: of the tensors that cannot be packed, those left out are only mentioned.

    Raises: as :func:`stream_pack.pipeline.adapt.select.select` and
    :func:`stream_pack.pipeline.adapt.cast_plan.cast_catalog`; as :meth:`Source.refuse` for the tensors taken.
    """
    if adaptation == Adaptation():
        source.refuse(range(len(source.catalog)))
        return source
    taken = select(source.catalog, adaptation.selection)
    rows = taken.rows.tolist()
    source.refuse(rows)
    remarks = _left_out(source.catalog)
    if not adaptation.casts:
        return AdaptedSource(source, taken.catalog, rows, warnings=taken.warnings, remarks=remarks)
    names = [source.catalog.names[row] for row in rows]
    targets, warnings = cast_targets(taken.catalog, adaptation.casts, names)
    catalog, casts = cast_catalog(taken.catalog, targets)
    load_casts(set(zip(casts.sources.tolist(), casts.targets.tolist())))
    return AdaptedSource(source, catalog, rows, casts, warnings=(*taken.warnings, *warnings), remarks=remarks)


def _left_out(catalog: Catalog) -> tuple[str, ...]:
    """A remark about what of ``catalog`` is refused: nothing of it was taken."""
    if not catalog.refused:
        return ()
    return (f"left out, and could not have been packed: {listed(catalog.names[row] for row in catalog.refused)}",)


class AdaptedSource(Source):
    """Tensors of ``source`` as ``catalog`` has them: selected ones, in another order, some of them cast.

    ``catalog`` is one over the source's storages and those that ``casts`` makes of them; its tensors are those that
    the source has in ``rows``.  What it leaves out is never asked for: a file is not read there, and in a pipe it
    is read and dropped (and is checked, where the source has checksums).

    ``warnings`` are added to those of the source.

    Memory: one more chunk.  Lifetime: owns ``source``.
    """

    def __init__(
        self,
        source: Source,
        catalog: Catalog,
        rows: Sequence[int],
        casts: CastStorages | None = None,
        *,
        warnings: Sequence[str] = (),
        remarks: Sequence[str] = (),
    ) -> None:
        traits = source.traits
        super().__init__(
            catalog, replace(traits, warnings=(*traits.warnings, *warnings), remarks=(*traits.remarks, *remarks))
        )
        self._source = source
        self._casts = casts

    def demand(self, requests: Requests, *, in_order: bool, chunk_nbytes: int) -> Demand:
        asked = self._asked(requests)
        return self._source.demand(asked, in_order=in_order, chunk_nbytes=chunk_nbytes)

    @property
    def verification(self) -> str:
        return self._source.verification

    @property
    def checksums(self) -> str:
        return self._source.checksums

    def places(self, requests: Requests) -> Places:
        places = self._source.places(self._asked(requests))
        if self._casts is None:
            return places
        return replace(places, offsets=np.where(requests.storages < self._casts.first, places.offsets, NOWHERE))

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def close(self) -> None:
        self._source.close()

    def stream(self, requests: Requests, options: StreamOptions) -> Iterator[Piece]:
        pieces = self._source.stream(self._asked(requests), options)
        if self._casts is None:
            return pieces
        return self._cast(pieces, requests, self._casts, options.chunk_nbytes)

    def _asked(self, requests: Requests) -> Requests:
        return requests if self._casts is None else _uncast(requests, self._casts)

    def _cast(
        self, pieces: Iterator[Piece], requests: Requests, casts: CastStorages, chunk_nbytes: int
    ) -> Iterator[Piece]:
        rows = (requests.storages - casts.first).tolist()
        left = _uncast(requests, casts).nbytes.tolist()
        streams: dict[int, CastStream] = {}
        for buffer, chunk in pieces:
            row = rows[buffer]
            if row < 0:
                yield buffer, chunk
                continue
            stream = streams.get(buffer)
            if stream is None:
                target = int(casts.targets[row])
                stream = streams[buffer] = CastStream(
                    int(casts.sources[row]),
                    target,
                    skip=int(requests.starts[buffer]) % int(_ELEMENT_NBYTES[target]),
                    nbytes=int(requests.nbytes[buffer]),
                    chunk_nbytes=chunk_nbytes,
                )
            for part in stream.feed(chunk):
                yield buffer, part
            left[buffer] -= len(chunk)
            if left[buffer] <= 0:
                del streams[buffer]


def _uncast(requests: Requests, casts: CastStorages) -> Requests:
    """The same bytes before the cast: of a cast storage, the elements that they are made from."""
    rows = requests.storages - casts.first
    cast = np.flatnonzero(rows >= 0)
    made = rows[cast]
    old, new = _ELEMENT_NBYTES[casts.sources[made]], _ELEMENT_NBYTES[casts.targets[made]]
    first = requests.starts[cast] // new
    last = (requests.starts[cast] + requests.nbytes[cast] + new - 1) // new
    storages, starts, nbytes = (requests.storages.copy(), requests.starts.copy(), requests.nbytes.copy())
    storages[cast] = casts.storages[made]
    starts[cast] = casts.begins[made] + first * old
    nbytes[cast] = (last - first) * old
    return Requests(storages, starts, nbytes)
