"""Preparing weights: from BF16, FP16, FP32 or FP8 to INT8 with scales (`tripool quantize`)."""
