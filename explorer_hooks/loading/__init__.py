"""Reading a step's tensors straight into parameters that exist."""
