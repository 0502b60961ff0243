"""``safetensors.torch`` for packs: a script changes its import and nothing else; and :func:`load_into` for models.

Tensors are given in place, in copy-on-write memory: the file never changes.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stream_pack.errors import MetalError, ModelMismatchError
from stream_pack.reader import safe_open
from stream_pack.reader.in_memory import open_bytes
from stream_pack.reader.pack import open as open_pack
from stream_pack.reader.verify import Progress
from stream_pack.text import listed, quoted
from stream_pack.writer import convert

if TYPE_CHECKING:
    import torch

__all__ = ["load", "load_file", "load_into", "load_model", "save", "save_file", "save_model"]


def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    progress: Progress | None = None,
) -> None:
    """Save tensors, also tied and strided ones, as :func:`stream_pack.save_file` does."""
    convert.save_file(tensors, filename, metadata=metadata, progress=progress)


def load_file(
    filename: str | os.PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    backend: str = "mmap",
    writable: bool = False,
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of a pack by name, in file order.

    ``writable``: for ``mps``, whose tensors are the file's pages unless this is True: they must not be written to, so
    pass True to train them.  On all other devices tensors may always be written to.
    ``backend``: as for :func:`stream_pack.safe_open`.  ``progress``: as for :func:`stream_pack.load_file`.

    Copies: none on the CPU, and none on ``mps`` but of tensors that Metal or torch cannot take in place; one on another
    device.
    Lifetime: the tensors keep the file mapped; replacing the file is safe, overwriting it in place is not.  On ``mps``
    see :func:`stream_pack.metal.interop.to_torch`.
    Raises: OptionError; as :func:`stream_pack.open`.
    """
    safe_open.require_backend(backend)
    if str(device).partition(":")[0] == "mps" and not writable:
        return _on_mps(filename, progress)
    return safe_open.load_file(filename, device=device, progress=progress)


def _on_mps(filename: str | os.PathLike[str], progress: Progress | None) -> dict[str, torch.Tensor]:
    from stream_pack import metal
    from stream_pack.metal import interop

    with open_pack(filename) as pack:
        try:
            weights = metal.open(pack)
        except MetalError:
            return safe_open.load_file(filename, device="mps", progress=progress)
        tensors, done, total = {}, 0, sum(view.nbytes for view in pack.values())
        with weights:
            for name, view in pack.items():
                try:
                    tensors[name] = interop.to_torch(weights[name])
                except MetalError:  # its dtype or length, or an older torch
                    tensors[name] = view.torch().to("mps")
                done += view.nbytes
                if progress is not None:
                    progress(done, total)
        return tensors


def save(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of the pack that :func:`save_file` would write."""
    return convert.save_bytes(tensors, metadata=metadata)


def load(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a pack that is in memory, by name, on the CPU.

    Copies: one of all bytes; the tensors may be written to.
    Raises: OptionError for anything but bytes; as :func:`stream_pack.open`.
    """
    with open_bytes(data) as pack:
        return {name: view.torch() for name, view in pack.items()}


def save_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    force_contiguous: bool = True,
) -> None:
    """Save what ``model.state_dict()`` holds: tied tensors once, under all their names.

    ``force_contiguous`` has no effect: a pack's tensors are contiguous, whatever the model's are.
    """
    convert.save_file(model, filename, metadata=metadata)


def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: str | int | torch.device = "cpu",
    *,
    backend: str = "mmap",
) -> tuple[list[str], list[str]]:
    """Copy the tensors of a pack into those of ``model``; :func:`load_into` copies none.

    Returns the names of the model that were not found, and those of the pack that the model does not have.  A name that
    shares memory with one that was found is found, too.  ``device``: where tensors are put before they are copied.

    Copies: one into the model; with a ``device`` other than the CPU, one more.
    Raises: ModelMismatchError with ``strict`` if there are such names, and for tensors that the model ties and that
    differ in the pack; RuntimeError, by torch, for tensors of another shape; as :func:`load_file`.
    """
    state = load_file(filename, device, backend=backend, writable=True)
    places = _places(model)
    _refuse_different(filename, _ties(places), state)
    missing, unexpected = model.load_state_dict(state, strict=False)
    found = [places[name] for name in state if name in places]
    lacking = [name for name in missing if not any(name in places and places[name].is_in(place) for place in found)]
    return _checked(model, filename, lacking, unexpected, strict=strict)


