"""``diff``: compare the tensors of two files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from stream_pack.arguments.paths import require_path
from stream_pack.cli.arguments import STANDARD, Command, add_flag, add_jobs, add_option, nbytes
from stream_pack.cli.exits import DIFFERENT, DONE, UsageError
from stream_pack.cli.progress import progress_bar
from stream_pack.cli.reading import add_keys, convert_options
from stream_pack.cli.terminal import Standard

__all__ = ["DIFF"]


def _add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    parser.add_argument("source", metavar="A", help="a pack, or anything that convert takes; - reads stdin")
    parser.add_argument("other", metavar="B", help="the same; only one of them can be -")
    text = "of changed float tensors of one shape, say how far their elements are apart (reads them a second time)"
    add_flag(parser, "--values", text=text)
    add_option(parser, "--include", "GLOB", "compare only tensors that match", repeated=True)
    add_option(parser, "--exclude", "GLOB", "leave out tensors that match", repeated=True)
    add_keys(parser)
    text = "folder for temporary files, which some pipes need (default: the system's)"
    add_option(parser, "--spool-dir", "FOLDER", text)
    text = "memory limit (resident anonymous pages, the interpreter included); fails at the start if it is too low"
    add_option(parser, "--max-memory", "NBYTES", text, type=nbytes)
    add_jobs(parser, "one per core, at most 4")
    add_flag(parser, "--json", text="print JSON instead of text, also for an error")
    add_flag(parser, "--quiet", "-q", text="no progress bar, and print nothing: the exit code tells")


def _run(arguments: argparse.Namespace, standard: Standard) -> int:
    if arguments.source == arguments.other == STANDARD:
        raise UsageError("A and B are both -: only one of them can be stdin")
    for name, path in (("A", arguments.source), ("B", arguments.other)):
        if path != STANDARD:
            require_path(name, path, "source")
    sides = [standard.source() if path == STANDARD else path for path in (arguments.source, arguments.other)]

    from stream_pack.inspection.diff import diff_with

    with progress_bar(wanted=not arguments.quiet) as progress:
        found = diff_with(sides[0], sides[1], convert_options(arguments, progress), values=arguments.values)
    if arguments.json:
        standard.write(json.dumps({"first": arguments.source, "second": arguments.other, **found.to_json()}))
    elif not arguments.quiet:
        standard.write(found.to_text())
    return DONE if found.equal else DIFFERENT


DIFF = Command(
    summary="compare the tensors of two packs or checkpoints",
    description="Compare the tensors of two files, each a pack or anything that convert takes: - removed, + added, "
    "> renamed (same bytes), ! changed. Packs with blocks of one length are compared by their checksums alone. The "
    "exit code is 0 if there is no difference, 1 if there is one, and otherwise never 1.",
    reads="two",
    add_arguments=_add_arguments,
    run=_run,
)
