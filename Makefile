# deltaproof. Two commands: `make verify` (the main job and its report) and `make test`; `make help`
# lists the rest.
# Every path and tool can be set: make test BUILD=/tmp/x CC=clang ARCH=-march=native.
# MPI=1: with mpicc, for `mpirun -np N build/deltaproof run .. --backend mpi` (harness/mpi).
# WERROR=1: a warning is an error, of the compilers of CI (`make check`).
# SAN=1: address and undefined-behaviour sanitizers; SAN=thread: the thread sanitizer, with clang
# and its OpenMP (make tsan). Tests run in SHARDS processes side by side.
# make itself exits with 2 whenever a command fails; the status 0, 1 or 2 of a verdict is that of
# the program it runs.
BUILD    ?= build
CASES    ?= cases
OUT      ?= $(BUILD)/verify
SAN      ?= 0
WERROR   ?= 0
ARCH     ?=
ifeq ($(origin CC),default)
CC       := gcc
endif
ifeq ($(origin CXX),default)
CXX      := g++
endif
AR       ?= ar
CFLAGS   ?= -O3
CXXFLAGS ?= -O1
LIBS     ?= -lmpfr -lgmp -llapacke -lopenblas -ljansson -lxxhash -lsodium -lm -lpthread
JOBS     ?= $(shell nproc 2>/dev/null || echo 2)
SHARDS   ?= $(if $(filter 1,$(JOBS)),3,4)

BASE     := $(BUILD)
ifeq ($(SAN),1)
override BUILD := $(BASE)/san
SANFLAGS := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined $\
    -fno-omit-frame-pointer
endif
ifeq ($(SAN),thread)
override BUILD := $(BASE)/tsan
CC       := $(firstword $(shell command -v clang clang-14 clang-15 clang-16 clang-18 2>/dev/null))
SANFLAGS := -O1 -g -fsanitize=thread -fno-omit-frame-pointer
endif
WARNED   := $(if $(filter 1,$(WERROR)),-Werror)
# What the code needs, whatever CFLAGS says: bounds assume that the compiler neither fuses nor
# reorders. Nobody reads errno or the flags of arithmetic: without them loops with comparisons
# become vectors, and no value changes.
C_ALL    := $(CFLAGS) -std=gnu11 -Wall -Wextra -Werror=implicit-function-declaration \
    -Wno-unknown-pragmas -ffp-contract=off -fno-math-errno -fno-trapping-math -fopenmp $(ARCH) \
    $(SANFLAGS) $(WARNED)
CXX_ALL  := $(CXXFLAGS) -std=c++14 -Wall -Wextra $(ARCH) $(SANFLAGS) $(WARNED)
CPP_ALL   = -I. -D_GNU_SOURCE $(CPPFLAGS) -MMD -MP -MT $@

