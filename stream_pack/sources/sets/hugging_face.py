"""A Hugging Face checkpoint in shards: an index of tensors, and the files that hold them.

Source: transformers, ``save_pretrained`` and ``load_sharded_checkpoint``: ``*.index.json`` holds
``{"metadata": {"total_size": ...}, "weight_map": {tensor: file}}``; a shard is a safetensors file or one of
``torch.save``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from stream_pack.errors import StreamPackError, UnsupportedCheckpointError
from stream_pack.pipeline.budget import MemoryWatch
from stream_pack.pipeline.file_state import FilesRead
from stream_pack.pipeline.source import Source
from stream_pack.sources.safetensors import SafetensorsSource
from stream_pack.sources.sets.composite import (
    JoinedSource,
    Member,
    OpenFile,
    member_path,
    open_members,
    opened,
    say_where,
)
from stream_pack.text import MAX_LISTED, counted, listed, quoted, shown

__all__ = ["is_index_name", "open_hugging_face"]

MAX_INDEX_NBYTES = 256 << 20
"""About 100 bytes a tensor, so more than two million of them."""

INDEX_COPIES = 2
ENTRY_NBYTES = 400
"""Memory that the index takes while it is parsed: lengths of it, and for each colon (measured)."""

JOINED_NBYTES = 250
"""What joining the files takes for each of their tensors (measured)."""


def is_index_name(name: str) -> bool:
    """Whether a file of this name is an index: ``model.safetensors.index.json``, ``....index.fp16.json``."""
    return name.endswith(".json") and ".index." in name


def open_hugging_face(index: Path, *, open_file: OpenFile, watch: MemoryWatch) -> Source:
    """The tensors that the index at ``index`` names, file by file in the order of the files' names, each
    file in its own order.

    Tensors of the files that the index does not name are left out, and counted in a warning.  ``total_size`` is only
    looked at where files say that their tensors may be pieces, because tools have written it in several ways.
    ``watch`` is asked about the index.

    Raises: UnsupportedCheckpointError for an index that breaks a rule, names a file that is not there or a tensor that
    is not in its file; what ``open_file`` raises; LimitError; OSError.
    """
    read = FilesRead()
    files, total_nbytes = _read_index(index, read, watch)
    paths = [member_path(index.parent, name, named_by=quoted(index.name)) for name in files]
    sources = open_members(paths, open_file)
    try:
        watch.allow(JOINED_NBYTES * sum(len(source.catalog) for source in sources))
        _prove_whole(files, sources, total_nbytes)
        return _join(index.name, files, sources, read)
    except BaseException:
        for source in sources:
            source.close()
        raise


def _prove_whole(files: dict[str, dict[str, None]], sources: list[Source], total_nbytes: int | None) -> None:
    """Where files say that their tensors may be pieces: they are whole if each begins where its tensor does, and they
    add up to what the index, which is written once for all ranks, says of the tensors.

    Raises: UnsupportedCheckpointError naming the first file otherwise.
    """
    in_pieces = [
        (file, source)
        for file, source in zip(files, sources, strict=True)
        if isinstance(source, SafetensorsSource) and source.pieces is not None
    ]
    if not in_pieces:
        return
    found = sum(
        nbytes
        for wanted, source in zip(files.values(), sources, strict=True)
        for name, nbytes in zip(source.catalog.names, source.catalog.nbytes.tolist())
        if name in wanted
    )
    for file, source in in_pieces:
        if not source.pieces or found != total_nbytes:
            try:
                source.refuse(range(len(source.catalog)))
            except UnsupportedCheckpointError as error:
                say_where(error, quoted(file))
                raise


def _join(index: str, files: dict[str, dict[str, None]], sources: list[Source], read: FilesRead) -> Source:
    members = []
    unnamed: list[str] = []
    elsewhere: list[tuple[str, str]] = []
    taken_from = {name: file for file, wanted in files.items() for name in wanted}
    for (file, wanted), source in zip(files.items(), sources, strict=True):
        names = source.catalog.names
        missing = wanted.keys() - set(names)
        if missing:
            raise UnsupportedCheckpointError(
                f"{quoted(index)} lists {counted(len(missing), 'tensor')} missing from {quoted(file)}: "
                f"{listed(sorted(missing))}; the files are of different checkpoints, or one was replaced"
            )
        members.append(Member(file, source, [k for k, name in enumerate(names) if name in wanted]))
        unnamed.extend(name for name in names if name not in taken_from)
        elsewhere.extend((name, file) for name in names if taken_from.get(name, file) != file)
    metadata, disputed = _common_metadata(sources)
    warnings = list(_said_twice(elsewhere, taken_from))
    if unnamed:
        warnings.append(
            f"tensors that {quoted(index)} does not name were left out, {len(unnamed)} in all: {listed(unnamed)}"
        )
    if disputed:
        warnings.append(f"the files disagree about the metadata {listed(disputed)}: left out")
    return JoinedSource(
        members,
        kind=f"Hugging Face set of {counted(len(files), 'file')}",
        metadata=metadata,
        warnings=warnings,
        files=read,
    )


def _common_metadata(sources: Iterable[Source]) -> tuple[dict[str, str], list[str]]:
    """The metadata of all files, and the keys of those about which they disagree."""
    metadata: dict[str, str] = {}
    disputed: set[str] = set()
    for source in sources:
        for key, value in source.catalog.metadata.items():
            if metadata.setdefault(key, value) != value:
                disputed.add(key)
    return {key: value for key, value in metadata.items() if key not in disputed}, sorted(disputed)


def _said_twice(elsewhere: list[tuple[str, str]], taken_from: Mapping[str, str]) -> Iterator[str]:
    """What to say of tensors that are in other files too, a line for each two files: the index decides.

    Whether both copies have the same bytes is not looked at.
    """
    pairs: dict[tuple[str, str], list[str]] = {}
    for name, file in elsewhere:
        pairs.setdefault((file, taken_from[name]), []).append(name)
    for (file, home), names in islice(pairs.items(), MAX_LISTED):
        verb = "is" if len(names) == 1 else "are"
        yield f"{listed(names)} {verb} also in {quoted(file)}; taken from {quoted(home)}, as the index says"
    rest = sum(len(names) for names in islice(pairs.values(), MAX_LISTED, None))
    if rest:
        yield f"{rest} tensors more are in two files; each was taken from the one that the index names"


def _read_index(path: Path, read: FilesRead, watch: MemoryWatch) -> tuple[dict[str, dict[str, None]], int | None]:
    """The names of the tensors of each file, files in the order of their names; and the index's ``total_size``."""
    with opened(path, read) as file:
        watch.allow(INDEX_COPIES * min(os.fstat(file.fileno()).st_size, MAX_INDEX_NBYTES))
        text = file.read(MAX_INDEX_NBYTES + 1)
    if len(text) > MAX_INDEX_NBYTES:
        raise _not_an_index(path, f"is longer than {MAX_INDEX_NBYTES} bytes")
    watch.allow(len(text) + ENTRY_NBYTES * text.count(b":"))
    try:
        parsed = json.loads(text.decode(), object_pairs_hook=lambda pairs: _unique(path, pairs))
    except StreamPackError:
        raise
    except (ValueError, RecursionError) as error:
        raise _not_an_index(path, f"is not JSON: {error}") from None
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _not_an_index(path, "has no weight_map of names to files")
    files: dict[str, dict[str, None]] = {}
    for tensor, file in weight_map.items():
        if type(file) is not str:
            raise _not_an_index(path, f"places {quoted(tensor)} in {shown(file)}")
        files.setdefault(file, {})[tensor] = None
    metadata = parsed.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return dict(sorted(files.items())), total if type(total) is int else None


def _unique(path: Path, pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _not_an_index(path, f"has the key {quoted(twice)} twice")
    return unique


def _not_an_index(path: Path, why: str) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        f"{quoted(path.name)} {why}; expected an index as transformers writes it, "
        '{"metadata": {...}, "weight_map": {tensor: file}}'
    )
