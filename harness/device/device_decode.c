/* The decode kernels of gpu/ as a subject (device_run.h). */
#include "device_run.h"

#ifdef DP_HAVE_CUDA
#include "device_memory.h"
#include "gpu/dp_decode.h"
#include "ref/vocabulary/context.h"
#include "ref/vocabulary/stored.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The call as a batch: padded to T tokens a request. */
typedef struct {
    const dp_problem *p;
    const dp_state_pool *pool; /* NULL: slots of its own, `kept` for each request */
    int64_t before;            /* slots before those of the pool */
    int kept;                  /* row of PACKED; -1: states are fp32 */
    dp_device dev;
    dpg_decode d;
    dpg_decode_tensors t;
} batch;

static int longest(const dp_problem *p) {
    const int64_t most = dp_longest_sequence(p->cu, p->Nseq);
    return most > DPG_DECODE_TOKENS ? DPG_DECODE_TOKENS + 1 : (int)most;
}

int dp_cuda_decodes(const dp_problem *p, const dp_cuda_how *how, const dp_state_pool *pool) {
    const int T = longest(p) + (pool != NULL), keys = p->R == 1 || p->R == 2 || p->R == 4;
    const int rows = p->K == 32 || p->K == 64 || p->K == 128 || p->K == 256;
    return !dp_cuda_by_tokens(p) && how->backend == DP_BACKEND_CUDA &&
           how->variant == DP_CUDA_PLAIN && T >= 1 && T <= DPG_DECODE_TOKENS && rows && keys &&
           p->V % 32 == 0;
}

static int64_t of_request(const batch *b, int i) { return b->p->cu[i + 1] - b->p->cu[i]; }

/* Rows of tokens between packed sequences and requests of T tokens; what is padded stays as it is.
 */
static void to_batch(const batch *b, const double *x, int64_t width, double *y) {
    for (int i = 0; i < b->p->Nseq; i++)
        memcpy(y + (int64_t)i * b->d.T * width, x + b->p->cu[i] * width,
               sizeof *y * (size_t)(of_request(b, i) * width));
}

static void from_batch(const batch *b, const double *y, int64_t width, double *x) {
    for (int i = 0; i < b->p->Nseq; i++)
        memcpy(x + b->p->cu[i] * width, y + (int64_t)i * b->d.T * width,
               sizeof *x * (size_t)(of_request(b, i) * width));
}

static dp_status send_tokens(batch *b, dp_input_id id, dpg_dtype d, const void **dev) {
    const int64_t width = dp_input_width(b->p, id), n = (int64_t)b->p->Nseq * b->d.T * width;
    DP_OWN double *x = dp_doubles(n);
    for (int64_t i = 0; i < n; i++)
        x[i] = NAN; /* of padding nothing may be read */
    to_batch(b, dp_input_of(b->p, id), width, x);
    return dp_device_upload(&b->dev, x, n, d, dev);
}

static dp_status send_inputs(batch *b) {
    const struct {
        dp_input_id id;
        dpg_dtype d;
        const void **dev;
    } tokens[] = {{DP_INPUT_Q, b->d.dtype, &b->t.q},
                  {DP_INPUT_K, b->d.dtype, &b->t.k},
                  {DP_INPUT_V, b->d.dtype, &b->t.v},
                  {DP_INPUT_G, b->d.gdtype, &b->t.g},
                  {DP_INPUT_BETA, b->d.gdtype, &b->t.beta}};
    const dp_problem *p = b->p;
    dp_status st = DP_OK;
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens && !st; i++)
        st = send_tokens(b, tokens[i].id, tokens[i].d, tokens[i].dev);
    if (!st) st = dp_device_upload(&b->dev, p->A_log, p->HV, DPG_F32, (const void **)&b->t.A_log);
    if (!st)
        st = dp_device_upload(&b->dev, p->dt_bias, (int64_t)p->HV * b->d.Kg, DPG_F32,
                              (const void **)&b->t.dt_bias);
    if (!st)
        st = dp_device_blank(&b->dev, (int64_t)p->Nseq * b->d.T * p->HV * p->V, b->d.odtype,
                             &b->t.o);
    return st;
}

