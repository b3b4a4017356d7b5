#!/usr/bin/env python3
"""prices.py PROGRAM --exchanges|--pieces T,.. [OPTION..]: the cost of each exchange of states. Or
the pieces into which a card cuts sequences, by cuLA's published guards and by our kernels' rule.
`deltaproof list --help` has the options. Exit status 0, 2 bad input.
"""

import argparse
import json
import os
import sys
from typing import Any

# Where this program's own modules are: -I leaves that out.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from read import files, many
from read.runs import CannotRun, Program

CHUNK = 64
DEVICES = {"a100": 108, "h100": 132, "h200": 132, "b200": 148, "gb200": 152}

# ---- exchanges -----------------------------------------------------------------------------------


def print_exchanges(x: dict[str, Any]) -> None:
    print(
        f"One sequence, one direction; {x['tokens']} tokens a rank, HV = {x['HV']}, K = {x['K']}, "
        f"V = {x['V']}. Predicted, with\n"
        f"{x['latency_s'] * 1e6:.0f} us a message, {x['bytes_per_s'] / 1e9:.0f} GB/s a link, "
        f"{x['flops_per_s'] / 1e12:.0f} Tflop/s: messages and megabytes of all ranks;\n"
        "megabytes of a rank's buffer; ms of the longest chain, and of what in it is no exchange\n"
        "(pre-scan and state pass); the exchange's share, for that computing.\n"
        f"low-rank: {x['rank']} of {x['K']} singular values. grid: --exact-cp. "
        "diagonal: GLA, SSD.\n"
        f"A rank keeps for its backward: the state that enters, "
        f"{x['saved_entering_bytes'] / 1e6:.4g} MB (fp32); where it recomputes\n"
        f"nothing, the state before each chunk too, {x['saved_chunks_bytes'] / 1e6:.4g} MB "
        "(bf16).\n\n"
        " ranks  exchange   payload    messages           MB  buffer MB    path ms  computing     "
        "share"
    )
    for r in x["exchanges"]:
        start = f"{r['ranks']:6}  {r['exchange']:<10} {r['payload']:<9} "
        if not r["possible"]:
            print(f"{start}{'-':>9} {'-':>12} {'-':>10} {'-':>10} {'-':>10} {'-':>9}")
            continue
        print(
            f"{start}{r['messages']:9.0f} {r['bytes'] / 1e6:12.4g} {r['buffer_bytes'] / 1e6:10.4g} "
            f"{r['path_s'] * 1e3:10.4f} {r['compute_s'] * 1e3:10.4f} "
            f"{r['communication_to_computing']:9.3f}"
        )
    print(
        "\nThe same tokens and heads over cp x tp ranks: cp split the tokens (all-gather), tp the "
        "heads\n(an all-reduce of the layer's output in bf16): megabytes that a rank sends, ms.\n\n"
        "  cp x tp      states MB    reduce MB   exchange     reduce  computing        sum"
    )
    for meshes in x["meshes"].values():
        for m in meshes:
            seconds = [m[k] for k in ("exchange_s", "reduce_s", "compute_s")]
            print(
                f"{m['cp']:4} x {m['tp']:<4} {m['states_bytes'] / 1e6:12.4g} "
                f"{m['tp_bytes'] / 1e6:12.4g} "
                + " ".join(f"{s * 1e3:10.4f}" for s in (*seconds, sum(seconds)))
            )
    print("\nserial over 1, 4, 16, 64 micro-batches behind each other, ms for each\n")
    for ranks, row in x["pipelines"].items():
        print(f"{int(ranks):6}  " + " ".join(f"{p['s_each'] * 1e3:10.4f}" for p in row))


# ---- pieces --------------------------------------------------------------------------------------

LEAST = 16  # chunks a piece
LONG = 256  # chunks of the longest sequence below which nothing is cut
BATCH = 10  # sequences as long as the longest, times heads, above which nothing is cut
VBLOCKS = 2  # blocks of V that a state pass runs side by side
SPLIT = 3  # a sequence of fewer pieces is not cut

GUARDS = {
    "cut": "cut",
    "full": "whole: the sequences alone fill the card (guard 0)",
    "short": "whole: the longest has fewer than 256 chunks (guard 1)",
    "many": "whole: more than 10 long sequences times heads (guard 2)",
    "excess": "whole: the pieces would not run side by side (guard 3)",
}
# Why the rule of our kernels decides otherwise, where it does.
DIFFERENCE = {
    "cut": "The guards fill the multiprocessors; the rule takes the number of segments that it "
    "expects to be fastest, and cuts only where that gains more than its margin.",
    "full": "Guard 0 counts blocks; the rule counts how long each runs, and cuts where a long one "
    "is alone when the others have ended.",
    "short": "Guard 1 is a length, below which cuLA's pre-scan and merge cost more than they gain; "
    "the rule adds up the times of our own, which begin to pay earlier.",
    "many": "Guard 2 counts long sequences times heads; the rule counts the time of each pass.",
    "excess": "Guard 3 wants all pieces side by side; the rule lets a block wait for a free "
    "multiprocessor, and counts that.",
}


