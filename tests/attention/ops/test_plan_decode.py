"""How the tiles of all rows are cut into shares."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention.backend import AttentionInputs
from octavo.attention.ops.decode_workspace import DecodeWorkspace
from octavo.attention.ops.plan_decode import plan_decode
from tests.attention.ops.batches import DEVICE, make_layer

TILE, NUM_KV_HEADS = 32, 2


def plan(lengths, num_programs):
    """Plan rows that have no block in common."""
    num_blocks = -(-max(lengths) // 16)
    workspace = DecodeWorkspace.create(64, torch.float32, num_programs=num_programs, device=DEVICE)
    assert workspace.tile_tokens == TILE
    inputs = AttentionInputs(
        torch.arange(len(lengths) + 1).int().to(DEVICE),
        torch.tensor(lengths).int().to(DEVICE),
        torch.arange(len(lengths) * num_blocks).int().view(len(lengths), -1).to(DEVICE),
        torch.empty(len(lengths)),
        torch.empty(len(lengths)),
    )
    return plan_decode(make_layer(), inputs, workspace=workspace, block_size=16)


def walk(found):
    """Return of each program its pieces (row, head, first tile, tiles), as the kernel walks."""
    lines, pieces = found.lines[0].tolist(), []
    for program, record in enumerate(found.shares[0].tolist()):
        number, share, end = record[6:9]
        unit = program * share
        pieces.append([])
        while unit < end:
            start, tiles, row, _, _, pitch = record[:6]
            head = (unit - start) // pitch
            tile = (unit - start) % pitch
            length = min(tiles - tile, end - unit)
            pieces[-1].append((row, head, tile, length))
            unit += pitch - tile if tile + length == tiles else length
            if unit == start + pitch * NUM_KV_HEADS and unit < end:
                number += 1
                record = lines[number]
    return pieces


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=20), st.integers(1, 64))
def test_every_tile_of_every_head_is_in_one_share(lengths, num_programs):
    pieces = walk(plan(lengths, num_programs))
    seen = sorted(piece for of_program in pieces for piece in of_program)
    expected = []
    for row, length in enumerate(lengths):
        for head in range(NUM_KV_HEADS):
            tile = 0
            for piece in [piece for piece in seen if piece[:2] == (row, head)]:
                assert piece[2] == tile
                assert piece[3] > 0
                tile += piece[3]
            expected.append(tile == -(-length // TILE))
    assert all(expected)


def test_shares_belong_to_one_segment_where_there_are_programs_enough():
    pieces = walk(plan([1130] * 4, 60))  # 36 tiles, 7 programs a segment: 6 shares of 6
    assert [len(of_program) for of_program in pieces] == [1] * 48 + [0] * 12
    assert {piece[3] for of_program in pieces for piece in of_program} == {6}


def test_shares_are_cut_anywhere_where_whole_ones_would_be_much_longer():
    pieces = walk(plan([960, 320], 4))  # 80 tiles: shares of 20, where 30 would be whole
    assert [sum(piece[3] for piece in of_program) for of_program in pieces] == [20] * 4
