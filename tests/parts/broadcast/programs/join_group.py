"""A worker that joins a group and says what it has received.

join_group.py DEVICE MEETING BUCKET      the latter two in JSON; it writes its digest
"""

import json
import sys

import torch
from open_shared import digest

from explorer_hooks.parts.broadcast.worker import Bucket, Meeting


def main(device, meeting, bucket):
    wanted = Bucket(**json.loads(bucket))
    group = Meeting(**json.loads(meeting)).open(0, torch.device(device))
    tensors = group.tensors(wanted, 0)
    assert {tensor.device for tensor in tensors} == {torch.device(device)}
    print(digest(zip(wanted.names, tensors, strict=True)))
    group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
