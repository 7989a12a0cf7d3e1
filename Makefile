# make demo   compile for cpu and nvidia:sm_90, show the bundle, run it here and compare with the oracle
# make test   lint, types and the whole test suite; needs no accelerator
# make test-triton   the plain kernels compiled by eight versions of Triton, 3.0 to 3.9, which it downloads
# make test-ascend   the Ascend pipeline run on this host, with the toolchain and LLVM's tools, which it downloads
# make clean  remove what the two made, the environment included
#
# Both set up an environment of their own in .venv on a machine that has Python 3.10+ and make.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BUNDLE := artifacts/kvcompress.kvb
TEST_WORKERS ?= 2

# The first Python that is new enough and can make environments; PYTHON=... overrides.
PYTHON ?= $(shell for python in python3 python3.12 python3.11 python3.13 python3.10 python3.14; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 \
	&& echo $$python && break; done)

.PHONY: demo test test-triton test-ascend lint types unit setup clean
.DELETE_ON_ERROR:

demo: setup
	$(BIN)/kvbuild compile --config build.yaml --target cpu:$$(uname -m) --target nvidia:sm_90 -o $(BUNDLE)
	$(BIN)/kvbuild list $(BUNDLE)
	$(BIN)/python benchmarks/demo.py $(BUNDLE)

test: lint types unit

lint: setup
	$(BIN)/ruff check .

# The packages are top-level folders imported as kvbuild.*; links give mypy that layout.
types: setup
	mkdir -p .mypy/kvbuild
	for package in kernels aot runtime; do ln -sfn ../../$$package .mypy/kvbuild/$$package; done
	MYPYPATH=.mypy $(BIN)/mypy --namespace-packages --explicit-package-bases .mypy/kvbuild

unit: setup
	$(BIN)/python -m pytest -n $(TEST_WORKERS)

test-triton: setup
	$(BIN)/python tests/tritons/matrix.py

test-ascend: setup
	$(BIN)/kvbuild toolchain install ascend
	$(BIN)/python tests/ascend/hosttools.py
	KVBUILD_TEST_ASCEND=1 $(BIN)/python -m pytest -n 0 tests/ascend

setup: $(READY)

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "kvbuild needs Python 3.10 or newer with the venv module, and none was" \
	"found: install one (Debian: apt-get install python3-venv) or name it: make PYTHON=/path/to/python3"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[compile,test]'
	touch $(READY)

clean:
	rm -rf $(VENV) .mypy .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info kvbuild.egg-info
	find artifacts -mindepth 1 ! -name README.md -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
