# Sourced by test.sh and quickstart.sh, with the checkout as the current folder.

# prepare_environment EXTRA: make or reuse .venv with cowbeam installed from this checkout; EXTRA is "dev" or "".
prepare_environment() {
  local extra="$1" python="${PYTHON:-python3}" wanted stamp
  if [ ! -x .venv/bin/python ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
      echo "cowbeam needs Python 3.11 or newer; PYTHON=/path/to/python names another than $python." >&2
      return 1
    }
    echo "environment: making .venv"
    rm -rf .venv
    "$python" -m venv .venv
  fi
  # Installed already? The stamp holds the checksum of what decides the set of packages.
  wanted="$(cat pyproject.toml constraints.txt scripts/environment.sh | cksum)"
  stamp=".venv/cowbeam-installed-${extra:-run}"
  if [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
    return 0
  fi
  rm -f .venv/cowbeam-installed-*
  # A venv made by uv, or one whose making was interrupted, has no pip.
  .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null
  # torch first and alone, by its exact version: pip may then take a CPU build that lies at hand, where the open range
  # of some other package's requirement would fetch gigabytes of CUDA.
  echo "environment: installing torch"
  pip_install "$(grep '^torch==' constraints.txt)"
  echo "environment: installing cowbeam${extra:+ with its $extra tools}"
  pip_install -c constraints.txt -e ".${extra:+[$extra]}"
  echo "$wanted" >"$stamp"
  if [ "$extra" = dev ]; then echo "$wanted" >.venv/cowbeam-installed-run; fi # dev holds all that a run needs
}

pip_install() {
  .venv/bin/python -m pip install -qq --disable-pip-version-check "$@"
}
