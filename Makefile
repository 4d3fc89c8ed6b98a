# Every target starts from a bare checkout: .venv is made on first use and made anew when the
# requirements change. Options of the demo: make demo TEXT=path TOKENS=500000 RECIPE=mxfp4
VENV := .venv
CONSTRAINTS := constraints.txt
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

# Two test files at a time; a file's tests share what it made. Two threads for each of the two
# would take half as long again on two cores.
PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist loadfile

.PHONY: help setup demo test test-slow test-outside test-all test-newest test-gpu layouts lint \
	design-space study

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(INSTALLED)  ## make .venv and install the pinned requirements

$(INSTALLED): pyproject.toml setup.py $(CONSTRAINTS) tools/setup_venv.sh tools/find_python.sh
	@tools/setup_venv.sh $(INSTALLED) $(CONSTRAINTS)

demo: $(INSTALLED)  ## pretrain in FP4 and in BF16 on real text, and compare (TEXT=, TOKENS=, RECIPE=)
	@$(PYTHON) -m tools.demo $(if $(TEXT),--text "$(TEXT)") $(if $(TOKENS),--tokens $(TOKENS)) \
		$(if $(RECIPE),--recipe $(RECIPE))

test: $(INSTALLED)  ## run the quick tests, of every part; no GPU needed
	@$(PYTEST) -m "not (gpu or slow or outside)"

test-slow: $(INSTALLED)  ## run the slow tests: more layouts, checkpoints, known mistakes
	@$(PYTEST) -m "slow and not (gpu or outside)"

test-all: test test-slow test-outside test-newest layouts  ## run all that needs no GPU, for hours

test-outside: $(INSTALLED)  ## run matrices of cases; test against clusters and other releases
	@$(PYTHON) -m pytest -m outside

test-newest:  ## run the demo and the tests on the newest versions, in a .venv-newest of their own
	@$(MAKE) VENV=.venv-newest CONSTRAINTS=constraints-newest.txt demo test test-slow

test-gpu: $(INSTALLED)  ## run the tests that need a GPU, and the layouts on two
	@$(PYTHON) -m pytest -m gpu tests
	@$(PYTHON) -m pytest tests/mcore/test_layouts.py

layouts: $(INSTALLED)  ## compare every layout with one process (LAYOUTS="tp2 pp2", PROCESSES=2)
	@$(PYTHON) -m benchmarks.layouts $(if $(LAYOUTS),--layouts $(LAYOUTS)) \
		$(if $(PROCESSES),--processes $(PROCESSES))

design-space: $(INSTALLED)  ## write docs/design-space.md and its picture anew from the results
	@$(PYTHON) -m tools.sweep show --page docs/design-space.md --picture docs/images/design-space.svg
	@for study in sweep-best trades backward-3M; do \
		$(PYTHON) -m benchmarks.study show $$study --page docs/design-space.md || exit 1; done

study: $(INSTALLED)  ## write the tables of all studies, and those that compare recipes, from the results
	@grep -o '^<!-- study: [^ ]*' docs/*.md docs/notes/*.md | while IFS=: read -r page _ name; do \
		$(PYTHON) -m benchmarks.study show $${name# } --page $$page || exit 1; done
	@$(PYTHON) -m benchmarks.study recipes

lint: $(INSTALLED)  ## run ruff and mypy
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy
