"""What docs/executorch.md shows of ExecuTorch runs; its other blocks are run by ``tests/test_docs.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.documents import ROOT, Block, Workshop, blocks_of, needs_executorch

BLOCKS = [block for block in blocks_of("docs/executorch.md") if needs_executorch(block)]
PROGRAMS = [block for block in BLOCKS if block.language == "python"]
(EXPORT_LLAMA,) = [block for block in BLOCKS if block.language == "sh" and "--mps" not in block.text]


@pytest.mark.parametrize("block", PROGRAMS)
def test_a_block_of_the_document_runs(block: Block, tmp_path: Path) -> None:
    Workshop(tmp_path).run(block)


def test_a_llama_exported_with_streamed_constants_is_byte_for_byte_what_executorch_makes(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = Workshop(tmp_path).run(EXPORT_LLAMA)
    assert "the two programs are equal, byte for byte" in printed
    # One token ran through each.
    assert printed.count("next token after 1: ") == 2
