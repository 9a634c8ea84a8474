"""Reads Hopper's machine code: what a kernel touches before it waits for the one in front."""

import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
WAIT = "ACQBULK"
LOADS = ("LD.", "LDG", "LDGSTS", "UBLKCP", "UTMALDG", "UBLKRED")
STORES = ("ST.", "STG", "RED", "ATOM", "UTMASTG")
REGISTER = re.compile(r"\b(UR|R|UP|P)(\d+)\b")
ARGUMENT = re.compile(r"c\[0x0\]\[0x([0-9a-f]+)\]")


def disassemble(cubin: bytes) -> list[str]:
    """Return the instructions, one a line, without addresses and encodings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", text)


def find_early_accesses(instructions: Sequence[str], pointers: Mapping[int, str]) -> list[str]:
    """Return what must not stand before the wait: loads through ``pointers``, and any store.

    ``pointers`` are names of arguments by their offset in constant bank 0. Every register carries
    the arguments that it was computed from, in program order. A kernel that never waits is told.
    """
    origins: defaultdict[str, set[str]] = defaultdict(set)
    found = []
    for instruction in instructions:
        guard, opcode, operands = _split(instruction)
        if opcode == WAIT:
            return found
        target, *sources = operands.split(",") if operands else [""]
        if opcode.startswith(STORES):
            found.append(instruction)
        if opcode.startswith(LOADS):
            # The address comes second, for copies to shared memory and plain loads alike.
            if loaded := _trace(",".join(sources), origins, pointers):
                found.append(f"{instruction}    through {', '.join(sorted(loaded))}")
            made: set[str] = set()
        else:
            made = _trace(",".join(sources), origins, pointers)
        for register in _targets(target, opcode):
            origins[register] = made | (origins[register] if guard else set())
    return [*found, f"no {WAIT}"]


def _split(instruction: str) -> tuple[str, str, str]:
    match = re.fullmatch(r"(@\S+ )?\s*(\S+)\s*(.*)", instruction)
    assert match, instruction
    return match[1] or "", match[2], match[3]


def _trace(operands: str, origins: Mapping[str, set[str]], pointers: Mapping[int, str]) -> set[str]:
    """Return the arguments that operands were computed from."""
    made = set()
    for kind, number in REGISTER.findall(operands):
        made |= origins.get(kind + number, set())
    for offset in ARGUMENT.findall(operands):
        name = pointers.get(int(offset, 16) // 8 * 8)
        made |= {name} if name else set()
    return made


def _targets(operand: str, opcode: str) -> list[str]:
    """Return the registers that are written: pairs by wide instructions, four by wide loads."""
    if (match := REGISTER.search(operand)) is None:
        return []
    width = 4 if "128" in opcode else 2 if "64" in opcode or "WIDE" in opcode else 1
    return [f"{match[1]}{int(match[2]) + i}" for i in range(width)]
