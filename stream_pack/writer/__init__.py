"""Everything that takes tensors and writes packs.  Never imports :mod:`stream_pack.reader`."""
