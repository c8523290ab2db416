"""What nvcc emits for GPUs that are not here. CI has an nvcc: without one these tests fail, they do not skip."""

import pytest

from levit_kernels import cuda_static

SOURCES = sorted(path for path in cuda_static.SOURCES.glob("*.cu") if path.stem != "device")  # it has no kernels


def test_there_are_kernels():
    assert SOURCES


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_nothing_is_spilled(source):
    kernels = list(cuda_static.compile_for(source, "sm_80"))
    assert kernels
    for kernel in kernels:
        if "_mma" in kernel.name and kernel.instructions is not None:
            assert kernel.instructions["HMMA"] and kernel.instructions["LDGSTS"], kernel


@pytest.mark.full
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_nothing_is_spilled_on_hopper(source):
    assert list(cuda_static.compile_for(source, "sm_90"))


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
