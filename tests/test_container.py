"""The Dockerfile and the compose file: what they name is there. CI also asks Debian's docker-compose."""

import re
import shutil
import subprocess
from importlib.util import find_spec

from harness.catalog import ROOT

import pytest

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")


def test_what_the_image_copies_is_there_and_what_it_installs_from_is_copied_first():
    copied = [name for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.M) for name in line.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    before = DOCKERFILE.split("RUN pip")[0]
    for name in re.findall(r"-r (\S+\.txt)", (ROOT / "requirements.txt").read_text(encoding="utf-8")):
        assert name in before
    packages = re.search(r"include = \[(.+)\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    assert {name.strip('"*') for name in packages.split(", ")} <= set(copied)


def test_both_run_a_module_that_exists():
    (named,) = {*re.findall(r'"-m", "([\w.]+)"', DOCKERFILE), *re.findall(r"command: python -m (\S+)", COMPOSE)}
    assert find_spec(named)


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="needs docker-compose, as Debian has it")
def test_docker_compose_takes_the_file():
    done = subprocess.run(["docker-compose", "config"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torchcompile:" in done.stdout
