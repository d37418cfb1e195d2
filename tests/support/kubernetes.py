"""The manifests under deploy/kubernetes: as they are written, and as kustomize renders them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import Config, load_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu")
# Changes to documents that stand elsewhere.
PATCHES = {"overlays/cpu/wait-for-data.yaml", "overlays/gpu/generator.yaml", "overlays/gpu/learner.yaml"}
RUN = "/etc/run/run.yaml"
# Kubernetes from which on all that the manifests use is there without a feature gate, and the newest we know.
VERSIONS = ("1.33", "1.37")
Document = dict[str, Any]


def files() -> list[Path]:
    """All YAML files, but for kustomize's own and the runs'."""
    return [path for path in sorted(FOLDER.rglob("*.yaml")) if path.name not in ("kustomization.yaml", "run.yaml")]


def written() -> list[tuple[str, Document]]:
    """Whole documents as they are written, before any overlay, each with its file."""
    named = {str(path.relative_to(FOLDER)): path.read_text(encoding="utf-8") for path in files()}
    return [
        (name, document) for name, text in named.items() if name not in PATCHES for document in yaml.safe_load_all(text)
    ]


@cache
def _rendered(overlay: str) -> str:
    for command in (["kustomize", "build"], ["kubectl", "kustomize"]):
        if shutil.which(command[0]):
            ran = subprocess.run([*command, FOLDER / "overlays" / overlay], capture_output=True, text=True, check=False)
            assert ran.returncode == 0, ran.stderr
            return ran.stdout
    pytest.skip("neither kustomize nor kubectl is installed")


def rendered(overlay: str) -> list[Document]:
    """What would be applied; skips the test where nothing can render it."""
    return list(yaml.safe_load_all(_rendered(overlay)))


def of_kind(documents: list[Document], *kinds: str) -> dict[str, Document]:
    """Documents of these kinds, by name."""
    return {document["metadata"]["name"]: document for document in documents if document["kind"] in kinds}


def workloads(documents: list[Document]) -> dict[str, Document]:
    """What makes pods, by name."""
    return of_kind(documents, "Deployment", "StatefulSet", "DaemonSet", "Job")


def pod(workload: Document) -> Document:
    """The specification of its pods."""
    return dict(workload["spec"]["template"]["spec"])


def container(workload: Document) -> Document:
    """Its one container."""
    (only,) = pod(workload)["containers"]
    return dict(only)


def command(workload: Document) -> list[str]:
    """Command and arguments, as they start."""
    only = container(workload)
    return [*only["command"], *only.get("args", [])]


def environment(workload: Document, documents: list[Document], index: int = 0) -> dict[str, str]:
    """What its container finds in its environment, in the pod with this completion index."""
    maps, only = of_kind(documents, "ConfigMap"), container(workload)
    values: dict[str, str] = {}
    for source in only.get("envFrom", []):
        values |= maps[source["configMapRef"]["name"]]["data"]
    paths = {
        "spec.nodeName": "node-1",
        "status.podIP": "10.0.0.7",
        "metadata.labels['batch.kubernetes.io/job-completion-index']": str(index),
    }
    for entry in only.get("env", []):
        given = entry.get("value")
        values[entry["name"]] = paths[entry["valueFrom"]["fieldRef"]["fieldPath"]] if given is None else given
    # A Job's controller sets one of its own.
    return values | ({"JOB_COMPLETION_INDEX": str(index)} if workload["kind"] == "Job" else {})


def processes(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """Workloads that read the run's configuration."""
    for name, workload in workloads(documents).items():
        if RUN in command(workload):
            yield name, workload


def configuration(overlay: str, environ: dict[str, str]) -> Config:
    """The run as a process with this environment reads it."""
    return load_config(FOLDER / "overlays" / overlay / "run.yaml", environ=environ)
