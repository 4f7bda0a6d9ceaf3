"""Names things: requests, messages, plans, shapes, keys. Standard library only, no clock, thread or socket."""
