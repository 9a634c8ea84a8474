"""What the backend plans once a step; its kernels are tested in tests/attention/ops."""

import torch

from octavo.attention.ops.store_kv import store_kv
from octavo.attention.triton_backend import PromptRows
from tests.attention.ops.batches import make_batch, make_layer


def test_last_tokens_are_planned_apart_from_all():
    torch.manual_seed(0)
    batch = make_batch(make_layer(), [(1, 5), (18, 20), (3, 31)])
    q, _ = store_kv(batch.layer, batch.qkv, inputs=batch.inputs, cache=batch.cache)
    prompts = PromptRows(batch.inputs)
    every_token = list(range(1, 22))
    for last_only, expected in ((False, every_token), (True, [18, 21]), (False, every_token)):
        out = torch.full_like(q, torch.nan)
        prompts.attend(batch.layer, q, cache=batch.cache, out=out, last_only=last_only)
        is_written = out.isfinite().flatten(1).all(dim=1)
        assert is_written.nonzero().flatten().tolist() == expected
