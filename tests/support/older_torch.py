"""What the tests use of torch, and an older torch does not have."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "stream_pack"
NEWEST = (2, 8)
"""From this release on torch has all that the tests use: a failure is a failure."""


VTABLES = "the flatbuffers that goes with it gives tables of two lengths one vtable, which is damage to a reader"
DIFFERENT = {
    "test_a_pickle_of_python_2_is_read": "it warns of its own typed storages",
    "test_a_view_of_a_storage_is_read_from_where_it_begins": "it warns of its own typed storages",
    "test_a_tensor_that_no_pack_can_hold_is_refused_by_its_name": "it cannot save a nested tensor",
    "test_every_float8_is_cast_as_torch_does": "it gives NaN other bits",
    "test_every_16_bit_value_and_many_others_are_cast_as_torch_does": "it gives NaN other bits",
    "test_of_a_pipe_the_order_is_that_of_the_version_of_torch_that_wrote_it": "it writes no record .format_version",
    "test_of_a_pipe_only_the_head_is_read": "the head of its archives is shorter than a step of the pipe",
    "test_what_the_readme_says_of_other_formats_is_so": "it maps no file object",
    "test_torch_takes_every_tensor_with_its_offset_and_keeps_the_buffer": "it knows no Metal in DLPack",
    "test_libraries_that_read_the_cpus_memory_read_the_tensor_and_give_it_back": "it ignores the byte offset of DLPack",
    "test_a_storage_that_keeps_a_buffer_lets_it_go": "it calls no weak reference to a storage that no tensor has",
    "test_data_that_are_called_by_their_sha256_are_verified_against_it": VTABLES,
    "test_padding_after_data_is_not_part_of_them": VTABLES,
    "test_other_names_are_no_digests": VTABLES,
    "test_data_that_cannot_be_read_are_named_and_the_rest_is_verified": VTABLES,
    "test_an_array_of_no_elements_keeps_its_shape": "the NumPy that goes with it maps no empty file",
}
"""What an older torch, or what comes with it, does otherwise than the test of this name says."""


def is_older() -> bool:
    return tuple(int(part) for part in version("torch").split(".")[:2]) < NEWEST


def lacking(name: str, excinfo: pytest.ExceptionInfo[BaseException] | None) -> str | None:
    """Why the test of this name could only fail with the installed torch; None if torch is not the reason.

    Such an error comes from the test's own use of torch: none that has passed through stream_pack counts.
    """
    if excinfo is None or not is_older():
        return None
    function = name.partition("[")[0]
    if function in DIFFERENT:
        return f"torch {version('torch')}: {DIFFERENT[function]}"
    error = excinfo.value.__cause__ or excinfo.value  # pytest wraps the ImportError of a module of tests
    text = str(error)
    missing = (
        (isinstance(error, AttributeError) and "module 'torch" in text)
        or (isinstance(error, ImportError) and ("torch." in text or "transformers" in text))
        or (isinstance(error, KeyError) and "torch." in text)  # dtypes that torch.save does not know
    )
    traceback = error.__traceback__
    while missing and traceback is not None:
        missing = not Path(traceback.tb_frame.f_code.co_filename).is_relative_to(PACKAGE)
        traceback = traceback.tb_next
    return f"torch {version('torch')} lacks what the test uses: {text.splitlines()[0]}" if missing else None