/* ---- states in short formats ----------------------------------------------------------------- */

static const struct {
    dp_format format;
    dpg_packed packed;
    dpg_dtype type;                 /* where it is not packed */
    int bits, fraction, bias, most; /* of a code; bias 0: an integer */
} PACKED[] = {{DP_BF16, DPG_UNPACKED, DPG_BF16, 16, 7, 127, 0x7f7f},
              {DP_FP16, DPG_UNPACKED, DPG_F16, 16, 10, 15, 0x7bff},
              {DP_E4M3_BLOCK, DPG_E4M3, DPG_F32, 8, 3, 7, 0x7e},
              {DP_E5M2_BLOCK, DPG_E5M2, DPG_F32, 8, 2, 15, 0x7b},
              {DP_INT8_BLOCK, DPG_INT8, DPG_F32, 8, 0, 0, 127},
              {DP_FP16SR, DPG_FP16_BY_CHANCE, DPG_F32, 16, 10, 15, 0x7bff}};
enum { NPACKED = sizeof PACKED / sizeof *PACKED, SHARE = 32 };

static int packed_of(dp_format f) {
    for (int i = 0; i < NPACKED; i++)
        if (PACKED[i].format == f) return i;
    return -1;
}

static double value_of(int i, int code) {
    const int f = PACKED[i].fraction, sign = 1 << (PACKED[i].bits - 1);
    if (!PACKED[i].bias) return (int8_t)code;
    const int size = code & (sign - 1), e = size >> f, m = size & ((1 << f) - 1);
    const double x = ldexp(e ? (1 << f) + m : m, (e ? e : 1) - PACKED[i].bias - f);
    return code & sign ? -x : x;
}

/* The code of a number that the format has. */
static int code_of(int i, double x) {
    const int sign = 1 << (PACKED[i].bits - 1);
    int low = 0, high = PACKED[i].most;
    if (!PACKED[i].bias) return (int)nearbyint(x) & 0xff;
    while (low < high) {
        const int mid = (low + high) / 2;
        if (value_of(i, mid) < fabs(x))
            low = mid + 1;
        else
            high = mid;
    }
    if (low && fabs(x) - value_of(i, low - 1) < value_of(i, low) - fabs(x)) low--;
    return low | (signbit(x) ? sign : 0);
}

/* A share of n numbers of the format as codes [n] and its scale; 0: it is of another. */
static int pack_share(int i, const double *x, int n, unsigned char *code, float *scale) {
    double most = 0;
    for (int k = 0; k < n; k++)
        most = fmax(most, fabs(x[k]));
    const float s = (float)(most / value_of(i, PACKED[i].most));
    const float tries[] = {s, nextafterf(s, 0), nextafterf(s, INFINITY)};
    for (int t = 0, k; t < 3; t++) {
        *scale = tries[t] > 0 ? tries[t] : 1;
        for (k = 0; k < n; k++) {
            code[k] = (unsigned char)code_of(i, x[k] / *scale);
            if ((float)(*scale * value_of(i, code[k])) != (float)x[k]) break;
        }
        if (k == n) return 1;
    }
    return 0;
}

/* One head of n numbers at `to`; 0: they are of another format. */
static int pack_head(int i, int64_t n, const double *x, char *to) {
    float *scale = (float *)(to + n);
    for (int64_t k = 0; k < n; k += SHARE) {
        if (PACKED[i].bits == 16)
            for (int z = 0; z < SHARE; z++)
                ((uint16_t *)to)[k + z] = PACKED[i].format == DP_BF16
                                              ? dp_bf16_bits((float)x[k + z])
                                              : dp_fp16_bits(x[k + z]);
        else if (!pack_share(i, x + k, SHARE, (unsigned char *)to + k, &scale[k / SHARE]))
            return 0;
    }
    return 1;
}

