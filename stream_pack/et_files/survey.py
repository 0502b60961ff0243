"""All that a file of ExecuTorch's holds: which bytes are what, its payloads, its constants, and what is wrong with it.

Nothing here stops at a fault; before the constants are used, look at :attr:`Survey.fatal_fault`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from stream_pack.errors import FormatError
from stream_pack.et_files import program as programs
from stream_pack.et_files.constants import (
    BYTES,
    Constants,
    Fault,
    byte_strings,
    duplicate_name,
    find_faults,
    fits,
    join,
)
from stream_pack.et_files.payload import Keyed, Payload, ReadFile
from stream_pack.et_files.program import MAX_HEADER_NBYTES, Program
from stream_pack.et_files.read import read_payload
from stream_pack.et_files.tensors import Segments, program_constants
from stream_pack.format.limits import MAX_FLATBUFFER_NBYTES, MAX_NBYTES
from stream_pack.format.proof import truncated
from stream_pack.format.ragged import Ragged
from stream_pack.text import quoted

__all__ = ["Span", "Survey", "survey_payload", "survey_program"]

LEAST_HEADER_NBYTES = 8
"""The root's offset and the identifier, of a program without an extended header."""

Places: TypeAlias = "dict[tuple[int, int], list[programs.Delegate]]"


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the file that has a name.  Units: bytes, the half-open range ``[file_begin, file_end)``."""

    name: str
    file_begin: int
    file_end: int


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """One file.

    ``kind``: ``"pte"``, or the kind of the only payload.  ``constants`` come in ``groups``: (name, how many).
    ``spans``: all else that is in the file; where two overlap, the first counts.  ``external``: how many constants are
    in other files.  ``file_end``: where the last known byte ends.
    """

    kind: str
    payloads: tuple[Payload, ...]
    constants: Constants
    groups: tuple[tuple[str, int], ...]
    faults: tuple[Fault, ...]
    spans: tuple[Span, ...]
    external: int
    file_end: int

    @property
    def fatal_fault(self) -> Fault | None:
        """The first fault that makes all of the constants unusable."""
        fatal = (fault for fault in self.faults if fault.fatal and fault.part != "constant")
        return next(fatal, None)


def survey_payload(file: ReadFile) -> Survey:
    """A raw payload or a .ptd at the beginning of ``file``; other bytes may follow it.

    Raises: FormatError and TruncatedError when it cannot be read at all.
    """
    payload = read_payload(file, file_offset=0, nbytes=None, prefix="", packs=False)
    return Survey(
        kind=payload.kind,
        payloads=(payload,),
        constants=join([payload.constants]),
        groups=(("tensors", len(payload.constants)),),
        faults=payload.faults,
        spans=(_payload_span(payload),),
        external=len(payload.keyed),
        file_end=payload.nbytes,
    )


def survey_program(file: ReadFile) -> Survey:
    """A .pte.

    A payload's constants are called ``method/delegate/number``; named data by their keys, with what a payload says of
    them; constants of the program itself by their names, else ``constant/number`` and ``mutable/segment/number``.

    Raises: FormatError and TruncatedError when it cannot be read at all.
    """
    room = MAX_HEADER_NBYTES if file.nbytes is None else min(MAX_HEADER_NBYTES, file.nbytes)
    header = programs.decode_header(bytes(file.read(0, room)))
    program_nbytes = _program_nbytes(file, header.program_nbytes)
    program = programs.decode(file.read(0, program_nbytes))
    faults: list[Fault] = []
    segments = _segments(file, header, program, faults)
    places = _payload_places(program, segments, faults)
    own = program_constants(program, segments, faults)
    named = _named_data(program, segments, faults)
    for constants in (own, named):
        for begin, nbytes in zip(constants.file_offsets.tolist(), constants.nbytes.tolist()):
            file.keep(begin, begin + nbytes)
    payloads = list(_payloads(file, places, faults))
    keyed = {key: what for payload in payloads for key, what in payload.keyed.items()}
    own = find_faults(own, faults, origin=0)
    named = find_faults(_described(named, keyed), faults, origin=0)
    faults += [fault for payload in payloads for fault in payload.faults]
    tensors = program.tensors
    elsewhere = {tensors.names[row] or "" for row in np.flatnonzero(tensors.external).tolist()}
    short = header.program_nbytes is None
    begins, lengths = segments
    return Survey(
        kind="pte",
        payloads=tuple(payloads),
        constants=join([*(payload.constants for payload in payloads), named, own]),
        groups=(
            ("payload constants", sum(len(payload.constants) for payload in payloads)),
            ("named data", len(named)),
            ("program constants", len(own)),
        ),
        faults=tuple(faults),
        spans=(
            *(_payload_span(payload) for payload in payloads),
            Span("header", 0, LEAST_HEADER_NBYTES if short else MAX_HEADER_NBYTES),
            Span("program", 0, program_nbytes),
            *_unused_segments(program, segments),
        ),
        external=len((keyed.keys() - set(named.names)) | elsewhere),
        file_end=max([program_nbytes, *(begins + lengths).tolist()]),
    )


def _program_nbytes(file: ReadFile, claimed: int | None) -> int:
    if claimed is None:
        if file.nbytes is None:
            raise FormatError(
                "an ExecuTorch program without an extended header does not say its length, so it cannot be read from a "
                "pipe: give the file"
            )
        claimed = file.nbytes
    elif file.nbytes is not None and claimed > file.nbytes:
        raise truncated(file.nbytes, claimed, at_least=True, what="the program", again="export")
    if claimed > MAX_FLATBUFFER_NBYTES:
        raise FormatError(f"the header says that the program has {claimed} bytes: a flatbuffer has less than 2 GiB")
    return claimed


def _segments(file: ReadFile, header: programs.ProgramHeader, program: Program, faults: list[Fault]) -> Segments:
    offsets, nbytes = program.segments
    base = header.segments_file_offset
    end = MAX_NBYTES if file.nbytes is None else file.nbytes
    if header.segments_nbytes is not None and base + header.segments_nbytes > end:
        expected = base + header.segments_nbytes
        text = str(truncated(end, expected, what="the file", again="export"))
        faults.append(Fault("length", text, end, expected, fatal=True))
    if len(offsets) and base < (header.program_nbytes or 0) and int(nbytes.max()) > 0:
        text = f"the header places the segments at byte {base}, inside the program of {header.program_nbytes} bytes"
        faults.append(Fault("segment", text, base, header.program_nbytes or 0, fatal=True))
        base = end
    base = min(base, end)
    room = np.uint64(end - base)
    # An empty one is fine wherever it is said to be.
    inside = fits(offsets, nbytes, room) | (nbytes == 0)
    for number in np.flatnonzero(~inside).tolist():
        text = (
            f"segment {number} has {nbytes[number]} bytes from byte {offsets[number]} on, outside the {room} bytes of "
            "segments"
        )
        faults.append(Fault("segment", text, base, end, fatal=True))
    held = inside & (nbytes > 0)
    begins = np.where(held, base + np.where(held, offsets, np.uint64(0)).astype(np.int64), -1)
    return begins, np.where(held, nbytes, np.uint64(0)).astype(np.int64)


def _payload_places(program: Program, segments: Segments, faults: list[Fault]) -> Places:
    """The delegates of each payload, by its file offset and length, in the order of the file; none overlap."""
    places: Places = {}
    for delegate in program.delegates:
        begins, lengths = segments if delegate.in_segment else program.inline
        if delegate.index >= len(begins):
            what = "segment" if delegate.in_segment else "inline payload"
            text = f"the payload of {quoted(str(delegate))} is {what} {delegate.index}, and there are {len(begins)}"
            faults.append(Fault("graph", text, 0, MAX_HEADER_NBYTES, fatal=True))
            continue
        place = int(begins[delegate.index]), int(lengths[delegate.index])
        if place[1] > 0:
            places.setdefault(place, []).append(delegate)
    apart = {}
    reach = 0
    for (begin, nbytes), users in sorted(places.items()):
        if begin < reach:
            # Were each of them read, a small file could ask for any amount of time and memory.
            text = f"the payload of {quoted(str(users[0]))} overlaps the one before it"
            faults.append(Fault("segment", text, begin, begin + nbytes, fatal=True))
        else:
            apart[begin, nbytes] = users
        reach = max(reach, begin + nbytes)
    return apart


def _payloads(file: ReadFile, places: Places, faults: list[Fault]) -> Iterator[Payload]:
    for (begin, nbytes), delegates in places.items():
        users = tuple(map(str, delegates))
        try:
            payload = read_payload(file, file_offset=begin, nbytes=nbytes, prefix=f"{users[0]}/", packs=True)
        except FormatError as error:
            text = f"the payload of {quoted(users[0])} (bytes {begin} to {begin + nbytes}): {error}"
            faults.append(Fault("graph", text, begin, begin + nbytes, fatal=True))
        else:
            yield replace(payload, backend=delegates[0].backend, users=users)


def _named_data(program: Program, segments: Segments, faults: list[Fault]) -> Constants:
    """Named data as bytes."""
    keys, numbers = program.named
    begins, lengths = segments
    seen: set[str] = set()
    names, chosen = [], []
    for key, number in zip(keys, numbers.tolist()):
        if number >= len(begins):
            text = f"named data {quoted(key)} is in segment {number}, and there are {len(begins)}"
            faults.append(Fault("segment", text, 0, MAX_HEADER_NBYTES, (key,), fatal=True))
            continue
        if key in seen:
            faults.append(duplicate_name(key, 0, MAX_HEADER_NBYTES))
        seen.add(key)
        names.append(key)
        chosen.append(number)
    places = np.array(chosen, np.int64)
    return byte_strings(names, np.maximum(begins[places], 0), lengths[places])


def _described(named: Constants, keyed: dict[str, Keyed]) -> Constants:
    """Named data with the dtypes and shapes that payloads give them."""
    known = [keyed.get(name) for name in named.names]
    whole = [(nbytes,) for nbytes in named.nbytes.tolist()]
    shapes = [what.shape if what else shape for what, shape in zip(known, whole)]
    dims = np.array([dim for shape in shapes for dim in shape], np.int64)
    return replace(
        named,
        dtypes=np.array([what.dtype if what else BYTES for what in known], np.int16),
        dims=Ragged.of(dims, list(map(len, shapes))),
        notes={row: what.notes for row, what in enumerate(known) if what and what.notes},
    )


def _unused_segments(program: Program, segments: Segments) -> Iterator[Span]:
    """Segments that nothing in the program refers to."""
    begins, lengths = segments
    used = np.zeros(len(begins), bool)
    areas = [area.segment for area in (program.constants, *program.mutable) if area is not None]
    delegates = [delegate.index for delegate in program.delegates if delegate.in_segment]
    numbers = np.array([*areas, *delegates, *program.named[1].tolist()], np.int64)
    used[numbers[numbers < len(begins)]] = True
    for number in np.flatnonzero(~used & (lengths > 0)).tolist():
        begin = int(begins[number])
        yield Span("segments without a name", begin, begin + int(lengths[number]))


def _payload_span(payload: Payload) -> Span:
    begin, end = payload.file_offset, payload.file_offset + payload.nbytes
    if payload.kind == "pack":
        return Span("packs", begin, end)
    if payload.kind == "other":
        return Span("payloads of other backends", begin, end)
    return Span("payload heads", begin, min(payload.region_file_offset, end))
