/* harness/fuzz/guards.c - the heap of the bulk fuzzers, which run without the address sanitizer to
 * be five to ten times as fast. Every block has its size and a mark on both sides. A write past
 * either end, a write after free (freed blocks wait in a ring, filled) and a second free end the
 * run. An input after which more blocks live than before, three times in a row, leaks. Wrong reads
 * are left to the address sanitizer. */
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern void *__libc_malloc(size_t n);
extern void __libc_free(void *p);

/* The head before the caller's block, which begins `back` bytes into the allocation. */
typedef struct {
    uint64_t size;
    uint16_t align, back;
    uint32_t mark;
} head;
_Static_assert(sizeof(head) == 16, "blocks are aligned to 16 bytes");
#define ALIGN 4096 /* at most */

#define LIVE 0x6c1be0a7u
#define DEAD 0xdeadf4eeu
#define TAIL 0x5aa5c33c0ff0a55aull
#define FILL 0xdb
#define FILLED 64 /* bytes of a freed block that are filled and looked at again */
#define RING 64

/* Small blocks: lists of free ones by size, cut from large pieces, which stay. */
#define STEP 32
#define SMALL 2048
#define PIECE (1 << 20)

static atomic_flag lock = ATOMIC_FLAG_INIT;
static head *ring[RING];
static unsigned oldest;
static size_t live;
static volatile int ended;
static void *free_list[SMALL / STEP + 1];
static char *piece;
static size_t piece_left;

/* libFuzzer's report allocates: from here on nobody waits for the lock. */
static void found(const char *what) {
    ended = 1;
    const char *const parts[] = {"guards: ", what, "\n"};
    for (int i = 0; i < 3; i++)
        if (write(2, parts[i], strlen(parts[i])) < 0) break;
    abort();
}

static void enter(void) {
    while (!ended && atomic_flag_test_and_set_explicit(&lock, memory_order_acquire))
        continue;
}
static void leave(void) { atomic_flag_clear_explicit(&lock, memory_order_release); }

static void *raw_take(size_t n) {
    const size_t c = (n + STEP - 1) / STEP;
    if (n > SMALL) return __libc_malloc(n);
    void *p = free_list[c];
    if (p) {
        free_list[c] = *(void **)p;
        return p;
    }
    if (piece_left < c * STEP) {
        piece = __libc_malloc(PIECE);
        if (!piece) found("no memory");
        piece_left = PIECE;
    }
    p = piece;
    piece += c * STEP;
    piece_left -= c * STEP;
    return p;
}

static void raw_give(void *p, size_t n) {
    const size_t c = (n + STEP - 1) / STEP;
    if (n > SMALL) {
        __libc_free(p);
        return;
    }
    *(void **)p = free_list[c];
    free_list[c] = p;
}

/* Bytes around and of a block. */
static size_t whole(size_t align, size_t n) {
    return n + 8 + (align > 16 ? align : 0) + sizeof(head);
}

static void *take(size_t align, size_t n) {
    enter();
    char *raw = n < SIZE_MAX / 2 && align <= ALIGN ? raw_take(whole(align, n)) : NULL;
    live += raw != NULL;
    leave();
    if (!raw) {
        errno = ENOMEM;
        return NULL;
    }
    char *p = raw + sizeof(head);
    p += -(uintptr_t)p & (align - 1);
    *((head *)p - 1) = (head){n, (uint16_t)align, (uint16_t)(p - raw), LIVE};
    const uint64_t tail = TAIL;
    memcpy(p + n, &tail, 8);
    return p;
}

static head *checked(void *p) {
    head *h = (head *)p - 1;
    uint64_t tail;
    if (h->mark == DEAD) found("a block is freed twice, or used after it was freed");
    if (h->mark != LIVE) found("a write in front of a block, or a pointer that was never given");
    memcpy(&tail, (char *)p + h->size, 8);
    if (tail != TAIL) found("a write past the end of a block");
    return h;
}

static void give_back(head *h) {
    const unsigned char *p = (unsigned char *)(h + 1);
    if (h->mark != DEAD) found("a write in front of a freed block");
    for (size_t i = 0; i < h->size && i < FILLED; i++)
        if (p[i] != FILL) found("a write into a freed block");
    raw_give((char *)p - h->back, whole(h->align, h->size));
}

void *malloc(size_t n) { return take(16, n); }

void *calloc(size_t n, size_t size) {
    size_t all;
    if (__builtin_mul_overflow(n, size, &all)) all = SIZE_MAX;
    void *p = take(16, all);
    return p ? memset(p, 0, all) : NULL;
}

void free(void *p) {
    if (!p) return;
    head *h = checked(p);
    memset(p, FILL, h->size < FILLED ? h->size : FILLED);
    enter();
    h->mark = DEAD;
    live--;
    head *out = ring[oldest];
    ring[oldest] = h;
    oldest = (oldest + 1) % RING;
    if (out) give_back(out);
    leave();
}

void *realloc(void *p, size_t n) {
    if (!p) return malloc(n);
    const size_t had = checked(p)->size;
    void *q = malloc(n);
    if (!q) return NULL;
    memcpy(q, p, had < n ? had : n);
    free(p);
    return q;
}

void *aligned_alloc(size_t align, size_t n) { return take(align < 16 ? 16 : align, n); }
void *memalign(size_t align, size_t n) { return aligned_alloc(align, n); }
int posix_memalign(void **p, size_t align, size_t n) {
    *p = aligned_alloc(align, n);
    return *p ? 0 : ENOMEM;
}
size_t malloc_usable_size(void *p) { return p ? checked(p)->size : 0; }

/* libquadmath (with OpenBLAS) extends printf by formats that nobody here uses, which takes glibc
 * several times as long for every text. */
int register_printf_specifier(int spec, void *f, void *arginfo);
int register_printf_modifier(const void *text);
int register_printf_type(void *f);
int register_printf_specifier(int spec, void *f, void *arginfo) {
    (void)spec, (void)f, (void)arginfo;
    return 0;
}
int register_printf_modifier(const void *text) {
    (void)text;
    return 0;
}
int register_printf_type(void *f) {
    (void)f;
    return 0;
}

/* ---- leaks ----------------------------------------------------------------------------------- */

int __real_LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);
int __wrap_LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

/* Linked with --wrap. Memory kept from the first time on is no leak: it does not grow. */
int __wrap_LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    for (int i = 0; i < 3; i++) {
        const size_t before = live;
        __real_LLVMFuzzerTestOneInput(bytes, size);
        if (live <= before) return 0;
    }
    found("leak: every execution of this input leaves blocks behind");
    return 0;
}
