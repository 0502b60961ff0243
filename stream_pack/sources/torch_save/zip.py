"""Checkpoints as ``torch.save`` has written them since torch 1.6, as a source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from zlib import crc32

from stream_pack.pickles.nesting import flattening
from stream_pack.pickles.state_dict import Flatten
from stream_pack.pipeline.budget import UNLIMITED, MemoryWatch
from stream_pack.pipeline.bytestream import ByteStream
from stream_pack.pipeline.places import Places
from stream_pack.pipeline.source import Requests
from stream_pack.pipeline.spool import Spool, SpoolFile
from stream_pack.sources.torch_save.archive import TorchArchive, is_pickle
from stream_pack.sources.torch_save.container import Data, End
from stream_pack.sources.torch_save.source import Step, TorchSource
from stream_pack.sources.torch_save.zip_records import peek_name

__all__ = ["TorchZipSource"]

SPOOLED = (
    "the archive's first record is not data.pkl, so that its tensors are known only at its end: all {} bytes were "
    "spooled {}"
)


class TorchZipSource(TorchSource):
    """The tensors of one torch.save archive, from a file or a pipe.

    Takes over ``stream``, positioned at the archive's first byte, and closes it.  ``flatten`` finds the tensors in
    what the pickle describes.

    From a pipe, an archive whose pickle is not its first record goes into ``spool``, all of it, before anything about
    it is known; None refuses it.

    Raises: UnsupportedCheckpointError, UnsupportedTensorError, SourceError, TruncatedSourceError, LimitError; OSError.
    """

    def __init__(
        self,
        stream: ByteStream,
        *,
        flatten: Flatten | None = None,
        spool: Spool | None = None,
        watch: MemoryWatch = UNLIMITED,
    ) -> None:
        self._spooled: SpoolFile | None = None
        if spool is not None and stream.regular_file is None and not _begins_with_pickle(stream):
            why = "the archive comes through a pipe and does not begin with data.pkl"
            self._spooled = spool.collect(iter(stream.read_some, b""), why=why)
            stream.close()
            stream = ByteStream(self._spooled.fileno())
        try:
            self._archive = TorchArchive(stream, flatten=flatten or flattening(), watch=watch)
            spooled = self._spooled
            remarks = () if spooled is None else (SPOOLED.format(spooled.nbytes, spooled.place),)
            super().__init__(stream, self._archive, kind="torch zip", remarks=remarks)
        except BaseException:
            if self._spooled is not None:
                self._spooled.close()
            raise

    @property
    def unreferenced(self) -> int:
        """How many records of the archive no tensor names; complete after :meth:`stream`."""
        return self._archive.unreferenced

    @property
    def verification(self) -> str:
        verified, unverified = self._archive.verified, self._archive.unverified
        if not unverified:
            return "CRC-32 of every record verified"
        if not verified:
            return "the source carries no checksums"
        return f"CRC-32 of {verified} records verified; {unverified} carry none"

    def places(self, requests: Requests) -> Places:
        # Where something is in a spool, nobody else can use.
        return super().places(requests) if self._spooled is None else Places.nowhere(len(requests))

    def close(self) -> None:
        super().close()
        if self._spooled is not None:
            self._spooled.close()

    def _checked(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Compare the CRC-32 of every record that passes with what the archive says."""
        crc = 0
        for step in steps:
            event = step[0]
            if isinstance(event, Data):
                if event.fresh:
                    crc = crc32(event.chunk, crc)
            elif isinstance(event, End):
                self._archive.verify(event.name, event.crc, crc)
                crc = 0
            yield step


def _begins_with_pickle(stream: ByteStream) -> bool:
    name = peek_name(stream)
    return name is None or is_pickle(name)  # what begins with no record is refused without a spool
