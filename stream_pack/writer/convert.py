"""The public functions that write a whole pack in one call."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from stream_pack.arguments.paths import require_path
from stream_pack.errors import SourceError
from stream_pack.format.align import DEFAULT_ALIGNMENT, Alignment
from stream_pack.format.checksum import BLOCK_NBYTES
from stream_pack.format.header import To
from stream_pack.format.header_kinds import Front
from stream_pack.pickles.nesting import Key
from stream_pack.pipeline.adapt.select import Order
from stream_pack.pipeline.adapt.source import adapted
from stream_pack.pipeline.source import Source
from stream_pack.pipeline.spool import MEMORY_NBYTES, Spool
from stream_pack.sources.open import Convertible, FileAt, open_source
from stream_pack.sources.sets.companions import companions
from stream_pack.text import listed
from stream_pack.writer.flow import CHUNK_NBYTES, Progress
from stream_pack.writer.forecast import forecast_pack
from stream_pack.writer.options import ConvertOptions, Patterns, Renames
from stream_pack.writer.pack import write_pack
from stream_pack.writer.report import Forecast, Report
from stream_pack.writer.sink import BinaryWriter, Sink, file_identity, open_sink

if TYPE_CHECKING:
    import torch

__all__ = [
    "convert", "convert_with", "forecast", "forecast_with", "open_for", "refuse_overwriting", "save_bytes", "save_file",
    "spool_for",
]  # fmt: skip


def convert(
    source: Convertible,
    target: str | os.PathLike[str] | int | BinaryWriter,
    *,
    to: To = "mps",
    key: Key = None,
    ignore_unknown: bool = False,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Renames | None = None,
    dtype: object = None,
    order: Order = "source",
    metadata: Mapping[str, str] | None = None,
    alignment: Alignment = DEFAULT_ALIGNMENT,
    block_nbytes: int = BLOCK_NBYTES,
    allow_blowup: bool = False,
    strict: bool = False,
    jobs: int | None = None,
    chunk_nbytes: int = CHUNK_NBYTES,
    max_memory: int | None = None,
    spool_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> Report:
    r"""Convert a checkpoint to a pack, in one pass and constant memory.

    ``source``: a path, a descriptor or binary file object (also of a pipe), a mapping of names to torch tensors or
    NumPy arrays, or a module.  Formats: torch.save (zip and legacy), safetensors, GGUF, packs.  A path may also be that
    of a folder, or of its index file: Hugging Face shards, Llama shards with params.json, a torch.distributed
    checkpoint, an mmap-ninja array.
    ``target``: a path, which is replaced only when the pack is complete and on disk; or a descriptor or binary file
    object, which is written in order and not closed.
    ``to``: what ExecuTorch reads the pack as: ``"mps"`` and ``"xnnpack"`` are a payload of that delegate, ``"ptd"`` is
    a data file that its runtimes load beside a program with external tensors.  Tensors, checksums and all uses of the
    pack here are the same, and a pack can be converted from one to another.

    ``key``: which dict of a nested torch.save checkpoint to take.  ``"a.b"`` or ``["a", "b"]`` means ``b`` inside
    ``a``; if there is a key ``"a.b"``, it wins.  Items of lists, and what a dict holds under a whole number, are called
    by the number: ``"optimizer.state.0"``.  ``"."`` is the whole checkpoint.  By default a flat state dict is taken as
    it is; in a nested checkpoint, the dict under ``state_dict``, ``model`` or ``model_state_dict`` is taken if exactly
    one of these keys holds tensors, and the report says so; otherwise the checkpoint is refused.  Names below the
    chosen dict are its keys and numbers joined by dots, ``"state.0.exp_avg"``.  :func:`stream_pack.list_keys` shows the
    choice.
    ``ignore_unknown``: leave out objects that only code could rebuild, with all they contain; the report names them.
    Without it those that are taken are refused.  Code of a checkpoint is never run.

    ``include``, ``exclude``: globs over whole names of the source, case-sensitive.  A tensor is taken if it matches one
    of ``include``, or there are none, and matches none of ``exclude``.  What ``key`` and these leave out is not judged:
    only what is taken can be refused.
    ``rename``: ``"s/^module\.//"``, in the form of sed with Python's regular expressions (``g`` at the end: every match
    in a name), or a function from name to name; several are applied one after the other.
    ``dtype``: what float16, bfloat16, float32 and float64 are cast to, rounded as torch rounds; other dtypes stay.  A
    name or dtype; a mapping of globs to these; or a sequence of texts such as ``"norm*=f32"`` and ``"bf16"``.  The
    first rule that matches a name of the source applies.  A rule with a glob, ``"*=bf16"`` too, also casts float8.
    ``"keep"`` instead of a dtype: what matches stays as it is.
    ``order``: ``"source"``, or ``"name"`` to sort by the UTF-8 bytes of the names.

    ``metadata`` is added to that of the source.  ``alignment``, ``block_nbytes``: see docs/FORMAT.md.
    ``allow_blowup`` allows output of more than four times the source bytes used.
    ``strict``: warnings are errors.  The report has one for each pattern and rule above that has no effect, and for
    what the pack may lack; :class:`~stream_pack.errors.StrictError` lists them, before the first byte is written.
    ``jobs``: threads; by default one per core, at most 4.  ``max_memory``: a limit in bytes on the resident anonymous
    memory of the process, what it uses before the call included.  The conversion adapts to it, or is refused before
    the first byte is written.  ``spool_dir``: a folder for temporary files, by default the target's, or that of the
    system if the target is a stream; up to 16 MiB wait in memory instead.  ``progress(done, total)`` is called with
    bytes of tensor data.  ``announce(line)`` is called before the first byte if temporary files are needed.

    Copies: a few chunks at a time.  The bytes written depend on the tensors, their order and the options that FORMAT.md
    names, not on ``jobs``, ``chunk_nbytes``, ``max_memory`` or the kind of source.
    Raises: OptionError; SourceError, also if ``include`` and ``exclude`` leave no tensor or two tensors get one name;
    LimitError; StrictError; OSError.  A target path is then unchanged.
    """
    options = ConvertOptions(
        to=to, key=key, ignore_unknown=ignore_unknown, include=include, exclude=exclude, rename=rename, dtype=dtype,
        order=order, metadata=metadata, alignment=alignment, block_nbytes=block_nbytes, allow_blowup=allow_blowup,
        strict=strict, jobs=jobs, chunk_nbytes=chunk_nbytes, max_memory=max_memory, spool_dir=spool_dir,
        progress=progress, announce=announce,
    )  # fmt: skip
    return convert_with(source, target, options)


def forecast(
    source: Convertible,
    *,
    to_stream: bool = False,
    to: To = "mps",
    key: Key = None,
    ignore_unknown: bool = False,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Renames | None = None,
    dtype: object = None,
    order: Order = "source",
    metadata: Mapping[str, str] | None = None,
    alignment: Alignment = DEFAULT_ALIGNMENT,
    block_nbytes: int = BLOCK_NBYTES,
    allow_blowup: bool = False,
    strict: bool = False,
    jobs: int | None = None,
    chunk_nbytes: int = CHUNK_NBYTES,
    max_memory: int | None = None,
) -> Forecast:
    """What :func:`convert` would do with these arguments.  Reads no tensor data, and only the head of a pipe.

    ``to_stream``: the target is a descriptor or file object, not a path.
    Raises: what :func:`convert` would raise before its first byte.
    """
    options = ConvertOptions(
        to=to, key=key, ignore_unknown=ignore_unknown, include=include, exclude=exclude, rename=rename, dtype=dtype,
        order=order, metadata=metadata, alignment=alignment, block_nbytes=block_nbytes, allow_blowup=allow_blowup,
        strict=strict, jobs=jobs, chunk_nbytes=chunk_nbytes, max_memory=max_memory,
    )  # fmt: skip
    return forecast_with(source, options, to_stream=to_stream)


def save_file(
    tensors: Mapping[str, torch.Tensor | object] | torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    to: To = "mps",
    dtype: object = None,
    metadata: Mapping[str, str] | None = None,
    alignment: Alignment = DEFAULT_ALIGNMENT,
    block_nbytes: int = BLOCK_NBYTES,
    allow_blowup: bool = False,
    strict: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Save tensors in memory: a mapping of names to torch tensors or NumPy arrays, or a module.

    ``to``, ``dtype`` and the other options: as for :func:`convert`.

    Copies: none of contiguous tensors on the CPU; a window at a time of others.
    Raises: OptionError; SourceError naming the tensor, before a byte is written; LimitError; StrictError; OSError.
    ``path`` is then unchanged.
    """
    options = ConvertOptions(
        to=to, dtype=dtype, metadata=metadata, alignment=alignment, block_nbytes=block_nbytes,
        allow_blowup=allow_blowup, strict=strict, jobs=jobs, progress=progress,
    )  # fmt: skip
    require_path("path", path, "target")
    return convert_with(tensors, path, options)


