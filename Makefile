# SPDX-License-Identifier: Apache-2.0
#
# agent-intercom. `make help` says what there is.

# What builds the development environment, and what the installed brokers run with (empty: /usr/bin/python3 where it
# is 3.11 or newer, else the one that runs the installer).
PYTHON ?= python3
INSTALL_PYTHON ?=

DESTDIR ?=
PREFIX ?= /usr/local
# 1: dependencies from the index go into the installation. 0: the distribution has them (Debian 13 does).
BUNDLE ?= 1
# The drop-in with the mount hardening: yes, no, or auto (where this machine lets users make user namespaces).
MOUNTS ?= auto
# install-user: 1 also enables and starts the sockets.
ENABLE ?= 0
# uninstall-user: 1 ends the runs that go on.
FORCE ?= 0
# Arguments for pytest, as in: make test ARGS='-k router'
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
SETUP := packaging/setup-machine
INSTALL = $(PYTHON) packaging/install

.DELETE_ON_ERROR:
.PHONY: help venv systemd demo test bench lint install uninstall install-user uninstall-user clean

# --- help ------------------------------------------------------------------------------------------------------------

help:
	@echo 'Use it'
	@echo '  make demo             two sessions talk, and a team works on a small repository until it is ready'
	@echo '  make install-user     install for yourself, without root (ENABLE=1: and start listening)'
	@echo '  make uninstall-user   take back exactly that (FORCE=1: and end runs that go on)'
	@echo '  make install          install for everybody (PREFIX=/usr/local DESTDIR= BUNDLE=1 MOUNTS=auto)'
	@echo '  make uninstall        take back exactly that'
	@echo 'Work on it'
	@echo '  make test             all tests (ARGS= goes to pytest)'
	@echo '  make lint             ruff, mypy and the layers only'
	@echo '  make bench            paired measurements'
	@echo '  make venv             the development environment, $(VENV)'
	@echo '  make clean            remove what was built'

# --- the development environment ---------------------------------------------------------------------------------------

venv: $(STAMP) systemd

$(STAMP): pyproject.toml $(SETUP)
	@$(SETUP) venv
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

# Compiled, and so tried again each time until it is there; without it most things still work.
systemd: $(STAMP)
	@$(SETUP) systemd $(BIN)/python

# --- show it, test it ----------------------------------------------------------------------------------------------------

demo: venv
	@$(SETUP) demo
	@$(BIN)/python packaging/demo

test: venv
	@$(SETUP) test
	$(BIN)/python -m pytest -n auto $(ARGS)

lint: $(STAMP)
	$(BIN)/python -m pytest tests/unit/test_linters.py $(ARGS)

bench: venv
	@$(SETUP) test
	$(BIN)/python -m tests.bench $(ARGS)

# --- install and take back -----------------------------------------------------------------------------------------------

INSTALL_FLAGS = --python='$(INSTALL_PYTHON)' --mounts=$(MOUNTS) $(if $(filter 0,$(BUNDLE)),--no-bundle)

install:
	$(INSTALL) install --destdir='$(DESTDIR)' --prefix='$(PREFIX)' $(INSTALL_FLAGS)

uninstall:
	$(INSTALL) remove --destdir='$(DESTDIR)' --prefix='$(PREFIX)'

install-user:
	$(INSTALL) install --user $(INSTALL_FLAGS) $(if $(filter 1,$(ENABLE)),--enable)

uninstall-user:
	$(INSTALL) remove --user $(if $(filter 1,$(FORCE)),--force)

# --- clean ---------------------------------------------------------------------------------------------------------------

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find service tests packaging -name __pycache__ -prune -exec rm -rf {} +
