"""Command lines: `syncd follow` and `explorer`, one file for each verb."""
