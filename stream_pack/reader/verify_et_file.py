"""What can be verified in a file that ExecuTorch wrote: its faults, packs inside, and data called by its SHA-256."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stream_pack.errors import (
    ChecksumError,
    FormatError,
    NewerVersionError,
    NotAPackError,
    RawPayloadError,
    ReadError,
    TruncatedError,
)
from stream_pack.et_files.constants import Constants, Fault
from stream_pack.et_files.digests import named_digests
from stream_pack.et_files.survey import Survey
from stream_pack.format.header_kinds import KINDS
from stream_pack.format.ranges import fresh_nbytes
from stream_pack.reader.damage import Damage, VerifyReport, hiding_the_rest
from stream_pack.reader.file_range import FileRange, Window
from stream_pack.reader.payload import survey_file
from stream_pack.text import counted, quoted

__all__ = ["verify_et_file"]


def verify_et_file(file: FileRange, verify_pack: Callable[[int, int], VerifyReport]) -> VerifyReport:
    """All faults of a program, raw payload or data file, all damage to packs inside it, and named data whose name is
    the SHA-256 of other bytes.

    ``verify_pack(offset, nbytes)`` verifies the pack there.

    Raises: RawPayloadError when there is no fault, and nothing that could be verified.
    """
    try:
        survey = survey_file(file)
        assert survey is not None  # a pack was verified as such
        return _report(file, survey, list(_packs(survey, verify_pack)))
    except (NotAPackError, NewerVersionError, RawPayloadError):
        raise
    except TruncatedError as error:
        return hiding_the_rest(Damage("length", error.actual_nbytes, error.expected_nbytes, error))
    except FormatError as error:
        return hiding_the_rest(Damage("graph", 0, file.available, error))


def _report(file: FileRange, survey: Survey, packs: Sequence[VerifyReport]) -> VerifyReport:
    constants = survey.constants
    digests = named_digests(survey)
    damages = [_damage(fault, file) for fault in survey.faults]
    damages += [damage for report in packs for damage in report.damages]
    damages += _renamed(file, constants, digests)
    proved = np.zeros(len(constants), bool)
    proved[list(digests)] = True
    if not damages and not packs and not digests:
        raise _nothing_to_verify_against(survey)
    return VerifyReport(
        tensors=len(digests) + sum(report.tensors for report in packs),
        blocks=sum(report.blocks for report in packs),
        nbytes=_covered(constants, proved) + sum(report.nbytes for report in packs),
        complete=all(report.complete for report in packs) and not any(damage.unreadable for damage in damages),
        damages=tuple(sorted(damages, key=lambda damage: damage.file_begin)),
        unverified=len(constants) - len(digests),
        unverified_nbytes=_covered(constants, np.ones_like(proved)) - _covered(constants, proved),
    )


def _renamed(file: FileRange, constants: Constants, digests: Mapping[int, bytes]) -> Iterator[Damage]:
    """The data whose bytes have another SHA-256 than their name says, or cannot be read."""
    window = Window(file)
    known: dict[tuple[int, int], bytes | ReadError] = {}  # several names may have the same bytes
    for row, expected in digests.items():
        name, begin, nbytes = constants.names[row], constants.file_offsets.item(row), constants.nbytes.item(row)
        if (begin, nbytes) not in known:
            known[begin, nbytes] = _sha256(window, begin, begin + nbytes)
        actual = known[begin, nbytes]
        if isinstance(actual, ReadError):
            yield Damage("data", begin, begin + nbytes, _unreadable(actual, name), tensors=(name,))
        elif actual != expected:
            error = ChecksumError(
                f"the data {quoted(name)} (bytes {begin} to {begin + nbytes}) have another SHA-256 than their name: "
                f"{actual.hex()}",
                part="data",
                expected=int.from_bytes(expected, "big"),
                actual=int.from_bytes(actual, "big"),
                file_begin=begin,
                file_end=begin + nbytes,
                tensors=(name,),
                tensor_count=1,
            )
            yield Damage("data", begin, begin + nbytes, error, tensors=(name,))


def _sha256(window: Window, begin: int, end: int) -> bytes | ReadError:
    digest = hashlib.sha256()
    try:
        for part in window.parts(begin, end):
            digest.update(part)
    except ReadError as error:
        return error
    return digest.digest()


def _unreadable(error: ReadError, name: str) -> ReadError:
    return ReadError(
        f"the data {quoted(name)}: {error}",
        errno=error.errno,
        strerror=error.strerror,
        filename=error.filename,
        file_begin=error.file_begin,
        file_end=error.file_end,
    )


def _covered(constants: Constants, rows: NDArray[np.bool_]) -> int:
    """How many bytes these constants have, each counted once."""
    begins = constants.file_offsets[rows]
    ends = begins + constants.nbytes[rows]
    order = np.argsort(begins, kind="stable")
    return int(fresh_nbytes(begins[order], ends[order]).sum())


def _nothing_to_verify_against(survey: Survey) -> RawPayloadError:
    count = len(survey.constants)
    text = "an ExecuTorch program" if survey.kind == "pte" else f"a raw {KINDS[survey.kind].raw}"
    text += " has no checksums, and no fault was seen: "
    text += f"its {counted(count, 'constant')} cannot be verified" if count else "it holds no constants"
    if survey.kind != "pte":
        text += "; if it was written as a pack, both its locator and its footer are damaged"
    return RawPayloadError(text)


def _packs(survey: Survey, verify_pack: Callable[[int, int], VerifyReport]) -> Iterator[VerifyReport]:
    """The reports of packs inside, with offsets that count from the first byte of the outer file."""
    for payload in survey.payloads:
        if payload.kind != "pack":
            continue
        base = payload.file_offset
        report = verify_pack(base, payload.nbytes)
        moved = tuple(
            replace(damage, file_begin=base + damage.file_begin, file_end=base + damage.file_end)
            for damage in report.damages
        )
        yield replace(report, damages=moved)


def _damage(fault: Fault, file: FileRange) -> Damage:
    if fault.part == "length":
        error: FormatError = TruncatedError(fault.text, expected_nbytes=fault.file_end, actual_nbytes=file.available)
    else:
        error = FormatError(f"{fault.text} (bytes {fault.file_begin} to {fault.file_end})")
    return Damage(fault.part, fault.file_begin, fault.file_end, error, tensors=fault.names)
