"""Reads Hopper's machine code.

What a kernel touches before it waits for the one in front, and products that nobody waits for.
"""

import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
WAIT = "ACQBULK"
NEW_PARTITION = "USETMAXREG"
"""What the code of a partition of warps begins with, and some ends with."""
FIRST_ARGUMENT = 0x210
"""Where the arguments of a kernel begin in constant bank 0 on Hopper."""
ADDRESS_OF_ARGUMENTS = 0x198
"""Where their address lies in it: copies take the addresses of descriptors, which are arguments."""
ANY_ARGUMENT = "address of arguments"
LOADS = ("LD.", "LDG", "LDGSTS", "UBLKCP", "UTMALDG", "UBLKRED")
STORES = ("ST.", "STG", "RED", "ATOM", "UTMASTG")
REGISTER = re.compile(r"\b(UR|R|UP|P)(\d+)\b")
NUMBER = re.compile(r", 0x([0-9a-f]+)")
ARGUMENT = re.compile(r"c\[0x0\]\[0x([0-9a-f]+)\]")
PRODUCT_OF_REGISTERS = re.compile(r"\bHGMMA\S* R\d+, R\d+")
UNFINISHED = re.compile(r"\bWARPGROUP\.DEPBAR\.LE gsb0, 0x[^0]")


def disassemble(cubin: bytes) -> list[str]:
    """Return the instructions, one a line, without addresses and encodings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", text)


def find_unfinished_products(instructions: Sequence[str]) -> list[str]:
    """Return the waits that leave products running, of a kernel whose products read registers.

    The next pass of a loop writes these registers again. Products of shared memory may run on.
    """
    if not any(map(PRODUCT_OF_REGISTERS.search, instructions)):
        return []
    return list(filter(UNFINISHED.search, instructions))


def find_early_accesses(instructions: Sequence[str], pointers: Mapping[int, str]) -> list[str]:
    """Return what must not stand before the wait: loads through ``pointers``, and any store.

    ``pointers`` are names of arguments by their offset in constant bank 0. Every register carries
    the arguments that it was computed from, in program order. Every partition of warps has to wait
    for itself. A kernel that never waits is told.
    """
    origins: defaultdict[str, set[str]] = defaultdict(set)
    found = []
    num_waits, has_waited = 0, False
    for instruction in instructions:
        guard, opcode, operands = _split(instruction)
        if opcode == WAIT:
            num_waits, has_waited = num_waits + 1, True
        elif opcode.startswith(NEW_PARTITION):
            has_waited = False
        target, *sources = operands.split(",") if operands else [""]
        if opcode.startswith(STORES) and not has_waited:
            found.append(instruction)
        made = _trace(",".join(sources), origins, pointers)
        if opcode.startswith(LOADS):
            # The address comes second, for copies to shared memory and plain loads alike.
            if made and not has_waited:
                found.append(f"{instruction}    through {', '.join(sorted(made))}")
            made = set()
        for register in _targets(target, opcode):
            origins[register] = made | (origins[register] if guard else set())
    return found if num_waits else [*found, f"no {WAIT}"]


def _split(instruction: str) -> tuple[str, str, str]:
    match = re.fullmatch(r"(@\S+ )?\s*(\S+)\s*(.*)", instruction)
    assert match, instruction
    return match[1] or "", match[2], match[3]


def _trace(operands: str, origins: Mapping[str, set[str]], pointers: Mapping[int, str]) -> set[str]:
    """Return the arguments that operands were computed from."""
    made = set()
    for kind, number in REGISTER.findall(operands):
        made |= origins.get(kind + number, set())
    offsets = [int(offset, 16) for offset in ARGUMENT.findall(operands)]
    if ADDRESS_OF_ARGUMENTS in offsets:
        made.add(ANY_ARGUMENT)
    elif ANY_ARGUMENT in made and (distance := NUMBER.search(operands)):
        made.remove(ANY_ARGUMENT)
        offsets.append(FIRST_ARGUMENT + int(distance[1], 16))
    return made | {pointers[offset // 8 * 8] for offset in offsets if offset // 8 * 8 in pointers}


def _targets(operand: str, opcode: str) -> list[str]:
    """Return the registers that are written: pairs by wide instructions, four by wide loads."""
    if (match := REGISTER.search(operand)) is None:
        return []
    width = 4 if "128" in opcode else 2 if "64" in opcode or "WIDE" in opcode else 1
    return [f"{match[1]}{int(match[2]) + i}" for i in range(width)]
