"""Every command that a developer, CI or a newcomer runs. `nox -l` lists them, `nox -s NAME` runs one.

Almost all run in one environment, which the sessions `environment` and `toolchain` make before they are needed;
`nox -R -s NAME` takes it as it is and starts at once. The versions come from constraints.txt.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import nox

nox.needs_version = ">=2025.10"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "lint", "types"]

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)

FOLDERS = {
    "composite": "packages/core",
    "torch": "packages/torch_fallback",
    "cuda": "packages/cuda_backend",
    "triton": "packages/triton_backend",
}
"""Where each backend's distribution is."""
if (sys.platform, platform.machine()) != ("linux", "x86_64"):
    del FOLDERS["triton"]  # triton has no wheels elsewhere
SHAKY = "examples/shaky_backend"

CLEAN: dict[str, str | None] = {name: None for name in os.environ if name.startswith(("TRIPTYCH_", "SHAKY_"))}
"""Takes the caller's own switches out of what a session starts."""
ON_CPU = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

_shared: list[Path] = []
"""The folder of the shared environment's programs, once `environment` has run."""


# --- the environment --------------------------------------------------------------------------------------------------


@nox.session(default=False)
def environment(session: nox.Session) -> None:
    """Make the shared environment: torch, core, the torch backend, the shaky example."""
    session.install(*group("build"))
    session.install(f"torch=={PINS['torch']}", silent=False)
    session.install(*in_place(FOLDERS["composite"], FOLDERS["torch"], SHAKY))
    _shared[:] = [Path(session.bin)]


@nox.session(requires=["environment"], default=False)
def toolchain(session: nox.Session) -> None:
    """Complete the shared environment: the cuda and triton backends, pytest, ruff, mypy.

    This session's own virtualenv stays empty; it tells `nox -R` that everything is in place.
    """
    requirements = [*group("test"), *group("lint"), *group("types")]
    if "triton" in FOLDERS and not any(_shared[0].parent.glob("lib/python*/site-packages/triton")):
        requirements.append(f"triton=={PINS['triton']}")  # a CUDA build of torch has brought the one it needs
    others = [folder for name, folder in FOLDERS.items() if name in ("cuda", "triton")]
    for arguments in (requirements, in_place(*others)):
        pip = (str(_shared[0] / "python"), "-m", "pip", "install", "--quiet", *arguments)
        session.run_install(*pip, external=True)


def group(name: str) -> tuple[str, ...]:
    """The requirements of a dependency group of pyproject.toml."""
    return nox.project.dependency_groups(PROJECT, name)


def in_place(*folders: str) -> list[str]:
    """pip's arguments that install local distributions in place, with the build tools that are already there."""
    return ["--no-build-isolation", *(part for folder in folders for part in ("-e", folder))]


def run(session: nox.Session, program: str, *arguments: str, **options: Any) -> Any:
    """Run a program of the shared environment, which is also first on its PATH."""
    path = os.pathsep.join((str(_shared[0]), os.environ.get("PATH", "")))
    options["env"] = {**CLEAN, "PATH": path, **options.get("env", {})}
    return session.run(str(_shared[0] / program), *arguments, external=True, **options)


# --- the main job -----------------------------------------------------------------------------------------------------

JOB = shlex.split("python examples/train_text.py --steps 20 --batch 4 --length 64 --dim 64 --device cpu")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # the model is too small to gain from more


@nox.session(venv_backend="none", requires=["environment"], default=False)
def quickstart(session: nox.Session) -> None:
    """The main job, from nothing: train on `torch`, fail on `shaky`, bisect, train with the workaround."""
    started = time.monotonic()
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder / "bisect", ignore_errors=True)
    verdict_file = folder / "verdict.json"

    headline(session, "1/4  Training on the torch backend: it passes.")
    run(session, *JOB, env={**ONE_THREAD, "TRIPTYCH_BACKEND": "torch"})

    headline(session, "2/4  The same job on the shaky backend: it dies. The traceback is what a user would see.")
    run(session, *JOB, env={**ONE_THREAD, "TRIPTYCH_BACKEND": "shaky"}, success_codes=[1])

    headline(session, "3/4  triptych bisect swaps implementations until it knows which one is at fault.")
    options = ("--good", "torch", "--bad", "shaky", "--json", str(verdict_file), "--state", str(folder / "bisect"))
    run(session, "triptych", "bisect", *options, "--", *JOB, env=ONE_THREAD)
    verdict = json.loads(verdict_file.read_text(encoding="utf-8"))
    found = [(culprit["op"], culprit["phase"], culprit["backend"]) for culprit in verdict["culprits"]]
    expected = [("rms_norm", "backward", "shaky")]
    if verdict["verdict"] != "isolated" or found != expected or not verdict["capture"]:
        session.error(f"The bisect should have isolated rms_norm.backward on shaky and captured it; it says {verdict}")

    headline(session, f"4/4  The same job with the workaround from the verdict: {verdict['workaround']}")
    run(session, *JOB, env={**ONE_THREAD, "TRIPTYCH_BACKEND": verdict["workaround"]})

    culprit = verdict["culprits"][0]
    headline(
        session,
        f"Found {culprit['op']}.{culprit['phase']} on {culprit['backend']} (layer {culprit['layer']}, call "
        f"{culprit['call']}) in {verdict['trials']} trials and {verdict['seconds']:.0f} s; all four steps took "
        f"{time.monotonic() - started:.0f} s.",
    )


