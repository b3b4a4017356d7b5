/* gpu/abi/abi.cu - the library as others load it (dp_abi.h). */
#include "dp_abi.h"
#include "plan/status.cuh"
#include <string.h>

#define SIZE_OF(type) \
    { #type, sizeof(type) }
static const struct {
    const char *name;
    size_t size;
} sizes[] = {SIZE_OF(dp_err),           SIZE_OF(dpg_problem),
             SIZE_OF(dpg_options),      SIZE_OF(dpg_tensors),
             SIZE_OF(dpg_grads),        SIZE_OF(dpg_decode),
             SIZE_OF(dpg_decode_conv),  SIZE_OF(dpg_decode_tensors),
             SIZE_OF(dpg_conv_problem), SIZE_OF(dpg_conv_tensors),
             SIZE_OF(dpg_comm)};

size_t dpg_size_of(const char *name) {
    for (const auto &x : sizes)
        if (!strcmp(x.name, name)) return x.size;
    return 0;
}

dp_status dpg_use_device(int device, dp_err *e) {
    CK(e, cudaSetDevice(device));
    return DP_OK;
}
