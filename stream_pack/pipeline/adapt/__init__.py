"""A source around a source: fewer tensors, other names, another order, other dtypes.

* ``source``: the adapted source; the entry point is ``adapted``.
* ``select``: which tensors, under which names, in which order.
* ``cast_rules``: which tensors become which dtype; ``cast_plan``: the catalog that results.
* ``cast``: the cast itself, chunk by chunk.

``select``, ``cast_rules`` and ``cast_plan`` are pure.
"""
