"""The public functions: tensors from anything that can be packed, into a file of another format."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace

from stream_pack.arguments.paths import require_path
from stream_pack.errors import OptionError, UnknownTensorError
from stream_pack.extraction.file_plan import FilePlan
from stream_pack.extraction.folder import FolderSink
from stream_pack.extraction.options import ExtractOptions, Format, Tied, several
from stream_pack.extraction.placing import Placing
from stream_pack.extraction.plan import plan_extraction, told
from stream_pack.extraction.report import ExtractForecast, ExtractReport
from stream_pack.pickles.nesting import Key
from stream_pack.pipeline.adapt.select import Order
from stream_pack.pipeline.adapt.source import Adaptation, adapted
from stream_pack.pipeline.source import Source
from stream_pack.pipeline.spool import Spool
from stream_pack.sources.open import Convertible
from stream_pack.sources.sets.companions import companions
from stream_pack.text import counted, listed
from stream_pack.writer.convert import open_for, refuse_overwriting, spool_for
from stream_pack.writer.flow import CHUNK_NBYTES, Progress, flow
from stream_pack.writer.needs import Needs, needs_of
from stream_pack.writer.options import ConvertOptions, Patterns, Renames
from stream_pack.writer.plan import refuse_warnings
from stream_pack.writer.sink import BinaryWriter, Sink, open_sink

__all__ = ["extract", "extract_with", "forecast_extract", "forecast_extract_with"]


def extract(
    source: Convertible,
    target: str | os.PathLike[str] | int | BinaryWriter,
    *,
    to: Format | None = None,
    names: str | Iterable[str] | None = None,
    tied: Tied = "duplicate",
    max_shard_nbytes: int | None = None,
    key: Key = None,
    ignore_unknown: bool = False,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Renames | None = None,
    dtype: object = None,
    order: Order = "source",
    metadata: Mapping[str, str] | None = None,
    allow_blowup: bool = False,
    strict: bool = False,
    jobs: int | None = None,
    chunk_nbytes: int = CHUNK_NBYTES,
    max_memory: int | None = None,
    spool_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> ExtractReport:
    """Write tensors of a pack, or of anything that :func:`convert` takes, to a file of another format, in one pass.

    ``target``: a path, which is replaced only when the file is complete and on disk; a descriptor or binary file
    object, which is written in order and not closed; or, for safetensors, a folder (one that exists, a path that ends
    in ``/``, or any path with ``max_shard_nbytes``), which gets ``model.safetensors``, or numbered files and their
    index, as transformers writes them.

    ``to``: ``"safetensors"``; ``"torch"``, a file that ``torch.load(weights_only=True, mmap=True)`` reads; ``"npy"``,
    one tensor; ``"npz"``, several, not compressed; ``"raw"``, the bytes and nothing else, little-endian and row-major,
    one tensor after the other.  By default what the target's name ends in: ``.safetensors``, ``.pt``, ``.pth``,
    ``.bin``, ``.ckpt``, ``.npy``, ``.npz``.
    ``names``: the tensors to take, each of which has to be there; for patterns, use ``include``.
    ``tied``: of tensors with the same bytes, dtype and shape, safetensors gets all (``"duplicate"``), or the first one
    (``"drop"``), and the report says which were dropped.  torch keeps them tied.
    ``max_shard_nbytes``: bytes of tensors in one safetensors file; a larger tensor has a file of its own.
    ``metadata``: texts for the header of safetensors, added to those of the source and to ``{"format": "pt"}``.

    When ``source`` is a folder, or the index of one, and ``target`` is a folder, what transformers reads beside the
    weights (``config.json``, tokenizers) is copied.  The other options: as for :func:`convert`.

    Safetensors files list tensors by dtype, then in the order of ``order``.  With ``order="name"`` they are, byte for
    byte, those of the safetensors package.

    Copies: a few chunks at a time.  Checksums of the source are verified on the way.
    Raises: OptionError; UnknownTensorError for one of ``names``; SourceError, also for a tensor whose dtype the format
    does not have; LimitError; StrictError; OSError.  The target is then unchanged.
    """
    common = ConvertOptions(
        key=key, ignore_unknown=ignore_unknown, include=include, exclude=exclude, rename=rename, dtype=dtype,
        order=order, metadata=metadata, allow_blowup=allow_blowup, strict=strict, jobs=jobs, chunk_nbytes=chunk_nbytes,
        max_memory=max_memory, spool_dir=spool_dir, progress=progress, announce=announce,
    )  # fmt: skip
    options = ExtractOptions(
        to=to, names=several(names), tied=tied, max_shard_nbytes=max_shard_nbytes, common=common
    )  # fmt: skip
    return extract_with(source, target, options)


def extract_with(
    source: Convertible, target: str | os.PathLike[str] | int | BinaryWriter, options: ExtractOptions
) -> ExtractReport:
    """:func:`extract`, given its options as one object."""
    began = time.perf_counter()
    common = options.common
    form = _form_of(target, options)
    folder = os.fsdecode(target) if options.into_folder(target) else None  # type: ignore[arg-type]
    with ExitStack() as stack:
        sink: Sink | None = None
        if folder is None:
            sink = stack.enter_context(open_sink(target))
            refuse_overwriting(source, sink)
        beside = _beside(folder) if sink is None else sink.folder
        spool = spool_for(beside, common)
        opened = stack.enter_context(open_for(source, common, spool))
        taken = _taken(opened, options)
        planned = plan_extraction(taken, form, options, folder)
        copied = tuple(companions(source)) if folder is not None else ()
        if sink is None:
            assert folder is not None
            assert planned.folder is not None
            sink = stack.enter_context(FolderSink(folder, planned.folder, copied))
        needs = _needs(taken, planned.file, options, in_order=sink.in_order)
        warnings = (*taken.traits.warnings, *planned.warnings)
        if common.strict:
            refuse_warnings(warnings)
        why = f"a {opened.traits.kind} from a pipe, with strided or out-of-order tensors"
        spool.allot(memory_nbytes=needs.waiting_nbytes, disk_nbytes=needs.spool_nbytes, why=why)
        sink.begin(planned.file.nbytes, reserve=not taken.traits.sparse)
        _write(taken, sink, planned.file, needs, options, spool=spool)
        return ExtractReport(
            **told(taken, form, planned, target),
            copied=tuple(map(os.path.basename, copied)),
            spool_nbytes=spool.peak_nbytes,
            warnings=warnings + sink.warnings,
            remarks=taken.traits.remarks + sink.remarks,
            seconds=time.perf_counter() - began,
            verification=taken.verification,
        )


def forecast_extract(
    source: Convertible,
    target: str | os.PathLike[str] | None = None,
    *,
    to: Format | None = None,
    names: str | Iterable[str] | None = None,
    tied: Tied = "duplicate",
    max_shard_nbytes: int | None = None,
    key: Key = None,
    ignore_unknown: bool = False,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Renames | None = None,
    dtype: object = None,
    order: Order = "source",
    metadata: Mapping[str, str] | None = None,
    allow_blowup: bool = False,
    strict: bool = False,
    jobs: int | None = None,
    chunk_nbytes: int = CHUNK_NBYTES,
    max_memory: int | None = None,
) -> ExtractForecast:
    """What :func:`extract` would do with these arguments.  Reads no tensor data, and only the head of a pipe.

    ``target``: None is a stream.
    Raises: what :func:`extract` would raise before its first byte, but for errors of the target.
    """
    common = ConvertOptions(
        key=key, ignore_unknown=ignore_unknown, include=include, exclude=exclude, rename=rename, dtype=dtype,
        order=order, metadata=metadata, allow_blowup=allow_blowup, strict=strict, jobs=jobs, chunk_nbytes=chunk_nbytes,
        max_memory=max_memory,
    )  # fmt: skip
    options = ExtractOptions(
        to=to, names=several(names), tied=tied, max_shard_nbytes=max_shard_nbytes, common=common
    )  # fmt: skip
    return forecast_extract_with(source, target, options)


def forecast_extract_with(
    source: Convertible, target: str | os.PathLike[str] | None, options: ExtractOptions
) -> ExtractForecast:
    """:func:`forecast_extract`, given its options as one object."""
    form = _form_of(target, options)
    folder = os.fsdecode(target) if target is not None and options.into_folder(target) else None
    with open_for(source, options.common, None) as opened:
        taken = _taken(opened, options)
        planned = plan_extraction(taken, form, options, folder)
        needs = _needs(taken, planned.file, options, in_order=target is None)
        warnings = (*taken.traits.warnings, *planned.warnings)
        if options.common.strict:
            refuse_warnings(warnings)
        return ExtractForecast(
            **told(taken, form, planned, target),
            copied=tuple(map(os.path.basename, companions(source))) if folder is not None else (),
            spool_nbytes=needs.spool_nbytes,
            warnings=warnings,
            remarks=taken.traits.remarks,
            peak_memory_nbytes=needs.budget.peak_nbytes,
        )


def _form_of(target: object, options: ExtractOptions) -> Format:
    if isinstance(target, (str, os.PathLike)):
        require_path("target", target, "target")
    return options.format_of(target)


def _beside(folder: str | None) -> str:
    """An existing folder on the disk of ``folder``."""
    assert folder is not None
    return folder if os.path.isdir(folder) else os.path.dirname(os.path.abspath(folder))


def _taken(opened: Source, options: ExtractOptions) -> Source:
    """The tensors that are asked for.  Raises: UnknownTensorError for a name that is not there."""
    adaptation: Adaptation = options.common.adaptation
    if options.names:
        if adaptation.selection.include:
            raise OptionError("names and include both choose tensors: give one of them")
        missing = sorted(set(options.names) - set(opened.catalog.names))
        if missing:
            raise UnknownTensorError(
                f"the source has no tensor {listed(missing)}; its {counted(len(opened.catalog), 'tensor')}: "
                f"{listed(opened.catalog.names)}",
                tensor=missing[0],
            )
        exact = tuple(map(glob.escape, options.names))
        adaptation = replace(adaptation, selection=replace(adaptation.selection, include=exact))
    return adapted(opened, adaptation)


def _needs(taken: Source, plan: FilePlan, options: ExtractOptions, *, in_order: bool) -> Needs:
    means = options.common.settings.means
    return needs_of(taken, plan.requests, means, tensors=len(taken.catalog), blocks=0, in_order=in_order)


def _write(taken: Source, sink: Sink, plan: FilePlan, needs: Needs, options: ExtractOptions, *, spool: Spool) -> None:
    """Stream the tensors into ``sink`` and commit it."""
    placing = Placing(plan, taken.catalog)
    for position, data in plan.head:
        sink.put(position, data)
    flow(
        taken,
        plan.requests,
        sink,
        needs.budget,
        place=placing.place,
        spool=spool,
        progress=options.common.progress,
        total_nbytes=plan.nbytes,
    )
    sink.put(*placing.tail())
    sink.commit()
