"""The mathematics of DeepSeek-V2, V3 and R1; it does not know how it is sharded."""
