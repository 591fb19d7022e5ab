"""labs/deploy/vllm.yaml: parsed, cross-checked, and each check shown to fail on a manifest broken for it. Never run on a cluster."""

import re
from copy import deepcopy

import pytest
import yaml

import course
from decodelab.arithmetic import catalog

FILE = course.ROOT / "labs" / "deploy" / "vllm.yaml"
KINDS = {"Deployment": "apps/v1", "Service": "v1", "PersistentVolumeClaim": "v1"}
PLUMBING = {"--served-model-name", "--host", "--port"}  # names and addresses: they change no step
PINNED = re.compile(r"[\w./-]+:v\d+\.\d+\.\d+(@sha256:[0-9a-f]{64})?")
SECRET = re.compile(r"\bhf_\w{8,}|\bsk-\w{8,}|-----BEGIN")


def manifest() -> dict[str, dict]:
    """The documents of the file by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(FILE.read_text(encoding="utf-8"))}


def pod(documents: dict) -> dict:
    return documents["Deployment"]["spec"]["template"]["spec"]


def container(documents: dict) -> dict:
    return pod(documents)["containers"][0]


def faults(documents: dict) -> list[str]:
    """What is wrong with a manifest, one line each."""
    found = [f"{kind} has apiVersion {documents.get(kind, {}).get('apiVersion')}" for kind, version in KINDS.items()
             if documents.get(kind, {}).get("apiVersion") != version]  # fmt: skip
    if found:
        return found
    return [*found, *wiring(documents), *server(container(documents)), *probing(container(documents)), *memory(documents)]


def wiring(documents: dict) -> list[str]:
    """Names and labels that must agree between the documents."""
    found, deployment, service = [], documents["Deployment"]["spec"], documents["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    for name, wanted in (("Deployment", deployment["selector"]["matchLabels"]), ("Service", service["selector"])):
        if not wanted or not wanted.items() <= labels.items():
            found.append(f"{name} selects {wanted}, the pod has {labels}")
    ports = {port["name"] for port in container(documents)["ports"]}
    found += [f"Service targets {port['targetPort']}, the container has {ports}" for port in service["ports"] if port["targetPort"] not in ports]
    claims = {volume["persistentVolumeClaim"]["claimName"] for volume in pod(documents)["volumes"] if "persistentVolumeClaim" in volume}
    if claims != {documents["PersistentVolumeClaim"]["metadata"]["name"]}:
        found.append(f"volumes claim {claims}")
    return found


def server(box: dict) -> list[str]:
    """The image, its command and every flag against the table of knobs."""
    found = [] if PINNED.fullmatch(box["image"]) else [f"image {box['image']} is not pinned by version"]
    if box["command"] != ["vllm", "serve"] or box["args"][0].startswith("-"):
        found.append("vllm serve takes the model as its first argument")
    flags = dict(arg.partition("=")[::2] for arg in box["args"][1:])
    known = {row["knob"] for row in catalog.read_table("server_knobs.csv") if row["engine"] == "vllm"} | PLUMBING
    found += [f"{flag} is no known flag of vLLM" for flag in flags if flag not in known]
    found += [f"{flag} has no value" for flag, value in flags.items() if not value]
    if flags.get("--port") != str(box["ports"][0]["containerPort"]):
        found.append(f"vLLM listens on {flags.get('--port')}, the container opens {box['ports'][0]['containerPort']}")
    if int(flags.get("--max-num-batched-tokens", 0)) < int(flags.get("--max-num-seqs", 0)):
        found.append("the token budget cannot decode all sequences in one step")
    return found


def probing(box: dict) -> list[str]:
    """Three probes on /health at the container's port; the start may take ten minutes."""
    found, names = [], {port["name"] for port in box["ports"]}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = box.get(kind, {}).get("httpGet", {})
        if (probe.get("path"), probe.get("port") in names) != ("/health", True):
            found.append(f"{kind} asks {probe}")
    start = box.get("startupProbe", {})
    if start.get("periodSeconds", 10) * start.get("failureThreshold", 3) < 600:
        found.append("startupProbe gives up before the weights are loaded")
    return found


def memory(documents: dict) -> list[str]:
    """One whole GPU, asked for as it is limited; shared memory; no secret in the text."""
    found, box = [], container(documents)
    asked, limited = (box["resources"][part].get("nvidia.com/gpu") for part in ("requests", "limits"))
    if asked != limited or asked != "1":
        found.append(f"GPU requests {asked}, limits {limited}")
    if box["resources"]["requests"]["memory"] != box["resources"]["limits"]["memory"]:
        found.append("memory requests and limits differ")
    volumes = {volume["name"]: volume for volume in pod(documents)["volumes"]}
    mounts = {mount["mountPath"]: volumes.get(mount["name"], {}) for mount in box["volumeMounts"]}
    if mounts.get("/dev/shm", {}).get("emptyDir", {}).get("medium") != "Memory":
        found.append("/dev/shm is not memory")
    if "/cache" not in mounts:
        found.append("the weights are fetched again by each pod")
    if any("value" in entry and "TOKEN" in entry["name"] for entry in box.get("env", [])) or SECRET.search(yaml.safe_dump_all(documents.values())):
        found.append("a secret is written in the file")
    return found


