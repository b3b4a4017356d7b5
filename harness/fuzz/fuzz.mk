# make fuzz [FUZZ_SECONDS=60]: libFuzzer on the safetensors reader, the case reader and the inputs of judge. Needs clang; without it says so and fails.
FUZZ_CC      ?= $(firstword $(shell command -v clang-14 clang-15 clang-16 clang-18 clang 2>/dev/null))
FUZZ_SECONDS ?= 60
FUZZ_FLAGS   := -std=gnu11 -O1 -g -ffp-contract=off -Wno-unknown-pragmas -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined
FUZZ_REF     := ref/safetensors.c ref/output.c ref/formats.c ref/problem.c
FUZZ_CASE    := $(FUZZ_REF) harness/case.c harness/casefile.c ref/inputs.c ref/inputs_exact.c ref/conv.c ref/context.c

# What the readers call beyond themselves (a training step's convolutions) comes from the library as it is.
$(BUILD)/fuzz_safetensors: harness/fuzz/fuzz_safetensors.c $(FUZZ_REF)
$(BUILD)/fuzz_case: harness/fuzz/fuzz_case.c $(FUZZ_CASE) $(BUILD)/libref.a $(GPU_LIB)
$(BUILD)/fuzz_judge: harness/fuzz/fuzz_judge.c $(FUZZ_CASE) $(BUILD)/libref.a $(GPU_LIB)
$(BUILD)/fuzz_safetensors $(BUILD)/fuzz_case $(BUILD)/fuzz_judge:
	@test -n "$(FUZZ_CC)" || { echo "make fuzz needs clang: apt-get install clang"; exit 2; }
	@mkdir -p $(@D)
	$(FUZZ_CC) $(CPPFLAGS) $(FUZZ_FLAGS) $^ $(LIBS) $(GPU_LDLIBS) -lgomp -o $@

.PHONY: fuzz
fuzz: $(BUILD)/fuzz_safetensors $(BUILD)/fuzz_case $(BUILD)/fuzz_judge       ## libFuzzer on what is read: safetensors, case files, inputs of judge (clang; FUZZ_SECONDS=60 each)
	@mkdir -p $(BUILD)/fuzz/safetensors $(BUILD)/fuzz/case $(BUILD)/fuzz/judge
	$(BUILD)/fuzz_safetensors -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -artifact_prefix=$(BUILD)/fuzz/ $(BUILD)/fuzz/safetensors harness/fuzz/corpus/safetensors
	$(BUILD)/fuzz_case -max_total_time=$(FUZZ_SECONDS) -max_len=2048 -artifact_prefix=$(BUILD)/fuzz/ -dict=harness/fuzz/case.dict $(BUILD)/fuzz/case harness/fuzz/corpus/case
	$(BUILD)/fuzz_judge -max_total_time=$(FUZZ_SECONDS) -max_len=2048 -artifact_prefix=$(BUILD)/fuzz/ $(BUILD)/fuzz/judge harness/fuzz/corpus/judge