def headline(session: nox.Session, text: str) -> None:
    """Say what comes next, so that it stands out of what the programs print."""
    session.log("-" * 100)
    session.log(text)
    session.log("-" * 100)


# --- checks -----------------------------------------------------------------------------------------------------------


@nox.session(venv_backend="none", requires=["toolchain"])
def tests(session: nox.Session) -> None:
    """Every test that needs no GPU: Triton in its interpreter, the C++ kernels compiled here."""
    build_native(session)
    pytest(session, *(() if session.posargs else ("tests", "packages", "examples")), env=ON_CPU)


@nox.session(venv_backend="none", requires=["toolchain"])
def lint(session: nox.Session) -> None:
    """ruff: rules and format."""
    run(session, "ruff", "check", ".")
    run(session, "ruff", "format", "--check", ".")


@nox.session(venv_backend="none", requires=["toolchain"])
def types(session: nox.Session) -> None:
    """mypy, strict: the four distributions and the examples."""
    run(session, "mypy")
    run(session, "mypy", "-p", "triptych_shaky")
    examples = sorted(str(file) for file in Path("examples").glob("*.py"))
    run(session, "mypy", *examples, env={"MYPYPATH": "examples"})


@nox.session(venv_backend="none", requires=["toolchain"], default=False)
@nox.parametrize("backend", [*FOLDERS, "shaky"])
def conformance(session: nox.Session, backend: str) -> None:
    """The conformance suite over one backend, on the CPU."""
    build_native(session)
    stub = f"tests/conformance/test_{backend}.py" if backend in FOLDERS else f"{SHAKY}/tests/test_conformance.py"
    pytest(session, stub, env=ON_CPU)


@nox.session(venv_backend="none", requires=["toolchain"], default=False)
def meta(session: nox.Session) -> None:
    """The conformance suite catches every planted fault, and passes a backend that has none."""
    pytest(session, "packages/core/tests/test_testing.py", "packages/core/tests/test_faulty.py", env=ON_CPU)


@nox.session(venv_backend="none", requires=["toolchain"], default=False)
def features(session: nox.Session) -> None:
    """Run the feature tests and write docs/features.md anew from what they ran."""
    build_native(session)
    results = Path(session.create_tmp()).resolve() / "results.jsonl"
    results.unlink(missing_ok=True)
    command = "nox -s features"
    pytest(session, "tests/features", env={**ON_CPU, "FEATURE_RESULTS": str(results)})
    run(session, "python", "tests/features/matrix.py", "keep", "cpu", str(results), command)
    run(session, "python", "tests/features/matrix.py", "write")


@nox.session(venv_backend="none", requires=["toolchain"], default=False)
def parity(session: nox.Session) -> None:
    """The analog layers against aihwkit-lightning, the reference: the shared environment with that laid beside it."""
    build_native(session)
    beside = Path(session.create_tmp()).resolve() / "beside"
    peer = ("aihwkit-lightning==2.1.0", "tqdm", "typing_extensions")
    install = ("install", "--quiet", "--upgrade", "--no-deps", "--target", str(beside))
    run(session, "python", "-m", "pip", *install, *peer)
    pytest(session, "tests/parity", env={**ON_CPU, "PYTHONPATH": str(beside), "AIHWKIT_USE_TRITON": None})


@nox.session(requires=["environment"], default=False)
def deepspeed(session: nox.Session) -> None:
    """Weight clipping under DeepSpeed (ZeRO 1 to 3, two processes), in an environment of its own."""
    foreign(session, "packages/core/tests/analog/test_deepspeed.py", "deepspeed==0.19.8", env={"DS_BUILD_OPS": "0"})


@nox.session(requires=["environment"], default=False)
def trainer(session: nox.Session) -> None:
    """Weight clipping under Hugging Face's Trainer and accelerate, in an environment of its own."""
    foreign(session, "packages/core/tests/analog/test_trainer.py", "transformers==5.24.0", "accelerate==1.15.0")


