"""Generates the wire modules from the repository's proto files before the package is built (editable installs too)."""

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
REPOSITORY_PROTOS = HERE.parent.parent / "proto" / "spmm" / "v1"
BUNDLED_PROTOS = HERE / "proto" / "spmm" / "v1"  # in a source distribution


def generate() -> None:
    subprocess.run([sys.executable, str(HERE / "generate_protos.py")], check=True)


class BuildPy(build_py):
    def run(self) -> None:
        generate()
        super().run()


class Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        source = REPOSITORY_PROTOS if REPOSITORY_PROTOS.is_dir() else BUNDLED_PROTOS
        shutil.copytree(source, Path(base_dir) / "proto" / "spmm" / "v1", dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist})
