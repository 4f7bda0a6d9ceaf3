"""The engine of an instance: rank 0 in this process, the others in processes of their own.

Each rank has its own cache arena and its own copy of what is not split. A step goes to all ranks at
once, each gets its section, and they meet in every layer's exchange; so one result is ready when all are.
The arenas are made here and mapped by the rank that computes in them; then they are sealed, and only
readers can map them. A rank that ends takes its instance with it.
"""

from __future__ import annotations


