"""The paper's tables and those of later sources, beside what the simulator says of them."""
