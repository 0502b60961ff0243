"""What each command does, given its arguments: a call of the library, and words about the outcome."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypedDict

from stream_pack.cli.arguments import STANDARD, Arguments
from stream_pack.cli.exits import DAMAGE, DONE, UsageError
from stream_pack.cli.progress import progress_bar
from stream_pack.cli.terminal import Standard, note, say
from stream_pack.errors import LimitError
from stream_pack.text import printable

if TYPE_CHECKING:
    from stream_pack.format.align import Alignment
    from stream_pack.format.header import To
    from stream_pack.pipeline.source import Source
    from stream_pack.sources.torch_save.nesting import Key

__all__ = ["convert", "inspect", "verify"]


class _Choices(TypedDict):
    """What :func:`stream_pack.convert` and :func:`stream_pack.forecast` are told alike."""

    to: To
    key: Key
    ignore_unknown: bool
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    rename: tuple[str, ...]
    dtype: tuple[str, ...]
    order: Literal["source", "name"]
    metadata: Mapping[str, str]
    alignment: Alignment
    block_nbytes: int
    allow_blowup: bool
    jobs: int | None
    max_memory: int | None


def convert(arguments: Arguments, standard: Standard) -> int:
    """Write a pack, and say what came of it."""
    source = _source(arguments, standard)
    if arguments.list_keys:
        return _list_keys(source, arguments, standard)
    target: str | int = arguments.target
    if target == STANDARD and not arguments.dry_run:
        target = standard.target()
    if arguments.json and arguments.target != STANDARD:
        standard.require_stdout()

    from stream_pack.format.align import DEFAULT_ALIGNMENT, Alignment
    from stream_pack.format.checksum import BLOCK_NBYTES, check_block_nbytes
    from stream_pack.writer import convert as library

    small = _given(arguments.alignment, DEFAULT_ALIGNMENT.small)
    large = _given(arguments.large_alignment, max(small, DEFAULT_ALIGNMENT.large))
    try:
        alignment = Alignment(small=small, large=large)
        block_nbytes = check_block_nbytes(_given(arguments.block_nbytes, BLOCK_NBYTES))
    except LimitError as error:
        raise UsageError(str(error)) from None

    choices: _Choices = {
        "to": arguments.to,
        "key": _key(arguments.key),
        "ignore_unknown": arguments.ignore_unknown,
        "include": arguments.include,
        "exclude": arguments.exclude,
        "rename": arguments.rename,
        "dtype": arguments.dtype,
        "order": arguments.order,
        "metadata": dict(arguments.metadata),
        "alignment": alignment,
        "block_nbytes": block_nbytes,
        "allow_blowup": arguments.allow_blowup,
        "jobs": arguments.jobs,
        "max_memory": arguments.max_memory,
    }
    if arguments.dry_run:
        plan = library.forecast(source, to_stream=arguments.target == STANDARD, **choices)
        for warning in plan.warnings:
            note(f"warning: {warning}")
        standard.write(json.dumps(plan.to_json()) if arguments.json else plan.to_text())
        return DONE
    with progress_bar(wanted=not arguments.quiet) as progress:
        report = library.convert(
            source,
            target,
            spool_dir=arguments.spool_dir,
            progress=progress,
            announce=None if arguments.quiet else note,
            **choices,
        )
    for warning in report.warnings:
        note(f"warning: {warning}")
    if arguments.json:
        text = json.dumps(report.to_json())
        if arguments.target == STANDARD:
            say(text)
        else:
            standard.write(text)
    elif not arguments.quiet:
        note(f"{arguments.object}: {report.summary()}")
    return DONE


def _source(arguments: Arguments, standard: Standard) -> str | int | Source:
    """What there is to convert."""
    if arguments.offset:
        if arguments.source == STANDARD:
            raise UsageError("--offset says where in a file to begin: stdin is none")
        from stream_pack.sources.open import open_within

        return open_within(arguments.source, arguments.offset, max_memory=arguments.max_memory)
    return standard.source() if arguments.source == STANDARD else arguments.source


def _list_keys(source: str | int | Source, arguments: Arguments, standard: Standard) -> int:
    """Say what the checkpoint nests where."""
    from dataclasses import asdict

    from stream_pack.pipeline.spool import Spool
    from stream_pack.sources.open import list_keys
    from stream_pack.sources.torch_save.outline import outline_text

    spool = None if arguments.spool_dir is None else Spool(arguments.spool_dir)
    rows = list_keys(source, spool=spool)
    if arguments.json:
        standard.write(json.dumps([asdict(row) for row in rows]))
    else:
        standard.write("\n".join(map(printable, outline_text(rows).split("\n"))))
    return DONE


def _key(steps: tuple[str, ...]) -> Key:
    """One key may be a dotted path; several are its steps."""
    if not steps:
        return None
    return steps[0] if len(steps) == 1 else steps


def inspect(arguments: Arguments, standard: Standard) -> int:
    """Describe a pack, or a file that ExecuTorch wrote."""
    from stream_pack.inspection.inspect import inspect as library

    inspection = library(arguments.source, offset=arguments.offset)
    standard.write(
        json.dumps(inspection.to_json()) if arguments.json else inspection.to_text(standard.width())
    )
    return DONE


def verify(arguments: Arguments, standard: Standard) -> int:
    """List all damage of a pack."""
    from stream_pack.reader.verify import verify as verify_pack
    from stream_pack.text import counted, human_nbytes

    with progress_bar(wanted=not arguments.quiet) as progress:
        report = verify_pack(
            arguments.source, offset=arguments.offset, jobs=arguments.jobs, progress=progress
        )
    if arguments.json:
        standard.write(json.dumps(report.to_json()))
    elif report.damages:
        for damage in report.damages:
            standard.write(printable(damage.message))
        if not report.complete:
            standard.write("what stands behind this damage could not be verified")
    elif not arguments.quiet:
        standard.write(
            f"{arguments.subject}: no damage: {counted(report.tensors, 'tensor')}, {counted(report.blocks, 'block')}, "
            f"{human_nbytes(report.nbytes)} verified"
        )
    return DAMAGE if report.damages else DONE


def _given(value: int | None, default: int) -> int:
    return default if value is None else value
