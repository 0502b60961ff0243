"""Functions are replaced for one thread, as long as its block lasts, and are as they were afterwards."""

from __future__ import annotations

import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stream_pack.errors import LimitError, OptionError, UntestedVersionError
from stream_pack.executorch import streaming_constants
from stream_pack.executorch.export.held import Holder
from stream_pack.executorch.export.hooks import HOOKS
from stream_pack.executorch.export.patching import Hook, Patches
from stream_pack.executorch.export.session import Export, activate, active

NAME = "a_module_to_patch"


@pytest.fixture
def module() -> Iterator[Any]:
    """A function, a class, and a class with a method and a static one."""
    code = """
def double(x): return 2 * x
class Thing:
    def __init__(self, size=1): self.size = size
class Worker:
    def work(self, x, y=3): return x + y
    @staticmethod
    def still(x): return -x
"""
    module = types.ModuleType(NAME)
    exec(code, module.__dict__)
    sys.modules[NAME] = module
    yield module
    del sys.modules[NAME]


def hook(name: str, signature: str, **knobs: Any) -> Hook:
    def replacement(export: Export, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return "ours", stock(*args, **kwargs)

    return Hook(NAME, name, replacement, signature=signature, **knobs)


DOUBLE = hook("double", "(x)")
ALL = (DOUBLE, hook("Thing", "(size=1)"), hook("Worker.work", "(self, x, y=3)"), hook("Worker.still", "(x)"))


@pytest.fixture
def block(tmp_path: Path) -> Callable[..., Any]:
    def enter(*hooks: Hook, allow_untested: bool = False) -> Any:
        return Block(tmp_path, hooks, allow_untested)

    return enter


class Block:
    def __init__(self, folder: Path, hooks: tuple[Hook, ...], allow_untested: bool) -> None:
        self.export = Export(holder=Holder(folder, chunk_nbytes=1 << 20), alignment="page")
        self.patches = Patches(hooks, allow_untested=allow_untested)
        self.active = activate(self.export)

    def __enter__(self) -> Export:
        self.patches.__enter__()
        self.export.refresh = self.patches.refresh
        self.active.__enter__()
        return self.export

    def __exit__(self, *exc: Any) -> None:
        self.active.__exit__(*exc)
        self.patches.__exit__(*exc)


def state(module: Any) -> list[object]:
    return [*vars(module).values(), *vars(module.Worker).values()]


def test_functions_classes_methods_and_static_methods_are_replaced_and_restored(
    module: Any, block: Callable[..., Any]
) -> None:
    before = state(module)
    with block(*ALL):
        assert module.double(4) == ("ours", 8)
        assert module.Thing(5)[1].size == 5
        assert module.Worker().work(1, y=2) == ("ours", 3)
        assert module.Worker.still(7) == module.Worker().still(7) == ("ours", -7)
    assert all(now is then for now, then in zip(state(module), before, strict=True))


def test_an_exception_in_the_block_leaves_nothing_behind(module: Any, block: Callable[..., Any]) -> None:
    before = state(module)
    with pytest.raises(ZeroDivisionError), block(*ALL):
        raise ZeroDivisionError
    assert all(now is then for now, then in zip(state(module), before, strict=True))
    assert active() is None


def test_another_thread_gets_the_original_meanwhile(module: Any, block: Callable[..., Any]) -> None:
    seen = []
    with block(DOUBLE):
        thread = threading.Thread(target=lambda: seen.append(module.double(4)))
        thread.start()
        thread.join()
        assert module.double(4) == ("ours", 8)
    assert seen == [8]


def test_two_threads_may_be_in_blocks_and_the_last_restores(module: Any, block: Callable[..., Any]) -> None:
    original = module.double
    entered, leave = threading.Event(), threading.Event()
    exports = []

    def other() -> None:
        with block(DOUBLE) as export:
            exports.append((active(), export))
            entered.set()
            leave.wait(60)
            exports.append((active(), export))
            assert module.double(1) == ("ours", 2)

    thread = threading.Thread(target=other)
    with block(DOUBLE) as mine:
        thread.start()
        assert entered.wait(60)
        assert active() is mine
    assert module.double(4) == 8  # ours was left
    assert module.double is not original  # theirs was not
    leave.set()
    thread.join()
    assert module.double is original
    assert [found is theirs for found, theirs in exports] == [True, True]


def test_blocks_may_be_nested(module: Any, block: Callable[..., Any]) -> None:
    original = module.double
    with block(DOUBLE) as outer:
        with block(DOUBLE) as inner:
            assert active() is inner
            assert module.double(4) == ("ours", 8)
        assert active() is outer
        assert module.double(4) == ("ours", 8)
    assert module.double is original


def test_a_block_that_was_left_is_over_for_whoever_copied_its_context(module: Any, block: Callable[..., Any]) -> None:
    import contextvars

    with block(DOUBLE):
        context = contextvars.copy_context()
        assert context.run(active) is not None
    assert context.run(active) is None


def test_what_somebody_else_put_on_top_stays(module: Any, block: Callable[..., Any]) -> None:
    def theirs(x: int) -> int:
        return -1

    with block(DOUBLE):
        module.double = theirs
    assert module.double is theirs


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (hook("double", "(x, y)"), r"double takes \(x\), expected \(x, y\)"),
        (hook("triple", "(x)"), "triple is missing"),
        (hook("Worker.rest", "(self)"), "Worker.rest is missing"),
        (hook("Idler.work", "(self)"), "Idler.work is missing"),
    ],
)
def test_what_is_not_as_tested_is_refused_before_anything_is_replaced(
    module: Any, block: Callable[..., Any], wrong: Hook, fault: str
) -> None:
    before = state(module)
    refused = pytest.raises(UntestedVersionError, match=f"1.4.1, 1.5.1.*{fault}.*allow_untested=True")
    with refused, block(DOUBLE, wrong):
        pass
    assert all(now is then for now, then in zip(state(module), before, strict=True))


