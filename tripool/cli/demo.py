"""`tripool demo`."""
def demo() -> None:
    """See a small model answer through three pools."""
