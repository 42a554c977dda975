# Nothing but Python 3.11 is needed: the first target called makes .venv, which holds nox alone, and
# nox makes one environment per runtime. They are kept, so a second call is quick.

NOX := .venv/bin/nox
REPORTS := .nox/reports

.PHONY: help demo check test test-all lint types package bench docs wheel clean

help:
	@echo "make demo      fine-tune a classifier on handwritten digits"
	@echo "make check     a first look after a change: ruff, spelling, mypy, the tests of the core with one runtime"
	@echo "make test      the tests with each runtime, ruff and mypy, and a table at the end"
	@echo "make test-all  the slow tests too"
	@echo "make bench     microseconds a step, compared with torch, scikit-learn and JAX (WORKLOADS=\"W1 W5\")"
	@echo "make lint types"
	@echo "make wheel     the wheel and the source distribution in dist/; pip install dist/*.whl installs it"
	@echo "make package   the same, checked, and tested in a fresh environment"
	@echo "make docs      the site, in docs/_build/html; its examples run"
	@echo "make clean     remove the environments"

$(NOX): .ci/bootstrap
	@.ci/bootstrap && touch $(NOX)

demo lint types docs package wheel: $(NOX)
	@$(NOX) --session $@

check: $(NOX)
	@$(NOX) --session lint types
	@$(NOX) --session "tests(stock)" -- tests/core

bench: $(NOX)
	@$(NOX) --tags bench

# Every session runs even if one fails; the table comes last in any case.
test test-all: $(NOX)
	@rm -rf $(REPORTS); status=0; \
	$(NOX) --tags tests $(if $(filter test-all,$@),-- -m "slow or not slow") || status=1; \
	.venv/bin/python tests/report.py $(REPORTS) || status=1; \
	exit $$status

clean:
	rm -rf .venv .nox dist
