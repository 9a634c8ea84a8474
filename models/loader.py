"""Makes a network whose every weight was written exactly once, or refuses to.

A network names the checkpoint tensors that fill it; a checkpoint lists what it holds. The two are
compared before anything is read, so a missing shard or a wrong shape costs no waiting.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from octavo.config import DType
from octavo.errors import ConfigError, ModelLoadError
from octavo.models.causal_lm import CausalLM
from octavo.models.config import ModelConfig
from octavo.models.fp8_checkpoint import Fp8Checkpoint
from octavo.models.gguf import GGUFCheckpoint
from octavo.models.gguf_header import read_gguf_header
from octavo.models.layers.parallel import Shard
from octavo.models.layers.weights import CheckpointTensor
from octavo.models.ops.eight_bits import FP8, quantize_rows
from octavo.models.registry import get_builder
from octavo.models.safetensors_checkpoint import FP8_TYPES, SafetensorsCheckpoint
from octavo.models.source import ModelSource
from octavo.models.upload import Write, write_all

DUMMY_STD = 0.02
GIB = 2**30


class Checkpoint(Protocol):
    """Named tensors in files."""

    name: str
    """The file or folder, for messages."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, in the order in which they are best read."""

    def read(self, name: str) -> Tensor:
        """Return one tensor whole, on the CPU; what is stored in fewer bits is dequantised."""


def resolve_dtype(name: DType, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the type of weights and K/V; auto is float32 on a CPU, else the checkpoint's own.

    A float32 checkpoint becomes bfloat16 on a GPU.
    """
    if name == "auto":
        stored = "bfloat16" if config.dtype == "float32" else config.dtype
        name = "float32" if device.type == "cpu" else stored
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def load_model(
    source: ModelSource,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard | None = None,
    memory_limit: int | None = None,
) -> CausalLM:
    """Build the network, or one rank's shard of it, and fill all its weights.

    Weights of more than ``memory_limit`` bytes are refused before any is read.

    Raises:
        ModelLoadError: a tensor is missing, unknown, misshapen or cut.
        ConfigError: the network is not supported, cannot be split or does not fit in memory.
    """
    shard = shard or Shard()
    model = build_model(config, shard, dtype=dtype, device=device, memory_limit=memory_limit)
    match source.load_format:
        case "dummy":
            _fill_randomly(model, seed=source.seed + shard.rank, device=device)
        case "gguf":
            _fill(model, GGUFCheckpoint(read_gguf_header(source.path)), device)
        case "safetensors":
            _fill(model, _open_safetensors(source, config), device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # rows were quantised there
    return model.eval()


def build_model(
    config: ModelConfig,
    shard: Shard,
    *,
    dtype: torch.dtype,
    device: torch.device,
    memory_limit: int | None = None,
) -> CausalLM:
    """Return the network with memory for its weights, which is not written yet.

    Raises:
        ConfigError: the network cannot be split or does not fit in memory.
    """
    try:
        with _defaults(dtype, device):
            model = get_builder(config)(config, shard)
    except RuntimeError as error:  # torch has no other type for a want of main memory
        reason = str(error).splitlines()[0]
        raise ConfigError(f"there is no memory for the network's weights: {reason}") from error
    _check_memory(model, memory_limit)
    return model


def _check_memory(model: CausalLM, limit: int | None) -> None:
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    if limit is not None and num_bytes > limit:
        raise ConfigError(
            f"the network's weights take {num_bytes / GIB:.2f} GiB, and {limit / GIB:.2f} GiB of"
            " memory are free: choose a smaller network, or a 16-bit dtype"
        )


@contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Create parameters with this type on this device."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(previous)


def _fill(model: CausalLM, checkpoint: Checkpoint, device: torch.device) -> None:
    wanted = {tensor.name: tensor for tensor in model.checkpoint_tensors()}
    shapes = checkpoint.shapes()
    _check_covered(model, list(wanted.values()))
    _check_matches(wanted, shapes, checkpoint.name, is_tied=model.config.tie_word_embeddings)

    tensors = (wanted[name] for name in shapes if name in wanted)
    write_all((write for tensor in tensors for write in _plan(tensor, checkpoint)), device)


def _plan(tensor: CheckpointTensor, checkpoint: Checkpoint) -> Iterator[Write]:
    """Plan how one tensor is written: as it is stored, if the network keeps it so, too."""
    stored = None
    if tensor.target.dtype == FP8 and isinstance(checkpoint, Fp8Checkpoint):
        stored = checkpoint.read_fp8(tensor.name)
    if tensor.scale is None or stored is None:
        yield Write(
            tensor.target, lambda: tensor.part_of(checkpoint.read(tensor.name)), tensor.scale
        )
        return
    values, scale = stored
    yield Write(tensor.target, lambda: tensor.part_of(values))
    yield Write(tensor.scale, lambda: tensor.scale_part_of(scale))


def _open_safetensors(source: ModelSource, config: ModelConfig) -> Checkpoint:
    if config.quantization is None or not config.quantization.is_stored:
        return SafetensorsCheckpoint(source.path)
    return Fp8Checkpoint(SafetensorsCheckpoint(source.path, FP8_TYPES), config.quantization.block)


def _check_covered(model: CausalLM, tensors: Sequence[CheckpointTensor]) -> None:
    """Assert that the named tensors leave no weight unwritten."""
    padding = sum(m.num_padding_elements for m in {model.embed_tokens, model.lm_head})
    num_written = sum(tensor.num_elements for tensor in tensors)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    assert num_written + padding == num_weights, f"{num_written} of {num_weights} weights named"


def _check_matches(
    wanted: dict[str, CheckpointTensor],
    shapes: dict[str, tuple[int, ...]],
    place: str,
    *,
    is_tied: bool,
) -> None:
    missing = [name for name in wanted if name not in shapes]
    if missing:
        raise ModelLoadError(f"{place} lacks {_enumerate(missing)}, which the network needs")
    extra = [
        name for name in shapes if name not in wanted and not _is_ignorable(name, is_tied=is_tied)
    ]
    if extra:
        raise ModelLoadError(f"{place} has {_enumerate(extra)}, which the network does not know")
    for name, tensor in wanted.items():
        if shapes[name] != tensor.shape:
            raise ModelLoadError(
                f"tensor {name} of {place} has shape {shapes[name]} instead of {tensor.shape}"
            )


def _is_ignorable(name: str, *, is_tied: bool) -> bool:
    """Old checkpoints stored rotation tables, and some store a tied head twice."""
    return name.endswith(".rotary_emb.inv_freq") or (is_tied and name == "lm_head.weight")


def _enumerate(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f"tensor {shown}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _fill_randomly(model: CausalLM, *, seed: int, device: torch.device) -> None:
    """Draw matrices from a normal distribution; norms become 1 and biases 0.

    Quantised ones are those that are drawn without quantisation.
    """
    generator = torch.Generator(device).manual_seed(seed)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if (scale := parameters.get(name.removesuffix("weight") + "scale")) is not None:
            drawn = torch.empty(parameter.shape, dtype=model.norm.weight.dtype, device=device)
            drawn.normal_(std=DUMMY_STD, generator=generator)
            values, scales = quantize_rows(drawn, parameter.dtype)
            parameter.copy_(values)
            scale.copy_(scales)
        elif parameter.dim() > 1:
            parameter.normal_(std=DUMMY_STD, generator=generator)
        elif not name.endswith(".scale"):
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
