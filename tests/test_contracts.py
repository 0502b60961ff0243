"""What may import what, as far as lint-imports cannot see it: torch, and what is loaded at run time."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stream_pack

PACKAGE = Path(__file__).parent.parent / "stream_pack"

TORCH_MODULES = {
    "executorch/export/hooks.py",
    "executorch/export/hooks_copies.py",
    "executorch/export/hooks_mps.py",
    "executorch/export/hooks_named_data.py",
    "executorch/export/hooks_xnnpack.py",
    "executorch/export/tensors.py",
    "metal/interop.py",
    "reader/tensors.py",
    "sources/memory/torch_tensors.py",
    "torch.py",
}
"""The modules whose job is torch objects; the others load them only when they are handed one."""


def imports_torch(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == "torch" for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch"


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below ``node`` that is not there for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from executed(child)


def test_torch_is_imported_only_by_the_modules_whose_job_it_is() -> None:
    importing = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(imports_torch(node) for node in executed(ast.parse(path.read_text())))
    }
    assert importing == TORCH_MODULES


def loaded_by(*statements: str) -> set[str]:
    """The top-level packages in sys.modules after the statements ran in a new interpreter."""
    program = "\n".join([*statements, "import sys", "print(*sys.modules, sep='\\n', file=sys.stderr)"])
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in result.stderr.split()}


HEAVY = {"torch", "executorch", "safetensors", "ml_dtypes", "tqdm"}


def run_module(*arguments: str) -> tuple[str, ...]:
    return (
        "import runpy, sys",
        f"sys.argv = ['stream_pack', *{arguments!r}]",
        "try:",
        "    runpy.run_module('stream_pack', run_name='__main__', alter_sys=True)",
        "except SystemExit as exit:",
        "    assert not exit.code, exit.code",
    )


def test_importing_the_package_loads_neither_torch_nor_any_optional_package() -> None:
    assert loaded_by("import stream_pack") & HEAVY == set()


def test_what_speaks_to_executorch_is_there_without_it_and_torch() -> None:
    lines = ("import stream_pack", "stream_pack.executorch.build_mps_payload")
    assert loaded_by(*lines, "stream_pack.executorch.build_xnnpack_payload") & HEAVY == set()


def test_asking_for_help_loads_neither_torch_nor_any_optional_package() -> None:
    assert loaded_by(*run_module("--help")) & HEAVY == set()


@pytest.mark.parametrize("kind", ["torch zip", "safetensors", "pack"])
def test_converting_a_file_does_not_load_torch(kind: str, tmp_path: Path) -> None:
    import safetensors.torch
    import torch

    tensors = {"w": torch.arange(6.0).reshape(2, 3)}
    source = tmp_path / "source"
    if kind == "torch zip":
        torch.save(tensors, source)
    elif kind == "safetensors":
        safetensors.torch.save_file(tensors, source)
    else:
        stream_pack.save_file(tensors, source)
    target = tmp_path / "target"
    assert "torch" not in loaded_by(*run_module("convert", "--quiet", str(source), str(target)))
    with stream_pack.open(target) as pack:
        assert torch.equal(pack["w"].torch(), tensors["w"])


@pytest.mark.parametrize("command", ["convert", "inspect"])
def test_a_file_of_executorchs_is_read_without_executorch_and_torch(command: str, tmp_path: Path) -> None:
    program = Path(__file__).parent / "vectors" / "executorch" / "mps" / "linear_fp16.pte"
    target = ("--quiet", str(tmp_path / "pack")) if command == "convert" else ()
    assert loaded_by(*run_module(command, str(program), *target)) & HEAVY == set()


def test_every_public_name_exists_and_has_a_docstring() -> None:
    assert stream_pack.__all__ == sorted(stream_pack.__all__)
    for name in stream_pack.__all__:
        public = getattr(stream_pack, name)
        assert name == "__version__" or public.__doc__, name


def exported(module: Path) -> set[str] | None:
    """What ``__all__`` lists in a module; None if it is made at run time."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            try:
                return set(ast.literal_eval(node.value))
            except ValueError:
                return None
    return None


def test_what_one_module_imports_from_another_is_in_its_all() -> None:
    names = {
        (node.module or "", name.name)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if name.name != "*"
    }
    modules = {
        module: exported(path)
        for module in {module for module, _ in names}
        if (path := PACKAGE.parent / f"{module.replace('.', '/')}.py").exists()
    }
    missing = [f"{m}.{name}" for m, name in names if name not in (modules.get(m) or {name})]
    assert sorted(missing) == []
    assert len(modules) > 50
