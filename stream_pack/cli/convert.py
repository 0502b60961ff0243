"""``convert``: write a pack from a checkpoint."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from stream_pack.arguments.paths import require_path
from stream_pack.cli.arguments import (
    STANDARD,
    Command,
    add_flag,
    add_jobs,
    add_offset,
    add_option,
    key_value,
    nbytes,
    shown_path,
)
from stream_pack.cli.exits import DONE, UsageError
from stream_pack.cli.progress import Progress, progress_bar
from stream_pack.cli.terminal import Standard, note, say
from stream_pack.errors import LimitError
from stream_pack.text import human_nbytes, printable, quoted

if TYPE_CHECKING:
    from stream_pack.pickles.outline import KeySummary
    from stream_pack.report import Report, Sizes
    from stream_pack.sources.open import FileAt
    from stream_pack.writer.options import ConvertOptions

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
    _add_keys(parser)
    _add_selection(parser)
    _add_layout(parser)
    text = "folder for temporary files, which some pipes need (default: TARGET's folder; the system's if TARGET is -)"
    add_option(parser, "--spool-dir", "FOLDER", text)
    text = "memory limit (resident anonymous pages, the interpreter included); fails at the start if it is too low"
    add_option(parser, "--max-memory", "NBYTES", text, type=nbytes)
    text = "make warnings errors (exit code 3), such as a pattern or rule that has no effect; nothing is written then"
    add_flag(parser, "--strict", text=text)
    text = "print what would be done and write nothing; reads no tensor data, and only the head of a pipe"
    add_flag(parser, "--dry-run", text=text)
    add_jobs(parser, "one per core, at most 4")
    text = "print the report as JSON: to stdout, or to stderr if TARGET is -"
    add_flag(parser, "--json", text=text)
    text = "no progress bar and no summary, only errors and warnings"
    add_flag(parser, "--quiet", "-q", text=text)


def _add_keys(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "training checkpoints",
        "A flat state dict is used as is. In a nested checkpoint, the dict under state_dict, model or "
        "model_state_dict is used if exactly one of these keys holds tensors; otherwise --key must choose one.",
    )
    text = "use what is under this key; a.b, or --key a --key b, means b inside a; . means everything; the items of "
    text += "lists, and keys that are numbers, are given as numbers: optimizer.state.0"
    add_option(group, "--key", "KEY", text, repeated=True)
    text = "print which keys hold tensors, how many and how large, and write nothing"
    add_flag(group, "--list-keys", text=text)
    text = "skip objects that need code to load, and all they contain, instead of failing"
    add_flag(group, "--ignore-unknown", text=text)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "tensors, names and dtypes",
        "Globs (*, ?, [...]) match whole tensor names of the source. All but --order can be repeated.",
    )
    add_option(group, "--include", "GLOB", "take only tensors that match", repeated=True)
    add_option(group, "--exclude", "GLOB", "leave out tensors that match; they are not judged", repeated=True)
    text = "replace the first match of a Python regular expression in each name; a g at the end replaces every match"
    add_option(group, "--rename", "s/REGEX/NEW/", text, repeated=True)
    text = "cast floats to f16, bf16, f32 or f64, or those that match GLOB, and float8 that does; keep instead of a "
    text += "dtype leaves them as they are; the first rule that matches applies"
    add_option(group, "--dtype", "[GLOB=]DTYPE", text, repeated=True)
    text = "order of the tensors: as in the source (default), or by name"
    group.add_argument("--order", choices=("source", "name"), help=text)


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
    source = _source(arguments, standard)
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
        report = convert_with(source, target, _options(arguments, progress))
    _print_report(report, arguments, standard)
    return DONE


def _check_paths(arguments: argparse.Namespace) -> None:
    """Raises: OptionError for an empty path, or a URL."""
    if arguments.source != STANDARD:
        require_path("SOURCE", arguments.source, "source")
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


def _source(arguments: argparse.Namespace, standard: Standard) -> str | int | FileAt:
    path: str = arguments.source
    if not arguments.offset:
        return standard.source() if path == STANDARD else path
    if path == STANDARD:
        raise UsageError("--offset needs a file: stdin is read from its current position")
    from stream_pack.sources.open import FileAt

    return FileAt(path, arguments.offset)


def _options(arguments: argparse.Namespace, progress: Progress | None = None) -> ConvertOptions:
    """The arguments that are options of the library, which knows the defaults of those not given."""
    from stream_pack.format.align import DEFAULT_ALIGNMENT, Alignment
    from stream_pack.writer.options import ConvertOptions

    given = {name: value for name, value in vars(arguments).items() if value is not None}
    names = [field.name for field in fields(ConvertOptions)]
    options = {name: given[name] for name in names if name in given}
    if len(given.get("key", ())) == 1:  # a dotted path; several are the steps of one
        (options["key"],) = given["key"]
        if not options["key"]:  # a variable that was not set; the key "" itself is the step after another, or key=[""]
            raise UsageError("--key is empty: expected the names of keys, or '.' for everything")
    options["metadata"] = _metadata(given.get("metadata", ()))
    small = given.get("alignment", DEFAULT_ALIGNMENT.small)
    large = given.get("large_alignment", max(small, DEFAULT_ALIGNMENT.large))
    announce = None if arguments.quiet else note
    try:
        options["alignment"] = Alignment(small=small, large=large)
        return ConvertOptions(**options, progress=progress, announce=announce)
    except LimitError as error:
        raise UsageError(str(error)) from None


def _metadata(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    metadata: dict[str, str] = {}
    for key, value in pairs:
        if metadata.setdefault(key, value) != value:
            raise UsageError(f"--metadata {quoted(key)} is given twice, with two values")
    return metadata


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

    plan = forecast_with(source, _options(arguments), to_stream=arguments.target == STANDARD)
    _note_all(plan, arguments)
    standard.write(json.dumps(plan.to_json()) if arguments.json else plan.to_text())
    return DONE


def _note_all(sizes: Sizes, arguments: argparse.Namespace) -> None:
    for warning in sizes.warnings:
        note(f"warning: {warning}")
    if not arguments.quiet:
        for remark in sizes.remarks:
            note(f"note: {remark}")


def _print_report(report: Report, arguments: argparse.Namespace, standard: Standard) -> None:
    _note_all(report, arguments)
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
