"""What a conversion will take and give, before any tensor data is read."""

from __future__ import annotations

from dataclasses import asdict

from stream_pack.pipeline.source import Source
from stream_pack.writer.plan import PackSettings, prepare
from stream_pack.writer.report import Forecast

__all__ = ["forecast_pack"]


def forecast_pack(source: Source, settings: PackSettings, *, to_stream: bool) -> Forecast:
    """The plan of packing ``source``, into a stream or into a file.  Reads no tensor data.

    Raises: SourceError, LimitError, as the conversion would before its first byte.
    """
    prepared = prepare(source, settings, in_order=to_stream)
    return Forecast(
        **asdict(prepared.sizes),
        buffers=len(prepared.layout.buffer_storages),
        spool_nbytes=prepared.needs.spool_nbytes,
        peak_memory_nbytes=prepared.needs.budget.peak_nbytes,
    )