def save_bytes(tensors: Mapping[str, object], *, metadata: Mapping[str, str] | None) -> bytes:
    """The bytes of a pack of tensors in memory.  Raises: as :func:`save_file`."""
    target = io.BytesIO()
    convert_with(tensors, target, ConvertOptions(metadata=metadata))
    return target.getvalue()


def convert_with(
    source: Convertible,
    target: str | os.PathLike[str] | int | BinaryWriter,
    options: ConvertOptions,
    *,
    front: Front | None = None,
) -> Report:
    """:func:`convert`, given its options as one object.  ``front`` replaces that of ``options``."""
    with open_sink(target) as sink:
        refuse_overwriting(source, sink)
        spool = spool_for(sink.folder, options)
        settings = options.settings if front is None else replace(options.settings, front=front)
        with open_for(source, options, spool) as opened:
            taken = _taken(source, opened, options)
            return write_pack(taken, sink, settings, spool=spool, progress=options.progress)


def forecast_with(source: Convertible, options: ConvertOptions, *, to_stream: bool) -> Forecast:
    """:func:`forecast`, given its options as one object."""
    with open_for(source, options, None) as opened:
        taken = _taken(source, opened, options)
        return forecast_pack(taken, options.settings, to_stream=to_stream)


def _taken(source: Convertible, opened: Source, options: ConvertOptions) -> Source:
    """What ``options`` take of ``opened``, with a remark about what in the folder of ``source`` is no tensor."""
    beside = [os.path.basename(path) for path in companions(source)]
    if beside:
        remark = f"a pack has tensors only; these files of the folder are not in it: {listed(beside)}"
        opened.traits = replace(opened.traits, remarks=(*opened.traits.remarks, remark))
    return adapted(opened, options.adaptation)


def spool_for(folder: str | None, options: ConvertOptions) -> Spool:
    """Temporary space for a target in ``folder``; None: for a stream."""
    # How long an archive is that has to be read whole before its tensors are known, nobody can tell: no memory for it
    # under a limit.  What waits later is planned.
    memory_nbytes = MEMORY_NBYTES if options.max_memory is None else 0
    chosen = folder if options.spool_dir is None else options.spool_dir
    return Spool(chosen, memory_nbytes=memory_nbytes, announce=options.announce)


def open_for(source: Convertible, options: ConvertOptions, spool: Spool | None) -> Source:
    """``source`` as ``options`` have it opened; ``spool``: as for :func:`stream_pack.sources.open.open_source`."""
    return open_source(
        source, key=options.key, ignore_unknown=options.ignore_unknown, spool=spool, max_memory=options.max_memory
    )


def refuse_overwriting(source: object, sink: Sink) -> None:
    """Refuse to write a file in place while it is read, which would destroy it."""
    if sink.identity is None:
        return
    sources = [source := source.path if isinstance(source, FileAt) else source]
    if isinstance(source, (str, os.PathLike)):
        # A set may read any non-empty file in its folder, or in that of its index.
        path = os.fsdecode(source)
        folder = os.path.dirname(path) or "." if path.endswith(".json") else path
        if os.path.isdir(folder):
            files = (entry for entry in os.scandir(folder) if entry.is_file())
            sources += [entry.path for entry in files if entry.stat().st_size]
    if sink.identity in map(file_identity, sources):
        raise SourceError(
            "the target is open for writing, and is the file of the source or in its folder: pass the target's path "
            "instead, which is replaced when the pack is complete"
        )
