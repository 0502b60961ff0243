"""Which kind of set a folder is, told by what it holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from stream_pack.errors import UnsupportedCheckpointError
from stream_pack.pickles.state_dict import Flatten
from stream_pack.pipeline.budget import MemoryWatch
from stream_pack.pipeline.source import Source
from stream_pack.sources.sets.composite import OpenFile
from stream_pack.sources.sets.dcp import SHARD_SUFFIX, DcpSource
from stream_pack.sources.sets.dcp_metadata import METADATA
from stream_pack.sources.sets.hugging_face import is_index_name, open_hugging_face
from stream_pack.sources.sets.llama import LlamaSource, is_shard_name
from stream_pack.sources.sets.llama_params import PARAMS
from stream_pack.sources.sets.ninja import TYPE_FILE, NinjaSource
from stream_pack.text import listed, quoted

__all__ = ["open_folder"]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".pack")
_LOOKED_FOR = (
    f"a Hugging Face index (*.index.json), Llama shards (consolidated.NN.pth and {PARAMS}), a torch.distributed "
    f"checkpoint ({METADATA} and *{SHARD_SUFFIX}), an mmap-ninja array ({TYPE_FILE})"
)


def open_folder(folder: Path, *, open_file: OpenFile, flatten: Flatten, watch: MemoryWatch) -> Source:
    """The set of files that ``folder`` holds, as one source.

    ``open_file`` opens its files; ``flatten`` finds the tensors among what a training loop has saved; ``watch``
    limits the memory for what the set's own files say.

    Raises: UnsupportedCheckpointError for a folder that holds none, or more than one; as the set's own source; OSError.
    """
    names = sorted(os.listdir(folder))
    weights = [name for name in names if name.endswith(_WEIGHTS)]
    found: list[tuple[str, Callable[[], Source]]] = [
        (f"the index {quoted(name)}", partial(open_hugging_face, folder / name, open_file=open_file, watch=watch))
        for name in filter(is_index_name, names)
    ]
    if any(map(is_shard_name, names)):
        found.append(("Llama shards", partial(LlamaSource, folder, open_file=open_file)))
    # The metadata alone says which shards are missing.
    alone = not any((found, weights, TYPE_FILE in names))
    if any(name.endswith(SHARD_SUFFIX) for name in names) or (METADATA in names and alone):
        distributed = partial(_open_distributed, folder, names, flatten=flatten, watch=watch)
        found.append(("a torch.distributed checkpoint", distributed))
    if TYPE_FILE in names:
        found.append((f"an mmap-ninja array ({TYPE_FILE})", partial(NinjaSource, folder)))
    if len(found) > 1:
        raise UnsupportedCheckpointError(
            f"the folder {quoted(str(folder))} holds {len(found)} checkpoints: "
            f"{listed((what for what, _ in found), show=str)}; pass the index file's path, or move the others away"
        )
    if not found:
        hint = f"; it holds {listed(weights)}: pass the path of a file" if weights else ""
        raise UnsupportedCheckpointError(
            f"no known kind of checkpoint in folder {quoted(str(folder))}: looked for {_LOOKED_FOR}{hint}"
        )
    [(_, open_set)] = found
    return open_set()


def _open_distributed(folder: Path, names: Collection[str], *, flatten: Flatten, watch: MemoryWatch) -> Source:
    if METADATA not in names:
        raise UnsupportedCheckpointError(
            f"the folder {quoted(str(folder))} holds the shards of a torch.distributed checkpoint, but no "
            f"{METADATA}, which is written last: the save did not finish"
        )
    return DcpSource(folder, flatten=flatten, watch=watch)
