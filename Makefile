# The front door: `make train` and `make test` need Python >= 3.11, make and a C++ compiler, nothing else.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test gpu lint clean

train: .venv/.train
	$(BIN)/python train.py norm=rmsnorm against=layernorm name=quickstart overwrite=true

test: .venv/.test
	$(BIN)/python -m pytest -n auto

# On a machine with a GPU: writes results/gpu/DEVICE/. `make gpu WITH=python3` installs nothing and takes that Python's
# PyTorch and Triton.
gpu: $(if $(WITH),,.venv/.train)
	$(or $(WITH),$(BIN)/python) -m scripts.gpu

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m scripts.size

clean:
	rm -rf .venv .cache build *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment is made once, and again when pyproject.toml or constraints.txt changes.
.venv/.train: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("normgpt needs Python 3.11 or newer; make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt .
	@rm -rf build normgpt.egg-info
	@touch $@

.venv/.test: .venv/.train
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt '.[test]'
	@rm -rf build normgpt.egg-info
	@touch $@
