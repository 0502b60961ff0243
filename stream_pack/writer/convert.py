"""The public functions that write a whole pack in one call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from stream_pack.errors import SourceError
from stream_pack.format.align import DEFAULT_ALIGNMENT, Alignment
from stream_pack.format.checksum import BLOCK_NBYTES
from stream_pack.format.front import Front
from stream_pack.format.header import To
from stream_pack.pipeline.adapt.select import Order
from stream_pack.pipeline.adapt.source import adapted
from stream_pack.pipeline.spool import Spool
from stream_pack.report import Forecast, Report
from stream_pack.sources.open import Convertible, open_source
from stream_pack.sources.torch_save.nesting import Key
from stream_pack.writer.forecast import forecast_pack
from stream_pack.writer.options import ConvertOptions, Patterns, Renames
from stream_pack.writer.pack import CHUNK_NBYTES, Progress, default_jobs, write_pack
from stream_pack.writer.sink import BinaryWriter, Sink, file_identity, open_sink

if TYPE_CHECKING:
    import torch

__all__ = ["convert", "convert_with", "forecast", "forecast_with", "save_file"]


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
    jobs: int | None = None,
    chunk_nbytes: int = CHUNK_NBYTES,
    max_memory: int | None = None,
    spool_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> Report:
    r"""Pack a checkpoint, in one pass and constant memory.

    ``source``: a path, a descriptor or binary file object (a pipe will do), a mapping of names to
    torch tensors or NumPy arrays, or a module.  Formats: torch.save (both of its formats), safetensors, GGUF, packs.
    A path may also be a folder, or its index: Hugging Face shards, Llama shards with params.json, a torch.distributed
    checkpoint, an mmap-ninja array.
    ``target``: a path, which is replaced only when the pack is complete and on disk, or a
    descriptor or binary file object, which is written in order and never closed.
    ``to``: what ExecuTorch takes the pack for: ``"mps"`` and ``"xnnpack"``, a payload of that delegate; ``"ptd"``, a
    data file, which its runtimes load beside a program whose tensors are external.  Tensors, checksums and all uses of
    the pack here are the same; a pack may be converted from one to another.

    ``key``: which of the dicts that a torch.save checkpoint nests.  ``"a.b"`` or ``["a", "b"]`` is what stands under
    ``b`` in what stands under ``a`` (a key that holds a dot comes before the two that it could be cut into; items of
    lists, and what a dict holds under a number, have that number as a key: ``"optimizer.state.0"``); ``"."`` is all of
    it.  By default a flat state dict is taken as it is, else what
    stands under ``state_dict``, ``model`` or ``model_state_dict`` if exactly one of these holds tensors, which the
    report then says; else the checkpoint is refused.  Below the chosen dict, names are joined by dots.
    ``ignore_unknown``: leave out objects in the checkpoint that only code could rebuild, with whatever they hold; the
    report says which.  Without it they are a reason to refuse.  No code of a checkpoint is ever run.

    ``include``, ``exclude``: globs over whole names of the source; case counts.  A tensor is taken
    if one of ``include`` matches, or there are none, and none of ``exclude`` does.
    ``rename``: ``"s/^module\.//"``, as sed writes it with Python's regular expressions (``g`` at the
    end: everywhere in the name), or a function from name to name; several are applied one after the
    other.
    ``dtype``: what floats (float16, bfloat16, float32, float64) are cast to, rounded as torch
    rounds; every other dtype stays.  A name or dtype; or a mapping of globs to them, or a sequence
    of texts such as ``"norm*=f32"`` and ``"bf16"``, of which the first that matches a name of the
    source counts.
    ``order``: ``"source"``, or ``"name"`` to sort by the bytes of the names.

    ``metadata`` is added to what the source has; ``alignment``, ``block_nbytes``: see
    docs/FORMAT.md.  ``allow_blowup`` permits output above four times the source bytes it comes from.
    ``jobs``: threads, by default one a core and at most 4.  ``max_memory``: bytes of resident
    anonymous memory that the process stays below from here on, what it has already counted;
    what it takes is chosen accordingly, and what cannot be kept is refused before the first byte, also while the head
    of the source is still being read.  ``spool_dir``: a folder for temporary files when the target
    is a stream (with a path they lie beside it).  ``progress(done, total)`` is called in bytes of
    tensor data.  ``announce(line)`` is called before the first byte when such files will be needed.

    Copies: a few chunks at a time.  The bytes written depend on the tensors, their order and the
    options that FORMAT.md names, never on ``jobs``, ``chunk_nbytes``, ``max_memory`` or how the
    source came.
    Raises: OptionError; SourceError, also when nothing is left by ``include`` and ``exclude`` or two
    tensors would have one name; LimitError; OSError.  A target path is then as it was before.
    """
    options = ConvertOptions(
        to=to,
        key=key,
        ignore_unknown=ignore_unknown,
        include=include,
        exclude=exclude,
        rename=rename,
        dtype=dtype,
        order=order,
        metadata=metadata,
        alignment=alignment,
        block_nbytes=block_nbytes,
        allow_blowup=allow_blowup,
        jobs=jobs,
        chunk_nbytes=chunk_nbytes,
        max_memory=max_memory,
        spool_dir=spool_dir,
        progress=progress,
        announce=announce,
    )
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
    jobs: int | None = None,
    chunk_nbytes: int = CHUNK_NBYTES,
    max_memory: int | None = None,
) -> Forecast:
    """What :func:`convert` would do with these arguments.  No tensor data is read, of a pipe its head only.

    ``to_stream``: the target is a descriptor or file object, not a path.
    Raises: what :func:`convert` would raise before its first byte.
    """
    options = ConvertOptions(
        to=to,
        key=key,
        ignore_unknown=ignore_unknown,
        include=include,
        exclude=exclude,
        rename=rename,
        dtype=dtype,
        order=order,
        metadata=metadata,
        alignment=alignment,
        block_nbytes=block_nbytes,
        allow_blowup=allow_blowup,
        jobs=jobs,
        chunk_nbytes=chunk_nbytes,
        max_memory=max_memory,
    )
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
    jobs: int | None = None,
) -> Report:
    """Save tensors that are in memory: a mapping of names to torch tensors or NumPy arrays, or a
    module.

    ``to``, ``dtype`` and the other options: as for :func:`convert`.

    Copies: none of contiguous tensors on the CPU; a window at a time of others.
    Raises: SourceError naming the tensor, before a byte is written; LimitError; OSError.  ``path``
    is then as before.
    """
    options = ConvertOptions(
        to=to,
        dtype=dtype,
        metadata=metadata,
        alignment=alignment,
        block_nbytes=block_nbytes,
        allow_blowup=allow_blowup,
        jobs=jobs,
    )
    return convert_with(tensors, path, options)


def convert_with(
    source: Convertible,
    target: str | os.PathLike[str] | int | BinaryWriter,
    options: ConvertOptions,
    *,
    front: Front | None = None,
) -> Report:
    """:func:`convert`, given its options as one object.  ``front`` replaces the one that ``options`` ask for."""
    with ExitStack() as stack:
        sink = stack.enter_context(open_sink(target))
        _refuse_overwriting(source, sink)
        spool = Spool(sink.folder or options.spool_dir, announce=options.announce)
        opened = stack.enter_context(
            open_source(
                source,
                key=options.key,
                ignore_unknown=options.ignore_unknown,
                spool=spool,
                max_memory=options.max_memory,
            )
        )
        return write_pack(
            adapted(opened, options.adaptation),
            sink,
            front=front or options.front,
            policy=options.policy,
            metadata=options.metadata or {},
            chunk_nbytes=options.chunk_nbytes,
            jobs=options.jobs or default_jobs(),
            spool=spool,
            progress=options.progress,
            max_memory=options.max_memory,
        )


def forecast_with(source: Convertible, options: ConvertOptions, *, to_stream: bool) -> Forecast:
    """:func:`forecast`, given its options as one object."""
    with open_source(
        source,
        key=options.key,
        ignore_unknown=options.ignore_unknown,
        max_memory=options.max_memory,
    ) as opened:
        return forecast_pack(
            adapted(opened, options.adaptation),
            front=options.front,
            policy=options.policy,
            metadata=options.metadata or {},
            chunk_nbytes=options.chunk_nbytes,
            jobs=options.jobs or default_jobs(),
            max_memory=options.max_memory,
            to_stream=to_stream,
        )


def _refuse_overwriting(source: object, sink: Sink) -> None:
    """A file that is written in place while it is read becomes neither what it was nor a pack of it."""
    if sink.identity is None:
        return
    sources = [source]
    if isinstance(source, (str, os.PathLike)):
        # A set may read any file of its folder, or of its index's, that has bytes.
        path = os.fsdecode(source)
        folder = os.path.dirname(path) or "." if path.endswith(".json") else path
        if os.path.isdir(folder):
            sources += [
                entry.path
                for entry in os.scandir(folder)
                if entry.is_file() and entry.stat().st_size
            ]
    if sink.identity in map(file_identity, sources):
        raise SourceError(
            "the target is open for writing in place, and it is the source's file, or one in its folder: give its "
            "path as the target, which is replaced when the pack is complete"
        )
