"""``convert``: write a pack from a checkpoint."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from stream_pack.arguments.paths import require_path
from stream_pack.cli.arguments import (
    STANDARD,
    Command,
    add_flag,
    add_offset,
    add_option,
    key_value,
    nbytes,
    shown_path,
)
from stream_pack.cli.exits import DONE, UsageError
from stream_pack.cli.progress import progress_bar
from stream_pack.cli.reading import add_keys, add_selection, add_streaming, convert_options, note_all, source_of
from stream_pack.cli.terminal import Standard, note, say
from stream_pack.text import human_nbytes, printable

if TYPE_CHECKING:
    from stream_pack.pickles.outline import KeySummary
    from stream_pack.sources.open import FileAt
    from stream_pack.writer.report import Report

__all__ = ["CONVERT"]

_WITH_LIST_KEYS = {"command", "source", "target", "offset", "list_keys", "ignore_unknown", "spool_dir", "json", "quiet"}
"""What may be given beside --list-keys: TARGET and the rest of a command's usual words, or what it heeds."""


def _add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    parser.add_argument("source", metavar="SOURCE", help="the checkpoint; - reads stdin")
    # argparse looks for an optional positional argument only right after the one before it, so TARGET is optional only
    # where it is not needed.
    needless = not {"--list-keys", "--dry-run"}.isdisjoint(argv)
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?" if needless else None,
        help="the pack; - writes to stdout; not needed with --dry-run or --list-keys",
    )
    parser.add_argument(
        "--to",
        choices=("mps", "xnnpack", "ptd"),
        help="what ExecuTorch reads the pack as: a payload of its MPS delegate (default), a payload of its XNNPACK "
        "delegate, or a .ptd; tensors and checksums are the same",
    )
    add_offset(parser)
    text = "print which keys hold tensors, how many and how large, and write nothing"
    add_flag(add_keys(parser), "--list-keys", text=text)
    add_selection(parser)
    _add_layout(parser)
    add_streaming(parser, "TARGET")


def _add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the pack", "NBYTES can end in K, M or G (powers of 1024).")
    text = "store this text in the pack; can be repeated"
    add_option(group, "--metadata", "KEY=VALUE", text, type=key_value, repeated=True)
    text = "alignment of each tensor (default 256)"
    add_option(group, "--alignment", "NBYTES", text, type=nbytes)
    text = "alignment of each tensor of 1 MiB or more (default 16K)"
    add_option(group, "--large-alignment", "NBYTES", text, type=nbytes)
    add_option(group, "--block-nbytes", "NBYTES", "bytes per checksum (default 4M)", type=nbytes)
    text = "allow output of more than four times the source (expanded tensors, overlapping views)"
    add_flag(group, "--allow-blowup", text=text)


def _run(arguments: argparse.Namespace, standard: Standard) -> int:
    _check_paths(arguments)
    if arguments.list_keys:
        _check_alone(arguments)
    source = source_of(arguments, standard)
    if arguments.list_keys:
        return _list_keys(source, arguments, standard)
    to_stdout = arguments.target == STANDARD
    if arguments.json and not to_stdout:
        standard.require_stdout()
    if arguments.dry_run:
        return _dry_run(source, arguments, standard)
    target = standard.target() if to_stdout else arguments.target

    from stream_pack.writer.convert import convert_with

    with progress_bar(wanted=not arguments.quiet) as progress:
        report = convert_with(source, target, convert_options(arguments, progress))
    _print_report(report, arguments, standard)
    return DONE


def _check_paths(arguments: argparse.Namespace) -> None:
    """Raises: OptionError for an empty path, or a URL."""
    if arguments.target not in (None, STANDARD):
        require_path("TARGET", arguments.target, "target")
    if arguments.spool_dir is not None:
        require_path("--spool-dir", arguments.spool_dir, "folder")


def _check_alone(arguments: argparse.Namespace) -> None:
    """Raises: UsageError for options that mean nothing beside --list-keys."""
    given = [name for name, value in vars(arguments).items() if value not in (None, False, 0)]
    idle = ["--" + name.replace("_", "-") for name in given if name not in _WITH_LIST_KEYS]
    if idle:
        raise UsageError(f"--list-keys only prints keys: {', '.join(idle)} would have no effect")


def _list_keys(source: str | int | FileAt, arguments: argparse.Namespace, standard: Standard) -> int:
    from stream_pack.sources.open import list_keys

    rows = list_keys(source, spool_dir=arguments.spool_dir)
    standard.write(json.dumps([asdict(row) for row in rows]) if arguments.json else _table(rows))
    return DONE


def _table(rows: Sequence[KeySummary]) -> str:
    keys = [printable(".".join(row.path) or ".") for row in rows]
    width = max(len(key) for key in ("key", *keys))
    lines = [f"{'key':<{width}}  {'tensors':>9}  {'storages':>10}  kind"]
    for key, row in zip(keys, rows):
        default = "  <- taken by default" if row.chosen else ""
        lines.append(
            f"{key:<{width}}  {row.tensors:>9}  {human_nbytes(row.nbytes):>10}  {printable(row.kind)}{default}"
        )
    return "\n".join(lines)


def _dry_run(source: str | int | FileAt, arguments: argparse.Namespace, standard: Standard) -> int:
    from stream_pack.writer.convert import forecast_with

    plan = forecast_with(source, convert_options(arguments), to_stream=arguments.target == STANDARD)
    note_all(plan, arguments)
    standard.write(json.dumps(plan.to_json()) if arguments.json else plan.to_text())
    return DONE


def _print_report(report: Report, arguments: argparse.Namespace, standard: Standard) -> None:
    note_all(report, arguments)
    if arguments.json:
        show = say if arguments.target == STANDARD else standard.write
        show(json.dumps({"source": arguments.source, "target": arguments.target, **report.to_json()}))
    elif not arguments.quiet:
        note(f"{shown_path(arguments.target, 'stdout')}: {report.summary()}")


CONVERT = Command(
    summary="write a pack from a checkpoint, in one pass and constant memory",
    description="Write a pack from a checkpoint: a torch.save, safetensors or GGUF file, another pack, or a folder "
    "(Hugging Face shards, Llama shards, a torch.distributed checkpoint, an mmap-ninja array); or from the constants "
    "in a file that ExecuTorch wrote (a .pte, a .ptd, a payload of its MPS or XNNPACK delegate). An existing TARGET is "
    "replaced only when the pack is complete.",
    reads="checkpoint",
    add_arguments=_add_arguments,
    run=_run,
)
