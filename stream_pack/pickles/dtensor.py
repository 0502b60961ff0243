"""A DTensor in one rank's checkpoint: the rank's part, unless the pickle says plainly that the part is the whole.

It does when every placement is a replica or a shard, and the part has the shape of the whole: it is replicated, or the
one shard that has all the elements (a world of one).  A tensor whose sum over the ranks is still to be made is never
whole.

Source: torch/distributed/tensor/_api.py, _dtensor_spec.py and placement_types.py of torch 2.0 to 2.13.
"""

from __future__ import annotations

from stream_pack.pickles.unpickler import Opaque

__all__ = ["DTENSOR_NAMES", "is_dtensor", "local_tensor"]

_SPEC = "DTensorSpec"
_WHOLE_IF_SHAPES_AGREE = {"Replicate", "Shard"}

DTENSOR_NAMES = tuple(
    f"torch.distributed.{name}"
    for name in (
        "tensor.DTensor",
        "tensor._api.DTensor",
        "_tensor.DTensor",
        "_tensor.api.DTensor",
        "device_mesh.DeviceMesh",
        "_mesh_layout._MeshLayout",
        "_mesh_layout._FlatLayout",
        *(
            f"{module}.{name}"
            for module in ("tensor._dtensor_spec", "_tensor._dtensor_spec", "_tensor.placement_types")
            for name in (_SPEC, "TensorMeta", "ShardOrderEntry")
        ),
        *(
            f"{module}.placement_types.{name}"
            for module in ("tensor", "_tensor")
            for name in ("Replicate", "Shard", "Partial", "_StridedShard", "_Partial")
        ),
    )
)
"""What the pickle of a DTensor names."""


def is_dtensor(name: str) -> bool:
    """Whether a class of this name is DTensor, wherever it stood in which version."""
    return name.startswith("torch.distributed.") and name.endswith(".DTensor")


def local_tensor(arguments: object, state: object) -> tuple[object, object] | None:
    """The rank's own tensor and the shape of the whole, if the placements allow that one is the other.

    ``arguments``: of ``_rebuild_wrapper_subclass``, the class and dtype first, then the shape.  ``state``: the
    attributes, which are in slots (after None) or in a dict.  Neither's types are trusted; the caller compares the
    shapes.
    """
    if type(state) is tuple and len(state) == 2:
        state = state[1]
    if type(arguments) is not tuple or len(arguments) < 3 or type(state) is not dict:
        return None
    spec = state.get("_spec")
    if type(spec) is not Opaque or not spec.name.endswith(f".{_SPEC}"):
        return None
    fields = spec.parts[-1] if spec.parts else None
    placements = fields.get("placements") if type(fields) is dict else None
    if type(placements) is not tuple or not placements:
        return None
    for placement in placements:
        if type(placement) is not Opaque:
            return None
        if placement.name.rpartition(".")[2] not in _WHOLE_IF_SHAPES_AGREE:
            return None
    return state.get("_local_tensor"), arguments[2]
