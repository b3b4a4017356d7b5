/* gpu/decode/conv.cu - the causal convolution of a serving step on rows kept in slots
 * (dp_decode.h): a thread a request and channel, its last rows in registers. No shared memory. */
#include "conv/sigmoid.cuh"
#include "decode/slots.cuh"
#include "dp_decode.h"
#include "plan/values.cuh"

#define THREADS 128
#define WIDTH 8 /* at most */

__global__ void __launch_bounds__(THREADS) k_decode_conv(dpg_decode_conv c) {
    const int64_t x = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (x >= (int64_t)c.B * c.D) return;
    const int b = (int)(x / c.D), channel = (int)(x % c.D), old = c.W - 1;
    const Slots slots = {c.T, c.kept, c.slots, c.slot, c.accepted, c.length};
    const int64_t from = slots.read(slots.named(b));
    const int n = from < 0 ? 0 : slots.tokens(b), bf = c.dtype == DPG_BF16;
    float rows[WIDTH];
    for (int i = 0; i < old && n; i++)
        rows[i] = ldx(c.states, (from * c.D + channel) * old + i, c.sdtype == DPG_BF16);
    for (int t = 0; t < c.T; t++) {
        const int64_t at = ((int64_t)b * c.T + t) * c.D + channel;
        if (t >= n) {
            stx(c.y, at, bf, 0.f);
            continue;
        }
        float sum = c.bias ? c.bias[channel] : 0.f;
        rows[old] = ldx(c.x, at, bf);
        for (int i = 0; i < c.W; i++)
            sum = fmaf(c.w[(int64_t)channel * c.W + i], rows[i], sum);
        stx(c.y, at, bf, c.silu ? sum * sigmoid_f32(sum) : sum);
        for (int i = 0; i < old; i++)
            rows[i] = rows[i + 1];
        const int64_t to = slots.write(b, t, n);
        for (int i = 0; i < old && to >= 0; i++)
            stx(c.states, (to * c.D + channel) * old + i, c.sdtype == DPG_BF16, rows[i]);
    }
}

extern "C" dp_status dpg_decode_conv_run(const dpg_decode_conv *c, void *stream, dp_err *e) {
    const int64_t blocks = ((int64_t)c->B * c->D + THREADS - 1) / THREADS;
    const int kept = c->kept == 1 || c->kept == c->T;
    if (c->B < 0 || c->D < 1 || c->T < 1 || c->T > DPG_DECODE_TOKENS || c->W < 2 || c->W > WIDTH ||
        !kept || blocks > INT32_MAX)
        return dpg_fail(e, DP_EINPUT,
                        "dpg_decode_conv: B = %d, D = %d, T = %d, W = %d, kept = %d "
                        "(gpu/dp_decode.h says what is taken)",
                        c->B, c->D, c->T, c->W, c->kept);
    if (!c->x || !c->w || !c->y || !c->states || !c->slot)
        return dpg_fail(e, DP_EINPUT, "dpg_decode_conv: a tensor that every call needs is NULL");
    if (c->B == 0) return DP_OK;
    k_decode_conv<<<(unsigned)blocks, THREADS, 0, (cudaStream_t)stream>>>(*c);
    CK_LAUNCH(e, "k_decode_conv");
    return DP_OK;
}