static void unpack_head(int i, int64_t n, const char *from, double *x) {
    const float *scale = (const float *)(from + n);
    for (int64_t k = 0; k < n; k++)
        x[k] = PACKED[i].format == DP_BF16 ? dp_bf16_from_bits(((const uint16_t *)from)[k])
               : PACKED[i].bits == 16
                   ? dp_fp16_from_bits(((const uint16_t *)from)[k])
                   : (float)(scale[k / SHARE] * value_of(i, (unsigned char)from[k]));
}

int dp_cuda_keeps(const dp_problem *p, const dp_cuda_how *how, const dp_state_pool *pool,
                  int states) {
    const int64_t n = (int64_t)p->HV * p->K * p->V;
    if (packed_of(how->kept) < 0 || pool || states || !dp_cuda_decodes(p, how, pool)) return 0;
    DP_OWN double *x = p->s0 ? dp_copy(p->s0, p->Nseq * n) : NULL;
    for (int i = 0; x && i < p->Nseq; i++)
        dp_store_state(how->kept, p->HV, p->K, p->V, x + i * n);
    return !x || !memcmp(x, p->s0, sizeof *x * (size_t)(p->Nseq * n));
}

/* ---- slots ----------------------------------------------------------------------------------- */

static int64_t state_size(const batch *b) { return (int64_t)b->p->HV * b->p->K * b->p->V; }

static int64_t bytes_of(const batch *b) {
    const int64_t n = (int64_t)b->p->K * b->p->V;
    return b->p->HV * (b->d.packed    ? DPG_PACKED_BYTES(b->d.packed, n)
                       : b->kept >= 0 ? 2 * n
                                      : 4 * n);
}

static dp_status put_packed(batch *b, int64_t slot, const double *from) {
    const int64_t n = (int64_t)b->p->K * b->p->V, size = bytes_of(b);
    DP_OWN char *state = dp_calloc((size_t)size, 1);
    DP_OWN double *zero = dp_doubles(n);
    int bad = 0;
    for (int h = 0; h < b->p->HV && !bad; h++)
        bad = !pack_head(b->kept, n, from ? from + h * n : zero, state + size / b->p->HV * h);
    if (!bad)
        bad = cudaMemcpy((char *)b->t.states + slot * size, state, (size_t)size,
                         cudaMemcpyHostToDevice);
    return bad ? dp_fail(&b->dev.err, DP_EDEVICE, "slot %lld: not packed", (long long)slot) : DP_OK;
}

static dp_status put_state(batch *b, int64_t slot, const double *from) {
    const int64_t n = state_size(b);
    if (b->kept >= 0) return put_packed(b, slot, from);
    DP_OWN float *state = dp_calloc((size_t)n, sizeof *state);
    for (int64_t z = 0; from && z < n; z++)
        state[z] = (float)from[z];
    const int bad = cudaMemcpy((float *)b->t.states + slot * n, state, sizeof *state * (size_t)n,
                               cudaMemcpyHostToDevice);
    return bad ? dp_fail(&b->dev.err, DP_EDEVICE, "slot %lld: not copied", (long long)slot) : DP_OK;
}

static dp_status fetch_packed(batch *b, int64_t slot, double *to) {
    const int64_t n = (int64_t)b->p->K * b->p->V, size = bytes_of(b);
    DP_OWN char *state = dp_calloc((size_t)size, 1);
    const int bad =
        cudaMemcpy(state, (char *)b->t.states + slot * size, (size_t)size, cudaMemcpyDeviceToHost);
    for (int h = 0; h < b->p->HV && !bad; h++)
        unpack_head(b->kept, n, state + size / b->p->HV * h, to + h * n);
    return bad ? dp_fail(&b->dev.err, DP_EDEVICE, "slot %lld: not copied", (long long)slot) : DP_OK;
}

