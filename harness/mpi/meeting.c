/* Hellos and proofs (meeting.h), by libsodium. */
#include "meeting.h"
#include "ref/files/cache.h"
#include "ref/vocabulary/text.h"

#include <sodium.h>
#include <string.h>

#define MAGIC "deltaproof job 2"
_Static_assert(sizeof(dp_hello) == 120 && sizeof(dp_proof) == 104, "all of it is sent");
_Static_assert(sizeof((dp_proof *)0)->code == crypto_auth_BYTES &&
                   sizeof((dp_party *)0)->key == crypto_auth_KEYBYTES,
               "as libsodium has them");

int dp_party_make(dp_party *p, const dp_process *own, int rank, int size, const void *secret,
                  size_t n) {
    if (sodium_init() < 0) return 0;
    memset(p, 0, sizeof *p);
    memcpy(p->hello.magic, MAGIC, sizeof p->hello.magic);
    strncpy(p->hello.version, DP_VERSION, sizeof p->hello.version - 1);
    memcpy(p->hello.build, own->build, sizeof p->hello.build);
    p->hello.secret = n > 0;
    p->hello.rank = (uint32_t)rank;
    p->hello.size = (uint32_t)size;
    p->hello.arguments = own->arguments;
    p->process = *own;
    crypto_generichash(p->key, sizeof p->key, secret, n, NULL, 0);
    dp_party_renew(p);
    return 1;
}

void dp_party_renew(dp_party *p) { randombytes_buf(p->hello.nonce, sizeof p->hello.nonce); }

const char *dp_hello_wrong(const dp_party *own, const dp_hello *other) {
    const dp_hello *h = &own->hello;
    const uint32_t least = h->rank ? 0 : 1, most = h->rank ? 0 : h->size - 1;
    if (memcmp(h->magic, other->magic, sizeof h->magic)) return "another program";
    if (memcmp(h->version, other->version, sizeof h->version)) return "another version";
    if (memcmp(h->build, other->build, sizeof h->build)) return "another build";
    if (h->secret && !other->secret) return "no secret";
    if (h->secret != other->secret) return "a secret (DELTAPROOF_SECRET)";
    if (h->size != other->size) return "another number of processes";
    if (other->rank < least || other->rank > most || other->none) return "a rank that does not fit";
    if (h->arguments != other->arguments) return "other arguments";
    return NULL;
}

/* The code of the speaker, of both hellos, and of host and process. */
static void code_of(const dp_party *own, const dp_hello *speaker, const dp_hello *listener,
                    const dp_proof *proof, unsigned char code[crypto_auth_BYTES]) {
    struct {
        dp_hello speaker, listener;
        dp_proof who;
    } all;
    memset(&all, 0, sizeof all);
    all.speaker = *speaker;
    all.listener = *listener;
    all.who = *proof;
    memset(all.who.code, 0, sizeof all.who.code);
    crypto_auth(code, (const unsigned char *)&all, sizeof all, own->key);
}

dp_proof dp_proof_make(const dp_party *own, const dp_hello *other) {
    dp_proof p;
    memset(&p, 0, sizeof p);
    memcpy(p.host, own->process.host, sizeof p.host);
    p.pid = own->process.pid;
    code_of(own, &own->hello, other, &p, p.code);
    return p;
}

const char *dp_proof_wrong(const dp_party *own, const dp_hello *other, const dp_proof *proof) {
    unsigned char code[crypto_auth_BYTES];
    code_of(own, other, &own->hello, proof, code);
    if (sodium_memcmp(code, proof->code, sizeof code))
        return own->hello.secret ? "another secret" : "a proof that does not fit";
    const size_t n = strnlen(proof->host, sizeof proof->host);
    if (n == sizeof proof->host || dp_text_good(proof->host, n, 0) != n || proof->pid < 1)
        return "a host or process that is none";
    return NULL;
}
