"""One module an engine, each a `Hook`; found by the entry points `syncd.hooks`."""
