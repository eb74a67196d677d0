# `make demo` and `make test` set up everything they need in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint types docs unit unit-sharded wheel gpu-test format clean

# A stamp per purpose: the demo needs no test tools.
.venv/demo.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[plot]"
	touch $@

.venv/dev.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@ .venv/demo.stamp

# The main job; `flatbed word2vec --help` tells of texts of your own.
demo: .venv/demo.stamp
	$(BIN)/flatbed word2vec --out .venv/vectors.txt

test: lint types docs wheel unit

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev.stamp
	$(BIN)/mypy

# The variable silences what the theme says about another project.
docs: .venv/dev.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir .venv/site

# The wheel in a clean venv: what a user gets who has no clone. The .pth file lends it torch and other dependencies; .venv's own
# editable flatbed is not found through it.
SITE := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
wheel: .venv/dev.stamp
	rm -rf .venv/wheel build
	$(BIN)/pip wheel --quiet --no-deps --no-index --no-build-isolation --wheel-dir .venv/wheel .
	$(BIN)/python -m venv --without-pip .venv/wheel/venv
	$(BIN)/python $(SITE) > $$(.venv/wheel/venv/bin/python $(SITE))/dependencies.pth
	$(BIN)/pip --python .venv/wheel/venv install --quiet --no-deps --no-index .venv/wheel/flatbed-*.whl
	cd .venv/wheel && venv/bin/python -c "import flatbed; assert 'wheel' in flatbed.__file__, flatbed.__file__"
	cd .venv/wheel && venv/bin/flatbed --version
	rm -rf build

# One torch thread per worker: the tests are many and small.
unit: .venv/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n 2

# The tests of tables again, made with shard="row": one rank must not notice it.
unit-sharded: .venv/dev.stamp
	OMP_NUM_THREADS=1 FLATBED_TEST_SHARD=row $(BIN)/python -m pytest -m "not gpu" -n 2 tests/tables

# With the interpreter at hand: GPU machines bring their own torch.
gpu-test:
	PYTHONPATH=src python3 -m pytest -m gpu

format: .venv/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv
