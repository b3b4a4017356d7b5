#!/usr/bin/env bash
# harness/fuzz/fuzz.sh SECONDS JOBS_PER_TARGET OUT [TARGET...]: all fuzzers of a pack (make
# fuzz-pack) side by side, each target in so many processes with a seed and a corpus of its own in
# memory, until its executions together are FUZZ_RUNS (default 10,000,000) or the seconds end. A
# process that ends by a finding is started again with another seed. The last thing printed is a
# table (died: processes that ended otherwise than by runs or time, for whatever reason); inputs of
# findings, the logs and the smallest corpus lie in OUT. Status 1: there is a finding.
set -euo pipefail
seconds=$1 jobs=$2 out=$3
shift 3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(case safetensors judge meeting)
runs=${FUZZ_RUNS:-10000000}
length=3072
mkdir -p "$out"
out=$(cd "$out" && pwd)
memory=/dev/shm
[ -w $memory ] || memory=/tmp
work=$(mktemp -d "$memory/deltaproof-fuzz-XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
export TMPDIR=$work
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
export ASAN_OPTIONS=detect_odr_violation=0:malloc_context_size=3:quarantine_size_mb=2 \
    UBSAN_OPTIONS=print_stacktrace=1
end=$((SECONDS + seconds))
# The libraries of the pack for the fuzzers alone; addresses without randomness where that is
# allowed: older sanitizers fail with 32 bits of it.
fuzzer=(env LD_LIBRARY_PATH="$here/lib")
! setarch -R true 2>/dev/null || fuzzer+=(setarch -R)

# FILES, of which some may not be there.
executed() { (cat "$@" 2>/dev/null || true) |
    awk '/^stat::number_of_executed_units:/ { n += $2 } END { print n + 0 }'; }

# TARGET JOB: one process after another, each for what is left of this job's runs and of the time.
job() {
    local t=$1 i=$2 k=0 left log corpus=$work/$1.$2 options=()
    local share=$(((runs + jobs - 1) / jobs))
    [ "$t" = case ] && options=(-dict="$here/case.dict")
    mkdir -p "$corpus" "$out/$t"
    while :; do
        log=$out/logs/$t.$i.$k
        left=$((share - $(executed "$out/logs/$t.$i".*)))
        [ $left -gt 0 ] && [ $SECONDS -lt $end ] && [ $k -lt 20 ] || break
        "${fuzzer[@]}" "$here/bin/fuzz_$t" -runs=$left -max_total_time=$((end - SECONDS)) \
            -seed=$((1 + i + 1000 * k)) -max_len=$length -timeout=20 -report_slow_units=5 \
            -rss_limit_mb=3000 -artifact_prefix="$out/$t/" -print_final_stats=1 "${options[@]}" \
            "$corpus" "$here/inputs/$t" >"$log" 2>&1 ||
            echo "fuzz.sh: ended with status $?" >>"$log"
        k=$((k + 1))
    done
}

rm -rf "$out/logs"
mkdir -p "$out/logs"
start=$SECONDS
for t in "${targets[@]}"; do
    (
        for ((i = 0; i < jobs; i++)); do job "$t" "$i" & done
        wait
        echo $((SECONDS - start)) >"$out/logs/$t.seconds"
    ) &
done
wait

# What all corpora of a target reach together: edges, of those that the code under test has; the
# smallest set of inputs that does is kept.
edges() {
    local t=$1 log=$out/logs/$1.merge
    mkdir -p "$out/corpus/$t"
    "${fuzzer[@]}" "$here/bin/fuzz_$t" -merge=1 -max_len=$length -timeout=20 "$out/corpus/$t" \
        "$here/inputs/$t" "$work/$t".*/ >"$log" 2>&1 || true
    "${fuzzer[@]}" "$here/bin/fuzz_$t" -runs=0 -max_len=$length -timeout=20 "$out/corpus/$t" \
        >>"$log" 2>&1 || true
    printf '%s of %s' \
        "$(sed -n 's/.*\(INITED\|DONE\) *cov: \([0-9]*\).*/\2/p' "$log" | tail -n 1)" \
        "$(sed -n 's/.*(\([0-9]*\) inline 8-bit counters).*/\1/p' "$log" | tail -n 1)" \
        >"$out/logs/$t.edges"
}
for t in "${targets[@]}"; do edges "$t" & done
wait

count() { find "$out/$1" -name "$2" | wc -l; }
bad=0
printf '%-12s %12s %8s %10s %8s %7s %6s %6s %6s  %s\n' target executions seconds exec/s crashes \
    hangs leaks slow died edges
for t in "${targets[@]}"; do
    n=$(executed "$out/logs/$t".[0-9]*)
    s=$(cat "$out/logs/$t.seconds")
    crashes=$(($(count "$t" 'crash-*') + $(count "$t" 'oom-*'))) hangs=$(count "$t" 'timeout-*') \
        leaks=$(count "$t" 'leak-*')
    died=$( (grep -l '^fuzz.sh: ended with status' "$out/logs/$t".[0-9]* || true) | wc -l)
    [ $((crashes + hangs + leaks + died)) = 0 ] && [ "$n" -gt 0 ] || bad=1
    printf '%-12s %12d %8d %10d %8d %7d %6d %6d %6d  %s\n' "$t" "$n" "$s" $((n / (s > 0 ? s : 1))) \
        "$crashes" "$hangs" "$leaks" "$(count "$t" 'slow-unit-*')" "$died" \
        "$(cat "$out/logs/$t.edges")"
done
exit $bad
