"""``verify``: recompute the checksums of a pack."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from stream_pack.cli.arguments import Command, add_file, add_flag, add_jobs, local_file
from stream_pack.cli.exits import DAMAGE, DONE, MACHINE
from stream_pack.cli.progress import progress_bar
from stream_pack.cli.terminal import Standard
from stream_pack.text import counted, human_nbytes, printable

__all__ = ["VERIFY"]


def _add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    add_file(parser, "FILE")
    add_jobs(parser, "one per core")
    add_flag(parser, "--quiet", "-q", text="no progress bar; print nothing if the pack is intact")


def _run(arguments: argparse.Namespace, standard: Standard) -> int:
    from stream_pack.reader.verify import verify

    source = local_file(arguments, "FILE")
    with progress_bar(wanted=not arguments.quiet) as progress:
        report = verify(source, offset=arguments.offset, jobs=arguments.jobs, progress=progress)
    if arguments.json:
        standard.write(json.dumps(report.to_json()))
    elif report.damages:
        for damage in report.damages:
            standard.write(printable(f"{arguments.source}: {damage.message}"))
        if not report.complete:
            standard.write(printable(f"{arguments.source}: not all of it could be verified because of this damage"))
    elif not arguments.quiet:
        standard.write(
            f"{printable(arguments.source)}: no damage: {counted(report.tensors, 'tensor')}, "
            f"{counted(report.blocks, 'block')}, {human_nbytes(report.nbytes)} verified"
        )
        if report.unverified:
            standard.write(
                f"{printable(arguments.source)}: {counted(report.unverified, 'constant')} of "
                f"{human_nbytes(report.unverified_nbytes)} could not be verified: ExecuTorch gives them no checksum"
            )
    if all(damage.unreadable for damage in report.damages):
        return MACHINE if report.damages else DONE
    return DAMAGE


VERIFY = Command(
    summary="recompute all checksums of a pack and list all damage",
    description="Read a whole pack, recompute its checksums, and list all damage: tensor, block, byte range. A file "
    "that ExecuTorch wrote has no checksums of its own: its structural faults are listed; packs inside it are "
    "verified, and data that are called by their SHA-256 (those of XNNPACK and Vulkan). If nothing is damaged, the "
    "exit code is 0, and the last line says what could not be verified; it is 3 if nothing could be.  Where the system "
    "cannot read the file, it is 4 unless there is other damage.",
    reads="pack",
    add_arguments=_add_arguments,
    run=_run,
)