# The CUDA kernels become a subject of the harness where there is a device and an nvcc; GPU=1 builds
# them without a device, GPU=0 leaves them out. They never change what the CPU part does.
GPU      ?= $(if $(shell nvidia-smi -L 2>/dev/null),1,0)
.DEFAULT_GOAL := all
ifeq ($(GPU)$(SAN),10)
-include gpu/gpu.mk
endif
ifeq ($(SAN),0)
-include gpu/tests/cpu/cpu.mk
endif
-include harness/mpi/mpi.mk
ifneq ($(GPU_LIB),)
$(patsubst %.c,$(BUILD)/%.o,$(wildcard harness/device/*.c)): private CPP_ALL += -DDP_HAVE_CUDA \
    -I$(CUDA_HOME)/include
endif

# In the order in which data goes through them; a folder uses those before it alone
# (harness/tests/test_layers.c).
REF_DIRS     := $(addprefix ref/,vocabulary files arithmetic chunk inputs truth bound)
HARNESS_DIRS := $(addprefix harness/,base case simulated mpi device library bound verdict record \
    run search commands)
REF      := $(wildcard $(REF_DIRS:=/*.c))
HARNESS  := $(filter-out harness/commands/main.c,$(wildcard $(HARNESS_DIRS:=/*.c)))
TESTS    := $(wildcard harness/tests/*.c)
BENCH    := $(patsubst harness/bench/%.c,$(BUILD)/bench/%,$(wildcard harness/bench/*.c))
PROGRAM  := $(BUILD)/deltaproof
obj       = $(patsubst %,$(BUILD)/%.o,$(basename $(1)))
ifeq ($(SAN),1)
# the arithmetic, where the tests spend their time
$(call obj,$(REF) $(wildcard harness/simulated/*.c harness/verdict/*.c)): private C_ALL += -O2
endif
# Builds run on all cores unless the caller chose -j; GNU make shows that choice to recipes only,
# hence one recursion.
build     = +@$(MAKE) --no-print-directory $(if $(filter -j% --jobserver%,$(MAKEFLAGS)),,-j$(JOBS))
SETUP     = CC='$(CC)' CXX='$(CXX)' CPPFLAGS='$(CPPFLAGS)' LDFLAGS='$(LDFLAGS)' \
    scripts/setup $(BASE)
run_env   = LSAN_OPTIONS=suppressions=$(CURDIR)/harness/tests/lsan.supp:print_suppressions=0 \
    DP_PYTHON="$$(cat $(BASE)/python)"

# Several goals at once, `make -j gpu program`, build one after the other what they share.
ifeq ($(MAKELEVEL),0)
.NOTPARALLEL:
endif

.PHONY: all program wheel data-wheel ops judge verify test check selfcheck museum bench report \
    setup gpu tsan format format-check clean help FORCE
all:                           ## the program build/deltaproof (a plain `make`); installs nothing
	$(build) $(PROGRAM) $(BUILD)/bridge.so

program: all

# ARGS: what `deltaproof` is to do, e.g.
# ARGS='judge --inputs in.safetensors --outputs out.safetensors --base bf16'.
ARGS     ?= run smoke-kda --subject $(BUILD)/libexample.so
judge:                         ## the first verdict, without GPU and Python (ARGS: anything else)
	@scripts/setup --check
	+@$(MAKE) --no-print-directory -j$(JOBS) GPU=0 $(PROGRAM) $(BUILD)/libexample.so
	@$(PROGRAM) $(ARGS)

# GPU=1 where somebody says so, not because a device is there.
WITH_OPS = $(if $(and $(filter command,$(origin GPU)),$(filter 1,$(GPU))),cuda,$(OPS:1=cpu))
# OPS=1: with the operators of PyTorch for CPU tensors; GPU=1: for those of a device too.
wheel:                         ## a Python wheel with program and libraries inside (build/dist)
	@DELTAPROOF_BUILD='$(abspath $(BASE))/wheel' \
	    DELTAPROOF_WITH_OPS='$(WITH_OPS)' scripts/wheel $(BASE)

data-wheel: all                ## truth packs with their readers as a wheel (build/dist)
	@DELTAPROOF='$(abspath $(PROGRAM))' scripts/data-wheel $(BASE)

ops:                           ## the kernels as libraries, for deltaproof.ops (build/ops)
	$(build) $(OPS_LIBS)

verify: setup                  ## set up, build, run every case, write record and report to OUT
	$(build) $(PROGRAM)
	@$(run_env) $(PROGRAM) run --all --cases $(CASES) --out $(OUT)

# What compiling does not take is installed beside it.
test-programs: FORCE
	@$(SETUP) packages
	+@$(SETUP) python mpi & $(subst +@,,$(build)) $(PROGRAM) $(BUILD)/bridge.so $(BUILD)/dp-test \
	    $(BUILD)/fuzz-replay $(CPU_PROGRAM) $(CPU_TESTS); built=$$?; wait $$! && exit $$built

test: test-programs            ## set up, build, run all tests (SAN=1: sanitized; FILTER=context*)
	$(if $(HAVE_MPICC),$(build) $(MPI_PROGRAM) $(MPI_KERNELS))
	@$(run_env) DP_PROGRAM="$$(realpath $(PROGRAM))" DP_CASES="$$(realpath $(CASES))" \
	    DP_KERNELS="$(abspath $(CPU_PROGRAM))" \
	    DP_MPI_PROGRAM="$(abspath $(MPI_PROGRAM))" \
	    DP_MPI_KERNELS="$(abspath $(MPI_KERNELS))" \
	    DP_WHEEL_PROGRAM="$(if $(GPU_LIB),,$(abspath $(BUILD)))" FIRST='python kernels' \
	    scripts/shards $(SHARDS) $(BUILD)/dp-test $(if $(FILTER),--gtest_filter='$(FILTER)')

# Tests that find most for their time.
CHECKED  ?= formats.*:vocabulary.*:abi.*:case.*:operations.*:own.*:slots.*:schema.*:safetensors.*:$\
    inputs.*:pieces.*:spectral.*:levels.*:condition.*:sums.*:bits.*:product.*:$\
    recurrent.designs*:judge.*:layers.no_line*:layers.no_folder*:-levels.no_alarm*
check: setup                   ## build with -Werror, layout, lint and the quick tests: a minute
	+@$(MAKE) --no-print-directory -j$(JOBS) GPU=0 WERROR=1 BUILD=$(BASE)/check \
	    $(BASE)/check/deltaproof $(BASE)/check/dp-test
	@if command -v clang-format-14 >/dev/null; then $(MAKE) --no-print-directory format-check; \
	    else echo "check: no clang-format-14: layout is not checked"; fi
	@for x in $$(git grep -lE '^#!.*(bash|sh)$$' -- scripts .ci); do bash -n $$x; done
	@if command -v ruff >/dev/null; then ruff check -q . && ruff format -q --check .; \
	    else echo "check: no ruff: Python is not checked"; fi
	@$(run_env) DP_PROGRAM="$$(realpath $(BASE)/check/deltaproof)" \
	    DP_CASES="$$(realpath $(CASES))" scripts/shards $(SHARDS) $(BASE)/check/dp-test \
	    --gtest_filter='$(CHECKED)'

compile_commands.json: FORCE   ## what is compiled how, for clangd, clang-tidy and editors
	@scripts/compile-commands GPU=0 all $(BASE)/dp-test >$@.tmp && mv $@.tmp $@

selfcheck: setup               ## what a wrong kernel would pass: zeros, factors, shuffled rows, ..
	$(build) $(PROGRAM) $(BUILD)/dp-test
	@$(run_env) DP_SELFCHECK=0/1 DP_PROGRAM="$$(realpath $(PROGRAM))" \
	    DP_CASES="$$(realpath $(CASES))" $(BUILD)/dp-test --gtest_filter='selfcheck.*'

museum: setup                  ## every deliberate fault: which verdict goes red (OUT/museum.json)
	$(build) $(PROGRAM) $(CPU_PROGRAM)
	@$(run_env) $(PROGRAM) museum --cases $(CASES) --out $(OUT)
	$(if $(CPU_PROGRAM),@$(run_env) $(CPU_PROGRAM) museum --kernels --cases $(CASES) --out $(OUT))

bench: setup                   ## every benchmark; on a device our KDA kernels beside FLA's
	$(build) $(BENCH) $(if $(GPU_LIB),$(BUILD)/gpu/bench_bwd)
	@set -e; for b in $(BENCH); do echo "== $$b"; $$b; done
	@$(if $(GPU_LIB),echo "== bench_fla.py"; \
	    python3 scripts/campaigns/peers/bench_fla.py $(BUILD)/gpu/bench_bwd)

report: setup                  ## render OUT/report.html again from its records
	$(build) $(PROGRAM)
	@$(run_env) $(PROGRAM) report $(OUT)

setup:                         ## install what is missing, choose the Python of the report
	@$(SETUP)

gpu:                           ## the CUDA kernels, their tests and benchmarks, where nvcc is
	$(if $(GPU_LIB),$(build) $(GPU_LIB) $(GPU_PROGS),@echo \
	    "gpu/ is not built: no device (GPU=1 builds it without one), no nvcc (set NVCC), or SAN=1")

tsan: setup                    ## all commands under the thread sanitizer (clang, libomp-dev)
	@test -n "$(shell command -v clang clang-14 clang-15 clang-16 clang-18)" || \
	    { echo "make tsan needs clang: apt-get install clang libomp-dev"; exit 2; }
	+@$(MAKE) --no-print-directory -j$(JOBS) SAN=thread GPU=0 BUILD=$(BASE) $(BASE)/tsan/deltaproof
	@scripts/tsan $(BASE)/tsan/deltaproof $(CASES)

# Version 14, Debian 12's: others lay a few things out differently.
FORMATTED = $(shell git ls-files '*.c' '*.h' '*.inc' '*.cc' '*.cu' '*.cuh')
format:                        ## lay out all C, C++ and CUDA sources (clang-format 14)
	@clang-format-14 -i $(FORMATTED)

format-check:                  ## does `make format` change nothing; is no line too wide
	@clang-format-14 --dry-run -Werror $(FORMATTED)
	@scripts/width

clean:                         ## remove the build folder
	rm -rf $(BUILD)

help:                          ## this list
	@sed -n 's/^\([a-z_.]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST) | expand -t 16

include scripts/install.mk
include scripts/analysis.mk

# Written anew only when their content changes, so that a change of flags or commit rebuilds what
# depends on it and nothing else.
update = @mkdir -p $(@D); printf '%s\n' $(1) >$@.$$$$; if cmp -s $@.$$$$ $@; then rm $@.$$$$; else \
    mv $@.$$$$ $@; fi
COMMIT := $(shell git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)
$(BUILD)/commit.h: FORCE
	$(call update,'#define DP_COMMIT "$(COMMIT)"')
# What the bits of cached results follow from (ref/files/cache.h): sources, compiler, flags.
hash      = $$({ echo '$(CC) $(C_ALL) $(CPPFLAGS)'; $(CC) --version | \
    head -n 1; sha256sum $(1); } | sha256sum | cut -c 1-32)
SOURCES_REF := $(sort $(wildcard $(REF_DIRS:=/*.[ch]) $(REF_DIRS:=/*.inc)))
SOURCES_ALL := $(SOURCES_REF) $(sort $(wildcard harness/*.h $(HARNESS_DIRS:=/*.[ch]) \
    $(HARNESS_DIRS:=/*.inc)))
HASH_REF  = $(call hash,$(SOURCES_REF))
HASH_ALL  = $(call hash,$(SOURCES_ALL))
$(BUILD)/sources.h: FORCE
	$(call update,"#define DP_SOURCES_REF \"$(HASH_REF)\"" "#define DP_SOURCES_ALL \"$(HASH_ALL)\"")
$(BUILD)/flags: FORCE
	$(call update,'$(CC) $(C_ALL) $(CPP_ALL)' '$(CXX) $(CXX_ALL)' '$(LDFLAGS) $(LIBS)' '$(GPU_LIB)' \
	    "$$($(CC) --version | head -n 1)")

$(BUILD)/harness/commands/main.o $(BUILD)/harness/record/record_schema.o \
    $(BUILD)/harness/record/record.o: private CPP_ALL += -include $(BUILD)/commit.h
$(BUILD)/ref/files/cache.o: private CPP_ALL += -include $(BUILD)/commit.h \
    -include $(BUILD)/sources.h
# The tree that reports and cases come from, and the build folder as seen from there
# (harness/base/home.h).
$(BUILD)/harness/base/home.o: private CPP_ALL += -DDP_TREE='"$(CURDIR)"' \
    -DDP_BUILD='"$(patsubst $(CURDIR)/%,%,$(abspath $(BASE)))"'
# gcc tells of vectors wider than the CPU's, which pass between functions of this file alone.
$(BUILD)/ref/truth/truth_dd_wide.o: private C_ALL += -Wno-psabi
# Where no time is spent, less of it goes into building.
COLD := $(addprefix harness/,base case commands device library record search tests)
$(addprefix $(BUILD)/,$(addsuffix /%.o,$(COLD))): private C_ALL := $(patsubst -O3,-O1,$(C_ALL))
$(BUILD)/%.o: %.c $(BUILD)/flags | $(BUILD)/commit.h $(BUILD)/sources.h
	@mkdir -p $(@D)
	$(CC) $(CPP_ALL) $(C_ALL) -c $< -o $@
$(BUILD)/%.o: %.cc $(BUILD)/flags
	@mkdir -p $(@D)
	$(CXX) $(CPP_ALL) $(CXX_ALL) -c $< -o $@
# Removed sources leave no object behind: the list of members is part of what the archive depends
# on.
$(BUILD)/members: FORCE
	$(call update,'$(REF) $(HARNESS) $(TESTS)')
$(BUILD)/libref.a: $(call obj,$(REF) $(HARNESS)) $(BUILD)/members
	@rm -f $@
	$(AR) rcs $@ $(filter %.o,$^)
$(PROGRAM): $(BUILD)/harness/commands/main.o $(MPI_LINKED) $(BUILD)/libref.a $(GPU_LIB)
	$(if $(MPI_LINKED),$(USE_MPICC),$(CC)) $(C_ALL) $(LDFLAGS) $^ $(LIBS) $(GPU_LDLIBS) -o $@
$(BUILD)/libexample.so: harness/subject/example_subject.c harness/deltaproof_subject.h
	$(CC) -O2 -fPIC -shared -ffp-contract=off -Iharness $< -o $@ -lm
# The subject whose kernel is a Python function.
$(BUILD)/bridge.so: python/bridge.c harness/deltaproof_subject.h $(BUILD)/flags
	$(CC) $(CPP_ALL) $(C_ALL) -fPIC -shared $(LDFLAGS) $< -o $@
$(BUILD)/dp-test: $(BUILD)/harness/tests/gt.o $(call obj,$(TESTS)) $(BUILD)/libref.a $(GPU_LIB)
	$(CXX) $(CXX_ALL) -fopenmp $(LDFLAGS) $^ -lgtest -lquadmath $(LIBS) $(GPU_LDLIBS) -o $@
$(BUILD)/bench/%: $(BUILD)/harness/bench/%.o $(BUILD)/libref.a $(GPU_LIB)
	@mkdir -p $(@D)
	$(CC) $(C_ALL) $(LDFLAGS) $^ $(LIBS) $(GPU_LDLIBS) -o $@
.SECONDARY:

-include $(wildcard harness/fuzz/fuzz.mk)
-include $(shell find $(BUILD) -type f -name '*.d' 2>/dev/null)