def test_a_module_that_is_missing_is_refused_unless_it_may_be(block: Callable[..., Any]) -> None:
    absent = {"module": "json.absent", "name": "f", "signature": "()", "replacement": print}
    refused = pytest.raises(UntestedVersionError, match=r"json\.absent\.f is missing")
    with refused, block(Hook(**absent)):  # type: ignore[arg-type]
        pass
    with block(Hook(**absent, optional=True)), block(Hook(**absent, late=True)):  # type: ignore[arg-type]
        pass


def test_what_is_not_as_tested_may_be_tried_with_a_warning(module: Any, block: Callable[..., Any]) -> None:
    wrong = (hook("double", "(x, y)"), hook("triple", "(x)"))
    warned = pytest.warns(UserWarning, match="takes .x., expected .x, y.; .*triple is missing")
    with warned, block(*wrong, allow_untested=True):
        assert module.double(4) == ("ours", 8)


def test_a_module_that_is_imported_later_is_hooked_then(module: Any, block: Callable[..., Any]) -> None:
    other = types.ModuleType("imported_later")
    exec("def triple(x): return 3 * x", other.__dict__)
    late = Hook("imported_later", "triple", lambda export, stock, x: ("ours", stock(x)), late=True)
    original = other.triple
    with block(DOUBLE, late):
        sys.modules["imported_later"] = other
        try:
            assert other.triple(1) == 3
            module.double(1)  # any hooked function looks
            assert other.triple(1) == ("ours", 3)
        finally:
            del sys.modules["imported_later"]
    assert other.triple is original


def test_each_function_has_one_hook() -> None:
    assert len({(hook.module, hook.name) for hook in HOOKS}) == len(HOOKS)


def test_entering_and_leaving_changes_nothing_in_executorch(tmp_path: Path) -> None:
    def found() -> dict[str, object]:
        owners: dict[str, object] = {}
        for hook in HOOKS:
            owner: Any = sys.modules.get(hook.module)
            for step in hook.name.split(".")[:-1]:
                owner = getattr(owner, step, None)
            owners[str(hook)] = vars(owner).get(hook.name.split(".")[-1]) if owner else None
        return owners

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with streaming_constants(tmp_path):
            pass  # everything that it needs is imported
        before = found()
        with streaming_constants(tmp_path):
            during = found()
    assert found() == before
    replaced = [name for name in before if during[name] is not before[name]]
    assert len(replaced) == sum(value is not None for value in before.values())
    assert replaced


def test_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    wrong: Any = "pages"
    for error, message, block in (
        (OptionError, "alignment='pages'", streaming_constants(tmp_path, alignment=wrong)),
        (LimitError, "at least 524288", streaming_constants(tmp_path, max_memory=500_000)),
        (FileNotFoundError, "absent", streaming_constants(tmp_path / "absent")),
    ):
        with pytest.raises(error, match=message), block:
            pass
