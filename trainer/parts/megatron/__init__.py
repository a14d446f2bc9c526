"""The Megatron engine of verl, as `engine.strategy = "megatron"`."""
