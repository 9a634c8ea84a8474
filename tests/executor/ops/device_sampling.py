"""Requests as the kernels see them, and the same requests as the CPU's sampler sees them."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from octavo.executor import sampler
from octavo.executor.ops import edit_logits as edit_module
from octavo.executor.ops import sample as sample_module
from octavo.executor.ops.edit_logits import edit_logits
from octavo.executor.ops.logits import LENGTH
from octavo.executor.ops.row_parameters import EDITS
from octavo.executor.ops.sample import SampledRows, SampleWorkspace, sample
from octavo.executor.row_records import pack_edit_list, pack_record
from octavo.executor.rows import Rows
from tests.steps import make_row

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_TOKENS = 64
PROMPT = (3, 4, 5)
POISON = -7


@dataclass
class Requests:
    """Request i is in row i on the host and in row ``device_rows[i]`` on the device."""

    host: Rows
    batch: SampledRows
    edit_lists: list[Tensor | None]
    workspace: SampleWorkspace | None = field(default=None, init=False)

    @property
    def has_edits(self):
        return bool((self.batch.parameters[:, EDITS.value] > 0).any())

    @property
    def num_listed(self):
        """Logits of the first row that were inside the bracket."""
        lengths = self.workspace.partials[0, :, LENGTH.value].view(torch.int32)
        return int(lengths[lengths != POISON].sum())

    def sample(self, logits, *, capacity=sample_module.LIST_CAPACITY):
        """Token ids and faults of the kernels; outputs start poisoned."""
        size = len(logits)
        workspace = SampleWorkspace.create(size, DEVICE, list_capacity=capacity)
        self.workspace = workspace
        for tensor in (workspace.token_ids, workspace.faults, workspace.list_ids):
            tensor.fill_(POISON)
        workspace.brackets.fill_(torch.nan)
        workspace.partials.view(torch.int32).fill_(POISON)
        edited = None
        if self.has_edits:
            edited = torch.full(logits.shape, torch.nan, dtype=torch.float32, device=DEVICE)
            edit_logits(logits, self.batch, edited=edited)
        return sample(logits, self.batch, workspace=workspace, edited=edited)

    def expect(self, logits):
        """Samples of the CPU's sampler."""
        rows = np.arange(len(self.edit_lists), dtype=np.int32)
        return sampler.sample(logits.float().cpu(), self.host, rows)


def make_requests(*requests, num_padding=0):
    """Requests given as (outputs, keywords of RowSampling), behind padding rows if any."""
    host = Rows(len(requests), max_tokens=MAX_TOKENS, max_blocks=4)
    size = len(requests)
    parameters = torch.full((size + 2, 16), POISON, dtype=torch.int32)
    history = torch.full((size + 2, MAX_TOKENS), POISON, dtype=torch.int32)
    rows = [-1] * num_padding
    positions = [0] * num_padding
    edit_lists = []
    for index, (outputs, params) in enumerate(requests):
        ids = [*PROMPT, *outputs]
        new = make_row(index, token_ids=ids, num_prompt=len(PROMPT), **params)
        host.write(new)
        words = pack_edit_list(new.sampling)
        edit_list = None if words is None else torch.from_numpy(words).to(DEVICE)
        address = None if edit_list is None else edit_list.data_ptr()
        row = size + 1 - index  # no request is in the row of its place in the batch
        parameters[row] = torch.from_numpy(pack_record(new, edit_list_address=address))
        history[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        rows.append(row)
        positions.append(len(ids))
        edit_lists.append(edit_list)
    batch = SampledRows(
        rows=torch.tensor(rows, dtype=torch.int32, device=DEVICE),
        positions=torch.tensor(positions, dtype=torch.int32, device=DEVICE),
        parameters=parameters.to(DEVICE),
        history=history.to(DEVICE),
    )
    return Requests(host, batch, edit_lists)


def use_small_programs(monkeypatch, *, num_programs=8, tile=512):
    """Cut rows so that a small vocabulary has several splits and tiles, yet few programs."""
    monkeypatch.setattr(sample_module, "NUM_PROGRAMS", num_programs)
    monkeypatch.setattr(sample_module, "SUMMARY_TILE", tile)
    monkeypatch.setattr(sample_module, "SCAN_TILE", tile)
    monkeypatch.setattr(sample_module, "CHOICE_TILE", tile)
    monkeypatch.setattr(sample_module, "WIDE_TILE", 2 * tile)
    monkeypatch.setattr(edit_module, "TILE", tile)
    monkeypatch.setattr(edit_module, "NUM_SPLITS", 2)


def make_logits(num_rows, vocab_size, *, spread=2.0, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * spread).to(DEVICE, dtype)
