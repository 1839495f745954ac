#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# frameworks.sh DIR [PYTHON]: numba-cuda and cuda-python's driver bindings in an environment of their own, DIR/venv, for
# tests/e2e/frameworks. They run on the simulated GPU as they are. The compiler that numba-cuda needs (NVVM, nvJitLink,
# NVRTC; ptxas) comes with them from PyPI, under NVIDIA's licence (a copy lies beside each); none of it is a part of
# anything that GPU Warden ships. About 270 MB are fetched.
#
# What cannot be had is named in DIR/missing, and does not fail: the tests that need it say why they are skipped.
set -euo pipefail
dir=$(realpath -m "${1:?usage: frameworks.sh DIR [PYTHON]}")
python=${2:-python3}

# The compiler is that of CUDA 12.8, as the simulated driver: an older driver refuses the PTX of a newer one. All that is
# installed is named here, so that the same versions come tomorrow.
wanted=(
	numba-cuda==0.30.4 numba==0.68.1 llvmlite==0.50.0 numpy==2.3.5 packaging==26.3
	cuda-core==1.2.2 cuda-bindings==12.9.10 cuda-pathfinder==1.9.0
	nvidia-cuda-nvcc-cu12==12.8.93 nvidia-nvjitlink-cu12==12.8.93 nvidia-cuda-nvrtc-cu12==12.8.93
)

[ "$(cat "$dir/installed" 2>/dev/null)" = "${wanted[*]}" ] && [ -x "$dir/venv/bin/python" ] && exit 0
rm -rf "$dir/venv" "$dir/installed"
mkdir -p "$dir"
: >"$dir/missing"
echo "frameworks: fetching ${wanted[*]} (some of them NVIDIA's, under its licence)"
install() { # in a condition `set -e` does nothing
	"$python" -m venv "$dir/venv" || return
	"$dir/venv/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir --no-deps --only-binary :all: "${wanted[@]}" || return
	echo "${wanted[*]}" >"$dir/installed"
}
if ! install >"$dir/log" 2>&1; then
	echo "numba-cuda cannot be had from PyPI: $(tail -n 1 "$dir/log")" | sed 's/^/frameworks: /' | tee "$dir/missing" >&2
fi