def pieces_of(chunks: int, piece: int) -> int:
    """The pieces of one sequence."""
    return -(-chunks // piece) if chunks >= SPLIT * piece else 1


def guards(lengths: list[int], heads: int, sms: int) -> tuple[str, int, int]:
    """Which guard decides, chunks of a piece (a power of two), pieces of all sequences. Where
    nothing is cut, how many they would have been; 0: earlier guards decided."""
    chunks = [-(-n // CHUNK) for n in lengths]
    side = VBLOCKS * heads
    if side * len(chunks) >= sms:
        return "full", 0, 0
    if max(chunks) < LONG:
        return "short", 0, 0
    if sum(chunks) * heads > BATCH * max(chunks):
        return "many", 0, 0
    least = max(-(-max(chunks) // (sms // side)), LEAST)
    below = 1 << least.bit_length() - 1
    piece = 2 * below if least * least > 2 * below * below else below
    total = sum(pieces_of(n, piece) for n in chunks)
    return "excess" if side * total > sms else "cut", piece, total


def pieces(program: Program, a: argparse.Namespace) -> dict[str, Any]:
    sms = DEVICES.get(a.device) or (int(a.device) if a.device.isdecimal() else 0)
    if not 0 < sms <= 4096:
        raise CannotRun(
            f"--device '{a.device:.40}': must be one of {' '.join(DEVICES)}, or a number of "
            "multiprocessors"
        )
    a.heads = a.heads or 8
    words = ["--pieces", a.pieces, "--multiprocessors", str(sms), "--heads", str(a.heads)]
    words += ["--K", str(a.K), "--V", str(a.V), *(["--one-gate"] if a.one_gate else [])]
    ruled = program.json("list", *words)
    lengths = [int(n) for n in a.pieces.split(",")]
    why, piece, total = guards(lengths, a.heads, sms)
    cut = total if why == "cut" else len(lengths)
    differ = any(ruled[k]["segments"] != cut for k in ("forward", "backward"))
    found = {"why": why, "says": GUARDS[why], "pieces": cut}
    found["most_chunks"] = piece if why == "cut" else 0
    said = DIFFERENCE[why] if differ else ""
    return {"multiprocessors": sms, "guards": found, **ruled, "difference": said}


def print_pieces(x: dict[str, Any], a: argparse.Namespace) -> None:
    g = x["guards"]
    print(
        f"{len(a.pieces.split(','))} sequences of {a.pieces} tokens, HV = {a.heads}, K = {a.K}, "
        f"V = {a.V}, a gate a {'head' if a.one_gate else 'channel'}, {x['multiprocessors']} "
        "multiprocessors.\nTimes are expected ones of our kernels, from constants of an H200 "
        "(ref/vocabulary/segments.h).\n"
    )
    cut = f" in {g['pieces']} pieces of at most {g['most_chunks']} chunks"
    print(f"published guards         {g['says']}{cut if g['why'] == 'cut' else ''}")
    for key, what in (("forward", "forward:"), ("backward", "with backward:")):
        r = x[key]
        whole = f"whole: {r['whole_ms']:.3f} ms"
        cut = (
            f"cut in {r['segments']} segments of at most {r['most_chunks']} chunks: {r['ms']:.3f} "
            f"ms for {r['whole_ms']:.3f}"
        )
        print(f"our rule, {what:<14} {cut if r['most_chunks'] else whole}")
    if x["difference"]:
        print(f"\n{x['difference']}")


def arguments(words: list[str]) -> argparse.Namespace:
    """`deltaproof list --help` describes them (harness/commands/cmd_list.c)."""
    p = argparse.ArgumentParser(prog="deltaproof list", add_help=False, allow_abbrev=True)
    for flag in ("--exchanges", "--one-gate"):
        p.add_argument(flag, action="store_true")
    for word in ("--pieces", "--tokens", "--ranks", "--json", "--cases", "--recurrence"):
        p.add_argument(word)
    for word in ("--K", "--V"):
        p.add_argument(word, type=int, default=128)
    p.add_argument("--heads", type=int)
    p.add_argument("--device", default="h200")
    a = p.parse_args(words)
    a.cache = a.recurrence = None
    return a


def main(argv: list[str]) -> int:
    try:
        a = arguments(argv[2:])
        program = Program(argv[1], a)
        if a.pieces is None:
            print_exchanges(program.json("list", *argv[2:]))
        elif not a.json:
            print_pieces(pieces(program, a), a)
        else:
            text = json.dumps(pieces(program, a), indent=1) + "\n"
            if a.json == "-":
                print(text, end="")
            else:
                files.write(a.json, text.encode())
    except CannotRun as e:
        print(f"deltaproof: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    many.end(main)
