"""How weights leave the trainer. A receiver of the same name is in `explorer_hooks/transports/`."""
