"""Kernels that start before the one in front has ended touch nothing of it too early."""

import json
import os
import subprocess
import sys

import pytest

from tests.machine_code import find_early_accesses, find_unfinished_products

POINTERS = {0x210: "x_ptr", 0x220: "out_ptr"}
EARLY_LOAD = [
    "LDC.64 R6, c[0x0][0x210]",
    "IMAD.WIDE.U32 R8, R13, 0x2, R6",
    "IADD3 R4, P0, R8, 0x40, RZ",
    "IMAD.X R5, RZ, RZ, R9, P0",
    "LDG.E.128 R8, desc[UR6][R4.64]",
    "ACQBULK",
    "STG.E desc[UR6][R4.64], R8",
]
WEIGHTS_FIRST = [
    "ULDC.64 UR6, c[0x0][0x208]",
    "LDC.64 R6, c[0x0][0x218]",
    "@P0 LDG.E.128 R8, desc[UR6][R6.64]",
    "LDGSTS.E.BYPASS.128 [R3+0x40], desc[UR6][R6.64]",
    "ACQBULK",
    "LDC.64 R6, c[0x0][0x210]",
    "LDG.E.128 R8, desc[UR6][R6.64]",
]


def test_weights_may_be_read_before_the_wait_and_inputs_behind_it():
    assert find_early_accesses(WEIGHTS_FIRST, POINTERS) == []


def test_an_input_that_is_read_before_the_wait_is_told():
    found = find_early_accesses(EARLY_LOAD, POINTERS)
    assert found == ["LDG.E.128 R8, desc[UR6][R4.64]    through x_ptr"]


def test_a_copy_to_shared_memory_counts_as_a_load():
    early = ["ULDC.64 UR8, c[0x0][0x210]", "LDGSTS.E.128 [R3], desc[UR6][UR8.64]", "ACQBULK"]
    assert len(find_early_accesses(early, POINTERS)) == 1


def test_any_store_before_the_wait_is_told():
    store = "STG.E desc[UR6][R4.64], R8"
    assert find_early_accesses([store, "ACQBULK"], POINTERS) == [store]


def test_a_register_is_forgotten_when_it_is_written_anew_but_not_when_it_may_be():
    load, wait = "LDG.E R8, desc[UR6][R6.64]", "ACQBULK"
    first, anew = "LDC.64 R6, c[0x0][0x210]", "LDC.64 R6, c[0x0][0x218]"
    assert find_early_accesses([first, anew, load, wait], POINTERS) == []
    assert len(find_early_accesses([first, f"@P0 {anew}", load, wait], POINTERS)) == 1


@pytest.mark.parametrize(("distance", "is_early"), [("0x30", False), ("0xf0", True)])
def test_a_copy_is_known_by_the_address_of_its_descriptor(distance, is_early):
    copy = [
        "ULDC.64 UR6, c[0x0][0x198]",
        f"UIADD3 UR12, UP0, UR6, {distance}, URZ",
        "UIADD3.X UR13, URZ, UR7, URZ, UP0, !UPT",
        "UTMALDG.2D [UR8], [UR12]",
    ]
    found = find_early_accesses([*copy, "ACQBULK", *copy], {0x300: "x"})
    assert found == (["UTMALDG.2D [UR8], [UR12]    through x"] if is_early else [])


def test_every_partition_of_warps_waits_for_itself():
    load = EARLY_LOAD[:-2]
    waits = [*load[:-1], "ACQBULK", load[-1]]
    assert find_early_accesses([*waits, "USETMAXREG.DEALLOC 0x28", *waits], POINTERS) == []
    assert len(find_early_accesses([*waits, "USETMAXREG.DEALLOC 0x28", *load], POINTERS)) == 1


def test_a_kernel_that_never_waits_is_told():
    assert find_early_accesses(["EXIT"], POINTERS) == ["no ACQBULK"]


@pytest.mark.parametrize(("operand", "is_safe"), [("R40", False), ("gdesc[UR4]", True)])
def test_a_product_of_registers_is_waited_for(operand, is_safe):
    product = f"HGMMA.64x128x16.F32.BF16 R24, {operand}, gdesc[UR8], R24, gsb0"
    runs_on, done = "WARPGROUP.DEPBAR.LE gsb0, 0x3", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    assert find_unfinished_products([product, done, "@!P0 BRA 0x10", done]) == []
    found = find_unfinished_products([product, runs_on, "@!P0 BRA 0x10", done])
    assert found == ([] if is_safe else [runs_on])


@pytest.mark.slow
def test_no_kernel_of_a_decode_step_touches_its_inputs_too_early():
    command = [sys.executable, "-m", "tests.early_loads"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = {json.loads(line)["kernel"] for line in done.stdout.splitlines()}
    products = {"_gemv_kernel", "_linear_kernel", "_converted_kernel"}
    assert kernels >= {*products, "_rms_norm_kernel", "_store_kv_kernel", "_decode_kernel"}
