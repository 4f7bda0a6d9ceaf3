"""Tripool serves DeepSeek-class mixture-of-experts models from three peer pools: prefill, decode and cache."""

__version__ = "0.1.0"
