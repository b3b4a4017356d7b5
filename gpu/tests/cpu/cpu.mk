# gpu/tests/cpu/cpu.mk - the program with its CUDA kernels translated to run on the CPU (cpu.cc),
# for tests without a device. Needs no nvcc. Its fibers and the address sanitizer do not go
# together: SAN=1 leaves it out, and its tests skip.
CPU_DIRS    := plan simple token fast chain exchange conv decode truth arrays abi
CPU_KERNELS := $(basename $(foreach d,$(CPU_DIRS),$(patsubst gpu/%,%,$(wildcard gpu/$(d)/*.cu))))
# The compiler may use this machine's fma and vectors: nothing is contracted, so no bit depends on
# them. A wheel's library is built with CPU_ARCH= .
CPU_ARCH    ?= $(if $(shell grep -qw avx2 /proc/cpuinfo && grep -qw fma /proc/cpuinfo && \
    grep -qw bmi2 /proc/cpuinfo && echo 1),-march=x86-64-v3)
CPU_FLAGS   := $(CPU_ARCH) -O2 -fPIC -std=c++17 -ffp-contract=off -fno-strict-aliasing \
    -fno-extern-tls-init -Wall -Wno-unknown-pragmas -Wno-unused-variable -D__CUDACC__ \
    -Igpu/tests/cpu/include -I. -Igpu -Igpu/tests
# With the faults of gpu/fault.cuh, none switched on: `make museum` runs them.
CPU_FAULTY  := $(CPU_FLAGS) -DDP_KERNEL_FAULTS
# At -O2 templates of these take half as long again to compile, and tests run no faster.
$(addprefix $(BUILD)/cpu/,fast/%.o decode/%.o conv/%.o): CPU_FAULTY += -O1 -finline-small-functions
CPU_HDR     := $(wildcard gpu/*.h gpu/*.cuh gpu/*/*.cuh gpu/tests/*.h gpu/tests/cpu/*.h \
    gpu/tests/cpu/include/*) ref/vocabulary/problem.h ref/vocabulary/tensors.h \
    ref/vocabulary/formats.h $(addprefix ref/vocabulary/,exchange.h recurrence.h segments.h) \
    $(addprefix ref/chunk/,conv.h stages.h stages.inc) ref/truth/truth_dd.h \
    ref/vocabulary/memory.h \
    $(addprefix ref/inputs/,inputs_exact.h inputs_large.h rng.h)
DEVICE_OBJ  := $(patsubst harness/device/%.c,$(BUILD)/cpu/%.o,$(wildcard harness/device/*.c))
CPU_OBJ     := $(patsubst %,$(BUILD)/cpu/%.o,$(CPU_KERNELS) cpu faults) $(DEVICE_OBJ)
CPU_PROGRAM := $(BUILD)/cpu/deltaproof
CPU_TESTS   := $(BUILD)/cpu/test_segments $(BUILD)/cpu/test_split $(BUILD)/cpu/test_kill \
    $(BUILD)/cpu/test_procs $(BUILD)/cpu/test_decode $(BUILD)/cpu/test_packed \
    $(BUILD)/cpu/test_fast_bwd $(BUILD)/cpu/test_send $(BUILD)/cpu/test_arrays \
    $(BUILD)/cpu/libnccl.so.2

$(BUILD)/cpu/%.cc: gpu/%.cu gpu/tests/cpu/translate.py
	@mkdir -p $(@D)
	"$$(cat $(BASE)/python 2>/dev/null || echo python3)" gpu/tests/cpu/translate.py $< >$@.tmp && \
	    mv $@.tmp $@
$(BUILD)/cpu/%.o: $(BUILD)/cpu/%.cc $(CPU_HDR)
	@mkdir -p $(@D)
	$(CXX) $(CPU_FAULTY) -c $< -o $@
$(BUILD)/cpu/cpu.o: gpu/tests/cpu/cpu.cc $(CPU_HDR)
	@mkdir -p $(@D)
	$(CXX) $(CPU_FAULTY) -O3 -c $< -o $@
$(DEVICE_OBJ): $(BUILD)/cpu/%.o: harness/device/%.c $(CPU_HDR)
	@mkdir -p $(@D)
	$(CC) $(CPP_ALL) $(C_ALL) -DDP_HAVE_CUDA -Igpu/tests/cpu/include -c $< -o $@
$(BUILD)/cpu/faults.o: gpu/tests/faults.cc $(CPU_HDR)
	@mkdir -p $(@D)
	$(CXX) $(CPU_FAULTY) -c $< -o $@
$(CPU_PROGRAM): $(BUILD)/harness/commands/main.o $(CPU_OBJ) $(BUILD)/libref.a
	$(CXX) -fopenmp $(LDFLAGS) $^ $(LIBS) -ldl -o $@
$(BUILD)/cpu/test_segments.o $(BUILD)/cpu/test_split.o: $(BUILD)/cpu/%.o: gpu/tests/cpu/%.cc \
    $(CPU_HDR)
	@mkdir -p $(@D)
	$(CXX) $(CPU_FAULTY) -c $< -o $@
$(BUILD)/cpu/test_segments $(BUILD)/cpu/test_split: %: %.o \
    $(filter-out $(DEVICE_OBJ),$(CPU_OBJ)) $(BUILD)/libref.a
	$(CXX) -fopenmp $(LDFLAGS) $^ $(LIBS) -ldl -o $@
$(BUILD)/cpu/test_%.cc: gpu/tests/test_%.cu gpu/tests/cpu/translate.py
	@mkdir -p $(@D)
	"$$(cat $(BASE)/python 2>/dev/null || echo python3)" gpu/tests/cpu/translate.py $< >$@.tmp && \
	    mv $@.tmp $@
$(BUILD)/cpu/test_decode $(BUILD)/cpu/test_packed $(BUILD)/cpu/test_fast_bwd \
    $(BUILD)/cpu/test_send $(BUILD)/cpu/test_arrays: %: %.o \
    $(filter-out $(DEVICE_OBJ),$(CPU_OBJ)) $(BUILD)/libref.a
	$(CXX) -fopenmp $(LDFLAGS) $^ $(LIBS) -ldl -o $@
# As programs with kernels alone are linked, and OPS_LIBS: without libref.a.
OPS_REF      := $(addprefix $(BUILD)/ops/,exchange.o recurrence.o segments.o)
$(BUILD)/cpu/test_kill $(BUILD)/cpu/test_procs: %: %.o \
    $(filter-out $(DEVICE_OBJ),$(CPU_OBJ)) $(OPS_REF)
	$(CXX) $(LDFLAGS) $^ -ldl -lpthread -o $@
$(BUILD)/cpu/libnccl.so.2: gpu/tests/cpu/nccl.cc gpu/tests/cpu/include/nccl.h
	@mkdir -p $(@D)
	$(CXX) -O2 -fPIC -shared -Wall -Igpu/tests/cpu/include $< -lpthread -o $@
.PRECIOUS: $(BUILD)/cpu/%.cc

# The kernels as libraries for others to load (gpu/dp_abi.h), without faults: OPS_LIBS, what
# `make ops` makes.
OPS_LINK     := -shared -Wl,-Bsymbolic,--version-script=gpu/ops.map,-z,defs
OPS_CPU_OBJ  := $(patsubst %,$(BUILD)/ops/cpu/%.o,$(CPU_KERNELS) cpu) $(OPS_REF)
OPS_LIBS     := $(BUILD)/ops/libdeltaproof_cpu.so \
    $(if $(GPU_LIB),$(BUILD)/ops/libdeltaproof_cuda.so)
$(BUILD)/ops/cpu/%.o: $(BUILD)/cpu/%.cc $(CPU_HDR)
	@mkdir -p $(@D)
	$(CXX) $(CPU_FLAGS) -c $< -o $@
$(BUILD)/ops/cpu/cpu.o: gpu/tests/cpu/cpu.cc $(CPU_HDR)
	@mkdir -p $(@D)
	$(CXX) $(CPU_FLAGS) -O3 -c $< -o $@
$(OPS_REF): $(BUILD)/ops/%.o: ref/vocabulary/%.c ref/vocabulary/%.h
	@mkdir -p $(@D)
	$(CC) $(CPP_ALL) $(C_ALL) -fPIC -c $< -o $@
$(BUILD)/ops/libdeltaproof_cpu.so: $(OPS_CPU_OBJ) gpu/ops.map
	$(CXX) $(OPS_LINK) $(LDFLAGS) $(OPS_CPU_OBJ) -ldl -lpthread -o $@
$(BUILD)/ops/libdeltaproof_cuda.so: $(GPU_LIB) $(BUILD)/ops/exchange.o gpu/ops.map
	$(CXX) $(OPS_LINK) $(LDFLAGS) -Wl,--whole-archive $(GPU_LIB) -Wl,--no-whole-archive \
	    $(BUILD)/ops/exchange.o $(GPU_LDLIBS) -o $@
