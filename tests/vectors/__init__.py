"""One pack for each version of the format and each header, read for ever: a vector is never changed or removed.

``v1-mp00.pack`` is described byte for byte in section 15 of docs/FORMAT.md.
"""
