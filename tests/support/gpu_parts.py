"""What verl does on GPUs alone, made to run on processors, for tests: FSDP1, and Ulysses around a plain attention.

FSDP1, the exchange of heads between ranks, and all that verl does around both are the real ones. Taken out is torch's
check that FSDP1 begins on a GPU; in the place of the kernel of flash attention is its formula in plain torch, which
takes float32 too.
"""

import functools

import torch


@functools.cache
def install():
    """Make verl's FSDP1 and its sequence parallelism compute on processors; it changes this process for good."""
    from torch.distributed.fsdp import _init_utils

    from trainer.config import load
    from trainer.engines.verl import checks, platform, quiet_import

    _init_utils._check_module_states_for_sync_module_states = lambda _: None
    checks._refuse_on_processors = lambda _: None
    load.attention_problems = lambda _: ()  # float32, in which a comparison shows more than in bfloat16
    with quiet_import():
        platform.install()
        from verl.workers.engine import EngineRegistry
        from verl.workers.engine.fsdp import transformer_impl
    for kind, name in (("language_model", "LMHead"), ("value_model", "ValueHead")):
        engine = getattr(transformer_impl, f"FSDPEngineWith{name}")
        EngineRegistry.register(kind, "fsdp", device="cpu")(engine)
    _give_flash_attention()


def _give_flash_attention():
    """Have transformers find a flash attention, as it finds the package's."""
    from transformers import modeling_flash_attention_utils as utils
    from transformers import modeling_utils

    functions = (dense_attention, packed_attention, None, utils._pad_input, utils._unpad_input)
    utils._lazy_imports = lambda *_, **__: functions
    modeling_utils.is_kernels_available = lambda *_: False
    modeling_utils.PreTrainedModel._flash_attn_can_dispatch = lambda *_, **__: True


def dense_attention(q, k, v, softmax_scale=None, causal=False):
    """Return what `flash_attn_func` returns, of tensors (rows, tokens, heads, width)."""
    heads = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(heads, 2), v.repeat_interleave(heads, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def packed_attention(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False
):
    """Return what `flash_attn_varlen_func` returns, of tensors (tokens of all rows, heads, width)."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
    sizes = cu_seqlens_q.diff().tolist()
    rows = zip(*(tensor.split(sizes) for tensor in (q, k, v)), strict=True)
    return torch.cat([
        dense_attention(*(part[None] for part in row), softmax_scale, causal)[0] for row in rows
    ])  # fmt: skip
