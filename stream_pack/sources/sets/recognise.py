"""Which kind of set a folder is, told by what it holds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from stream_pack.errors import UnsupportedCheckpointError
from stream_pack.pickles.state_dict import Flatten
from stream_pack.pipeline.budget import MemoryWatch
from stream_pack.pipeline.source import Source
from stream_pack.sources.safetensors import JOIN_PIECES
from stream_pack.sources.sets.composite import OpenFile, open_members, regular_file
from stream_pack.sources.sets.dcp import SHARD_SUFFIX, DcpSource
from stream_pack.sources.sets.dcp_metadata import METADATA
from stream_pack.sources.sets.hugging_face import is_index_name, open_hugging_face
from stream_pack.sources.sets.llama import LlamaSource, is_shard_name
from stream_pack.sources.sets.llama_params import PARAMS
from stream_pack.sources.sets.ninja import TYPE_FILE, NinjaSource
from stream_pack.text import listed, quoted

__all__ = ["open_folder"]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".pack")
_ONE_MODEL = (
    ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    (
        "diffusion_pytorch_model.safetensors.index.json",
        "diffusion_pytorch_model.safetensors",
        "diffusion_pytorch_model.bin",
        "diffusion_pytorch_model.bin.index.json",
    ),
    ("adapter_model.safetensors", "adapter_model.bin"),
)
"""Names under which transformers, diffusers and PEFT keep one model in several forms, the one that they load first.

Source: transformers/modeling_utils.py, ``_get_resolved_checkpoint_files``; diffusers and peft, ``utils/constants.py``.
Of a file and an index of the same form, the index is taken here: it may name the file.
"""

_TRAINING_STATE = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state(_\d+)?)\.(bin|pt|pth)")
"""What transformers' Trainer and accelerate save beside a model, which holds none."""

_SHARD = re.compile(r"-(\d{5})-of-(?!00001\b)\d{5}\b|^shard-\d{5}-")
"""A file that is one of several."""

_LOOKED_FOR = (
    f"a Hugging Face index (*.index.json), Llama shards (consolidated.NN.pth and {PARAMS}), a torch.distributed "
    f"checkpoint ({METADATA} and *{SHARD_SUFFIX}), an mmap-ninja array ({TYPE_FILE})"
)


def open_folder(folder: Path, *, open_file: OpenFile, flatten: Flatten, watch: MemoryWatch) -> Source:
    """The set of files that ``folder`` holds, as one source.

    ``open_file`` opens its files; ``flatten`` finds the tensors among what a training loop has saved; ``watch``
    limits the memory for what the set's own files say.

    A folder with one file of weights and no set is that file.

    Raises: UnsupportedCheckpointError for a folder that holds none, or more than one; as the set's own source; OSError.
    """
    names = sorted(os.listdir(folder))
    chosen = _chosen_forms(names)
    passed_over = set(chain.from_iterable(chosen.values()))
    weights = [name for name in names if name.endswith(_WEIGHTS)]
    found: list[_Candidate] = [
        (f"the index {quoted(name)}", partial(open_hugging_face, folder / name, open_file=open_file, watch=watch))
        for name in filter(is_index_name, names)
        if name not in passed_over
    ]
    found += _other_sets(folder, names, bool(found or weights), open_file=open_file, flatten=flatten, watch=watch)
    if len(found) > 1:
        raise UnsupportedCheckpointError(
            f"the folder {quoted(str(folder))} holds {len(found)} checkpoints: "
            f"{listed((what for what, _ in found), show=str)}; pass the index file's path, or move the others away"
        )
    single = None if found else _only_file(weights, passed_over)
    if single is not None:
        found.append((f"the file {quoted(single)}", partial(_open_single, folder / single, open_file=open_file)))
    if not found:
        hint = f"; it holds {listed(weights)}: pass the path of a file" if weights else ""
        if any(name.startswith("shard-") for name in weights):
            hint = f"; it holds {listed(weights)}, pieces that ranks of a distributed save have written: {JOIN_PIECES}"
        raise UnsupportedCheckpointError(
            f"no known kind of checkpoint in folder {quoted(str(folder))}: looked for {_LOOKED_FOR}{hint}"
        )
    [(_, open_set)] = found
    source = open_set()
    source.traits = replace(source.traits, remarks=(*_passed_over(chosen), *source.traits.remarks))
    return source


def _passed_over(chosen: Mapping[str, list[str]]) -> Iterator[str]:
    for taken, others in chosen.items():
        if others:
            yield f"using {quoted(taken)}, not {listed(others)}: transformers prefers safetensors, too"


_Candidate: TypeAlias = tuple[str, Callable[[], Source]]
"""What a set is called, and what opens it."""


def _other_sets(
    folder: Path,
    names: Collection[str],
    has_weights: bool,
    *,
    open_file: OpenFile,
    flatten: Flatten,
    watch: MemoryWatch,
) -> Iterator[_Candidate]:
    """The sets in ``folder`` that have no index of Hugging Face; ``has_weights``: it holds something else."""
    if any(map(is_shard_name, names)):
        has_weights = True
        yield "Llama shards", partial(LlamaSource, folder, open_file=open_file)
    # The metadata alone says which shards are missing.
    alone = not (has_weights or TYPE_FILE in names)
    if any(name.endswith(SHARD_SUFFIX) for name in names) or (METADATA in names and alone):
        opener = partial(_open_distributed, folder, names, flatten=flatten, watch=watch)
        yield "a torch.distributed checkpoint", opener
    if TYPE_FILE in names:
        yield f"an mmap-ninja array ({TYPE_FILE})", partial(NinjaSource, folder)


def _chosen_forms(names: Collection[str]) -> dict[str, list[str]]:
    """The form of each model that is taken, and those of another format, which are passed over."""
    chosen = {}
    for forms in _ONE_MODEL:
        present = [form for form in forms if form in names]
        if present:
            safe = ".safetensors" in present[0]
            chosen[present[0]] = [form for form in present[1:] if safe and ".safetensors" not in form]
    return chosen


def _only_file(weights: Collection[str], passed_over: Collection[str]) -> str | None:
    """The one file that is a whole model; None where there is none, or more than one."""
    models = [name for name in weights if not _TRAINING_STATE.fullmatch(name) and name not in passed_over]
    # A pack beside other weights is what was made of them.
    models = [name for name in models if not name.endswith(".pack")] or models
    whole = [name for name in models if not _SHARD.search(name)]
    # Shards beside a whole model are those of an index that was passed over, or a save that did not finish.
    shards_are_known = any(is_index_name(name) for name in passed_over)
    return whole[0] if len(whole) == 1 and (len(models) == 1 or shards_are_known) else None


def _open_single(path: Path, *, open_file: OpenFile) -> Source:
    [source] = open_members([regular_file(path)], open_file)
    return source


def _open_distributed(folder: Path, names: Collection[str], *, flatten: Flatten, watch: MemoryWatch) -> Source:
    if METADATA not in names:
        raise UnsupportedCheckpointError(
            f"the folder {quoted(str(folder))} holds the shards of a torch.distributed checkpoint, but no "
            f"{METADATA}, which is written last: the save did not finish"
        )
    return DcpSource(folder, flatten=flatten, watch=watch)
