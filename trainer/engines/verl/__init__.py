"""verl's FSDP engines as a training engine: no Ray, ranks from torchrun or `trainer train`."""
