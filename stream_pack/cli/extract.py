"""``extract``: write tensors to a file of another format."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stream_pack.arguments.paths import require_path
from stream_pack.cli.arguments import STANDARD, Command, add_flag, add_offset, add_option, key_value, nbytes, shown_path
from stream_pack.cli.exits import DONE
from stream_pack.cli.progress import Progress, progress_bar
from stream_pack.cli.reading import add_keys, add_selection, add_streaming, convert_options, note_all, source_of
from stream_pack.cli.terminal import Standard, note, say

if TYPE_CHECKING:
    from stream_pack.extraction.options import ExtractOptions

__all__ = ["EXTRACT"]


def _add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a pack, or anything that convert takes; - reads stdin")
    text = "the tensors to take (default: all); for patterns, see --include"
    parser.add_argument("names", metavar="NAME", nargs="*", help=text)
    text = "the file, or for safetensors a folder; - writes to stdout"
    parser.add_argument("--output", "-o", metavar="OUT", dest="target", required=True, help=text)
    text = "the format (default: what the name of OUT ends in): torch is read by torch.load, npy is one array, npz "
    text += "several, raw the bytes alone"
    parser.add_argument("--to", choices=("safetensors", "torch", "npy", "npz", "raw"), help=text)
    text = "write safetensors files of at most so many bytes of tensors, and their index, into the folder OUT"
    add_option(parser, "--max-shard-size", "NBYTES", text, type=nbytes)
    text = "of tensors with the same bytes, write all into safetensors (default), or only the first"
    parser.add_argument("--tied", choices=("duplicate", "drop"), help=text)
    text = "store this text in the header of safetensors; can be repeated"
    add_option(parser, "--metadata", "KEY=VALUE", text, type=key_value, repeated=True)
    text = "allow output of more than four times the source (expanded tensors, overlapping views)"
    add_flag(parser, "--allow-blowup", text=text)
    add_offset(parser)
    add_keys(parser)
    add_selection(parser)
    add_streaming(parser, "OUT")


def _run(arguments: argparse.Namespace, standard: Standard) -> int:
    if arguments.target != STANDARD:
        require_path("OUT", arguments.target, "target")
    if arguments.spool_dir is not None:
        require_path("--spool-dir", arguments.spool_dir, "folder")
    source = source_of(arguments, standard)
    to_stdout = arguments.target == STANDARD
    if arguments.json and not to_stdout:
        standard.require_stdout()
    if arguments.dry_run:
        from stream_pack.extraction.extract import forecast_extract_with

        plan = forecast_extract_with(source, None if to_stdout else arguments.target, _options(arguments))
        note_all(plan, arguments)
        standard.write(json.dumps(plan.to_json()) if arguments.json else plan.to_text())
        return DONE
    target = standard.target() if to_stdout else arguments.target

    from stream_pack.extraction.extract import extract_with

    with progress_bar(wanted=not arguments.quiet) as progress:
        report = extract_with(source, target, _options(arguments, progress))
    note_all(report, arguments)
    if arguments.json:
        show = say if to_stdout else standard.write
        show(json.dumps({"source": arguments.source, "target": arguments.target, **report.to_json()}))
    elif not arguments.quiet:
        note(f"{shown_path(arguments.target, 'stdout')}: {report.summary()}")
    return DONE


def _options(arguments: argparse.Namespace, progress: Progress | None = None) -> ExtractOptions:
    from stream_pack.extraction.options import ExtractOptions

    # --to names a format here, and not whose header a pack begins with.
    common = argparse.Namespace(**{name: value for name, value in vars(arguments).items() if name != "to"})
    return ExtractOptions(
        to=arguments.to,
        names=tuple(arguments.names),
        tied=arguments.tied or "duplicate",
        max_shard_nbytes=arguments.max_shard_size,
        common=convert_options(common, progress),
    )


EXTRACT = Command(
    summary="write tensors of a pack, or of a checkpoint, to safetensors, torch, NumPy or raw bytes",
    description="Write tensors of a pack, or of anything that convert takes, to a file of another format, in one pass "
    "and constant memory. An existing OUT is replaced only when the file is complete.",
    reads="checkpoint",
    add_arguments=_add_arguments,
    run=_run,
)
