"""What may be said on the command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from stream_pack._version import __version__
from stream_pack.text import printable

if TYPE_CHECKING:
    from stream_pack.format.header import To

__all__ = ["STANDARD", "Arguments", "parse"]

STANDARD = "-"

_EXIT_CODES = """\
exit codes:
  0  done
  1  damage found: the pack is truncated, or bytes are not as they were written
  2  wrong usage
  3  the input is not what it should be: no checkpoint, no pack, made by a newer version, a raw payload that holds
     nothing to verify against, an unsupported tensor, or a file that does not exist or may not be opened
  4  the machine failed: no space left, an I/O error, no memory
  130 (143, 129)  interrupted by SIGINT (SIGTERM, SIGHUP); the target is as it was before, temporary files are gone
  141  whoever read stdout went away
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """A command line, parsed.  Units: bytes.  None: the library's default."""

    command: str
    source: str
    target: str = ""
    to: To = "mps"
    offset: int = 0
    key: tuple[str, ...] = ()
    ignore_unknown: bool = False
    list_keys: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    order: Literal["source", "name"] = "source"
    metadata: tuple[tuple[str, str], ...] = ()
    alignment: int | None = None
    large_alignment: int | None = None
    block_nbytes: int | None = None
    max_buffer_length: int | None = None
    jobs: int | None = None
    max_memory: int | None = None
    spool_dir: str | None = None
    allow_blowup: bool = False
    dry_run: bool = False
    json: bool = False
    quiet: bool = False

    @property
    def subject(self) -> str:
        """What the command reads, to begin a message with."""
        return "stdin" if self.source == STANDARD else printable(self.source)

    @property
    def object(self) -> str:
        """What ``convert`` writes, for a message."""
        return "stdout" if self.target == STANDARD else printable(self.target)


def parse(argv: Sequence[str]) -> Arguments:
    """Parse.  Raises: SystemExit, after printing help, the version, or what is wrong."""
    nothing_is_written = not {"--list-keys", "--dry-run"}.isdisjoint(argv)
    namespace = _parser(target_required=not nothing_is_written).parse_args(argv)
    values = {name: value for name, value in vars(namespace).items() if value is not None}
    # What was given several times is a list by now.
    values = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return Arguments(**values)


