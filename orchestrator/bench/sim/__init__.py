"""The simulator: the live plan and boundary core on a virtual clock. No threads, no sockets."""
