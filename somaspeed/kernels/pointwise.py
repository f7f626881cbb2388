"""The expert's pointwise chains as Triton kernels, candidates beside eager torch and `torch.compile`.

Each has an eager fp32 reference that states what it computes. None is used by a policy until `somaspeed-bench kernels`
on a CUDA device shows that it beats both rivals there.

Shapes: B samples, S action tokens, W the expert's width, M its MLP's, A action dimensions. Computed in fp32, stored in
the inputs' dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
COLUMNS = 64  # of one program that sums over tokens
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
CUBIC = tl.constexpr(0.044715)


def gated_norm_reference(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gated residual, then adaptive RMS norm: r = x + y · gate, n = r / rms(r) · (1 + scale) + shift.

    `x`, `y` [B, S, W]; `gate`, `scale`, `shift` [B, W]. Returns r and n, [B, S, W] (π0.5's `PiGemmaRMSNorm`).
    """
    residual = x.float() + y.float() * gate.float()[:, None]
    inverse = torch.rsqrt(residual.square().mean(-1, keepdim=True) + eps)
    normed = residual * inverse * (1 + scale.float()[:, None]) + shift.float()[:, None]
    return residual.to(x.dtype), normed.to(x.dtype)


def geglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) · up with the tanh form of GELU (Hendrycks & Gimpel 2016); [B, S, M]."""
    return (F.gelu(gate.float(), approximate="tanh") * up.float()).to(gate.dtype)


def flow_reference(noise: Tensor, actions: Tensor, velocity: Tensor, dimensions: int) -> Tensor:
    """Flow-matching loss: the mean of (noise - actions - velocity)² over the first `dimensions` of A; all [B, S, A]."""
    error = noise.float() - actions.float() - velocity.float()
    return error[..., :dimensions].square().mean()


@triton.jit
def gated_norm_forward(
    x_ptr, y_ptr, gate_ptr, scale_ptr, shift_ptr, residual_ptr, normed_ptr, inverse_ptr, tokens, width, eps,
    block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    mask = columns < width
    own, shared = row * width + columns, row // tokens * width + columns
    gate = tl.load(gate_ptr + shared, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(x_ptr + own, mask=mask, other=0.0).to(tl.float32)
    residual += tl.load(y_ptr + own, mask=mask, other=0.0).to(tl.float32) * gate
    inverse = 1 / tl.sqrt(tl.sum(residual * residual) / width + eps)
    scale = tl.load(scale_ptr + shared, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + shared, mask=mask, other=0.0).to(tl.float32)
    tl.store(residual_ptr + own, residual.to(residual_ptr.dtype.element_ty), mask=mask)
    normed = residual * inverse * (1 + scale) + shift
    tl.store(normed_ptr + own, normed.to(normed_ptr.dtype.element_ty), mask=mask)
    tl.store(inverse_ptr + row, inverse)


@triton.jit
def gated_norm_backward(
    d_residual_ptr, d_normed_ptr, residual_ptr, inverse_ptr, gate_ptr, scale_ptr, dx_ptr, dy_ptr, tokens, width,
    block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    mask = columns < width
    own, shared = row * width + columns, row // tokens * width + columns
    inverse = tl.load(inverse_ptr + row)
    unit = tl.load(residual_ptr + own, mask=mask, other=0.0).to(tl.float32) * inverse
    scale = tl.load(scale_ptr + shared, mask=mask, other=0.0).to(tl.float32)
    scaled = tl.load(d_normed_ptr + own, mask=mask, other=0.0).to(tl.float32) * (1 + scale)
    dx = tl.load(d_residual_ptr + own, mask=mask, other=0.0).to(tl.float32)
    dx += inverse * (scaled - unit * (tl.sum(scaled * unit) / width))
    gate = tl.load(gate_ptr + shared, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + own, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dy_ptr + own, (dx * gate).to(dy_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gated_norm_sums(
    dx_ptr, y_ptr, d_normed_ptr, residual_ptr, inverse_ptr, d_gate_ptr, d_scale_ptr, d_shift_ptr, tokens, width,
    block: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    mask = columns < width
    d_gate = tl.zeros((block,), tl.float32)
    d_scale = tl.zeros((block,), tl.float32)
    d_shift = tl.zeros((block,), tl.float32)
    for token in range(tokens):
        row = sample * tokens + token
        own = row * width + columns
        dx = tl.load(dx_ptr + own, mask=mask, other=0.0).to(tl.float32)
        d_gate += dx * tl.load(y_ptr + own, mask=mask, other=0.0).to(tl.float32)
        d_normed = tl.load(d_normed_ptr + own, mask=mask, other=0.0).to(tl.float32)
        unit = tl.load(residual_ptr + own, mask=mask, other=0.0).to(tl.float32) * tl.load(inverse_ptr + row)
        d_scale += d_normed * unit
        d_shift += d_normed
    shared = sample * width + columns
    tl.store(d_gate_ptr + shared, d_gate.to(d_gate_ptr.dtype.element_ty), mask=mask)
    tl.store(d_scale_ptr + shared, d_scale.to(d_scale_ptr.dtype.element_ty), mask=mask)
    tl.store(d_shift_ptr + shared, d_shift.to(d_shift_ptr.dtype.element_ty), mask=mask)


class GatedNorm(torch.autograd.Function):
    """`gated_norm_reference`: one launch forward, two backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        batch, tokens, width = x.shape
        x, y, gate, scale, shift = (tensor.contiguous() for tensor in (x, y, gate, scale, shift))
        residual, normed = torch.empty_like(x), torch.empty_like(x)
        inverse = torch.empty(batch * tokens, device=x.device)
        block = triton.next_power_of_2(width)
        gated_norm_forward[(batch * tokens,)](
            x, y, gate, scale, shift, residual, normed, inverse, tokens, width, eps, block
        )  # fmt: skip
        ctx.save_for_backward(y, gate, scale, residual, inverse)
        return residual, normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        y, gate, scale, residual, inverse = ctx.saved_tensors
        d_residual, d_normed = (gradient.contiguous() for gradient in gradients)
        batch, tokens, width = y.shape
        dx, dy = torch.empty_like(residual), torch.empty_like(y)
        block = triton.next_power_of_2(width)
        gated_norm_backward[(batch * tokens,)](
            d_residual, d_normed, residual, inverse, gate, scale, dx, dy, tokens, width, block
        )
        sums = torch.empty_like(gate), torch.empty_like(scale), torch.empty_like(scale)
        grid = (batch, triton.cdiv(width, COLUMNS))
        gated_norm_sums[grid](dx, y, d_normed, residual, inverse, *sums, tokens, width, COLUMNS)
        return dx, dy, *sums, None


