"""JAX: ranks as threads of one process; arrays go in as they are, results are JAX arrays."""

import functools

import jax
import jax.numpy as jnp

import tandem_ep

RANKS, EXPERTS, TOKENS, HIDDEN, TOPK = 2, 4, 16, 256, 2


@functools.partial(jax.jit, static_argnames="first")
def experts(rows: jax.Array, first: int) -> jax.Array:
    """All local experts at once, [L, R * M, H]; rows without a token do not matter."""
    factors = jnp.arange(first + 1, first + 1 + rows.shape[0], dtype=rows.dtype)
    return rows * factors[:, None, None]


def rank(communicator: tandem_ep.Communicator) -> float:
    keys = jax.random.split(jax.random.key(communicator.rank), 3)
    x = jax.random.normal(keys[0], (TOKENS, HIDDEN), jnp.bfloat16)
    topk_idx = jax.lax.top_k(jax.random.uniform(keys[1], (TOKENS, EXPERTS)), TOPK)[1]
    topk_weights = jax.random.uniform(keys[2], (TOKENS, TOPK))

    with tandem_ep.Buffer(communicator, num_experts=EXPERTS, max_tokens=TOKENS,
                          max_hidden=HIDDEN, max_topk=TOPK) as buffer:  # fmt: skip
        received = buffer.dispatch(x, topk_idx)
        y = experts(received.x, buffer.local_experts[0])
        out = buffer.combine(y, topk_weights, received.handle)

    expected = x * ((topk_idx + 1) * topk_weights).sum(axis=1, keepdims=True)
    return float(jnp.abs(out - expected).max() / jnp.abs(expected).max())


errors = tandem_ep.run_threads(RANKS, rank)
assert max(errors) < 0.02, errors
print(f"ok: largest error {max(errors):.3f} of the largest value, as bf16 has it")
