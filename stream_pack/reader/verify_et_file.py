"""What can be verified in a file that ExecuTorch wrote without checksums: its faults, and packs inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from stream_pack.errors import FormatError, NewerVersionError, NotAPackError, RawPayloadError, TruncatedError
from stream_pack.et_files.constants import Fault
from stream_pack.et_files.survey import Survey
from stream_pack.format.header_kinds import KINDS
from stream_pack.reader.damage import Damage, VerifyReport, hiding_the_rest
from stream_pack.reader.file_range import FileRange
from stream_pack.reader.payload import survey_file
from stream_pack.text import counted

__all__ = ["verify_et_file"]


def verify_et_file(file: FileRange, verify_pack: Callable[[int, int], VerifyReport]) -> VerifyReport:
    """All faults of a program, raw payload or data file, and all damage to packs inside it.

    ``verify_pack(offset, nbytes)`` verifies the pack there.

    Raises: RawPayloadError when there is no fault, but something without checksums.
    """
    try:
        survey = survey_file(file)
    except (NotAPackError, NewerVersionError):
        raise
    except TruncatedError as error:
        return hiding_the_rest(Damage("length", error.actual_nbytes, error.expected_nbytes, error))
    except FormatError as error:
        return hiding_the_rest(Damage("graph", 0, file.available, error))
    assert survey is not None  # a pack was verified as such
    damages = [_damage(fault, file) for fault in survey.faults]
    reports = list(_packs(survey, verify_pack))
    damages += [damage for report in reports for damage in report.damages]
    unproved = len(survey.constants)
    if not damages and (unproved or not reports):
        raise _nothing_to_verify_against(survey, len(reports))
    return VerifyReport(
        tensors=unproved + sum(report.tensors for report in reports),
        blocks=sum(report.blocks for report in reports),
        nbytes=sum(report.nbytes for report in reports),
        complete=all(report.complete for report in reports),
        damages=tuple(sorted(damages, key=lambda damage: damage.file_begin)),
    )


def _nothing_to_verify_against(survey: Survey, packs: int) -> RawPayloadError:
    count = len(survey.constants)
    what = counted(count, "constant")
    which = "an ExecuTorch program" if survey.kind == "pte" else f"a raw {KINDS[survey.kind].raw}"
    text = f"{which} has no checksums: there is nothing to verify its {what} against; no fault was seen"
    if packs:
        text += f", and no damage in {counted(packs, 'pack')} inside"
    if survey.kind != "pte":
        text += "; or a pack is damaged in both locator and footer"
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
