# gpu/gpu.mk - the CUDA part. Included by the Makefile; without nvcc GPU_LIB and GPU_PROGS are empty and nothing here is built.
NVCC         ?= nvcc
NVCC_GENCODE ?= -gencode arch=compute_90a,code=sm_90a
NVCCFLAGS    ?= -O3 -lineinfo
HAVE_NVCC    := $(shell command -v $(NVCC) 2>/dev/null)
ifneq ($(HAVE_NVCC),)
CUDA_HOME    ?= $(abspath $(dir $(HAVE_NVCC))/..)
GPU_SRC      := $(filter-out $(wildcard gpu/tests/*.cu gpu/bench/*.cu),$(wildcard gpu/*/*.cu))
GPU_HDR      := $(wildcard gpu/*.h gpu/*.cuh gpu/*/*.cuh gpu/tests/*.h) ref/problem.h ref/formats.h ref/conv.h ref/inputs.h ref/truth_dd.h
GPU_LIB      := $(BUILD)/gpu/libdpgpu.a
GPU_PROGS    := $(BUILD)/gpu/test_gpu $(BUILD)/gpu/test_gpu_bwd $(BUILD)/gpu/bench_gpu $(BUILD)/gpu/test_gpu_conv $(BUILD)/gpu/test_fast_bwd $(BUILD)/gpu/bench_bwd $(BUILD)/gpu/test_kill $(BUILD)/gpu/test_procs
GPU_LDLIBS   := -L$(CUDA_HOME)/lib64 -lcudart_static -lstdc++ -ldl -lrt -lpthread

$(BUILD)/gpu/%.o: gpu/%.cu $(GPU_HDR)
	@mkdir -p $(@D)
	$(NVCC) -std=c++17 -Igpu $(NVCC_GENCODE) $(NVCCFLAGS) -Xcompiler -Wall,-Wextra,-Wno-missing-field-initializers -c $< -o $@
# NVCCFLAGS='-O3 -DDP_KERNEL_FAULTS': kernels with the faults of fault.cuh, to be switched on by DPG_FAULT=NAME or `deltaproof museum --kernels`.
$(BUILD)/gpu/faults.o: gpu/tests/faults.cc gpu/fault.cuh
	$(CXX) -O1 -DDP_KERNEL_FAULTS -DDPG_FAULTS_OF_DEVICE -c $< -o $@
$(GPU_LIB): $(patsubst gpu/%.cu,$(BUILD)/gpu/%.o,$(GPU_SRC)) $(if $(findstring -DDP_KERNEL_FAULTS,$(NVCCFLAGS)),$(BUILD)/gpu/faults.o)
	@rm -f $@
	$(AR) rcs $@ $^
$(BUILD)/gpu/test_gpu: $(BUILD)/gpu/tests/test_gpu.o $(GPU_LIB)
	$(NVCC) $(NVCC_GENCODE) $^ -ldl -lpthread -o $@
$(BUILD)/gpu/test_gpu_bwd: $(BUILD)/gpu/tests/test_gpu_bwd.o $(GPU_LIB)
	$(NVCC) $(NVCC_GENCODE) $^ -ldl -lpthread -o $@
$(BUILD)/gpu/test_kill $(BUILD)/gpu/test_procs: $(BUILD)/gpu/%: $(BUILD)/gpu/tests/%.o $(GPU_LIB)
	$(NVCC) $(NVCC_GENCODE) $^ -ldl -lpthread -o $@
$(BUILD)/gpu/bench_gpu: $(BUILD)/gpu/bench/bench_gpu.o $(GPU_LIB)
	$(NVCC) $(NVCC_GENCODE) $^ -ldl -lpthread -o $@
$(BUILD)/gpu/test_gpu_conv $(BUILD)/gpu/test_fast_bwd: $(BUILD)/gpu/%: $(BUILD)/gpu/tests/%.o $(GPU_LIB) $(BUILD)/libref.a
	$(CXX) -fopenmp $(LDFLAGS) $< $(BUILD)/libref.a $(GPU_LIB) $(LIBS) $(GPU_LDLIBS) -o $@
$(BUILD)/gpu/bench_bwd: $(BUILD)/gpu/bench/bench_bwd.o $(GPU_LIB)
	$(NVCC) $(NVCC_GENCODE) $^ -ldl -lpthread -o $@
endif
