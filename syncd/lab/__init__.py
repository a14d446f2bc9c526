"""Tools to try a mount and the protocol: the doctor and the simulator."""
