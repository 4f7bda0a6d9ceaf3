"""Machines as data: one TOML file each, and the module that reads them.

The files lie in the package, not beside it, so that an installed wheel finds them without a search path.
"""
