/* The part of the driver's API that the kernels' hosts call: maps of tensors for copies of tiles
 * (fast/maps.cu). A map is what instructions.cuh reads here, not NVIDIA's. */
#ifndef CPU_CUDA_H
#define CPU_CUDA_H
#include <stdint.h>

typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
typedef int CUresult;
struct CUtensorMap {
    char *at;
    cuuint64_t size[3], stride[2]; /* numbers; bytes */
    cuuint32_t box[3];
};
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_32B, CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

/* Refuses what the driver does: addresses and strides that are no multiples of 16 bytes. */
extern "C" {
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType, cuuint32_t rank, void *x,
                                const cuuint64_t *size, const cuuint64_t *stride,
                                const cuuint32_t *box, const cuuint32_t *step,
                                CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill);
}
#endif
