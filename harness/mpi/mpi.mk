# harness/mpi/mpi.mk - the program with MPI (any that has an mpicc). MPI=1: the program itself; else
# only the tests build one, beside it, where there is an mpicc. SAN=1 leaves it out: MPI libraries
# leak.
MPI         ?= 0
MPICC       ?= mpicc
# Looked for when it is used: `make test` may have installed it by then.
HAVE_MPICC   = $(if $(filter 0,$(SAN)),$(shell command -v $(MPICC) 2>/dev/null))
USE_MPICC    = OMPI_CC='$(CC)' MPICH_CC='$(CC)' $(MPICC)
MPI_LINKED  := $(if $(filter 1,$(MPI)),$(BUILD)/mpi/processes.o)
MPI_PROGRAM  = $(if $(HAVE_MPICC),$(BUILD)/mpi/deltaproof)

$(BUILD)/mpi/processes.o: harness/mpi/processes.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(USE_MPICC) $(CPP_ALL) $(C_ALL) -DDP_HAVE_MPI -c $< -o $@
$(BUILD)/mpi/deltaproof: $(BUILD)/harness/commands/main.o $(BUILD)/mpi/processes.o \
    $(BUILD)/libref.a $(GPU_LIB)
	$(USE_MPICC) $(C_ALL) $(LDFLAGS) $^ $(LIBS) $(GPU_LDLIBS) -o $@
