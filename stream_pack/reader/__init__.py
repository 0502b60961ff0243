"""Everything that maps packs and hands out their tensors.  Never imports :mod:`stream_pack.writer`."""
