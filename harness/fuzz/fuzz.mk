# make fuzz [FUZZ_SECONDS=60] [FUZZ_RUNS=-1]: libFuzzer on what is read: safetensors, case files,
# all that judge reads, what ranks that meet say. Needs clang; without
# it says so and fails.
# make fuzz-coverage: how much of the code under test the inputs found so far reach (llvm-cov).
# make fuzz-bulk [FUZZ_BULK=10000000] [FUZZ_SHARE=200000] [FUZZ_JOBS=2]: so many executions of each
# in a build that is five to ten times as fast (guards.c), then all inputs found and FUZZ_SHARE
# further executions under the sanitizers.
FUZZ_CC      ?= $(firstword $(shell command -v clang-14 clang-15 clang-16 clang-18 clang \
    2>/dev/null))
FUZZ_SECONDS ?= 60
FUZZ_RUNS    ?= -1
FUZZ_TARGETS := safetensors case judge meeting
FUZZ_LEN     := 3072
FUZZ_CFLAGS  := -std=gnu11 -D_GNU_SOURCE -O2 -g -ffp-contract=off -Wall -Wextra -Wno-unknown-pragmas
FUZZ_SAN     := -fsanitize=address,undefined -fno-sanitize-recover=undefined
# Without the sanitizers' libraries: what is undefined traps, the heap is that of guards.c, nothing
# is noted at comparisons (half of the time of case files).
FUZZ_TRAP    := -fsanitize=undefined,local-bounds -fsanitize-trap=undefined,local-bounds \
    -fstack-protector-strong -D_FORTIFY_SOURCE=2
FUZZ_BULK    ?= 10000000
FUZZ_SHARE   ?= 200000
FUZZ_JOBS    ?= 2
FUZZ_DIR     := $(BUILD)/fuzz

