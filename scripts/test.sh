#!/usr/bin/env bash
# Set up what the checks need, then run them: bash scripts/test.sh [--all]. Needs Python and a package index only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

# A test that needs a browser carries the mark `browser`. Without one it must fail here, by name, and not be skipped.
if grep -rqs 'mark\.browser' tests --include='*.py' && ! command -v chromium >/dev/null; then
  echo "The tests marked browser need chromium (Debian: apt-get install chromium)." >&2
  exit 1
fi

prepare_environment dev
.venv/bin/python -m cowbeam.decoder.default_model

exec .venv/bin/python scripts/check.py "$@"
