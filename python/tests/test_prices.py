"""Prices of exchanges and of cuts inside a card, from Python."""

import pytest

import deltaproof


def test_guards_and_rule_side_by_side() -> None:
    both = deltaproof.pieces([16384], heads=4)
    assert both["guards"] == {
        "why": "cut",
        "says": "cut",
        "pieces": 16,
        "most_chunks": 16,
    }
    assert both["forward"]["segments"] == 16 and both["difference"] == ""
    short = deltaproof.pieces([15000], heads=4)
    assert short["guards"]["why"] == "short" and short["forward"]["segments"] == 16
    assert short["forward"]["ms"] < short["forward"]["whole_ms"]
    assert "Guard 1" in short["difference"]
    with pytest.raises(ValueError, match="must be one of a100"):
        deltaproof.pieces([1024], heads=4, device="none")


def test_exchanges_of_any_size() -> None:
    found = deltaproof.exchange_prices([2, 8], heads=1, tokens=8192, V=256)
    gather = [x for x in found["exchanges"] if x["exchange"] == "allgather" and x["ranks"] == 8]
    assert gather[0]["buffer_bytes"] == 8 * (128 * 128 + 128 * 256) * 4
    assert found["saved_entering_bytes"] == 4 * 128 * 256
    assert [(m["cp"], m["tp"]) for m in found["meshes"]["8"]] == [(8, 1)]