static dp_status fetch_state(batch *b, int64_t slot, double *to) {
    const int64_t n = state_size(b);
    if (b->kept >= 0) return fetch_packed(b, slot, to);
    return dp_device_download(&b->dev, (float *)b->t.states + slot * n, n, DPG_F32, to);
}

/* Where the state after token t of request i goes. Without a pool: not in the order of requests. */
static int64_t slot_after(const batch *b, int i, int64_t t) {
    const int64_t n = of_request(b, i);
    if (!b->pool) return (int64_t)(b->p->Nseq - 1 - i) * b->d.kept + (b->d.kept > 1 ? t : 0);
    if (t == n - 1) return b->pool->write[i] < 0 ? -1 : b->before + b->pool->write[i];
    return b->before ? (int64_t)i * (b->d.kept - 1) + t : -1;
}

/* A list of slots a request. In a pool the last one is that which is read: no token writes it, as
 * every request is shorter than the list. */
static void list_slots(const batch *b, int32_t *slot) {
    const int kept = b->d.kept;
    for (int i = 0; i < b->p->Nseq; i++) {
        for (int t = 0; t < kept; t++)
            slot[i * kept + t] =
                b->pool && t >= of_request(b, i) ? -1 : (int32_t)slot_after(b, i, t);
        if (b->pool && b->pool->read[i] >= 0)
            slot[i * kept + kept - 1] = (int32_t)(b->before + b->pool->read[i]);
    }
}

/* Lists of slots, lengths, and with a pool how far down its list each request begins. */
static dp_status send_lists(batch *b) {
    const int B = b->p->Nseq, kept = b->d.kept, n = B * (kept + 2);
    int32_t *slot = dp_calloc((size_t)n, sizeof *slot), *length = slot + B * kept,
            *from = length + B;
    void *on_device = NULL;
    int whole = 1; /* all requests have all tokens of the call */
    list_slots(b, slot);
    for (int i = 0; i < B; i++) {
        length[i] = (int32_t)of_request(b, i);
        from[i] = kept;
        whole = whole && length[i] == b->d.T;
    }
    dp_status st = dp_device_blank(&b->dev, n, DPG_F32, &on_device);
    if (!st && cudaMemcpy(on_device, slot, sizeof *slot * (size_t)n, cudaMemcpyHostToDevice))
        st = dp_fail(&b->dev.err, DP_EDEVICE, "slots: not copied");
    b->t.slot = on_device;
    if (!whole) b->t.length = (const int32_t *)on_device + B * kept;
    if (b->pool) b->t.accepted = (const int32_t *)on_device + B * (kept + 1);
    free(slot);
    return st;
}

/* States before the call in the first slot of each request, or the pool; what is left holds NaN. */
static dp_status send_states(batch *b) {
    const int64_t n = state_size(b);
    dp_status st = dp_device_blank(&b->dev, b->d.slots * bytes_of(b) / 4, DPG_F32, &b->t.states);
    for (int i = 0; i < b->p->Nseq && !b->pool && !st; i++)
        st = put_state(b, slot_after(b, i, 0), b->p->s0 ? b->p->s0 + i * n : NULL);
    for (int64_t i = 0; b->pool && i < b->pool->slots && !st; i++)
        st = put_state(b, b->before + i, b->pool->state + i * n);
    return st ? st : send_lists(b);
}

/* A number of the pool keeps its bits where the kernel left it unchanged. */
static dp_status fetch_pool(batch *b) {
    const int64_t n = state_size(b);
    DP_OWN double *is = dp_doubles(n);
    dp_status st = DP_OK;
    for (int64_t i = 0; i < b->pool->slots && !st; i++) {
        double *was = b->pool->state + i * n;
        st = fetch_state(b, b->before + i, is);
        for (int64_t z = 0; z < n && !st; z++)
            if (memcmp(&is[z], &(double){(float)was[z]}, sizeof *is)) was[z] = is[z];
    }
    return st;
}

