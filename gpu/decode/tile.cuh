/* gpu/decode/tile.cuh - columns of a state in the registers of a block of eight warps, and what a
 * token does with them. */
#ifndef DPG_TILE_CUH
#define DPG_TILE_CUH
#include "decode/inputs.cuh"

#define DECODE_WARPS 8
#define THREADS (32 * DECODE_WARPS)
#define GROUPS (THREADS / 8)

#ifdef __CUDACC__
/* Which numbers of C columns a thread has: some rows of COLS columns. A warp has the groups of a
 * term, a lane EACH of them. */
template <int K, int C> struct Place {
    static constexpr int LANES = C / COLS, EACH = LANES / 8; /* LANES: of a row */
    static constexpr int ROWS = K / GROUPS * EACH, QUAD = ROWS < 4 ? ROWS : 4;
    static_assert(ROWS > 0 && (EACH == 1 || EACH == 4), "columns of a thread");

    static __device__ int row(int i) {
        const int quad = i / QUAD;
        return QUAD * (threadIdx.x / LANES * EACH + quad % EACH + GROUPS * (quad / EACH)) +
               i % QUAD;
    }
    static __device__ int col(int j) { return COLS * (threadIdx.x % LANES) + j; }
    /* A thread's rows of a vector in shared memory. */
    static __device__ void rows(const float *x, float *y) {
#pragma unroll
        for (int i = 0; i < ROWS; i += QUAD)
            copy<4 * QUAD>(y + i, x + row(i));
    }
};

/* Terms of the sums of a block's columns. */
template <int C> struct alignas(16) Terms { float of[8][C]; };

/* A term of the sums over rows of a thread's columns. */
template <int C> static __device__ __forceinline__ void add_lanes(float y[COLS], Terms<C> &terms) {
    constexpr int LANES = C / COLS;
#pragma unroll
    for (int m = LANES; m <= 16; m *= 2)
#pragma unroll
        for (int n = 0; n < COLS; n++)
            y[n] += __shfl_xor_sync(~0u, y[n], m);
    if (threadIdx.x % 32 < LANES)
        copy<4 * COLS>(&terms.of[threadIdx.x / 32][COLS * (threadIdx.x % LANES)], y);
}
/* The rest of N neighbours from column `first` on, behind a barrier of the block. */
template <int N, int C>
static __device__ __forceinline__ void add_terms(float y[N], const Terms<C> &terms, int first) {
    alignas(16) float x[8][N];
#pragma unroll
    for (int i = 0; i < 8; i++)
        copy<4 * N>(x[i], &terms.of[i][first]);
#pragma unroll
    for (int n = 0; n < N; n++)
        y[n] = ((x[0][n] + x[1][n]) + (x[2][n] + x[3][n])) +
               ((x[4][n] + x[5][n]) + (x[6][n] + x[7][n]));
}

template <class P, int R, bool LEFT> struct Tile {
    alignas(16) float s[P::ROWS][COLS];
    alignas(16) uint32_t left[LEFT ? P::ROWS : 1][COLS / 2];

    /* first: column of the tile in a state of V. */
    template <int FORM> __device__ __forceinline__ void load(const HeadAt &from, int V, int first) {
#pragma unroll
        for (int i = 0; i < P::ROWS; i++) {
            const int at = P::row(i) * V + first + P::col(0);
            get_raw<FORM, COLS>(from, at, s[i]);
            if constexpr (FORM == IN_INT8_LEFT) copy<2 * COLS>(left[i], from.left(at));
        }
    }
    template <int FORM> __device__ __forceinline__ void open() {
#pragma unroll
        for (int i = 0; i < P::ROWS; i++)
            open_raw<FORM, COLS>(s[i]);
    }
    template <int FORM>
    __device__ __forceinline__ void store(const HeadAt &to, int V, int first) const {
#pragma unroll
        for (int i = 0; i < P::ROWS; i++)
            put_numbers<FORM, COLS>(to, P::row(i) * V + first + P::col(0), s[i],
                                    left[LEFT ? i : 0]);
    }

    /* x s to the sum of its group; the sums of a lane's groups, two by two. */
    using Sums = float[P::EACH][COLS];
    static __device__ __forceinline__ void add(Sums &sums, int i, int j, float x, float s) {
        float &sum = sums[i / P::QUAD % P::EACH][j];
        sum = fmaf(x, s, i % P::QUAD || i / P::QUAD >= P::EACH ? sum : 0.f);
    }
    static __device__ __forceinline__ void end(const Sums &sums, float y[COLS]) {
#pragma unroll
        for (int j = 0; j < COLS; j++) {
            y[j] = sums[0][j];
            if constexpr (P::EACH == 4)
                y[j] = (sums[0][j] + sums[1][j]) + (sums[2][j] + sums[3][j]);
        }
    }
    /* S <- diag(decay) S; a thread's share of k S. */
    template <class In> __device__ __forceinline__ void decay(const In &in, float y[R][COLS]) {
        alignas(16) float d[P::ROWS], k[R][P::ROWS];
        Sums sums[R];
        P::rows(in.decay, d);
        for (int r = 0; r < R; r++)
            P::rows(in.of[1 + r], k[r]);
#pragma unroll
        for (int i = 0; i < P::ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLS; j++) {
                s[i][j] *= d[i];
                for (int r = 0; r < R; r++)
                    add(sums[r], i, j, k[r][i], s[i][j]);
            }
        for (int r = 0; r < R; r++)
            end(sums[r], y[r]);
    }
    /* S += k' w; its share of S' q. */
    template <class In>
    __device__ __forceinline__ void write(const In &in, const float w[R][COLS], float y[COLS]) {
        alignas(16) float q[P::ROWS], k[R][P::ROWS];
        Sums sums;
        P::rows(in.of[0], q);
        for (int r = 0; r < R; r++)
            P::rows(in.of[1 + r], k[r]);
#pragma unroll
        for (int i = 0; i < P::ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLS; j++) {
                for (int r = 0; r < R; r++)
                    s[i][j] = fmaf(k[r][i], w[r][j], s[i][j]);
                add(sums, i, j, q[i], s[i][j]);
            }
        end(sums, y);
    }
};
#endif
#endif
