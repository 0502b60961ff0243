"""From the first bytes of a payload, or a data file, to its constants."""

from __future__ import annotations

from dataclasses import replace

from stream_pack.errors import FormatError
from stream_pack.et_files.decoders import DECODERS
from stream_pack.et_files.payload import NOTHING, Payload, ReadFile
from stream_pack.format.header import Header
from stream_pack.format.header_kinds import MAX_HEADER_NBYTES, decode_header, kind_of
from stream_pack.format.limits import MAX_NBYTES
from stream_pack.format.proof import truncated
from stream_pack.format.records import Footer, Locator

__all__ = ["read_payload"]


def read_payload(file: ReadFile, *, file_offset: int, nbytes: int | None, prefix: str, packs: bool) -> Payload:
    """The payload of ``nbytes`` bytes at ``file_offset``; None: as long as its header says.

    ``prefix`` comes before the numbers of constants that have no other name.  ``packs``: give no constants of a payload
    that is a pack, also one that lost its locator: whatever reads packs knows them better.

    Raises: TruncatedError when it is shorter than its header says, FormatError when an offset in it leads outside.
    """
    room = nbytes
    if room is None:
        room = MAX_NBYTES if file.nbytes is None else file.nbytes - file_offset
    start = bytes(file.read(file_offset, min(MAX_HEADER_NBYTES, room)))
    kind = kind_of(start)
    if kind is None:
        other = Payload("other", file_offset, room, file_offset + room, 0, NOTHING)
        if packs and _ends_with_footer(file, other):
            raise FormatError(
                f"it ends with the footer of a pack, but begins with {start[:8].hex(' ')}, which no pack does; the "
                "file is damaged"
            )
        return other
    if len(start) < kind.header_nbytes:
        raise truncated(len(start), kind.header_nbytes, what="the payload", again="export")
    header = decode_header(start)
    region, region_nbytes = header.region_file_offset, header.region_nbytes
    graph_end = _graph_end(header, room)
    end = max(region + region_nbytes, graph_end)
    length = end if nbytes is None else nbytes
    begin = file_offset + region
    payload = Payload(kind.name, file_offset, length, begin, region_nbytes, NOTHING)
    head = file.read(file_offset, max(region, graph_end))
    file.keep(begin, begin + region_nbytes)
    if packs and (Locator.stands_before(head[:region]) or _ends_with_footer(file, payload)):
        return replace(payload, kind="pack")
    flatbuffer = head[header.graph_file_offset : graph_end]
    return DECODERS[kind.name](payload, flatbuffer, prefix)


def _graph_end(header: Header, room: int) -> int:
    """Where the flatbuffer ends, once it and the constants are proved to be inside ``room`` bytes, and apart."""
    begin = header.graph_file_offset
    region, region_nbytes = header.region_file_offset, header.region_nbytes
    end = region if header.graph_nbytes is None else begin + header.graph_nbytes
    if max(region, region_nbytes, end) > MAX_NBYTES or end < begin:
        raise FormatError(
            f"the header places the flatbuffer at bytes {begin} to {end} and the constants at bytes {region} to "
            f"{region + region_nbytes}, which no payload has"
        )
    if max(region + region_nbytes, end) > room:
        whole = max(region + region_nbytes, end)
        raise truncated(room, whole, what="the payload", again="export")
    if end > region and region_nbytes:
        raise FormatError(
            f"the header places the constants at byte {region}, inside the flatbuffer that ends at byte {end}"
        )
    return end


def _ends_with_footer(file: ReadFile, payload: Payload) -> bool:
    """Whether a payload without a locator is a damaged pack.  In a pipe this is known only at its end."""
    nbytes = len(Footer.MAGIC)
    if file.nbytes is None or payload.nbytes < nbytes:
        return False
    return Footer.stands_before(file.read(payload.file_offset + payload.nbytes - nbytes, nbytes))
