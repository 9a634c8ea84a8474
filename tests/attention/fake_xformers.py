"""What the backend uses of xformers, in plain torch: the operator as its documentation has it."""

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import torch


@dataclass
class FakeMask:
    """A paged mask: row i's one query sees the first ``seqlen[i]`` keys of its pages."""

    q_seqinfo: SimpleNamespace
    k_seqinfo: SimpleNamespace
    block_tables: torch.Tensor
    page_size: int

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen, block_tables, page_size, *, device):
        assert len(q_seqlen) == len(kv_seqlen) == len(block_tables)
        assert set(q_seqlen) == {1}
        assert max(kv_seqlen) <= block_tables.shape[1] * page_size
        starts = torch.arange(len(q_seqlen) + 1, dtype=torch.int32, device=device)
        lengths = torch.tensor(kv_seqlen, dtype=torch.int32, device=device)
        return cls(
            SimpleNamespace(seqstart=starts),
            SimpleNamespace(seqlen=lengths),
            block_tables,
            page_size,
        )


@dataclass
class FakeXformers:
    """The modules, and the inputs and parts of the calls that were made."""

    calls: list[SimpleNamespace] = field(default_factory=list)

    def install(self, monkeypatch):
        """Let ``import xformers`` find this."""
        names = ("xformers", "xformers.ops", "xformers.ops.fmha")
        modules = {name: ModuleType(name) for name in names}
        fmha = modules["xformers.ops.fmha"]
        modules["xformers.ops"].fmha = fmha
        fmha.Inputs = SimpleNamespace
        fmha.attn_bias = SimpleNamespace(PagedBlockDiagonalPaddedKeysMask=FakeMask)
        fmha.triton_splitk = SimpleNamespace(FwOp=SimpleNamespace(get_operator=self.get_operator))
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def get_operator(self, parts):
        def apply(inputs, *, needs_gradient):
            assert not needs_gradient
            self.calls.append(SimpleNamespace(parts=parts, **vars(inputs)))
            return attend(**vars(inputs)), None

        return SimpleNamespace(apply=apply)


def attend(query, key, value, attn_bias, scale):
    """Return the outputs, (1, num_rows, num_kv_heads, group, head_dim)."""
    lengths, size = attn_bias.k_seqinfo.seqlen, attn_bias.page_size
    assert lengths.dtype == attn_bias.block_tables.dtype == torch.int32
    assert query.shape[2:] == key.shape[2:] == value.shape[2:]
    assert key.shape[1] == value.shape[1]
    assert key.shape[1] % size == 0
    out = torch.zeros_like(query)
    for row, length in enumerate(lengths.tolist()):
        token = torch.arange(length)
        place = attn_bias.block_tables[row, token // size].long() * size + token % size
        scores = torch.einsum("ghd,tghd->ght", query[0, row].float(), key[0, place].float())
        weights = (scale * scores).softmax(-1)
        if length:
            out[0, row] = torch.einsum("ght,tghd->ghd", weights, value[0, place].float())
    return out
