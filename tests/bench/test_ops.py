import pytest

import ops
from common import Report


def test_the_summary_is_of_the_best_of_torch_in_each_cell():
    report = Report("?")
    for name, value in (("int8_linear_vs_fp32_m1", 4.0), ("int8_linear_vs_bf16_m1", 9.0),
                        ("int8_linear_vs_fp32_m16", 1.0),
                        ("int8_linear_vs_bf16_m16", 5.0), ("mla_decode_bf16_q1_vs_torch", 3.0),
                        ("mla_decode_bf16_q1_vs_definition", 0.1), ("head_product_int8_fp32_vs_torch_m8", 2.5),
                        ("sample_top_k_vs_torch_m1", 8.0), ("sample_top_k_vs_definition_m1", 0.2),
                        ("int8_linear_of_bandwidth_m1", 0.3), ("float_linear_fp32_vs_fp32_m1", 3.5),
                        ("float_linear_fp32_vs_bf16_m1", 0.4)):
        report.figure(f"ops.{name}", value, "ratio")
    ops.add_summary(report)
    named = {each["name"]: each for each in report.figures}
    least, worst = named["ops.geomean_vs_torch"], named["ops.worst_vs_torch"]
    assert (least["value"], least["op"], least["bar"]) == (pytest.approx(2.0), "int8_linear", ">= 1.5")
    assert least["all"] == pytest.approx({"int8_linear": 2.0, "mla_decode": 3.0, "head_product": 2.5, "sample": 8.0,
                                          "float_linear": 3.5})
    assert (worst["value"], worst["cell"], worst["bar"]) == (1.0, "int8_linear_m16", ">= 0.95")
