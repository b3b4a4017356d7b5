#!/usr/bin/env bash
# The field table: public kernels and ours on every case that they serve, judged by the same
# program, and timed in one run.
#
#   scripts/campaigns/peers/run_field.sh [--out DIR] [--kernels NAME,...] [--no-speed] [--configs N]
#                               on a machine with a CUDA GPU, PyTorch and the peers
#   scripts/campaigns/peers/run_field.sh --judge DIR
#                               anywhere; writes reports/field.md, reports/field.json
#                               and DIR/field.html
#
#   --out       default: build/field: inputs, outputs (DIR/out/KERNEL/CASE.safetensors), ours.json
#               (our kernels, judged where they run), speed.jsonl
#   --configs   configurations of each kernel that FLA's autotuner may time (default: 2; 0: all)
#   --cpu PROGRAM   deltaproof to write inputs with and to judge by (default: build/deltaproof)
# Peers, as installed (none of their code is kept or built here): pip install
# flash-linear-attention nvidia-cudnn-frontend flashinfer-python jax-linear-attention mamba-ssm;
# FLASHQLA=folder with flash-qla and tilelang (apart: FLA takes other kernels where it finds
# TileLang); our own as a wheel, or PYTHONPATH=python DELTAPROOF_OPS=build/ops (make ops). A
# missing package is a kernel that serves nothing, with that reason.
# Exit status: 0 ran (or judged, whatever the verdicts), 2 could not.
set -uo pipefail
die() { echo "run_field.sh: $*" >&2; exit 2; }

top=$(cd "$(dirname "$0")/../../.." && pwd) || exit 2
here=$top/scripts/campaigns/peers/field out=$top/build/field \
    program=${DP_PROGRAM:-$top/build/deltaproof} python=${PYTHON:-python3}
kernels= speed=1 configs=2 judge=
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h) sed -n '2,/^# Exit/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    --no-speed) speed=; shift; continue ;;
    --out | --kernels | --configs | --judge | --cpu) [ $# -ge 2 ] || die "$1: give a value" ;;
    *) die "$1: not known (--help lists the options)" ;;
    esac
    case $1 in
    --out) out=$2 ;;
    --kernels) kernels=$2 ;;
    --configs) configs=$2 ;;
    --judge) judge=$2 ;;
    --cpu) program=$2 ;;
    esac
    shift 2
done
[ -x "$program" ] || die "$program: no such program (make all)"
if [ -n "$judge" ]; then
    [ -d "$judge" ] || die "--judge $judge: no such folder"
    "$python" "$here/judge.py" "$judge" --program "$program" --reports "$top/reports" || exit
    exec "$python" -I "$top/reports/field.py" "$top/reports/field.json" "$judge/field.html"
fi
"$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
    die "$python has no PyTorch with a CUDA GPU (set PYTHON)"
mkdir -p "$out" || exit 2
"$python" "$here/inputs.py" "$out" --program "$program" --cases "$top/cases" "$here/cases" ||
    die "no inputs"
"$python" "$here/outputs.py" "$out" ${kernels:+--kernels "$kernels"} || die "no outputs"
for set in "$top/cases" "$here/cases"; do
    "$program" run --all --cases "$set" --backend cuda --way plain --ranks 1 --base bf16 \
        --cache "$out/cache" --json "$out/ours-$(basename "$(dirname "$set")").json" \
        >"$out/ours.log" 2>&1
    [ $? -le 1 ] ||
        echo "run_field.sh: our kernels did not run on $set: $(tail -1 "$out/ours.log")" >&2
done
[ -z "$speed" ] || "$python" "$here/speed.py" "$out" --configs "$configs" ||
    die "not timed"
