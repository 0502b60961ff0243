"""What stands beside the weights in a folder of Hugging Face, and is no tensor."""

from __future__ import annotations

import os
from pathlib import Path

from stream_pack.sources.sets.hugging_face import is_index_name

__all__ = ["companions"]

_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md", ".py")
_NAMES = ("LICENSE", "NOTICE")
"""Source: what transformers' ``save_pretrained`` of models, tokenizers, processors and generation configs writes, and
what a repository adds for people and for models with code of their own."""

CONFIG = "config.json"
"""The file that makes a folder one of transformers'."""


def companions(source: object) -> list[str]:
    """The paths of these files in the folder ``source``, or in that of the index ``source``, by name.

    None where ``source`` is neither, or is no folder of transformers.
    """
    if not isinstance(source, (str, os.PathLike)):
        return []
    path = Path(source)
    folder = path.parent if is_index_name(path.name) else path
    if not (folder / CONFIG).is_file():
        return []
    names = [name for name in sorted(os.listdir(folder)) if name.endswith(_SUFFIXES) or name.startswith(_NAMES)]
    return [str(folder / name) for name in names if not is_index_name(name) and (folder / name).is_file()]
