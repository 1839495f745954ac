# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# `make help` lists the targets. Whatever is built or installed goes to .venv/, bpf/build/, sim/build/, build/.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

BIN := .venv/bin
VENV := .venv/.installed
# Without what only development needs: the first command of a newcomer waits for a fifth of the packages.
RUNS := .venv/.runs
ARGS ?=

MACHINE := $(shell uname -m)
BPF_ARCH_x86_64 := x86
BPF_ARCH_aarch64 := arm64
BPF_OBJECTS := $(addprefix bpf/build/,gpuwarden.bpf.o http.bpf.o stacks.bpf.o uprobe.bpf.o deny.bpf.o)
MEASURING_OBJECTS := $(addprefix build/bpf/,empty.bpf.o hits.bpf.o signals.bpf.o) # of bench/ and conformance/; not shipped
BPF_CHECKED := $(foreach arch,x86 arm64,$(BPF_OBJECTS:bpf/build/%=bpf/build/$(arch)/%) $(MEASURING_OBJECTS:build/bpf/%=build/bpf/$(arch)/%))
BPF_COMPILE = clang -O2 -g -Wall -Werror -target bpf -mcpu=v3 -I bpf
C_FILES = $(shell git ls-files '*.c' '*.h')

.PHONY: help packages packages-test packages-deb setup demo driver-binaries frameworks test coverage lint type bpf bpf-check sim fmt bench bench-attribution bench-calibration bench-convergence bench-enforcement storm soak kernels hostile docs site dashboards deb deb-life image image-life kubernetes kubernetes-check kubernetes-life gpu-bundle gpu-test screenshots screenshots-page clean release release-check packages-fuzz packages-kernels fuzz image-fleet kubernetes-fleet packages-rpm rpm rpm-life repository

help: ## this list
	@echo "GPU Warden: make TARGET [ARGS=\"…\"]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

packages:
	@packaging/setup.sh build

packages-test:
	@packaging/setup.sh test

packages-fuzz:
	@packaging/setup.sh fuzz

packages-kernels:
	@packaging/setup.sh kernels

packages-deb:
	@packaging/setup.sh deb

packages-rpm:
	@packaging/setup.sh rpm

setup: | packages ## install what is missing and build: afterwards .venv/bin has gpuwarden and gputop
	@$(MAKE) --no-print-directory --jobs=$$(nproc) $(VENV) bpf sim build/harness/library_caller

demo: | packages ## watch GPU Warden work: two containers on one (simulated) GPU; ARGS="--json FILE --seconds N"
	@$(MAKE) --no-print-directory --jobs=$$(nproc) $(RUNS) bpf sim
	@$(BIN)/gpuwarden demo $(ARGS)

driver-binaries: ## fetch NVIDIA's libcuda, NVML and MPS daemon of three drivers (Debian's non-free, their licence) into build/driver, for tests/driver
	@tools/driver-binaries.sh build/driver

frameworks: $(VENV) ## install numba-cuda and cuda-python's bindings (PyPI; NVIDIA's compiler, its licence) into build/frameworks, for tests/e2e/frameworks
	@tools/frameworks.sh build/frameworks $(BIN)/python

# Two, if all tests run: tests/conftest.py says what runs beside what.
WORKERS = $(if $(findstring tests/,$(ARGS)),0,2)

test: setup packages-test driver-binaries frameworks ## all tests that need no real GPU; ARGS="tests/unit -k word"; ARGS=--long tries many more examples, new ones each time
	@$(BIN)/pytest --numprocesses=$(WORKERS) $(ARGS)

fuzz: setup packages-fuzz ## inputs from outside, made up along the branches that they take; ARGS="--runs N --seconds S --targets A,B --json FILE"; installs atheris into .venv
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	@$(BIN)/python -m tests.fuzz $(ARGS)

coverage: setup packages-test driver-binaries frameworks ## the same, and how many lines of agent, enforce and gpuwarden they ran; ARGS as for test
	@mkdir -p build/coverage
	@$(BIN)/pytest --numprocesses=$(WORKERS) --cov $(ARGS)

lint: $(VENV) packages-test bpf-check ## ruff, the import contracts, the format of Python and C, and BPF for each architecture
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo --no-cache
	@clang-format --dry-run -Werror $(C_FILES)

type: $(VENV) ## mypy --strict
	@$(BIN)/mypy

fmt: $(VENV) packages-test ## format Python and C files and fix what ruff can fix
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .
	@clang-format -i $(C_FILES)

bpf: $(BPF_OBJECTS) $(MEASURING_OBJECTS) ## compile the BPF programs

bpf-check: $(BPF_CHECKED) ## compile them for every supported architecture

build/harness/%: tools/harness/%.c
	@mkdir -p $(@D)
	gcc -std=gnu11 -O2 -Wall -Wextra -Werror $< -o $@

