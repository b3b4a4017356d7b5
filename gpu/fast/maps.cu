/* gpu/fast/maps.cu - maps of tensors for the copy engine, made on the host and kept by the plan. */
#include "fast/maps.cuh"
#include <new>

struct RowMaps {
    const void *x[MAPPED];
    CUtensorMap map[MAPPED];
};

void maps_destroy(RowMaps *m) { delete m; }

/* The driver's own, which no library that is linked has. */
static decltype(&cuTensorMapEncodeTiled) encoder() {
    static const auto found = [] {
        void *at = NULL;
        cudaDriverEntryPointQueryResult how;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &at, 12000, cudaEnableDefault,
                                         &how);
        return (decltype(&cuTensorMapEncodeTiled))at;
    }();
    return found;
}

dp_status map_rows(const Call &c, CUtensorMap *map, MappedRows which, const void *x, int heads,
                   int width, int tokens, int columns) {
    RowMaps *&kept = c.p->maps;
    const cuuint64_t size[3] = {(cuuint64_t)width, (cuuint64_t)heads, (cuuint64_t)c.p->d.L};
    const cuuint64_t stride[2] = {(cuuint64_t)width * 2, (cuuint64_t)heads * width * 2};
    const cuuint32_t box[3] = {(cuuint32_t)columns, 1, (cuuint32_t)tokens}, step[3] = {1, 1, 1};
    if (!kept) kept = new (std::nothrow) RowMaps();
    if (!kept) return dpg_fail(c.e, DP_ENOMEM, "no memory for maps of tensors");
    if (kept->x[which] != x) {
        auto encode = encoder();
        if (!encode ||
            encode(&kept->map[which], CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void *)x, size, stride,
                   box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_32B,
                   CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
            return dpg_fail(c.e, DP_EDEVICE,
                            "the driver makes no map of a tensor of %lld tokens, %d heads of %d "
                            "channels at %p",
                            (long long)c.p->d.L, heads, width, x);
        kept->x[which] = x;
    }
    *map = kept->map[which];
    return DP_OK;
}
