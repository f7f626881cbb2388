"""Triton kernels against their eager references: interpreted here, compiled where there is a device."""

from __future__ import annotations

import pytest
import torch

from somaspeed.kernels.adamw import adamw, adamw_reference
from somaspeed.kernels.pointwise import (
    FlowLoss,
    GatedNorm,
    GeGLU,
    flow_reference,
    gated_norm_reference,
    geglu_reference,
)

SETTINGS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def tensors(size: int, dtype: torch.dtype | None, device: str) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    flat = {name: torch.randn(size, generator=generator).to(device) for name in ("grad", "master", "exp_avg")}
    flat["exp_avg_sq"] = torch.rand(size, generator=generator).to(device)
    return {**flat, "compute": None if dtype is None else flat["master"].to(dtype)}


def check(device: str, dtype: torch.dtype | None) -> None:
    ours, theirs = tensors(2500, dtype, device), tensors(2500, dtype, device)
    for step in range(1, 6):
        scalars = torch.tensor([0.3, 1e-2, float(step), 0.0], device=device)
        adamw(**ours, scalars=scalars, **SETTINGS)
        adamw_reference(**theirs, scalars=scalars, **SETTINGS)
    for name in ("master", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
    if dtype is not None:
        rounded = ours["master"].to(dtype)
        # The interpreter cuts the low bits where the device rounds: one unit in the last place of bf16.
        torch.testing.assert_close(ours["compute"], rounded, rtol=0.0 if device == "cuda" else 2**-7, atol=0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled below instead")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_interpreted_adamw_equals_the_reference(dtype):
    check("cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_compiled_adamw_equals_the_reference(dtype):
    check("cuda", dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
def test_a_skipped_update_moves_nothing():
    ours, before = tensors(100, torch.bfloat16, "cpu"), tensors(100, torch.bfloat16, "cpu")
    ours["grad"].fill_(float("nan"))
    adamw(**ours, scalars=torch.tensor([float("nan"), 1e-2, 1.0, 1.0]), **SETTINGS)
    for name in ("master", "exp_avg", "exp_avg_sq", "compute"):
        assert torch.equal(ours[name], before[name])


def test_the_reference_is_torchs_adamw():
    ours = tensors(500, None, "cpu")
    parameter = torch.nn.Parameter(ours["master"].clone())
    ours["exp_avg"].zero_()
    ours["exp_avg_sq"].zero_()
    torch_adamw = torch.optim.AdamW([parameter], lr=1e-2, foreach=False, **SETTINGS)
    for step in range(1, 20):
        ours["grad"] = torch.sin(torch.arange(500.0) * step)
        parameter.grad = ours["grad"].clone()
        torch_adamw.step()
        adamw_reference(**ours, scalars=torch.tensor([1.0, 1e-2, float(step), 0.0]), **SETTINGS)
    torch.testing.assert_close(ours["master"], parameter.detach(), rtol=1e-5, atol=1e-6)


def chains(device: str, dtype: torch.dtype) -> dict[str, tuple]:
    """Each pointwise chain: kernel, reference, and inputs, of which floating tensors that require gradients count."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int, learned: bool = True) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(learned)

    x, y, modulation = random(2, 5, 70), random(2, 5, 70), [random(2, 70) for _ in range(3)]
    noise, actions = random(2, 50, 32, learned=False), random(2, 50, 32, learned=False)
    return {
        "gated norm": (GatedNorm.apply, gated_norm_reference, (x, y, *modulation, 1e-6)),
        "geglu": (GeGLU.apply, geglu_reference, (random(2, 5, 300), random(2, 5, 300))),
        "flow loss": (FlowLoss.apply, flow_reference, (noise, actions, random(2, 50, 32), 7)),
    }


def values_and_gradients(function, inputs: tuple) -> list[torch.Tensor]:
    learned = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [torch.cos(torch.arange(out.numel(), device=out.device)).view(out.shape).to(out.dtype) for out in outputs]
    total = sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True))
    return [out.detach() for out in outputs] + list(torch.autograd.grad(total, learned))


def check_chain(name: str, device: str, dtype: torch.dtype) -> None:
    kernel, reference, inputs = chains(device, dtype)[name]
    ours, theirs = values_and_gradients(kernel, inputs), values_and_gradients(reference, inputs)
    relative = 1e-5 if dtype == torch.float32 else 2e-2
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert (a - b).float().norm() <= relative * b.float().norm()


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled below instead")
@pytest.mark.parametrize("name", ["gated norm", "geglu", "flow loss"])
def test_interpreted_chain_equals_its_reference(name):
    check_chain(name, "cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gated norm", "geglu", "flow loss"])
def test_compiled_chain_equals_its_reference(name, dtype):
    check_chain(name, "cuda", dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")
def test_a_chain_with_a_wrong_slope_is_noticed(monkeypatch):
    backward = GeGLU.backward
    monkeypatch.setattr(GeGLU, "backward", staticmethod(lambda ctx, d: tuple(1.001 * g for g in backward(ctx, d))))
    with pytest.raises(AssertionError):
        check_chain("geglu", "cpu", torch.float32)
