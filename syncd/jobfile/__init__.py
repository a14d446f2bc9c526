"""The one file of a job, as trainer and explorers read it: sections that both know, layers, and what is wrong.

`sections` needs pydantic, which comes with the extras `trainer` and `explorer`; nothing else in `syncd` imports it.
"""
