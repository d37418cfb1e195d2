"""The manifests under deploy/kubernetes, as written and as kustomize renders them."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import Config, load_config
from tests.support.documented import blocks

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu", "taught")  # the last is cpu with a teacher, added as docs/kubernetes.md says
# Patches of documents in other files.
PATCHES = {"overlays/cpu/wait-for-data.yaml", "overlays/gpu/generator.yaml", "overlays/gpu/learner.yaml"}
RUN = "/etc/run/run.yaml"
# The oldest Kubernetes that has all the manifests use without a feature gate, and the newest we know.
VERSIONS = ("1.33", "1.37")
Document = dict[str, Any]


def files() -> list[Path]:
    """All YAML files except kustomize's own and the runs'."""
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
            with _overlay(overlay) as folder:
                ran = subprocess.run([*command, folder], capture_output=True, text=True, check=False)
            assert ran.returncode == 0, ran.stderr
            return ran.stdout
    pytest.skip("neither kustomize nor kubectl is installed")


@contextmanager
def _overlay(name: str) -> Iterator[Path]:
    """The folder of an overlay; of `taught` in a copy."""
    if name != "taught":
        yield FOLDER / "overlays" / name
        return
    (addition,) = blocks("kubernetes.md", "A teacher", "yaml")
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(FOLDER, copy, dirs_exist_ok=True)
        folder = Path(copy, "overlays", "cpu")
        path = folder / "kustomization.yaml"
        kustomization, added = (yaml.safe_load(text) for text in (path.read_text(encoding="utf-8"), addition))
        kustomization["components"] = added["components"]
        kustomization["configMapGenerator"] += added["configMapGenerator"]
        path.write_text(yaml.safe_dump(kustomization), encoding="utf-8")
        yield folder


def rendered(overlay: str) -> list[Document]:
    """The documents as applied; skips the test if no tool can render them."""
    return list(yaml.safe_load_all(_rendered(overlay)))


def of_kind(documents: list[Document], *kinds: str) -> dict[str, Document]:
    return {document["metadata"]["name"]: document for document in documents if document["kind"] in kinds}


def workloads(documents: list[Document]) -> dict[str, Document]:
    """Documents that make pods, by name."""
    return of_kind(documents, "Deployment", "StatefulSet", "DaemonSet", "Job")


def pod(workload: Document) -> Document:
    return dict(workload["spec"]["template"]["spec"])


def container(workload: Document) -> Document:
    (only,) = pod(workload)["containers"]
    return dict(only)


def command(workload: Document) -> list[str]:
    only = container(workload)
    return [*only["command"], *only.get("args", [])]


def environment(workload: Document, documents: list[Document], index: int = 0) -> dict[str, str]:
    """The environment of its container, in the pod with this completion index."""
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
        value = entry.get("value")
        values[entry["name"]] = paths[entry["valueFrom"]["fieldRef"]["fieldPath"]] if value is None else value
    # A Job's controller sets one of its own.
    return values | ({"JOB_COMPLETION_INDEX": str(index)} if workload["kind"] == "Job" else {})


def processes(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """Workloads that read the run's configuration."""
    for name, workload in workloads(documents).items():
        if RUN in command(workload):
            yield name, workload


def configuration(overlay: str, environ: dict[str, str]) -> Config:
    """The run as a process with this environment reads it."""
    folder = "cpu" if overlay == "taught" else overlay
    return load_config(FOLDER / "overlays" / folder / "run.yaml", environ=environ)
