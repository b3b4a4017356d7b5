"""A record that is not as its schema says counts as no record."""

import json
from pathlib import Path
from typing import Any

import pytest

from deltaproof.records import NOT_JUDGED, own_record, trusted

TENSOR = {"name": "o", "verdict": "pass"}
RUN = {"id": "a", "verdict": "pass", "tensors": [TENSOR]}
OK: dict[str, Any] = {"verdict": "pass", "runs": [RUN], "provenance": {"notes": {"call": "c"}}}


def put(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_whole_record_is_read(tmp_path: Path) -> None:
    assert own_record(put(tmp_path / "r", json.dumps(OK)), "c") == OK
    assert own_record(str(tmp_path / "r"), "d") is None


@pytest.mark.parametrize(
    "change",
    [
        {"runs": None},
        {"runs": {}},
        {"runs": [None]},
        {"runs": [{**RUN, "tensors": None}]},
        {"runs": [{**RUN, "verdict": None}]},
        {"runs": [{"verdict": "pass", "id": "a"}]},
        {"runs": [{**RUN, "tensors": [{**TENSOR, "verdict": 0}]}]},
        {"seconds": float("nan")},
        {"provenance": None},
    ],
)
def test_any_other_is_no_record(change: dict[str, Any], tmp_path: Path) -> None:
    record = own_record(put(tmp_path / "r", json.dumps(OK | change)), "c")
    assert trusted(0, record)[0] == NOT_JUDGED


def test_half_a_record_is_none(tmp_path: Path) -> None:
    assert own_record(put(tmp_path / "r", json.dumps(OK)[:40]), "c") is None