# The code under test: what these files read is checked in them. What they call beyond comes from
# the library as it is.
FUZZ_READ          := ref/files/safetensors.c ref/vocabulary/text.c
FUZZ_CASE          := $(wildcard harness/case/*.c)
FUZZ_OF_safetensors := $(FUZZ_READ) ref/files/output.c ref/files/input.c
FUZZ_OF_case        := $(FUZZ_CASE) $(FUZZ_READ) $(wildcard ref/inputs/*.c) ref/vocabulary/problem.c
FUZZ_OF_judge       := \
    harness/run/judge.c \
    harness/base/terminal.c $(FUZZ_CASE) $(FUZZ_READ) \
    $(addprefix ref/vocabulary/,problem.c tensors.c design.c formats.c)
FUZZ_OF_meeting     := \
    $(addprefix harness/mpi/,guests.c meet.c by_tcp.c) ref/vocabulary/text.c

FUZZ_PROGRAMS := $(FUZZ_TARGETS:%=$(BUILD)/fuzz_%)
FUZZ_FAST     := $(FUZZ_TARGETS:%=$(FUZZ_DIR)/bulk_%) $(FUZZ_DIR)/bulk_faults
FUZZ_COVERED  := $(FUZZ_TARGETS:%=$(FUZZ_DIR)/cover_%)
FUZZ_LINK      = $(BUILD)/libref.a $(GPU_LIB) $(LIBS) $(GPU_LDLIBS) -lgomp
FUZZ_TOOLS    := $(patsubst clang%,%,$(notdir $(FUZZ_CC)))
.SECONDEXPANSION:
$(FUZZ_PROGRAMS): $(BUILD)/fuzz_%: harness/fuzz/fuzz_%.c harness/fuzz/mutate.c \
    harness/fuzz/mutate.h $$(FUZZ_OF_$$*) $(BUILD)/libref.a $(GPU_LIB)
	@test -n "$(FUZZ_CC)" || { echo "make fuzz needs clang: apt-get install clang"; exit 2; }
	@mkdir -p $(FUZZ_DIR)
	$(FUZZ_CC) -I. $(CPPFLAGS) $(FUZZ_CFLAGS) $(FUZZ_SAN) -c harness/fuzz/mutate.c \
	    -o $(FUZZ_DIR)/$*.mutate.o
	$(FUZZ_CC) -I. $(CPPFLAGS) $(FUZZ_CFLAGS) $(FUZZ_SAN) -fsanitize=fuzzer $(FUZZ_OF_$*) $< \
	    $(FUZZ_DIR)/$*.mutate.o $(FUZZ_LINK) -o $@
FUZZ_MAIN = harness/fuzz/$(if $(filter faults,$(1)),faults,fuzz_$(1)).c
$(FUZZ_FAST): $(FUZZ_DIR)/bulk_%: $$(call FUZZ_MAIN,$$*) harness/fuzz/mutate.c \
    harness/fuzz/guards.c harness/fuzz/mutate.h $$(FUZZ_OF_$$*) $(BUILD)/libref.a $(GPU_LIB)
	@test -n "$(FUZZ_CC)" || { echo "make fuzz-bulk needs clang: apt-get install clang"; exit 2; }
	@mkdir -p $(FUZZ_DIR)
	$(FUZZ_CC) -I. $(CPPFLAGS) $(FUZZ_CFLAGS) -c harness/fuzz/mutate.c -o $(FUZZ_DIR)/$*.bulk.mutate.o
	$(FUZZ_CC) -I. $(CPPFLAGS) $(FUZZ_CFLAGS) -c harness/fuzz/guards.c -o $(FUZZ_DIR)/$*.guards.o
	$(FUZZ_CC) -I. $(CPPFLAGS) $(FUZZ_CFLAGS) $(FUZZ_TRAP) -fsanitize=fuzzer \
	    -fno-sanitize-coverage=trace-cmp $(FUZZ_OF_$*) $(call FUZZ_MAIN,$*) \
	    $(FUZZ_DIR)/$*.bulk.mutate.o $(FUZZ_DIR)/$*.guards.o \
	  -Wl,--as-needed -Wl,--wrap=LLVMFuzzerTestOneInput $(FUZZ_LINK) -o $@
$(FUZZ_COVERED): $(FUZZ_DIR)/cover_%: harness/fuzz/fuzz_%.c harness/fuzz/mutate.c $$(FUZZ_OF_$$*) \
    $(BUILD)/libref.a $(GPU_LIB)
	@mkdir -p $(FUZZ_DIR)
	$(FUZZ_CC) -I. $(CPPFLAGS) $(FUZZ_CFLAGS) -fprofile-instr-generate -fcoverage-mapping \
	    -fsanitize=fuzzer $(FUZZ_OF_$*) $< harness/fuzz/mutate.c $(FUZZ_LINK) -o $@

# The targets without libFuzzer, for make test.
FUZZ_REPLAY := $(BUILD)/fuzz-replay
$(BUILD)/harness/fuzz/replay_%.o: harness/fuzz/fuzz_%.c harness/fuzz/mutate.h $(BUILD)/flags
	@mkdir -p $(@D)
	$(CC) $(CPP_ALL) $(C_ALL) -DLLVMFuzzerTestOneInput=fuzz_$* -DLLVMFuzzerCustomMutator=mutator_$* \
	    -c $< -o $@
$(FUZZ_REPLAY): $(addprefix $(BUILD)/harness/fuzz/,replay.o mutate.o $(FUZZ_TARGETS:%=replay_%.o)) \
    $(BUILD)/libref.a $(GPU_LIB)
	$(CC) $(C_ALL) $(LDFLAGS) $^ $(LIBS) $(GPU_LDLIBS) -o $@

# Real files: every case of the project, inputs as the program writes them, outputs with the
# metadata that other programs write, records of runs.
$(FUZZ_DIR)/seeds: harness/fuzz/seeds $(PROGRAM) $(wildcard $(CASES)/*.case)
	harness/fuzz/seeds "$$(cat $(BASE)/python 2>/dev/null || echo python3)" $(PROGRAM) $(CASES) $@

fuzz_inputs = $(FUZZ_DIR)/$(1) $(FUZZ_DIR)/seeds/$(1) harness/fuzz/corpus/$(1)

.PHONY: fuzz fuzz-bulk fuzz-coverage
fuzz-bulk: $(FUZZ_FAST) $(FUZZ_PROGRAMS) $(FUZZ_DIR)/seeds
	@harness/fuzz/bulk $(BUILD) $(FUZZ_BULK) $(FUZZ_SHARE) $(FUZZ_JOBS) \
	    judge safetensors case meeting
fuzz:                          ## libFuzzer on all that is read (clang; FUZZ_SECONDS=60 each)
fuzz: $(FUZZ_PROGRAMS) $(FUZZ_DIR)/seeds
	@mkdir -p $(FUZZ_TARGETS:%=$(FUZZ_DIR)/%)
	@$(foreach t,$(FUZZ_TARGETS),echo "== $(t)"; \
	    ASAN_OPTIONS=detect_odr_violation=0:malloc_context_size=3:quarantine_size_mb=2 \
	  $(BUILD)/fuzz_$(t) -max_total_time=$(FUZZ_SECONDS) -runs=$(FUZZ_RUNS) -max_len=$(FUZZ_LEN) \
	    -timeout=20 -artifact_prefix=$(FUZZ_DIR)/ -print_final_stats=1 \
	    $(if $(filter case,$(t)),-dict=harness/fuzz/case.dict) $(call fuzz_inputs,$(t)) \
	    2>$(FUZZ_DIR)/$(t).log || { tail -n 40 $(FUZZ_DIR)/$(t).log; exit 1; }; \
	  grep -hE 'inline 8-bit counters|DONE|number_of_executed_units' $(FUZZ_DIR)/$(t).log;) true

fuzz-coverage: $(FUZZ_COVERED) $(FUZZ_DIR)/seeds
	@mkdir -p $(FUZZ_TARGETS:%=$(FUZZ_DIR)/%)
	@$(foreach t,$(FUZZ_TARGETS),echo "== $(t)"; \
	  LLVM_PROFILE_FILE=$(FUZZ_DIR)/$(t).profraw \
	    $(FUZZ_DIR)/cover_$(t) -runs=0 -max_len=$(FUZZ_LEN) $(call fuzz_inputs,$(t)) 2>/dev/null && \
	  llvm-profdata$(FUZZ_TOOLS) merge -sparse $(FUZZ_DIR)/$(t).profraw \
	    -o $(FUZZ_DIR)/$(t).profdata && \
	  llvm-cov$(FUZZ_TOOLS) report $(FUZZ_DIR)/cover_$(t) -instr-profile=$(FUZZ_DIR)/$(t).profdata \
	  $(FUZZ_OF_$(t)) || exit 1;) true

# For a machine without a compiler: the fuzzers, what ldd names but the C library, all inputs, and
# fuzz.sh, which runs them side by side.
.PHONY: fuzz-pack
fuzz-pack: $(FUZZ_PROGRAMS) $(FUZZ_DIR)/seeds
	harness/fuzz/pack $(BUILD) $(FUZZ_DIR).tzst $(FUZZ_TARGETS)

.PHONY: fuzz-report
fuzz-report: $(FUZZ_DIR)/seeds       ## 10,000,000 executions of the report's reader of records
	"$$(cat $(BASE)/python)" -B harness/fuzz/bulk_report.py $(FUZZ_BULK) --jobs $(FUZZ_JOBS) \
	  --seeds $(FUZZ_DIR)/seeds/record --keep $(FUZZ_DIR)/report
