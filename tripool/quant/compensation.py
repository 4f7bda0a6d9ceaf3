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
    left_OI = weight_OI.clone()
    q_OI = torch.empty(weight_OI.shape, dtype=torch.int8)
    for first in range(0, num_inputs, COLUMNS):
        last = min(first + COLUMNS, num_inputs)
        block_OC = left_OI[:, first:last].clone()
        error_OC = torch.empty_like(block_OC)
        corner_CC = upper_II[first:last, first:last]
        for column in range(last - first):
            q_O = (block_OC[:, column] / scale_O).round().clamp(-LIMIT, LIMIT)
            q_OI[:, first + column] = q_O.to(torch.int8)
            error_O = (block_OC[:, column] - q_O * scale_O) / corner_CC[column, column]
            block_OC[:, column:] -= error_O.unsqueeze(-1) * corner_CC[column, column:]
            error_OC[:, column] = error_O
        left_OI[:, last:] -= error_OC @ upper_II[first:last, last:]
    return Quantised(q_OI, scale_O)


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
