"""A source around a source: fewer tensors, other names, another order, other dtypes.

* ``source``: the adapted source; the entry point is ``adapted``.
* ``select``: which tensors, under which names, in which order.
<<<<<<< HEAD
* ``cast_plan``: which tensors become which dtype, and the catalog that results.
* ``cast``: the cast itself, chunk by chunk.
=======
* ``cast_rules``: which tensors become which dtype; ``cast_plan``: the catalog that results.
* ``cast``: the cast itself, chunk by chunk; ``cast_torch``: to bfloat16 by torch, where ml_dtypes is not installed.
>>>>>>> c5cc512 (wip)

``select``, ``cast_rules`` and ``cast_plan`` are pure.
"""
