#!/usr/bin/env bash
# The launchers of tests/launchers, as far as this machine gives them: Debian's packages where this is root, Ray from pip
# into the environment that is named. What is not there is skipped by its test, by name.
# usage: tests/launchers/install.sh PYTHON
set -euo pipefail
missing=()
command -v mpirun >/dev/null || missing+=(openmpi-bin)
command -v mpiexec.hydra >/dev/null || missing+=(mpich)
command -v slurmctld >/dev/null || missing+=(slurm-wlm)
command -v munged >/dev/null || missing+=(munge)
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]}"
    { timeout 120 apt-get update -qq &&
      DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >/dev/null ||
      echo "could not install ${missing[*]}: their tests will be skipped" >&2
  else
    echo "not here: ${missing[*]} (apt-get install, as root): their tests will be skipped" >&2
  fi
fi
"$1" -c 'import ray' 2>/dev/null || { echo "installing Ray"; "$1" -m pip install --quiet -r requirements-launchers.txt; } ||
  echo "no Ray: its test will be skipped" >&2