/* ---- the call -------------------------------------------------------------------------------- */

static dp_status fetch(batch *b, dp_result *out, double *states) {
    const dp_problem *p = b->p;
    const int64_t n = (int64_t)p->HV * p->K * p->V, width = (int64_t)p->HV * p->V;
    const int64_t rows = (int64_t)p->Nseq * b->d.T * width;
    double *o = dp_doubles(rows);
    dp_status st = dp_device_download(&b->dev, b->t.o, rows, b->d.odtype, o);
    if (!st) from_batch(b, o, width, out->o);
    free(o);
    for (int i = 0; i < p->Nseq && !st; i++) {
        const int64_t tokens = of_request(b, i), last = b->d.kept > 1 && tokens ? tokens - 1 : 0;
        if (!b->pool) st = fetch_state(b, slot_after(b, i, last), out->final_state + i * n);
        for (int64_t t = 0; states && t < tokens && !st; t++)
            if (slot_after(b, i, t) >= 0)
                st = fetch_state(b, slot_after(b, i, t), states + (p->cu[i] + t) * n);
    }
    return st || !b->pool ? st : fetch_pool(b);
}

static dp_status run(batch *b, dp_result *out, double *states) {
    DP_CUDA(&b->dev, cudaSetDevice(0));
    DP_CUDA(&b->dev, cudaStreamCreate(&b->dev.stream));
    dp_status st = send_inputs(b);
    if (!st) st = send_states(b);
    if (!st) st = dpg_decode_run(&b->d, &b->t, b->dev.stream, &b->dev.err);
    if (!st) DP_CUDA(&b->dev, cudaStreamSynchronize(b->dev.stream));
    return st ? st : fetch(b, out, states);
}

dp_status dp_cuda_decode(const dp_problem *p, const dp_cuda_how *how, const dp_state_pool *pool,
                         dp_result *out, double **states, dp_err *e) {
    const dpg_dtype in = how->bf16_inputs ? DPG_BF16 : DPG_F32;
    const int T = longest(p) + (pool != NULL), kept = states || pool ? T : 1;
    const int64_t before = pool && states ? (int64_t)p->Nseq * (T - 1) : 0;
    batch b = {.p = p,
               .pool = pool,
               .before = before,
               .d = {.B = p->Nseq,
                     .T = T,
                     .H = p->H,
                     .HV = p->HV,
                     .K = p->K,
                     .V = p->V,
                     .R = p->R,
                     .Kg = dp_Kg(p),
                     .scale = (float)p->scale,
                     .gate = p->gate,
                     .lower_bound = (float)p->lower_bound,
                     .beta_form = p->beta_form,
                     .l2norm = p->l2norm,
                     .dtype = in,
                     .gdtype = in,
                     .odtype = how->base == DP_BASE_BF16 ? DPG_BF16 : DPG_F32,
                     .sdtype = DPG_F32,
                     .layout = DPG_STATE_KV,
                     .slots = pool ? before + pool->slots : (int64_t)p->Nseq * kept,
                     .kept = kept}};
    b.kept = dp_cuda_keeps(p, how, pool, states != NULL) ? packed_of(how->kept) : -1;
    if (b.kept >= 0) b.d.packed = PACKED[b.kept].packed;
    if (b.kept >= 0) b.d.sdtype = PACKED[b.kept].type;
    dp_result_alloc(out, p, 0);
    if (states) *states = dp_doubles(p->T * (int64_t)p->HV * p->K * p->V);
    const dp_status st = run(&b, out, states ? *states : NULL);
    dp_device_close(&b.dev);
    if (pool) {
        free(out->final_state);
        out->final_state = NULL;
    }
    if (!st) return st;
    if (e) *e = b.dev.err;
    dp_result_free(out);
    if (states) free(*states);
    return st;
}
#endif