def load_into(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    device: str | int | torch.device = "cpu",
) -> tuple[list[str], list[str]]:
    """Let a model use the tensors of a pack: its parameters and buffers become them, with the pack's dtypes.

    Models on the ``meta`` device get their memory so.  What is tied in the model stays tied, under whichever of its
    names the pack has it; a model of transformers is asked to tie its weights first (``tie_weights``).
    Returns the names of the model that were not found, and those of the pack that the model does not have.
    ``device``, and on ``mps`` what must not be written to: as for :func:`load_file`.

    Copies: as :func:`load_file`: none on the CPU.
    Lifetime: as for :func:`load_file`.  An optimizer made before this call holds the parameters that the model had.
    Raises: ModelMismatchError with ``strict`` if there are such names, for tensors that the model ties and that differ
    in the pack, and, before anything is changed, for buffers on ``meta`` that no state dict holds; RuntimeError, by
    torch, for tensors of another shape; as :func:`load_file`.
    """
    tie_weights = getattr(model, "tie_weights", None)
    if callable(tie_weights):
        tie_weights()
    _refuse_unfilled(model)
    state = load_file(path, device)
    ties = _ties(_places(model))
    _refuse_different(path, ties, state)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    found = set(state)
    for names in ties:
        first = next((name for name in names if name in state), None)
        if first is not None:
            found.update(names)
            for name in names:
                _put(model, name, _get(model, first))
    lacking = [name for name in missing if name not in found]
    return _checked(model, path, lacking, unexpected, strict=strict)


class _Place(NamedTuple):
    """Where a tensor of a model lies.  Units: bytes of the storage, half-open."""

    storage: int
    begin: int
    end: int
    form: object  # what tells views of the same bytes from each other

    def is_in(self, other: _Place) -> bool:
        """Whether ``other`` has all the bytes of this."""
        return self.storage == other.storage and other.begin <= self.begin and self.end <= other.end


def _places(model: torch.nn.Module) -> dict[str, _Place]:
    """Where parameters and buffers of the model lie, also those on ``meta``, which have a storage without memory."""
    import torch

    places = {}
    tensors = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in chain(*tensors):
        if tensor.layout == torch.strided:
            form = (tensor.dtype, tensor.shape, tensor.stride())
            reach = sum((dim - 1) * stride for dim, stride in zip(tensor.shape, tensor.stride())) + 1
            begin = int(tensor.storage_offset()) * tensor.itemsize
            end = begin + (int(reach) * tensor.itemsize if tensor.numel() else 0)
            places[name] = _Place(tensor.untyped_storage()._cdata, begin, end, form)
    return places


def _ties(places: Mapping[str, _Place]) -> list[list[str]]:
    """The names that are one tensor, where there are several."""
    groups: dict[_Place, list[str]] = {}
    for name, place in places.items():
        groups.setdefault(place, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _refuse_different(path: str | os.PathLike[str], ties: Iterable[list[str]], state: Collection[str]) -> None:
    """Raises: ModelMismatchError if a tensor of the model is several in the pack."""
    with open_pack(path) as pack:
        for names in ties:
            held = [pack[name] for name in names if name in state]
            for other in held[1:]:
                alike = (other.dtype, other.shape) == (held[0].dtype, held[0].shape)
                if not alike or not np.array_equal(other.raw(), held[0].raw()):
                    raise ModelMismatchError(
                        f"{os.fsdecode(path)}: {quoted(held[0].name)} and {quoted(other.name)} differ in the pack, and "
                        "are one tensor in the model: make the model without tied weights, or leave one of them out",
                        missing=(),
                        unexpected=(),
                    )


def _refuse_unfilled(model: torch.nn.Module) -> None:
    """Raises: ModelMismatchError for buffers on ``meta`` that no state dict holds."""
    held = model.state_dict().keys()
    names = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in held]
    if names:
        raise ModelMismatchError(
            f"{type(model).__name__} has buffers on the device meta that are in no state dict, so nothing can fill "
            f"them: {listed(names)}; make the modules that hold them again on the CPU first, or make the whole model "
            "there",
            missing=tuple(names),
            unexpected=(),
        )


def _get(model: torch.nn.Module, name: str) -> torch.Tensor:
    owner, _, leaf = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(owner), leaf)
    return tensor


def _put(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, tensor)


def _checked(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    missing: list[str],
    unexpected: list[str],
    *,
    strict: bool,
) -> tuple[list[str], list[str]]:
    """Both lists.  Raises: ModelMismatchError, if ``strict`` and one is not empty."""
    if strict and (missing or unexpected):
        faults = [f"the pack lacks {listed(missing)}"] if missing else []
        faults += [f"the model lacks {listed(unexpected)}"] if unexpected else []
        raise ModelMismatchError(
            f"{os.fsdecode(path)} does not fit {type(model).__name__}: {'; '.join(faults)}; strict=False returns these "
            "names instead",
            missing=tuple(missing),
            unexpected=tuple(unexpected),
        )
    return missing, unexpected
