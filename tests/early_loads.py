"""Compile the kernels of decode steps for Hopper, without one, and read what they do too early.

A kernel that starts early may read weights before it waits, and nothing that kernels write. The
compiler moves loads, so the machine code is what counts: every register carries the set of kernel
arguments that it was computed from, in program order up to the wait. And a product of matrices that
reads registers must be done before they are written again. Prints a line a kernel.

usage: python -m tests.early_loads
"""

import os

os.environ["TRITON_INTERPRET"] = "0"

import json
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor

from octavo.attention.backend import AttentionInputs
from octavo.attention.triton_backend import TritonBackend
from octavo.models.config import ModelConfig
from octavo.models.layers.parallel import Shard
from octavo.models.ops.linear_converted import multiply_converted
from octavo.models.qwen3 import build_qwen3
from octavo.models.rope import RopeConfig
from tests.machine_code import (
    FIRST_ARGUMENT,
    disassemble,
    find_early_accesses,
    find_unfinished_products,
)

NUM_ROWS = (1, 16, 32, 64, 128)
SETTLED = ("rotary_ptr", "positions_ptr", "slots_ptr", "shares_ptr", "block_tables_ptr")
"""What the first kernels of a step write, if any: there is one between at the least."""
DESCRIPTOR_BYTES = 128
CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=2,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-6,
    rope=RopeConfig(),
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    sliding_windows=(None, None),
    dtype="bfloat16",
)


@dataclass(frozen=True)
class Launch:
    """A kernel as it was launched; its pointers in order, and which of them are weights."""

    name: str
    num_rows: int
    cubin: bytes
    starts_early: bool
    pointers: dict[int, str]
    """Names by offset in the constant bank, of what kernels write: weights are not among them."""


def compile_decode_steps() -> list[Launch]:
    """Run a network, and a head of integers, over tensors without memory and compile both."""
    launches: dict[bytes, Launch] = {}
    run = JITFunction.run
    num_rows = 0

    def compile_only(kernel, *args, warmup=False, **options):
        mocks = [
            MockTensor(arg.dtype, arg.shape) if isinstance(arg, Tensor) else arg for arg in args
        ]
        compiled = run(kernel, *mocks, warmup=True, **options)
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        pointers = find_activations(compiled.src.signature, arguments)
        cubin, starts_early = compiled.asm["cubin"], bool(options.get("launch_pdl"))
        launch = Launch(kernel.fn.__name__, num_rows, cubin, starts_early, pointers)
        launches.setdefault(cubin, launch)
        return compiled

    JITFunction.run = compile_only
    driver.set_active(FakeHopper())
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_name = lambda device=None: "NVIDIA H200"
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        multi_processor_count=132
    )
    torch.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=0)
    torch.Tensor.is_cuda = property(lambda tensor: True)
    with torch.device("meta"):
        torch.set_default_dtype(torch.bfloat16)
        model = build_qwen3(CONFIG, Shard())
        backend = TritonBackend(model.kv_cache_spec(16), 8, dtype=torch.bfloat16, device="meta")
        torch.set_default_dtype(torch.float32)
        for num_rows in NUM_ROWS:
            inputs = make_inputs(num_rows)
            ids = torch.zeros(num_rows, dtype=torch.int64)
            model.compute_logits(model(ids, backend.bind(inputs)))
            head = torch.zeros(CONFIG.vocab_size, CONFIG.hidden_size, dtype=torch.int8)
            hidden = torch.zeros(num_rows, CONFIG.hidden_size, dtype=torch.bfloat16)
            multiply_converted(hidden, head, torch.zeros(len(head)), None)
    return list(launches.values())


class FakeHopper:
    """A driver of a device that can only be compiled for."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def make_inputs(num_rows: int) -> AttentionInputs:
    """Rows of one token each."""
    ints = {"dtype": torch.int32}
    return AttentionInputs(
        query_start=torch.zeros(num_rows + 1, **ints),
        context_lengths=torch.zeros(num_rows, **ints),
        block_tables=torch.zeros(num_rows, 4, **ints),
        positions=torch.zeros(num_rows, **ints),
        slot_mapping=torch.zeros(num_rows, dtype=torch.int64),
    )


def find_activations(signature: dict[str, str], arguments: dict) -> dict[int, str]:
    """Lay out the arguments as the compiler does; return pointers to what kernels write."""
    offset, found = FIRST_ARGUMENT, {}
    for name, kind in signature.items():
        if kind == "constexpr":
            continue
        argument = arguments[name]
        if isinstance(argument, TensorDescriptor):
            # Itself, then its sizes and strides once more.
            rank, argument = len(argument.shape), argument.base
            sizes = [DESCRIPTOR_BYTES, *[4] * rank, *[8] * rank]
        else:
            sizes = [8 if kind.startswith("*") or kind.endswith("64") else 4]
        offset = align(offset, sizes[0])
        is_settled = name in SETTLED or isinstance(argument, nn.Parameter)
        if isinstance(argument, Tensor) and not is_settled:
            found[offset] = name
        for size in sizes:
            offset = align(offset, size) + size
    return found


def align(offset: int, size: int) -> int:
    """Round up to what the argument is aligned to."""
    alignment = min(size, 64)
    return -(-offset // alignment) * alignment


def main() -> None:
    """Print what each kernel does too early; exit with 1 if there is any."""
    num_bad = 0
    for launch in compile_decode_steps():
        code = disassemble(launch.cubin)
        early = find_early_accesses(code, launch.pointers) if launch.starts_early else []
        early += find_unfinished_products(code)
        print(json.dumps({"kernel": launch.name, "rows": launch.num_rows, "early": early}))
        num_bad += bool(early)
    sys.exit(num_bad > 0)


if __name__ == "__main__":
    main()
