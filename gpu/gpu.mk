# gpu/gpu.mk - the CUDA part. Included by the Makefile; without nvcc GPU_LIB and GPU_PROGS are empty
# and nothing here is built.
#
# GPU_ARCHS: compute capabilities to build for, GPU_PTX: those whose PTX a driver may compile for
# others. By itself: the present devices' or 90a. The simple path runs from 75 on, the fast one from
# 80; 90a has the warpgroup products that make M of segments.
NVCC         ?= nvcc
NVCCFLAGS    ?= -O3 -lineinfo
HAVE_NVCC    := $(shell command -v $(NVCC) 2>/dev/null)
ifneq ($(HAVE_NVCC),)
CUDA_HOME    ?= $(abspath $(dir $(HAVE_NVCC))/..)
GPU_PRESENT  := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
    tr -d . | sort -u | sed 's/^90$$/90a/')
GPU_ARCHS    ?= $(or $(GPU_PRESENT),90a)
GPU_PTX      ?=
GPU_EVERY    := 75 80 86 87 89 90a 100 103 120
NVCC_GENCODE ?= $(foreach a,$(GPU_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
    $(foreach a,$(GPU_PTX),-gencode arch=compute_$(a),code=compute_$(a))
GPU_SRC      := $(filter-out $(wildcard gpu/tests/*.cu gpu/bench/*.cu),$(wildcard gpu/*/*.cu))
GPU_LIB      := $(BUILD)/gpu/libdpgpu.a
GPU_TESTS    := test_gpu test_gpu_bwd test_kill test_procs
# against ref/, harness/
GPU_REF_TESTS := test_arrays test_gpu_conv test_fast_bwd test_decode test_packed test_send
GPU_BENCH    := bench_bwd bench_decode bench_own bench_send bench_split
GPU_PROGS    := $(addprefix $(BUILD)/gpu/,$(GPU_TESTS) $(GPU_REF_TESTS) $(GPU_BENCH))
GPU_LDLIBS   := -L$(CUDA_HOME)/lib64 -lcudart_static -lstdc++ -ldl -lrt -lpthread

$(BUILD)/gpu/flags: FORCE
	$(call update,'$(NVCC) $(NVCC_GENCODE) $(NVCCFLAGS)')
$(BUILD)/gpu/%.o: gpu/%.cu $(BUILD)/gpu/flags
	@mkdir -p $(@D)
	$(NVCC) -std=c++17 -I. -Igpu $(NVCC_GENCODE) $(NVCCFLAGS) $(NVCC_ALSO) -MMD -MP -MT $@ -Xcompiler \
	    -fPIC,-Wall,-Wextra,-Wno-missing-field-initializers -c $< -o $@
# Laws of inputs have the bits of the host.
$(BUILD)/gpu/arrays/arrays.o $(BUILD)/gpu/tests/test_arrays.o: private NVCC_ALSO := -fmad=false
# NVCCFLAGS='-O3 -DDP_KERNEL_FAULTS': kernels with the faults of fault.cuh, to be switched on by
# DPG_FAULT=NAME or `deltaproof museum --kernels`.
$(BUILD)/gpu/faults.o: gpu/tests/faults.cc gpu/fault.cuh
	$(CXX) -O1 -DDP_KERNEL_FAULTS -DDPG_FAULTS_OF_DEVICE -c $< -o $@
# ops/: plans need it, and libref.a stands before this archive where programs are linked.
$(GPU_LIB): $(patsubst gpu/%.cu,$(BUILD)/gpu/%.o,$(GPU_SRC)) \
    $(addprefix $(BUILD)/ops/,recurrence.o segments.o) \
    $(if $(findstring -DDP_KERNEL_FAULTS,$(NVCCFLAGS)),$(BUILD)/gpu/faults.o)
	@rm -f $@
	$(AR) rcs $@ $^
$(addprefix $(BUILD)/gpu/,$(GPU_TESTS)): $(BUILD)/gpu/%: $(BUILD)/gpu/tests/%.o $(GPU_LIB) \
    $(BUILD)/ref/vocabulary/exchange.o
	$(NVCC) $(NVCC_GENCODE) $^ -ldl -lpthread -o $@
$(addprefix $(BUILD)/gpu/,$(GPU_BENCH)): $(BUILD)/gpu/%: $(BUILD)/gpu/bench/%.o $(GPU_LIB) \
    $(BUILD)/ref/vocabulary/own.o $(BUILD)/ref/vocabulary/exchange.o
	$(NVCC) $(NVCC_GENCODE) $^ -ldl -lpthread -o $@
$(addprefix $(BUILD)/gpu/,$(GPU_REF_TESTS)): $(BUILD)/gpu/%: $(BUILD)/gpu/tests/%.o $(GPU_LIB) \
    $(BUILD)/libref.a
	$(CXX) -fopenmp $(LDFLAGS) $< -Wl,--start-group $(BUILD)/libref.a $(GPU_LIB) -Wl,--end-group \
	    $(LIBS) $(GPU_LDLIBS) -o $@

.PHONY: gpu-archs
gpu-archs:                     ## the CUDA library for all that nvcc knows, and PTX of 80 and 120
	+@$(MAKE) --no-print-directory $(if $(filter -j% --jobserver%,$(MAKEFLAGS)),,-j$(JOBS)) \
	    BUILD=$(BASE)/archs GPU_ARCHS='$(GPU_EVERY)' GPU_PTX='80 120' $(BASE)/archs/gpu/libdpgpu.a
endif
