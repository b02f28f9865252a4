#!/usr/bin/env bash
# Installs the newest wheel of dist/ into an empty virtual environment, far from the source tree, and decodes with it.
set -euo pipefail
python=${1:-python3}
root=$(cd "$(dirname "$0")/../.." && pwd)
wheel=$(ls -t "$root"/dist/kestrel_exact-*.whl | head -n 1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A small random model, made with the development environment that the checkout already has.
PYTHONPATH="$root/tests" "$root/.venv/bin/python" -c "
from pathlib import Path
from support.models import write_hf_model
write_hf_model(Path('$work/source'), family='qwen3_moe')
"
cd "$work"
"$python" -m venv env
env/bin/python -m pip install --quiet "$wheel"
env/bin/kestrel --version
env/bin/kestrel convert source model --wtype q4local
env/bin/kestrel decode -m model --raw -p "hello" -n 8 --ignore-eos --l2-dump a.txt >first.txt
env/bin/python -m kestrel.decode -m model --raw -p "hello" -n 8 --ignore-eos -t 1 --l2-dump b.txt >second.txt
cmp first.txt second.txt
env/bin/kestrel l2 diff a.txt b.txt
# The device code travels in the wheel, and the mark that the package is typed.
env/bin/python -c "
from importlib import resources
names = {f.name for f in resources.files('kestrel.kernels').iterdir()}
assert {'op_args.h', 'ucrt.cuh', 'attention.cu'} <= names, names
assert resources.files('kestrel').joinpath('py.typed').is_file()
"
echo "wheel ok: $(basename "$wheel")"
