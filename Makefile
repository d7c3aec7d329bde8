# make setup | check | test | demo | build | sanitize | check-neon | clean        (PYTHON=python3.12 picks another interpreter)
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
PYTEST_ARGS ?= -n 2 --dist loadfile -m "not slow"
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
NATIVE_SOURCES := CMakeLists.txt pyproject.toml $(wildcard csrc/* csrc/*/*)

.PHONY: help setup build check test demo sanitize check-neon clean

help:
	@sed -n '1s/^# //p' Makefile

# ---------------------------------------------------------------------------------------------- set-up
# A stamp per finished stage, so that a second call redoes nothing that still holds.

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "sakiyomi needs Python 3.11 or later, and $(PYTHON) is " + sys.version.split()[0] + "; say for example: make PYTHON=python3.12")'
	@echo "set-up: virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade "pip>=25.1"
	@touch $@

# Editable, so that a changed Python file needs no build; the extension is compiled into the environment.
$(VENV)/.built: $(VENV)/.made $(NATIVE_SOURCES)
	@echo "set-up: building sakiyomi and installing what it needs at run time"
	@$(PIP) install --group build
	@$(PIP) install --no-build-isolation --config-settings build-dir=build/venv --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.built constraints-dev.txt
	@echo "set-up: installing what development needs"
	@$(PIP) install --constraint constraints-dev.txt --group dev
	@touch $@

build: $(VENV)/.built ;

setup: $(VENV)/.dev ;

# ---------------------------------------------------------------------------------------------- gates

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

# Real-model tests take the file named here; without a network they are skipped and say why.
test:
	@start=$$SECONDS; $(MAKE) --no-print-directory setup; \
	model=$${SAKIYOMI_TEST_MODEL:-$$($(BIN)/sakiyomi pull smollm2 || echo)}; \
	echo "set-up and build: $$((SECONDS - start)) s"; start=$$SECONDS; \
	SAKIYOMI_TEST_MODEL="$$model" $(BIN)/python -m pytest $(PYTEST_ARGS) && code=0 || code=$$?; \
	echo "tests: $$((SECONDS - start)) s"; exit $$code

demo: build
	@$(BIN)/sakiyomi demo

# The kernel tests over an AddressSanitizer and UndefinedBehaviorSanitizer build, on every instruction set that runs here.
# Python itself is not instrumented, so the libraries are loaded before it and leaks (its own) are not reported.
SANITIZED := build/sanitize/package
# The finder of the editable installation would come before PYTHONPATH.
WITHOUT_EDITABLE := import sys; sys.meta_path = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]; \
	import sakiyomi, pytest; assert "sanitize" in sakiyomi.__file__; sys.exit(pytest.main(sys.argv[1:]))
sanitize: setup
	$(BIN)/cmake -S . -B build/sanitize/cmake -G Ninja -DCMAKE_MAKE_PROGRAM="$$($(BIN)/python -c 'import shutil; print(shutil.which("ninja", path="$(abspath $(BIN)):" + __import__("os").environ["PATH"]))')" \
		-DCMAKE_BUILD_TYPE=RelWithDebInfo -DSAKIYOMI_SANITIZE=ON -DPython_EXECUTABLE="$(abspath $(BIN)/python)"
	$(BIN)/cmake --build build/sanitize/cmake
	@rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r src/sakiyomi $(SANITIZED)/ && rm -f $(SANITIZED)/sakiyomi/_native*
	@cp build/sanitize/cmake/_native*.so $(SANITIZED)/sakiyomi/
	@for isa in $$($(BIN)/python -c 'from sakiyomi.ops.native import list_isas; print(*list_isas())'); do \
		echo "sanitized kernel tests: $$isa"; \
		PYTHONPATH=$(SANITIZED) SAKIYOMI_ISA=$$isa ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		$(BIN)/python -c '$(WITHOUT_EDITABLE)' -q -p no:cacheprovider tests/ops/test_native.py tests/ops/test_bitwise.py tests/ops/test_head.py tests/ops/test_pool.py tests/models/test_native.py tests/models/test_packed.py tests/sampling tests/engine/test_burst.py -k "not torch and not fork"; \
	done

# The NEON kernels against the portable ones, bit by bit: natively on 64-bit Arm, elsewhere cross-compiled and emulated.
IS_ARM := $(filter aarch64 arm64,$(shell uname -m))
NEON_CXX ?= $(if $(IS_ARM),c++,aarch64-linux-gnu-g++)
NEON_RUN ?= $(if $(IS_ARM),env,qemu-aarch64)
NEON_FLAGS := -std=c++17 -O3 -ffp-contract=off -Wall -Wextra -Werror -DSAKIYOMI_NEON -Icsrc
NEON_BUILD := build/neon
check-neon:
	@for tool in $(firstword $(NEON_CXX)) $(firstword $(NEON_RUN)); do command -v $$tool >/dev/null || { \
		echo "check-neon: skipped, $$tool is not here (Debian: apt-get install g++-aarch64-linux-gnu qemu-user)"; exit 0; }; done; \
	mkdir -p $(NEON_BUILD) && \
	$(NEON_CXX) $(NEON_FLAGS) -march=armv8.2-a+dotprod -c csrc/kernels_neon.cpp -o $(NEON_BUILD)/neon.o && \
	$(NEON_CXX) $(NEON_FLAGS) -c csrc/kernels_portable.cpp -o $(NEON_BUILD)/portable.o && \
	$(NEON_CXX) $(NEON_FLAGS) $(if $(IS_ARM),,-static) tests/csrc/compare_kernels.cpp $(NEON_BUILD)/*.o -o $(NEON_BUILD)/compare && \
	$(NEON_RUN) $(NEON_BUILD)/compare

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f src/sakiyomi/_native*.so
