#!/usr/bin/env bash
# What only an NVIDIA GPU shows: bash scripts/test_cuda.sh. Exactness over the Triton path, every kernel against float64,
# compiled layers, experts, whole searches in 16 bits, and models on several devices where there are two GPUs.
# It sets up .venv as test.sh does, unless PYTHON names an interpreter that has torch, triton, transformers, accelerate,
# pytest and pytest-xdist.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
if [ -z "${PYTHON:-}" ]; then
  source scripts/environment.sh
  prepare_environment dev
fi

# Where the package is not installed, it is found by links to its folders.
if ! "$python" -c "import cowbeam.decoder" 2>/dev/null; then
  mkdir -p .cache/types/cowbeam
  for folder in decoder kernels ui; do ln -sfn "$PWD/$folder" ".cache/types/cowbeam/$folder"; done
  export PYTHONPATH=$PWD/.cache/types${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD/tests
export COWBEAM_TEST_DEVICE=cuda HF_HUB_OFFLINE=1
gpus=$("$python" -c "import torch; print(torch.cuda.device_count())")
if [ "$gpus" = 0 ]; then
  echo "There is no CUDA device here." >&2
  exit 1
fi

logs=${LOGS:-$(mktemp -d)}
names=() jobs=()
run() {  # name, GPU, command …
  names+=("$1")
  CUDA_VISIBLE_DEVICES=$2 "${@:3}" >"$logs/$1.log" 2>&1 &
  jobs+=($!)
}

pytest=("$python" -m pytest -q -p no:cacheprovider)
exact=(tests/test_{exact_beams,exact_samples,paged_logits,flight,chunks,prefix_cache,mixes,swap,own_loop,lookahead,abuse,drop_in,decoder,choice_graph}.py)
last=$((gpus - 1))
run exactness 0 "${pytest[@]}" -n 10 -m "not long" "${exact[@]}"
for part in 0/3 1/3 2/3; do
  run "kernels-${part%/3}" "$last" "$python" tests/cuda_kernels_check.py --seed "$RANDOM" --shard "$part"
done
run compiled "$last" "${pytest[@]}" -n 3 -m long tests/test_compiled_layers.py
run experts "$last" "${pytest[@]}" -n 2 -m cuda tests/test_experts.py
run half "$last" "${pytest[@]}" -n 2 -m cuda tests/test_half_precision.py tests/test_flat_memory.py
if [ "$gpus" -gt 1 ]; then run devices 0,1 "$python" tests/cuda_devices_check.py; fi

failed=0
for i in "${!jobs[@]}"; do
  if wait "${jobs[$i]}"; then verdict=ok; else verdict=FAILED; failed=1; fi
  printf '%-10s %-7s %s\n' "${names[$i]}" "$verdict" "$(tail -n 1 "$logs/${names[$i]}.log" | cut -c1-160)"
  if [ "$verdict" = FAILED ]; then grep -E '^(E  |FAILED|ERROR)' "$logs/${names[$i]}.log" | cut -c1-200 | tail -n 20 || true; fi
done
echo "logs: $logs"
exit $failed