sim: | packages ## compile the simulated GPU and its workloads
	@$(MAKE) --no-print-directory -C sim

bench: setup ## measure the claims of the README; ARGS="NAME" measures one, ARGS=--help lists them
	@$(BIN)/python -m bench $(ARGS)

bench-attribution: setup ## each container's share of a GPU against the truth; ARGS="--json FILE --seed N --scenarios A,B -v"
	@$(BIN)/python -m bench.attribution $(ARGS)

bench-calibration: setup ## the simulated GPU's contention against published figures
	@$(BIN)/python -m bench.calibration $(ARGS)

bench-convergence: setup ## pictures of latency, queue and share over time, in bench/results; installs matplotlib into .venv
	@$(BIN)/python -c 'import matplotlib' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[plots]'
	@$(BIN)/python -m bench.enforcement.convergence $(ARGS)

bench-enforcement: setup ## each way of sharing a GPU, and GPU Warden's; ARGS="--rounds 3 --json FILE --pairs A,B --modes X,Y --seconds S --signal NAME"
	@$(BIN)/python -m bench.enforcement $(ARGS)

storm: setup ## kill, stop and starve the agent at random moments, and see that every workload runs on; ARGS="--kills N --seed S --json FILE"
	@$(BIN)/python -m bench.storm $(ARGS)

soak: setup ## hours of containers that come and go, and a day of ticks, and whether anything grows; ARGS="--seconds S --containers N --hours H --json FILE"
	@$(BIN)/python -m bench.soak $(ARGS)

kernels: setup packages-kernels bpf-check ## boot the kernels that distributions ship, with each layout of cgroups, and see what works there; ARGS="--kernels A,B --cgroups v2 --json FILE"
	@$(BIN)/python -m bench.kernels $(ARGS)

hostile: setup packages-test ## try each hostile case, and see whether it is seen, contained, and what it costs; ARGS="--json FILE --only PATTERN --every N"
	@$(BIN)/python -m bench.hostile $(ARGS)

gpu-bundle: setup ## build/gpu-bundle: the conformance checks for a machine with a real GPU and without network; ARGS="--python 3.11"
	@$(BIN)/python -m conformance.bundle $(ARGS)

gpu-test: setup ## run the conformance checks on this machine's GPU; ARGS="--out DIR --only A,B"; GPUWARDEN_GPU_PYTHON=a Python with PyTorch
	@$(BIN)/python -m conformance $(ARGS)

docs: $(VENV) ## generate the reference pages, man pages and completions (CI fails where they are stale)
	@$(BIN)/python -m tools.manual.policy_reference >docs/.policy.md && mv docs/.policy.md docs/policy.md
	@$(BIN)/python -m gpuwarden policy schema >docs/.policy.json && mv docs/.policy.json docs/policy.schema.json
	@$(BIN)/python -m tools.manual.metrics_reference >docs/.metrics.md && mv docs/.metrics.md docs/metrics.md
	@$(BIN)/python -m tools.manual.snapshot_reference >docs/.snapshot.md && mv docs/.snapshot.md docs/snapshot.md
	@$(BIN)/python -m tools.manual
	@$(BIN)/python -m conformance.report.docs_page

site: $(VENV) ## build docs/ as a web site in site/; installs mkdocs into .venv
	@$(BIN)/python -c 'import material' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

screenshots: $(VENV) ## draw gputop for docs/images, from a recording of the demo
	@$(BIN)/python -m tools.manual.screenshots docs/images

deb: setup packages-deb ## build the Debian packages in build/deb
	@packaging/deb/build.sh build/deb

deb-life: setup packages-deb ## try them in a fresh Debian: install, demo, upgrade, remove, purge, and what is left; a line per step; ARGS="bullseye bookworm trixie"
	@packaging/deb/life.sh build/deb-life $(ARGS)

rpm: setup packages-rpm ## build the same packages for RHEL 9 and friends in build/rpm
	@packaging/rpm/build.sh build/rpm

rpm-life: rpm ## try them in a bare system: install, doctor, demo, remove, and what is left; a line per step
	@packaging/rpm/life.sh build/rpm

