"""How the ranks of an instance work together."""