def _parser(*, target_required: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stream_pack",
        description="Stream a PyTorch checkpoint into one memory-mapped pack; look at packs, and verify them.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"stream_pack {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _convert(
        commands.add_parser(
            "convert", help="write a pack from a checkpoint, in one pass and constant memory"
        ),
        target_required=target_required,
    )
    _inspect(
        commands.add_parser("inspect", help="list the tensors of a pack, and what fills the file")
    )
    _verify(
        commands.add_parser("verify", help="recompute all checksums of a pack, and name all damage")
    )
    _metal_plan(
        commands.add_parser("metal-plan", help="tell how a Mac will use a pack, on any machine")
    )
    return parser


def _convert(parser: argparse.ArgumentParser, *, target_required: bool) -> None:
    parser.description = (
        "Write a pack from a checkpoint: a file of torch.save, safetensors, GGUF or another pack, or a folder "
        "(Hugging Face shards, Llama shards, a torch.distributed checkpoint, an mmap-ninja array); or from the "
        "constants of a file that ExecuTorch wrote (a .pte, a .ptd, a payload of its MPS or XNNPACK delegate). "
        "A target file is replaced only when the pack is complete."
    )
    parser.add_argument("source", metavar="SOURCE", help="the checkpoint; - reads stdin")
    # An optional TARGET would have to stand right behind SOURCE: argparse gives up on it at the next option.
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs=None if target_required else "?",
        help="the pack; - writes stdout; not needed with --dry-run or --list-keys",
    )
    parser.add_argument(
        "--to",
        choices=("mps", "xnnpack", "ptd"),
        help="what ExecuTorch takes the pack for: a payload of its MPS delegate (default) or XNNPACK delegate, or a "
        ".ptd; tensors and checksums are the same",
    )
    _offset(parser)
    _nesting(parser)
    _selection(parser)
    parser.add_argument(
        "--metadata",
        metavar="KEY=VALUE",
        type=_key_value,
        action="append",
        help="store this text in the pack; may be given several times",
    )
    parser.add_argument(
        "--alignment",
        metavar="NBYTES",
        type=_nbytes,
        help="where a tensor may start: a multiple of this (256)",
    )
    parser.add_argument(
        "--large-alignment",
        metavar="NBYTES",
        type=_nbytes,
        help="the same for tensors of 1 MiB or more (16K)",
    )
    parser.add_argument(
        "--block-nbytes",
        metavar="NBYTES",
        type=_nbytes,
        help="bytes that share a checksum (4M); K, M, G are binary",
    )
    parser.add_argument(
        "--spool-dir",
        metavar="FOLDER",
        help="where temporary files may lie when TARGET is - (otherwise they lie beside the target)",
    )
    parser.add_argument(
        "--allow-blowup",
        action="store_true",
        help="permit output above four times the source (expanded tensors, overlapping views)",
    )
    parser.add_argument(
        "--max-memory",
        metavar="NBYTES",
        type=_nbytes,
        help="stay below this much memory (resident anonymous pages), the interpreter included, or refuse at once",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would be done, and write nothing; of stdin, only the head of the checkpoint is read",
    )
    _jobs(parser)
    _json(parser, "print the report as JSON: on stdout, or on stderr when TARGET is -")
    _quiet(parser, "no progress, no summary: only errors")


def _nesting(parser: argparse.ArgumentParser) -> None:
    which = parser.add_argument_group(
        "what a training loop has saved beside the model",
        "A flat state dict is taken as it is. Of nested ones, that under state_dict, model or model_state_dict is "
        "taken if exactly one of these holds tensors; otherwise --key has to say which.",
    )
    which.add_argument(
        "--key",
        metavar="KEY",
        action="append",
        help="take what stands under this key; a.b, or --key a --key b: under b in a; . takes everything",
    )
    which.add_argument(
        "--list-keys",
        action="store_true",
        help="print which keys hold tensors, how many and how large, and write nothing",
    )
    which.add_argument(
        "--ignore-unknown",
        action="store_true",
        help="leave out objects that only code could rebuild, and what they hold, instead of refusing",
    )


def _selection(parser: argparse.ArgumentParser) -> None:
    which = parser.add_argument_group(
        "which tensors, and how",
        "Globs (*, ?, [...]) match whole names as the source has them; all but --order may be given several times.",
    )
    which.add_argument(
        "--include",
        metavar="GLOB",
        action="append",
        help="take only tensors that match one of these",
    )
    which.add_argument(
        "--exclude", metavar="GLOB", action="append", help="leave out tensors that match"
    )
    which.add_argument(
        "--rename",
        metavar="s/REGEX/NEW/",
        action="append",
        help="substitute in names, with Python's regular expressions; g at the end: every match, not only the first",
    )
    which.add_argument(
        "--dtype",
        metavar="[GLOB=]DTYPE",
        action="append",
        help="cast floats to f16, bf16, f32 or f64, those that match GLOB; the first rule that matches a name counts",
    )
    which.add_argument(
        "--order",
        choices=("source", "name"),
        help="as the source has them (default), or sorted by name",
    )


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the tensors of a pack, or of a file that ExecuTorch wrote (a .pte, a .ptd, a payload of its MPS or "
        "XNNPACK delegate), and what fills the file to its last byte."
    )
    parser.add_argument("source", metavar="FILE", type=_path)
    _offset(parser)
    _json(parser, "print JSON instead of a table")


def _verify(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Read a whole pack, recompute its checksums, and list all damage: tensor, block, byte range. Of a file that "
        "ExecuTorch wrote, which has no checksums, list the faults that can be seen, and verify the packs inside it; "
        "without a fault the exit code is 3, because nothing was proved."
    )
    parser.add_argument("source", metavar="FILE", type=_path)
    _offset(parser)
    _jobs(parser)
    _json(parser, "print the result as JSON")
    _quiet(parser, "no progress; print nothing when all is well")


def _metal_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Tell how Metal will use a pack: which buffers hold which tensors, what cannot be used in place, and what to "
        "beware of. No Mac is needed. The exit code is 3 when a tensor cannot be used in place."
    )
    parser.add_argument("source", metavar="PACK", type=_path)
    _offset(parser)
    parser.add_argument(
        "--max-buffer-length",
        metavar="NBYTES",
        type=_nbytes,
        help="the longest buffer of the device (3.5G, what the smallest Macs allow)",
    )
    _json(parser, "print JSON instead of text")


def _offset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--offset",
        metavar="NBYTES",
        type=_nbytes,
        help="where in the file to begin (0), as inspect says of packs in a .pte",
    )


def _jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs", metavar="N", type=_positive, help="threads to use (as many as are of use here)"
    )


def _json(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--json", action="store_true", help=text)


def _quiet(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--quiet", "-q", action="store_true", help=text)


def _path(text: str) -> str:
    if text == STANDARD:
        raise argparse.ArgumentTypeError(
            "a pack is mapped, which takes a file: stdin cannot be one"
        )
    return text


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _nbytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMG]?)", text)
    nbytes = (
        Fraction(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match[2]]
        if match
        else None
    )
    if nbytes is None or nbytes.denominator != 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of bytes such as 4096, 16K or 3.5G"
        )
    return int(nbytes)


def _key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} has no '=': expected KEY=VALUE")
    try:
        text.encode()
    except (
        UnicodeEncodeError
    ):  # bytes of the command line that are no UTF-8 arrive as lone surrogates
        raise argparse.ArgumentTypeError(
            f"{text!r} is not UTF-8, which metadata has to be"
        ) from None
    return key, value