repository: packages-test ## a folder to publish: the packages of build/deb and build/rpm with metadata that is signed by a key of yours; KEY=…
	@packaging/repository.sh build/repository "$(KEY)" build/deb/*.deb $(wildcard build/rpm/*.rpm)

dashboards: $(VENV) ## generate Grafana's dashboards and the Prometheus rules in dashboards/ (CI fails where they are stale)
	@$(BIN)/python -m dashboards

image: setup ## build the container image without an engine: an OCI layout in build/image; PINNED=FILE takes those packages
	@packaging/container/build.sh

image-fleet: setup ## the same for the fleet's service, which has SciPy, in build/image-fleet
	@packaging/container/build.sh build/image-fleet fleet

image-life: setup packages-test ## build it, run it under a real containerd as the DaemonSet does, remove it: a line per step
	@packaging/container/life.sh $(ARGS)

release: setup ## build the files of a release in build/release (CONTRIBUTING.md); ARGS=--snapshot without a dated version
	@packaging/release.sh $(ARGS)

release-check: setup packages-test ## build it twice, compare the sums, and try the wheel in a fresh environment
	@packaging/release-check.sh

kubernetes: $(VENV) ## render packaging/kubernetes/base and monitoring from the chart (CI fails where they are stale)
	@packaging/kubernetes/render.sh

kubernetes-check: $(VENV) ## validate the chart and the base with helm, kubectl and the schemas of several versions; fetches them into build/
	@PYTHONPATH=$$(packaging/kubernetes/tools.sh schemas) $(BIN)/python -m tools.shipping.kubernetes.check

kubernetes-life: setup packages-test ## try the chart on a real Kubernetes, which is built first, with the image of `make image`; ARGS=IMAGE
	@packaging/kubernetes/trial/trial.sh life $(or $(ARGS),build/image)

kubernetes-fleet: setup packages-test ## try the fleet on it: pods placed, explained and held, and 1,000 nodes; with the images of `make image image-fleet`; ARGS="--json FILE"
	@packaging/kubernetes/trial/trial.sh fleet build/image build/image-fleet $(ARGS)

screenshots-page: setup packages-test ## take screenshots of the status page for docs/images
	@$(BIN)/python -m tools.manual.page_screenshots

clean: ## remove everything that was built or installed here
	rm -rf .venv bpf/build sim/build build site .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info sim/*.egg-info

PIP_INSTALL = $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check

$(RUNS): pyproject.toml sim/pyproject.toml | packages
	@echo "setup: installing GPU Warden and what it runs on into .venv"
	@test -x $(BIN)/pip || python3 -m venv .venv
	@$(PIP_INSTALL) --editable . --editable ./sim
	@touch $@

$(VENV): pyproject.toml sim/pyproject.toml | packages
	@echo "setup: installing GPU Warden and its Python packages into .venv"
	@test -x $(BIN)/pip || python3 -m venv .venv
	@$(PIP_INSTALL) --editable '.[dev,fleet]' --editable ./sim
	@touch $(RUNS) $@

$(BPF_OBJECTS): bpf/build/%.bpf.o: $(wildcard bpf/*.c bpf/*.h) | packages
	@echo "bpf: $@"
	@mkdir -p $(@D)
	@$(BPF_COMPILE) -D__TARGET_ARCH_$(BPF_ARCH_$(MACHINE)) -I/usr/include/$(MACHINE)-linux-gnu -c bpf/$*.bpf.c -o $@.partial
	@llvm-strip -g $@.partial
	@mv $@.partial $@

vpath %.bpf.c bench/latency bench/storm conformance/checks/probes

$(MEASURING_OBJECTS): build/bpf/%.bpf.o: %.bpf.c | packages
	@echo "bpf: $@"
	@mkdir -p $(@D)
	@$(BPF_COMPILE) -D__TARGET_ARCH_$(BPF_ARCH_$(MACHINE)) -I/usr/include/$(MACHINE)-linux-gnu -c $< -o $@.partial
	@llvm-strip -g $@.partial
	@mv $@.partial $@

# The kernel's headers of an architecture: this machine's own, or the cross compiler's.
bpf/build/x86/%.bpf.o: $(wildcard bpf/*.c bpf/*.h) | packages-test
	@mkdir -p $(@D)
	@$(BPF_COMPILE) -D__TARGET_ARCH_x86 -I/usr/include/x86_64-linux-gnu -I/usr/x86_64-linux-gnu/include -c bpf/$*.bpf.c -o $@

bpf/build/arm64/%.bpf.o: $(wildcard bpf/*.c bpf/*.h) | packages-test
	@mkdir -p $(@D)
	@$(BPF_COMPILE) -D__TARGET_ARCH_arm64 -I/usr/include/aarch64-linux-gnu -I/usr/aarch64-linux-gnu/include -c bpf/$*.bpf.c -o $@

build/bpf/x86/%.bpf.o: %.bpf.c | packages-test
	@mkdir -p $(@D)
	@$(BPF_COMPILE) -D__TARGET_ARCH_x86 -I/usr/include/x86_64-linux-gnu -I/usr/x86_64-linux-gnu/include -c $< -o $@

build/bpf/arm64/%.bpf.o: %.bpf.c | packages-test
	@mkdir -p $(@D)
	@$(BPF_COMPILE) -D__TARGET_ARCH_arm64 -I/usr/include/aarch64-linux-gnu -I/usr/aarch64-linux-gnu/include -c $< -o $@
