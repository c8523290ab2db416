"""What nvcc emits for GPUs that are not here. CI has an nvcc: without one these tests fail, they do not skip."""

import dataclasses
from collections import Counter

import pytest

from levit_kernels import _ptxas, cuda_static
from levit_kernels._cuda_launches import Block, plain_name
from levit_kernels._occupancy import blocks_per_sm

SOURCES = sorted(path for path in cuda_static.SOURCES.glob("*.cu") if path.stem != "device")  # it has no kernels


def test_there_are_kernels():
    assert SOURCES


@pytest.fixture(scope="module")
def blocks():
    return cuda_static.launches(["sm_80", "sm_90"])


def gate(source, target, blocks):
    """The kernels, none of which it objects to, some with the blocks that published sizes start."""
    kernels = {kernel.name: kernel for kernel in cuda_static.compile_for(source, target)}
    assert not {name: kernel.failure for name, kernel in kernels.items() if kernel.failure}
    assert all(cuda_static.unlaunchable(x, blocks[target].get(x.name)) is None for x in kernels.values())
    own = {name.split("<")[0] for name in kernels}
    started = {name for name in blocks[target] if name.split("<")[0] in own}
    assert started and started <= kernels.keys()
    return kernels.values()


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_nothing_is_spilled(source, blocks):
    for kernel in gate(source, "sm_80", blocks):
        if "_mma" in kernel.name and kernel.instructions is not None:
            assert kernel.instructions["HMMA"] and kernel.instructions["LDGSTS"], kernel


@pytest.mark.full
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_nothing_is_spilled_on_hopper(source, blocks):
    gate(source, "sm_90", blocks)


def test_without_sources_nothing_is_said_to_be_fine(capsys):
    with pytest.raises(SystemExit):
        cuda_static.main(["--only", "no such kernel"])
    assert "no sources to compile" in capsys.readouterr().err


def test_the_gate_sees_spills_and_local_memory(tmp_path):
    spilling = tmp_path / "spilling.cu"
    spilling.write_text(
        "__global__ void __launch_bounds__(1024) spilling(float* x) {\n"
        "  float y[128];\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < 128; ++i) y[i] = x[i * 1024 + threadIdx.x];\n"
        "  __syncthreads();\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < 128; ++i) x[i * 1024 + threadIdx.x] = y[127 - i] * y[i];\n"
        "}\n"
    )
    with pytest.raises(ValueError, match="spilled"):
        list(cuda_static.compile_for(spilling, "sm_80"))
    indexed = tmp_path / "indexed.cu"
    indexed.write_text(
        "__global__ void indexed(float* x, int i) {\n"
        "  float y[8];\n"
        "  for (int j = 0; j < 8; ++j) y[(i + j) % 8] = x[j];\n"
        "  *x = y[i];\n"
        "}\n"
    )
    with pytest.raises(ValueError, match="[Ll]ocal memory"):
        list(cuda_static.compile_for(indexed, "sm_80"))


# What nvcc 13.0 printed, shortened.
CLEAN = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4goodPf' for 'sm_90'
ptxas info    : Function properties for _Z4goodPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 1 barriers, 256 bytes smem, 360 bytes cmem[0]
ptxas info    : Compile time = 6.495 ms
ptxas info    : Compiling entry function '_Z4bareIfEvPT_' for 'sm_90'
ptxas info    : Function properties for _Z4bareIfEvPT_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, 360 bytes cmem[0]
"""
SPILLING = """
ptxas warning : Registers are spilled to local memory in function '_Z8spillingPf', 28 bytes spill stores, 32 bytes loads
ptxas info    : Compiling entry function '_Z8spillingPf' for 'sm_80'
ptxas info    : Function properties for _Z8spillingPf
    432 bytes stack frame, 428 bytes spill stores, 424 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 432 bytes cumulative stack size, 256 bytes smem, 360 bytes cmem[0]
"""
NOT_INLINED = """
ptxas info    : Compiling entry function '_Z2k1Pfi' for 'sm_80'
ptxas info    : Function properties for _Z2k1Pfi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 364 bytes cmem[0]
ptxas info    : Function properties for _Z4slowPfi
    64 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
ASSEMBLY = """
\t.section\t.text._Z4bareIfEvPT_,"ax",@progbits
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDL.64 R2, [R1] ;
        /*0020*/              @UP1 STL [R1+0x4], R9 ;
        /*0030*/                   HFMA2.MMA R5, -RZ, RZ, 2.125, 0 ;
\t.section\t.text._Z4goodPf,"ax",@progbits
        /*0000*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0010*/                   EXIT ;
"""


def test_what_the_compiler_says_of_clean_kernels():
    good, bare = _ptxas.read(CLEAN, None, "sm_90")
    assert good == _ptxas.Kernel("_Z4goodPf", "sm_90", 12, 0, 0, 256, 1, None)
    assert bare == _ptxas.Kernel("_Z4bareIfEvPT_", "sm_90", 8, 0, 0, 0, 0, None)
    assert good.failure is None and bare.failure is None


