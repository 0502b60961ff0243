"""What the tensors of a set have to be: torch's own, and sources that are taken apart for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from stream_pack.pipeline.source import Source
from stream_pack.pipeline.spool import Spool
from stream_pack.sources.open import open_source
from tests.sources.source_suite import Expected, collect, options, requests_for
from tests.support.taking import taken
from tests.support.torch_zips import as_torch_has_it

__all__ = ["expected_of", "read", "read_path"]


def expected_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Expected]:
    """Every tensor as torch has it."""
    return {
        name: Expected(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), as_torch_has_it(tensor))
        for name, tensor in tensors.items()
    }


def read(source: Source, *, chunk_nbytes: int = 1000) -> dict[str, bytes]:
    """The bytes of every tensor, by name."""
    with source:
        tensors, requests = requests_for(source.catalog)
        data = collect(source, requests, options(chunk_nbytes=chunk_nbytes, spool=Spool("nowhere")))
        read = dict.fromkeys(source.catalog.names, b"")
        return read | {source.catalog.names[k]: bytes for k, bytes in zip(tensors, data, strict=True)}


def read_path(path: Path) -> dict[str, bytes]:
    """The same of whatever stands at ``path``."""
    return read(taken(open_source(path)))
