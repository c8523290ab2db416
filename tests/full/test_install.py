"""Installs a copy of the project as a user would: into an empty environment, without a compiler, as a wheel.

Only the first test and the last ones install torch; the other environments see the torch that runs these tests through
a .pth file.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
NOT_COPIED = (
    ".git",
    ".venv",
    ".*_cache",
    "runs",
    "build",
    "dist",
    "*.egg-info",
    "__pycache__",
    "*.so",
    "_build_info.json",
)

USE_NATIVE = """
import torch
from levit_kernels import native
native.load()
distance = torch.ops.levit_native.latent_distance(torch.full((2, 5, 4), 3.0), torch.zeros(5, 4))
print(native.__file__, distance.tolist())
"""
USE_OPS = """
import torch, levit_kernels as k
from levit_kernels.expert_attention import expert_attention_reference
shapes = (3, 16, 49), (2, 49, 100), (2, 100), (2, 100, 3, 3, 100), (2, 3, 3, 100), (2, 3)
args = [(torch.randn(shape) / 8).requires_grad_() for shape in shapes]
with k.use_backend("cpu"):
    out = k.expert_attention(*args)
expected = expert_attention_reference(*(x.detach().double().requires_grad_() for x in args))
torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
grads, exact = (torch.autograd.grad(x.sum(), args) for x in (out, expert_attention_reference(*args)))
torch.testing.assert_close(grads, exact, rtol=1e-3, atol=1e-3)
codes, query = torch.ones(2, 5, 4, device="meta"), torch.ones(5, 4, device="meta")
assert k.latent_distance(codes, query).shape == (2,)
torch.library.opcheck(torch.ops.levit_kernels.latent_distance.default, (torch.ones(2, 5, 4), torch.zeros(5, 4)))
print(torch.__version__, k.__file__)
"""
# A build with CUDA, gigabytes of it, and one for CPUs, where pip's index has it; or others, by spaces.
OLDER_TORCHES = os.environ.get("LEVIT_OLDER_TORCH", "torch==2.11.0 torch==2.13.0+cpu").split()
ASK_NATIVE = "import levit, levit_kernels; from levit_kernels import native; print(native.available())"


@pytest.fixture
def project(tmp_path):
    return copy_project(tmp_path)


def copy_project(folder):
    return Path(shutil.copytree(ROOT, folder / "project", ignore=shutil.ignore_patterns(*NOT_COPIED)))


@pytest.fixture(scope="module", params=["0", "auto"], ids=["LEVIT_CUDA=0", "LEVIT_CUDA=auto"])
def cuda_and_wheel(request, tmp_path_factory):
    """LEVIT_CUDA, and a wheel built with it beside the torch that runs these tests."""
    folder = tmp_path_factory.mktemp("wheel")
    project = copy_project(folder)
    variables = {**os.environ, "LEVIT_CUDA": request.param, "TORCH_CUDA_ARCH_LIST": "8.0", "LEVIT_REQUIRE_NATIVE": "1"}
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder / "wheels"]
    subprocess.run([*command, project], check=True, env=variables)
    shutil.rmtree(project)
    (wheel,) = (folder / "wheels").iterdir()
    return request.param, wheel


@pytest.fixture
def new_environment(tmp_path):
    """(with_torch, **variables) -> run(program, *arguments): a new environment's program, far from the project."""
    home = tmp_path / "venv"

    def make(with_torch, **variables):
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        bin_folder = home / ("Scripts" if os.name == "nt" else "bin")
        environment = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "PYTHONPATH")}
        environment["PATH"] = f"{bin_folder}{os.pathsep}{environment['PATH']}"
        environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        environment |= {name: value.format(bin=bin_folder) for name, value in variables.items()}

        def run(program, *arguments):
            done = subprocess.run(
                [bin_folder / program, *arguments], capture_output=True, text=True, cwd=tmp_path, env=environment
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout + done.stderr

        if with_torch:
            site_packages = Path(run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
            (site_packages / "outer.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
        return run

    yield make
    shutil.rmtree(home, ignore_errors=True)  # pytest keeps the last folders, and torch takes gigabytes


def test_one_command_installs_into_an_empty_environment(project, new_environment):
    run = new_environment(with_torch=False, LEVIT_REQUIRE_NATIVE="1")
    run("python", "-m", "pip", "install", "-e", project)
    assert run("python", "-c", USE_NATIVE).split() == [str(project / "levit_kernels/native.py"), "[6.0,", "6.0]"]
    assert "train" in run("levit", "--help")
    assert (project / "levit_kernels/_C.abi3.so").exists()


@pytest.mark.parametrize(
    ("variables", "reason"),
    [({"PATH": "{bin}"}, "c++: not found"), ({"CXX": "/nowhere/c++"}, "/nowhere/c++: not found")],
    ids=["no-compiler", "broken-CXX"],
)
def test_without_a_compiler_it_installs_and_tells_why_nothing_is_native(project, new_environment, variables, reason):
    run = new_environment(with_torch=True, **variables)
    assert "WITHOUT native kernels" in run("python", "-m", "pip", "install", "-v", "--no-deps", "-e", project)
    told = run("python", "-c", ASK_NATIVE)
    assert told.startswith("(False") and reason in told and "reinstall" in told
    assert not (project / "levit_kernels/_C.abi3.so").exists()


def test_a_failed_rebuild_leaves_no_older_library_behind(project, new_environment):
    run = new_environment(with_torch=True)
    install = ("python", "-m", "pip", "install", "--no-deps", "-e", project)
    run(*install)
    run("python", "-c", USE_NATIVE)
    with open(project / "csrc/module.cpp", "a") as module:
        module.write("#error broken on purpose\n")
    run(*install)
    told = run("python", "-c", ASK_NATIVE)
    assert told.startswith("(False") and "broken on purpose" in told


def test_a_wheel_holds_the_library_and_serves_every_later_python(project, new_environment, tmp_path):
    run = new_environment(with_torch=True)
    run("python", "-m", "pip", "wheel", "--no-deps", "-w", tmp_path / "wheels", project)
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert wheel.name.startswith("levit_kernels-") and "-cp310-abi3-" in wheel.name
    shutil.rmtree(project)
    run("python", "-m", "pip", "install", "--no-deps", wheel)
    assert run("python", "-c", USE_NATIVE).endswith("[6.0, 6.0]\n")


@pytest.mark.parametrize("older", OLDER_TORCHES)
def test_a_wheel_serves_an_older_torch(new_environment, cuda_and_wheel, older):
    """`_cuda` is absent, or of no use without a GPU, and says why."""
    cuda, wheel = cuda_and_wheel
    run = new_environment(with_torch=False)
    run("python", "-m", "pip", "install", older, "numpy")
    run("python", "-m", "pip", "install", "--no-deps", wheel)
    version, place = run("python", "-W", "error", "-c", USE_OPS).split()[-2:]
    assert f"torch=={version}".startswith(older) and "site-packages" in place
    told = run("python", "-m", "levit_kernels.info")
    if cuda == "0":
        assert "cuda      the CUDA kernels were not built: LEVIT_CUDA=0" in told
    else:
        assert "cuda      the CUDA kernels were not built: " in told or "cuda      torch sees no GPU: " in told