@triton.jit
def gelu_parts(gate):
    """tanh of GELU's argument, and GELU itself."""
    argument = SQRT_2_OVER_PI * (gate + CUBIC * gate * gate * gate)
    tanh = 2 * tl.sigmoid(2 * argument) - 1
    return tanh, 0.5 * gate * (1 + tanh)


@triton.jit
def geglu_forward(gate_ptr, up_ptr, out_ptr, size, block: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = offsets < size
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    _, activated = gelu_parts(gate)
    tl.store(out_ptr + offsets, (activated * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def geglu_backward(d_out_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, size, block: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = offsets < size
    d_out = tl.load(d_out_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tanh, activated = gelu_parts(gate)
    slope = 0.5 * (1 + tanh) + 0.5 * gate * (1 - tanh * tanh) * SQRT_2_OVER_PI * (1 + 3 * CUBIC * gate * gate)
    tl.store(d_gate_ptr + offsets, (d_out * up * slope).to(d_gate_ptr.dtype.element_ty), mask=mask)
    tl.store(d_up_ptr + offsets, (d_out * activated).to(d_up_ptr.dtype.element_ty), mask=mask)


class GeGLU(torch.autograd.Function):
    """`geglu_reference` in one launch each way."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        geglu_forward[(triton.cdiv(out.numel(), BLOCK),)](gate, up, out, out.numel(), BLOCK)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        size = gate.numel()
        geglu_backward[(triton.cdiv(size, BLOCK),)](gradients[0].contiguous(), gate, up, d_gate, d_up, size, BLOCK)
        return d_gate, d_up


@triton.jit
def flow_kernel(
    noise_ptr, actions_ptr, velocity_ptr, partial_ptr, d_velocity_ptr, size, width, dimensions, count,
    block: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    offsets = program * block + tl.arange(0, block)
    inside = offsets < size
    live = inside & (offsets % width < dimensions)
    noise = tl.load(noise_ptr + offsets, mask=live, other=0.0).to(tl.float32)
    actions = tl.load(actions_ptr + offsets, mask=live, other=0.0).to(tl.float32)
    velocity = tl.load(velocity_ptr + offsets, mask=live, other=0.0).to(tl.float32)
    error = noise - actions - velocity  # zero in the dimensions that do not count
    tl.store(partial_ptr + program, tl.sum(error * error) / count)
    tl.store(d_velocity_ptr + offsets, (-2 * error / count).to(d_velocity_ptr.dtype.element_ty), mask=inside)


class FlowLoss(torch.autograd.Function):
    """`flow_reference` with its gradient in the same launch, then one sum of the programs' partial sums."""

    @staticmethod
    def forward(ctx: Any, noise: Tensor, actions: Tensor, velocity: Tensor, dimensions: int) -> Tensor:
        noise, actions, velocity = noise.contiguous(), actions.contiguous(), velocity.contiguous()
        size, width = velocity.numel(), velocity.shape[-1]
        programs = triton.cdiv(size, BLOCK)
        partial = torch.empty(programs, device=velocity.device)
        d_velocity = torch.empty_like(velocity)
        count = size // width * dimensions
        flow_kernel[(programs,)](noise, actions, velocity, partial, d_velocity, size, width, dimensions, count, BLOCK)
        ctx.save_for_backward(d_velocity)
        return partial.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, ctx.saved_tensors[0] * gradients[0], None
