"""Two optimisers: Muon for the matrices inside the blocks, AdamW for everything else."""

import torch
from torch import Tensor, nn

_A, _B, _C = 3.4445, -4.7750, 2.0315      # Jordan's coefficients


def orthogonalise(g: Tensor, num_steps: int = 5) -> Tensor:
    """Newton-Schulz steps towards the nearest orthogonal matrix; batched.

    Every step multiplies from the left by a polynomial of the Gram matrix. For wide matrices it is cheaper to gather
    these factors, which are small and commute, and to multiply once.
    """
    is_tall = g.shape[-2] > g.shape[-1]
    x = g.mT.contiguous() if is_tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    rows, columns = x.shape[-2:]
    gram = x @ x.mT.contiguous()
    product = None
    for step in range(num_steps):
        factor = _B * gram + _C * (gram @ gram)
        factor.diagonal(dim1=-2, dim2=-1).add_(_A)
        is_last = step == num_steps - 1
        if columns >= 3 * rows:
            product = factor if product is None else factor @ product
            gram = gram if is_last else factor @ (gram @ factor)
        else:
            x = factor @ x
            gram = gram if is_last else x @ x.mT.contiguous()
    x = x if product is None else product @ x
    return x.mT.contiguous() if is_tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose step has all singular values near one."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self.num_steps = 5

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                direction = orthogonalise(parameter.grad.lerp(buffer, group["momentum"]), self.num_steps)
                rows, columns = parameter.shape[-2:]
                parameter.add_(direction, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def make_optimizers(model: nn.Module) -> tuple[Muon, torch.optim.AdamW]:
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_block = parameter.dim() > 1 and not name.endswith((".gate", "embed_tokens.weight", "lm_head.weight"))
        (matrices if is_block else others).append(parameter)
    return Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
