#!/usr/bin/env bash
# Run FLA's chunk_kda, forward and backward, on recorded activations, on one process or several
# (context parallelism), and judge what it computes. Needs CUDA GPUs, PyTorch and FLA (pip install
# flash-linear-attention); deltaproof itself is built when it is not there.
#
#   scripts/campaigns/peers/run_fla.sh [--ranks N] [--inputs IN.safetensors] [--tokens T]
#                                      [--claim FORMAT] [--out DIR] [--tune]
#
#   --ranks    processes (default: one a GPU); more than there are GPUs share them, through gloo
#   --inputs   default: cases/data/kda-lm-layer3-long.safetensors, 8,192 tokens: the truth takes a
#              minute or two, once
#   --tokens   the first T of them
#   --claim    format of the M chain that FLA is held to (default: tf32x3; before FLA made that
#              product in 3xTF32: tf32rz)
#   --out      default: build/fla: outN.safetensors, results.json, junit.xml, report.html
#   --tune     let Triton time every configuration instead of taking the first that runs
# Exit status: 0 pass, 1 a verdict failed, 2 could not run or judge.
set -uo pipefail
die() { echo "run_fla.sh: $*" >&2; exit 2; }
usage() { sed -n '2,/^# Exit/s/^# \{0,1\}//p' "$0"; }

top=$(cd "$(dirname "$0")/../../.." && pwd) || exit 2
ranks= tokens= tune= claim=tf32x3 inputs=$top/cases/data/kda-lm-layer3-long.safetensors \
    out=$top/build/fla program=${DP_PROGRAM:-$top/build/deltaproof} python=${PYTHON:-python3}
while [ $# -gt 0 ]; do
    case $1 in
    --tune) tune=--tune; shift; continue ;;
    --help | -h) usage; exit 0 ;;
    --ranks | --inputs | --tokens | --claim | --out) [ $# -ge 2 ] || die "$1: give a value" ;;
    *) die "$1: not known (--help lists the options)" ;;
    esac
    case $1 in
    --ranks) ranks=$2 ;;
    --inputs) inputs=$2 ;;
    --tokens) tokens=$2 ;;
    --claim) claim=$2 ;;
    --out) out=$2 ;;
    esac
    shift 2
done
case $ranks in *[!0-9]* | 0) die "--ranks $ranks: must be a positive number" ;; esac
case $tokens in *[!0-9]* | 0) die "--tokens $tokens: must be a positive number" ;; esac
[ -f "$inputs" ] || die "--inputs $inputs: no such file"
"$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
    die "$python has no PyTorch with a CUDA GPU (set PYTHON)"
"$python" -c 'import fla' 2>/dev/null ||
    die "$python has no FLA: pip install flash-linear-attention"
[ -x "$program" ] || make -C "$top" all || die "deltaproof does not build"
mkdir -p "$out" || exit 2
[ -n "$ranks" ] || ranks=$("$python" -c 'import torch; print(torch.cuda.device_count())')

file=$out/out$ranks.safetensors
start=("$python")
[ "$ranks" = 1 ] ||
    start=("$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks")
"${start[@]}" "$top/scripts/campaigns/peers/fla_dump.py" ${tokens:+--tokens "$tokens"} $tune \
    "$inputs" "$file" || die "FLA did not run on $ranks ranks"

report=(--out "$out")
if ! "${DP_PYTHON:-$python}" -c 'import matplotlib' 2>/dev/null; then
    echo "run_fla.sh: no report, only $out/results.json: ${DP_PYTHON:-$python} has no matplotlib" \
        >&2
    report=(--json "$out/results.json")
fi
export DP_PYTHON=${DP_PYTHON:-$python} DP_REPORT=${DP_REPORT:-$top/reports/report.py}
exec "$program" judge --inputs "$inputs" --outputs "$file" ${tokens:+--tokens "$tokens"} \
    --claim "$claim" --cache "$out/cache" "${report[@]}"
