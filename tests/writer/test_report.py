"""The line that a conversion ends with."""

from __future__ import annotations

import dataclasses

from stream_pack.writer.report import Report

REPORT = Report(
    source_kind="torch zip",
    tensors=291,
    tied=2,
    source_nbytes=3 << 30,
    target_nbytes=2 << 30,
    shared_nbytes=100,
    unused_nbytes=1 << 30,
    repeated_nbytes=5000,
    padding_nbytes=0,
    overhead_nbytes=16424,
    spool_nbytes=0,
    seconds=2.0,
    checksum=0xABC,
    verification="CRC-32 of 290 records verified",
)


def test_the_summary_is_one_line_and_says_why_lengths_differ() -> None:
    line = REPORT.summary()
    assert "\n" not in line
    for part in (
        "291 tensors",
        "3.00 GiB in",
        "2.00 GiB out",
        "2 tied",
        "1.00 GiB unused dropped",
        "4.88 KiB stored twice",
        "2.00 s",
        "1.00 GiB/s",
        "0000000000000abc",
        "CRC-32 of 290 records verified",
    ):
        assert part in line
    assert "padding" not in line
    assert "spooled" not in line
    assert "7.00 B" not in line


def test_a_spool_is_told() -> None:
    assert "4.00 KiB spooled" in dataclasses.replace(REPORT, spool_nbytes=4096).summary()


def test_json_has_every_field() -> None:
    json = REPORT.to_json()
    assert set(json) == {field.name for field in dataclasses.fields(Report)}
    assert json["checksum"] == "0000000000000abc"


def test_the_summary_tells_of_casts_and_which_way_they_went() -> None:
    narrowed = dataclasses.replace(REPORT, cast_nbytes=-2048, casts={"float32 -> bfloat16": 290})
    assert "2.00 KiB less by casts" in narrowed.summary()
    assert ", 290 float32 -> bfloat16," in narrowed.summary()
    widened = dataclasses.replace(REPORT, cast_nbytes=2048, casts={"float16 -> float32": 1})
    assert "2.00 KiB more by casts" in widened.summary()
    assert "by casts" not in REPORT.summary()