def test_instructions_are_counted_for_each_kernel():
    good, bare = _ptxas.read(CLEAN, ASSEMBLY, "sm_90")
    assert good.instructions == Counter(HMMA=1, EXIT=1) and good.failure is None
    assert bare.instructions == Counter(LDC=1, LDL=1, STL=1, HFMA2=1) and bare.failure == "1 LDL, 1 STL"


@pytest.mark.parametrize(
    ("printed", "failure"),
    [
        (SPILLING, "432 bytes of stack, 852 bytes of registers spilled"),
        (NOT_INLINED, "64 bytes of stack"),
        (SPILLING.replace("432 bytes stack", "0 bytes stack"), "852 bytes of registers spilled"),
        (SPILLING.replace("428", "0").replace("424", "0"), "432 bytes of stack"),
    ],
    ids=["spills", "not-inlined", "spills-alone", "stack-alone"],
)
def test_the_gate_objects_to_what_the_compiler_says(printed, failure):
    (kernel,) = _ptxas.read(printed, None, "sm_80")
    assert kernel.failure == failure


@pytest.mark.parametrize(
    ("printed", "assembly"),
    [
        (CLEAN.replace("bytes stack frame", "byte frame"), None),
        (CLEAN.replace("Used 8 registers", "Used few registers"), None),
        (CLEAN, ASSEMBLY.replace("_Z4goodPf", "_Z5otherPf")),
    ],
    ids=["no-properties", "no-registers", "no-instructions"],
)
def test_what_cannot_be_read_is_not_taken_for_clean(printed, assembly):
    with pytest.raises(ValueError, match="cannot read what the compiler says about _Z4"):
        list(_ptxas.read(printed, assembly, "sm_90"))


def test_occupancy_is_what_registers_shared_memory_and_threads_leave():
    assert blocks_per_sm("sm_80", 32, 0, 8) == 8  # all 64 warps
    assert blocks_per_sm("sm_80", 168, 0, 9) == 1  # 12 warps by registers
    assert blocks_per_sm("sm_80", 16, 0, 1) == 32  # blocks
    assert [blocks_per_sm(x, 32, 81 << 10, 8) for x in ("sm_80", "sm_90")] == [2, 2]
    assert [blocks_per_sm(x, 32, (81 << 10) + 1, 8) for x in ("sm_80", "sm_90")] == [1, 2]
    assert blocks_per_sm("sm_80", 32, 164 << 10, 8) == 0


def test_a_block_that_no_sm_holds_fails():
    kernel = _ptxas.Kernel("k", "sm_80", 255, 0, 0, 0, 0, None)
    assert cuda_static.unlaunchable(kernel, None) is None
    assert cuda_static.unlaunchable(kernel, Block(0, 256, "cifar")) is None
    assert cuda_static.unlaunchable(kernel, Block(0, 288, "cifar")) == "no SM holds a block of cifar"
    more = dataclasses.replace(kernel, registers=64, shared=1 << 10)
    assert cuda_static.occupancy(more, Block(80 << 10, 288, "cifar")) == (2, 18)


def test_both_compilers_name_a_kernel_alike():
    of_nvcc = (
        "void levit::matrix_product<float, __nv_bfloat16, __half>(levit::MatrixProduct<float, __nv_bfloat16>, int)"
    )
    assert plain_name(of_nvcc) == plain_name("matrix_product<float, levit::gpu::bf16, levit::gpu::f16>")
    assert plain_name(of_nvcc) == "matrix_product<fp32, bf16, fp16>"


def test_published_sizes_start_blocks(blocks):
    """192 numbers of each of 16 patches and a double buffer of weights, for three images of three warps."""
    cifar = blocks["sm_80"]["expert_attention_mma<bf16, fp32, 7, 13>"]
    assert (cifar.threads, cifar.size) == (288, "cifar K=32 B=256, gated") and 64 << 10 < cifar.shared <= 163 << 10
    assert blocks["sm_90"]["latent_distance<fp32>"] == Block(0, 256, "mnist K=31 M=2000")


def test_the_table_fails_for_each_reason(monkeypatch, capsys):
    fine = _ptxas.Kernel("k", "sm_80", 32, 0, 0, 0, 0, None)
    monkeypatch.setattr(cuda_static, "launches", lambda targets: {"sm_80": {"k": Block(1024, 128, "cifar")}})
    for kernel, code, told in (
        (fine, 0, "all within the gate"),
        (dataclasses.replace(fine, stack=8), 1, "FAILED: 8 bytes of stack"),
        (dataclasses.replace(fine, instructions=Counter(LDL=2)), 1, "FAILED: 2 LDL"),
        (dataclasses.replace(fine, shared=164 << 10), 1, "FAILED: no SM holds a block of cifar"),
    ):
        monkeypatch.setattr(cuda_static, "compile_for", lambda source, target, kernel=kernel: iter([kernel]))
        assert cuda_static.main(["--only", "vae", "--targets", "sm_80"]) == code
        assert told in capsys.readouterr().out
    monkeypatch.setattr(cuda_static, "_find_nvdisasm", lambda: None)
    cuda_static.main(["--only", "vae", "--targets", "sm_80"])
    assert "no instructions were counted" in capsys.readouterr().out
