/* ref/vocabulary/linkage.h - around declarations that C++ reads, too: they are of C. */
#pragma once

#ifdef __cplusplus
#define DP_C_BEGIN extern "C" {
#define DP_C_END }
#else
#define DP_C_BEGIN
#define DP_C_END
#endif
