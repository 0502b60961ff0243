"""GGUF files: ``header`` reads what precedes the data, within limits; ``source`` gives the tensors' bytes."""
