"""Prices of exchanges and of cuts inside a card, from Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import deltaproof

TREE = Path(os.environ.get("DELTAPROOF_TREE") or Path(__file__).resolve().parents[2])
sys.path.insert(0, str(TREE / "reports"))
from prices import LEAST, guards, pieces_of  # noqa: E402

# 28 rows that cuLA published for 152 multiprocessors: tokens of sequences; for 4 and 8 heads how
# many pieces (0: an earlier guard decides), and whether they run side by side.
K = 1024
PUBLISHED = [
    ([4 * K], (0, 0), (0, 0)),
    ([8 * K], (0, 0), (0, 0)),
    ([32 * K], (16, 8), (1, 1)),
    ([64 * K], (16, 8), (1, 1)),
    ([128 * K], (16, 8), (1, 1)),
    ([4 * K] * 8, (0, 0), (0, 0)),
    ([8 * K] * 4, (0, 0), (0, 0)),
    ([16 * K] * 2, (32, 0), (0, 0)),
    ([24 * K, 8 * K], (32, 0), (0, 0)),
    ([28 * K, 4 * K], (15, 8), (1, 1)),
    ([32 * K, 256, 256], (18, 10), (1, 0)),
    ([40 * K, K, 8 * K], (25, 12), (0, 0)),
    ([64 * K, 512, 256, 128], (19, 11), (1, 0)),
    ([128 * K, K], (17, 9), (1, 1)),
]


def test_guards_are_those_that_were_published() -> None:
    for lengths, total, cut in PUBLISHED:
        for h, heads in enumerate((4, 8)):
            why, _, pieces = guards(lengths, heads, 152)
            assert (pieces, why == "cut") == (total[h], bool(cut[h])), (lengths, heads, why)


def test_each_guard_says_which_it_is() -> None:
    long, brief = [64 * K], [8 * K]
    asked = [(long * 4, 19), (brief, 4), (long * 4, 4), ([32 * K, 256, 256], 8), (long, 4)]
    assert [guards(*a, 152)[0] for a in asked] == ["full", "short", "many", "excess", "cut"]
    assert guards(long, 4, 64)[1] == 128, "8 pieces where 64 multiprocessors are"


def test_no_piece_is_shorter_than_allowed() -> None:
    for chunks in range(1, 4096, 7):
        for piece in (16, 32, 64, 128, 256, 512, 1024):
            n = pieces_of(chunks, piece)
            assert n == 1 or (n >= 3 and (n - 1) * piece < chunks <= n * piece), (chunks, piece)
    for tokens in range(64, 1 << 21, 6400):
        _, piece, total = guards([tokens], 1, 152)
        assert not total or piece >= LEAST


def test_guards_and_rule_side_by_side() -> None:
    both = deltaproof.pieces([32768], heads=8, one_gate=True)
    assert both["guards"] == {
        "why": "cut",
        "says": "cut",
        "pieces": 8,
        "most_chunks": 64,
    }
    assert both["forward"]["segments"] == 8 and both["difference"] == ""
    short = deltaproof.pieces([15000], heads=4)
    assert short["guards"]["why"] == "short" and short["forward"]["segments"] == 14
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


def test_what_cannot_be_written_or_read_is_named() -> None:
    for words, to, says in (
        (["--pieces", "100"], "/dev/full", "standard output"),
        (["--exchanges"], "/dev/full", "standard output"),
        (["--pieces", "100", "--json", "/no-such/x"], "/dev/null", "/no-such/x: No such file"),
        (["--pieces", ""], "/dev/null", "--pieces ''"),
    ):
        with open(to, "w") as out:
            made = subprocess.run(
                [deltaproof.program(), "list", *words],
                **{"stdout": out, "stderr": subprocess.PIPE, "text": True, "timeout": 20},
            )
        assert made.returncode == 2 and says in made.stderr, (words, made)
