"""The flatbuffer schemas (``*.fbs``, normative) and what ``flatc --python`` makes of them (``generated``)."""
