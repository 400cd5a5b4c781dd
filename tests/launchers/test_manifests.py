"""examples/kubernetes against the published schemas, and what a pod of each makes of its environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import ROOT

from holmes_comm.launch import recognize

FOLDER = ROOT / "examples" / "kubernetes"
#: Manifest -> the definition (CRD) that it must fit; where it is published: docs/launchers.md.
DEFINITIONS = {"pytorchjob": "kubeflow.org_pytorchjobs.yaml", "jobset": "jobset.x-k8s.io_jobsets.yaml"}


def manifest(name: str) -> dict[str, Any]:
    data = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    assert isinstance(data, dict)
    return data


def strict(schema: Any) -> Any:
    """The schema with fields that it does not name refused, as `kubectl apply` refuses them."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(part) for key, part in schema.items()}
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_manifest_fits_its_published_schema(name):
    folder = os.environ.get("HOLMES_TEST_CRDS")
    if not folder:
        pytest.skip("needs HOLMES_TEST_CRDS, a folder with the definitions that docs/launchers.md names")
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema: make test-launchers installs it")
    definition = yaml.safe_load(Path(folder, DEFINITIONS[name]).read_text())
    data = manifest(name)
    (version,) = [v for v in definition["spec"]["versions"] if data["apiVersion"].endswith("/" + v["name"])]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.Draft7Validator(schema).validate(data)
    # It would notice: a field that is spelled wrongly deep inside.
    pods = data["spec"].get("replicatedJobs") or [data["spec"]["pytorchReplicaSpecs"]["Master"]]
    pod = pods[0]["template"]["spec"]
    (pod["template"]["spec"] if "template" in pod else pod)["containers"][0]["comand"] = ["python"]
    assert [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(data)]


def test_pods_of_the_jobset_are_ranks():
    (job,) = manifest("jobset")["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    given = {each["name"]: each["value"] for each in spec["template"]["spec"]["containers"][0]["env"]}
    assert spec["parallelism"] == spec["completions"] == int(given["WORLD_SIZE"])
    # The name that JobSet gives to pod 0 of job 0: see its field enableDNSHostnames.
    name = manifest("jobset")["metadata"]["name"]
    assert given["MASTER_ADDR"] == f"{name}-{job['name']}-0-0.{name}"
    for index in range(spec["completions"]):  # Kubernetes sets it in the pods of Indexed Jobs, which JobSet's are
        found = recognize(given | {"JOB_COMPLETION_INDEX": str(index)})
        assert found is not None
        assert (found.launcher, found.rank, found.size) == ("Kubernetes Job", index, 2)
        assert found.store_address() == (given["MASTER_ADDR"], 29500)


def test_pods_of_the_pytorchjob_are_ranks():
    roles = manifest("pytorchjob")["spec"]["pytorchReplicaSpecs"]
    size = sum(role["replicas"] for role in roles.values())
    # The operator sets these, and refuses a pod without a container of this name.
    assert [c["name"] for role in roles.values() for c in role["template"]["spec"]["containers"]] == ["pytorch"] * 2
    given = {"WORLD_SIZE": str(size), "MASTER_ADDR": "holmes-master-0", "MASTER_PORT": "23456"}
    for rank in range(size):
        found = recognize(given | {"RANK": str(rank), "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
        assert found is not None
        assert (found.launcher, found.rank, found.size) == ("Kubernetes", rank, 2)
