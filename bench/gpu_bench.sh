#!/usr/bin/env bash
# Every figure of docs/bench.md that needs a GPU, in one command; files go to the folder $OUT (bench/results).
# PART=30b|dense|cpu|kernels|startup runs one part; PYTHON names the interpreter. Exit code 3: bits differ.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-bench/results}
PYTHON=${PYTHON:-python}
PART=${PART:-30b dense cpu kernels}
mkdir -p "$OUT"
code=0
run() {
    echo "+ $*"
    "$@" || { found=$?; echo "exit code $found"; [ $found -gt $code ] && code=$found; }
}
for part in $PART; do
    case $part in
    30b)
        run "$PYTHON" -m kestrel.bench --cuda --shape qwen3-30b-a3b --mode l2exact,bitexact,fast --eager --dump \
            -p 0 -n 64 -d 0,1024,16384,32768 -r 9 -o "$OUT/bench-30b-decode.json" -o "$OUT/bench-30b-decode.md"
        run "$PYTHON" -m kestrel.bench --cuda --shape qwen3-30b-a3b --mode l2exact,fast \
            -p 512 -n 0 -d 0,1024 -r 5 -o "$OUT/bench-30b-prompt.json" -o "$OUT/bench-30b-prompt.md"
        ;;
    dense)
        run "$PYTHON" -m kestrel.bench --cuda --shape qwen3-0.6b,qwen3-4b,qwen3-8b --mode l2exact,fast \
            -p 512 -n 64 -d 0,1024 -r 5 -o "$OUT/bench-dense.json" -o "$OUT/bench-dense.md"
        ;;
    cpu) # the same tests on the host: times, and the hashes of the GPU must come out again
        run "$PYTHON" -m kestrel.bench --shape qwen3-0.6b -p 512 -n 64 -d 0,1024 -r 3 \
            --compare "$OUT/bench-dense.json" -o "$OUT/bench-cpu-dense.json" -o "$OUT/bench-cpu-dense.md"
        run "$PYTHON" -m kestrel.bench --shape qwen3-30b-a3b -p 0 -n 64 -d 0,1024 -r 3 \
            --compare "$OUT/bench-30b-decode.json" -o "$OUT/bench-cpu-30b.json" -o "$OUT/bench-cpu-30b.md"
        ;;
    startup) # the first needs a converted model: MODEL=models/smollm2-135m-instruct
        run "$PYTHON" -m bench.startup --cuda --cold ${MODEL:+-m "$MODEL"} --json "$OUT/startup.json"
        run "$PYTHON" -m bench.load --cuda --shape qwen3-8b --json "$OUT/load-8b.json"
        ;;
    kernels)
        run "$PYTHON" -m bench.kernels --mode l2exact,fast -d 1024,16384 --json "$OUT/kernels-30b.json"
        run "$PYTHON" -m bench.profile_decode --mode l2exact,fast -d 1024 --json "$OUT/profile-30b.json" \
            --trace "$OUT/profile-30b-trace.json"
        ;;
    *)
        echo "unknown part $part" >&2
        exit 2
        ;;
    esac
done
exit $code
