"""Runs for real: event loop, wall clock, links between processes, and a data plane of engine and pool."""
