"""The trainer: consumes experiences, trains the model, and writes steps by the protocol."""
