"""The line of docs/executorch.md that exports for MPS, which only ExecuTorch 1.4.1 does."""

from __future__ import annotations

from pathlib import Path

from tests.support.documents import ROOT, Workshop, blocks_of

(FOR_MPS,) = [block for block in blocks_of("docs/executorch.md") if "--mps" in block.text]


def test_a_llama_for_mps_is_exported_and_compared_where_it_cannot_run(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = Workshop(tmp_path).run(FOR_MPS)
    assert "the two programs are equal, byte for byte" in printed
    assert printed.count("not run: the runtime on this machine has no MPSBackend") == 2
