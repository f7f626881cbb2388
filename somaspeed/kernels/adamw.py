"""One launch for scale, AdamW and the bf16 compute copy over a flat arena.

It moves 28 to 30 bytes a parameter where torch's fused AdamW with `grad_scale` and a copy move 38: the scaled gradient
is not written back, and the new master is still in a register when the compute copy is made. Whether that wins is
measured by `somaspeed-bench kernels` on a CUDA device; until it is recorded as winning, `somaspeed.optim` uses torch's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def adamw_reference(
    grad: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    compute: Tensor | None,
    scalars: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019), in place, on flat fp32 tensors [N].

    `scalars` fp32 [4] on the device: the factor on the gradient (averaging and clipping), the learning rate, the step
    number, and whether the update is skipped (non-zero: nothing moves). `compute` [N] gets the new master, rounded.
    """
    scale, lr, step, skip = scalars.unbind()
    keep = skip == 0
    g = grad * scale
    first = torch.where(keep, exp_avg + (g - exp_avg) * (1 - betas[0]), exp_avg)
    second = torch.where(keep, exp_avg_sq * betas[1] + g * g * (1 - betas[1]), exp_avg_sq)
    corrected = first / (1 - betas[0] ** step)
    root = (second / (1 - betas[1] ** step)).sqrt() + eps
    updated = master * (1 - lr * weight_decay) - lr * corrected / root
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    master.copy_(torch.where(keep, updated, master))
    if compute is not None:
        compute.copy_(master)


@triton.jit
def adamw_kernel(
    grad_ptr,
    master_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    compute_ptr,
    scalars_ptr,
    size,
    beta1: tl.constexpr,
    beta2: tl.constexpr,
    eps: tl.constexpr,
    weight_decay: tl.constexpr,
    write_compute: tl.constexpr,
    block: tl.constexpr,
):
    scale = tl.load(scalars_ptr)
    lr = tl.load(scalars_ptr + 1)
    step = tl.load(scalars_ptr + 2)
    skip = tl.load(scalars_ptr + 3)
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    # A skipped update loads and stores nothing, so non-finite gradients touch no state.
    mask = offsets < tl.where(skip == 0.0, size, 0)
    g = tl.load(grad_ptr + offsets, mask=mask, other=0.0) * scale
    first = tl.load(exp_avg_ptr + offsets, mask=mask, other=0.0)
    second = tl.load(exp_avg_sq_ptr + offsets, mask=mask, other=0.0)
    master = tl.load(master_ptr + offsets, mask=mask, other=0.0)
    first = first + (g - first) * (1 - beta1)
    second = second * beta2 + g * g * (1 - beta2)
    # beta ** step as exp2(step * log2 beta); the logarithms are of constants.
    correction1 = 1 - tl.exp2(step * tl.log2(tl.full((), beta1, tl.float32)))
    correction2 = 1 - tl.exp2(step * tl.log2(tl.full((), beta2, tl.float32)))
    root = tl.sqrt(second / correction2) + eps
    master = master * (1 - lr * weight_decay) - lr * (first / correction1) / root
    tl.store(exp_avg_ptr + offsets, first, mask=mask)
    tl.store(exp_avg_sq_ptr + offsets, second, mask=mask)
    tl.store(master_ptr + offsets, master, mask=mask)
    if write_compute:
        tl.store(compute_ptr + offsets, master.to(compute_ptr.dtype.element_ty), mask=mask)


def adamw(
    grad: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    compute: Tensor | None,
    scalars: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """`adamw_reference` in one launch."""
    size = master.numel()
    adamw_kernel[(triton.cdiv(size, BLOCK),)](
        grad,
        master,
        exp_avg,
        exp_avg_sq,
        master if compute is None else compute,
        scalars,
        size,
        *betas,
        eps,
        weight_decay,
        compute is not None,
        BLOCK,
    )
