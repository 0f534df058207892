"""The built wheel holds all that the package needs, and works where the sources are not."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from processes import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that nothing is left beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    names = ["pyproject.toml", "README.md", "LICENSE", "lockstep"]
    subprocess.run(["cp", "-r", *names, str(folder)], cwd=ROOT, check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(folder)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "setuptools" in built.stderr and "No matching distribution" in built.stderr:
        pytest.skip("needs a package registry, for setuptools")
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "lockstep").rglob("*")
        if path.is_file() and path.suffix not in (".pyc",)
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("lockstep/")}
    assert packed == sources


def test_an_installed_wheel_trains_without_the_sources(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are those of this environment; that they suffice is for an empty one to show (docs/log.md)."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    python = tmp_path / "env/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(pip, check=True)
    site = next((tmp_path / "env/lib").glob("python*/site-packages"))
    others = [path for path in sys.path if path.endswith("site-packages")] or [sysconfig.get_path("purelib")]
    (site / "others.pth").write_text("\n".join(others))
    outside = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    outside |= {"LOCKSTEP_SMOKE": "2", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [tmp_path / "env/bin/lockstep", "train", "vision", "--preset", "laptop", "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=outside, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/report.html").exists() and (tmp_path / "run/model.safetensors").exists()
    where = subprocess.run(
        [python, "-c", "import lockstep; print(lockstep.__file__)"],
        cwd=tmp_path, env=outside, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert where.startswith(str(site))
