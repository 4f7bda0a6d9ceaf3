"""Error compensation: what rounding one column does to the products, the columns after it make up for.

Inputs that rise and fall together can stand in for one another. Columns are rounded one after another; the error of
each is spread over those not yet rounded so that the products with the calibration rows change least (GPTQ: the
inverse of the inputs' second moments says how). Scales stay as they are.

O outputs · I inputs · N rows
"""

from __future__ import annotations

import torch
from torch import Tensor

from tripool.quant.scales import LIMIT, Quantised

DAMPING = 0.01               # of the mean second moment: keeps directions that no row showed from taking any error
COLUMNS = 128                # whose errors are spread over the rest at once


def compensated(weight_OI: Tensor, scale_O: Tensor, x_NI: Tensor) -> Quantised:
    """Rounded with compensation."""
    num_inputs = weight_OI.shape[1]
    upper_II = _inverse_factor(x_NI)
    left_IO = weight_OI.T.clone(memory_format=torch.contiguous_format)
    q_IO = torch.empty_like(left_IO)
    for first in range(0, num_inputs, COLUMNS):
        last = min(first + COLUMNS, num_inputs)
        block_CO, corner_CC = left_IO[first:last], upper_II[first:last, first:last]
        error_CO = torch.empty_like(block_CO)
        for column, pivot in enumerate(corner_CC.diagonal().tolist()):
            weight_O, q_O = block_CO[column], q_IO[first + column]
            torch.div(weight_O, scale_O, out=q_O).round_().clamp_(-LIMIT, LIMIT)
            torch.addcmul(weight_O, q_O, scale_O, value=-1, out=error_CO[column]).div_(pivot)
            block_CO[column + 1:].addr_(corner_CC[column, column + 1:], error_CO[column], alpha=-1)
        left_IO[last:].addmm_(upper_II[first:last, last:].T, error_CO, alpha=-1)
    return Quantised(q_IO.T.contiguous().to(torch.int8), scale_O)


def _inverse_factor(x_NI: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the inputs' second moments."""
    num_rows, num_inputs = x_NI.shape
    moment_II = x_NI.double().T @ x_NI.double()
    mean = float(moment_II.diagonal().mean())
    if not mean:
        return torch.eye(num_inputs)
    damping = DAMPING * max(1.0, num_inputs / num_rows)      # few rows say little about most directions
    moment_II.diagonal().add_(damping * mean)
    inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(moment_II))
    return torch.linalg.cholesky(inverse_II, upper=True).float()
