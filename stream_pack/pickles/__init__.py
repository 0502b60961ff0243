"""What a pickle of torch says, read without torch, and without importing or calling anything that it names.

* ``unpickler``: a pickle machine that runs nothing; ``globals``, ``dtensor``: what the names in a pickle mean;
  ``arrays``: NumPy arrays;
* ``nesting``: which of the nested values is taken; ``contents``: how much it holds; ``tensor_names``: names for it;
  ``state_dict``: the result;
* ``outline``: a table of what is nested where.

Imports ``pipeline`` (the memory budget) and ``format`` (dtypes, limits); ``sources`` imports it, and
so do the options of ``writer``.
"""