def test_the_manifest_has_no_fault():
    documents = manifest()
    assert sorted(documents) == sorted(KINDS)
    assert faults(documents) == []


def flag(text: str, instead: str):
    """A mutation: one argument of the container replaced."""

    def mutate(documents: dict) -> None:
        container(documents)["args"] = [instead if arg.startswith(text) else arg for arg in container(documents)["args"]]

    return mutate


MUTANTS = {
    "apps/v1beta1": lambda d: d["Deployment"].update(apiVersion="apps/v1beta1"),
    "has apiVersion None": lambda d: d.pop("Service"),
    "Deployment selects": lambda d: d["Deployment"]["spec"]["selector"].update(matchLabels={"app": "other"}),
    "Service selects": lambda d: d["Service"]["spec"].update(selector={}),
    "Service targets": lambda d: d["Service"]["spec"]["ports"][0].update(targetPort="metrics"),
    "volumes claim": lambda d: d["PersistentVolumeClaim"]["metadata"].update(name="other"),
    "not pinned": lambda d: container(d).update(image="vllm/vllm-openai:latest"),
    "pinned by version": lambda d: container(d).update(image="vllm/vllm-openai"),
    "takes the model": lambda d: container(d)["args"].pop(0),
    "--max-num-seq is no known": flag("--max-num-seqs", "--max-num-seq=128"),
    "has no value": flag("--watermark", "--watermark"),
    "vLLM listens on 8080": flag("--port", "--port=8080"),
    "cannot decode all": flag("--max-num-batched-tokens", "--max-num-batched-tokens=64"),
    "readinessProbe asks": lambda d: container(d)["readinessProbe"]["httpGet"].update(path="/"),
    "livenessProbe asks": lambda d: container(d)["livenessProbe"]["httpGet"].update(port=8080),
    "startupProbe asks": lambda d: container(d).pop("startupProbe"),
    "gives up": lambda d: container(d)["startupProbe"].update(failureThreshold=3),
    "GPU requests None": lambda d: container(d)["resources"]["requests"].pop("nvidia.com/gpu"),
    "GPU requests 1, limits 2": lambda d: container(d)["resources"]["limits"].update({"nvidia.com/gpu": "2"}),
    "memory requests": lambda d: container(d)["resources"]["requests"].update(memory="8Gi"),
    "/dev/shm is not memory": lambda d: pod(d)["volumes"][1].update(emptyDir={}),
    "fetched again": lambda d: container(d)["volumeMounts"].pop(0),
    "a secret is written": lambda d: container(d)["env"].append({"name": "HF_TOKEN", "value": "anything"}),
    "secret is written": lambda d: container(d)["args"].append("--served-model-name=hf_abcdefghijkl"),
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_each_fault_is_found(fault):
    documents = deepcopy(manifest())
    MUTANTS[fault](documents)
    assert any(fault in line for line in faults(documents)), faults(documents)


def test_the_readme_says_what_was_not_done():
    text = (FILE.parent / "README.md").read_text(encoding="utf-8")
    assert "not run on a cluster" in text and FILE.name in text


# ---- the two tables that lesson 09 reads ------------------------------------------------------------------------------

CLASSES = {"a", "b", "batch", "capacity", "first", "passes", "none"}


def test_every_knob_says_what_it_changes_and_where_it_was_read():
    rows = catalog.read_table("server_knobs.csv")
    assert {"vllm", "sglang", "tensorrt-llm", "dynamo", "llm-d", "kserve", "gateway-api-inference-extension"} <= {row["engine"] for row in rows}
    for row in rows:
        assert row["changes"].partition(":")[0] in CLASSES, row
        assert all(row.values()) and re.fullmatch(r"\d{4}-\d\d-\d\d", row["seen"]), row
        assert re.search(r"@[0-9a-f]{7}|\(package\)|^page: ", row["source"]), row
    keys = [(row["engine"], row["quantity"], row["knob"]) for row in rows]
    assert len(keys) == len(set(keys))


def test_the_course_scheduler_has_a_counterpart_in_each_engine():
    """What `Limits` can set, each of the three engines can set too, under its own name."""
    rows = catalog.read_table("server_knobs.csv")
    for engine in ("vllm", "sglang", "tensorrt-llm"):
        quantities = {row["quantity"] for row in rows if row["engine"] == engine}
        assert {"max_sequences", "token_budget", "page_tokens", "reserve", "kv_memory", "preemption"} <= quantities, engine
