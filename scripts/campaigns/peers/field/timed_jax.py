"""jax-linear-attention on a row of rows.py.

PyTorch cannot capture JAX's calls. They are queued behind matrix products, so that the host is
ahead of the device. The time of a call is what more calls take longer."""

import statistics
import time

from rows import BIAS
from timed import LOWER, served

FEW, MANY = 6, 24  # calls; XLA holds some 30 in its queue
KINDS = {"kda": "kda", "gdn": "gated_deltanet", "ssd": "simple_gla"}


def inputs(jax, r):
    """q, k, v, g, beta [B, T, heads, ..]; raw where the row has its activations inside."""
    jnp, keys = jax.numpy, iter(jax.random.split(jax.random.key(1), 8))

    def normal(*shape, type_=jnp.bfloat16):
        return jax.random.normal(next(keys), shape, jnp.float32).astype(type_)

    V = 64 if r.op == "ssd" else 128
    x = {"q": normal(r.B, r.T, r.H, 128), "k": normal(r.B, r.T, r.H, 128)}
    x["v"] = normal(r.B, r.T, r.HV, V)
    raw = r.op == "kda" and not r.given
    g = normal(r.B, r.T, r.HV, *([128] if r.op == "kda" else []))
    beta = normal(r.B, r.T, r.HV)
    if r.given:
        for n in ("q", "k"):
            y = x[n].astype(jnp.float32)
            x[n] = (y / jnp.linalg.norm(y, axis=-1, keepdims=True)).astype(jnp.bfloat16)
    x["g"] = g if raw else activated(jax, g, r)
    if r.op != "ssd":
        x["beta"] = beta if raw else jax.nn.sigmoid(beta.astype(jnp.float32))
    return x


def activated(jax, g, r):
    return LOWER * jax.nn.sigmoid(g.astype(jax.numpy.float32) + BIAS[r.gates])


def function(jax, r):
    """x -> o, or (o, states)."""
    from jla.ops import linear_attention

    more = {} if r.op == "ssd" else {"use_qk_l2norm": not r.given}

    def f(x):
        x = dict(x)
        if r.op == "kda" and not r.given:
            x["g"] = activated(jax, x["g"], r)
            x["beta"] = jax.nn.sigmoid(x["beta"].astype(jax.numpy.float32))
        out = linear_attention(
            KINDS[r.op], impl="mosaic_gpu", output_final_state=r.states, **x, **more
        )
        return out if r.states else out[0]

    return f


def prepared(jax, r):
    """A function without arguments that queues one call."""
    served(r.part != "decode", "it has no kernel of single tokens")
    served(r.op != "kda" or r.H == r.HV, "KDA: heads alike alone")
    x, f = jax.jit(lambda: inputs(jax, r))(), function(jax, r)
    if r.part == "forward":
        compiled = jax.jit(f)
        return lambda: compiled(x)
    do = jax.numpy.ones_like(x["v"])
    _, back = jax.jit(lambda x: jax.vjp(f, x))(x)
    compiled = jax.jit(lambda back, do: back(do))
    return lambda: compiled(back, do)


def compile_row(name, r):
    """Fills JAX's cache on disk (JAX_COMPILATION_CACHE_DIR) with a row's program; no memory."""
    import jax

    f, make = function(jax, r), jax.jit(lambda: inputs(jax, r))
    x = jax.eval_shape(make)
    make.lower().compile()
    if r.part == "backward":
        jax.jit(lambda x: jax.vjp(f, x)).lower(x).compile()
    else:
        jax.jit(f).lower(x).compile()


def seconds(jax, call, before, runs):
    """Median of the time of a call; before: queues work of the device that takes a while."""
    jax.block_until_ready(call())

    def whole(n):
        a = before()
        start = time.perf_counter()
        out = [call() for _ in range(n)]
        queued = time.perf_counter() - start
        jax.block_until_ready((a, out[-1]))
        return time.perf_counter() - start, queued

    whole(FEW)
    got = [(whole(MANY)[0] - whole(FEW)[0]) / (MANY - FEW) for _ in range(max(5, runs // 2))]
    return statistics.median(got)


def time_row(name, row, runs):
    from speed import REFUSALS, one_line

    entry = {"kernel": name, "row": row.name}
    try:
        import jax

        call = prepared(jax, row)
        a = jax.numpy.ones((8192, 8192), jax.numpy.bfloat16)
        product = jax.jit(lambda a: a @ a @ a @ a)
        jax.block_until_ready(product(a))
        spent = seconds(jax, call, lambda: product(a), runs)
        gate = "gate by XLA before" if row.op == "kda" and not row.given else "log gates given"
        norm = "" if row.op == "ssd" else ", rows given" if row.given else ", norm inside"
        states = ", states out" if row.states else ""
        clock = "queue filled ahead, more calls less few"
        return entry | {
            "us": round(spent * 1e6, 3),
            "clock": clock,
            "contract": gate + norm + states,
        }
    except Exception as e:  # whatever a kernel raises is its answer
        return entry | {"why": one_line(e), "refused": type(e).__name__ in REFUSALS}