@nox.session(requires=["environment"], default=False)
def accelerate(session: nox.Session) -> None:
    """The examples under `accelerate launch` (two processes; DDP, DeepSpeed ZeRO-2), in an environment of its own."""
    requirements = ("accelerate==1.15.0", "transformers==5.24.0", "deepspeed==0.19.8")
    selected = "tests/test_accelerate_example.py tests/test_bisect_ranks.py -k accelerate"
    foreign(session, selected, *requirements, env={"DS_BUILD_OPS": "0"})


def foreign(session: nox.Session, test: str, *requirements: str, env: dict[str, str] | None = None) -> None:
    """Run tests, as pytest selects them, with packages that the shared environment is spared."""
    session.install(*group("build"), *group("test"), f"torch=={PINS['torch']}")
    session.install(*requirements, env=env)
    session.install(*in_place(FOLDERS["composite"], FOLDERS["torch"]))
    settings = {**CLEAN, **ON_CPU, **ONE_THREAD}
    session.run("python", "-m", "pytest", "-q", *shlex.split(test), *session.posargs, env=settings)


@nox.session(venv_backend="none", requires=["toolchain"], default=False)
def gpu(session: nox.Session) -> None:
    """The tests that need an NVIDIA GPU. Where torch, triton and pytest are installed already: `pytest -m gpu`."""
    run(session, "python", "-m", "pytest", "-q", "-m", "gpu", *session.posargs)


@nox.session(venv_backend="none", requires=["toolchain"], default=False)
def bench(session: nox.Session) -> None:
    """Measure: what dispatch costs, and the kernels against their peers."""
    for file in sorted(Path("benchmarks").glob("*.py")):
        run(session, "python", str(file), *session.posargs)


def pytest(session: nox.Session, *arguments: str, **options: Any) -> None:
    """Run the tests that need no GPU on two cores, each worker on one thread."""
    options["env"] = {**ONE_THREAD, **options.get("env", {})}
    workers = ("-n", "2", "--dist", "worksteal")
    run(session, "python", "-m", "pytest", "-q", *workers, "-m", "not gpu", *arguments, *session.posargs, **options)


def build_native(session: nox.Session) -> None:
    """Compile the C++ kernels now, with progress, rather than in the first test that needs them."""
    run(session, "python", "-m", "triptych_cuda", "build", "cpu")


# --- wheels -----------------------------------------------------------------------------------------------------------


@nox.session(venv_backend="none", requires=["toolchain"], default=False)
def wheels(session: nox.Session) -> None:
    """Build every wheel; with core and one backend installed from them and nothing else, list and run."""
    folder = Path(session.create_tmp()).resolve()
    made = folder / "wheels"
    leftovers = [ROOT / place / "build" for place in FOLDERS.values()]  # an earlier build's would go into this one
    for each in (made, folder / "cache", *leftovers):
        shutil.rmtree(each, ignore_errors=True)
    build = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(made))
    run(session, "python", "-m", "pip", *build, *(f"./{place}" for place in FOLDERS.values()))
    for each in leftovers:
        shutil.rmtree(each, ignore_errors=True)
    env = {**CLEAN, **ON_CPU, "TRIPTYCH_CACHE": str(folder / "cache")}
    for name in FOLDERS:
        session.log(f"From wheels alone: core and {name}")
        fresh = bare_environment(session, folder / name)
        wanted = ("triptych",) if name == "composite" else ("triptych", f"triptych-{name}")
        install = ("install", "--quiet", "--no-index", "--find-links", str(made), *wanted)
        run(session, "python", "-m", "pip", "--python", str(fresh), *install)
        with session.chdir(folder):  # away from the sources
            session.run(str(fresh.parent / "triptych"), "info", external=True, env=env)
            session.run(str(fresh), "-c", CHECK_INSTALLED, name, external=True, env=env, log=False)


CHECK_INSTALLED = """
import sys, torch, triptych
from triptych import registry
name = sys.argv[1]
assert registry.backends.names() == tuple(sorted({"composite", name})), registry.backends.names()
x = torch.randn(2, 3, 64, requires_grad=True)
with triptych.use(name):
    triptych.rms_norm(x).sum().backward()
ran = {(row.phase, row.backend) for row in triptych.report().rows}
assert ran == {("forward", name), ("backward", name)}, ran
assert torch.isfinite(x.grad).all()
print(f"{name}: installed from its wheel, ran forward and backward")
"""


def bare_environment(session: nox.Session, folder: Path) -> Path:
    """A new environment with the third-party packages of the shared one, as links, and no Triptych; its interpreter."""
    shutil.rmtree(folder, ignore_errors=True)
    run(session, "python", "-m", "venv", "--without-pip", str(folder))
    packages = next(folder.glob("lib/python*/site-packages"))
    for item in next(_shared[0].parent.glob("lib/python*/site-packages")).iterdir():
        if not item.name.startswith(("triptych", "__editable__", "_virtualenv")):
            (packages / item.name).symlink_to(item)
    return folder / "bin" / "python"
