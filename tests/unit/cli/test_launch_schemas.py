"""The templates of examples/launch against the schemas of what reads them, or the part of these that they use.

Whatever a template says must be in its schema: a key that is misspelt, or stands at the wrong place, is found.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError, validate

LAUNCH = Path(__file__).parents[3] / "examples" / "launch"


def an_object(*required: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object with these keys and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def a_list(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": 1}


TEXT = {"type": "string", "minLength": 1}
TEXTS = {"type": "object", "additionalProperties": TEXT}
COUNT = {"type": "integer", "minimum": 1}
SECONDS = {"type": "integer", "minimum": 0}
NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"}  # a DNS label (RFC 1035)
QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?$"}
RESOURCES = an_object(
    requests={"type": "object", "additionalProperties": QUANTITY},
    limits={"type": "object", "additionalProperties": QUANTITY},
)
METADATA = an_object("name", name=NAME, labels=TEXTS)
ENV = a_list(an_object("name", "value", name=TEXT, value=TEXT))
CONTAINER = an_object(
    "name",
    "image",
    name=NAME,
    image=TEXT,
    command=a_list(TEXT),
    env=ENV,
    resources=RESOURCES,
    volumeMounts=a_list(an_object("name", "mountPath", name=NAME, mountPath=TEXT)),
)
CLAIM_SOURCE = an_object("claimName", claimName=NAME)
POD = an_object(
    "containers",
    subdomain=NAME,
    restartPolicy={"enum": ["OnFailure", "Never"]},  # what a Job allows
    terminationGracePeriodSeconds=SECONDS,
    containers=a_list(CONTAINER),
    volumes=a_list(an_object("name", "persistentVolumeClaim", name=NAME, persistentVolumeClaim=CLAIM_SOURCE)),
)
POD_TEMPLATE = an_object("spec", spec=POD)
JOB_SPEC = an_object(
    "template",
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    completions=COUNT,
    parallelism=COUNT,
    backoffLimit={"type": "integer", "minimum": 0},
    template=POD_TEMPLATE,
)
KUBEFLOW = "trainer.kubeflow.org/v1alpha1"
REPLICATED_JOB = an_object(
    "name",
    "template",
    name={"const": "node"},  # the name by which Kubeflow Trainer finds the nodes
    template=an_object("metadata", "spec", metadata=an_object("labels", labels=TEXTS), spec=JOB_SPEC),
)
JOB_SET = an_object(
    "replicatedJobs",
    failurePolicy=an_object("maxRestarts", maxRestarts=COUNT),
    replicatedJobs=a_list(REPLICATED_JOB),
)
SPECS: dict[tuple[str, str], dict[str, Any]] = {
    ("v1", "Service"): an_object(
        "selector",
        "ports",
        clusterIP={"const": "None"},
        publishNotReadyAddresses={"type": "boolean"},
        selector=TEXTS,
        ports=a_list(an_object("port", name=NAME, port={"type": "integer", "minimum": 1, "maximum": 65535})),
    ),
    ("v1", "PersistentVolumeClaim"): an_object(
        "accessModes",
        "resources",
        accessModes=a_list({"enum": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]}),
        resources=RESOURCES,
    ),
    ("batch/v1", "Job"): JOB_SPEC,
    (KUBEFLOW, "TrainingRuntime"): an_object(
        "mlPolicy",
        "template",
        mlPolicy=an_object(numNodes=COUNT, torch=an_object(numProcPerNode=COUNT)),
        template=an_object("spec", spec=JOB_SET),
    ),
    (KUBEFLOW, "TrainJob"): an_object(
        "runtimeRef",
        runtimeRef=an_object(
            "name",
            apiGroup={"const": "trainer.kubeflow.org"},
            kind={"enum": ["TrainingRuntime", "ClusterTrainingRuntime"]},
            name=NAME,
        ),
        trainer=an_object(
            image=TEXT, numNodes=COUNT, numProcPerNode=COUNT, env=ENV, resourcesPerNode=RESOURCES, command=a_list(TEXT)
        ),
    ),
}
SKYPILOT = an_object(
    "run",
    name=NAME,
    num_nodes=COUNT,
    workdir=TEXT,
    resources=an_object(
        cpus={"type": ["string", "integer"], "pattern": r"^[0-9]+\+?$"},
        memory={"type": ["string", "integer"], "pattern": r"^[0-9]+\+?$"},
        use_spot={"type": "boolean"},
    ),
    volumes={"type": "object", "patternProperties": {"^/": NAME}, "additionalProperties": False},
    envs={"type": "object", "additionalProperties": {"type": ["string", "integer"]}},
    setup=TEXT,
    run=TEXT,
)
SBATCH = {
    "job-name": r"\S+",
    "nodes": r"[0-9]+(-[0-9]+)?",
    "ntasks-per-node": r"[0-9]+",
    "cpus-per-task": r"[0-9]+",
    "time": r"([0-9]+-)?[0-9]{2}:[0-9]{2}:[0-9]{2}",
    "signal": r"([RB]+:)?[A-Z]+(@[0-9]{1,5})?",
    "requeue": "",
    "open-mode": "append|truncate",
    "output": r"\S+",
}


def check_object(found: dict[str, Any]) -> None:
    spec = SPECS[found["apiVersion"], found["kind"]]
    validate(found, an_object("spec", apiVersion=TEXT, kind=TEXT, metadata=METADATA, spec=spec))


@pytest.mark.parametrize("template", ["kubernetes.yaml", "kubeflow.yaml"])
def test_every_object_of_kubernetes_fits_its_schema(template: str) -> None:
    found = list(yaml.safe_load_all((LAUNCH / template).read_text()))
    assert len(found) == 3
    for each in found:
        check_object(each)
    found[-1]["spec"]["replicas"] = 2  # of a Deployment
    with pytest.raises(ValidationError, match="replicas"):
        check_object(found[-1])


def test_the_task_of_skypilot_fits_its_schema() -> None:
    validate(yaml.safe_load((LAUNCH / "skypilot.yaml").read_text()), SKYPILOT)


def test_the_batch_script_of_slurm_is_valid() -> None:
    path = LAUNCH / "slurm.sbatch"
    shebang, *lines = path.read_text().splitlines()
    assert shebang == "#!/bin/bash"
    options = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    assert len(options) == 9
    for option in options:
        name, _, value = option.partition("=")
        assert re.fullmatch(SBATCH[name], value), option
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first_command:])  # sbatch would not read it
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("sbatch"):
        subprocess.run(["sbatch", "--test-only", str(path)], check=True)
