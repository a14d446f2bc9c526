"""Command lines: `syncd follow` and `explorer`; one file a verb."""
