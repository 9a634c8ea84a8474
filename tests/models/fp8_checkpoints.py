"""Checkpoints in 8-bit floats, as the known tools write them, made from plain ones."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

FP8 = torch.float8_e4m3fn
BLOCK = (24, 40)  # divides no matrix of the tests evenly
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}

QWEN = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
}
AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def compressed(strategy, **changes):
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": TOKENS}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    } | changes


KINDS = {
    "one scale a matrix": ((1,), "weight_scale", AUTO_FP8),
    "one number a matrix": ((), "weight_scale", compressed("tensor")),
    "one scale an output": ((-1, 1), "weight_scale", compressed("channel")),
    "one scale a block": (BLOCK, "weight_scale_inv", QWEN),
}


def quantize_checkpoint(plain, folder, kind):
    """Write the plain checkpoint's copy in ``folder``; return its tensors dequantised."""
    shape, suffix, scheme = KINDS[kind]
    shutil.copytree(plain, folder)
    write_scheme(folder, scheme)
    stored, meant = {}, {}
    for name, values in load_file(plain / "model.safetensors").items():
        meant[name] = stored[name] = values
        if "_proj.weight" in name:
            codes, scale, factor = quantize(values, shape)
            stored[name] = codes
            stored[name.removesuffix("weight") + suffix] = scale
            meant[name] = codes.float() * factor
            if scheme is AUTO_FP8:
                stored[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
    save_file(stored, folder / "model.safetensors")
    return meant


def write_scheme(folder, scheme):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": scheme}))


def quantize(values, shape):
    """Return codes, the scales as they are stored, and the factor of every element."""
    rows, columns = values.shape
    if shape == BLOCK:
        blocks = [range(0, rows, BLOCK[0]), range(0, columns, BLOCK[1])]
        scale = torch.empty(len(blocks[0]), len(blocks[1]))
        factor = torch.empty(rows, columns)
        for i, top in enumerate(blocks[0]):
            for j, left in enumerate(blocks[1]):
                place = slice(top, top + BLOCK[0]), slice(left, left + BLOCK[1])
                scale[i, j] = factor[place] = values[place].abs().max() / 448
    elif shape == (-1, 1):
        scale = values.abs().amax(dim=1, keepdim=True) / 448
        factor = scale.expand(rows, columns)
    else:
        scale = (values.abs().max() / 448).reshape(shape)
        factor = scale.expand(rows, columns)
    return (values / factor).clamp(-448, 448).to(FP8), scale, factor
