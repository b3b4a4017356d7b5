# harness/mpi/mpi.mk - the program with MPI (any that has an mpicc). MPI=1: the program itself; else
# only the tests build one, beside it, where there is an mpicc. SAN=1 leaves it out: MPI libraries
# leak.
MPI         ?= 0
MPICC       ?= mpicc
# Looked for when it is used: `make test` may have installed it by then.
HAVE_MPICC   = $(if $(filter 0,$(SAN)),$(shell command -v $(MPICC) 2>/dev/null))
USE_MPICC    = OMPI_CC='$(CC)' MPICH_CC='$(CC)' $(MPICC)
MPI_OBJ     := $(BUILD)/mpi/processes.o $(BUILD)/mpi/by_mpi.o
MPI_LINKED  := $(if $(filter 1,$(MPI)),$(MPI_OBJ))
MPI_PROGRAM  = $(if $(HAVE_MPICC),$(BUILD)/mpi/deltaproof)
# With the kernels on the CPU (gpu/tests/cpu).
MPI_KERNELS  = $(if $(HAVE_MPICC),$(BUILD)/mpi/kernels)

$(MPI_OBJ): $(BUILD)/mpi/%.o: harness/mpi/%.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(USE_MPICC) $(CPP_ALL) $(C_ALL) -DDP_HAVE_MPI -c $< -o $@
$(BUILD)/mpi/deltaproof: $(BUILD)/harness/commands/main.o $(MPI_OBJ) \
    $(BUILD)/libref.a $(GPU_LIB)
	$(USE_MPICC) $(C_ALL) $(LDFLAGS) $^ $(LIBS) $(GPU_LDLIBS) -o $@
$(BUILD)/mpi/kernels: $(BUILD)/harness/commands/main.o $(CPU_OBJ) $(MPI_OBJ) $(BUILD)/libref.a
	$(USE_MPICC) -fopenmp $(LDFLAGS) $^ $(LIBS) -lstdc++ -ldl -o $@
