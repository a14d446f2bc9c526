"""`syncd probe`: Print what a model directory answers to fixed tokens, to prove engines with."""

import click

from syncd.console import UncheckedPath


@click.command()
@click.argument("directory", metavar="DIR", type=UncheckedPath(file_okay=False))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    help="Dtype of the forward pass.",
)
@click.option("--trust-remote-code", "trust", is_flag=True, help="Run code that comes with the model.")
def probe(directory: str, dtype: str, trust: bool) -> None:
    r"""Print the probe of the Hugging Face model directory DIR, for `syncd publish --probe`.

    A probe is what a model answers to a few fixed token sequences. Engines that load the step are compared with it.
    transformers computes it on the CPU; the weights must be safetensors. This needs the extra `transformers`.

    \b
    Exit codes:
      65  a log-prob is not finite
      78  DIR is no such directory, its model is damaged or incomplete, or transformers is not installed

    \b
    Example:
      syncd probe ./export > probe.json && syncd publish /ckpt/job 120 ./export --probe probe.json
    """
    from syncd.protocol.probe import encode_probe  # noqa: PLC0415
    from trainer.probe import probe_directory  # noqa: PLC0415 - imports torch

    click.echo(encode_probe(probe_directory(directory, dtype, trust=trust)), nl=False)
