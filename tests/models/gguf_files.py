"""Writes a checkpoint folder as llama.cpp's converter would write it: as one GGUF file."""

import json

import gguf
from safetensors.torch import load_file

EPS = 1e-6
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(folder, path, *, kind=gguf.GGMLQuantizationType.F32, fields=None, tensors=None):
    """Write the folder's network; ``fields`` and ``tensors`` are added to the file as they are."""
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_token_list(["<unk>", "<s>", "</s>", "é"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    for name, value in (fields or {}).items():
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](
            name, value
        )
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = _permute(name, tensor, config).contiguous().numpy()
        stored_as = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_rename(name), gguf.quantize(values, stored_as), raw_dtype=stored_as)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _rename(name):
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{PARTS[stem]}.{kind}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{PARTS[part]}.{kind}"


def _permute(name, tensor, config):
    """Interleave the two halves of every q and k head, as the llama family is stored."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = name.split(".")[-2]
    if config["model_type"] != "llama" or part not in heads:
        return tensor
    num_heads = config[heads[part]]
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)
