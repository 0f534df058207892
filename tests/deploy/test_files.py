"""The files for clusters are well formed, and the flags in them are flags of `lockstep train`."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from multi.test_launch import TINY, run
from processes import ROOT

from lockstep import flags, registry, rundir
from lockstep.audit.launcher import free_port
from lockstep.cluster import wants_torchrun

DEPLOY = ROOT / "deploy"


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def assert_trains(words: list[str]) -> None:
    """The words after `lockstep train` are understood."""
    words = words[words.index("train") + 1 :]
    request = flags.parse(registry.find(words[0]), words[1:], "test", rundir.find_config)
    assert request.train.run.out and request.train.run.resume == "auto"


def test_the_train_job_describes_a_run() -> None:
    (job,) = objects("kubernetes/trainjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert_trains(job["spec"]["trainer"]["command"])
    (override,) = job["spec"]["podTemplateOverrides"]
    volumes = {volume["name"] for volume in override["spec"]["volumes"]}
    assert {mount["name"] for mount in override["spec"]["containers"][0]["volumeMounts"]} == volumes


def test_the_indexed_job_describes_a_run() -> None:
    service, job = objects("kubernetes/indexed-job.yaml")
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["completions"] == spec["parallelism"] and spec["completionMode"] == "Indexed"
    assert f"--nnodes={spec['completions']}" in container["command"]
    address = next(word for word in container["command"] if word.startswith("--master_addr="))
    assert address == f"--master_addr={job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (rule,) = [rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert rule["containerName"] == container["name"] and 75 in rule["values"] and 2 not in rule["values"]
    assert_trains(container["command"])


def test_the_task_for_skypilot_describes_a_run() -> None:
    (task,) = objects("skypilot/train.yaml")
    assert set(re.findall(r"\$(SKYPILOT_\w+)", task["run"])) == {
        "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_NODE_IPS",
    }  # fmt: skip
    assert_trains(shlex.split(task["run"].replace("\\\n", " ")))


def test_the_image_installs_what_the_package_needs() -> None:
    lines = (DEPLOY / "docker/Dockerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert {"pyproject.toml", "README.md", "LICENSE", "lockstep"} <= copied
    assert all((ROOT / name).exists() for name in copied)
    assert 'ENTRYPOINT ["lockstep"]' in lines


@pytest.mark.parametrize("script", ["slurm/train.sbatch"])
def test_shell_scripts_have_no_known_mistakes(script: str) -> None:
    assert subprocess.run(["bash", "-n", DEPLOY / script], check=False).returncode == 0
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck")
    done = subprocess.run(["shellcheck", DEPLOY / script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_kubeflow_describes_nodes_for_torchrun() -> None:
    pod = {"PET_MASTER_ADDR": "a-0", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}
    assert wants_torchrun(pod) and wants_torchrun(pod | {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"})
    assert not wants_torchrun(pod | {"RANK": "0"}), "torchrun has started this process"
    assert not wants_torchrun({"PET_MASTER_ADDR": "a-0"}) and not wants_torchrun({})


@pytest.mark.slow
def test_a_pod_of_kubeflow_starts_its_ranks(tmp_path: Path) -> None:
    pod = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port()), "PET_NNODES": "1"}
    pod |= {"PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0"}
    done = run(["lockstep", "train", TINY, "--n_steps", "3", "--out", "here"], tmp_path, **pod)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "here/receipt.json").read_text())["launches"][0]["world"] == 2


def test_every_way_to_deploy_is_explained() -> None:
    page = (DEPLOY / "README.md").read_text()
    for folder in DEPLOY.iterdir():
        assert not folder.is_dir() or f"]({folder.name}/" in page, folder.name
