"""What a fake engine answers to a probe: log-probs that the bytes of its weights decide.

With the weights of `small_qwen` they are those of transformers. Any other weights have log-probs that are drawn from
their fingerprint and the tokens before, so that a test can compute them without torch.
"""

import hashlib
import struct

from support import small_qwen

VOCABULARY = 512
LONGEST = small_qwen.WINDOW
EMBEDDING = "model.embed_tokens.weight"


def fingerprint(weights):
    """Return what is the same for the same weights alone."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + b"\0" + weights[name] + b"\0")
    return digest.hexdigest()


def log_probs(weights, row):
    """Return the log-prob of each token after the first of a row."""
    if EMBEDDING in weights:
        return small_qwen.expected(small_qwen.model_from(weights), row, len(row) - 1)
    mark = fingerprint(weights)
    return [_drawn(mark, row[:at], row[at]) for at in range(1, len(row))]


def following(weights, row, tokens):
    """Return the log-prob of each of some tokens after a row."""
    if EMBEDDING in weights:
        return small_qwen.following(small_qwen.model_from(weights), row, tokens)
    mark = fingerprint(weights)
    return [_drawn(mark, row, token) for token in tokens]


def next_token(weights, row):
    """Return the likeliest token after a row, and its log-prob."""
    if EMBEDDING in weights:
        return small_qwen.likeliest(small_qwen.model_from(weights), row)
    mark = fingerprint(weights)
    found, token = max((_drawn(mark, row, token), token) for token in range(32))
    return token, found


def _drawn(mark, before, token):
    text = f"{mark} {before} {token}".encode()
    (number,) = struct.unpack("<Q", hashlib.blake2b(text, digest_size=8).digest())
    return -0.5 - 8 * number / 2**64
