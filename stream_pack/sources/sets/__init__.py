"""Checkpoints that are more than one file: each kind is recognised by what its folder holds."""
