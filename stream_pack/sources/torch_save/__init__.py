"""Checkpoints of ``torch.save``, in both of its formats, read without torch."""
