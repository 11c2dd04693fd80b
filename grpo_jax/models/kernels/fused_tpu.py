"""The attention of `models.kernels.fused` as one kernel: JAX's splash attention (block-sparse; Dao
et al. 2022, 2205.14135).

Blocks of scores that the mask empties are skipped, forward and backward; keys are repeated neither
for completions nor for heads; of a row only its log-sum-exp is kept. A bfloat16 q is rounded once
more, when it is scaled.
"""

import dataclasses
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from grpo_jax.types import Array


@dataclasses.dataclass(frozen=True)
class Together(masks.Mask):
    """Which of R rows see which, computed in the kernel: `S` rows of a prompt, then completions of
    `T` rows each.

    The kernel knows a key by its row and a query by a number of our choice. Its row would need a
    division to find the start of its part; `part · 2^bits + offset` needs a shift and a product.
    """

    S: int
    T: int
    rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.rows

    @property
    def _lead(self) -> int:
        # So that offsets are positive in a prompt that is longer than a completion.
        return max(self.S - self.T, 0)

    @property
    def _bits(self) -> int:
        return (max(self.S, self.T) - 1).bit_length()

    @property
    def q_sequence(self) -> np.ndarray:
        row = np.arange(self.rows)
        part = np.where(row < self.S, 0, (row - self.S) // self.T + 1)
        return (part << self._bits | row - self._start(part) + self._lead).astype(np.int32)

    def _start(self, part):
        # Of part 0, the prompt, T before its end: j < S decides there.
        return self.S + (part - 1) * self.T

    def mask_function(self, query, key):
        start = self._start(query >> self._bits)
        last = start + (query & (1 << self._bits) - 1) - self._lead
        return (key <= last) & ((key >= start) | (key < self.S))

    def __getitem__(self, index) -> np.ndarray:
        return self.mask_function(
            self.q_sequence[index[0], None], np.arange(self.rows)[None, index[1]]
        )


def block_size(rows: int, T: int) -> int:
    """Rows of a block, a multiple of 128: not above T, whose blocks would be less empty, nor
    padding an eighth more.
    """
    return next((b for b in (512, 256) if b <= T and -rows % b <= rows // 8), 128)


@lru_cache(maxsize=64)
def _kernel(
    mask: Together, heads: int, block: int, interpret: bool
) -> splash.SplashAttentionKernel:
    sizes = splash.BlockSizes(*[block] * 8)
    # Its tables of blocks are constants, also where this is traced.
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([mask] * heads),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name="attention",
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, kernel)


def attend_together(
    q_KPRhd: Array,
    k_KPRd: Array,
    v_KPRd: Array,
    mask_PS: Array,
    *,
    T: int,
    interpret: bool = False,
    mask: type[Together] = Together,
) -> Array:
    """Attention of P prompts, each with its group's completions of T rows behind it: `[K, P, R, h,
    d]`, R = S + G·T.

    h query heads share a key head. `interpret` runs the kernel's program on any device, slowly;
    `mask` says which rows see which.
    """
    K, P, R, h, d = q_KPRhd.shape
    S = mask_PS.shape[1]
    block = block_size(R, T)
    padded = R + -R % block  # rows behind the last are further completions, which nothing sees
    rows = lambda y: jnp.pad(y, [(0, 0)] * (y.ndim - 2) + [(0, padded - R), (0, 0)])
    q_PHRd = rows((q_KPRhd * d**-0.5).transpose(1, 0, 3, 2, 4)).reshape(P, K * h, padded, d)
    k_PKRd, v_PKRd = (rows(y.swapaxes(0, 1)) for y in (k_KPRd, v_KPRd))
    real_PR = jnp.pad(mask_PS, ((0, 0), (0, padded - S)), constant_values=True).astype(jnp.int32)
    kernel = _kernel(mask(S, T, padded), K * h, block, interpret)
    attend = lambda q, k, v, real: kernel(q, k, v, segment_ids=splash.SegmentIds(real, real))
    # XLA's text of a program says nothing of what a kernel does: `hlo` reads it here.
    blocks = np.count_nonzero(kernel.fwd_mask_info.block_mask[0])
    with jax.named_scope(f"product_flops_{2 * P * K * h * d * block**2 * blocks}"):
        out_PHRd = jax.vmap(attend)(q_PHRd, k_PKRd, v_PKRd, real_PR)
    return out_PHRd[:, :, :R].reshape(P, K, h, R, d).transpose(1, 0, 3, 2, 4)
