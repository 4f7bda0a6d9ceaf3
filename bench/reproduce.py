"""How close is the simulator to what was published and did not fit it?

Nothing is measured here: every figure is simulated, held against a published number, and the same on every machine.
`tripool reproduce` shows the numbers one by one.
"""

from __future__ import annotations

from common import Report, flags
from tripool.sim.costs.residuals import Residuals, fitted_residuals
from tripool.sim.reproduce.score import HELD_OUT, make_report


def main() -> None:
    args = flags(__doc__.splitlines()[0]).parse_args()
    residuals = fitted_residuals()
    scored = make_report(residuals)
    report = Report(__doc__.splitlines()[0],
                    {"residuals": {name: getattr(residuals, name) for name in Residuals.__slots__},
                     "held_out": len(scored.of_role(HELD_OUT))})
    errors = {"reproduce.held_out_worst": scored.held_out_errors, "reproduce.held_out_median": scored.held_out_errors,
              "reproduce.gpu_held_out_median": scored.gpu_held_out_errors}
    for figure in scored.figures():
        more = {"bar": figure["bar"]} if "bar" in figure else {}
        report.figure(figure["name"], figure["value"], figure["unit"], "simulated",
                      samples=errors.get(figure["name"], ()), **more)
    report.write(args.json)


if __name__ == "__main__":
    main()
