# make fuzz [FUZZ_SECONDS=60] [FUZZ_RUNS=-1]: libFuzzer on what is read: safetensors, case files, all that judge reads, records. Needs clang;
# without it says so and fails. make fuzz-coverage: how much of the code under test the inputs found so far reach (llvm-cov).
FUZZ_CC      ?= $(firstword $(shell command -v clang-14 clang-15 clang-16 clang-18 clang 2>/dev/null))
FUZZ_SECONDS ?= 60
FUZZ_RUNS    ?= -1
FUZZ_TARGETS := safetensors case judge record
FUZZ_LEN     := 3072
FUZZ_CFLAGS  := -std=gnu11 -O2 -g -ffp-contract=off -Wall -Wextra -Wno-unknown-pragmas
FUZZ_SAN     := -fsanitize=address,undefined -fno-sanitize-recover=undefined
FUZZ_DIR     := $(BUILD)/fuzz

# The code under test: what these files read is checked in them. What they call beyond comes from the library as it is.
FUZZ_READ          := ref/files/safetensors.c ref/vocabulary/text.c ref/vocabulary/number.c
FUZZ_CASE          := $(wildcard harness/case/*.c)
FUZZ_OF_safetensors := $(FUZZ_READ) ref/files/output.c ref/files/input.c
FUZZ_OF_case        := $(FUZZ_CASE) $(FUZZ_READ) ref/inputs/inputs.c ref/inputs/inputs_exact.c ref/vocabulary/problem.c
FUZZ_OF_judge       := harness/run/judge.c $(FUZZ_CASE) $(FUZZ_READ)
FUZZ_OF_record      := harness/record/record_read.c harness/record/record_diff.c ref/vocabulary/text.c

FUZZ_PROGRAMS := $(FUZZ_TARGETS:%=$(BUILD)/fuzz_%)
FUZZ_COVERED  := $(FUZZ_TARGETS:%=$(FUZZ_DIR)/cover_%)
FUZZ_LINK      = $(BUILD)/libref.a $(GPU_LIB) $(LIBS) $(GPU_LDLIBS) -lgomp
FUZZ_TOOLS    := $(patsubst clang%,%,$(notdir $(FUZZ_CC)))
.SECONDEXPANSION:
$(FUZZ_PROGRAMS): $(BUILD)/fuzz_%: harness/fuzz/fuzz_%.c harness/fuzz/mutate.c harness/fuzz/mutate.h $$(FUZZ_OF_$$*) $(BUILD)/libref.a $(GPU_LIB)
	@test -n "$(FUZZ_CC)" || { echo "make fuzz needs clang: apt-get install clang"; exit 2; }
	@mkdir -p $(FUZZ_DIR)
	$(FUZZ_CC) -I. $(CPPFLAGS) $(FUZZ_CFLAGS) $(FUZZ_SAN) -c harness/fuzz/mutate.c -o $(FUZZ_DIR)/$*.mutate.o
	$(FUZZ_CC) -I. $(CPPFLAGS) $(FUZZ_CFLAGS) $(FUZZ_SAN) -fsanitize=fuzzer $(FUZZ_OF_$*) $< $(FUZZ_DIR)/$*.mutate.o $(FUZZ_LINK) -o $@
$(FUZZ_COVERED): $(FUZZ_DIR)/cover_%: harness/fuzz/fuzz_%.c harness/fuzz/mutate.c $$(FUZZ_OF_$$*) $(BUILD)/libref.a $(GPU_LIB)
	@mkdir -p $(FUZZ_DIR)
	$(FUZZ_CC) -I. $(CPPFLAGS) $(FUZZ_CFLAGS) -fprofile-instr-generate -fcoverage-mapping -fsanitize=fuzzer $(FUZZ_OF_$*) $< harness/fuzz/mutate.c $(FUZZ_LINK) -o $@

# Real files: every case of the project, inputs as the program writes them, outputs with the metadata that other programs write, records of runs.
$(FUZZ_DIR)/seeds: harness/fuzz/seeds $(PROGRAM) $(wildcard $(CASES)/*.case)
	harness/fuzz/seeds "$$(cat $(BASE)/python 2>/dev/null || echo python3)" $(PROGRAM) $(CASES) $@

fuzz_inputs = $(FUZZ_DIR)/$(1) $(FUZZ_DIR)/seeds/$(1) harness/fuzz/corpus/$(1)

.PHONY: fuzz fuzz-coverage
fuzz: $(FUZZ_PROGRAMS) $(FUZZ_DIR)/seeds       ## libFuzzer on what is read: safetensors, case files, all that judge reads, records (clang; FUZZ_SECONDS=60 each)
	@mkdir -p $(FUZZ_TARGETS:%=$(FUZZ_DIR)/%)
	@$(foreach t,$(FUZZ_TARGETS),echo "== $(t)"; ASAN_OPTIONS=detect_odr_violation=0:malloc_context_size=3:quarantine_size_mb=2 \
	  $(BUILD)/fuzz_$(t) -max_total_time=$(FUZZ_SECONDS) -runs=$(FUZZ_RUNS) -max_len=$(FUZZ_LEN) -timeout=20 -artifact_prefix=$(FUZZ_DIR)/ -print_final_stats=1 \
	  $(if $(filter case,$(t)),-dict=harness/fuzz/case.dict) $(call fuzz_inputs,$(t)) 2>$(FUZZ_DIR)/$(t).log || { tail -n 40 $(FUZZ_DIR)/$(t).log; exit 1; }; \
	  grep -hE 'inline 8-bit counters|DONE|number_of_executed_units' $(FUZZ_DIR)/$(t).log;) true

fuzz-coverage: $(FUZZ_COVERED) $(FUZZ_DIR)/seeds       ## what of the code under test the inputs reach that make fuzz has found (llvm-cov)
	@mkdir -p $(FUZZ_TARGETS:%=$(FUZZ_DIR)/%)
	@$(foreach t,$(FUZZ_TARGETS),echo "== $(t)"; LLVM_PROFILE_FILE=$(FUZZ_DIR)/$(t).profraw $(FUZZ_DIR)/cover_$(t) -runs=0 -max_len=$(FUZZ_LEN) $(call fuzz_inputs,$(t)) 2>/dev/null && \
	  llvm-profdata$(FUZZ_TOOLS) merge -sparse $(FUZZ_DIR)/$(t).profraw -o $(FUZZ_DIR)/$(t).profdata && \
	  llvm-cov$(FUZZ_TOOLS) report $(FUZZ_DIR)/cover_$(t) -instr-profile=$(FUZZ_DIR)/$(t).profdata $(FUZZ_OF_$(t)) || exit 1;) true

# For a machine without a compiler: the fuzzers, what ldd names but the C library, all inputs, and fuzz.sh, which runs them side by side.
.PHONY: fuzz-pack
fuzz-pack: $(FUZZ_PROGRAMS) $(FUZZ_DIR)/seeds       ## build/fuzz.tzst: the fuzzers with libraries and inputs, to be run elsewhere by the fuzz.sh in it
	harness/fuzz/pack $(BUILD) $(FUZZ_DIR).tzst $(FUZZ_TARGETS)
