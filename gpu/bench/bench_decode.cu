/* gpu/bench/bench_decode.cu - the decode kernel (dp_decode.h): time of a call beside the time that
 * its bytes take.
 *
 *   bench_decode [RUNS [STATES [T [B]]]]
 *                          K = V = 128, 32 heads, lower-bound gate, sigmoid, norms in the kernel;
 *                          a gate a channel and, of one token, one a head (gdn); one token of B
 *                          requests, and windows of 4 and 8 tokens that keep every state; states of
 *                          all formats (all), larger than L2 where B >= 128, vk: [V][K]; STATES,
 *                          T, B alone
 *
 * Medians of RUNS (default 50) of a CUDA graph of CALLS calls on slots of their own, as far as ROOM
 * has them. A line: B T states us GB/s (bytes: states read and written, inputs, o). */
#include "../dp_decode.h"
#include "bench/bench.h"

enum { HEADS = 32, WIDTH = 128, CALLS = 8 };
static const double ROOM = 36e9; /* bytes of states */

struct States {
    const char *name;
    dpg_dtype type;
    dpg_packed packed;
    double bytes; /* of a number */
    dpg_state_layout layout;
};
static const States STATES[] = {{"fp32", DPG_F32, DPG_UNPACKED, 4},
                                {"bf16", DPG_BF16, DPG_UNPACKED, 2},
                                {"fp16", DPG_F16, DPG_UNPACKED, 2},
                                {"fp32vk", DPG_F32, DPG_UNPACKED, 4, DPG_STATE_VK},
                                {"bf16vk", DPG_BF16, DPG_UNPACKED, 2, DPG_STATE_VK},
                                {"fp16vk", DPG_F16, DPG_UNPACKED, 2, DPG_STATE_VK},
                                {"fp8", DPG_F32, DPG_E4M3, 1.125},
                                {"e5m2", DPG_F32, DPG_E5M2, 1.125},
                                {"int8", DPG_F32, DPG_INT8, 1.125},
                                {"int8ef", DPG_F32, DPG_INT8_FEEDBACK, 3.125},
                                {"fp16sr", DPG_F32, DPG_FP16_BY_CHANCE, 2}};

/* A call of B requests, T tokens. */
struct Serving {
    Memory m;
    dpg_decode d = {};
    dpg_decode_tensors t[CALLS] = {};
    double bytes = 0; /* of a call */

    Serving(int B, int T, int Kg, const States &kind) {
        const int64_t rows = (int64_t)B * T * HEADS, state = (int64_t)HEADS * WIDTH * WIDTH;
        const int kept = T, fit = (int)(ROOM / ((double)B * kept * state * kind.bytes));
        const int own = fit < 1 ? 1 : fit < CALLS ? fit : CALLS; /* calls with slots of their own */
        d.B = B;
        d.T = T;
        d.H = d.HV = HEADS;
        d.K = d.V = WIDTH;
        d.Kg = Kg;
        d.R = 1;
        d.scale = 0.088f;
        d.gate = DP_GATE_LOWER_BOUND;
        d.lower_bound = -5;
        d.beta_form = DP_BETA_SIGMOID;
        d.l2norm = 1;
        d.dtype = d.gdtype = d.odtype = DPG_BF16;
        d.sdtype = kind.type;
        d.packed = kind.packed;
        d.layout = kind.layout;
        d.slots = (int64_t)B * kept * own;
        d.kept = kept;
        std::vector<int32_t> slot((size_t)d.slots);
        for (size_t i = 0; i < slot.size(); i++)
            slot[i] = (int32_t)i;
        int32_t *index = (int32_t *)m.room(slot.size() * 4);
        CUDA(cudaMemcpy(index, slot.data(), slot.size() * 4, cudaMemcpyHostToDevice));
        const int64_t numbers = d.slots * state;
        void *states = kind.packed ? m.filled(DPG_PACKED_BYTES(kind.packed, numbers), 0)
                                   : random_words(m, numbers, 1, kind.type);
        float *bias = (float *)m.room(HEADS * WIDTH * 4), *A_log = (float *)m.filled(HEADS * 4, 0);
        constant<<<1, 256>>>(bias, HEADS * WIDTH, FAST);
        for (int i = 0; i < CALLS; i++) {
            auto in = [&](int64_t n, uint32_t seed) {
                return random_words(m, rows * n, 100 * i + seed, DPG_BF16);
            };
            t[i] = {in(WIDTH, 2), in(WIDTH, 3),
                    in(WIDTH, 4), in(Kg, 5),
                    in(1, 6),     A_log,
                    bias,         in(WIDTH, 7),
                    states,       index + (int64_t)(i % own) * B * kept,
                    NULL,         NULL};
        }
        bytes = (double)B * state * kind.bytes * (1 + kept) + 2.0 * rows * (4 * WIDTH + Kg + 1);
        CUDA(cudaDeviceSynchronize());
    }
    ~Serving() { m.release(); }
    Serving(const Serving &) = delete;
    void calls(cudaStream_t s) {
        dp_err e = {DP_OK, ""};
        for (int i = 0; i < CALLS; i++)
            DP(e, dpg_decode_run(&d, &t[i], s, &e));
    }
};

static void bench(int B, int T, int Kg, const States &kind, int runs) {
    Serving x(B, T, Kg, kind);
    cudaStream_t s;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA(cudaStreamCreate(&s));
    x.calls(s); /* outside of the capture: modules are loaded */
    CUDA(cudaStreamSynchronize(s));
    CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    x.calls(s);
    CUDA(cudaStreamEndCapture(s, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    for (const double until = seconds() + 0.05; seconds() < until;) { /* until clocks are up */
        CUDA(cudaGraphLaunch(exec, s));
        CUDA(cudaStreamSynchronize(s));
    }
    std::vector<float> ms =
        times_of(s, x.bytes > 2e9 ? (runs + 4) / 5 : runs, [&] { CUDA(cudaGraphLaunch(exec, s)); });
    const double us = 1e3 * median(ms) / CALLS;
    printf("decode%s B=%d T=%d states %s %.2f us %.0f GB/s\n", Kg == 1 ? " gdn" : "", B, T,
           kind.name, us, 1e-3 * x.bytes / us);
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaStreamDestroy(s));
}

int main(int argc, char **argv) {
    const int runs = argc > 1 ? atoi(argv[1]) : 50;
    devices("bench_decode");
    for (const States &kind : STATES) {
        if (argc > 2 && strcmp(argv[2], kind.name) && strcmp(argv[2], "all")) continue;
        for (int T : {1, 4, 8})
            for (int B : {1, 8, 32, 128, 256, 1024})
                for (int Kg : {(int)WIDTH, 1})
                    if ((T == 1 || Kg > 1) && (argc < 4 || T == atoi(argv[3])) &&
                        (argc < 5 || B == atoi(argv[4])))
                        bench(B, T, Kg, kind, runs);
    }
    return 0;
}
